"""One rank of a run whose other ranks do not exist, and a log of what it would say to them.

torch's fake process group takes part in every collective and moves nothing. Communicators over it count
their own calls, as they do in a real run. What layers and pipelines call directly passes torch's
dispatcher, where :class:`CallLog` sees it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.errors import UsageError

SEND, RECEIVE = "send", "receive"

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_MESSAGES = {"send": SEND, "recv_": RECEIVE}
_OPS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
}
"""What layers call: name in torch's dispatcher -> name of the collective. Communicators of the engine use
none of these, except for ``all_to_all``, so nothing is counted twice."""


@contextlib.contextmanager
def lone_rank(rank: int, world_size: int) -> Iterator[None]:
    """Inside the block this process is ``rank`` of ``world_size`` ranks, of which no other exists.

    Raises:
        UsageError: the process already takes part in a run, or there is no such rank.
    """
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank {rank} of a simulation with {world_size} ranks does not exist. Give a number from 0 "
            f"to {world_size - 1}."
        )
    if dist.is_initialized():
        raise UsageError(
            "a simulation needs a process without a process group, and this one takes part in a run of "
            f"{dist.get_world_size()} rank(s). Simulate in a process of its own, or call "
            "torch.distributed.destroy_process_group() before."
        )
    # Importing it registers the backend; torch has no public name for it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _forget_meshes()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def lone_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group of these ranks, of which only this process exists."""
    group: dist.ProcessGroup = dist.new_group(list(ranks))
    return group


def _forget_meshes() -> None:
    """Clear what torch's DTensors remember of earlier device meshes.

    A mesh with the same ranks as an earlier one would get its groups, which no longer exist.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Message:
    """One tensor that passes between two ranks of a pipeline.

    ``kind``: "send" or "receive". ``peer``: the global rank at the other end.
    """

    kind: str
    peer: int
    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class LayerTraffic:
    """Collectives of one kind that layers called over one group.

    ``numel``: elements of the full tensors; ``sent_numel``: of these, what this rank sends to others if
    the collective is a ring, and ``sent_nbytes``: its bytes.
    """

    calls: int = 0
    numel: int = 0
    sent_numel: int = 0
    sent_nbytes: int = 0


@dataclass
class CallLog:
    """Messages between stages, in order, and collectives of layers, by name and global ranks.

    ``reductions``: names of the groups over which the engine reduces with an all-to-all, as it does with
    gloo. Its recorders count these calls.
    """

    messages: list[Message] = field(default_factory=list)
    layers: dict[tuple[str, tuple[int, ...]], LayerTraffic] = field(default_factory=dict)
    reductions: set[str] = field(default_factory=set)

    def note(
        self, func: Any, args: Sequence[Any], result: Any
    ) -> tuple[str, tuple[int, ...]] | None:
        """Note one call of the dispatcher; nothing if it does not communicate.

        Returns the name and the global ranks of a collective.
        """
        if func.namespace not in _NAMESPACES:
            return None
        name = func.name().partition("::")[2].partition(".")[0]
        if name in _MESSAGES:
            peers = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[1]))  # type: ignore[attr-defined]
            for tensor in args[0]:
                shape = tuple(tensor.shape)
                found = Message(_MESSAGES[name], peers[args[2]], args[3], shape, tensor.dtype)
                self.messages.append(found)
        elif name in _OPS:
            group = _group_of(args)
            if _OPS[name] == "all_to_all" and group.group_name in self.reductions:
                return None
            ranks = tuple(dist.get_process_group_ranks(group))
            self._note_layer(_OPS[name], ranks, _widest(args, result))
            return _OPS[name], ranks
        return None

    def _note_layer(self, op: str, ranks: tuple[int, ...], whole: Tensor) -> None:
        numel = whole.numel()
        calls = self.layers.setdefault((op, ranks), LayerTraffic())
        calls.calls += 1
        calls.numel += numel
        passes = 2 if op == "all_reduce" else 1  # a reduce-scatter and an all-gather
        sent_numel = passes * (numel - numel // len(ranks))
        calls.sent_numel += sent_numel
        calls.sent_nbytes += sent_numel * whole.element_size()

    def clear(self) -> None:
        """Forget everything."""
        self.messages.clear()
        self.layers.clear()


def _group_of(args: Sequence[Any]) -> dist.ProcessGroup:
    """The group of a call: named by the last text, or given as an object."""
    names = [arg for arg in args if isinstance(arg, str)]
    found: dist.ProcessGroup
    if names:
        found = vars(dist.distributed_c10d)["_resolve_process_group"](names[-1])
    else:
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        found = dist.ProcessGroup.unbox(boxed)  # type: ignore[attr-defined]
    return found


def _widest(args: Sequence[Any], result: Any) -> Tensor:
    """The largest tensor of a call: the whole of a gather or a reduction."""
    tensors = [
        tensor
        for value in (*args, result)
        for tensor in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(tensor, Tensor)
    ]
    return max(tensors, key=Tensor.numel)


def unmatched(ranks: dict[int, Sequence[Message]]) -> list[str]:
    """Messages between the given ranks that have no equal partner, in words; empty if all have one.

    ``ranks``: the messages of each rank, in order. Two ranks exchange messages with one tag in order, so
    the n-th send must have the shape and dtype of the n-th receive.

    >>> sent = Message("send", 1, 0, (2, 3), torch.float32)
    >>> unmatched({0: [sent], 1: []})
    ['rank 0 -> rank 1, tag 0: message 0 of (2, 3) float32 is sent and never received']
    """
    found: list[str] = []
    for (source, sending), (target, receiving) in product(ranks.items(), repeat=2):
        for tag in sorted({message.tag for message in (*sending, *receiving)}):
            sent = [_what(m) for m in sending if _is(m, SEND, target, tag)]
            got = [_what(m) for m in receiving if _is(m, RECEIVE, source, tag)]
            where = f"rank {source} -> rank {target}, tag {tag}: message"
            found += _differences(where, sent, got)
    return found


Histories: TypeAlias = Mapping[tuple[str, tuple[int, ...]], str]
"""By name and global ranks of a group: a hash of the collectives that a rank has called over it, in
order, with their names, dtypes and sizes."""


def diverged(ranks: Mapping[int, Histories]) -> list[str]:
    """Groups over which two of the given ranks have called different collectives, in words.

    Ranks of a real run would wait for each other there, or add unrelated tensors.

    >>> diverged({0: {("data", (0, 1)): "7-a0"}, 1: {("data", (0, 1)): "8-b1"}})
    ["ranks 0 and 1 call different collectives over the group 'data' of ranks [0, 1]"]
    """
    first: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    found = []
    for rank, histories in ranks.items():
        for (name, group), history in histories.items():
            other, before = first.setdefault((name, group), (rank, history))
            if history != before:
                found.append(
                    f"ranks {other} and {rank} call different collectives over the group {name!r} of "
                    f"ranks {list(group)}"
                )
    return found


def _is(message: Message, kind: str, peer: int, tag: int) -> bool:
    return (message.kind, message.peer, message.tag) == (kind, peer, tag)


def _what(message: Message) -> str:
    return f"{message.shape} {str(message.dtype).removeprefix('torch.')}"


def _differences(where: str, sent: Sequence[str], got: Sequence[str]) -> Iterator[str]:
    for at in range(max(len(sent), len(got))):
        if at >= len(got):
            yield f"{where} {at} of {sent[at]} is sent and never received"
        elif at >= len(sent):
            yield f"{where} {at} of {got[at]} is awaited and never sent"
        elif sent[at] != got[at]:
            yield f"{where} {at} is {sent[at]} at the sender and {got[at]} at the receiver"
