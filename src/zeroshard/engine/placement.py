"""The engine's calls that move its state between device and host.

The first argument of a public function is ``self``: libraries inspect the signatures of methods.
"""

from __future__ import annotations

from typing import Any


def offload_states(
    self: Any,
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
    self.life.check()
    self._offloader.offload(include, device, pin_memory=pin_memory, non_blocking=non_blocking)


def reload_states(self: Any, non_blocking: bool = False) -> None:
    """Move back to the device all that :meth:`offload_states` moved. Every rank calls it."""
    self.life.check()
    self._offloader.reload(non_blocking=non_blocking)


def empty_partition_cache(self: Any) -> None:
    """Free gathered parameters until their next use, and memory kept for :meth:`offload_states`.

    Every rank calls it, between steps.
    """
    self.life.check()
    self.runtime.prefetcher.reshard_all()
    self._offloader.forget_spare()
