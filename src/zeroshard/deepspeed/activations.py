"""Activation checkpointing under DeepSpeed's names.

``checkpoint`` is ``torch.utils.checkpoint``. ``configure`` stores its choices, which are about the
tensors that checkpointed functions are called with. With ``checkpoint_in_cpu`` they are kept in host
memory until backward. With ``partition_activations`` each tensor rank keeps a part of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _checkpoint

from zeroshard.deepspeed import groups
from zeroshard.deepspeed.config_model import model_config
from zeroshard.deepspeed.device import get_accelerator
from zeroshard.deepspeed.partitioned_activations import PartitionedActivations
from zeroshard.deepspeed.rng_tracker import _MODEL_PARALLEL_RNG_TRACKER_NAME, RNGStatesTracker
from zeroshard.device.choice import accelerator_type
from zeroshard.errors import UsageError

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


_CUDA_RNG_STATE_TRACKER = RNGStatesTracker(_tensor_rank)


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
