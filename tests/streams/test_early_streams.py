"""Updates that begin in backward, on pretended devices: in order, and beside backward."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from kit import engine
from scenarios import PROGRAMS, SPECIAL, Scenario, cuda, model, run_scenario, zero_section
from stepwise import batch, loss_of, report
from support.covering import covering, sampled
from zeroshard_testing import on_ranks

from zeroshard.offload.async_update import EarlyUpdate, EarlyUpdates
from zeroshard.optim import native_adam

EARLY, HOST = zero_section("early", ""), zero_section("optimizer", "")
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
PROGRAMS_HERE = (*PROGRAMS, "unused_module", "masters", "sums", "load", "close_by_error")
SCENARIOS = [
    Scenario(*row)
    for row in covering(
        [
            (stage, "early", program, ranks, precision, query)
            for stage in (1, 2, 3)
            for program in PROGRAMS_HERE
            for ranks in (1, 4)
            for precision in ("fp32", "bf16", "fp16")
            for query in ("always", "never")
            if ranks == 1 or program not in ("background_save", "load")  # a save needs all ranks
        ]
    )
]


@pytest.mark.parametrize("scenario", sampled(SCENARIOS, every=9), ids=str)
@on_ranks(1, group=False)
def test_nothing_comes_too_early(scenario):
    assert scenario.program in PROGRAMS | SPECIAL
    outcome = run_scenario(scenario)
    assert not outcome.findings, str(outcome)
    assert outcome.is_equal in (True, None), "values differ from those of the CPU"


def open_engine(zero: dict, *, stage: int, precision: str = "bf16", **keys):
    native_adam.prepare()
    native_adam.wait()
    return engine(model(), stage, precision, optimizer=ADAMW, zero_optimization=zero, **keys)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1, group=False)
def test_all_updates_end_before_step_is_called_and_the_main_thread_never_waits(stage, ranks):
    with cuda(ranks) as watch:
        with open_engine(EARLY, stage=stage) as trained:
            chunks = sum(len(shard.chunks) for shard in trained.runtime.optimizer.shards)
            ended, run = [], EarlyUpdate.run

            def counted(early, *args):
                run(early, *args)
                ended.append(early)

            with mock.patch.object(EarlyUpdate, "run", counted):
                for at in range(3):
                    ended.clear()
                    x_BD = batch(at, "cuda", "bf16")
                    with watch.phase(f"backward {at}"):
                        trained.backward(loss_of(trained, x_BD))
                    trained.runtime.optimizer._worker.wait()
                    before = len(ended)
                    with watch.phase(f"step {at}"):
                        trained.step()
                    assert before == len(ended) == (chunks if at else 0)
                    if at:  # the first update is the optimizer's own step, on the main thread
                        assert not watch.waits(f"backward {at}", thread="main")
                        assert not watch.waits(f"step {at}", thread="main")
        assert watch.findings == [], report(watch)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1, group=False)
def test_bytes_that_are_copied_are_those_of_late_updates_and_one_number(stage):
    moved = []
    for zero in (HOST, EARLY):
        with cuda() as watch:
            with open_engine(zero, stage=stage, gradient_clipping=1e-3) as trained:
                for at in range(2):
                    trained.backward(loss_of(trained, batch(at, "cuda", "bf16")))
                    trained.step()
                trained.eval()
                loss_of(trained, batch(0, "cuda", "bf16"))  # waits for the updates
                found = trained.runtime.stores.moved_nbytes
                moved.append((found["down_nbytes"], found["up_nbytes"]))
            assert watch.findings == [], report(watch)
    (late_down, late_up), (early_down, early_up) = moved
    assert early_up == late_up
    assert early_down == late_down + 8  # the first step has no state yet, and guesses nothing


@on_ranks(1, group=False)
def test_a_step_that_overflows_on_the_device_is_taken_back_by_the_worker():
    """The host does not know that the step is skipped when it ends."""
    values = []
    keys = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    for device, zero in (("cpu", {}), ("cuda", EARLY)):
        with cuda() if zero else contextlib.nullcontext() as watch:
            with open_engine(zero, stage=2, precision="fp16", **keys) as trained:
                for at in range(6):
                    size = 1e9 if at == 3 else 1.0
                    loss = loss_of(trained, batch(at, device, "fp16")) * size
                    trained.backward(loss)
                    trained.step()
                values.append([full.cpu().clone() for _, full in trained.iter_full_params()])
                skipped = trained.skipped_steps
                if zero:
                    assert trained.runtime.optimizer.early.begun
            assert watch is None or watch.findings == [], report(watch)
        assert skipped >= 1
    assert all(map(torch.equal, *values))


# ---------------------------------------------------------------------- threads


@on_ranks(1, group=False)
def test_without_the_wait_for_a_withdrawn_update_a_race_is_found():
    """A read of the state begins while the worker writes it."""

    def forgets(early):
        early.guess.is_refused = True

    gate = threading.Event()
    with cuda() as watch:
        with open_engine(EARLY, stage=2) as trained:
            for at in range(3):
                with mock.patch.object(EarlyUpdate, "withdraw", forgets):
                    trained.backward(loss_of(trained, batch(at, "cuda", "bf16")))
                    if at == 2:
                        state = next(iter(trained.basic_optimizer.state.values()))
                        state["exp_avg"].sum()
                gate.set()
                trained.step()
        assert watch.findings


def test_after_each_refused_step_in_a_row_more_steps_wait_for_the_norm():
    class Ended:
        def cancelled(self):
            return False

        def result(self):
            return None

    class Streams:
        def d2h(self, source, target):
            return None

    class Fused:
        def changed(self):
            return []

    class Chunk:
        gradient = (None, None)

    worker = SimpleNamespace(start=lambda _task: Ended(), threads=1)
    early = EarlyUpdates(worker, (), Streams(), torch.zeros(1, dtype=torch.float64))
    early.guess = lambda: torch.ones(())
    chunks, began = [Chunk(), Chunk()], []
    for at in range(100):
        before = early.begun
        for chunk in chunks:
            early.begin(chunk, Fused(), [{"lr": 0.1, "params": ()}])
        early.hand_over()
        if early.begun > before:
            assert early.begun == before + len(chunks)
            began.append(at)
            early._last.is_refused = at < 70
    assert began == [0, 2, 6, 14, 30, 62, 94, 95, 96, 97, 98, 99]
