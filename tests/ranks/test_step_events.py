"""The events of steps: equal at every stage, each value at its own step, the loss a mean over ranks."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import pytest
import torch
from loops import STAGES, data, loss_of, open_engine, own_data, train
from torch import nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.comm.collectives import Comm
from zeroshard.engine import build_observer
from zeroshard.metrics.step_stream import tokens_in
from zeroshard.report.record import read_record

NAMES = {
    "train_loss", "lr", "loss_scale", "grad_norm", "grad_norm_clipped", "skipped", "exposed_comm_ms",
}  # fmt: skip


class Kept:
    """The values of events by name, over samples."""

    def __init__(self, engine: zeroshard.Engine) -> None:
        self.values: dict[str, dict[int, float]] = {}
        engine.monitors.add(self.take)

    def take(self, events) -> None:
        for name, value, samples in events:
            self.values.setdefault(name.removeprefix("Train/Samples/"), {})[samples] = value


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_every_stage_has_the_same_events_and_the_loss_is_the_mean(stage):
    with open_engine(stage, gradient_accumulation_steps=2, gradient_clipping=0.5) as engine:
        kept = Kept(engine)
        mine, reports = [], []
        for micros in own_data(engine, 3, 2):
            losses = []
            for batch in micros:
                loss = loss_of(engine, batch)
                losses.append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
            mine.append(sum(losses) / 2)
            reports.append(engine.last_step)
    all_losses = [None, None]
    torch.distributed.all_gather_object(all_losses, mine)
    wanted = [sum(pair) / 2 for pair in zip(*all_losses)]
    assert [report.loss for report in reports] == pytest.approx(wanted, rel=1e-6)
    if engine.global_rank:
        assert kept.values == {}
        return
    samples = [12, 24, 36]
    assert NAMES <= kept.values.keys()
    assert all(list(kept.values[name]) == samples for name in NAMES)
    for values, report in zip(
        zip(*(kept.values[name].values() for name in sorted(NAMES))), reports
    ):
        by_name = dict(zip(sorted(NAMES), values))
        assert by_name["train_loss"] == report.loss
        assert by_name["grad_norm"] == report.grad_norm
        assert by_name["grad_norm_clipped"] == pytest.approx(report.grad_norm_clipped)
        assert by_name["lr"] == report.lr and by_name["skipped"] == 0.0


def test_lr_and_loss_scale_are_those_after_the_step_as_in_deepspeed():
    """An infinite loss in the second step: neither the schedule nor the counter of good steps goes on."""
    keys = {
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 8, "warmup_type": "linear"},
        },
        "fp16": {
            "enabled": True,
            "initial_scale_power": 4,
            "loss_scale_window": 2,
            "hysteresis": 1,
        },
    }
    with open_engine(1, **keys) as engine:
        kept, after = Kept(engine), []
        for number, (batch,) in enumerate(own_data(engine, 5)):
            loss = loss_of(engine, batch)
            engine.backward(loss * float("inf") if number == 1 else loss)
            engine.step()
            after.append((engine.get_lr()[0], float(engine._update._scaler.scale)))
    lrs, scales = (list(kept.values[name].values()) for name in ("lr", "loss_scale"))
    assert list(zip(lrs, scales)) == after
    assert len(set(lrs)) == 4 and lrs[0] == lrs[1]
    assert scales == [16, 8, 8, 8, 16]


@pytest.mark.parametrize("counts", [False, True])
@on_ranks(2)
def test_mfu_is_from_the_measured_count_if_operations_are_counted(counts, tmp_path):
    """Rows of a table are parameters and no operations: 6 for each parameter is too much."""
    model = nn.Sequential(nn.Embedding(80, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True},
        "flops_profiler": {"enabled": counts, "output_file": str(tmp_path / "flops")},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_observer, "PEAK_TFLOPS", [("cpu", 1e-6)])
        engine = zeroshard.Engine(model, config=config)
    with engine:
        kept = Kept(engine)
        for _ in range(6):
            engine.backward(engine(torch.zeros(3, 5, dtype=torch.long)).float().square().mean())
            engine.step()
    if engine.global_rank:
        return
    tokens, guess = 2 * 2 * 3 * 5, 6 * sum(param.numel() for param in model.parameters())
    real = 3 * 2 * (8 * 8 + 8 * 4)  # forward and backward of two products
    found = [
        kept.values["mfu"][samples] * 2e6 * kept.values["step_time_ms"][samples] / 1e3 / tokens
        for samples in (24, 36)  # the first step has no time; the count is in the second
    ]
    assert found == pytest.approx([real if counts else guess] * 2)
    if counts:
        lines = (tmp_path / "flops").read_text().splitlines()
        assert "/s while counting, MFU " in lines[1]
        (unknown,) = (line for line in lines if line.startswith("counted as 0, because"))
        assert "aten.tanh (1 call)" in unknown and "mm" not in unknown


def test_mfu_of_a_model_without_tokens_is_known_if_operations_are_counted(monkeypatch):
    monkeypatch.setattr(build_observer, "PEAK_TFLOPS", [("cpu", 1e-6)])
    keys = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    keys["flops_profiler"] = {"enabled": True, "profile_step": 1}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    with zeroshard.Engine(model, config={**keys, "train_micro_batch_size_per_gpu": 3,
                                         "optimizer": {"type": "AdamW"}}) as engine:  # fmt: skip
        kept = Kept(engine)
        for _ in range(6):
            engine.backward(engine(torch.ones(3, 8).bfloat16()).float().square().mean())
            engine.step()
    for samples, mfu in kept.values["mfu"].items():
        assert mfu * 1e6 * kept.values["step_time_ms"][samples] / 1e3 == pytest.approx(
            3 * 2 * 3 * 2 * (8 * 8 + 8)  # 2 micro-batches of 3 samples
        )
    assert list(kept.values["mfu"]) == [12, 18]


@on_ranks(2)
def test_events_send_nothing():
    """The loss travels with the norm; monitors add no collective."""
    counts = []
    for report in (True, False):
        with open_engine(2, trust={"report": report}) as engine:
            train(engine, own_data(engine, 2))
            before = sum(recorder.seq for recorder in engine._watch.recorders)
            train(engine, own_data(engine, 3))
            counts.append(sum(recorder.seq for recorder in engine._watch.recorders) - before)
    assert counts[0] == counts[1] > 0


def test_each_time_is_at_its_own_step(monkeypatch):
    """The second step takes half a second, and so says the second value."""
    with open_engine(1, wall_clock_breakdown=True) as engine:
        kept = Kept(engine)
        run = engine._update.run
        for number, micros in enumerate(data(3)):
            if number == 1:
                monkeypatch.setattr(engine._update, "run", lambda *a: (time.sleep(0.5), run(*a))[1])
            train(engine, [micros])
            monkeypatch.setattr(engine._update, "run", run)
    times = list(kept.values["elapsed_time_ms_step"].values())
    assert times[1] > 500 > max(times[0], times[2])
    assert list(kept.values["elapsed_time_ms_step"]) == list(kept.values["elapsed_time_ms_forward"])


def test_a_skipped_step_says_so_at_its_own_step():
    with open_engine(0, trust={"nan_policy": "skip"}) as engine:
        kept = Kept(engine)
        for number, (batch,) in enumerate(data(3)):
            loss = loss_of(engine, batch)
            engine.backward(loss * float("nan") if number == 1 else loss)
            engine.step()
    assert list(kept.values["skipped"].values()) == [0.0, 1.0, 0.0]
    losses = list(kept.values["train_loss"].values())
    assert losses[1] != losses[1] and losses[2] == losses[2]


@on_ranks(2)
def test_waits_for_other_ranks_are_exposed_communication():
    with open_engine(1) as engine:
        kept = Kept(engine)
        steps = own_data(engine, 3)
        train(engine, steps[:2])
        if engine.global_rank == 1:
            time.sleep(0.4)
        train(engine, steps[2:])
    if engine.global_rank == 0:
        waited = list(kept.values["exposed_comm_ms"].values())
        assert waited[2] > 350 > waited[1]


def test_without_engine_backward_the_loss_is_not_known():
    with open_engine(1) as engine:
        kept = Kept(engine)
        loss_of(engine, data(1)[0][0]).backward()
        engine.step()
        assert engine.last_step.loss is None
    assert "train_loss" not in kept.values and "grad_norm" in kept.values


def test_tokens_are_counted_in_what_the_model_gets():
    ids = torch.zeros(4, 6, dtype=torch.long)
    assert tokens_in((ids,), {}) == tokens_in((), {"input_ids": ids}) == 24
    assert tokens_in((), {"attention_mask": ids.bool(), "input_ids": ids}) == 24
    assert tokens_in((), {"inputs_embeds": torch.zeros(4, 6, 8)}) == 24
    assert tokens_in((torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)), {}) == 0


# ---------------------------------------------------------------------- the record


@on_ranks(2)
def test_rank_0_keeps_a_record_from_which_a_page_can_be_made(tmp_path):
    secret = "hf_planted_token"
    config = {
        "comet": {"api_key": secret},
        "mlflow": {"tracking_uri": f"http://me:{secret}@host/x"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROSHARD_DUMP_DIR", str(tmp_path))
        patch.setenv("HF_TOKEN", secret)
        patch.setenv("NCCL_AUTH_KEY", secret)
        with open_engine(3, **config) as engine:
            train(engine, own_data(engine, 2))
            logging.getLogger("zeroshard").warning("something to know: %d", 7)
            train(engine, own_data(engine, 1))
    torch.distributed.barrier()
    (path,) = tmp_path.glob("*/steps-0-*.jsonl")
    assert secret not in path.read_text()
    if engine.global_rank:
        return
    record = read_record(path)
    assert record.num_steps == 3 and record.reason == ""
    assert [text for _, _, text in record.incidents] == ["something to know: 7"]
    assert record.first["stage"] == 3 and record.first["world_size"] == 2
    assert ["zero_optimization.stage", "3", "config"] in record.first["config"]
    held = {row["category"]: row for row in record.facts["memory"] if row["tier"] == "device"}
    assert held["parameters"]["planned"] == held["parameters"]["measured"] > 0
    assert held["optimizer"]["planned"] == held["optimizer"]["measured"] > 0
    assert NAMES <= record.values.keys()
    command = [sys.executable, "-m", "zeroshard.cli.main", "report", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    page = (path.parent / "report.html").read_text()
    assert secret not in page and "something to know: 7" in page


def test_a_run_that_ends_in_an_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROSHARD_DUMP_DIR", str(tmp_path))
    with pytest.raises(RuntimeError), open_engine(1) as engine:
        train(engine, data(2))
        raise RuntimeError("the loader lost its file")
    (path,) = tmp_path.glob("*/steps-*.jsonl")
    assert "the loader lost its file" in read_record(path).ending


def test_no_record_is_kept_if_the_configuration_says_so_or_nothing_was_trained(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("ZEROSHARD_DUMP_DIR", str(tmp_path))
    with open_engine(1, trust={"report": False}) as engine:
        train(engine, data(1))
    with open_engine(1):
        pass
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZEROSHARD_DUMP_DIR", str(tmp_path / "file"))
    with open_engine(1) as engine:
        train(engine, data(2))
    (line,) = [r.getMessage() for r in caplog.records if "switched off" in r.getMessage()]
    assert line.startswith(
        "the record of the run could not open and is switched off; training continues"
    )


def test_numbers_of_a_graph_model_do_not_change_by_being_watched():
    """Events read what the step computed; they compute nothing that the model sees."""
    weights = []
    for report in (True, False):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.Linear(10, 1))
        with open_engine(2, model=model, trust={"report": report}) as engine:
            for _ in range(3):
                engine.backward(engine(torch.ones(3, 6)).square().mean())
                engine.step()
            weights.append([full.clone() for _, full in engine.iter_full_params()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@on_ranks(2)
def test_the_bandwidth_of_the_bus_is_that_of_calls_that_were_waited_for():
    numbers = []
    with open_engine(1) as engine:
        comm = engine._watch.gathers
        assert isinstance(comm, Comm) or hasattr(comm, "all_gather_small")
        for _ in range(3):
            if engine.global_rank == 1:
                time.sleep(0.05)
            comm.all_gather_small(torch.ones(1000, dtype=torch.float64), name="probe")
        (entry,) = [e for e in comm.recorder.traffic() if e.name == "probe"]
        numbers = entry.calls, entry.sent_nbytes, entry.flight_nbytes, entry.flight_s
    assert numbers[:2] == (3, 3 * 8000)
    if engine.global_rank == 0:
        assert numbers[2] == 3 * 8000 and 0.1 < numbers[3] < 5
