"""Simulates changes of a run whose memory did not suffice. ``python -m`` is run by the rank that failed.

It reads a pickled :class:`~zeroshard.engine.simulated_changes.Question` from its standard input, and
writes the answer as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import pickle
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.engine.remedies import TOO_MUCH
from zeroshard.engine.run_description import RunDescription
from zeroshard.engine.simulated_changes import Question, StatesQuestion
from zeroshard.errors import ConfigError, UnsupportedError, UsageError, in_short
from zeroshard.parallel.split import PipelineModel
from zeroshard.planner.changes import changed_keys, changes_that_fit, merged
from zeroshard.planner.fakes import fake_tensors
from zeroshard.planner.fit import calm_collector
from zeroshard.planner.gpu_kernels import Target
from zeroshard.planner.model_source import loss_of, recomputing
from zeroshard.planner.own_batch import MICRO_BATCH
from zeroshard.planner.plan import Plan
from zeroshard.planner.simulate import OUTSIDE_STEP, Simulation, least_nbytes, simulate
from zeroshard.zero.input_shapes import Shape

ACCUMULATION = "gradient_accumulation_steps"
UNKNOWN = 0.1
"""The part of the measured bytes that a simulation may not know: the program's own, and allocators."""

IMPOSSIBLE = (ConfigError, UnsupportedError, UsageError)
"""Errors of a change that the run cannot have, such as a stage."""


def answer(question: Question) -> dict[str, Any]:
    """Changes with which a step needs no more than the rank held, or the reason why there are none."""
    until = time.monotonic() + question.seconds
    run, room = question.run, question.room_nbytes
    base = planned(run, {}, line="")
    peak = base.peak_nbytes
    if peak < (1 - UNKNOWN) * room:
        return {
            "reason": f"a simulation of the run needs {_mib(peak)} MiB, and it held {_mib(room)}"
        }
    limit = min(room, peak - question.asked_nbytes) - int(TOO_MUCH * peak)
    base = replace(base, limit_nbytes=limit)
    late: list[str] = []

    @functools.cache
    def once(line: str) -> Plan | None:
        keys = changed_keys(line)
        if not run.on_gpu and _is_offload(keys):
            return None
        if time.monotonic() > until:
            late.append(line)
            return None
        try:
            return replace(planned(run, keys, line), limit_nbytes=limit)
        except IMPOSSIBLE:
            return None

    with calm_collector():
        found = changes_that_fit(base, lambda line, **_: once(line))  # always of few micro-batches
    if not found:
        most = f"in {question.seconds:.0f} s " if late else ""
        return {"reason": f"{most}no single change was found to be enough by simulation"}
    rows = [
        {"text": each.text, "line": each.line, "freed_nbytes": each.freed_nbytes,
         "slowdown": each.slowdown}
        for each in found
    ]  # fmt: skip
    return {"found": rows}


def least_of_each(question: StatesQuestion) -> dict[str, Any]:
    """See :class:`StatesQuestion`."""
    until = time.monotonic() + question.seconds
    found = [_least(question.run, {})]
    for line in question.lines:
        if time.monotonic() > until:
            return {"reason": f"the simulations did not end in {question.seconds:.0f} s"}
        found.append(_least(question.run, changed_keys(line)))
    return {"found": found}


def _least(run: RunDescription, keys: Mapping[str, Any]) -> int | None:
    config = _config(run, keys, run.micro_batch, run.accumulation)
    build = functools.partial(_model, run)
    try:
        return least_nbytes(
            build, config, mesh=run.mesh, rank=run.rank, plan=run.plan, optimizer=_optimizer(run),
            target=_target(run), ranks_per_node=run.ranks_per_node,
        )  # fmt: skip
    except IMPOSSIBLE:
        if not keys:
            raise
        return None


def _config(
    run: RunDescription, keys: Mapping[str, Any], micro_batch: int, steps: int
) -> dict[str, Any]:
    """The configuration with a change, and with these sizes instead of those that it has."""
    config = merged(run.config, keys)
    config.pop("train_batch_size", None)
    return config | {MICRO_BATCH: micro_batch, ACCUMULATION: steps}


def _model(run: RunDescription) -> nn.Module:
    made = pickle.loads(run.model)
    model: nn.Module = made if isinstance(made, nn.Module) else made()
    return model


def _target(run: RunDescription) -> Target:
    return "cuda" if run.on_gpu else "cpu"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def _is_offload(keys: Mapping[str, Any]) -> bool:
    """Whether a change moves state to host memory, which frees nothing on CPU ranks."""
    return any(key.startswith("offload") for key in keys.get("zero_optimization", ()))


def planned(run: RunDescription, keys: Mapping[str, Any], line: str) -> Plan:
    """The run with one change, of which ``keys`` are those of the configuration. Its peak is of a step.

    Raises:
        UsageError: the samples of a batch cannot be divided so.
    """
    micro_batch = keys.get(MICRO_BATCH, run.micro_batch)
    steps = keys.get(ACCUMULATION, run.accumulation)
    config = _config(run, keys, micro_batch, min(steps, run.enough or steps))

    def build() -> nn.Module:
        model = _model(run)
        if line and not line.startswith("{"):
            recomputing(model.inner if isinstance(model, PipelineModel) else model)
        return model

    found = simulate(
        build, config, _batch(run, micro_batch), mesh=run.mesh, rank=run.rank,
        loss_fn=loss_or_mean, plan=run.plan, optimizer=_optimizer(run),
        target=_target(run), ranks_per_node=run.ranks_per_node,
    )  # fmt: skip
    return _of_a_step(found, micro_batch, steps)


def _of_a_step(found: Simulation, micro_batch: int, steps: int) -> Plan:
    moments = {name: at for name, at in found.moments.items() if name not in OUTSIDE_STEP}
    run = replace(found.run, accumulation=steps)  # from which smaller batches are derived
    found = replace(found, moments=moments, run=run)
    mesh, stage = found.mesh, found.run.stage
    return Plan("", mesh, stage, micro_batch, None, found, assumed=(), of_stages=(found,))


def _optimizer(run: RunDescription) -> Any:
    """A function that makes the optimizer of the program; None: the configuration names it."""
    if run.optimizer is None:
        return None
    with fake_tensors():
        kind, defaults = pickle.loads(run.optimizer)
    taken = inspect.signature(kind).parameters  # AdamW has more defaults than it takes
    return functools.partial(kind, **{k: v for k, v in defaults.items() if k in taken})


def _batch(run: RunDescription, micro_batch: int) -> tuple[Any, Any]:
    """Inputs and labels of a micro-batch of this size.

    Raises:
        UsageError: the samples of the batch cannot be divided so.
    """
    leaves = tree_leaves(run.batch)
    shapes = [leaf for leaf in leaves if isinstance(leaf, Shape) and leaf.sizes]
    rows = shapes[0].sizes[0] if shapes else 0
    wanted, rest = divmod(rows * micro_batch, run.micro_batch)
    if rest:
        raise UsageError(f"{rows} rows cannot be divided for a micro-batch of {micro_batch}")

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, Shape):
            return leaf
        first, *others = leaf.sizes or (None,)
        sizes = leaf.sizes if first != rows else (wanted, *others)
        return torch.empty(sizes, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

    inputs, labels = tree_map(made, run.batch)
    return inputs, labels


def loss_or_mean(output: Any, labels: Any) -> Tensor:
    """The loss in the output. A program that computes it by itself: the mean of the first tensor."""
    try:
        return loss_of(output, labels)
    except UsageError:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        floats = [tensor for tensor in tensors if tensor.requires_grad]
        if not floats:
            raise
        return floats[0].float().mean()


def main() -> None:
    """Read the question and write the answer, or the reason why there is none."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print
    _let_live()
    question: Question | StatesQuestion = pickle.load(sys.stdin.buffer)
    sys.path[:] = [*sys.path, *(folder for folder in question.run.path if folder not in sys.path)]
    torch.set_default_dtype(question.run.dtype)
    try:
        found = answer(question) if isinstance(question, Question) else least_of_each(question)
    except Exception as error:  # whatever the model raises with tensors without values
        found = {"reason": in_short(error)}
    json.dump(found, out)
    out.flush()


def _let_live() -> None:
    """Raise limits of memory that the rank has itself, and let the kernel end this process before it."""
    for limit in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (hard, hard))
    with contextlib.suppress(OSError):  # no such file on other systems than Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
