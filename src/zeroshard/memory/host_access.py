"""Says which memory is read and written by code that torch does not see.

Compiled code, disk threads and kernels that are launched without torch's dispatcher call these functions.
In production they do nothing. :mod:`zeroshard_testing.streams` listens, and so proves that such code
comes after all that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Listener = Callable[[Sequence[Tensor], Sequence[Tensor], bool], None]
"""Called with the tensors read, the tensors written, and whether a device does it."""

listeners: list[Listener] = []
"""Empty in production. A hot path looks here before it calls, and so pays nothing."""


def host_access(reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
    """The calling thread reads and writes host memory now, until it returns to its caller."""
    for listener in listeners:
        listener(reads, writes, False)


def kernel_access(reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
    """A kernel that reads and writes device memory was queued on the current stream."""
    for listener in listeners:
        listener(reads, writes, True)


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` at each access. Returns a function that ends this."""
    listeners.append(listener)
    return lambda: listeners.remove(listener)
