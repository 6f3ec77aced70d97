"""The threads of the compiled update change no bit. They survive forks, exits and a lack of threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from zeroshard.optim import native_adam

SOURCE = Path(native_adam.__file__).with_name("host_update.cpp")
GROUPS = [
    {
        "lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "maximize": False,
        "weight_decay": 0.1, "decoupled_weight_decay": decoupled,
    }
    for lr, decoupled in ((1e-2, True), (3e-3, False))
]  # fmt: skip
SIZES = {
    "one": [64],
    "odd": [64 * 7, 64, 64 * 129, 64 * 3, 64 * 1001],
    "many short": [64] * 700,
    "one long": [2**20],
}

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads are counted where Linux lists them"
)


@pytest.fixture(scope="module")
def library():
    return native_adam.CompiledAdam(native_adam.load(SOURCE))


def test_the_check_does_not_depend_on_torchs_default_dtype(library):
    """A program may change it while the check runs in its thread, as ``from_pretrained`` does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert native_adam.agrees_with_torch(library)
    finally:
        torch.set_default_dtype(before)


def changed_library(folder, right, wrong):
    """Another library, with a separate thread pool."""
    text = SOURCE.read_text()
    assert right in text
    (folder / "host_update.cpp").write_text(text.replace(right, wrong))
    return native_adam.CompiledAdam(native_adam.load(folder / "host_update.cpp"))


def stepped(library, sizes, *, steps=2, scale=1.0, grad_dtype=torch.bfloat16, **how):
    """Master, moments and parameter after some updates, from the same values each time."""
    generator = torch.Generator().manual_seed(0)
    numel = sum(sizes)
    master = torch.randn(numel, generator=generator) * scale
    low, count = master.bfloat16(), torch.zeros(())
    state = [torch.zeros(numel), torch.zeros(numel)]
    spans, at = [], 0
    for index, size in enumerate(sizes):
        cut = slice(at, at + size)
        parts = master[cut], state[0][cut], state[1][cut], count
        spans.append(
            native_adam.FusedFragment(index % 2, at, *parts, low[cut] if index % 3 else None)
        )
        at += size
    ready = native_adam.Spans(spans)
    for _ in range(steps):
        count += 1
        grad = (torch.randn(numel, generator=generator) * scale).to(grad_dtype)
        library.update(ready, [grad], 0.37, GROUPS, **how)
    return [t.view(torch.int32) for t in (master, low, *state)]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def helpers():
    """Ids of this process's threads that the library began."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == "zs-update":
                found.append(int(task.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def until(condition, *, within_s=20.0):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0)


def with_helpers(call):
    """Repeat ``call()`` until helper threads worked in it for 1 ms. A call may end before a helper
    wakes."""

    def worked_ns():
        lines = [Path(f"/proc/self/task/{i}/schedstat").read_text() for i in helpers()]
        return sum(int(line.split()[0]) for line in lines)

    end = time.monotonic() + 20
    while True:
        before, result = worked_ns(), call()
        if worked_ns() > before + 1_000_000:
            return result
        assert time.monotonic() < end, "no helper worked"


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("piece_numel", [64, 192, 1000, 2**16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_no_bit_depends_on_the_threads(library, sizes, piece_numel, grad_dtype):
    alone = stepped(library, sizes, grad_dtype=grad_dtype, threads=1)
    for threads in (2, 3, 5):
        how = {"threads": threads, "piece_numel": piece_numel, "grad_dtype": grad_dtype}
        assert same(alone, stepped(library, sizes, **how)), threads


def test_calls_from_several_threads_do_not_mix(library):
    alone = [stepped(library, SIZES["odd"], scale=scale) for scale in (1.0, 2.0, 3.0)]
    wrong = []

    def call(index):
        for _ in range(20):
            how = {"scale": index + 1.0, "threads": 2 + index, "piece_numel": 640}
            if not same(alone[index], stepped(library, SIZES["odd"], **how)):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_helpers_take_part(library):
    with_helpers(lambda: stepped(library, [2**20], steps=8, threads=3))


def test_there_are_only_as_many_helpers_as_were_asked_for_and_no_signal_reaches_them(tmp_path):
    before = set(helpers())
    library = changed_library(tmp_path, "// The update of a shard", "// Another update of a shard")
    stepped(library, [6400], threads=1, piece_numel=64)
    assert set(helpers()) <= before, "one thread needs no helper"
    for threads, most in ((2, 1), (4, 3), (3, 3)):
        stepped(library, [6400], steps=20, threads=threads, piece_numel=64)
        own = set(helpers()) - before
        assert len(own) <= most
    until(lambda: len(set(helpers()) - before) == 3)  # a new thread gets its name when it runs
    for helper in set(helpers()) - before:
        lines = Path(f"/proc/self/task/{helper}/status").read_text().splitlines()
        (blocked,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
            assert blocked >> (number - 1) & 1


def test_idle_helpers_end_and_come_back(tmp_path):
    idle = "std::chrono::seconds kIdle{5}", "std::chrono::microseconds kIdle{100}"
    library, before = changed_library(tmp_path, *idle), set(helpers())
    alone = stepped(library, SIZES["odd"], threads=1)
    for _ in range(50):  # helpers end while the next call wants them
        assert same(alone, stepped(library, SIZES["odd"], threads=3, piece_numel=640))
    until(lambda: set(helpers()) <= before)


def test_where_no_thread_can_be_had_the_caller_does_all(tmp_path):
    none = (
        "std::thread(&Pool::serve, this).detach();",
        "throw std::system_error(std::make_error_code(std::errc::operation_not_permitted));",
    )
    library = changed_library(tmp_path, *none)
    alone = stepped(library, SIZES["odd"], threads=1)
    assert same(alone, stepped(library, SIZES["odd"], threads=4, piece_numel=640))


def test_helpers_round_tiny_numbers_as_their_caller_does(library):
    stepped(library, [2**20], threads=5)  # they are there before
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always keeps denormal numbers")
    try:
        how = {"scale": 2e-19, "steps": 8}
        alone = stepped(library, [2**20], threads=1, **how)
        shared = with_helpers(lambda: stepped(library, [2**20], threads=3, **how))
        assert same(alone, shared)
    finally:
        torch.set_flush_denormal(False)
    assert not same(alone, stepped(library, [2**20], threads=1, **how)), "it makes a difference"


def test_a_helper_that_made_room_for_its_caller_may_run_everywhere_again(library):
    allowed = os.sched_getaffinity(0)

    def all_may():
        stepped(library, [2**20], threads=3)
        return helpers() and all(os.sched_getaffinity(helper) == allowed for helper in helpers())

    for processor in allowed:
        for thread in (0, *helpers()):
            os.sched_setaffinity(thread, {processor})  # they sleep where the caller runs
        stepped(library, [2**20], threads=3)
        for thread in (0, *helpers()):
            os.sched_setaffinity(thread, allowed)
        until(all_may)


@pytest.mark.parametrize("moment", ["between calls", "inside a call"])
def test_a_forked_child_has_helpers_of_its_own(library, moment):
    sizes = [64 * 100] * 4  # few enough for torch to use one thread in the child
    alone = stepped(library, sizes, threads=1)
    stepped(library, sizes, threads=3, piece_numel=64)
    stop = threading.Event()

    def call():
        while not stop.is_set():
            stepped(library, sizes, threads=3, piece_numel=64)

    busy = threading.Thread(target=call) if moment == "inside a call" else None
    if busy is not None:
        busy.start()
    try:
        for _ in range(10):
            if child := os.fork():
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                continue
            signal.alarm(20)  # a child that hangs ends with SIGALRM
            good = same(alone, stepped(library, sizes, threads=3, piece_numel=64))
            count = len([*Path("/proc/self/task").iterdir()])
            os._exit(0 if (good, count) == (True, 3) else 3)
    finally:
        stop.set()
        if busy is not None:
            busy.join()


EXITS = {
    "helpers at work": """
        def again():
            while True:
                library.update(spans, [grad], 1.0, [group], threads=3, piece_numel=64)
        threading.Thread(target=again, daemon=True).start()
        time.sleep(0.05)
    """,
    "the library being checked": """
        begun = threading.Event()
        def check(candidate):
            begun.set()
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                torch.ones(64).add_(1)
            return True
        adam.agrees_with_torch = check
        adam._preparation.cache_clear()
        adam.prepare()
        begun.wait()
    """,
}


@pytest.mark.parametrize("way", EXITS)
def test_the_interpreter_ends_well_whatever_the_threads_do(way):
    program = """
        import threading, time, torch
        from pathlib import Path
        from zeroshard.optim import native_adam as adam
        library = adam.CompiledAdam(adam.load(Path(adam.__file__).with_name("host_update.cpp")))
        flat = [torch.zeros(6400) for _ in range(3)]
        spans = adam.Spans([adam.FusedFragment(0, 0, *flat, torch.ones(()), None)])
        grad = torch.ones(6400)
        group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0,
                 "decoupled_weight_decay": True, "maximize": False}
        library.update(spans, [grad], 1.0, [group], threads=3, piece_numel=64)
    """
    program = textwrap.dedent(program) + textwrap.dedent(EXITS[way])
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
