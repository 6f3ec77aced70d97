"""The program that users copy runs from start to end on two ranks."""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import warm_python

pytestmark = pytest.mark.timeout(600)  # on a host at work the ranks wait for each other

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_gpt" / "train.py"
STEPS = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the smallest model on fixed sentences."""
    home = tmp_path_factory.mktemp("example")
    text = home / "text.txt"
    text.write_text(sentences())
    (home / "stdout.txt").write_text(train(home, "smoke", "--save-every", str(STEPS // 2)))
    return home / "smoke"


def train(home: Path, name: str, *more: str) -> str:
    """The output of the program."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(EXAMPLE), "--size", "tiny", "--context", "64", "--vocab", "512"),
        *("--steps", str(STEPS), "--text", str(home / "text.txt"), "--runs", str(home)),
        *("--name", name, *more),
    ]
    done = warm_python.run(command, cwd=home, env=os.environ, timeout=500, warm_ranks=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def sentences() -> str:
    """Words of which a few are frequent and most are rare, as in a language."""
    draw = random.Random(7)
    letters = "aeioutnsrhldcm"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 8))) for _ in range(400)]
    weights = [1 / (rank + 2) for rank in range(len(words))]
    lines = (draw.choices(words, weights, k=draw.randint(4, 14)) for _ in range(12_000))
    return "\n".join(" ".join(line).capitalize() + "." for line in lines)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_reported_once_although_two_ranks_run(run: Path) -> None:
    assert [m["step"] for m in metrics(run) if "train_bpb" in m] == list(range(1, STEPS + 1))


def test_training_loss_falls(run: Path) -> None:
    train = [m["train_bpb"] for m in metrics(run) if "train_bpb" in m]
    assert mean(train[-5:]) < 0.8 * train[0]


def test_held_out_loss_is_better_than_chance(run: Path) -> None:
    last = [m["held_out_bpb"] for m in metrics(run) if "held_out_bpb" in m][-1]
    assert 0.5 < last < 6.0


def test_learning_rate_warms_up_and_then_decays(run: Path) -> None:
    rates = [m["learning_rate"] for m in metrics(run) if "train_bpb" in m]
    assert rates[0] < max(rates)
    assert rates[-1] < 0.1 * max(rates)


def test_curve_is_a_picture(run: Path) -> None:
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_sample_continues_the_prompt_and_is_printed_by_one_rank(run: Path) -> None:
    assert (run.parent / "stdout.txt").read_text().count("def read_lines(path):") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_measured_parameters_of_each_rank_equal_the_plan(run: Path, rank: int) -> None:
    lines = (run.parent / "stdout.txt").read_text().splitlines()
    [row] = [line.split() for line in lines if line.split()[:2] == [str(rank), "parameters"]]
    planned, measured = map(float, row[2:])
    assert planned == measured > 0


def test_the_first_line_comes_before_the_work_and_says_what_is_done(run: Path) -> None:
    first = (run.parent / "stdout.txt").read_text().splitlines()[0]
    assert first.startswith("learning a vocabulary of 512 pieces from ")


def test_without_a_terminal_a_line_comes_when_none_was_seen_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = SimpleNamespace(**runpy.run_path(str(EXAMPLE.with_name("report.py"))))
    now_s = 0.0
    monkeypatch.setattr(report.time, "perf_counter", lambda: now_s)
    quiet, loud = (report.Report(tmp_path, rank) for rank in (1, 0))
    for step in range(1, 101):
        now_s += 1.0
        for one in (quiet, loud):
            one.tick(step=step, of=300, loss=lambda: 2.5, tokens_per_s=4096.0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9  # eleven seconds from line to line; rank 1 is silent
    assert lines[-1].split() == (
        "step 99 of 300 train 2.500 bits per byte 4,096 tokens/s 3 min 21 s left".split()
    )


def test_a_resumed_run_repeats_the_rest_of_the_first_bit_for_bit(run: Path) -> None:
    half = f"global_step{STEPS // 2}"
    train(run.parent, "resumed", "--resume", str(run / "checkpoints" / half))
    first = {m["step"]: m["train_bpb"] for m in metrics(run) if "train_bpb" in m}
    second = {
        m["step"]: m["train_bpb"] for m in metrics(run.parent / "resumed") if "train_bpb" in m
    }
    assert list(second) == list(range(STEPS // 2 + 1, STEPS + 1))
    assert second == {step: first[step] for step in second}
