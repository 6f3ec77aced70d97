"""One rank of the test kit, from its fork to its end.

It waits for a job, becomes that rank of a new process group, runs the body and reports. A rank reports
first, and closes its sockets only when every rank is done. A rank that raised keeps its frames, and with
them its sockets, so that the other ranks do not fail with "connection reset" before its report is read.
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from zeroshard.device.accelerator import is_initialized
from zeroshard_testing import leak_check

STACKS_SIGNAL = int(getattr(signal, "SIGRTMIN", signal.SIGUSR1))
"""The signal that makes a rank write the stacks of its threads to its output, also inside a C call."""


@dataclass(frozen=True, kw_only=True)
class TestJob:
    """One body for one rank. The body is sent as file and name, its arguments as a pickle."""

    file: str
    module: str
    qualname: str
    arguments: bytes  # of (args, kwargs); read after the module, which may define their classes
    rank: int
    world_size: int
    backend: str | None  # None: the body starts its process group itself
    folder: str  # of this run: rendezvous file and outputs
    environ: dict[str, str]
    path: list[str]
    cwd: str
    seed: int
    may_die: bool

    @property
    def output(self) -> Path:
        """The file that gets the stdout and stderr of the rank."""
        return Path(self.folder, f"rank{self.rank}.out")


@dataclass(frozen=True)
class TestReport:
    """How the body ended on one rank. ``payload``: pickle of its result, exception or skip reason."""

    kind: Literal["result", "error", "skip"]
    at_s: float  # time.monotonic(), one clock for all processes of a host
    payload: bytes
    text: str = ""


def serve(connection: Connection) -> None:
    """Serve jobs until the other end closes. Runs in a child of the fork server."""
    if is_initialized():
        raise RuntimeError("The fork server initialised CUDA: its children cannot use it.")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is never garbage: a collection after each test takes 1 ms
    while True:
        try:
            job: TestJob = connection.recv()
        except EOFError:
            return
        _serve_one(connection, job)


def _end_with_parent() -> None:
    """End this process with the test process, even if a rank is blocked in a collective."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _serve_one(connection: Connection, job: TestJob) -> None:
    streams = _redirect(job.output)
    cwd = os.getcwd()
    _enter(job)
    before = leak_check.snapshot()
    try:
        report = TestReport("result", time.monotonic(), _pickle_result(_run_body(job)))
    except BaseException as error:
        if job.may_die:
            _die(error)
        connection.send(_report_of(error))
        _wait_for_the_end(connection)  # `error` is alive here, and so are the frames it holds
    connection.send(report)
    connection.recv()  # every rank has reported: now sockets may close
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_meshes()
    leaks = leak_check.leaks(before, leak_check.snapshot(), grace_s=1.0)
    leak_check.restore(before)
    os.chdir(cwd)
    _restore(streams)
    connection.send(leaks)


def forget_meshes() -> None:
    """Clear DTensor's cache of results. It returns device meshes of earlier calls, and their process
    groups do not exist any more."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


def _wait_for_the_end(connection: Connection) -> NoReturn:
    while True:
        try:
            connection.recv()
        except EOFError:
            os._exit(1)


def _enter(job: TestJob) -> None:
    """Take over the environment, import path and working directory of the test process; set the seed."""
    os.environ.clear()
    os.environ.update(job.environ)
    sys.path[:] = job.path
    os.chdir(job.cwd)
    random.seed(job.seed)
    torch.manual_seed(job.seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(job.seed)


def _run_body(job: TestJob) -> Any:
    body = load_body(job.file, job.module, job.qualname)
    args, kwargs = pickle.loads(job.arguments)
    if job.backend is not None:
        dist.init_process_group(
            job.backend,
            store=FileStore(str(Path(job.folder, "rendezvous")), job.world_size),
            rank=job.rank,
            world_size=job.world_size,
        )
    return body(*args, **kwargs)


def load_body(file: str, module: str, qualname: str) -> Callable[..., Any]:
    """The function ``qualname`` of ``file``, imported under the name that the test process uses."""
    target: Any = _load_module(file, module)
    for part in qualname.split("."):
        target = getattr(target, part)
    inner = getattr(getattr(target, "hypothesis", None), "inner_test", target)  # under @given
    body: Callable[..., Any] = getattr(inner, "rank_body", inner)
    return body


def _load_module(file: str, name: str) -> ModuleType:
    name = "zeroshard_rank_main" if name == "__main__" else name
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == file:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file that ranks can import.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        code = _rewritten(file)
        if code is None:
            spec.loader.exec_module(module)
        else:
            exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    gc.freeze()  # the module, and what the tests of the module before it imported while they ran
    return module


def _rewritten(file: str) -> CodeType | None:
    """The code of a test file with pytest's detailed asserts; None for other files or without pytest."""
    if not Path(file).name.startswith(("test_", "conftest")):
        return None
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:
        return None
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    rewrite_asserts(tree, source)
    return compile(tree, file, "exec", dont_inherit=True)


def _pickle_result(result: Any) -> bytes:
    # Not multiprocessing's pickler, which sends tensors as shared memory that ends with the rank.
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"The body returned {type(result).__name__}, which cannot travel back: {error}"
        ) from error


def _report_of(error: BaseException) -> TestReport:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # begin at the body, not at the kit
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    if type(error).__name__ == "Skipped":  # pytest's, which pickle cannot find
        return TestReport("skip", time.monotonic(), pickle.dumps(str(error)), text)
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        payload = pickle.dumps(RuntimeError(f"{type(error).__qualname__}: {error}"))
    return TestReport("error", time.monotonic(), payload, text)


def _die(error: BaseException) -> NoReturn:
    """End as a program with an uncaught exception does: except hook, exit handlers, exit code."""
    import atexit

    code = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _redirect(output: Path) -> tuple[int, int]:
    """Redirect stdout and stderr, also of C code, to the file. Returns duplicates of the old ones."""
    old = os.dup(1), os.dup(2)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return old


def _restore(streams: tuple[int, int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for fd, old in enumerate(streams, start=1):
        os.dup2(old, fd)
        os.close(old)
