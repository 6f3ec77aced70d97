"""Builds the configured optimizer, and probes whether it may update parts of parameters.

Every optimizer here is a ``torch.optim.Optimizer`` that does not know that it is sharded. The engine
gives it 1-D fragments if it works element by element, and whole parameters otherwise. :func:`probe` finds
out by trying. Results do not depend on the cuts as long as fragments start at multiples of 64 elements of
their parameter, as the layout guarantees: fused CPU kernels compute a tensor's last few elements in
scalar code, which rounds differently from their SIMD code.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer

from zeroshard.config.keys import nearest
from zeroshard.config.params import OPTIMIZERS
from zeroshard.device.choice import ops_of
from zeroshard.errors import ConfigError, UnsupportedError
from zeroshard.memory.storage import real_view
from zeroshard.optim.kernels import steps_chunk_by_chunk
from zeroshard.optim.optimizers import FlexibleAdam, Group, Lamb, Lion, Muon
from zeroshard.optim.state_tree import flat, grown, is_keepable, is_nested, unkeyed
from zeroshard.optim.step_hooks import without_hooks

__all__ = [
    "FlexibleAdam",
    "Lamb",
    "Lion",
    "Muon",
    "Probe",
    "build_optimizer",
    "needs_whole_parameters",
    "probe",
    "rebind",
]

_FUSED_DEVICES = ("cpu", "cuda", "meta")
_NUMEL = 128 * 96
_CUT = 67 * 64  # elements: a legal cut, and both parts exceed 4096, where 8-bit optimizers begin
_STEPS = 3
_STEPS_OF_UNKNOWN = 12  # some classes change what they do after five or ten
_ATTRIBUTES_OF_TORCH = ("step", "zero_grad", "train", "eval", "state", "param_groups", "defaults")
_PLAIN = (int, float, str, type, FunctionType, BuiltinFunctionType, functools.partial)
_HINTS = ("foreach", "fused", "set_grad_none")  # choose between kernels, which the engine does


def build_optimizer(
    type_: str,
    params: Mapping[str, Any],
    groups: Sequence[Group],
    *,
    fused: bool,
    state_dtype: torch.dtype | None = None,
) -> Optimizer:
    """The optimizer of ``optimizer.type`` and ``.params``, with DeepSpeed's names and defaults.

    ``groups`` are torch parameter groups; options in them override ``params``. For Muon, parameters come
    with names: ``(fqn, parameter)``. ``fused``: use torch's fused kernels if the class has them. They
    need fp32 or fp64 masters, since all their tensors must have one dtype. ``state_dtype``: the dtype of
    Adam's moments, if it differs from that of the parameters it updates.

    "Adam" is AdamW unless ``adam_w_mode`` is false. Both default to no weight decay.

    Raises:
        ConfigError: the name or an argument does not exist, or a value is not allowed.
        UnsupportedError: the option is not supported yet, or not for this optimizer.
    """
    groups = [dict(group) for group in groups]  # torch writes into them
    by_lower = {name.lower(): name for name in OPTIMIZERS}
    name = by_lower.get(type_.lower(), type_)
    options = dict(params)
    if options.pop("max_grad_norm", 0):
        raise ConfigError(
            "optimizer.params.max_grad_norm has no effect, because the engine clips gradients: "
            'write "gradient_clipping" at the top level'
        )
    fused = fused and options.get("fused") is not False
    if name in OPTIMIZERS:
        options = {key: value for key, value in options.items() if key not in _HINTS}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    cls, options = _chosen(type_, name, options, state_dtype)

    known = inspect.signature(cls).parameters
    for key in options:
        if key not in known or key == "params":
            near = nearest(key, [*known])
            hint = f'did you mean "{near}"?' if near else f"it takes {', '.join([*known][1:])}"
            raise ConfigError(f"optimizer.params.{key}: {type_} has no such argument; {hint}")
    if fused and "fused" in known and _can_fuse(groups):
        options["fused"] = True
    try:
        return cls(groups, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {type_}: {error}") from error


def _chosen(
    type_: str, name: str, options: dict[str, Any], state_dtype: torch.dtype | None
) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    """The class that makes the optimizer, and its options."""
    row = OPTIMIZERS.get(name)
    if state_dtype is not None and not (row and row.narrow_state):
        raise UnsupportedError(
            f"{type_} keeps its state in the dtype of the parameters it updates; moments in "
            f"{state_dtype} exist for Adam and AdamW only"
        )
    if row is None:
        return _torch_class(type_, name), options
    module, _, attribute = row.made_by.partition(":")
    made_by: Any = getattr(importlib.import_module(module), attribute)
    if isinstance(made_by, type):
        return made_by, options
    chosen: tuple[Callable[..., Optimizer], dict[str, Any]] = made_by(name, options, state_dtype)
    return chosen


def choose_adagrad(
    _name: str, options: dict[str, Any], _state_dtype: torch.dtype | None
) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    """``torch.optim.Adagrad`` without its first allocation."""
    return _adagrad, options


@functools.wraps(torch.optim.Adagrad)
def _adagrad(groups: Sequence[Group], **options: Any) -> Optimizer:
    """The constructor would make state as large as the parameters: it gets their shapes alone, then the
    parameters take their places."""
    optimizer = torch.optim.Adagrad(_shapes(groups), **options)
    members = [_tensors(group) for group in groups]
    rebind(optimizer, members, fresh_state=False)
    return optimizer


def _shapes(groups: Iterable[Group]) -> list[Group]:
    """The groups without memory, because Adagrad's constructor makes state as large as its parameters."""
    return [
        {**group, "params": [torch.empty_like(p, device="meta") for p in _tensors(group)]}
        for group in groups
    ]


def choose_adam(
    name: str, options: dict[str, Any], state_dtype: torch.dtype | None
) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    decoupled = options.pop("adam_w_mode", True) or name == "AdamW"
    if options.pop("torch_adam", False):
        options.pop("bias_correction", None)
        options.pop("fp32_optimizer_states", None)
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), options
    options.setdefault("weight_decay", 0.0)
    if not options.pop("fp32_optimizer_states", True):
        state_dtype = None
    correct = options.pop("bias_correction", True)
    if correct and state_dtype is None:
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), options
    if options.pop("amsgrad", False):
        raise UnsupportedError(
            "amsgrad exists only with bias_correction and with moments in the parameters' dtype"
        )
    word = None if state_dtype is None else str(state_dtype).removeprefix("torch.")
    options |= {"decoupled": decoupled, "bias_correction": correct, "state_dtype": word}
    return FlexibleAdam, options


def choose_lamb(
    _name: str, options: dict[str, Any], _state_dtype: torch.dtype | None
) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    """Lamb. Raises :class:`UnsupportedError` for ``amsgrad``."""
    if options.pop("amsgrad", False):
        raise UnsupportedError("Lamb has no variant with amsgrad; leave it out")
    return Lamb, options


def choose_muon(
    _name: str, options: dict[str, Any], _state_dtype: torch.dtype | None
) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    """Muon. Raises :class:`UnsupportedError` for ``per_head_muon``."""
    if options.pop("per_head_muon", False):
        raise UnsupportedError("per_head_muon is planned, not implemented yet; leave it out")
    options.pop("ns_method", None)  # the same matrix by another order of products
    return Muon, options


def _torch_class(type_: str, name: str) -> type[Optimizer]:
    classes = {
        key: cls
        for key, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    if name not in classes:
        near = nearest(type_, [*classes, *OPTIMIZERS])
        hint = f'did you mean "{near}"? ' if near else ""
        *others, last = sorted(OPTIMIZERS)
        raise ConfigError(
            f'optimizer.type "{type_}" does not exist; {hint}It is {", ".join(others)} or {last} '
            "in any case, or the exact name of a class of torch.optim"
        )
    return classes[name]


def _can_fuse(groups: Iterable[Group]) -> bool:
    return all(
        tensor.is_floating_point() and tensor.device.type in _FUSED_DEVICES
        for group in groups
        for tensor in _tensors(group)
    )


def _tensors(group: Group) -> list[Tensor]:
    """The parameters of a group, with or without names."""
    params = group["params"]
    members = [params] if isinstance(params, Tensor) else list(params)
    return [member[1] if isinstance(member, tuple) else member for member in members]


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
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            why = (
                f"{name} wraps another optimizer, {type(value).__name__}, and the engine would replace "
                "the parameters of one of them only. Give the engine the inner one, and do what the "
                "wrapper adds in optimizer.register_step_post_hook"
            )
            return Probe(False, False, why, ())
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return Probe(False, False, f"{name}.step needs a closure that runs the model again", ())
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
    twin = _twin(optimizer, [{**group, "params": params}], lr=0.01)
    if callable(getattr(twin, "train", None)):
        twin.train()  # schedule-free optimizers do not step in their other mode
    before = _numbers(twin.param_groups[0], vars(twin))
    numel = sum(start.numel() for start in starts)
    dtype = starts[0].dtype
    place = torch.arange(at, at + numel, dtype=dtype.to_real(), device=starts[0].device)
    for step in range(_STEPS if steps_chunk_by_chunk(optimizer) else _STEPS_OF_UNKNOWN):
        phase = place * (0.7 + 0.2 * step)
        gradient = _wave(phase, torch.cos, torch.sin, dtype)
        for param, grad in zip(params, gradient.split([p.numel() for p in params]), strict=True):
            param.grad = grad.view_as(param)
        with without_hooks(twin):
            twin.step()
    state = twin.state[params[0]]
    leaves = flat(state)
    shape = params[0].shape
    kept: dict[str, torch.dtype | None] = {
        name: value.dtype if isinstance(value, Tensor) and value.shape == shape else None
        for name, value in leaves.items()
        if value is not None
    }
    shaped = sorted(name for name, dtype in kept.items() if dtype is not None)
    filled = next((dtype for name, dtype in kept.items() if dtype and is_nested(name)), None)
    kept |= {name: filled for name in grown(kept) if name not in kept}
    states = [flat(twin.state[param]) for param in params]
    values = {"": _digests(params)}
    for name in shaped:
        values[name] = _digests([each[name] for each in states])
    numbers = _numbers(twin.param_groups[0], vars(twin), unkeyed(twin.state), leaves) - before
    return _Trial(values, numbers, kept, _uncuttable(state, shape))


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


def _twin(optimizer: Optimizer, groups: Iterable[Group], *, lr: float | None = None) -> Any:
    """A new optimizer of the same class and options with other parameters, without hooks and state.

    Options are those of the groups, ``defaults``, and attributes of the object with plain values. ``lr``
    replaces the learning rate, which a schedule may have set to 0, so that steps would do nothing.
    """
    known = inspect.signature(type(optimizer)).parameters

    def options(source: Group) -> Group:
        kept = {key: value for key, value in source.items() if key not in ("params", "param_names")}
        if lr is not None and kept.get("lr") is not None:
            kept["lr"] = lr
        return copy.deepcopy(kept)

    defaults = {key: value for key, value in optimizer.defaults.items() if key in known}
    attributes = {key: value for key, value in vars(optimizer).items() if _is_option(key, value)}
    for key, argument in known.items():
        if argument.default is inspect.Parameter.empty and key in attributes:
            defaults.setdefault(key, attributes[key])
    members = [{**options(group), "params": list(group["params"])} for group in groups]
    if any(_is_missing(argument, defaults) for argument in [*known.values()][1:]):
        # Nothing tells with which arguments it was made.
        twin: Any = object.__new__(type(optimizer))
        Optimizer.__init__(twin, members, options(optimizer.defaults))
    else:
        twin = type(optimizer)(members, **options(defaults))
    vars(twin).update(copy.deepcopy(attributes))
    return twin


def _is_missing(argument: inspect.Parameter, defaults: Group) -> bool:
    """Whether a constructor needs an argument that is not known."""
    named = argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    return named and argument.default is argument.empty and argument.name not in defaults


def _is_option(key: str, value: Any) -> bool:
    """Whether an attribute of an optimizer is an option that a new one must get too."""
    if key in _ATTRIBUTES_OF_TORCH or key.startswith("_optimizer_"):
        return False
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_option("", item) for item in value)
    if isinstance(value, dict):
        return all(_is_option("", item) for pair in value.items() for item in pair)
    return value is None or isinstance(value, _PLAIN)


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


def rebind(
    optimizer: Optimizer, params: Sequence[Sequence[Tensor]], *, fresh_state: bool = True
) -> None:
    """Make ``optimizer`` update other tensors, ``params[g]`` in group ``g``, without its old state.

    The groups stay the same dicts, so schedules keep working. State that a class makes in its constructor
    is made for the new tensors, unless ``fresh_state`` is false. A group may become empty, on a rank that
    owns none of its parameters.
    """
    for group, tensors in zip(optimizer.param_groups, params, strict=True):
        group["params"] = list(tensors)
        group.pop("param_names", None)
    optimizer.state.clear()
    if fresh_state:
        with suppress(Exception):  # the constructor needs more than groups: step() makes the state
            optimizer.state.update(_twin(optimizer, optimizer.param_groups).state)
