"""Shared memory of ranks is reused only after all ranks have read it, and freed at the end."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from zeroshard_testing.ranks import on_ranks, run_ranks

from zeroshard.comm import P2PComm, make_comm, shared_memory
from zeroshard.comm.shared_memory import RING, Block
from zeroshard.comm.shm import ShmComm
from zeroshard.errors import ConfigError, RankLost

CPU = torch.device("cpu")
INFO = {"dtype": torch.float32, "device": CPU}


def open_shm(**options):
    return make_comm(transport="shm", **options)


@on_ranks(2)
def test_auto_shares_memory_on_one_host():
    comm = make_comm()
    assert isinstance(comm, ShmComm)
    comm.close()


# -- when memory is used again ---------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])
@on_ranks(4)
def test_sources_may_be_overwritten_at_once_after_the_wait(n):
    """Ranks read late, at random times. No rank may read values that were written after its wait."""
    group = dist.new_group(list(range(n)))
    if dist.get_rank() >= n:
        return
    comm = open_shm(group=group)
    W, r, S = comm.size, comm.rank, 5000
    pauses = torch.Generator().manual_seed(r)
    shard_S, full_N = torch.empty(S), torch.empty(W * S)
    total = W * (W - 1) / 2
    for step in range(60):
        shard_S.fill_(100.0 * step + r)
        full_N.fill_(100.0 * step + r)
        gathered_N, sum_S = torch.empty(W * S), torch.empty(S)
        first = comm.all_gather(gathered_N, shard_S, name="a")
        second = comm.reduce_scatter(sum_S, full_N, name="r")
        time.sleep(0.002 * float(torch.rand((), generator=pauses)))
        for handle in (first, second) if (step + r) % 2 else (second, first):
            handle.wait()
        shard_S.fill_(-1.0)
        full_N.fill_(-1.0)
        expected = 100.0 * step + torch.arange(W).repeat_interleave(S)
        assert torch.equal(gathered_N, expected), step
        assert sum_S.eq(W * 100.0 * step + total).all(), step
    comm.close()


@on_ranks(2)
def test_a_lent_buffer_is_not_lent_again_while_a_tensor_or_another_rank_needs_it():
    comm = open_shm()
    kept = comm.allocate(4096, **INFO)
    view = kept[10:20]
    address = kept.data_ptr()
    del kept
    assert comm.allocate(4096, **INFO).data_ptr() != address  # the view still lives there
    del view
    assert comm.allocate(4096, **INFO).data_ptr() == address
    source_N, out_S = comm.allocate(4096, **INFO), torch.empty(2048)
    address = source_N.data_ptr()
    source_N.fill_(comm.rank + 1.0)
    handle = comm.reduce_scatter(out_S, source_N, name="a")
    if comm.rank == 0:
        handle.wait()
        del source_N, handle
        other = comm.allocate(4096, **INFO)
        assert other.data_ptr() != address  # rank 1 has not read it
        other.fill_(99.0)
        dist.barrier()
    else:
        dist.barrier()
        handle.wait()
    assert out_S.eq(3.0).all()
    comm.all_gather_small(torch.zeros(1), name="met")
    if comm.rank == 0:
        del other
        addresses = {comm.allocate(4096, **INFO).data_ptr()}
        assert address in addresses | {b.bytes.data_ptr() for b in comm._ring.arena.blocks.values()}
    comm.close()


@on_ranks(2)
def test_a_reduction_of_a_lent_buffer_copies_nothing():
    comm = open_shm()
    source_N, out_S = comm.allocate(2 * 70_001, **INFO), torch.empty(70_001)
    blocks = len(comm._ring.arena.blocks)
    source_N.copy_(torch.arange(2 * 70_001))
    comm.reduce_scatter(out_S, source_N, name="a").wait()
    assert len(comm._ring.arena.blocks) == blocks
    assert torch.equal(out_S, 2.0 * torch.arange(2 * 70_001)[comm.rank * 70_001 :][:70_001])
    # A gather into the same memory waits until the other rank has read its data.
    comm.all_gather(source_N, out_S, name="b").wait()
    assert torch.equal(source_N, 2.0 * torch.arange(2 * 70_001))
    comm.close()


@on_ranks(2)
def test_a_gather_into_a_lent_buffer_waits_for_the_readers_of_a_reduction():
    comm = open_shm()
    source_N, out_S, own_S = (
        comm.allocate(4096, **INFO),
        torch.empty(2048),
        torch.full((2048,), 9.0),
    )
    source_N.fill_(comm.rank + 1.0)
    reduction = comm.reduce_scatter(out_S, source_N, name="r")
    if comm.rank == 0:
        reduction.wait()
        gather = comm.all_gather(source_N, own_S, name="g")
        waiting = threading.Thread(target=gather.wait)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        assert source_N[2048:].eq(1.0).all()  # rank 1 has not read it
        dist.barrier()
        waiting.join()
    else:
        gather = comm.all_gather(torch.empty(4096), own_S, name="g")
        dist.barrier()
        reduction.wait()
        gather.wait()
    assert out_S.eq(3.0).all()
    comm.close()


@on_ranks(3)
def test_memory_is_flat_over_hundreds_of_steps():
    comm = open_shm()
    W, sizes = comm.size, (8, 1000, 50_000)

    def step():
        for S in sizes:
            comm.all_gather(torch.empty(W * S), torch.ones(S), name=f"g{S}").wait()
        handles = []
        for S in sizes:
            source_N = comm.allocate(W * S, **INFO).fill_(1.0)
            handles.append(comm.reduce_scatter(torch.empty(S), source_N, name=f"l{S}"))
            handles.append(comm.reduce_scatter(torch.empty(S), torch.ones(W * S), name=f"r{S}"))
        for handle in handles:
            handle.wait()
        comm.broadcast(torch.ones(700), 0, name="b").wait()
        comm.all_gather_small(torch.zeros(3), name="n")
        comm.all_gather_small(torch.zeros(3), name="all have read")

    step()
    step()
    held = comm.scratch_nbytes
    for _ in range(200):
        step()
    # A rank may run ahead of another's reading by one collective more than it has so far.
    assert comm.scratch_nbytes <= 2 * held
    for _ in range(200):
        step()
    first = comm.scratch_nbytes
    for _ in range(100):
        step()
    assert comm.scratch_nbytes <= first + 50_000 * 4 + 4096
    comm.close()


@on_ranks(2)
def test_more_in_flight_than_the_ring_has_slots():
    comm = open_shm()
    outs = [torch.empty(2) for _ in range(2 * RING + 50)]
    handles = [
        comm.all_gather(out, torch.full((1,), comm.rank + i * 2.0), name="a")
        for i, out in enumerate(outs)
    ]
    for handle in reversed(handles):
        handle.wait()
    assert torch.equal(torch.cat(outs), torch.arange(2.0 * len(outs)))
    for _ in range(2 * RING):
        comm.all_gather_small(torch.zeros(1), name="n")
    comm.close()


@pytest.mark.parametrize("numel", [1, 53, 300_000, 7_000_001])
@on_ranks(3)
def test_broadcasts_of_any_size_arrive_whole_and_hold_little(numel):
    comm = open_shm()
    for turn in range(3):
        tensor = torch.full((numel,), -1.0)
        if comm.rank == 1:
            torch.arange(numel, out=tensor)
        comm.broadcast(tensor, 1, name="b").wait()
        assert torch.equal(tensor, torch.arange(float(numel))), turn
    assert comm.scratch_nbytes <= (6 << 20)
    comm.close()


@on_ranks(2)
def test_a_vector_larger_than_a_slot_is_gathered_too():
    comm = open_shm()
    rows = comm.all_gather_small(torch.arange(1000) + comm.rank, name="n")
    assert torch.equal(rows, torch.stack([torch.arange(1000), torch.arange(1000) + 1]))
    comm.close()


@on_ranks(2)
def test_blocks_that_nobody_asks_for_are_given_back():
    comm = open_shm()
    comm.all_gather(torch.empty(2 * 10**6), torch.ones(10**6), name="once").wait()
    comm.all_gather_small(torch.zeros(1), name="all have read")
    before = comm.scratch_nbytes
    for block in comm._ring.arena.blocks.values():
        block.used_s -= 100.0
    comm.all_gather(torch.empty(4096), torch.ones(2048), name="often").wait()
    assert before >= 4 * 10**6
    assert comm.scratch_nbytes == 8192
    comm.close()


# -- waiting ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_waiting_costs_no_processor_time():
    comm = open_shm()
    comm.all_gather_small(torch.zeros(1), name="warm")
    if comm.rank == 1:
        time.sleep(1.5)
    begun_s = time.thread_time()  # other threads of this process may work meanwhile
    comm.all_gather_small(torch.zeros(1), name="late")
    assert time.thread_time() - begun_s < 0.05
    comm.close()


def lost_with_no_guard(kind: str) -> tuple[str, float, bool]:
    comm = open_shm()
    comm.all_gather_small(torch.zeros(1), name="x")
    if comm.rank == 1:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "forget":
            del comm
        else:
            comm.close()
        return "", 0.0, False
    begun_s = time.monotonic()
    with pytest.raises(RankLost) as caught:
        comm.all_gather(torch.empty(8), torch.zeros(4), name="layers.0").wait()
    took_s = time.monotonic() - begun_s
    waits = comm.recorder.waiting is not None
    comm.close()
    return str(caught.value), took_s, waits


@pytest.mark.parametrize("kind", ["kill", "close", "forget"])
def test_without_a_watchdog_a_peer_that_is_gone_ends_the_wait(kind):
    died = {1: signal.SIGKILL} if kind == "kill" else None
    text, took_s, waits = run_ranks(lost_with_no_guard, 2, kind, expect_death=died, timeout=30)[0]
    assert "rank 1" in text
    assert "all_gather 'layers.0' (#2)" in text
    assert ("ended" if kind == "kill" else "closed its communicator") in text
    assert took_s < 3
    assert not waits


@on_ranks(2)
def test_what_was_posted_before_a_close_is_still_read():
    comm = open_shm()
    full_N = torch.empty(2 * 5000)
    handle = comm.all_gather(full_N, torch.full((5000,), float(comm.rank)), name="a")
    if comm.rank == 1:
        handle.wait()
        del handle
        comm.close()
        dist.barrier()
    else:
        dist.barrier()
        time.sleep(0.1)
        handle.wait()
        comm.close()
    assert torch.equal(full_N, torch.arange(2.0).repeat_interleave(5000))


@on_ranks(2)
def test_an_interrupt_gets_through_while_a_rank_waits():
    comm = open_shm()
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        begun_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            comm.all_gather_small(torch.zeros(1), name="never")
        assert time.monotonic() - begun_s < 2
    dist.barrier()
    comm.close()


@on_ranks(2)
def test_a_wait_ends_at_its_time_limit():
    comm = open_shm(timeout_s=0.5)
    if comm.rank == 0:
        with pytest.raises(RankLost, match="nothing was received for 0 s"):
            comm.all_gather_small(torch.zeros(1), name="never")
    dist.barrier()
    comm.close()


# -- opening and closing ---------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as lines:
        return sum("memfd:zeroshard" in line for line in lines)


@on_ranks(3)
def test_nothing_is_left_after_twenty_lives():
    comm = open_shm()
    comm.close()
    del comm
    gc.collect()
    before = descriptors()
    for _ in range(20):
        comm = open_shm()
        out_S = torch.empty(40_000)
        comm.reduce_scatter(out_S, comm.allocate(120_000, **INFO).fill_(1.0), name="a").wait()
        comm.all_gather(torch.empty(120_000), out_S, name="b").wait()
        comm.close()
        del comm
    assert descriptors() == before
    assert mappings() == 0


@on_ranks(2)
def test_lent_memory_outlives_the_communicator():
    comm = open_shm()
    tensor = comm.allocate(1000, **INFO).fill_(7.0)
    comm.close()
    del comm
    gc.collect()
    assert tensor.eq(7.0).all()
    assert mappings() > 0
    del tensor
    assert mappings() == 0


@on_ranks(2)
def test_a_forked_child_closes_nothing_of_its_parent():
    comm = open_shm()
    child = os.fork()
    if child == 0:
        comm._ring.arena.close()
        os._exit(0)
    os.waitpid(child, 0)
    rows = comm.all_gather_small(torch.tensor([comm.rank]), name="x")
    assert rows.flatten().tolist() == [0, 1]
    comm.close()


@pytest.mark.parametrize("odd", [0, 1])
@on_ranks(2)
def test_if_one_rank_cannot_all_take_sockets(odd):
    rank = dist.get_rank()
    before = shared_memory.unavailable
    if rank == odd:
        shared_memory.unavailable = lambda: (
            "it needs the store order of x86-64, and this is aarch64"
        )
    try:
        comm = make_comm(transport="auto")
        assert isinstance(comm, P2PComm)
        comm.close()
        with pytest.raises(ConfigError, match="not possible here: it needs the store order"):
            open_shm()
    finally:
        shared_memory.unavailable = before


@on_ranks(2)
def test_memory_that_cannot_be_opened_is_named():
    if dist.get_rank() == 1:
        before, shared_memory.PeerMapping = shared_memory.PeerMapping, _closed_door
    try:
        with pytest.raises(ConfigError, match="rank 1 cannot open the memory of rank 0: No such"):
            open_shm()
    finally:
        if dist.get_rank() == 1:
            shared_memory.PeerMapping = before


def _closed_door(*_):
    return os.open("/proc/1/fd/no", os.O_RDONLY)


@on_ranks(2)
def test_inference_mode_leaves_usable_blocks():
    comm = open_shm()
    with torch.inference_mode():
        comm.all_gather(torch.empty(4000), torch.ones(2000), name="a").wait()
    comm.all_gather_small(torch.zeros(1), name="all have read")
    blocks = list(comm._ring.arena.blocks.values())
    assert isinstance(blocks[0], Block)
    full_N = torch.empty(4000)
    comm.all_gather(full_N, torch.full((2000,), 2.0), name="a").wait()
    assert full_N.eq(2.0).all()
    comm.close()
