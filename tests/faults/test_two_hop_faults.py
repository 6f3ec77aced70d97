"""If a rank of a replicated shard group dies in either hop, every rank gets an error within seconds."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist
from support.faulty_comm import Fault, FaultyComm
from zeroshard_testing.ranks import run_ranks

from zeroshard.comm import Comm, make_comm
from zeroshard.comm.hops import TwoHopComm
from zeroshard.comm.host import open_sockets, shut_down
from zeroshard.core.mesh import Mesh
from zeroshard.errors import DistributedError

LIMIT_S = 8.0
VICTIM = 3
"""Rank 2 shares a shard group with it, rank 1 an outer group, and rank 0 neither."""


def hop(transport: str, dim: str) -> Comm:
    mesh = Mesh(data_replicate=2, data_shard=2)
    groups = [dist.new_group(list(ranks)) for ranks in mesh.groups({dim})]
    (own,) = (g for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER)
    return make_comm(transport=transport, group=own, purpose=dim)


def error_of_a_step(transport: str, where: str, name: str, at: int) -> tuple[str, float]:
    """(text, seconds) of the error after the first step. The victim dies in the hop ``where``."""
    before = open_sockets()
    comm = TwoHopComm(hop(transport, "data_shard"), hop(transport, "data_replicate"))
    opened = {fd: what for fd, what in open_sockets().items() if before.get(fd) != what}
    step(comm)
    if dist.get_rank() == VICTIM:
        healthy = getattr(comm, where)
        setattr(comm, where, FaultyComm(healthy, Fault("kill", healthy.rank, name, at=at)))
    begun_s = time.monotonic()
    try:
        step(comm)
        step(comm)
    except DistributedError as error:
        comm.close()
        shut_down(opened)  # as the end of a process does: that is how rank 0 learns of it
        return str(error), time.monotonic() - begun_s
    raise AssertionError("nothing failed")


def step(comm: TwoHopComm) -> None:
    gathered_N = torch.empty(200)
    out_S = torch.empty(100)
    first = comm.reduce_scatter(out_S, torch.ones(200), name="layers.1")
    gather = comm.all_gather(gathered_N, torch.ones(100), name="layers.0")
    second = comm.reduce_scatter(out_S, torch.ones(200), name="layers.0")
    for handle in (gather, first, second):
        handle.wait()
    comm.reduce_inside(out_S, torch.ones(200), name="sum").wait()
    comm.reduce_between(out_S, out_S, name="sum").wait()
    comm.all_gather_small(torch.zeros(1), name="norm")


PLACES = [
    ("inner", "layers.1", 1),  # the first reduction
    ("inner", "layers.0", 1),  # the gather behind it
    ("inner", "norm", 1),
    ("outer", "layers.1", 1),  # the sum over replicas
    ("outer", "layers.1", 2),  # the gather of that sum
    ("outer", "norm", 1),
    ("inner", "sum", 1),  # each hop alone
    ("outer", "sum", 1),
]


@pytest.mark.parametrize(("where", "name", "at"), PLACES)
@pytest.mark.parametrize("transport", ["shm", "p2p", "stock"])
def test_a_rank_that_dies_in_one_hop_ends_the_wait_of_all(transport, where, name, at):
    died = {VICTIM: signal.SIGKILL}
    results = run_ranks(
        error_of_a_step, 4, transport, where, name, at, expect_death=died, timeout=40
    )
    for text, seconds in results[:VICTIM]:
        assert text.startswith("RankLost: the connection to ")
        assert seconds < LIMIT_S
    assert any("rank 3 failed" in results[partner][0] for partner in (1, 2))
