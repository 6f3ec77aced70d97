"""The collectives of layers, in process groups that the program opened, recorded for the watchdog.

A layer that is cut over tensor ranks calls ``torch.distributed`` itself, in the group of the mesh that
the model was cut with, and so does attention over sequence ranks. An engine on a mesh has one recorder
for these calls (:func:`watch_layers`), so the watchdog can name the call in which a rank waits, and a
broken connection becomes the diagnosis of all ranks, also in a plain ``loss.backward()``. Without an
engine nothing is recorded.

Only calls that use :func:`calls_in` are recorded. torch's own DTensor operations are not.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.recorder import Item, Recorder


@dataclass(frozen=True, eq=False)
class LayerCalls:
    """What records the calls in one process group.

    ``explanation(error)``: the diagnosis of all ranks for an error of the transport; None: not known.
    """

    recorder: Recorder
    explanation: Callable[[RuntimeError], Exception | None]

    def begin(
        self, name: str, tensor: Tensor, *, op: str = "all_reduce", sent: int | None = None
    ) -> tuple[Item, float]:
        """Record a collective of ``tensor``, which the host waits for until :meth:`end`.

        ``sent``: the elements that this rank sends; None: those of an all-reduce. Returns the arguments
        of :meth:`end`.
        """
        recorder, numel = self.recorder, tensor.numel()
        moved = 2 * numel if sent is None else sent
        item = recorder.enter(recorder.entries(op)[name], tensor, numel, moved)
        return item, recorder.begin_wait(item)

    def end(self, item: Item, began_s: float) -> None:
        """The host goes on. A device is done when the current stream reaches this."""
        self.recorder.end_wait(item, began_s)
        self.recorder.note_pending(item)


#: Not strong: a program may drop its mesh and its engine without closing the engine.
_CALLS: weakref.WeakKeyDictionary[dist.ProcessGroup, LayerCalls] = weakref.WeakKeyDictionary()

_ANNOUNCED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def announce(group: dist.ProcessGroup) -> None:
    """Layers will call ``torch.distributed`` in ``group``. An engine that is built later records that."""
    _ANNOUNCED.add(group)


def announced(ranks: Sequence[int]) -> list[dist.ProcessGroup]:
    """The announced groups over exactly ``ranks`` that still exist."""
    return [group for group in list(_ANNOUNCED) if ranks_of(group) == tuple(ranks)]


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks of a process group, in order; none if it was destroyed."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return ()


def is_real_cpu(tensor: Tensor) -> bool:
    """Whether layers compare sizes over ranks before they send ``tensor``.

    The transports of the CPU end the process if a message has another size. On a GPU the host would have
    to wait for the comparison, and a plan has no other ranks.
    """
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def watch_layers(group: dist.ProcessGroup, calls: LayerCalls) -> None:
    """Record the calls in ``group`` from now on. The last engine over a group gets them."""
    _CALLS[group] = calls


def forget_layers(recorder: Recorder) -> None:
    """Record nothing more with ``recorder``."""
    for group, calls in list(_CALLS.items()):
        if calls.recorder is recorder:
            del _CALLS[group]


def calls_in(group: dist.ProcessGroup) -> LayerCalls | None:
    """What records the calls in ``group``; None if no engine watches it."""
    return _CALLS.get(group)


@contextlib.contextmanager
def recorded(
    group: dist.ProcessGroup,
    name: str,
    tensor: Tensor,
    *,
    op: str = "all_reduce",
    sent: int | None = None,
) -> Iterator[None]:
    """Record a collective of a layer inside the block, if an engine watches ``group``.

    Arguments as of :meth:`LayerCalls.begin`.

    Raises:
        DistributedError: a connection broke; the diagnosis of all ranks.
    """
    calls = calls_in(group)
    if calls is None:
        yield
        return
    begun = calls.begin(name, tensor, op=op, sent=sent)
    try:
        yield
    except RuntimeError as error:
        if (found := calls.explanation(error)) is None:
            raise
        raise found from error
    finally:
        calls.end(*begun)
