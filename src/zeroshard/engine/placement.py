"""The engine's calls that move or cast what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeroshard.engine.offload_states import asked_of_to, check_keeps, is_return
from zeroshard.errors import UsageError


def offload_states(
    engine: Any,
    include: Any = None,
    device: Any = "cpu",
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move training state from the device to host memory until :meth:`reload_states` is called.

    Every rank calls it. It works at every stage. State that the configuration stores in host memory
    or on disk is not moved. ``include``: some of ``optim_states``, ``hp_params`` (masters),
    ``lp_params`` (parameters; in fp32 they are their own masters) and ``lp_grads``; None: all. While
    state is offloaded, calls that need it raise :class:`UsageError`. Views of parameters or
    optimizer state that the program made before must not be read. ``non_blocking``: the copies may
    still run when this returns, and freed memory stays in torch's cache. Pinned memory is kept for
    the next call; :meth:`empty_partition_cache` frees it.
    """
    engine.life.check()
    engine._offloader.offload(include, device, pin_memory=pin_memory, non_blocking=non_blocking)


def reload_states(engine: Any, non_blocking: bool = False) -> None:
    """Move back to the device all that :meth:`offload_states` moved. Every rank calls it."""
    engine.life.check()
    engine._offloader.reload(non_blocking=non_blocking)


def empty_partition_cache(engine: Any) -> None:
    """Free gathered parameters until their next use, and memory kept for :meth:`offload_states`.

    Every rank calls it, between steps.
    """
    engine.life.check()
    engine.runtime.prefetcher.reshard_all()
    engine._offloader.forget_spare()


def to(engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Offload, reload, or cast buffers, depending on the arguments.

    To ``"cpu"``: :meth:`offload_states`. To the engine's own device, which on CPU ranks is
    ``"cpu"``: :meth:`reload_states`. To the parameters' dtype, as in :meth:`half`: cast buffers.

    Raises:
        UsageError: another device or dtype.
    """
    device, dtype = asked_of_to(args, kwargs)
    home = device is None or is_return(device, engine.device)
    if dtype is not None:
        engine._apply(lambda held: held.to(dtype) if held.is_floating_point() else held)
    if device is not None:
        if home:
            engine.reload_states()
        else:
            engine.offload_states()
    return engine


def cpu(engine: Any) -> Any:
    """See :meth:`to`."""
    return engine.to("cpu")


def cuda(engine: Any, device: int | torch.device | None = None) -> Any:
    """See :meth:`to`."""
    return engine.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")


def apply_to_buffers(engine: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Change buffers by ``fn``. ``half()``, ``bfloat16()``, ``float()`` and ``type()`` call this.

    Raises:
        UsageError: ``fn`` would change a parameter.
    """
    engine.life.check()
    check_keeps(fn, engine.module.parameters(), engine.device)
    for module in engine.module.modules() if recurse else ():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
    return engine


def to_empty(_engine: Any, **_: Any) -> Any:
    """Refused, because the values of the parameters would be lost."""
    raise UsageError(
        "engine.to_empty() would delete the trained values. To start without values, build "
        "the model on the meta device and pass it to the engine."
    )


def share_memory(_engine: Any) -> Any:
    """Refused, because the engine frees and allocates the memory of parameters."""
    raise UsageError(
        "engine.share_memory(): parameters are views of memory that the engine frees and "
        "allocates. Share a copy of the model, for instance from engine.save_16bit_model()."
    )
