"""A run reports about itself what the configuration requests, on the right rank."""

from __future__ import annotations

import csv
import gc
import logging
import re
import weakref
from contextlib import contextmanager

import pytest
import torch
from loops import CASE, STAGES, config_for, data, loss_of, open_engine, own_data, train
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.engine import initialize


@contextmanager
def logged():
    """The messages of the library inside the block."""
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("zeroshard"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_line_every_few_steps_on_rank_0(stage):
    with logged() as lines, open_engine(stage, steps_per_print=2, gradient_clipping=0.01) as engine:
        train(engine, own_data(engine, 5))
    steps = [line for line in lines if line.startswith("step=")]
    if engine.global_rank:
        assert steps == []
    else:
        assert [line.split()[0] for line in steps] == ["step=2", "step=4"]
        assert re.search(r" skipped=0 loss=[\d.]+ lr=\[0.01\] grad_norm=", steps[0])
        assert steps[0].endswith("-> clipped 0.01 loss_scale=1")


@pytest.mark.parametrize("every", [None, 0, float("inf")])
def test_no_line_unless_asked_for(every):
    with logged() as lines, open_engine(steps_per_print=every) as engine:
        train(engine, data(3))
    assert lines == []


@on_ranks(2)
def test_the_csv_monitor_gets_lr_and_loss_scale_by_samples(tmp_path):
    keys = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "wall_clock_breakdown": True,
    }
    with open_engine(2, **keys) as engine:
        train(engine, own_data(engine, 3, 2))
    torch.distributed.barrier()
    files = {path.stem: list(csv.reader(path.open())) for path in (tmp_path / "job").iterdir()}
    assert files["Train_Samples_lr"][1:] == [["12", "0.01"], ["24", "0.01"], ["36", "0.01"]]
    assert [row[1] for row in files["Train_Samples_loss_scale"][1:]] == ["1.0"] * 3
    for phase in ("forward", "backward", "step"):
        rows = files[f"Train_Samples_elapsed_time_ms_{phase}"][1:]
        assert len(rows) == 3
        assert all(float(ms) > 0 for _, ms in rows)


@on_ranks(2)
def test_breakdowns_of_time_memory_and_traffic():
    keys = {
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "comms_logger": {"enabled": True},
    }
    with logged() as lines, open_engine(3, **keys) as engine:
        train(engine, own_data(engine, 2))
        full = sum(unit.layout.full_numel for unit in engine.runtime.units)
    if engine.global_rank:
        assert lines == []
        return
    (times,) = [line for line in lines if line.startswith("host ms per step: ")]
    assert all(f"{phase} " in times for phase in ("forward", "backward", "step"))
    held = [line for line in lines if line.startswith("MiB held after ")]
    assert [line.split()[3] for line in held] == ["forward:", "backward:", "step:"]
    assert all("parameters 0.0" in line for line in held)
    traffic = [line for line in lines if line.startswith("collectives per step: ")]
    (reduced,) = [line for line in traffic if " reduce_scatter " in line]
    assert f" {4 * full / 2 / 1e6:.3f} MB sent" in reduced  # each rank sends half of fp32 gradients


@on_ranks(2)
def test_the_traffic_log_can_be_narrowed_and_widened():
    section = {"enabled": True, "verbose": True, "prof_all": False, "prof_ops": ["reduce_scatter"]}
    with logged() as lines, open_engine(2, steps_per_print=1, comms_logger=section) as engine:
        train(engine, own_data(engine, 1))
    if engine.global_rank == 0:
        traffic = [line for line in lines if line.startswith("collectives per step: ")]
        assert all(": reduce_scatter" in line for line in traffic)
        assert any("reduce_scatter blocks.1 1 calls" in line for line in traffic)


def test_a_loop_that_steps_only_at_boundaries_is_warned_once():
    """PyTorch's idiom would silently train on every 16th micro-batch."""
    with logged() as lines, open_engine(gradient_accumulation_steps=4) as engine:
        for micros in data(2, 4):
            for batch in micros:
                engine.backward(loss_of(engine, batch))
            engine.step()
        assert engine.global_steps == 0
    assert len(lines) == 1
    assert lines[0].startswith("engine.step() after 4 backwards counts as one micro-batch of 4. If")


@pytest.mark.parametrize(
    ("count", "texts"), [(3, ["3 backwards"]), (40, ["16 backwards", "40 backwards"])]
)
def test_a_loop_without_step_is_warned_of(count, texts, tmp_path):
    """After a while, and at a save and at the end if nothing was trained."""
    with logged() as lines, open_engine() as engine:
        (batch,) = data(1, 1)[0]
        for _ in range(count):
            engine.backward(loss_of(engine, batch))
    assert [line.partition(" without engine.step(): ")[0] for line in lines] == texts
    with logged() as lines, open_engine() as engine:  # a plain loop's zero_grad() hides nothing
        for _ in range(20):
            engine.optimizer.zero_grad()
            engine.backward(loss_of(engine, batch))
    assert [line.partition(" ")[0] for line in lines][:1] == ["16"]
    with logged() as lines, open_engine() as engine:
        engine.backward(loss_of(engine, batch))
        engine.save_checkpoint(tmp_path)
        assert lines[0].startswith("1 backwards without engine.step(): nothing is trained")
    with logged() as lines, open_engine() as engine:
        for _ in range(count):
            engine.backward(loss_of(engine, batch))
            engine.step()
        engine.backward(loss_of(engine, batch))
    assert lines == []


def test_an_engine_without_an_optimizer_needs_no_step():
    with logged() as lines, open_engine(optimizer=None) as engine:
        (batch,) = data(1, 1)[0]
        for _ in range(20):
            engine.backward(loss_of(engine, batch))
    assert lines == []


@pytest.mark.parametrize("losses", [1, 3])
def test_several_losses_in_a_micro_batch_are_not_warned_of(losses):
    with logged() as lines, open_engine(gradient_accumulation_steps=4) as engine:
        for batch in data(1, 4)[0]:
            for _ in range(losses):
                engine.backward(loss_of(engine, batch))
            engine.step()
        assert engine.global_steps == 1
    assert lines == []


def test_breakdowns_change_nothing_else():
    with open_engine(3) as engine:
        train(engine, data(3))
        expected = [full.clone() for _, full in engine.iter_full_params()]
    with open_engine(3, wall_clock_breakdown=True, memory_breakdown=True) as engine:
        train(engine, data(3))
        for (_, full), wanted in zip(engine.iter_full_params(), expected, strict=True):
            assert torch.equal(full, wanted)


class Node:
    pass


def test_without_pythons_collector_the_engine_collects_at_boundaries():
    assert gc.isenabled()
    with open_engine(1, disable_python_gc=True) as engine:
        assert not gc.isenabled()
        node = Node()
        node.itself = node
        gone = weakref.ref(node)
        del node
        assert gone() is not None
        train(engine, data(1))
        assert gone() is None
    assert gc.isenabled()


@pytest.mark.parametrize("dump", [False, True])
def test_dump_state_prints_every_key(dump, monkeypatch):
    monkeypatch.setattr("zeroshard.engine.initialize._told", set())  # as in a new process
    with logged() as lines:
        engine, *_ = zeroshard.initialize(model=CASE.build(), config=config_for(1, dump_state=dump))
        engine.close()
    text = "\n".join(lines)
    assert "ZeRO stage 1 on 1 rank: " in text
    assert ("stage3_max_live_parameters" in text) is dump


@pytest.mark.parametrize("level", ["info", "debug"])
def test_tables_are_printed_on_request_and_warnings_last(level, monkeypatch):
    monkeypatch.setattr("zeroshard.engine.initialize._told", set())
    config = config_for(1, log_level=level, fp16={"enabled": False, "loss_scale": "0"})
    del config["gradient_clipping"]
    with logged() as lines:
        engine, *_ = zeroshard.initialize(model=CASE.build(), config=config)
        engine.close()
    text = "\n".join(lines)
    assert ("other keys have their default values" in text) is (level == "debug")
    assert ("precision: plain" in text) is (level == "debug")
    assert len(lines) == (6 if level == "debug" else 4), lines
    assert 'set "log_level" to "debug"' in lines[1]
    assert "was read as a number" in lines[-2]
    assert lines[-1].startswith("gradient_clipping is not given")


def test_a_warning_is_marked():
    form = initialize._Format()
    for level, mark in ((logging.INFO, ""), (logging.WARNING, "warning: ")):
        record = logging.LogRecord("zeroshard", level, "", 0, "clipped at %s", ("1.0",), None)
        assert form.format(record) == f"[zeroshard] {mark}clipped at 1.0"


@pytest.mark.parametrize(("level", "expected"), [("warning", logging.WARNING), (None, 17)])
def test_log_level_is_set_only_on_request(level, expected):
    logger = logging.getLogger("zeroshard")
    before = logger.level
    logger.setLevel(17)
    try:
        engine, *_ = zeroshard.initialize(model=CASE.build(), config=config_for(log_level=level))
        engine.close()
        assert logger.level == expected
    finally:
        logger.setLevel(before)


# ---------------------------------------------------------------------- operations


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_operations_of_one_forward_are_counted_on_rank_0(stage, tmp_path):
    losses = []
    for enabled in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW"},
            "unit_min_numel": 1,
            "zero_optimization": {"stage": stage},
            "flops_profiler": {"enabled": enabled, "profile_step": 1, "top_modules": 2},
        }
        with logged() as lines, zeroshard.Engine(model, config=config) as engine:
            seen = []
            for micro in range(6):
                x = torch.full((2, 6), float(micro + engine.global_rank))
                engine.backward(loss := engine(x).square().mean())
                engine.step()
                losses.append(loss.item())
                seen.append(sum("FLOPS" in line for line in lines))
        if not enabled or engine.global_rank:
            assert seen == [0] * 6
            continue
        assert seen[:2] == [0, 0] and 0 < seen[2] == seen[5], "the first forward after step 1"
        assert lines[0].startswith("forward after step 1: 280 FLOPS, 140 MACs, 81 parameters, ")
        assert "most at depth 1: Sequential.0 240 FLOPS, Sequential.2 40 FLOPS" in lines
        assert "  Sequential.2: 40 FLOPS" in lines
    assert losses[:6] == losses[6:]


def test_a_count_of_operations_goes_where_the_configuration_sends_it(tmp_path):
    section = {"enabled": True, "profile_step": 0, "output_file": str(tmp_path / "flops"),
               "detailed": False}  # fmt: skip
    with logged() as lines, open_engine(0, flops_profiler=section) as engine:
        train(engine, data(2))
    text = (tmp_path / "flops").read_text()
    assert text.startswith("forward after step 0: ") and "Global" not in text and not lines
