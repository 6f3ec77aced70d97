"""A3: the time of reduce-scatter and all-gather alone, over every transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from comparability import Row, statistics
from interleaving import Clock, Say, WorkerGroup, interleaved, running
from systems import TRANSPORTS, has_transport

MIB = 2**20
TITLE = "A3  collectives alone"


@dataclass(frozen=True)
class Case:
    """One kind of call. ``nbytes``: size of the full buffer on every rank."""

    operation: str
    dtype: str
    nbytes: int

    @property
    def name(self) -> str:
        return f"{self.operation} {self.dtype} {self.nbytes / MIB:g} MiB"

    @property
    def calls(self) -> int:
        """Calls per turn. They take about the same time for every size."""
        return max(2, min(20, 32 * MIB // self.nbytes))


@dataclass(frozen=True)
class CollectivesJob:
    """``kind``: ``torch`` (the collectives of the process group), ``memcpy``, or a transport of
    ZeroShard."""

    kind: str

    def prepare(self) -> None:
        """Nothing to import."""

    def open(self, rank: int) -> Any:
        """Connect."""
        import torch.distributed as dist

        calls: Any
        if self.kind == "torch":
            calls = TorchCalls()
        elif self.kind == "memcpy":
            calls = MemcpyCalls()
        else:
            calls = ZeroShardCalls(self.kind)
        return CollectivesSession(calls, rank, dist.get_world_size())


class TorchCalls:
    """The collectives of PyTorch's process group."""

    def __init__(self) -> None:
        import torch.distributed as dist

        # torch 2.13 renamed these two and warns on every call under the old names.
        self._gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        self._reduce: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def empty(self, numel: int, dtype: Any) -> Any:
        """A buffer to send from."""
        import torch

        return torch.empty(numel, dtype=dtype)

    def all_gather(self, full_N: Any, shard_S: Any) -> None:
        """Fill ``full_N``."""
        self._gather(full_N, shard_S)

    def reduce_scatter(self, out_S: Any, full_N: Any) -> None:
        """Sum into ``out_S``."""
        self._reduce(out_S, full_N)

    def close(self) -> None:
        """Nothing: the worker process destroys the group."""


class MemcpyCalls(TorchCalls):
    """The reference: copies of the full buffer inside each process."""

    def __init__(self) -> None:
        """Needs no process group."""

    def all_gather(self, full_N: Any, shard_S: Any) -> None:
        """``shard_S`` is as long as ``full_N`` here."""
        full_N.copy_(shard_S)

    def reduce_scatter(self, out_S: Any, full_N: Any) -> None:
        """``out_S`` is as long as ``full_N`` here."""
        out_S.copy_(full_N)


class ZeroShardCalls:
    """ZeroShard's communicator. Buffers come from its ``allocate`` if it has one."""

    def __init__(self, transport: str) -> None:
        from zeroshard.comm import make_comm

        self._comm: Any = make_comm(transport=transport)

    def empty(self, numel: int, dtype: Any) -> Any:
        """A buffer, allocated as the runtime allocates gradient buffers."""
        import torch

        make = getattr(self._comm, "allocate", None)
        device = torch.device("cpu")
        return make(numel, dtype=dtype, device=device) if make else torch.empty(numel, dtype=dtype)

    def all_gather(self, full_N: Any, shard_S: Any) -> None:
        """Fill ``full_N``."""
        self._comm.all_gather(full_N, shard_S, name="benchmark").wait()

    def reduce_scatter(self, out_S: Any, full_N: Any) -> None:
        """Sum into ``out_S``."""
        self._comm.reduce_scatter(out_S, full_N, name="benchmark").wait()

    def close(self) -> None:
        """Disconnect."""
        self._comm.close()


@dataclass
class CollectivesSession:
    """``turn(case)`` calls the collective ``case.calls`` times."""

    calls: Any
    rank: int
    world_size: int
    _buffers: dict[Case, tuple[Any, Any]] = field(default_factory=dict)

    def turn(self, request: Case) -> dict[str, Any]:
        """CPU and wall seconds per call, and whether the result was right."""
        import torch.distributed as dist

        if request not in self._buffers:
            self._buffers = {request: self._prepare(request)}
            self._call(request)
        dist.barrier()
        clock = Clock()
        for _ in range(request.calls):
            self._call(request)
        cpu, wall = (seconds / request.calls for seconds in clock.read())
        return {"cpu": cpu, "wall": wall, "right": self._is_right(request)}

    def close(self) -> None:
        """Disconnect."""
        self._buffers = {}
        self.calls.close()

    def _prepare(self, case: Case) -> tuple[Any, Any]:
        """``(full_N, shard_S)``. Every element is the rank plus one."""
        import torch

        dtype = getattr(torch, case.dtype)
        numel = case.nbytes // dtype.itemsize
        parts = 1 if isinstance(self.calls, MemcpyCalls) else self.world_size
        full_N = self.calls.empty(numel, dtype).fill_(self.rank + 1)
        return full_N, torch.full((numel // parts,), self.rank + 1, dtype=dtype)

    def _call(self, case: Case) -> None:
        full_N, shard_S = self._buffers[case]
        if case.operation == "all_gather":
            self.calls.all_gather(full_N, shard_S)
        else:
            self.calls.reduce_scatter(shard_S, full_N)

    def _is_right(self, case: Case) -> bool:
        full_N, shard_S = self._buffers[case]
        numbers = range(1, self.world_size + 1)
        if isinstance(self.calls, MemcpyCalls):
            return bool((full_N == self.rank + 1).all() and (shard_S == self.rank + 1).all())
        if case.operation == "reduce_scatter":
            return bool((shard_S == sum(numbers)).all())
        parts = full_N.view(self.world_size, -1)
        return all(bool((part == n).all()) for part, n in zip(parts, numbers, strict=True))


def run(say: Say, *, smoke: bool, rounds: int | None = None, ranks: int = 2) -> dict[str, Any]:
    """One row per transport and case."""
    sizes = (64 * 1024,) if smoke else (MIB, 8 * MIB, 64 * MIB)
    cases = [
        Case(operation, dtype, nbytes)
        for operation in ("reduce_scatter", "all_gather")
        for dtype in ("bfloat16", "float32")
        for nbytes in sizes
    ]
    # With more ranks than cores a round takes about twice as long, so there are half as many rounds.
    rounds = 1 if smoke else rounds or (4 if ranks == 2 else 2)
    kinds = ["memcpy", "torch", *TRANSPORTS]
    groups = [
        WorkerGroup(kind, CollectivesJob(kind), ranks)
        for kind in kinds
        if kind in ("memcpy", "torch") or has_transport(kind)
    ]
    rows: list[Row] = []
    with running(groups, say):
        for case in cases:
            say(case.name)
            rows += _measure(case, groups, rounds)
    failed = [{"name": group.name, "error": group.error} for group in groups if group.error]
    absent = [
        {"name": kind, "absent": f"transport {kind!r} is not in this version"}
        for kind in kinds[2:]
        if not has_transport(kind)
    ]
    return {"title": TITLE, "settings": {"ranks": ranks}, "rows": [*rows, *failed, *absent]}


def _measure(case: Case, groups: Sequence[WorkerGroup], rounds: int) -> list[Row]:
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for _, group in interleaved(groups, rounds):
        if answers := group.turn(case):
            found.setdefault(group.name, []).append(answers)
    rows = []
    for group in groups:
        if group.error or group.name not in found:
            continue
        turns = found[group.name]
        cpu = statistics([1000 * sum(a["cpu"] for a in turn) / len(turn) for turn in turns])
        wall = statistics([1000 * max(a["wall"] for a in turn) for turn in turns])
        rows.append(
            {
                "name": group.name,
                "case": case.name,
                "operation": case.operation,
                "dtype": case.dtype,
                "nbytes": case.nbytes,
                "cpu_ms": cpu,
                "wall_ms": wall,
                "gb_per_s": float(f"{case.nbytes / wall['median'] / 1e6:.3g}"),
                "right": all(a["right"] for turn in turns for a in turn),
            }
        )
    return rows
