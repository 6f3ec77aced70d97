"""All protocols of the benchmarks run in the smoke version, and wrong results are detected."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from zeroshard_testing.ranks import run_ranks

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import comparability  # noqa: E402
import interleaving  # noqa: E402
import models  # noqa: E402
import offload  # noqa: E402
import protocols  # noqa: E402
import readme_block  # noqa: E402
import systems  # noqa: E402
import table_columns  # noqa: E402
import targets  # noqa: E402
import tiers  # noqa: E402
import training  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a smoke run of all protocols."""
    home = tmp_path_factory.mktemp("benchmarks")
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--smoke", "--out", str(home / "x.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    (home / "stdout.txt").write_text(done.stdout)
    return home


@pytest.fixture(scope="module")
def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "x.json").read_text())


A1 = [c.key for c in protocols.COMPARISONS if c.key.startswith("a1")]
KEYS = [*A1, *"a2-512 a3 a3-4 a4 a4-2 a5 a6 a7 a8 a9 a9-disk".split()]


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_every_line_that_is_installed_is_measured(result, key):
    rows = result["protocols"][key]["rows"]
    assert [row["error"] for row in rows if "error" in row] == []
    absent = [row["absent"] for row in rows if "absent" in row]
    known = ("not installed", "not in this version", "which is memory")
    assert all(any(words in why for words in known) for why in absent)
    assert any("ZeroShard" in row["name"] or row["name"] == "p2p" for row in rows)


@pytest.mark.slow
def test_all_systems_train_alike(result):
    for protocol in result["protocols"].values():
        assert all(row["comparable"] for row in protocol["rows"] if "comparable" in row)
        assert all(row["right"] for row in protocol["rows"] if "right" in row)
        assert all(row["learns"] for row in protocol["rows"] if "learns" in row)
    compared = [row for row in result["protocols"]["a1"]["rows"] if "comparable" in row]
    assert {row["family"].split()[0] for row in compared} >= {"DDP", "FSDP2", "ZeroShard"}


@pytest.mark.slow
def test_no_place_of_state_changes_a_loss(result):
    rows = [row for row in result["protocols"]["a9"]["rows"] if row.get("compared")]
    assert len(rows) >= 5
    assert all(row["losses"] == rows[0]["losses"] for row in rows)


@pytest.mark.slow
def test_bytes_over_the_bus_and_to_disk_are_the_formula(result):
    """Pages are padded to 4 KiB. What is still in memory is not read again: parameters, and the gradients
    that were written last."""
    rows = [row for row in result["protocols"]["a9"]["rows"] if "theory_nbytes" in row]
    moving = [row for row in rows if any(row["theory_nbytes"].values())]
    assert any(row["theory_nbytes"]["down_nbytes"] for row in moving)
    for row in rows:
        for direction, theory in row["theory_nbytes"].items():
            least = 0.8 if direction == "read_nbytes" and "nvme" in row["name"] else 1
            counted = row["moved_nbytes"][direction]
            assert least * theory <= counted <= 1.05 * theory, (row["name"], direction)


@pytest.mark.slow
def test_tables_and_pictures_are_made(run, result):
    printed = (run / "stdout.txt").read_text()
    for key in KEYS:
        assert result["protocols"][key]["title"] in printed
    assert "Targets" in printed
    for name in ("losses", "steps"):
        assert (run / f"x-{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_readme_block_is_made_from_a_result(result):
    page = f"before\n{readme_block.BEGIN}\nold\n{readme_block.END}\nafter\n"
    once = readme_block.with_tables(page, result)
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert all(f"| {stage} | " in once for stage in (0, 1, 2, 3))
    assert readme_block.with_tables(once, result) == once


def test_the_pages_say_what_the_newest_result_says():
    path = readme_block.newest()
    measured = json.loads(path.read_text()) if path else None
    for page, rewrite in readme_block.PAGES.items():
        text = page.read_text()
        assert rewrite(text, measured) == text, "run python benchmarks/readme_block.py"


# ---------------------------------------------------------------------- comparability


def row(name: str, cpu: float, losses: list[float] | None = None, **keys: Any) -> dict[str, Any]:
    times = {"cpu_ms": {"median": cpu}, "wall_ms": {"median": 2 * cpu}}
    family = name.split(maxsplit=1)[0]
    base = {"name": name, "family": family, "stage": None, "transport": "", "ranks": 2}
    return {**base, **times, "losses": losses or [5.0, 4.0], "compared": True, **keys}


def test_a_line_whose_losses_leave_the_others_is_no_result():
    rows = [row("DDP", 3), row("FSDP2 x", 2), row("ZeroShard x", 1, [5.0, 4.1])]
    comparability.mark_comparable(rows)
    assert [comparability.usable(r) for r in rows] == [True, True, False]
    assert "NO RESULT" in table_columns._distance(rows[2])


def test_a_line_whose_gradient_has_another_norm_is_no_result():
    rows = [row("DDP", 3, norms=[2.0, 1.0]), row("FSDP2 x", 2), row("ZeroShard x", 1, norms=[2, 1])]
    comparability.mark_comparable(rows)
    assert all(comparability.usable(r) for r in rows)
    rows.append(row("DeepSpeed x", 1, norms=[4.0, 2.0]))
    comparability.mark_comparable(rows)
    assert [comparability.usable(r) for r in rows] == [True, True, True, False]
    assert "norm 1e+00 NO RESULT" in table_columns._distance(rows[3])


def test_a_loss_that_is_no_number_is_no_result():
    rows = [row("DDP", 3), row("FSDP2 x", 2), row("ZeroShard x", 1, [float("nan"), 4.0])]
    comparability.mark_comparable(rows)
    assert [comparability.usable(r) for r in rows] == [True, True, False]


def test_the_last_step_counts_as_much_as_the_first():
    curve = [5.0] * 49
    rows = [row("DDP", 3, [*curve, 5.0]), row("FSDP2 x", 2, [*curve, 5.0])]
    rows.append(row("ZeroShard x", 1, [*curve, 5.1]))
    comparability.mark_comparable(rows)
    assert [comparability.usable(r) for r in rows] == [True, True, False]


SMALL = models.GPTTask(models.Shape(vocabulary=256, width=64, layers=2, heads=2, context=16))
STEPS = 50


def _summed(trainer: systems.Trainer) -> systems.Trainer:
    """A library that forgets to divide by the number of ranks."""
    return replace(trainer, backward=lambda loss: trainer.backward(2 * loss))


def train(rank_of_data: int | None, system: str, fault: str) -> list[dict[str, float]]:
    """The records of one rank: one for each of fifty steps."""
    rank = dist.get_rank() if rank_of_data is None else rank_of_data
    build = {
        "DDP": systems.ddp(),
        "FSDP2": systems.fsdp2(True),
        "ZeroShard": systems.zeroshard(3),
        "alone": systems.plain(),  # a library that forgets to exchange gradients
        "idle": systems.floor(),  # one that forgets to update
    }[system]
    trainer = build(SMALL.model(), 1)
    session = training.TrainingSession(
        _summed(trainer) if fault == "summed" else trainer, SMALL.data(rank, 8), 1
    )
    records = session.turn(STEPS)
    session.close()
    return records


def curves(name: str, system: str, fault: str = "", data: int | None = None) -> dict[str, Any]:
    steps = training._mean_over_ranks(run_ranks(train, 2, data, system, fault))
    found = row(name, 1, [step["loss"] for step in steps])
    return found | ({"norms": [step["norm"] for step in steps]} if "norm" in steps[0] else {})


@pytest.fixture(scope="module")
def honest() -> list[dict[str, Any]]:
    return [curves(name, name) for name in ("DDP", "FSDP2", "ZeroShard")]


def test_libraries_that_train_rightly_agree_in_every_step(honest):
    comparability.mark_comparable(honest)
    assert [len(r["losses"]) for r in honest] == [STEPS] * 3
    assert all(comparability.usable(r) for r in honest)


@pytest.mark.parametrize(
    "wrong",
    [
        {"system": "DDP", "fault": "summed"},
        {"system": "DDP", "data": 0},
        {"system": "alone"},
        {"system": "idle"},
    ],
    ids=["gradients summed", "one rank's data repeated", "gradients not exchanged", "no update"],
)
def test_a_library_that_trains_wrongly_is_no_result(honest, wrong):
    rows = [*honest, curves("Wrong", **wrong)]
    comparability.mark_comparable(rows)
    assert [comparability.usable(r) for r in rows] == [True, True, True, False]


@pytest.mark.parametrize("key", ["a4", "a7"])
def test_the_stacks_learn_more_than_two_libraries_may_differ(key):
    """Otherwise a library that never updates would count as comparable."""
    task = next(c.task for c in protocols.COMPARISONS if c.key == key)
    task = replace(task, width=min(task.width, 256))
    session = training.TrainingSession(
        systems.plain(fused=True)(task.model(), 1), task.data(0, 1), 1
    )
    losses = [step["loss"] for step in session.turn(20)]
    assert losses[-1] < losses[0] * (1 - 2 * comparability.LOSS_TOLERANCE)


def test_a_model_does_not_depend_on_what_was_drawn_before():
    one = SMALL.model()
    torch.manual_seed(7)
    other = SMALL.model()
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_lines_of_one_library_do_not_outvote_the_others():
    own = [row(f"ZeroShard {i}", 1, [5.0, 4.1]) for i in range(9)]
    rows = [row("DDP", 3), row("FSDP2 x", 2), *own]
    comparability.mark_comparable(rows)
    assert [comparability.usable(r) for r in rows] == [True, True] + [False] * 9


def a1(**cpu_of_own: float) -> dict[str, Any]:
    peers = [row("DeepSpeed", 100 * s, stage=s) for s in (1, 2, 3)]
    peers += [row("FSDP2", 90 * s, stage=s) for s in (2, 3)]
    own = [
        row("ZeroShard", cpu * s, stage=s, transport=transport)
        for transport, cpu in cpu_of_own.items()
        for s in (1, 2, 3)
    ]
    return {"protocols": {"a1": {"rows": peers + own}}}


@pytest.mark.parametrize(
    ("cpu", "value", "verdict"), [(45.0, 2.0, "met"), (46.0, 90 / 46, "missed")]
)
def test_own_collectives_are_held_against_the_better_peer_at_the_worst_stage(cpu, value, verdict):
    found = targets._same_stage(a1(p2p=cpu, stock=1.0), "x", 2.0, ("p2p", "shm"))
    assert found.value == pytest.approx(value)
    assert found.verdict == verdict


def test_a_target_without_its_lines_is_not_measured():
    incomplete = a1(p2p=1.0)
    incomplete["protocols"]["a1"]["rows"].pop()
    assert targets._same_stage(incomplete, "x", 2.0, ("p2p",)).verdict == "not measured"
    nothing = {"protocols": {}, "stream_gb_per_s": {"best": 30.0}}
    assert {t.verdict for t in targets.all_targets(nothing)} == {"not measured"}


def test_a_limit_from_above_is_met_from_below():
    assert targets.Target("x", 0.7, 0.69, at_least=False).verdict == "met"
    assert targets.Target("x", 0.7, 0.71, at_least=False).verdict == "missed"


def test_a_directory_in_memory_is_no_disk():
    problem = tiers.disk_problem("/dev/shm")
    assert "/dev/shm is a tmpfs, which is memory" in problem
    lines = tiers.lines("/dev/shm", peers=False)
    assert {line.system.absent for line in lines if "nvme" in line.title} == {problem}
    assert {line.system.absent for line in lines if "nvme" not in line.title} == {""}
    result = offload.run_disk(print, smoke=True, directory="/dev/shm")
    assert {row["absent"] for row in result["rows"]} == {problem}
    assert targets._disk({"protocols": {"a9-disk": result}}).verdict == "not measured"


def offloaded(**cpu_of_own: float) -> dict[str, Any]:
    names = {
        setting.name: setting.reference
        for setting in tiers.OFFLOAD_SETTINGS
        if "nvme" not in setting.name
    }
    rows = [
        row(name, cpu_of_own.get(name.split()[-2], 100), stage=int(name.split()[2][0]))
        | {"reference": reference}
        for name, reference in names.items()
    ]
    return {"protocols": {"a9": {"rows": rows}}}


@pytest.mark.parametrize(("cpu", "verdict"), [(104.0, "met"), (106.0, "missed")])
def test_the_slowest_step_with_state_in_host_memory_counts(cpu, verdict):
    found = targets._host_offload(offloaded(parameters=cpu, optimizer=90), "cpu")
    assert found.value == pytest.approx(cpu / 100)
    assert found.verdict == verdict


# ---------------------------------------------------------------------- interleaving


@dataclass(frozen=True)
class Echo:
    """Returns each request. With ``fails``, rank 1 raises when its session is opened."""

    fails: bool

    def prepare(self):
        pass

    def open(self, rank):
        if self.fails and rank == 1:
            raise ValueError("no such transport")
        return self

    def turn(self, request):
        return request

    def close(self):
        pass


def test_a_team_that_fails_says_why_and_the_others_go_on(capfd):
    good, bad = (
        interleaving.WorkerGroup("good", Echo(False)),
        interleaving.WorkerGroup("bad", Echo(True)),
    )
    with interleaving.running([bad, good], lambda text: None):
        assert bad.error == "rank 1: ValueError: no such transport"
        assert [(n, group.turn(n)) for n, group in interleaving.interleaved([bad, good], 2)] == [
            (0, [0, 0]),
            (1, [1, 1]),
        ]
    assert not good.error


# ---------------------------------------------------------------------- memory

NBYTES = 32 * 2**20
HOLD = """
import mmap, os, sys
held = mmap.mmap(int(sys.argv[1]), 0)
for at in range(0, len(held), 4096):
    held[at]
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_page_that_two_processes_share_counts_once():
    descriptor = os.memfd_create("shared")
    try:
        os.ftruncate(descriptor, NBYTES)
        before = interleaving.pss_nbytes([os.getpid()])
        with mmap.mmap(descriptor, NBYTES) as held:
            held.write(b"x" * NBYTES)
            alone = interleaving.pss_nbytes([os.getpid()]) - before
            other = subprocess.Popen(
                [sys.executable, "-c", HOLD, str(descriptor)],
                pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            with other:
                other.stdout.readline()
                half = interleaving.pss_nbytes([os.getpid()]) - before
                both = interleaving.pss_nbytes([os.getpid(), other.pid]) - before
                other.stdin.close()
    finally:
        os.close(descriptor)
    slack = 16 * 2**20  # the other interpreter itself, and what this one allocated meanwhile
    assert NBYTES <= alone < NBYTES + slack
    assert half < 0.75 * NBYTES
    assert NBYTES <= both < NBYTES + slack


@pytest.mark.full
def test_versions_are_compared_in_turns():
    source = str(ROOT / "src")
    words = ["--task", "a7", "--stages", "2", "--rounds", "2", "--burst", "1"]
    program = [sys.executable, str(ROOT / "benchmarks" / "versions.py")]
    done = subprocess.run(
        [*program, source, source, *words], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "ratio 1.0000" in first
    assert all(line.startswith("stage 2: ") and line.endswith(source) for line in (first, second))
    wrong = subprocess.run(
        [*program, str(ROOT / "docs"), *words],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert wrong.returncode == 1
    assert "was imported instead of" in wrong.stderr
