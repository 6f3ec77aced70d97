"""Probes whether an optimizer may update parts of parameters.

The engine gives an optimizer 1-D fragments if it works element by element, and whole parameters
otherwise. :func:`probe` finds out by trying. Results do not depend on the cuts as long as fragments start
at multiples of 64 elements of their parameter, as the layout guarantees: fused CPU kernels compute a
tensor's last few elements in scalar code, which rounds differently from their SIMD code.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer

from zeroshard.device.choice import ops_of
from zeroshard.memory.storage import real_view
from zeroshard.optim.inner_optimizer import twin_of, without_hooks
from zeroshard.optim.kernels import steps_chunk_by_chunk
from zeroshard.optim.optimizers import Group
from zeroshard.optim.state_tree import flat, grown, is_keepable, is_nested, unkeyed

_NUMEL = 128 * 96
_CUT = 67 * 64  # elements: a legal cut, and both parts exceed 4096, where 8-bit optimizers begin
_STEPS = 3
_STEPS_OF_UNKNOWN = 12  # some classes change what they do after five or ten


@dataclass(frozen=True)
class Probe:
    """What an optimizer does with parts of a parameter.

    ``elementwise``: a parameter cut in two gives the same bits. ``works``: the optimizer can be used, at
    least with whole parameters. ``reason``: why one of these is false. ``state_by_group``: for each
    parameter group, the dtype by name of state shaped like the parameter, and None for other state.
    """

    elementwise: bool
    works: bool
    reason: str
    state_by_group: tuple[dict[str, torch.dtype | None], ...]

    @property
    def state(self) -> dict[str, torch.dtype | None]:
        """``state_by_group`` of all groups together."""
        return {name: dtype for group in self.state_by_group for name, dtype in group.items()}


def needs_whole_parameters(optimizer: Optimizer) -> bool:
    """Whether the layout must not cut a parameter of this optimizer."""
    return not probe(optimizer).elementwise


def probe(optimizer: Optimizer, *, dtype: torch.dtype = torch.float32) -> Probe:
    """Try the optimizer's class and options on a small matrix of ``dtype``, whole and cut in two.

    Each group's options are tried separately, for some steps. The two parts belong to two optimizers, as
    on two ranks, and then to one, unless the class is known to count by parameter: so anything that is
    summed over parameters or counts them shows.
    Neither ``optimizer`` nor a random number generator is changed. Takes a few milliseconds per group, on
    the device of the parameters.
    """
    name = type(optimizer).__name__
    if why := _unusable(optimizer):
        return Probe(False, False, why, ())
    devices = [p.device for group in optimizer.param_groups for p in group["params"]]
    device = next((d for d in devices if d.type != "meta"), torch.device("cpu"))
    state: list[dict[str, torch.dtype | None]] = []
    reason = ""
    with unset_fake_temporarily(), _random_untouched(device):
        places = torch.arange(_NUMEL, dtype=dtype.to_real(), device=device)
        matrix = _wave(places, torch.sin, torch.cos, dtype).view(128, 96)
        del places  # its memory would count to the peak of a small model
        for group in optimizer.param_groups:
            if dtype.is_complex and all(p.dtype != dtype for p in group["params"]):
                state.append({})  # its options may be those of real parameters, such as "fused"
                continue
            try:
                whole = _try(optimizer, group, [matrix])
            except Exception as error:
                kind = "complex matrix" if dtype.is_complex else "matrix"
                why = f"{name} fails on a small {kind}: {type(error).__name__}: {error}"
                return Probe(False, False, why, ())
            state.append(whole.state)
            reason = reason or _difference(optimizer, group, matrix, whole)
            if not reason and not steps_chunk_by_chunk(optimizer):
                reason = _small_difference(optimizer, group, matrix)
    return Probe(not reason, True, reason, tuple(state))


def _unusable(optimizer: Optimizer) -> str:
    """Why the engine cannot call the optimizer's ``step`` at all; empty if it can."""
    name = type(optimizer).__name__
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            return (
                f"{name} wraps another optimizer, {type(value).__name__}, and the engine would replace "
                "the parameters of one of them only. Give the engine the inner one, and do what the "
                "wrapper adds in optimizer.register_step_post_hook"
            )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"{name}.step needs a closure that runs the model again"
    return ""


def _difference(optimizer: Optimizer, group: Group, matrix: Tensor, whole: _Trial) -> str:
    """What an update of parts changes, as a reason; empty if nothing."""
    name = type(optimizer).__name__
    if whole.uncuttable:
        return f"{name} keeps state {whole.uncuttable}"
    try:
        parts = torch.split(matrix.flatten(), [_CUT, matrix.numel() - _CUT])
        first = _try(optimizer, group, parts[:1])
        second = _try(optimizer, group, parts[1:], _CUT)
        # Known classes are stepped chunk by chunk, so they never see two parts together.
        both = None if steps_chunk_by_chunk(optimizer) else _try(optimizer, group, parts)
    except Exception as error:
        return f"{name} fails on a piece of a matrix: {type(error).__name__}: {error}"
    if not _equal(whole, first, second):
        return (
            f"{name} gives other results for a matrix that is split in two, so it needs whole "
            "parameters"
        )
    if both is None:
        return ""
    if not _equal(whole, both):
        return (
            f"{name} gives other results for the two parts of a matrix in one group: what it counts "
            "for the group or for itself depends on how many parameters there are"
        )
    counted = {key for t in (first, second, both) for key, _ in t.numbers ^ whole.numbers}
    if counted:  # unless it is random, or the time
        counted -= {key for key, _ in whole.numbers ^ _try(optimizer, group, [matrix]).numbers}
    if counted:
        return (
            f"{name} computes {min(counted)!r} from many elements, and each rank has a part of them"
        )
    return ""


def _small_difference(optimizer: Optimizer, group: Group, matrix: Tensor) -> str:
    """:func:`_difference` in fp64: one that rounding hides here would be seen at other magnitudes."""
    if matrix.dtype == torch.float64:
        return ""
    try:
        fine = matrix.double()
        whole = _try(optimizer, group, [fine])
    except Exception:  # a class, or a device, without fp64
        return ""
    return _difference(optimizer, group, fine, whole)


@dataclass(frozen=True)
class _Trial:
    """After some steps: digests of all parameters, and of state of their shape by name; numbers of the
    group and the optimizer that have changed, as text; dtypes of state.

    State counts too: what it adds up over many elements may reach parameters only after many steps.
    """

    values: dict[str, list[bytes]]
    numbers: set[tuple[str, str]]
    state: dict[str, torch.dtype | None]
    uncuttable: str


def _try(optimizer: Optimizer, group: Group, starts: Sequence[Tensor], at: int = 0) -> _Trial:
    """Steps from ``starts``. Gradients depend on the position, which begins at ``at``."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    ops_of(starts[0].device).manual_seed(0)
    params = [start.clone().requires_grad_() for start in starts]
    twin = twin_of(optimizer, [{**group, "params": params}], lr=0.01)
    if callable(getattr(twin, "train", None)):
        twin.train()  # schedule-free optimizers do not step in their other mode
    before = _numbers(twin.param_groups[0], vars(twin))
    steps = _STEPS if steps_chunk_by_chunk(optimizer) else _STEPS_OF_UNKNOWN
    for gradient in _gradients(starts, at, steps):
        for param, grad in zip(params, gradient.split([p.numel() for p in params]), strict=True):
            param.grad = grad.view_as(param)
        with without_hooks(twin):
            twin.step()
    states = [flat(twin.state[param]) for param in params]
    kept = _kept(states[0], params[0].shape)
    values = {"": _digests(params)}
    for name in sorted(name for name, dtype in kept.items() if dtype is not None):
        values[name] = _digests([each[name] for each in states])
    numbers = _numbers(twin.param_groups[0], vars(twin), unkeyed(twin.state), states[0]) - before
    uncuttable = _uncuttable(twin.state[params[0]], params[0].shape)
    return _Trial(values, numbers, kept | _to_come(kept), uncuttable)


def _gradients(starts: Sequence[Tensor], at: int, steps: int) -> Iterator[Tensor]:
    """The gradient of all parameters in each step, as one flat tensor."""
    numel, dtype = sum(start.numel() for start in starts), starts[0].dtype
    place = torch.arange(at, at + numel, dtype=dtype.to_real(), device=starts[0].device)
    for step in range(steps):
        yield _wave(place * (0.7 + 0.2 * step), torch.cos, torch.sin, dtype)


def _kept(leaves: Mapping[str, Any], shape: torch.Size) -> dict[str, torch.dtype | None]:
    """The dtype by name of state that has the parameter's shape, and None for other state."""
    return {
        name: value.dtype if isinstance(value, Tensor) and value.shape == shape else None
        for name, value in leaves.items()
        if value is not None
    }


def _to_come(kept: Mapping[str, torch.dtype | None]) -> dict[str, torch.dtype | None]:
    """What nested state will have beside this when it is filled."""
    filled = next((dtype for name, dtype in kept.items() if dtype and is_nested(name)), None)
    return {name: filled for name in grown(kept) if name not in kept}


def _digests(tensors: Sequence[Tensor]) -> list[bytes]:
    """Digests of the values of each tensor; of one that is whole, of its two parts."""
    parts = [tensor.detach().flatten() for tensor in tensors]
    if len(parts[0]) == _NUMEL:
        parts = [parts[0][:_CUT], parts[0][_CUT:]]
    return [_digest(part) for part in parts]


def _digest(flat: Tensor) -> bytes:
    """Equal for equal values; both zeros are equal. Memory for a copy would count to a model's peak."""
    found = hashlib.blake2b()
    for piece in flat.split(4096):
        values = real_view(piece + torch.zeros_like(piece)).cpu()
        found.update(values.view(torch.uint8).numpy().data)
    return found.digest()


def _equal(whole: _Trial, *parts: _Trial) -> bool:
    """Whether the parts, one after the other, have the values of the whole."""
    joined = {
        name: [each for part in parts for each in part.values.get(name, ())]
        for name in whole.values
    }
    return joined == whole.values and all(part.values.keys() == joined.keys() for part in parts)


_Wave = Callable[[Tensor], Tensor]


def _wave(phase: Tensor, real: _Wave, imag: _Wave, dtype: torch.dtype) -> Tensor:
    return torch.complex(real(phase), imag(phase)) if dtype.is_complex else real(phase)


def _numbers(*owners: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {
        (name, repr(float(value)))
        for owner in owners
        for name, value in owner.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _uncuttable(state: Mapping[str, Any], shape: torch.Size) -> str:
    """What is in the state that belongs neither to single elements nor to all; empty if nothing."""
    for name, value in flat(state).items():
        if not isinstance(value, Tensor):
            if not is_keepable(name, value):
                return f"{name!r}, a {type(value).__name__} instead of tensors and numbers"
        elif value.numel() != 1 and value.shape != shape:
            return (
                f"{name!r}, which has another shape ({tuple(value.shape)} for a parameter of "
                f"{tuple(shape)}) and so belongs to no single element"
            )
    return next((f"{name!r}, a name with '@('" for name in state if is_nested(name)), "")


@contextmanager
def _random_untouched(device: torch.device) -> Iterator[None]:
    state, ops = random.getstate(), ops_of(device)
    own = ops.rng_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        if own is not None:
            ops.set_rng_state(own)
