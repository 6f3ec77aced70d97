"""Trains a pipeline: runs the micro-batches of a step through this rank's stages, and steps once.

torch's schedules decide the order (:mod:`zeroshard.parallel.pipeline_stage`). The hooks of the engine
gather and reduce inside each stage as they do without a pipeline. Two small exchanges over all ranks
frame a step: whether every rank has its data, and the loss.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from zeroshard.comm.collectives import first_line
from zeroshard.device.choice import read
from zeroshard.engine.pipeline_batches import agreed_batches
from zeroshard.errors import DistributedError, UsageError, ZeroShardError, in_short
from zeroshard.parallel.split import PipelineModel
from zeroshard.zero.reduce import BackwardKind
from zeroshard.zero.unit import Unit

if TYPE_CHECKING:
    from zeroshard.session.groups import PipelineLinks

REFUSED = {
    "forward": "runs the whole model, of which this rank has a part",
    "backward": "has no loss on most ranks: the pipeline runs the backwards",
    "step": "is called by train_batch() after the last micro-batch",
    "scale": "has no loss on most ranks: the pipeline scales the loss",
    "no_sync": "would split a step, which the pipeline runs as a whole",
    "set_gradient_accumulation_boundary": "would split a step, which the pipeline runs as a whole",
    "batches": "counts batches of ranks that run alone",
    "save_16bit_model": "would write the stages of one rank as if they were the model",
    "save_fp16_model": "would write the stages of one rank as if they were the model",
    "save_pretrained": "would write the stages of one rank as if they were the model",
}
"""Calls of an engine that a pipeline does not have, and why."""


@dataclass
class Evaluation:
    """What a forward of ``micro_batches`` micro-batches is to find, and on the last stage what it found.

    ``outputs``: those of the last stage, by micro-batch, if ``keeps_outputs``. ``losses``: of the
    micro-batches, if ``computes_loss``; else labels are not used.
    """

    micro_batches: int
    keeps_outputs: bool = False
    computes_loss: bool = True
    outputs: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def takes(self, output: Any) -> bool:
        """Take the output of one micro-batch. Returns whether its loss is to be computed."""
        if self.keeps_outputs:
            self.outputs.append(output)
        return self.computes_loss


class PipelineRunner:
    """Runs steps of one engine's pipeline."""

    def __init__(self, engine: Any, model: PipelineModel, links: PipelineLinks) -> None:
        """Calls in :data:`REFUSED` raise on the engine from now on."""
        assert model.kept is not None
        # Not imported at the top: torch's package imports a compiler.
        from zeroshard.parallel import pipeline_stage

        self._torch = pipeline_stage
        self._model = model
        self._engine: Any = None  # set while a step runs: a stage must not keep it alive
        self._kind = BackwardKind(False, True)
        self._schedules: dict[int, Any] = {}  # by number of micro-batches
        self._links = links
        self._raised: BaseException | None = None  # by the model or the loss function
        self._losses: list[Tensor] = []  # not divided, of the running step
        self._asked: Evaluation | None = None  # while eval_batch() runs
        # By id of a buffer and stage: the gradients of each backward of the running step.
        self._arrived: dict[tuple[int, int], list[int]] = {}
        self.stages = [
            pipeline_stage.ZeroStage(
                module,
                index,
                len(model.stages),
                device=engine.device,
                group=links.group,
                forward=partial(self._forward, index),
                backward=partial(self._backward, index),
                messages=links.messages,
            )
            for index, module in model.kept.items()
        ]
        conditional = engine.settings.conditional_modules
        self._may_miss = {
            id(buffer)
            for buffer in engine.runtime.reducer.buffers
            if any(_is_conditional(s.fqn, conditional) for s in buffer.unit.layout.slots)
        }
        # Stages of one unit that is always whole: its reduction cannot begin before the end of backward.
        reducer = engine.runtime.reducer
        self._reduced_at_end = {
            stage
            for stage in model.kept
            if len(reducer.of_stage(stage)) == 1 and all(u.resident for u in engine.runtime.units)
        }
        engine._hooks.is_pipeline = True
        engine._hooks.kind_of_backward = lambda: self._kind
        for name, reason in REFUSED.items():
            setattr(engine, name, partial(_refuse, name, reason))

    # ------------------------------------------------------------------ one step

    def train(self, engine: Any, data_iter: Iterator[Any] | None) -> Tensor:
        """See :meth:`Engine.train_batch`."""
        count = engine.accumulation.steps
        inputs, labels = self._split(agreed_batches(engine, data_iter, needs=self._needs_data))
        self._arrived = defaultdict(list)
        engine._hooks.check_tree()
        with self._running(engine), tied_gathered(engine), gathered(engine):
            self._run(engine, inputs, labels, count, backward=True)
        engine.accumulation.divided.add(
            True
        )  # no backward has noted it if all stages here are frozen
        incomplete = self._incomplete(engine, count)
        loss, missing = mean_loss(engine, self._losses, incomplete=incomplete)
        if missing:
            raise UsageError(
                f"rank {missing[0]}: some parameters got a gradient from a part of the {count} "
                "micro-batches of the step only. If a module is meant to run for some samples, name it "
                'in "conditional_modules". Otherwise its gradients are lost.'
            )
        if self._losses:
            engine._losses.extend((torch.stack(self._losses) / count).unbind())
        return loss

    def evaluate(
        self, engine: Any, data_iter: Iterator[Any] | None, asked: Evaluation | None = None
    ) -> Tensor | None:
        """See :meth:`Engine.eval_batch` and :class:`Evaluation`."""
        asked = Evaluation(engine.accumulation.steps) if asked is None else asked
        batches = agreed_batches(
            engine, data_iter, needs=self._needs_data, count=asked.micro_batches
        )
        inputs, labels = self._split(batches)
        self._asked = asked
        try:
            with torch.no_grad(), self._running(engine), tied_gathered(engine):
                self._run(engine, inputs, labels, asked.micro_batches, backward=False)
        finally:
            self._asked = None
        asked.losses = self._losses
        return mean_loss(engine, self._losses)[0] if asked.computes_loss else None

    @property
    def _needs_data(self) -> bool:
        return bool(self.stages[0].is_first or self.stages[-1].is_last)

    def _split(self, batches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The inputs for the first stage and the labels for the last one, if this rank has them."""
        inputs = [batch[0] for batch in batches] if self.stages[0].is_first else []
        labels = [batch[1] for batch in batches] if self.stages[-1].is_last else []
        return inputs, labels

    def _run(
        self,
        engine: Any,
        inputs: list[Any],
        labels: list[Any],
        count: int,
        *,
        backward: bool,
    ) -> None:
        if count not in self._schedules:
            scaled = partial(self._scaled_loss, count)
            name = self._model.schedule_for(engine.mesh.pipeline, count)
            self._schedules[count] = self._torch.open_schedule(name, self.stages, count, scaled)
        self._losses, self._raised = [], None
        try:
            self._torch.run_schedule(
                self._schedules[count],
                self.stages,
                [each if isinstance(each, tuple) else (each,) for each in inputs] or None,
                labels or None,
                backward=backward,
            )
        except BaseException as error:
            told = isinstance(error, ZeroShardError) or error is self._raised
            broken = isinstance(error, RuntimeError) and not told
            give_up(engine, self._links, error, broken=broken)
            if broken:
                raise self._links.explain(first_line(error)) from None
            raise

    @contextlib.contextmanager
    def _running(self, engine: Any) -> Iterator[None]:
        self._engine = engine
        try:
            yield
        finally:
            self._engine = None

    # ------------------------------------------------------------------ what stages call

    def _forward(self, stage: int, *inputs: Any) -> Any:
        try:
            return type(self._engine).forward(self._engine, *inputs, stage=stage)
        except BaseException as error:
            self._raised = error
            raise

    def _backward(
        self, stage: int, is_last: bool, outputs: Sequence[Tensor], grads: Sequence[Tensor] | None
    ) -> None:
        """Run a backward of ``stage``. ``is_last``: it is the last one in this step."""
        engine = self._engine
        self._kind = BackwardKind(is_last, engine.accumulation.steps > 1, stage)
        reducer = engine.runtime.reducer
        at_end = stage in self._reduced_at_end
        watched = reducer.eager or (is_last and not at_end)  # gradients are reduced
        engine._hooks.watch_gradients(reducer.of_stage(stage), watched, at_end=at_end)
        engine._in_backward.append(engine)
        try:
            torch.autograd.backward(outputs, grads)
        except BaseException as error:
            self._raised = error
            raise
        finally:
            engine._in_backward.remove(engine)
        for buffer in reducer.buffers:
            if buffer.pipeline_stage in (stage, None):
                self._arrived[id(buffer), stage].append(buffer.num_ready)

    def _scaled_loss(self, count: int, output: Any, labels: Any) -> Tensor:
        """The part of one micro-batch in the mean loss, times the loss scale."""
        try:
            return self._part_of_loss(count, output, labels)
        except BaseException as error:
            self._raised = error
            raise

    def _part_of_loss(self, count: int, output: Any, labels: Any) -> Tensor:
        engine = self._engine
        if self._asked is not None and not self._asked.takes(output):
            return torch.zeros((), device=engine.device)
        loss = self._model.loss_of(output, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"{self._model.loss_source} of the pipeline returned {kind}. It must return the mean "
                "loss of a micro-batch, a tensor with one element."
            )
        self._losses.append(loss.detach().view(()))
        scaled = loss / count
        return scaled * engine.scaler.scale if engine.scales_loss else scaled

    def _incomplete(self, engine: Any, count: int) -> bool:
        """Whether a parameter got a gradient from some micro-batches and not from others.

        Several stages may use a tied parameter, so only its arrivals are compared from one backward of a
        stage to the next.
        """
        buffers = {id(b): b for b in engine.runtime.reducer.buffers if id(b) not in self._may_miss}
        for (key, _), arrived in self._arrived.items():
            if key not in buffers:
                continue
            buffer = buffers[key]
            is_tied = buffer.pipeline_stage is None
            if sum(arrived) != count * (max(arrived) if is_tied else sum(buffer.has_grad)):
                return True
        return False


@contextlib.contextmanager
def gathered(engine: Any) -> Iterator[None]:
    """Hold all parameters through the schedule, if the pipeline gathers once per step."""
    units = [unit for unit in engine.runtime.units if not unit.resident]
    if engine.runtime.traffic.gather != "step" or not units:
        yield
        return
    with _pinned(units):
        for unit in units:
            unit.unshard()  # its first use waits for it
        yield


@contextlib.contextmanager
def tied_gathered(engine: Any) -> Iterator[None]:
    """Hold units that are tied over stages through the schedule.

    Every holder waits for the all-gathers here. In the schedule one of them could wait for an
    all-gather, and another one for a message of the first.
    """
    tied = engine.runtime.tied
    with _pinned(tied):
        for unit in tied:
            unit.unshard()
            unit.wait_for_unshard()
        yield


def give_up(engine: Any, links: PipelineLinks, error: BaseException, *, broken: bool) -> None:
    """End the engine after an error in the middle of a step. Waits of the other stages fail, too.

    ``broken``: it says only that a connection has ended. Else it is this rank's own error, unless all
    ranks know it.
    """
    engine.life.fail(
        f"a step of the pipeline ended in the middle ({type(error).__name__}: {error}), and "
        "messages between its stages are lost. Close this engine, build a new one and continue "
        "from the last checkpoint."
    )
    own = not (broken or isinstance(error, DistributedError))
    # The other stages would wait for messages of this one.
    links.abort(in_short(error) if own else "")


@contextlib.contextmanager
def _pinned(units: Sequence[Unit]) -> Iterator[None]:
    """Do not reshard these units until the end."""
    for unit in units:
        unit.pin_count += 1
    try:
        yield
    finally:
        for unit in units:
            unit.pin_count -= 1
        for unit in units:
            unit.reshard()


def mean_loss(
    engine: Any, losses: Sequence[Tensor], *, incomplete: bool = False
) -> tuple[Tensor, list[int]]:
    """The mean of all ranks' losses, 0-dim fp64, and the ranks that are incomplete. Collective."""
    own = torch.zeros(3, dtype=torch.float64, device=engine.device)
    if losses:
        own[0], own[1] = torch.stack(list(losses)).double().mean(), 1.0
    own[2] = float(incomplete)
    rows = engine._watch.world.all_gather_small(own, name="loss of the step")
    bad = [] if is_fake(rows) else [at for at, found in enumerate(read(rows[:, 2])) if found]
    return rows[:, 0].sum() / rows[:, 1].sum(), bad


def _refuse(name: str, reason: str, *_: Any, **__: Any) -> Any:
    raise UsageError(
        f"engine.{name}() of a pipeline {reason}. Call engine.train_batch(data_iter) or "
        "engine.eval_batch(data_iter)."
    )


def _is_conditional(fqn: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter is in a module that only some samples run: of ``patterns``, or an expert."""
    parts = fqn.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts))]
    return any(fnmatchcase(name, pattern) for name in names for pattern in (*patterns, "*experts"))


def check_loss_fn(module: nn.Module, call: str) -> None:
    """Check that a module can run ``call``.

    Raises:
        UsageError: it is not a pipeline, or has no loss function.
    """
    if not isinstance(module, PipelineModel):
        raise UsageError(
            f"engine.{call} needs a model made by zeroshard.parallel.pipeline(), and this is a "
            f"{type(module).__name__}. Call forward, backward and step instead."
        )
    if module.loss_fn is None and not module.returns_loss:
        raise UsageError(
            f"engine.{call} needs a loss function, which the last stage calls with its output and the "
            "labels. Pass loss_fn= to zeroshard.parallel.pipeline()."
        )


def train_alone(engine: Any, data_iter: Iterator[Any] | None) -> Tensor:
    """:meth:`Engine.train_batch` on one pipeline rank: plain gradient accumulation."""
    losses = []
    for inputs, labels in agreed_batches(engine, data_iter):
        loss = engine.module.loss_of(engine.module.call_whole(engine, inputs), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return mean_loss(engine, losses)[0]


def evaluate_alone(
    engine: Any, data_iter: Iterator[Any] | None, asked: Evaluation | None = None
) -> Tensor | None:
    """:meth:`Engine.eval_batch` on one pipeline rank."""
    asked = Evaluation(engine.accumulation.steps) if asked is None else asked
    with torch.no_grad():
        for inputs, labels in agreed_batches(engine, data_iter, count=asked.micro_batches):
            output = engine.module.call_whole(engine, inputs)
            if asked.takes(output):
                asked.losses.append(engine.module.loss_of(output, labels))
    return mean_loss(engine, asked.losses)[0] if asked.computes_loss else None
