"""Runs a step of a pipeline part by part, in an order that the caller chooses.

:class:`~zeroshard.engine.pipeline.PipelineRunner` runs torch's schedules, which know when a backward is
the last one and which shapes come. Here the caller may do anything next, so nothing is known ahead:

* No backward completes the step. Stages 2 and 3 reduce after each backward, as always. What is not
  reduced when :meth:`StepParts.reduce` is called is reduced there.
* Each message has a packet with the shapes ahead of it. The receiver makes its buffers from that, and
  shapes may change from one message to the next.
* Sends do not wait. So two neighbours may send to each other at the same time, whatever their lists say.
* At the end all ranks exchange how many messages they have sent and received. One that was sent and not
  received would be taken for the first of the next step.

All this costs one more message for each message, and two small exchanges per step. Only programs that
bring instructions of their own pay it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from zeroshard.comm.collectives import first_line
from zeroshard.device.choice import read
from zeroshard.engine.pipeline import gathered, give_up, tied_gathered
from zeroshard.engine.pipeline_batches import agree_on_parts
from zeroshard.engine.training_engine import NO_OPTIMIZER, TrainingEngine
from zeroshard.errors import UsageError, ZeroShardError
from zeroshard.zero.reduce import BackwardKind

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Handle
    from zeroshard.session.groups import PipelineLinks

ACTIVATIONS, GRADIENTS = "activation", "gradient"
"""What a message brings: outputs of a stage to the next one, or their gradients back."""

MOST_IN_FLIGHT = 64
"""Messages that may be on their way before a send waits for the first of them."""


class StepParts:
    """The parts of a step of one engine's pipeline, which has one stage per rank.

    ``links``: None if one rank has all stages. No method keeps the engine.
    """

    def __init__(
        self, stage: int, stages: int, links: PipelineLinks | None, device: torch.device
    ) -> None:
        self.stage, self.stages, self.device = stage, stages, device
        self._links = links
        self._peers = [] if links is None else links.ranks
        self._in_flight: deque[tuple[Handle, Tensor]] = deque()
        self._sent: Counter[str] = Counter()  # in the running step
        self._received: Counter[str] = Counter()
        self._gathers: contextlib.ExitStack | None = None  # while a step runs
        self._updated = False  # the running step has ended with an update
        self.is_unfinished = (
            False  # the last step that trained has left its gradients to the next one
        )
        self._reduced = 0  # how many backwards of the optimizer step had run at the last reduction

    @property
    def is_open(self) -> bool:
        """Whether a step runs."""
        return self._gathers is not None

    # ------------------------------------------------------------------ a step

    @contextlib.contextmanager
    def opened(self, engine: Any, *, training: bool) -> Iterator[None]:
        """A step, or inside of one nothing. Collective over all ranks, at its begin and its end.

        Raises:
            UsageError: ranks do not all do this, or one has sent what another one has not received; the
                same on every rank.
        """
        if self.is_open:
            yield
            return
        engine.life.check("a step of the pipeline", "lp_params", "lp_grads")
        if training and engine.runtime.optimizer is None:
            raise UsageError(NO_OPTIMIZER)
        if engine._preemption is not None and self._links is not None:
            engine._preemption.before_batch(engine, training=training)
        agree_on_parts(engine, training=training)
        self._updated = False
        self._sent.clear()
        self._received.clear()
        with self._failing_for_all(engine), self._hooked(engine, training=training):
            with self._gathered(engine, training=training):
                yield
            self._end_messages(engine)
        if training:
            self.is_unfinished = bool(engine.accumulation.divided)

    @contextlib.contextmanager
    def _failing_for_all(self, engine: Any) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._links is None:
                engine._drop_gradients()
            else:
                give_up(engine, self._links, error, broken=False)
            raise

    @contextlib.contextmanager
    def _hooked(self, engine: Any, *, training: bool) -> Iterator[None]:
        """Let every backward be one of this step, whoever starts it."""
        hooks = engine._hooks
        hooks.check_tree()
        hooks.settle()
        hooks.watch_gradients(engine.runtime.reducer.buffers, True)
        before = hooks.kind_of_backward, hooks.is_pipeline
        kind = BackwardKind(False, engine.accumulation.expects_more(), self.stage)
        hooks.kind_of_backward, hooks.is_pipeline = lambda: kind, True
        if training:
            engine._in_backward.append(engine)
        try:
            yield
        finally:
            if training:
                engine._in_backward.remove(engine)
            hooks.kind_of_backward, hooks.is_pipeline = before

    @contextlib.contextmanager
    def _gathered(self, engine: Any, *, training: bool) -> Iterator[None]:
        with contextlib.ExitStack() as gathers:
            gathers.enter_context(tied_gathered(engine))
            if training and self._links is not None:
                gathers.enter_context(gathered(engine))
            self._gathers = gathers
            try:
                yield
            finally:
                self._gathers = None

    def check_open(self, call: str) -> None:
        """Raise :class:`UsageError` if no step runs. ``call``: what needs one."""
        if not self.is_open:
            raise UsageError(
                f"engine.{call} outside of a schedule: gradients and tied weights belong to a step, "
                "which all ranks begin together. Run it by engine._exec_schedule(schedule), or inside "
                "`with engine.running_instructions():`."
            )
        if self._updated:
            raise UsageError(
                f"engine.{call} after OptimizerStep in one schedule: the parameters of the step are "
                "freed by then. Let OptimizerStep be the last instruction."
            )

    # ------------------------------------------------------------------ gradients and the update

    def collect(self, engine: Any) -> None:
        """Take the gradients that the program itself has put into ``.grad``, as autograd's are taken."""
        for buffer in engine.runtime.reducer.buffers:
            found = [at for at, param in enumerate(buffer.unit.params) if param.grad is not None]
            for at in found:
                buffer.take_grad(at, buffer.unit.params[at])
            if found:
                buffer.end_backward()
                engine.accumulation.note_backward(divided=True)

    def reduce(self, engine: Any) -> None:
        """Reduce what is not reduced yet. Collective over the ranks of the stage, and for tied weights
        over those of their stages."""
        self.check_open("_exec_reduce_grads()")
        engine.runtime.reducer.finish()
        self._reduced = engine.accumulation.backwards

    def update(self, engine: Any, lr_kwargs: dict[str, Any] | None) -> None:
        """Update the parameters. Collective over all ranks.

        Raises:
            UsageError: gradients of several ranks are not reduced.
        """
        self.check_open("_exec_optimizer_step()")
        assert self._gathers is not None
        runtime, accumulation = engine.runtime, engine.accumulation
        is_whole = self._reduced == accumulation.backwards
        if not is_whole and any(buffer.comm.size > 1 for buffer in runtime.reducer.buffers):
            raise UsageError(
                "OptimizerStep with gradients that ReduceGrads has not reduced: the ranks of a stage "
                "would update the same parameters with different gradients. Put ReduceGrads() before it "
                "into the schedule. If ReduceGrads is one of the program's own, let it call "
                "PipelineEngine._exec_reduce_grads(engine)."
            )
        self._gathers.close()
        accumulation.divided.add(True)  # no backward has noted it if all parameters here are frozen
        accumulation.advance(accumulation.steps - 1)
        engine._count_micro_batches(accumulation.steps - 1)
        self._reduced = 0
        TrainingEngine.step(engine, lr_kwargs)
        # Others would have to gather again with this rank, if it runs on.
        holds = self._links is not None and runtime.traffic.gather == "step"
        self._updated = bool(runtime.tied) or holds

    # ------------------------------------------------------------------ messages

    def send(self, what: str, value: Any, to: int) -> None:
        """Start to send a tensor, or a tuple of tensors, to a neighbour stage.

        Raises:
            UsageError: it is something else, there is no such stage, or there are too many tensors.
        """
        # Not imported at the top: torch's package imports a compiler.
        from zeroshard.parallel.pipeline_stage import Boundary, as_tensors, packed

        links, name = self._next_message(what, self._sent, self.stage, to)
        tensors = () if isinstance(value, tuple) and not value else as_tensors(value, self.stage)
        boundaries = packed([Boundary.of(tensor) for tensor in tensors])
        packet = torch.cat([boundaries, boundaries.new_tensor([isinstance(value, tuple)])])
        for tensor in (packet.to(self.device), *tensors):
            values = tensor.detach().contiguous()
            handle = links.messages.send(name, values, self._peers[to], 0)
            self._in_flight.append((handle, values))
        while len(self._in_flight) > MOST_IN_FLIGHT:
            self._wait(self._in_flight.popleft()[0])

    def receive(self, what: str, source: int) -> Any:
        """What a neighbour stage sent by :meth:`send`. Tensors need a gradient here if they do there."""
        from zeroshard.parallel.pipeline_stage import PACKET_NUMEL, unpacked

        links, name = self._next_message(what, self._received, source, self.stage)

        def received(into: Tensor) -> Tensor:
            self._wait(links.messages.receive(name, into, self._peers[source]))
            return into

        packet = received(torch.empty(PACKET_NUMEL + 1, dtype=torch.int64, device=self.device))
        boundaries = unpacked(packet[:-1])
        tensors = tuple(received(each.empty(self.device)) for each in boundaries)
        for tensor, boundary in zip(tensors, boundaries, strict=True):
            tensor.requires_grad_(boundary.requires_grad and torch.is_grad_enabled())
        return tensors if read(packet[-1]) else tensors[0]

    def _next_message(
        self, what: str, counted: Counter[str], source: int, target: int
    ) -> tuple[PipelineLinks, str]:
        """Count a message. Its name is the same on both ends."""
        if self._links is None or not (0 <= source < self.stages and 0 <= target < self.stages):
            raise UsageError(
                f"stage {self.stage} of {self.stages} has no neighbour to exchange a {what} with, but "
                f"the schedule says so (stage {source} to {target}). Give schedules "
                f"stages={self.stages} and stage_id={self.stage}."
            )
        number = counted[what]
        counted[what] += 1
        return self._links, f"{what} {number}, stage {source} to {target}"

    def _wait(self, handle: Handle) -> None:
        assert self._links is not None
        try:
            handle.wait()
        except ZeroShardError:
            raise
        except RuntimeError as error:  # of a transport
            raise self._links.explain(first_line(error)) from None

    def _end_messages(self, engine: Any) -> None:
        """Wait until all messages have left, and check that all were received."""
        if self._links is None:
            return
        while self._in_flight:
            self._wait(self._in_flight.popleft()[0])
        counts = [
            held[what] for what in (ACTIVATIONS, GRADIENTS) for held in (self._sent, self._received)
        ]
        own = torch.tensor(counts, dtype=torch.float64, device=engine.device)
        rows = engine._watch.world.all_gather_small(own, name="messages of the step")
        if not is_fake(rows):
            _check_counts(read(rows), engine.mesh.groups({"pipeline"}))


def _check_counts(rows: Sequence[Sequence[float]], pipelines: Sequence[Sequence[int]]) -> None:
    """Check that neighbours have received what was sent to them.

    ``rows``: of each rank the activations that it sent and received, then the gradients. ``pipelines``:
    the ranks of each pipeline, by stage.

    Raises:
        UsageError: they have not.

    >>> _check_counts([[2, 0, 0, 2], [0, 2, 2, 0]], [[0, 1]])
    """
    for ranks in pipelines:
        for first, second in pairwise(ranks):
            for what, at, source, target in (
                (ACTIVATIONS, 0, first, second),
                (GRADIENTS, 2, second, first),
            ):
                sent, received = int(rows[source][at]), int(rows[target][at + 1])
                if sent != received:
                    raise UsageError(
                        f"rank {source} sent {sent} {what}s in this step, and rank {target} received "
                        f"{received} of them: the next step would begin with what is left. The "
                        "schedules of neighbour stages do not fit together; every Send needs its Recv "
                        "on the other stage."
                    )
