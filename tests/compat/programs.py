"""Runs the programs of ``examples/``, and test bodies that use Accelerate or Transformers.

A program runs under its own launcher (:func:`launched`), or on the ranks of the test session, which have
already imported Transformers (:func:`on_warm_ranks`). In both, ``deepspeed`` is ZeroShard's package. In
:func:`under_deepspeed_itself` it is the real DeepSpeed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import io
import json
import os
import re
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import warm_python
from zeroshard_testing.ranks import pool, run_ranks

from zeroshard.deepspeed.install import DIRECTORY as COMPAT
from zeroshard.run.address import unused_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
PLAIN = {"ACCELERATE_USE_CPU": "true"}  # no DeepSpeed, whatever the configuration says: DDP
ENVIRON = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


# ---------------------------------------------------------------- under a launcher


def launched(
    *command: str,
    cwd: Path,
    limit_s: float = 150,
    warm_ranks: bool = True,
    imports: Sequence[str] = (),
    **environ: str,
) -> str:
    """The output of the program. The folder of ``deepspeed`` is first on its PYTHONPATH.

    The launcher itself has imported torch already. The ranks that it starts are copies of it, or with
    ``warm_ranks=False`` new interpreters. ``imports``: what the launcher imports for all of them.
    """
    variables = {**os.environ, **ENVIRON, "PYTHONPATH": str(COMPAT), **environ}
    done = warm_python.run(
        command, cwd=cwd, env=variables, timeout=limit_s, warm_ranks=warm_ranks, imports=imports
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-9000:]
    return done.stdout


def torchrun(ranks: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks)),
    )


def accelerate_launch(config: Path, *options: str) -> tuple[str, ...]:
    """The command of Accelerate, unchanged, on a port that is free."""
    return (
        *(str(BIN / "accelerate"), "launch", "--config_file", str(config)),
        *("--main_process_port", str(unused_port()), *options),
    )


# ---------------------------------------------------------------- under DeepSpeed itself

SITE = os.environ.get("ZEROSHARD_TEST_DEEPSPEED", "")
needs_deepspeed_itself = pytest.mark.skipif(
    not SITE and importlib.util.find_spec("deepspeed") is None,
    reason="no DeepSpeed, and none in ZEROSHARD_TEST_DEEPSPEED: make test-programs",
)


def under_deepspeed_itself(program: Path, *runs: Sequence[str], cwd: Path, **environ: str) -> str:
    """What two ranks of the program printed, in one run after another."""
    script = Path(__file__).with_name("on_deepspeed.py")
    return launched(
        *(*torchrun(2), str(script), str(program), *(json.dumps([*run]) for run in runs)),
        cwd=cwd, limit_s=390, warm_ranks=False, PYTHONPATH=SITE, **environ,
    )  # fmt: skip


# ---------------------------------------------------------------- on the ranks of the session


def finds_deepspeed() -> bool:
    """Whether no package that this rank imported has looked for ``deepspeed`` without finding it."""
    accelerate = sys.modules.get("accelerate.utils")
    transformers = sys.modules.get("transformers.integrations.deepspeed")
    return (accelerate is None or hasattr(accelerate, "DummyOptim")) and (
        transformers is None or transformers.DeepSpeedConfig is not object
    )


def with_deepspeed(body: Callable[..., Any]) -> Callable[..., Any]:
    """A body for ``on_ranks(n, group=False)``, under the fixture ``deepspeed_on_ranks``.

    ``deepspeed`` is ZeroShard's package. The body leaves no global state of Accelerate or Transformers.
    """

    @functools.wraps(body)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with deepspeed_is_ours():
            return body(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def deepspeed_is_ours() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(ENVIRON)
    try:
        import tqdm
        import transformers

        tqdm.tqdm.monitor_interval = 0  # seconds between looks of a thread that it leaves behind
        tqdm.tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system
        transformers.utils.logging.disable_progress_bar()
        yield
    finally:
        forget()
        os.environ.clear()
        os.environ.update(before)


def forget() -> None:
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()


def on_warm_ranks(ranks: int, program: Path, *argv: str, **environ: str) -> str:
    """The output of rank 0 of the program."""
    outputs = run_ranks(_run_program, ranks, str(program), argv, environ, group=False, timeout=120)
    return str(outputs[0])


@with_deepspeed
def _run_program(program: str, argv: tuple[str, ...], environ: dict[str, str]) -> str:
    os.environ.update(environ)
    old_argv, out = sys.argv, io.StringIO()
    sys.argv = [program, *argv]
    # The kit ends the group when all ranks are done. Ended while DistributedDataParallel still holds it,
    # it may wait forever for a thread of gloo that waits for the interpreter.
    keep_group = mock.patch("torch.distributed.destroy_process_group")
    try:
        with contextlib.redirect_stdout(out), keep_group:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        assert not error.code, error
    finally:
        sys.argv = old_argv
    return out.getvalue()


@pytest.fixture(scope="module")
def deepspeed_on_ranks() -> Iterator[None]:
    """ZeroShard's ``deepspeed`` on the ranks. Ranks that imported Accelerate or Transformers for
    other tests are replaced, because these packages look for ``deepspeed`` only once, when they are
    imported."""
    sys.path.insert(0, str(COMPAT))
    try:
        if len(pool()) and not all(run_ranks(finds_deepspeed, len(pool()), group=False)):
            pool().kill()
        yield
    finally:
        sys.path.remove(str(COMPAT))


# ---------------------------------------------------------------- what programs say


def printed(text: str, what: str = "loss") -> list[float]:
    """The numbers after ``what`` in lines that begin with ``step``."""
    return [float(found) for found in re.findall(rf"^step .*?{what} (\S+)", text, re.MULTILINE)]


def logged(file: Path, what: str = "loss") -> list[float]:
    """The numbers named ``what`` in a file of JSON lines, or in the Trainer's log."""
    text = file.read_text()
    if file.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines()]
    else:
        rows = json.loads(text)["log_history"]
    return [row[what] for row in rows if what in row]


def losses_and_norms(trainer: Any) -> list[tuple[float, float]]:
    """Of each step that a Trainer of Transformers has logged."""
    rows = [row for row in trainer.state.log_history if "grad_norm" in row]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def assert_losses(found: list[float], wanted: list[float], *, relative: float = 3e-6) -> None:
    assert wanted, "the reference said nothing"
    assert found == pytest.approx(wanted, rel=relative, abs=0)


# ---------------------------------------------------------------- a model


def tiny(seed: int = 0) -> Any:
    """A GPT-2 of two layers, whole; the embedding is tied to the output."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    drop = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ids, **drop))
