"""`zeroshard stacks` of a run that lives, and `zeroshard explain` of runs that have ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warm_python import WarmPython, run
from zeroshard_testing.ranks import run_ranks

from zeroshard.session.session import open_session
from zeroshard.watchdog.live_view import view_run
from zeroshard.watchdog.settings import WatchdogSettings

pytestmark = pytest.mark.timeout(90)

LAUNCH = [sys.executable, "-m", "zeroshard.launch", "--num_gpus", "2"]
CLI = [sys.executable, "-m", "zeroshard.cli.main"]
PROGRAM = """
import os, signal, sys
from pathlib import Path

import torch
from torch import nn
import zeroshard
from zeroshard.comm.connect import default_store

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).tanh()

fault, folder = sys.argv[1:]
zeroshard.init_distributed()
rank = int(os.environ["RANK"])
engine = zeroshard.Engine(
    nn.Sequential(*(Block() for _ in range(3))),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "unit_min_numel": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "trust": {"dump_dir": folder + "/runs"},
    },
)

def read_the_gate():
    Path(folder + "/gate").read_bytes()

for step in range(4):
    if step == 2 and rank == 1:
        if fault == "wait":
            read_the_gate()
        elif fault == "raise":
            raise ValueError("bad sample 17")
        elif fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
engine.close()
if rank == 0 and fault == "wait":
    left = [key for key in default_store().underlying_store.list_keys() if "view/" in key]
    print("views left:", left, flush=True)
"""


def environment(scratch: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ZEROSHARD_"))}
    return {**clean, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(scratch)}


def zeroshard(folder: Path, *words: str) -> tuple[int, str, str, float]:
    """Exit code, both outputs and seconds of a command."""
    begun_s = time.monotonic()
    done = run([*CLI, *words], cwd=folder, env=environment(folder), timeout=60)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - begun_s


def recordings_of(folder: Path) -> set[Path]:
    """Directories of recordings that the ranks of the run in ``folder`` had in shared memory."""
    ranks = json.loads(next(folder.glob("runs/*/ranks.json")).read_text())["ranks"]
    return {Path(rank["recording"]).parent for rank in ranks}


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# -- a run that lives ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A run whose rank 1 waits at a gate in step 2, and rank 0 for it; the launcher and the folder."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "script.py").write_text(PROGRAM)
    os.mkfifo(folder / "gate")
    command = [*LAUNCH, "script.py", "wait", str(folder)]
    launcher = WarmPython(command, cwd=folder, env=environment(folder), warm_ranks=True)
    gate = os.open(folder / "gate", os.O_RDWR)  # opening it does not wait for rank 1
    os.close(gate)
    with (folder / "gate").open("wb") as gate_of_rank_1:  # returns when rank 1 has come to it
        yield launcher, folder, gate_of_rank_1
    launcher.close()


def ranks_of(folder: Path) -> list[dict]:
    """What ``stacks --json`` says, when rank 0 waits for rank 1."""
    until_s = time.monotonic() + 20
    while True:
        code, out, err, _ = zeroshard(folder, "stacks", "runs", "--json", "--all-threads")
        assert code == 0, err
        ranks = json.loads(out)["ranks"]
        if ranks[0]["waits_in"] or time.monotonic() > until_s:
            return ranks


def test_the_place_of_every_rank_is_shown(live):
    _, folder, _ = live
    waits, late = ranks_of(folder)
    assert (waits["step"], waits["phase"], waits["answered"]) == (2, "forward", True)
    assert waits["waits_in"].startswith("gather '0' (#")
    assert (late["step"], late["waits_in"], late["answered"]) == (2, None, True)
    assert "in read_the_gate" in late["stack"]
    assert "zeroshard-watchdog-1:\n" in late["threads"]
    pids = {row["process"]["pid"] for row in _ranks_file(folder)}
    assert pids == {waits["pid"], late["pid"]}


def test_the_text_has_one_line_for_each_rank_and_its_stack(live):
    _, folder, _ = live
    ranks_of(folder)  # rank 0 waits
    code, out, _, took_s = zeroshard(folder, "stacks", "runs")
    lines = out.splitlines()
    assert code == 0
    assert " 2 of 2 ranks answered in " in lines[0]
    assert ", step 2: waiting in gather '0' (#" in lines[1]
    assert ", in forward (script.py:" in lines[1]
    assert ", step 2: outside collectives, after exchange 'norm' (#" in lines[2]
    assert "main thread of rank 1:" in lines
    assert "in read_the_gate" in out.partition("main thread of rank 1:")[2]
    assert took_s < 10


def test_a_rank_that_is_stopped_is_silent_and_shown_with_its_last_call(live):
    _, folder, _ = live
    with stopped(_ranks_file(folder)[1]["process"]["pid"]):
        code, out, _, took_s = zeroshard(folder, "stacks", "runs", "--timeout", "3")
    line = out.splitlines()[2]
    assert code == 0
    assert " is stopped by a signal (state T); last known: after exchange 'norm' (#" in line
    assert ", step 2: " in line
    assert took_s < 10


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_allowed(live):
    """The launcher serves it."""
    _, folder, _ = live
    rank = _ranks_file(folder)[0]["process"]["pid"]
    launcher = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    with stopped(launcher):
        code, out, _, took_s = zeroshard(folder, "stacks", "runs", "--timeout", "3")
    assert code == 0
    assert " 0 of 2 ranks answered in " in out
    assert "The store does not answer (" in out
    assert "rank 1 (host " in out
    assert took_s < 12


def test_a_run_that_lives_is_not_explained(live):
    _, folder, _ = live
    code, out, err, _ = zeroshard(folder, "explain", "runs")
    assert (code, out) == (2, "")
    assert "still lives: ranks 0,1 of 2 run here. Try: zeroshard stacks " in err


def test_the_run_then_goes_on_and_leaves_no_key_and_no_recording(live):
    """The last test of this run."""
    launcher, folder, gate = live
    recordings = recordings_of(folder)
    assert all(each.is_dir() for each in recordings)
    gate.close()
    out, err = launcher.communicate(timeout=40)
    assert launcher.returncode == 0, err
    assert "views left: []" in out
    assert not any(each.exists() for each in recordings)
    (run_folder,) = (folder / "runs").iterdir()
    assert [file.name for file in run_folder.glob("recordings/*")] == []
    assert not list(folder.glob("zeroshard-runs-*/*"))  # what ranks tell their launcher is removed
    code, _, err, _ = zeroshard(folder, "stacks", "runs")
    assert code == 2
    assert "has ended: none of its ranks runs. Try: zeroshard explain " in err
    _, out, err, _ = zeroshard(
        folder, "explain", "runs"
    )  # the stopped ranks may have been reported
    assert "has no recording of its 2 ranks" in err or "as no rank left an error" in out


def _ranks_file(folder: Path) -> list[dict]:
    return json.loads(next(folder.glob("runs/*/ranks.json")).read_text())["ranks"]


def seen_through(method: str | None, folder: str) -> dict[int, tuple[bool, str]]:
    """What rank 0 sees, as another client of the store, of ranks that the program itself connected."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    session = open_session(
        transport="auto",
        device=torch.device("cpu"),
        trust=WatchdogSettings(tick_s=0.1, dump_dir=folder),
        plan={},
    )
    found = {}
    if rank == 0:
        seen = view_run(next(Path(folder).iterdir()), limit_s=8)
        assert seen.lost == ""
        found = {
            view.status.rank: (view.status.answered, "seen_through" in view.stack)
            for view in seen.views
        }
    session.world.all_gather_small(torch.zeros(1, dtype=torch.float64), name="end")
    session.close()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("kind", ["env", "file"])
def test_ranks_that_the_program_itself_connected_are_seen(kind, tmp_path):
    method = f"file://{tmp_path}/store" if kind == "file" else None
    found = run_ranks(seen_through, 2, method, str(tmp_path / "runs"), group=False, timeout=40)[0]
    assert found == {0: (True, True), 1: (True, True)}


# -- runs that have ended --------------------------------------------------------------------------


def ended(folder: Path, fault: str) -> str:
    """What ``explain`` says of a run that has ended by ``fault``."""
    (folder / "script.py").write_text(PROGRAM)
    command = [*LAUNCH, "script.py", fault, str(folder)]
    done = run(command, cwd=folder, env=environment(folder), timeout=60, warm_ranks=True)
    assert done.returncode != 0
    assert not any(each.exists() for each in recordings_of(folder))
    code, out, err, _ = zeroshard(folder, "explain", "runs")
    assert code == 0, err
    assert len(out.splitlines()) <= 10
    return out


def test_the_rank_that_raised_is_the_cause(tmp_path):
    out = ended(tmp_path, "raise")
    assert "likely cause: rank 1 (host " in out
    assert ", step 2: raised ValueError: bad sample 17 (exit code 1)" in out
    assert "its last call was exchange 'norm' (#" in out
    assert "its last unit '0' in reduce '0' (#" in out
    assert "  rank 0: waiting in gather '0' (#" in out
    assert "; ended with RankLost" in out


def test_a_rank_that_was_killed_is_the_cause_also_without_a_launcher_s_report(tmp_path):
    out = ended(tmp_path, "kill")
    assert ", step 2: got SIGKILL from outside" in out
    for report in tmp_path.glob("runs/*/exit-*.json"):
        report.unlink()
    code, out, _, _ = zeroshard(tmp_path, "explain", "runs", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["cause"]["ranks"] == [1]
    assert found["cause"]["why"].startswith("its process ended without a word")
    assert [rank["step"] for rank in found["ranks"]] == [2, 2]
    assert found["ranks"][1]["last_calls"][-1].startswith("exchange 'norm'")
    assert found["diagnosis"]["kind"] == "RankLost"
