"""Plan, ledger and real memory agree in every tier. The disk transfers the bytes of the formula."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from census import (
    TRIVIAL_NBYTES,
    Stack,
    everything_alive,
    micro_step,
    stack_config,
    transport_nbytes,
)
from peak import give_back, resident_nbytes
from support.covering import FULL, sampled
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.core import tiers
from zeroshard.core.files import PAGE_NBYTES
from zeroshard.core.ledger import RESTING, TEMPORARY
from zeroshard.core.stages import state_nbytes
from zeroshard.core.tiers import TIERS, Tier
from zeroshard.memory import storage
from zeroshard.offload.capacity_check import ON_DISK, demand_of
from zeroshard.offload.disk_stores import DiskShardStore
from zeroshard.offload.grad_store import WRITES_IN_FLIGHT, DiskGradStore
from zeroshard.offload.swap_file import SwapFile
from zeroshard.zero.reduce import MAX_IN_FLIGHT

CHUNK_NUMEL = 2**14
"""Every unit of the model is cut on disk: about a hundred chunks."""

PSI = sum(p.numel() for p in Stack().parameters())
STEP_NBYTES = 4  # Adam counts the steps of every fragment
MIB = 2**20


def stores(path: Path, stage: int) -> dict[str, dict[str, Any]]:
    """All offload settings of this stage, as keys of DeepSpeed's configuration."""
    disk = {"device": "nvme", "nvme_path": str(path)}
    host = {"device": "cpu"}
    found: dict[str, dict[str, Any]] = {
        "all on the device": {},
        "optimizer in host memory": {"offload_optimizer": host},
        "three tenths of it": {"offload_optimizer": {**host, "ratio": 0.3}},
        "optimizer on disk": {"offload_optimizer": disk},
        "a part in each": {"offload_optimizer": {**disk, "ratio": 0.67, "max_in_cpu": 50_001}},
    }
    if stage == 3:
        found |= {
            "parameters in host memory": {"offload_param": host},
            "parameters on disk": {"offload_param": disk},
            "some parameters on disk": {"offload_param": {**disk, "max_in_cpu": 200_000}},
            "all in host memory": {"offload_optimizer": host, "offload_param": host},
            "all on disk": {"offload_optimizer": disk, "offload_param": disk},
        }
    return found


@contextmanager
def small_chunks() -> Iterator[None]:
    """Set small chunks, and restore the constant afterwards, because the rank processes are reused."""
    before, tiers.CHUNK_NUMEL = tiers.CHUNK_NUMEL, CHUNK_NUMEL
    try:
        yield
    finally:
        tiers.CHUNK_NUMEL = before


def files_of(engine: Engine) -> list[SwapFile]:
    return engine.runtime.stores.files


def train(engine: Engine, steps: int) -> None:
    for _ in range(steps * engine.accumulation.steps):
        micro_step(engine)
        engine.step()


Column = dict[str, int]


def columns(engine: Engine) -> tuple[dict[str, Column], dict[str, Column]]:
    """Planned and measured bytes: tier -> category -> bytes. What the report lacks is 0."""
    planned = {tier.name: dict.fromkeys(RESTING, 0) for tier in TIERS.values()}
    measured = {tier.name: dict.fromkeys(RESTING, 0) for tier in TIERS.values()}
    for row in engine.memory_report().rows:
        if row.planned is not None:
            planned[row.tier][row.category] = row.planned
            measured[row.tier][row.category] = row.measured
    return planned, measured


# ---------------------------------------------------------------------- the formula


def fragments_in(engine: Engine, *where: Tier) -> int:
    """Fragments of parameters whose state is stored in this tier. Each has a step count."""
    chunks = [chunk for shard in engine.runtime.optimizer.shards for chunk in shard.chunks]
    return sum(len(chunk.fragments) for chunk in chunks if chunk.tier in where)


def gradients(engine: Engine, stage: int, precision: str) -> tuple[int, int]:
    """Bytes of gradients on the device and on disk before the update. Reduced gradients are on disk if
    all state of their unit is on disk. Stage 1 sums unsharded micro-batches before it reduces them."""
    low = 4 if precision == "fp32" else 2
    many = engine.accumulation.steps > 1
    summed = 4 if many else low
    shards = engine.runtime.optimizer.shards
    on_disk = sum(
        shard.param_R.numel()
        for shard in shards
        if all(chunk.tier is Tier.DISK for chunk in shard.chunks)
    )
    if stage >= 2:
        return summed * (PSI // engine.dp_size - on_disk), summed * on_disk
    local = PSI if many else PSI - engine.dp_size * on_disk
    return summed * local, low * on_disk


def device_formula(engine: Engine, stage: int, precision: str, zero: dict[str, Any]) -> Column:
    """Section 3.1 of the ZeRO paper, minus the offloaded bytes: the part ``ratio`` of master and state,
    up to 64 elements, the parameters and the gradients that wait on disk."""
    world = engine.dp_size
    low, master = (4, 0) if precision == "fp32" else (2, 4)
    updated = PSI // world
    ratio = 0.0
    if "offload_optimizer" in zero:
        ratio = zero["offload_optimizer"].get("ratio", 1.0)
    staying = -(-(updated - int(ratio * updated)) // 64) * 64
    return {
        "parameters": 0 if "offload_param" in zero else low * PSI // (world if stage == 3 else 1),
        "gradients": gradients(engine, stage, precision)[0],
        "master": master * staying,
        "optimizer": 8 * staying + STEP_NBYTES * fragments_in(engine, Tier.DEVICE),
    }


def whole(engine: Engine, stage: int, precision: str) -> Column:
    """The sum over all tiers. Offload does not change it."""
    formula = device_formula(engine, stage, precision, {})
    return {
        **formula,
        "gradients": sum(gradients(engine, stage, precision)),
        "optimizer": 8 * PSI // engine.dp_size
        + STEP_NBYTES * fragments_in(engine, *TIERS.values()),
    }


def check_columns(path: Path, precisions: list[tuple[str, int]], stages: tuple[int, ...]) -> None:
    with small_chunks():
        for stage in stages:
            for precision, accumulation in precisions:
                for store, zero in stores(path, stage).items():
                    config = stack_config(stage, precision, accumulation, **zero)
                    with Engine(Stack(), config=config) as engine:
                        train(engine, 2)
                        case = f"stage {stage}, {precision} x {accumulation}, {store}"
                        planned, measured = columns(engine)
                        assert measured == planned, case
                        assert planned["device"] == device_formula(
                            engine, stage, precision, zero
                        ), case
                        together = {
                            c: sum(planned[t.name][c] for t in TIERS.values()) for c in RESTING
                        }
                        assert together == whole(engine, stage, precision), case


@on_ranks(1)
def test_one_rank_plans_every_store_to_the_byte(tmp_path):
    if FULL:
        check_columns(tmp_path, [("bf16", 1), ("fp32", 3)], (1, 3))
    else:
        check_columns(tmp_path, [("fp32", 3)], (1,))
        check_columns(tmp_path, [("bf16", 1)], (3,))


@on_ranks(2)
def test_two_ranks_plan_every_store_to_the_byte(tmp_path):
    check_columns(tmp_path, [("bf16", 3)], (1, 2, 3) if FULL else (2, 3))
    check_columns(
        tmp_path, [("bf16", 1), ("fp16", 1), ("fp32", 1)] if FULL else [("fp16", 1)], (3,)
    )


@pytest.mark.full
@on_ranks(3)
def test_three_ranks_plan_every_store_to_the_byte(tmp_path):
    check_columns(tmp_path, [("bf16", 1), ("fp32", 1)], (1, 3))


@on_ranks(2)
def test_with_all_on_disk_a_device_holds_nothing_and_the_host_step_counts(tmp_path):
    with small_chunks():
        config = stack_config(3, **stores(tmp_path, 3)["all on disk"])
        with Engine(Stack(), config=config) as engine:
            train(engine, 2)
            nothing = dict.fromkeys(RESTING, 0)
            _, measured = columns(engine)
            assert measured == {
                "device": nothing,
                "host": {**nothing, "optimizer": STEP_NBYTES * fragments_in(engine, Tier.DISK)},
                "disk": {
                    "parameters": 2 * PSI // 2,
                    "gradients": 2 * PSI // 2,
                    "master": 4 * PSI // 2,
                    "optimizer": 8 * PSI // 2,
                },
            }


# ---------------------------------------------------------------------- what is really there


def check_new_memory(before: dict[int, int], engine: Engine, where: object) -> None:
    """New memory equals the counted bytes, at the latest when the disk threads have finished their
    work."""
    ledger = engine.runtime.ledger
    for _ in range(50):
        held = sum(
            ledger.nbytes(category, tier)
            for category in (*RESTING, *TEMPORARY)
            for tier in (Tier.DEVICE, Tier.HOST)
        )
        beside = transport_nbytes(engine)
        alive = everything_alive()
        new = sum(nbytes for key, nbytes in alive.items() if key not in before)
        if 0 <= new - held - beside <= TRIVIAL_NBYTES:
            return
        time.sleep(0.01)
    pytest.fail(f"{where}: {new} bytes are new, {held} counted, {beside} beside them")


def check_census(
    path: Path, stages: tuple[int, ...], precision: str, accumulation: int = 1
) -> None:
    """Between backward and step, all live storages are in the ledger's device and host columns. The
    exceptions are the communicator's memory and trivial tensors."""
    with small_chunks():
        for stage in stages:
            for store, zero in stores(path, stage).items():
                storage._weights.clear()  # they would stay from one engine to the next
                before = everything_alive()
                model = Stack()
                engine = Engine(model, config=stack_config(stage, precision, accumulation, **zero))
                with engine:
                    for _ in range(3 * accumulation):
                        micro_step(engine)
                        check_new_memory(before, engine, (stage, store))
                        engine.step()
                del model, engine


@pytest.mark.parametrize(
    ("precision", "accumulation"), sampled([("bf16", 2), ("bf16", 1), ("fp32", 1)], every=3)
)
@on_ranks(2)
def test_all_live_memory_is_in_the_ledger_on_two_ranks(precision, accumulation, tmp_path):
    check_census(tmp_path, (1, 2, 3), precision, accumulation)


@on_ranks(1)
def test_all_live_memory_is_in_the_ledger_on_one_rank(tmp_path):
    check_census(tmp_path, (1, 3), "bf16")


@on_ranks(3)
def test_all_live_memory_is_in_the_ledger_on_three_ranks(tmp_path):
    check_census(tmp_path, (3,), "bf16")


@on_ranks(2)
def test_a_file_reserves_what_the_plan_puts_on_disk(tmp_path):
    """The file may be larger by less than a page for every extent."""
    with small_chunks():
        for stage in (1, 3):
            for store, zero in stores(tmp_path, stage).items():
                with Engine(Stack(), config=stack_config(stage, **zero)) as engine:
                    planned = sum(columns(engine)[0]["disk"].values())
                    reserved = sum(file.reserved_nbytes for file in files_of(engine))
                    extents = 3 * fragments_in(engine, Tier.DISK) + 2 * len(engine.runtime.units)
                    assert 0 <= reserved - planned <= extents * PAGE_NBYTES, (stage, store)


# ---------------------------------------------------------------------- what the disk moves


class CheckpointedStack(Stack):
    """Blocks run again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        y: Tensor = self.out(x)
        return y


def moved_nbytes(file: SwapFile, nbytes: int) -> int:
    """Bytes that system calls transfer for an extent: whole pages, without the page cache."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES if file.direct else nbytes


def finish(engine: Engine) -> None:
    """Wait until all shards are written to the disk."""
    for unit in engine.runtime.units:
        if isinstance(unit.store, DiskShardStore):
            unit.store.finish()


def arrive(engine: Engine) -> None:
    """Wait until all gradients are written to the disk."""
    for buffer in engine.runtime.reducer.buffers:
        if isinstance(buffer.store, DiskGradStore):
            buffer.store.finish()


def traffic_of_a_step(engine: Engine, file: SwapFile) -> tuple[int, int]:
    """Bytes read and written. Waits for the writes of shards before and after the step, and for those of
    gradients in between. Without the waits the last ones would be read from memory."""
    finish(engine)
    before = file.read_nbytes, file.written_nbytes
    for _ in range(engine.accumulation.steps):
        micro_step(engine)
        arrive(engine)
        engine.step()
    finish(engine)
    return file.read_nbytes - before[0], file.written_nbytes - before[1]


REUSE = {
    "by default": ({}, ["root", "blocks.3"]),
    "no unit": ({"stage3_max_reuse_distance": 0}, []),
}
"""Which units stay full from forward to backward: one read serves both."""


@pytest.mark.parametrize("model", [Stack, CheckpointedStack])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("reuse", REUSE)
@on_ranks(2)
def test_shards_are_read_for_each_pass_and_the_update_and_written_once(
    reuse, accumulation, model, tmp_path
):
    """Forward and backward of each of ``a`` micro-batches read the shard to gather a unit. The
    update reads it once more and writes it. This gives 2 a + 1 reads, minus one per micro-batch for
    units that stay gathered between forward and backward."""
    keys, kept = REUSE[reuse]
    keys = {**keys, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with Engine(model(), config=stack_config(3, "bf16", accumulation, **keys)) as engine:
        (file,) = files_of(engine)
        train(engine, 1)  # learns the order of units
        read, written = traffic_of_a_step(engine, file)
        shards = {
            unit.name: moved_nbytes(file, 2 * unit.layout.shard_numel)
            for unit in engine.runtime.units
        }
        total, spared = sum(shards.values()), sum(shards[name] for name in kept)
        assert read == (2 * accumulation + 1) * total - accumulation * spared
        assert written == total


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_state_is_read_once_and_written_once_in_a_step(stage, precision, tmp_path):
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with (
        small_chunks(),
        Engine(Stack(), config=stack_config(stage, precision, 3, **zero)) as engine,
    ):
        (file,) = files_of(engine)
        train(engine, 1)  # the first step creates the state
        read, written = traffic_of_a_step(engine, file)
        disk = columns(engine)[1]["disk"]
        reductions = 3 if stage > 1 else 1
        grads = moved_gradients(engine, file)
        assert read == written == file.reserved_nbytes + (reductions - 1) * grads
        state = disk["master"] + disk["optimizer"]
        assert state == (12 if precision == "bf16" else 8) * PSI // 2
        chunks = sum(len(shard.chunks) for shard in engine.runtime.optimizer.shards)
        assert 0 <= read - reductions * grads - state <= 3 * chunks * PAGE_NBYTES


def moved_gradients(engine: Engine, file: SwapFile) -> int:
    """Bytes that are transferred if every reduced gradient is written to the disk once."""
    many = engine.accumulation.steps > 1 and engine.runtime.stage.shards_grads
    rows = [(unit.layout.shard_numel, unit.row) for unit in engine.runtime.units]
    return sum(
        moved_nbytes(file, numel * (row.grad_accum if many else row.reduce).itemsize)
        for numel, row in rows
    )


@on_ranks(2)
def test_the_first_step_reads_no_moments_and_a_skipped_one_nothing(tmp_path):
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with Engine(Stack(), config=stack_config(1, "fp16", **zero)) as engine:
        (file,) = files_of(engine)
        read, written = traffic_of_a_step(engine, file)
        assert written == file.reserved_nbytes
        grads = moved_gradients(engine, file)
        pages = engine.runtime.stores.timeline.read_nbytes  # by the update; all else are gradients
        assert 0 <= pages - 4 * PSI // 2 <= PAGE_NBYTES * len(engine.runtime.units)
        assert read == pages + grads
        before = file.read_nbytes, file.written_nbytes
        x = torch.full((2, 384), torch.inf, dtype=torch.float16)
        engine.backward(engine(x).float().square().mean())
        engine.step()
        assert engine.last_step.skipped
        assert (file.read_nbytes, file.written_nbytes) == (before[0], before[1] + grads)


@pytest.mark.parametrize("accumulation", [1, 3])
@on_ranks(2)
def test_the_forecast_counts_what_a_step_moves(accumulation, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": disk, "offload_param": disk, "stage3_max_reuse_distance": 0}
    with small_chunks():
        config = stack_config(3, "bf16", accumulation, **zero)
        with Engine(Stack(), config=config) as engine:
            (file,) = files_of(engine)
            train(engine, 1)
            read, written = traffic_of_a_step(engine, file)
            plan = state_nbytes(engine.runtime.plan, engine.runtime.stage, engine.global_rank)
            demand = demand_of(
                plan, on_cpu=True, micro_batches=accumulation, reductions=accumulation
            )
            extents = 3 * fragments_in(engine, Tier.DISK) + 10 * len(engine.runtime.units)
            planned = zip(*(demand.traffic(kind) for kind in ON_DISK), strict=True)
            for moved, forecast in zip((read, written), map(sum, planned), strict=True):
                assert 0 <= moved - forecast <= extents * PAGE_NBYTES


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_gradients_wait_on_disk_and_few_are_in_memory_at_a_time(stage, accumulation, tmp_path):
    """In backward: two gradients that are being written, and a third until the first write is known
    to have ended. In the update: the current and the next gradient. In addition, gradients to which
    reductions in flight will be added are read back."""
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    config = stack_config(stage, "bf16", accumulation, **zero)
    with Engine(Stack(depth=12), config=config) as engine, pytest.MonkeyPatch.context() as patch:
        ledger, units = engine.runtime.ledger, engine.runtime.units
        most_nbytes, account = 0, DiskGradStore._report

        def watched(rest: DiskGradStore) -> None:
            nonlocal most_nbytes
            account(rest)
            scratch = ledger.live["scratch", Tier.HOST.name].items()
            here = sum(nbytes for owner, nbytes in scratch if owner.endswith("(gradient)"))
            most_nbytes = max(most_nbytes, here)

        patch.setattr(DiskGradStore, "_report", watched)
        reduces_each = stage > 1 and accumulation > 1
        for _ in range(2 * accumulation):
            micro_step(engine)
            complete = engine.is_gradient_accumulation_boundary()
            if complete or stage > 1:
                assert ledger.nbytes("gradients", Tier.DEVICE) == 0
                assert ledger.nbytes("gradients", Tier.HOST) == 0
                waiting = (4 if reduces_each else 2) * sum(u.layout.shard_numel for u in units)
                assert ledger.nbytes("gradients", Tier.DISK) == waiting
            engine.step()
            assert not complete or ledger.nbytes("gradients", Tier.DISK) == 0
        # A sum of stage 1 is a slice of this rank's local sum, which is kept as long as the slice.
        itemsize = 4 if accumulation > 1 else 2
        slots = WRITES_IN_FLIGHT + 1 + (MAX_IN_FLIGHT + 1 if reduces_each else 0)
        assert 0 < most_nbytes <= slots * itemsize * max(u.layout.shard_numel for u in units)
        assert len(units) > 2 * slots


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_gradient_is_on_its_way_before_it_is_waited_for(stage, tmp_path):
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    config = stack_config(stage, "bf16", 2, **zero)
    with Engine(Stack(), config=config) as engine, pytest.MonkeyPatch.context() as patch:
        begun, bring = [], DiskGradStore.acquire

        def watched(rest: DiskGradStore) -> Tensor:
            begun.append(rest._values_S is not None)
            return bring(rest)

        patch.setattr(DiskGradStore, "acquire", watched)
        for _ in range(2):
            micro_step(engine)
            arrive(engine)
            engine.step()
        units = len(engine.runtime.units)
        assert len(begun) == (units if stage == 1 else 2 * units)
        assert begun.count(False) == 1  # the first of the update


# ---------------------------------------------------------------------- life


@on_ranks(2)
def test_a_hundred_steps_with_everything_on_disk_leave_memory_flat(tmp_path):
    """No tensor, block of the file, thread or half megabyte of memory is added."""
    config = {**stack_config(3, **stores(tmp_path, 3)["all on disk"]), "transport": "p2p"}
    with small_chunks(), Engine(Stack(), config=config) as engine:
        (file,) = files_of(engine)

        def held() -> int:
            finish(engine)
            return sum(everything_alive().values())

        for step in range(100):
            train(engine, 1)
            if step == 1:
                tensors, reserved = held(), file.reserved_nbytes
            if step == 50:
                give_back()
                resident, threads = resident_nbytes(), threading.active_count()
        assert held() <= tensors + 512  # a few numbers on their way
        assert file.reserved_nbytes == reserved
        assert threading.active_count() == threads
        give_back()
        assert resident_nbytes() - resident < MIB // 2
