"""Both hops of a collective are queued on the device, in order, and the host waits for neither."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ordering import removed, statements
from scenarios import (
    OFFLOADS,
    PROGRAMS,
    Scenario,
    cuda,
    in_child,
    is_allowed,
    prepare,
    run_scenario,
)
from support.covering import covering, sampled
from support.nodes import KEYS
from zeroshard_testing import on_ranks

from zeroshard.comm import hops
from zeroshard.comm.hops import NestedComm, TwoHopComm, TwoHops
from zeroshard.comm.process_group import ProcessGroupComm


def open_hops(kind: type) -> TwoHops:
    """Rank 0 of two replicas of a shard group of two ranks, or of two nodes of two ranks."""
    made = []
    for ranks in ([0, 1], [0, 2]):
        hop = ProcessGroupComm(dist.new_group(ranks, backend="fake"), owns_group=True)
        hop.queues_on_device = True  # as NCCL's; torch knows the model as "fake"
        made.append(hop)
    return kind(*made)


def train(comm: TwoHops, shard_numel: int) -> list[float]:
    """Reductions and gathers in flight together, with memory that is used again at once."""
    values = []
    numel = comm.size * shard_numel
    for at in range(3):
        outs_S = [torch.empty(shard_numel, device="cuda") for _ in range(3)]
        fulls_N = [torch.full((numel,), 1.0 + at, device="cuda") for _ in outs_S]
        handles = [
            comm.reduce_scatter(out_S, full_N, name="r")
            for out_S, full_N in zip(outs_S, fulls_N, strict=True)
        ]
        gathered_N = torch.empty(numel, device="cuda")
        comm.all_gather(gathered_N, gathered_N[:shard_numel].fill_(1.0), name="g").wait()
        for handle in reversed(handles):
            handle.wait()
            handle.wait()
        del fulls_N, handles
        again_N = torch.zeros(numel, device="cuda")
        buffer = torch.ones(4, device="cuda")
        comm.broadcast(buffer, 0, name="b").wait()
        comm.all_gather_small(buffer, name="n").sum()
        comm.reduce_scatter(torch.empty(shard_numel, device="cuda"), again_N, name="dropped")
        again_N = again_N.new_ones(numel)
        values += [float(out_S.sum()) for out_S in outs_S]
    return values


def hops_apart(comm: TwoHops, shard_numel: int) -> list[float]:
    """Each hop of a reduction alone, several in flight, with additions in between."""
    values = []
    numel = comm.size * shard_numel
    for at in range(3):
        sums_P = []
        for _ in range(3):
            full_N = torch.full((numel,), 1.0 + at, device="cuda")
            part_P = torch.empty(numel // comm.inner.size, device="cuda")
            comm.reduce_inside(part_P, full_N, name="r").wait()
            del full_N
            sums_P.append(part_P.add_(1.0))
        outs_S = [
            sum_P if len(sum_P) == shard_numel else sum_P.new_empty(shard_numel) for sum_P in sums_P
        ]
        handles = [
            comm.reduce_between(out_S, sum_P, name="r")
            for out_S, sum_P in zip(outs_S, sums_P, strict=True)
        ]
        del sums_P
        again_P = torch.zeros(numel, device="cuda")
        for handle in reversed(handles):
            handle.wait()
        del handles, again_P
        values += [float(out_S.sum()) for out_S in outs_S]
    return values


def run(
    shard_numel: int, without=None, kind=TwoHopComm, training=train
) -> tuple[list[str], list[float], int]:
    """Findings, values, and host waits between the calls and the reads."""
    prepare()

    def child():
        with cuda(4) as watch, without or nullcontext():
            comm = open_hops(kind)
            with watch.phase("hops"):
                full_N = torch.ones(comm.size * shard_numel, device="cuda")
                handle = comm.reduce_scatter(full_N[:shard_numel], full_N, name="warm")
                handle.wait()
            values = training(comm, shard_numel)
            found = [str(finding) for finding in watch.findings]
            waits = sum(watch.waits("hops").values())
            comm.close()
        return found, values, waits

    return in_child(child)


# 5: padded on the outer hop of replicas
@pytest.mark.parametrize(
    ("kind", "shard_numel"), [(TwoHopComm, 8), (TwoHopComm, 5), (NestedComm, 8)]
)
@on_ranks(1, group=False)
def test_the_hops_are_ordered_and_the_host_does_not_wait(kind, shard_numel):
    found, values, waits = run(shard_numel, kind=kind)
    assert not found, "\n".join(found)
    assert waits == 0
    # The model of NCCL multiplies by the number of ranks of each hop.
    assert values == [4.0 * (1 + at) * shard_numel for at in range(3) for _ in range(3)]


@pytest.mark.parametrize(
    ("kind", "shard_numel"), [(TwoHopComm, 8), (TwoHopComm, 5), (NestedComm, 8)]
)
@on_ranks(1, group=False)
def test_hops_that_are_called_apart_are_ordered(kind, shard_numel):
    found, values, _ = run(shard_numel, kind=kind, training=hops_apart)
    assert not found, "\n".join(found)
    assert values == [
        2.0 * (2.0 * (1 + at) + 1.0) * shard_numel for at in range(3) for _ in range(3)
    ]


NEEDED = [
    ("_DeviceQueue.add", "first.wait()"),
    ("_DeviceQueue.add", "last.wait()"),
    ("_DeviceQueue.add", "self.stream.wait_stream(self.ops.current_stream())"),
    ("TwoHops.broadcast", "handle.wait()"),
    ("Then.wait", "handle.wait()"),
    ("_Queued.wait", "queue.ops.current_stream().wait_event(self._event)"),
]
HOST = {"_InParts.send", "_InParts.wait", "_Later.wait", "TwoHopComm._add_and_gather"}
"""Waits that only collectives of the host need. On a device, those of one communicator run in order."""


@pytest.mark.parametrize(("function", "call"), NEEDED)
@on_ranks(1, group=False)
def test_without_it_a_mistake_is_found(function, call):
    found = [s for s in in_two_hop() if (s.function, s.call) == (function, call)]
    assert found, f"{function} has no statement {call!r} any more: remove its row"
    assert any(run(5, without=removed(found[0]), training=each)[0] for each in (train, hops_apart))


SCENARIOS = [
    Scenario(*row)
    for row in covering(
        [
            row
            for row in itertools.product(
                (0, 1, 2, 3), OFFLOADS, PROGRAMS, (4,), ("fp32", "bf16"), ("always", "never"), KEYS
            )
            if row[-1] is not None and is_allowed(Scenario(*row))
        ]
    )
]


@pytest.mark.parametrize("scenario", sampled(SCENARIOS, every=6), ids=str)
@on_ranks(1, group=False)
def test_engines_on_nodes_are_ordered(scenario):
    outcome = run_scenario(scenario)
    assert not outcome.findings, str(outcome)


class Forgetful(hops._Queued):
    def __init__(self, queue, *args):
        super().__init__(queue, *args)
        queue.unwaited.clear()


@on_ranks(1, group=False)
def test_a_dropped_handle_keeps_its_buffers():
    assert run(8, without=mock.patch.object(hops, "_Queued", Forgetful))[0]


def in_two_hop():
    return [s for s in statements() if s.file == "comm/hops.py" or s.function == "Then.wait"]


def test_every_ordering_statement_of_the_hops_is_in_the_table():
    left = {(s.function, s.call) for s in in_two_hop()} - set(NEEDED)
    assert {function for function, _ in left} <= HOST
