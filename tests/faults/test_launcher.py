"""The launcher with real processes: its output, its exit code, and what remains afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.covering import sampled
from warm_python import WarmPython, run

from zeroshard.run.address import unused_port
from zeroshard.watchdog.dead_run import explain_run

pytestmark = pytest.mark.timeout(90)

LAUNCH = [sys.executable, "-m", "zeroshard.launch"]
RANK = "import os, sys, signal\nrank = int(os.environ['RANK'])\n"
# Rank 1 says that it runs, then every rank waits to be stopped.
WAIT = (
    RANK + "import time\nprint('pid', os.getpid())\n"
    "deadline = time.monotonic() + 60\nwhile time.monotonic() < deadline: time.sleep(0.05)\n"
)


class Outcome:
    """A finished launcher."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.out = done.stdout
        self.err = done.stderr
        self.said = [
            line.removeprefix("zeroshard: ")
            for line in done.stderr.splitlines()
            if line.startswith("zeroshard: ")
        ]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


@pytest.fixture
def env(tmp_path_factory) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMP_"))}
    scratch = str(tmp_path_factory.mktemp("scratch"))  # a killed launcher cannot clean up
    return {**clean, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": scratch}


@pytest.fixture
def launch(folder, env):
    """Run ``zeroshard launch OPTIONS SCRIPT ARGS`` to its end; ``body`` becomes ``script.py``.

    ``cold``: in a new interpreter, as a user does. Otherwise in one that has imported torch.
    """

    def launched(*words: str, body: str | None = None, cold: bool = False, **extra: str) -> Outcome:
        if body is not None:
            (folder / "script.py").write_text(body)
            words = (*words, "script.py")
        where: dict[str, Any] = {"cwd": folder, "env": {**env, **extra}, "timeout": 60}
        start = partial(subprocess.run, capture_output=True, text=True) if cold else run
        return Outcome(start([*LAUNCH, *words], **where))

    return launched


@pytest.fixture
def running(folder, env):
    """Start a launcher of ``WAIT`` on two ranks; gives it and the ranks' process ids."""
    with contextlib.ExitStack() as started:

        def start(
            *words: str, body: str = WAIT, under: tuple[str, ...] = ()
        ) -> tuple[subprocess.Popen[str] | WarmPython, list[int]]:
            (folder / "script.py").write_text(body)
            process: subprocess.Popen[str] | WarmPython
            if under:
                process = subprocess.Popen(
                    [*under, *LAUNCH, *words, "script.py"],
                    cwd=folder,
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                started.callback(process.communicate)
                started.callback(process.kill)
            else:
                process = WarmPython([*LAUNCH, *words, "script.py"], cwd=folder, env=env)
                started.callback(process.close)
            return process, [int(process.stdout.readline().split()[1]) for _ in range(2)]

        yield start


def on_hosts() -> list[str]:
    """Options for the hosts of the file ``hosts``, which meet on this one."""
    words = ["--hostfile", "hosts", "--master_addr", "127.0.0.1"]
    return [*words, "--master_port", str(unused_port())]


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process ends in time. A zombie of another parent counts as ended."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


# ---------------------------------------------------------------- runs that work


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-"])
def test_a_launcher_without_standard_streams_runs_its_ranks(folder, env, closed):
    body = (
        RANK + "open(f'ran-{rank}', 'w').write('yes'); print('out'); print('err', file=sys.stderr)"
    )
    (folder / "script.py").write_text(body)
    words = f"exec {' '.join(LAUNCH)} --nproc 2 script.py {closed}"
    done = subprocess.run(["sh", "-c", words], cwd=folder, env=env, timeout=60, check=False)
    assert done.returncode == 0
    assert [(folder / f"ran-{rank}").read_text() for rank in range(2)] == ["yes", "yes"]


JOIN = "import zeroshard\nzeroshard.init_distributed()\nprint('joined', rank)\n"


def test_a_rank_that_ends_before_it_joins_is_named_at_once(launch):
    """With exit code 0 the launcher lets the others go on; without a word they waited for ten minutes."""
    begin_s = time.monotonic()
    done = launch("--nproc", "2", body=RANK + "if rank: sys.exit(0)\n" + JOIN)
    assert time.monotonic() - begin_s < 40
    assert done.code == 1
    assert "rank 1: its process has ended, before it reached init_distributed" in done.err
    assert done.said[0] == "rank 1 ended with exit code 0 while others still waited for it."


def test_ranks_that_a_user_starts_one_after_the_other_are_waited_for(folder, env):
    """No agent started them: a rank that is not there yet has not ended."""
    (folder / "script.py").write_text(RANK + JOIN)
    common = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port()),
    }  # fmt: skip
    ranks = []
    for rank in range(2):
        own = {**env, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen([sys.executable, "script.py"], cwd=folder, env=own))
        if rank == 0:
            time.sleep(9)
    assert [process.wait(40) for process in ranks] == [0, 0]


def test_a_rank_that_is_stopped_before_it_joins_is_named_and_may_go_on(launch):
    stop = (
        "if rank:\n    import subprocess\n"
        "    subprocess.Popen(['sh', '-c', f'sleep 15; kill -CONT {os.getpid()}'])\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    done = launch("--nproc", "2", body=RANK + stop + JOIN)
    assert done.code == 0
    assert {"joined 0", "joined 1"} <= set(done.out.splitlines())
    assert "is stopped by a signal, and has not reached init_distributed" in done.err
    assert any(
        line.startswith("rank 1 is stopped by a signal, and the others") for line in done.said
    )


def test_a_script_that_cannot_be_parsed_is_shown_once(launch):
    done = launch("--nproc", "2", body="def f(:\n    pass\n")
    assert done.code == 1
    assert done.said == ["ranks 0-1 raised SyntaxError: invalid syntax (exit code 1)."]
    assert done.err.count("def f(:") == 1


@pytest.mark.smoke
def test_ranks_see_their_place_and_the_launchers_defaults(launch):
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR LOCAL_SIZE CROSS_RANK CROSS_SIZE "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE PYTHONFAULTHANDLER"
    )
    body = f"import os\nprint(*[os.environ[n] for n in '{names}'.split()])"
    done = launch("--nproc", "2", body=body, cold=True)
    assert sorted(done.out.splitlines()) == [
        "0 0 2 2 127.0.0.1 2 0 1 1 1",
        "1 1 2 2 127.0.0.1 2 0 1 1 1",
    ]


def test_a_clean_run_prints_nothing_of_its_own(launch):
    done = launch("--nproc", "2", body="import sys; print('hello', file=sys.stderr)", cold=True)
    assert (done.code, done.err) == (0, "hello\nhello\n")


def test_arguments_reach_the_script_as_they_are(launch, folder):
    (folder / "script.py").write_text("import sys; print(sys.argv[1:])")
    done = launch("--nproc", "1", "script.py", "--nproc", "7", "-h", "$HOME $$ ${local_rank}", "")
    assert done.out == "['--nproc', '7', '-h', '$HOME $$ ${local_rank}', '']\n"


def test_local_rank_is_an_argument_only_on_request(launch):
    done = launch("--nproc", "2", "--pass_local_rank", body="import sys; print(sys.argv[1])")
    assert sorted(done.out.splitlines()) == ["--local_rank=0", "--local_rank=1"]


def test_a_module_is_run_as_a_module(launch, folder):
    (folder / "package").mkdir()
    (folder / "package/train.py").write_text("print(__name__, __package__)")
    assert launch("--module", "package.train").out == "__main__ package\n"


def test_a_program_without_python(launch):
    done = launch("--nproc", "2", "--no_python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert sorted(done.out.splitlines()) == ["0 of 2", "1 of 2"]


def test_include_makes_only_its_devices_visible(launch):
    body = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['WORLD_SIZE'])"
    assert launch("--include", "localhost:3,5", body=body).out == "3,5 2\n" * 2


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


@pytest.mark.skipif(len(CORES) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize(
    "flags", [["--bind_cores_to_rank"], ["--bind_core_list", f"{CORES[0]},{CORES[-1]}"]]
)
def test_each_rank_is_on_its_own_cores_before_its_program_starts(launch, flags):
    body = RANK + (
        "print(rank, *sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], *sys.argv[1:])"
    )
    done = launch("--nproc", "2", "--pass_local_rank", *flags, body=body)
    ranks = [line.split() for line in sorted(done.out.splitlines())]
    cpus = [set(map(int, words[1:-2])) for words in ranks]
    assert len(cpus) == 2 and cpus[0] and not cpus[0] & cpus[1]
    assert [words[-1] for words in ranks] == ["--local_rank=0", "--local_rank=1"]
    if len(flags) > 1:
        assert cpus == [{CORES[0]}, {CORES[-1]}] and ranks[0][-2] == "1"


def test_a_program_without_python_is_bound_too(launch):
    done = launch("--bind_core_list", str(CORES[0]), "--no_python", "nproc", OMP_NUM_THREADS="")
    assert (done.code, done.out) == (0, "1\n")


def test_the_pid_file_is_there_while_the_launcher_runs(running, folder):
    process, pids = running("--nproc", "2", "--save_pid")
    path = Path("/tmp") / f"{process.pid}.deepspeed"
    assert path.read_text() == str(process.pid)
    process.terminate()
    process.communicate(timeout=30)
    assert not path.exists() and all(gone(pid) for pid in pids)


def test_outputs_of_each_rank_go_to_their_own_file(launch, folder):
    body = RANK + "print('out', rank); print('err', rank, file=sys.stderr)"
    done = launch("--nproc", "2", "--enable_each_rank_log", "logs", body=body)
    texts = [sorted((folder / f"logs/rank{r}.log").read_text().splitlines()) for r in (0, 1)]
    assert texts == [["err 0", "out 0"], ["err 1", "out 1"]]
    assert (done.out, done.err) == ("", "")


def test_torch_process_groups_work(launch):
    body = (
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1); dist.all_reduce(x); print(int(x)); dist.destroy_process_group()\n"
    )
    assert launch("--nproc", "2", "--master_port", str(unused_port()), body=body).out == "2\n2\n"


# ---------------------------------------------------------------- ranks that die


def test_an_exception_is_named_once_and_first(launch):
    body = (
        RANK + "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if rank == 1: raise ValueError('boom')\ndist.barrier()\n"
    )
    done = launch("--nproc", "2", body=body)
    assert done.code == 1
    assert done.said[0] == "rank 1 raised ValueError: boom (exit code 1)."
    assert re.fullmatch(r"then rank 0 lost its peers: .* \(exit code 1\)\.", done.said[1])
    assert done.err.count("Traceback") == done.err.count("raise ValueError('boom')") == 1


def test_a_survivor_shows_its_program_and_the_diagnosis_and_no_frame_of_a_library(launch, folder):
    body = (
        RANK + "import torch, zeroshard\nmodel = torch.nn.Linear(4, 4)\n"
        "config = {'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stage': 3}}\n"
        "engine = zeroshard.Engine(model, config=config, optimizer=lambda p: torch.optim.SGD(p, 0.1))\n"
        "for step in range(3):\n"
        "    if step == 2 and rank == 1: raise ValueError('boom')\n"
        "    engine.backward(engine(torch.ones(1, 4)).sum())\n"
        "    engine.step()\n"
    )
    done = launch("--nproc", "2", "--enable_each_rank_log", "logs", body=body)
    assert done.said[0] == "rank 1 raised ValueError: boom (exit code 1)."
    words = "where each rank was: zeroshard explain "
    assert done.said[-1].startswith(words)
    assert explain_run(Path(done.said[-1].removeprefix(words))).cause == (1,)
    text = (folder / "logs/rank0.log").read_text()
    assert text.count("Traceback") == 1
    assert 'script.py", line 9' in text
    assert "RankLost at step 2" in text and "rank 1 (" in text and "left: ValueError: boom" in text
    assert not [line for line in text.splitlines() if 'File "' in line and "script.py" not in line]
    assert "always_call" not in text


def test_the_same_exception_on_every_rank_is_one_line_and_one_traceback(launch):
    done = launch("--nproc", "2", body="raise ValueError('no such key')")
    assert done.said == ["ranks 0-1 raised ValueError: no such key (exit code 1)."]
    assert done.err.count("Traceback") == 1


@pytest.mark.smoke
def test_a_killed_rank_is_decoded(launch):
    body = WAIT.replace("import time", "import time\nif rank == 1: os.kill(os.getpid(), 9)")
    done = launch("--nproc", "2", "--grace-s", "0.2", body=body)
    assert done.code == 137
    assert re.fullmatch(r"rank 1 got SIGKILL.*", done.said[0])
    assert done.said[1:] == ["then rank 0 was stopped by the launcher."]


def test_a_segmentation_fault_shows_the_python_stack(launch):
    body = "import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()\n"
    done = launch("--nproc", "1", body=body)
    assert (done.code, done.said) == (139, ["rank 0 died of a segmentation fault (SIGSEGV)."])
    assert "in crash" in done.err


def test_an_exit_code_of_the_program_becomes_the_launchers(launch):
    body = RANK + "if rank == 1: os._exit(3)\n"
    done = launch("--nproc", "2", body=body)
    assert (done.code, done.said) == (3, ["rank 1 exited with code 3 and left no traceback."])


def test_a_survivor_may_end_by_itself_and_is_folded(launch):
    body = RANK + "import time\nif rank == 0: raise KeyError(3)\ntime.sleep(1.5); os._exit(76)\n"
    done = launch("--nproc", "2", body=body)
    assert done.code == 1
    assert done.err.splitlines()[:4] == [
        "zeroshard: rank 0 raised KeyError: 3 (exit code 1).",
        "zeroshard: then rank 1 lost its peers (exit code 76).",
        "--- rank 0",
        "Traceback (most recent call last):",
    ]


def test_a_traceback_that_was_only_logged_is_shown_although_the_run_ends_well(launch):
    body = "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
    done = launch("--nproc", "1", body=body)
    assert (done.code, done.said) == (0, [])
    assert "ZeroDivisionError: division by zero" in done.err


def test_children_of_a_dead_rank_end_with_it(launch):
    body = (
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
        "print(child.pid, flush=True)\nos._exit(3)\n"
    )
    done = launch("--nproc", "1", body=body)
    assert gone(int(done.out))


# ---------------------------------------------------------------- being stopped


def test_one_interrupt_is_forwarded_and_the_ranks_are_waited_for(running):
    body = WAIT.replace(
        "print('pid'",
        "def stop(*_): print('saved'); os._exit(0)\nsignal.signal(2, stop)\nprint('pid'",
    )
    process, _ = running("--nproc", "2", body=body)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("saved\n" * 2, 130)
    assert err == "zeroshard: stopped by SIGINT; ranks 0-1 ended.\n"


def test_two_interrupts_kill(running):
    body = WAIT.replace(
        "print('pid'",
        "signal.signal(2, lambda *_: print('not now'))\nprint('pid'",
    )
    process, pids = running("--nproc", "2", body=body)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "not now\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert all(gone(pid) for pid in pids)


def test_a_rank_that_ignores_the_request_is_killed_in_time(running):
    body = WAIT.replace("print('pid'", "signal.signal(15, signal.SIG_IGN)\nprint('pid'")
    process, pids = running("--nproc", "2", "--stop-s", "0.3", body=body)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert all(gone(pid) for pid in pids)


def test_another_run_on_the_machine_is_left_alone(running):
    other, pids = running("--nproc", "2")
    process, _ = running("--nproc", "2")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert other.poll() is None
    assert not any(gone(pid, within_s=0.1) for pid in pids)


def test_a_closed_terminal_does_not_end_a_run_under_nohup(running):
    process, _ = running("--nproc", "2", under=("nohup",))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143  # of SIGTERM: SIGHUP had no effect


def test_a_killed_launcher_leaves_no_rank(running):
    process, pids = running("--nproc", "2")
    process.kill()
    assert all(gone(pid) for pid in pids)


# ---------------------------------------------------------------- several nodes


@pytest.fixture
def two_nodes(folder, env):
    """A hostfile with two hosts, and an ``ssh`` on PATH that runs its command on this machine."""
    (folder / "hosts").write_text("nodeA slots=1\nnodeB slots=1\n")
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    ssh = bin_folder / "ssh"
    ssh.write_text(
        '#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\n'
        f'echo "$1" >> {folder}/contacted\nshift\necho "$1" >> {folder}/ssh-words\nexec sh -c "$1"\n'
    )
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    env["PATH"] = f"{bin_folder}{os.pathsep}{env['PATH']}"
    return on_hosts()


def test_ranks_of_two_hosts_find_each_other(launch, folder, two_nodes):
    body = (
        RANK + "print(rank, *[os.environ[n] for n in ('WORLD_SIZE', 'CROSS_RANK', 'LOCAL_RANK')])"
    )
    done = launch(*two_nodes, body=body)
    assert (done.code, sorted(done.out.splitlines())) == (0, ["0 2 0 0", "1 2 1 0"])
    assert sorted((folder / "contacted").read_text().split()) == ["nodeA", "nodeB"]


def test_a_failure_on_one_host_ends_the_other_and_is_named(launch, two_nodes):
    body = WAIT.replace("import time", "import time\nif rank == 1: raise ValueError('boom')")
    done = launch(*two_nodes, "--grace-s", "0.2", body=body)
    assert done.code == 1
    assert "rank 1 raised ValueError: boom (exit code 1)." in done.said
    assert "node 1 (nodeB) ended with exit code 1." in done.said


def test_an_interrupt_reaches_the_ranks_of_all_hosts(running, two_nodes):
    process, pids = running(*two_nodes)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert all(gone(pid) for pid in pids)


def test_a_killed_launcher_leaves_no_rank_on_any_host(running, two_nodes):
    process, pids = running(*two_nodes)
    process.kill()
    assert all(gone(pid) for pid in pids)


@pytest.fixture
def mpirun(folder, env):
    """An ``mpirun`` on PATH that runs the sections of its line on this machine, and ends all of them
    when one is ended by a signal, as Hydra does, or fails, as Open MPI does."""
    (folder / "hosts").write_text("nodeA slots=1\nnodeB slots=1\n")
    program = folder / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\n"
        "import itertools, subprocess, sys, time\n"
        "strict = '--host' in sys.argv\n"
        "parts = itertools.groupby(sys.argv[1:], lambda word: word == ':')\n"
        "lines = [list(words) for colon, words in parts if not colon]\n"
        "run = [subprocess.Popen(line[line.index('env'):]) for line in lines]\n"
        "while any(p.poll() is None for p in run):\n"
        "    time.sleep(0.02)\n"
        "    codes = [p.poll() for p in run if p.poll() is not None]\n"
        "    if any(c < 0 or (c > 0 and strict) for c in codes): [p.terminate() for p in run]\n"
        "sys.exit(any(p.returncode for p in run))\n"
    )
    program.chmod(0o755)
    env["PATH"] = f"{program.parent}{os.pathsep}{env['PATH']}"
    return on_hosts()


@pytest.mark.parametrize("kind", sampled(["openmpi", "mpich"], every=2))
def test_ranks_of_hosts_that_mpi_started_find_each_other(launch, mpirun, kind):
    body = (
        RANK + "print(rank, *[os.environ[n] for n in ('WORLD_SIZE', 'CROSS_RANK', 'LOCAL_RANK')])"
    )
    done = launch(*mpirun, "--launcher", kind, body=body)
    assert (done.code, sorted(done.out.splitlines())) == (0, ["0 2 0 0", "1 2 1 0"])


@pytest.mark.parametrize("kind", sampled(["openmpi", "mpich"], every=2))
def test_a_failure_ends_all_hosts_that_mpi_started(launch, mpirun, kind):
    body = WAIT.replace("import time", "import time\nif rank == 1: raise ValueError('boom')")
    done = launch(*mpirun, "--launcher", kind, "--grace-s", "0.2", body=body)
    assert done.code == 1
    assert "rank 1 raised ValueError: boom (exit code 1)." in done.said


def test_a_missing_mpirun_is_named(launch, folder):
    (folder / "hosts").write_text("nodeA slots=1\nnodeB slots=1\n")
    done = launch("--hostfile", "hosts", "--launcher", "impi", body="", PATH=str(folder))
    assert done.code == 2 and "--launcher impi: there is no mpirun on PATH" in done.said[0]


def test_words_for_ssh_and_an_environment_reach_the_hosts(launch, folder, two_nodes):
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "activate").write_text("export FROM_SCRIPT=yes\n")
    (folder / ".deepspeed_env").write_text("SERVICE=two words: secret\n")
    done = launch(
        *two_nodes,
        *("--launcher", "ssh", "--launcher_args", "-o 'User=two words'"),
        *("--venv_script", "activate"),
        body=RANK + "print(os.environ['FROM_SCRIPT'], os.environ['SERVICE'])\n"
        "assert 'ZEROSHARD_SECRET' not in os.environ",
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
    )
    assert (done.code, done.out) == (0, 2 * "yes two words: secret\n")
    shown = (folder / "ssh-words").read_text()  # by ps
    assert "words: secret" not in shown and "SECRET" not in shown


def test_a_slurm_job_of_two_nodes_is_handed_to_srun(launch, folder, env):
    srun = folder / "srun"
    srun.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    done = launch(
        *("--nproc", "4"),
        body="",
        PATH=f"{folder}{os.pathsep}{env['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="n[1-2]",
    )
    words = done.out.splitlines()
    assert words[:2] == ["--nodes=2", "--ntasks=2"]
    assert words[-4:] == ["--nproc", "4", "--", "script.py"]


def test_a_slurm_task_becomes_its_rank(launch):
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
    }
    names = "('WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')"
    body = RANK + f"print(rank, *[os.environ[n] for n in {names}])"
    assert launch(body=body, **step).out == "3 4 1 n1 20007\n"


# ---------------------------------------------------------------- refusals before anything runs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope.py"], "script 'nope.py' is not found in {cwd}."),
        (["."], "script '.' is a folder. Name the program in it."),
        (
            ["pkg.mod"],
            "script 'pkg.mod' is not found in {cwd}. To run it as a module, give --module.",
        ),
        (
            ["--no_python", "no-such-program"],
            "program 'no-such-program' is not found or not executable; with --no_python, ranks "
            "execute it directly.",
        ),
        (
            ["--include", "a", "--exclude", "b", "x.py"],
            "--include and --exclude cannot be given together; keep one of them.",
        ),
        (
            ["--num_gpus", "2", "--include", "localhost:0", "x.py"],
            "--include already says which slots are used; "
            "it cannot be given with --nproc/--num_gpus.",
        ),
        (
            ["--hostfile", "hosts", "x.py"],
            "--hostfile 'hosts' cannot be read: No such file or directory. It must contain lines "
            "'host slots=N'.",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_one_line(launch, folder, words, message):
    (folder / "pkg").mkdir()
    (folder / "pkg/mod.py").touch()
    done = launch(*words)
    assert (done.code, done.said) == (2, [message.format(cwd=folder)])


def test_memory_that_is_not_there_is_refused_before_the_start(launch):
    done = launch("--nproc", "2", "--expect-memory-per-rank", "900TB", body="print('ran')")
    assert (done.code, done.out) == (2, "")
    assert done.said[0].startswith("2 ranks x 838190.3 GiB = 1676380.6 GiB of memory are expected")


def test_a_port_in_use_is_named(launch):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = launch("--master_port", str(port), body="")
    assert (done.code, done.said) == (
        2,
        [
            f"port {port} cannot be used on this host (Address already in use). Give another one "
            "with --master_port, or end the program that uses it."
        ],
    )
