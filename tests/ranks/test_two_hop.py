"""Collectives of replicated shard groups: the sums, the order, the traffic and the end of both hops."""

from __future__ import annotations

import gc
import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from zeroshard_testing.ranks import on_ranks

from zeroshard.comm import Comm, SoloComm, make_comm
from zeroshard.comm.hops import TwoHopComm
from zeroshard.core.mesh import Mesh
from zeroshard.errors import DistributedError, UsageError

CPU = torch.device("cpu")
EVERY = pytest.mark.parametrize("transport", ["shm", "p2p", "stock"])
SHARD_NUMELS = (0, 1, 7, 64, 70_001)  # odd ones are padded on the outer hop
EPS = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def open_hops(transport: str, replicas: int, shards: int) -> TwoHopComm:
    mesh = Mesh(data_replicate=replicas, data_shard=shards)
    return TwoHopComm(
        open_hop(transport, mesh, "data_shard"), open_hop(transport, mesh, "data_replicate")
    )


def open_hop(transport: str, mesh: Mesh, dim: str) -> Comm:
    groups = [dist.new_group(list(ranks)) for ranks in mesh.groups({dim})]
    (own,) = (g for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER)
    return make_comm(transport=transport, group=own, purpose=dim)


def buffers_of_all_ranks(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    wide = torch.randn(count, numel, generator=generator, dtype=torch.float64) * 3
    return list(wide.to(dtype).unbind())


def rank_order_sum(buffers: list[torch.Tensor]) -> torch.Tensor:
    """fp32 for 16-bit numbers, rounded once: the sum of a flat communicator."""
    dtype = buffers[0].dtype
    total = buffers[0].to(torch.promote_types(dtype, torch.float32))
    for buffer in buffers[1:]:
        total = total + buffer
    return total.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def on_all_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """By the program's own group, which the communicators under test do not use."""
    found = [torch.empty_like(tensor.view(torch.uint8)) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous().view(torch.uint8))
    return [each.view(tensor.dtype) for each in found]


# -- values ----------------------------------------------------------------------------------------


@EVERY
@on_ranks(4)
def test_sums_are_those_of_one_group_of_all_ranks_and_replicas_have_equal_bits(transport):
    check_sums(open_hops(transport, 2, 2))


@EVERY
@on_ranks(6)
def test_three_replicas_have_equal_bits(transport):
    check_sums(open_hops(transport, 3, 2))


def check_sums(comm: TwoHopComm) -> None:
    W, R, s = comm.size, comm.replicas, comm.rank
    for dtype, eps in EPS.items():
        for shard_numel in SHARD_NUMELS:
            buffers = buffers_of_all_ranks(W * R, W * shard_numel, dtype)
            own_N = comm.allocate(W * shard_numel, dtype=dtype, device=CPU)
            own_N.copy_(buffers[dist.get_rank()])
            apart_S = torch.empty(shard_numel, dtype=dtype)
            comm.reduce_scatter(apart_S, own_N.clone(), name="apart").wait()
            inside_S = own_N[s * shard_numel : (s + 1) * shard_numel]
            comm.reduce_scatter(inside_S, own_N, name="inside").wait()
            assert same_bits(inside_S, apart_S), (dtype, shard_numel)
            mine = slice(s * shard_numel, (s + 1) * shard_numel)
            by_hops = rank_order_sum(
                [rank_order_sum([b[mine] for b in buffers[r * W : r * W + W]]) for r in range(R)]
            )
            assert same_bits(apart_S, by_hops), (dtype, shard_numel)
            flat = rank_order_sum(buffers)[mine]
            assert torch.allclose(apart_S, flat, rtol=eps, atol=20 * eps)
            for rank, other in enumerate(on_all_ranks(apart_S)):
                assert rank % W != s or same_bits(other, apart_S), (dtype, shard_numel)
    comm.close()


@EVERY
@on_ranks(4)
def test_a_gather_has_the_shards_of_its_own_replica(transport):
    comm = open_hops(transport, 2, 2)
    first = dist.get_rank() // 2 * 2
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        full_N = torch.empty(2 * 5, dtype=dtype)
        handle = comm.all_gather(full_N, torch.full((5,), dist.get_rank()).to(dtype), name="a")
        handle.wait()
        handle.wait()  # does nothing
        assert full_N.tolist() == [first] * 5 + [first + 1] * 5
    comm.close()


@EVERY
@on_ranks(4)
def test_small_vectors_of_all_replicas_come_in_the_order_of_the_ranks(transport):
    comm = open_hops(transport, 2, 2)
    for dtype in (torch.float64, torch.int64, torch.bool):
        rows = comm.all_gather_small(torch.tensor([dist.get_rank(), 1, 0]).to(dtype), name="x")
        assert same_bits(rows, torch.tensor([[r, 1, 0] for r in range(4)]).to(dtype))
    assert comm.all_gather_small(torch.empty(0), name="nothing").shape == (4, 0)
    assert comm.ranks == (0, 1, 2, 3)
    comm.close()


@EVERY
@on_ranks(4)
def test_a_broadcast_from_any_rank_reaches_all_replicas(transport):
    comm = open_hops(transport, 2, 2)
    for numel in (3, 300_000):
        for src in range(4):
            tensor = torch.full((numel,), float(dist.get_rank()))
            comm.broadcast(tensor, src, name="buffer").wait()
            assert tensor.eq(src).all()
    with pytest.raises(UsageError, match="this group has ranks 0 to 3"):
        comm.broadcast(tensor, 4, name="buffer")
    comm.close()


@on_ranks(3)
def test_one_replica_is_the_group_itself():
    comm = TwoHopComm(make_comm(), SoloComm())
    out_S = torch.empty(5)
    comm.reduce_scatter(out_S, torch.full((15,), 1.0 + comm.rank), name="a").wait()
    assert out_S.tolist() == [6.0] * 5
    assert comm.all_gather_small(torch.tensor([comm.rank]), name="x").flatten().tolist() == [
        0,
        1,
        2,
    ]
    assert comm.ranks == (0, 1, 2)
    comm.close()


@on_ranks(3)
def test_a_shard_group_of_one_rank_is_refused_on_every_rank():
    outer = make_comm()
    with pytest.raises(UsageError, match=r"data_replicate 3 with data_shard 1.*Use data_shard 3"):
        TwoHopComm(SoloComm(), outer)
    outer.close()


@on_ranks(1, group=False)
def test_two_hops_run_on_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    comm = open_hops("auto", 2, 4)
    assert isinstance(comm, Comm)
    assert (comm.transport, comm.size, comm.rank, comm.replicas) == ("fake", 4, 1, 2)
    with FakeTensorMode():
        full_N = torch.empty(4 * 63, dtype=torch.bfloat16)
        reduction = comm.reduce_scatter(full_N[63:126], full_N, name="a")
        comm.all_gather(full_N, full_N[63:126], name="a").wait()
        reduction.wait()
        assert comm.all_gather_small(torch.zeros(2), name="n").shape == (8, 2)
    assert comm.outer.recorder.sent_numel["reduce_scatter"] == 32
    comm.close()
    dist.destroy_process_group()


# -- traffic ---------------------------------------------------------------------------------------


@EVERY
@on_ranks(4)
def test_each_hop_sends_what_it_must(transport):
    check_traffic(open_hops(transport, 2, 2))


@EVERY
@on_ranks(6)
def test_the_outer_hop_pads_what_three_replicas_cannot_divide(transport):
    check_traffic(open_hops(transport, 3, 2))


def check_traffic(comm: TwoHopComm) -> None:
    W, R, S, K = comm.size, comm.replicas, 64, 3
    padded = -(-S // R) * R
    comm.all_gather(torch.zeros(W * S), torch.zeros(S), name="a").wait()
    comm.reduce_scatter(torch.zeros(S), torch.zeros(W * S), name="a").wait()
    comm.all_gather_small(torch.zeros(K), name="norm")
    comm.broadcast(torch.zeros(4), 1, name="b").wait()
    assert comm.recorder.sent_numel == {
        "all_gather": (W - 1) * S,
        "reduce_scatter": (W - 1) * S,
        "gather_small": (W - 1) * R * K,
        "broadcast": (W - 1) * 4 if comm.rank == 1 else 0,
    }
    sources = {"broadcast": 4 * (R - 1) if dist.get_rank() == 1 else 0} if comm.rank == 1 else {}
    assert comm.outer.recorder.sent_numel == {
        "reduce_scatter": padded - padded // R,
        "all_gather": padded - padded // R,
        "gather_small": (R - 1) * K,
        **sources,
    }
    comm.close()


# -- order -----------------------------------------------------------------------------------------


@EVERY
@on_ranks(4)
def test_ranks_may_wait_in_any_order(transport):
    """Each rank waits in an order of its own, and at times of its own."""
    comm = open_hops(transport, 2, 2)
    orders = random.Random(dist.get_rank())
    numels = (7, 500, 40_000)
    for turn in range(25):
        pending = []
        for at in range(8):
            S = numels[(turn + at) % 3]
            value = 10.0 * turn + at
            if at % 3 == 2:
                full_N = torch.empty(2 * S)
                handle = comm.all_gather(full_N, torch.full((S,), value), name=f"g{S}")
                pending.append((handle, full_N, value))
            else:
                out_S = torch.empty(S)
                full_N = torch.full((2 * S,), value + dist.get_rank())
                handle = comm.reduce_scatter(out_S, full_N, name=f"r{S}")
                pending.append((handle, out_S, 4 * value + 6))
            if at == 4:
                rows = comm.all_gather_small(torch.tensor([value]), name="n")
                assert rows.flatten().tolist() == [value] * 4
            if orders.random() < 0.3:
                check(pending.pop(orders.randrange(len(pending))))
        time.sleep(0.002 * orders.random())
        orders.shuffle(pending)
        for each in pending:
            check(each)
    # The collectives of both hops start in the order of the calls, so all histories are equal.
    for hop in (comm.inner, comm.outer):
        hashes = on_all_ranks(torch.tensor([hop.recorder.hash64 >> 2]))
        assert len({int(value) for value in hashes}) == 1
    comm.close()


def check(pending) -> None:
    handle, tensor, expected = pending
    handle.wait()
    handle.wait()  # does nothing
    assert tensor.eq(expected).all(), (tensor, expected)


@EVERY
@on_ranks(4)
def test_a_gather_that_some_ranks_wait_for_first_blocks_no_one(transport):
    """Ranks 0 and 3 wait for the reduction, ranks 1 and 2 for a later gather, before anything else.

    Ranks 0 and 3 would call the gather only after that. So a wait for the gather has to give the others
    its part of the reduction, or each rank waits for the next.
    """
    comm = open_hops(transport, 2, 2)
    out_S, full_N = torch.empty(100), torch.empty(200)
    reduction = comm.reduce_scatter(out_S, torch.ones(200), name="r")
    if dist.get_rank() in (0, 3):
        reduction.wait()
        comm.all_gather(full_N, torch.ones(100), name="g").wait()
    else:
        comm.all_gather(full_N, torch.ones(100), name="g").wait()
        reduction.wait()
    assert out_S.eq(4).all()
    assert full_N.eq(1).all()
    comm.close()


@EVERY
@on_ranks(4)
def test_many_reductions_in_flight_do_not_share_scratch(transport):
    comm = open_hops(transport, 2, 2)
    outs = [torch.empty(1001) for _ in range(4)]
    handles = [
        comm.reduce_scatter(out_S, torch.full((2002,), float(i)), name=f"unit {i}")
        for i, out_S in enumerate(outs)
    ]
    for handle in reversed(handles):
        handle.wait()
    assert [float(out_S[-1]) for out_S in outs] == [0.0, 4.0, 8.0, 12.0]
    comm.all_gather_small(torch.zeros(1), name="met")
    parts = (comm, *comm.hops)
    held = sum(getattr(part, "scratch_nbytes", 0) for part in parts)
    for _ in range(20):
        comm.reduce_scatter(outs[0], torch.ones(2002), name="unit 0").wait()
        comm.all_gather_small(torch.zeros(1), name="met")
    assert sum(getattr(part, "scratch_nbytes", 0) for part in parts) <= held
    assert 0 < comm.scratch_nbytes <= 4 * 1002 * 4
    comm.close()


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "p2p"])
@on_ranks(4)
def test_a_reduction_in_flight_has_no_result_after_close(transport):
    comm = open_hops(transport, 2, 2)
    sent_S, unsent_S = torch.empty(100), torch.empty(100)
    sent = comm.reduce_scatter(sent_S, torch.ones(200), name="sent")
    comm.all_gather_small(torch.zeros(1), name="starts the outer hop")
    unsent = comm.reduce_scatter(unsent_S, torch.ones(200), name="unsent")
    comm.all_gather(torch.empty(200), torch.ones(100), name="gather")
    dist.barrier()
    comm.close()
    dist.barrier()
    sent.wait()
    assert sent_S.eq(4).all()
    for _ in range(2):  # not a result the second time either
        with pytest.raises(UsageError, match="closed communicator"):
            unsent.wait()
    for call in (
        lambda: comm.all_gather_small(torch.zeros(1), name="x"),
        lambda: comm.reduce_scatter(unsent_S, torch.ones(200), name="x"),
        lambda: comm.all_gather(torch.empty(200), unsent_S, name="x"),
    ):
        with pytest.raises(UsageError, match="closed communicator"):
            call()


@pytest.mark.parametrize("transport", ["shm", "p2p"])
@on_ranks(4)
def test_abort_ends_a_wait_in_the_outer_hop(transport):
    comm = open_hops(transport, 2, 2)
    comm.all_gather_small(torch.zeros(1), name="met")
    out_S = torch.empty(100)
    reduction = comm.reduce_scatter(out_S, torch.ones(200), name="r")
    dist.barrier()
    if dist.get_rank() < 2:  # replica 1 never starts its outer hop
        timer = threading.Timer(0.3, comm.abort)
        timer.start()
        begun_s = time.monotonic()
        for _ in range(2):
            with pytest.raises(DistributedError):
                reduction.wait()
        assert time.monotonic() - begun_s < 5
        timer.join()
    dist.barrier()
    comm.close()


@on_ranks(4)
def test_an_interrupt_between_the_hops_is_not_forgotten():
    comm = open_hops("shm", 2, 2)
    reductions = [
        comm.reduce_scatter(torch.empty(100), torch.ones(200), name="r") for _ in range(2)
    ]
    patch = pytest.MonkeyPatch()
    with patch.context() as change:
        change.setattr(comm.outer, "reduce_scatter", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            reductions[0].wait()
    for handle in reductions:
        with pytest.raises(DistributedError, match="KeyboardInterrupt ended a collective between"):
            handle.wait()
    with pytest.raises(DistributedError, match="Close the engine on every rank"):
        comm.all_gather_small(torch.zeros(1), name="x")
    dist.barrier()
    comm.close()


def _interrupted(*_, **__):
    raise KeyboardInterrupt


@on_ranks(4)
def test_nothing_is_left_after_ten_lives():
    def life() -> None:
        comm = TwoHopComm(make_comm(group=inner), make_comm(group=outer))
        out_S = torch.empty(1001)
        comm.reduce_scatter(
            out_S, comm.allocate(2002, dtype=out_S.dtype, device=CPU), name="a"
        ).wait()
        comm.close()
        del comm
        gc.collect()

    mesh = Mesh(data_replicate=2, data_shard=2)
    groups = [
        [dist.new_group(list(ranks)) for ranks in mesh.groups({dim})]
        for dim in ("data_shard", "data_replicate")
    ]
    inner, outer = (
        next(g for g in each if g is not dist.GroupMember.NON_GROUP_MEMBER) for each in groups
    )
    life()
    dist.barrier()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        life()
    assert len(os.listdir("/proc/self/fd")) == before
