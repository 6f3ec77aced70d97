"""Activation checkpointing under DeepSpeed's names.

``checkpoint`` is ``torch.utils.checkpoint``. ``configure`` stores its choices, which are about the
tensors that checkpointed functions are called with. With ``checkpoint_in_cpu`` they are kept in host
memory until backward. With ``partition_activations`` each of T tensor ranks keeps 1/T of them: inputs are
equal on all ranks of a tensor group, so each keeps a part, and gathers the parts right before the block
is computed again. Values, and how they lie in memory, are those that were saved, so gradients have the
same bits. Parts are gathered in the order in which backward uses them, which is the same on all tensor
ranks, because they run the same graph.

Tensor ranks draw equal numbers for what they all compute, from the default generator, and different ones
for their parts of weights and of hidden states, inside :meth:`RNGStatesTracker.fork`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as _checkpoint

from zeroshard.deepspeed import groups
from zeroshard.deepspeed.config_model import model_config
from zeroshard.deepspeed.device import get_accelerator
from zeroshard.device.choice import accelerator_type, ops_of
from zeroshard.errors import UsageError
from zeroshard.memory.storage import fingerprint


class _Part(NamedTuple):
    """One saved tensor. ``order``: its axes by decreasing stride; ``part`` is flat in this order."""

    part: Tensor
    order: tuple[int, ...]
    shape: torch.Size  # in this order of the axes
    print: Tensor  # fingerprint of the whole
    device: torch.device


class PartitionedActivations:
    """Partitions saved tensors over ``group``, the tensor ranks of this rank.

    ``on_host``: parts are kept in host memory until they are used.
    """

    def __init__(self, group: dist.ProcessGroup, *, on_host: bool) -> None:
        self._group, self._on_host = group, on_host
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._unread: deque[Tensor] = deque()  # on an accelerator: whether the last ones differed

    def saving(self) -> AbstractContextManager[Any]:
        """A context in which the tensors that autograd saves are partitioned."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> _Part | Tensor:
        order = _order(saved)
        if type(saved) is not Tensor or saved.numel() < self._size or order is None:
            return saved
        dense = saved.detach().permute(order)
        numel = -(-saved.numel() // self._size)
        flat = dense.reshape(-1)  # a view: its axes are in the order of memory
        own = flat[self._rank * numel : (self._rank + 1) * numel]
        device = torch.device("cpu") if self._on_host else saved.device
        pins = self._on_host and saved.device.type != "cpu"
        part = torch.zeros(numel, dtype=saved.dtype, device=device, pin_memory=pins)
        part[: len(own)].copy_(own)
        return _Part(part, order, dense.shape, _print_of(flat), saved.device)

    def _unpack(self, kept: _Part | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        part = kept.part.to(kept.device, non_blocking=True)
        whole = part.new_empty(self._size * part.numel())
        dist.all_gather_into_tensor(_sendable(whole), _sendable(part), group=self._group)
        flat = whole[: kept.shape.numel()]
        self._check(_print_of(flat) != kept.print)
        back = sorted(range(len(kept.order)), key=kept.order.__getitem__)
        return flat.view(kept.shape).permute(back)

    def _check(self, differs: Tensor) -> None:
        """Check that what was gathered is what this rank saved.

        On an accelerator the comparison of one tensor is read when the next one is needed, so that the
        host does not wait.
        """
        self._unread.append(differs)
        while len(self._unread) > (1 if ops_of(differs.device).is_async else 0):
            if bool(self._unread.popleft().any()):
                raise UsageError(
                    "partition_activations: the tensor ranks called a checkpointed function with "
                    'different inputs, so they cannot keep a part each. With the style "sequence" '
                    "inputs are cut already: leave partition_activations out. Else the ranks train on "
                    "different samples: choose them by engine.dp_rank."
                )


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """The axes by decreasing stride; None if the tensor has gaps, or elements that lie at one place."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    return order if tensor.permute(order).is_contiguous() else None


def _print_of(flat: Tensor) -> Tensor:
    """The fingerprint, also of a tensor whose bytes are no multiple of 8."""
    contents = _sendable(flat)
    if rest := contents.numel() % 8:
        contents = torch.cat([contents, contents.new_zeros(8 - rest)])
    return fingerprint(contents)


def _sendable(flat: Tensor) -> Tensor:
    """Bytes: not every backend sends every dtype."""
    return flat.view(torch.uint8)


# ---------------------------------------------------------------------- streams of random numbers


_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_RANK = "tensor rank"
"""The entry of the states that says whose they are: int64 ``[1]``."""


class RNGStatesTracker:
    """The state of one generator of the device for each name.

    ``states_``: uint8 tensors in host memory. ``seeds_``: those that were given.
    """

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all streams."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """The state of each stream and the number of the tensor rank, to be saved; {} without streams."""
        return {**self.states_, _RANK: torch.tensor([_tensor_rank()])} if self.states_ else {}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Continue the streams of :meth:`get_states`.

        The ``client_state`` of a checkpoint is that of rank 0. From the states of another tensor rank
        this one derives its own, the same ones each time: equal ones would give it equal numbers.
        """
        whose, own = states.get(_RANK), _tensor_rank()
        found = {name: state for name, state in states.items() if name != _RANK}
        if whose is None or int(whose) == own:
            self.states_ = found
            return
        with self._kept():
            for name, state in found.items():
                text = bytes(state.tolist()) + own.to_bytes(8, "little")
                get_accelerator().manual_seed(
                    int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
                )
                found[name] = get_accelerator().get_rng_state()
        self.states_ = found

    def add(self, name: str, seed: int) -> None:
        """Begin a stream.

        Raises:
            UsageError: the stream is there already, or another one has this seed.
        """
        if name in self.states_ or seed in self.seeds_:
            what = (
                f"a stream {name!r}" if name in self.states_ else f"a stream with the seed {seed}"
            )
            raise UsageError(
                f"the tracker of random numbers has {what} already, so add({name!r}, {seed}) would "
                "repeat its numbers. Call reset() first to begin anew."
            )
        with self._kept():
            get_accelerator().manual_seed(seed)
            self.states_[name] = get_accelerator().get_rng_state()
        self.seeds_.add(seed)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from the stream in the block. The default generator is as before afterwards.

        Raises:
            UsageError: there is no such stream.
        """
        if name not in self.states_:
            raise UsageError(
                f"the tracker of random numbers has no stream {name!r}. Call "
                "deepspeed.checkpointing.model_parallel_cuda_manual_seed(seed) first, or add() with "
                f"this name. It has {', '.join(map(repr, self.states_)) or 'none'}."
            )
        with self._kept():
            get_accelerator().set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = get_accelerator().get_rng_state()

    def replaying(self, function: Callable[..., object]) -> Callable[..., object]:
        """``function``; calls after the first draw the numbers of the first from all streams.

        They leave the streams as they found them. For activations that are computed again.
        """
        at_first, calls = dict(self.states_), 0

        def run(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 1:
                return function(*args, **kwargs)
            now, self.states_ = self.states_, dict(at_first)
            try:
                return function(*args, **kwargs)
            finally:
                self.states_ = now

        return run

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        before = get_accelerator().get_rng_state()
        try:
            yield
        finally:
            get_accelerator().set_rng_state(before)


# ---------------------------------------------------------------------- checkpoints


_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Keyword arguments that torch's ``checkpoint`` takes. All others are passed to the function."""

_settings: dict[str, Any] = {}


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Store the choices; arguments replace values of the configuration.

    ``checkpoint_in_cpu`` and ``partition_activations`` have an effect: the others arrange memory in ways
    that do not apply here. ``mpu_``: has the tensor group; None: that of the engine's mesh.
    """
    offloads, partitions = checkpoint_in_cpu, partition_activations
    if (offloads is None or partitions is None) and (read := model_config(deepspeed_config)):
        section = read.activation_checkpointing
        offloads = section.cpu_checkpointing if offloads is None else offloads
        partitions = section.partition_activations if partitions is None else partitions
    _settings.clear()
    _settings["cpu"] = bool(offloads)
    _settings["partition"] = bool(partitions)
    _settings["mpu"] = mpu_


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return "cpu" in _settings


def reset() -> None:
    """Nothing: no state is kept from step to step."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args)``; its activations are recomputed in backward. Needs no :func:`configure`."""
    return _run(function, True, args, kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """:func:`checkpoint` without a nested autograd call in backward."""
    return _run(function, False, args, kwargs)


def _run(function: Callable[..., Any], reentrant: bool, args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs and reentrant:
        reentrant = False  # torch's reentrant kind takes no keyword arguments
    if _CUDA_RNG_STATE_TRACKER.states_:
        function = _CUDA_RNG_STATE_TRACKER.replaying(function)
    saving = _saving()
    if saving is None:
        return _checkpoint(function, *args, use_reentrant=reentrant, **kwargs)

    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    count, names = len(args), tuple(kwargs)

    def by_position(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    # torch saves positional arguments, and nothing that the function computes. Keyword arguments
    # would stay on the device.
    with saving:
        values = (*args, *kwargs.values())
        return _checkpoint(by_position, *values, use_reentrant=reentrant, **options)


def _saving() -> AbstractContextManager[Any] | None:
    """A context for saving the inputs of a checkpointed function; None if they stay as they are."""
    offloads = bool(_settings.get("cpu")) and accelerator_type() is not None
    group = _tensor_group() if _settings.get("partition") else None
    if group is not None:
        key = (id(group), offloads)
        if _settings.get("key") != key:
            _settings["key"] = key
            _settings["partitioned"] = PartitionedActivations(group, on_host=offloads)
        partitioned: PartitionedActivations = _settings["partitioned"]
        return partitioned.saving()
    return torch.autograd.graph.save_on_cpu(pin_memory=True) if offloads else None


def _tensor_group() -> Any:
    """The process group of this rank's tensor ranks; None if this rank is the only one."""
    size = _of_tensor_ranks("world_size")
    return None if size is None or size() == 1 else _of_tensor_ranks("group")()


def _tensor_rank() -> int:
    """This rank's number among its tensor ranks."""
    rank = _of_tensor_ranks("rank")
    return 0 if rank is None else int(rank())


def _of_tensor_ranks(what: str) -> Any:
    """The function of the ``mpu`` or of the engine's mesh that answers for the tensor ranks, or None."""
    mpu = _settings.get("mpu") or groups.current()
    for name in ("tensor_model", "slice", "model"):
        found = getattr(mpu, f"get_{name}_parallel_{what}", None)
        if found is not None:
            return found
    return None


class CheckpointFunction:
    """The class whose ``apply`` programs call directly."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """:func:`checkpoint`; outputs are appended to ``all_outputs`` and returned."""
        made = checkpoint(run_function, *args)
        outputs = list(made) if isinstance(made, (tuple, list)) else [made]
        all_outputs += outputs
        return made


def detach_variable(inputs: tuple[Any, ...], device: Any = None) -> tuple[Any, ...]:
    """The tensors of a tuple detached, with their ``requires_grad``; other items unchanged.

    Raises:
        UsageError: ``inputs`` is not a tuple.
    """
    if not isinstance(inputs, tuple):
        raise UsageError(f"detach_variable got a {type(inputs).__name__}; pass a tuple of tensors.")

    def detached(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        moved = value if device is None else value.to(device)
        return moved.detach().requires_grad_(value.requires_grad)

    return tuple(map(detached, inputs))


_CUDA_RNG_STATE_TRACKER = RNGStatesTracker()


def get_cuda_rng_tracker() -> RNGStatesTracker:
    """The tracker of this process."""
    return _CUDA_RNG_STATE_TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator with ``seed``, and a stream of the tracker for each tensor rank.

    Numbers are those of Megatron and DeepSpeed: the seed of tensor rank ``t`` is ``seed + 2718 + t``.
    """
    _CUDA_RNG_STATE_TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, _seed_of_tensor_rank(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Begin the stream of the tensor ranks anew, as :func:`model_parallel_cuda_manual_seed` does."""
    with _CUDA_RNG_STATE_TRACKER.fork():
        get_accelerator().manual_seed(_seed_of_tensor_rank(seed))


def _seed_of_tensor_rank(seed: int) -> int:
    return seed + 2718 + _tensor_rank()


def _set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1) -> None:
    """Set the state of the random generator of a device; -1: the current one."""
    get_accelerator().set_rng_state(new_state, None if device == -1 else device)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set ``partition_activations`` of :func:`configure`."""
    _settings["partition"] = bool(partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Nothing: no buffer depends on the number of layers."""
