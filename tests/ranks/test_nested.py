"""Collectives of a shard group over two nodes of two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from zeroshard_testing import on_ranks

from zeroshard.comm.collectives import Comm
from zeroshard.config.sections import TrustConfig
from zeroshard.core.mesh import Mesh
from zeroshard.session.session import open_session

TRANSPORTS = ["shm", "p2p", "stock"]


def opened(transport):
    return open_session(
        transport=transport,
        device=torch.device("cpu"),
        trust=TrustConfig(),
        plan={},
        mesh=Mesh(data_shard=4, node=2),
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(4)
def test_gathers_and_reductions_are_by_shard(transport):
    session, rank = opened(transport), dist.get_rank()
    comm = session.gathers
    assert isinstance(comm, Comm)
    assert (comm.rank, comm.size, comm.ranks) == ([0, 2, 1, 3][rank], 4, (0, 1, 2, 3))
    full_N = torch.empty(4 * 64)
    comm.all_gather(full_N, torch.full((64,), float(comm.rank)), name="g").wait()
    assert torch.equal(full_N, torch.arange(4.0).repeat_interleave(64))
    sum_S = torch.empty(64)
    comm.reduce_scatter(sum_S, torch.arange(256.0) * 10**rank, name="r").wait()
    assert torch.equal(sum_S, 1111 * torch.arange(256.0).view(4, 64)[comm.rank])
    session.close()


@on_ranks(4)
def test_small_vectors_and_broadcasts_are_numbered_by_rank():
    session, rank = opened("auto"), dist.get_rank()
    comm = session.gathers
    rows = comm.all_gather_small(torch.tensor([float(rank), 7.0]), name="small")
    assert rows.tolist() == [[float(r), 7.0] for r in range(4)]
    for source in range(4):
        value = torch.tensor([float(rank)])
        comm.broadcast(value, source, name="b").wait()
        assert value.item() == source
    session.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(4)
def test_collectives_of_one_hop_start_in_the_order_of_the_calls(transport):
    """Ranks that wait in different orders neither wait for each other nor mix up what they add."""
    session, rank = opened(transport), dist.get_rank()
    comm = session.gathers
    seen = []
    for hop in comm.hops:
        recorder, start = hop.recorder, hop.recorder.enter
        order: list = []
        recorder.enter = lambda entry, *rest, order=order, start=start: (
            order.append(entry.name),
            start(entry, *rest),
        )[1]
        seen.append(order)
    sums = [torch.empty(64) for _ in range(3)]
    fulls = [torch.empty(256) for _ in range(3)]
    parts = [torch.zeros(128) for _ in range(3)]
    handles = []
    for at in range(3):
        handles.append(comm.reduce_scatter(sums[at], torch.full((256,), 1.0 + at), name=f"r{at}"))
        own = parts[at].view(2, 64)[comm.outer.rank].fill_(comm.rank + at)
        handles.append(comm.gather_through(fulls[at], parts[at], own, name=f"g{at}"))
    for at in sorted(range(6), key=lambda at: (at * (rank + 1)) % 7):
        handles[at].wait()
        handles[at].wait()
    again_N = torch.empty(256)
    comm.gather_from_node(again_N, parts[1], name="n").wait()
    calls = [f"{kind}{at}" for at in range(3) for kind in "rg"]
    assert seen == [[*calls, "n"], calls]
    for at in range(3):
        assert sums[at].eq(4.0 * (1 + at)).all()
        assert torch.equal(fulls[at], torch.arange(4.0).repeat_interleave(64) + at)
    assert torch.equal(again_N, fulls[1])
    session.close()
