"""One stage of a pipeline, driven by the schedules of ``torch.distributed.pipelining``.

Only this file imports that package. torch's schedules call the methods of a stage by name, and so does
:class:`ZeroStage`; :func:`missing_names` says whether this version of torch has all of them.

[Note: shapes of a step] torch's own stage keeps the receive buffers of the first step. If a later step
has shorter sequences, it would compute on rows of the step before. Here every step sends the shapes of
its first micro-batch ahead of it, and each micro-batch has new buffers, which are freed after its
backward. All micro-batches of one step have the same shapes. On the CPU a receive that is asked for
before the shapes have arrived is postponed ([Note: postponed receives] in
:mod:`zeroshard.comm.stage_messages`): schedules with several stages per rank ask for it up to p - 1
forwards earlier than the sender computes it. On a device the host waits for the shapes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from zeroshard.comm.stage_messages import Shapes, StageMessages
from zeroshard.device.choice import read
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.schedules import SCHEDULES

SHAPES_TAG = 1
"""The tag of messages with shapes. torch's schedules send activations and gradients with tag 0."""

MAX_TENSORS, MAX_DIMS = 8, 8
_FIELDS = 3 + MAX_DIMS  # dtype, requires_grad, number of dimensions, dimensions
PACKET_NUMEL = 1 + MAX_TENSORS * _FIELDS
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip

CLASSES = {name: f"Schedule{name}" for name in SCHEDULES}
"""Name of the schedule -> torch's class."""

STAGE_METHODS = (
    "get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops",
    "forward_one_chunk", "backward_one_chunk", "clear_runtime_states", "perform_reduce_grad",
    "scale_grads",
)  # fmt: skip
"""Methods of torch's stage that its schedules call, and that :class:`ZeroStage` replaces."""

SCHEDULE_METHODS = ("_step_microbatches", "_maybe_compute_loss")


def _set_up(name: str) -> str:
    """The method by which a schedule lets its stages infer metadata before its first step."""
    return "_initialize_stages" if SCHEDULES[name].several else "_initialize_stage"


def missing_names() -> list[str]:
    """Names that are used here and that this version of torch does not have."""
    wanted = [("PipelineStage", method) for method in STAGE_METHODS]
    for name, kind in CLASSES.items():
        wanted += [(kind, method) for method in (*SCHEDULE_METHODS, _set_up(name))]
    return [
        f"{kind}.{name}"
        for kind, name in wanted
        if not hasattr(getattr(pipelining, kind, None), name)
    ]


class Boundary(NamedTuple):
    """Shape, dtype and need of a gradient of one tensor that crosses from a stage to the next one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Boundary:
        """That of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def packed(boundaries: Sequence[Boundary]) -> Tensor:
    """Boundaries as one int64 tensor of fixed length.

    >>> unpacked(packed([Boundary((2, 3), torch.float32, True)]))
    [Boundary(shape=(2, 3), dtype=torch.float32, requires_grad=True)]
    """
    words = [len(boundaries)]
    for each in boundaries:
        dims = [*each.shape, *[0] * (MAX_DIMS - len(each.shape))]
        words += [_DTYPES.index(each.dtype), each.requires_grad, len(each.shape), *dims]
    words += [0] * (PACKET_NUMEL - len(words))
    return torch.tensor(words, dtype=torch.int64)


def unpacked(message: Tensor) -> list[Boundary]:
    """The boundaries in a message of :func:`packed`. Waits for the device."""
    count, *words = read(message)
    found = []
    for begin in range(0, count * _FIELDS, _FIELDS):
        kind, requires_grad, dims, *shape = words[begin : begin + _FIELDS]
        found.append(Boundary(tuple(shape[:dims]), _DTYPES[kind], bool(requires_grad)))
    return found


def as_tensors(output: Any, stage: int) -> tuple[Tensor, ...]:
    """What a stage passes on: a tensor, or a tuple of tensors.

    Raises:
        UsageError: it is something else, or more than a message of shapes can describe.
    """
    tensors = output if type(output) is tuple else (output,)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = ", ".join(type(each).__name__ for each in tensors) or "nothing"
        raise UsageError(
            f"pipeline stage {stage} returned {kinds}. Only a tensor or a tuple of tensors can be sent "
            "to the next stage. Cut the model elsewhere, or change what the module returns."
        )
    large = [t for t in tensors if t.dim() > MAX_DIMS or t.dtype not in _DTYPES]
    if len(tensors) > MAX_TENSORS or large:
        raise UsageError(
            f"pipeline stage {stage} returned {len(tensors)} tensors, {len(large)} of them with more "
            f"than {MAX_DIMS} dimensions or of a dtype that cannot be sent. At most {MAX_TENSORS} "
            "tensors can be sent to the next stage. Cut the model elsewhere."
        )
    return tensors


class ZeroStage(PipelineStage):
    """A stage whose forward and backward are those of an engine's model.

    ``forward(*inputs)`` runs the stage. ``backward(is_last, outputs, grads)`` does what
    ``torch.autograd.backward(outputs, grads)`` does; ``is_last``: it is the last one of the stage in this
    step. ``messages``: of this rank in ``group``; None: recorded for this stage alone. torch's metadata
    inference, which would run an additional forward, is replaced by messages: see [Note: shapes of a
    step].
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        forward: Callable[..., Any],
        backward: Callable[[bool, Sequence[Tensor], Sequence[Tensor] | None], None],
        messages: StageMessages | None = None,
    ) -> None:
        super().__init__(module, index, num_stages, device, group=group)
        self._run = forward
        self._run_backward = backward
        self._peers = dist.get_process_group_ranks(group)
        # The inputs of every step, if messages have no contents: in a simulation.
        self.known_inputs: list[Boundary] | None = None
        self._arriving: Shapes | None = None  # of this step's inputs
        self._received: list[Boundary] | None = None  # what they say, once they have arrived
        self._sent: list[Boundary] | None = None  # of this step's outputs
        # Of the last step, whose shapes this one has nearly always: what was sent, what has arrived.
        self._packed: tuple[list[Boundary], Tensor] | None = None
        self._unpacked: tuple[Tensor, list[Boundary]] | None = None
        self._messages = messages or StageMessages.unwatched(group)
        self._shapes_sent: list[tuple[Any, Tensor]] = []
        self._inputs: dict[int, tuple[Tensor, ...]] = {}  # by micro-batch
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._output_grads: dict[int, list[Tensor]] = {}
        self._input_grads: dict[int, list[Tensor]] = {}

    def clear_runtime_states(self) -> None:
        """Forget the tensors and shapes of the last step. To be called before each step."""
        for message, _ in self._shapes_sent:
            message.wait()
        self._arriving = self._received = self._sent = None
        self._messages.forget_postponed()
        for held in (self._inputs, self._outputs, self._output_grads, self._input_grads):
            held.clear()
        self._shapes_sent.clear()
        self.output_chunks.clear()

    def _clear_unlaunched_fwd_recv(self, microbatch_index: int) -> None:
        """Nothing (torch 2.15, after an error): the next step clears all buffers."""

    def _clear_unlaunched_bwd_recv(self, microbatch_index: int) -> None:
        """Nothing, in the same way."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the engine reduces gradients."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing: the loss is divided."""

    # ------------------------------------------------------------------ messages

    def _peer(self, stage: int) -> int:
        return self._peers[stage % len(self._peers)]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the inputs of a micro-batch."""
        if self.is_first:
            return []
        source = self._peer(self.stage_index - 1)
        if self._arriving is None:
            packet = torch.empty(PACKET_NUMEL, dtype=torch.int64, device=self.device)
            name = f"shapes, stage {self.stage_index - 1} to {self.stage_index}"
            self._arriving = self._messages.receive_shapes(name, packet, source, SHAPES_TAG)
        name, make = _forward(fwd_chunk_id, self.stage_index), partial(self._buffers, fwd_chunk_id)
        if self._received is None and self.device.type == "cpu":
            return self._messages.receives_later(name, self._arriving, make, source)
        return self._messages.receives(name, make(), source)

    def _buffers(self, micro_batch: int) -> tuple[Tensor, ...]:
        """Tensors to receive the inputs of a micro-batch into. Waits for the shapes."""
        if self._received is None:
            assert self._arriving is not None
            self._arriving.wait()
            self._received = self.known_inputs or self._shapes_in(self._arriving.packet)
        inputs = tuple([each.empty(self.device) for each in self._received])
        self._inputs[micro_batch] = inputs
        return inputs

    def _shapes_in(self, packet: Tensor) -> list[Boundary]:
        last = self._unpacked
        if last is None or not torch.equal(last[0], packet):
            last = self._unpacked = packet, unpacked(packet)
        return last[1]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the outputs of a micro-batch. The shapes go ahead of the first one.

        Raises:
            UsageError: the shapes differ from those of the first micro-batch.
        """
        if self.is_last:
            return []
        target, outputs = self._peer(self.stage_index + 1), self._outputs[fwd_chunk_id]
        shapes = [Boundary.of(tensor) for tensor in outputs]
        if self._sent is None:
            self._sent = shapes
            if self._packed is None or self._packed[0] != shapes:
                self._packed = shapes, packed(shapes).to(self.device)
            packet = self._packed[1]
            name = f"shapes, stage {self.stage_index} to {self.stage_index + 1}"
            message = self._messages.send(name, packet, target, SHAPES_TAG)
            self._shapes_sent.append((message, packet))
        elif shapes != self._sent:
            raise UsageError(
                f"pipeline stage {self.stage_index}: the outputs of micro-batch {fwd_chunk_id} are "
                f"{shapes}, those of the first micro-batch of the step {self._sent}. All micro-batches "
                "of a step need the same shapes, because the next stage makes its buffers before it "
                "receives them."
            )
        tensors = [tensor.detach().contiguous() for tensor in outputs]
        return self._messages.sends(_forward(fwd_chunk_id, self.stage_index + 1), tensors, target)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the gradients of a micro-batch's outputs."""
        if not self.has_backward or self.is_last:
            return []
        outputs = [tensor for tensor in self._outputs[bwd_chunk_id] if tensor.requires_grad]
        grads = [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in outputs]
        self._output_grads[bwd_chunk_id] = grads
        source = self._peer(self.stage_index + 1)
        return self._messages.receives(_backward(bwd_chunk_id, self.stage_index), grads, source)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the gradients of a micro-batch's inputs."""
        if not self.has_backward or self.is_first:
            return []
        target, grads = self._peer(self.stage_index - 1), self._input_grads.pop(bwd_chunk_id)
        return self._messages.sends(_backward(bwd_chunk_id, self.stage_index - 1), grads, target)

    # ------------------------------------------------------------------ computation

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run one micro-batch forward. ``args``: the inputs of the first stage."""
        self._messages.note_arrivals()
        if not self.is_first:
            args = self._inputs[fwd_chunk_id]
            for tensor, boundary in zip(args, self._received or (), strict=True):
                tensor.requires_grad_(boundary.requires_grad and self.has_backward)
        output = self._run(*args)
        if not self.is_last:
            self._outputs[fwd_chunk_id] = as_tensors(output, self.stage_index)
        if not self.has_backward:
            self._inputs.pop(fwd_chunk_id, None)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run one micro-batch backward, and free what belongs to it."""
        if not self.has_backward:
            self._outputs.pop(bwd_chunk_id, None)
            return
        assert full_backward, "only schedules without separate weight gradients are offered"
        self._messages.note_arrivals()
        if self.is_last:
            assert loss is not None
            self._run_backward(last_backward, (loss,), None)
            # torch's schedule keeps it to the end of the step, and its graph would keep the inputs of the
            # stage and their gradients.
            loss.detach_()
        else:
            outputs = self._outputs.pop(bwd_chunk_id)
            needing = [tensor for tensor in outputs if tensor.requires_grad]
            grads = self._output_grads.pop(bwd_chunk_id)
            if needing:  # none if all parameters up to here are frozen
                self._run_backward(last_backward, needing, grads)
        inputs = self._inputs.pop(bwd_chunk_id, ())
        self._input_grads[bwd_chunk_id] = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
            for tensor in inputs
            if tensor.requires_grad
        ]


def _forward(micro_batch: int, target: int) -> str:
    """The name of the message with the inputs of the stage ``target``."""
    return f"forward of micro-batch {micro_batch}, stage {target - 1} to {target}"


def _backward(micro_batch: int, target: int) -> str:
    """The name of the message with the gradients of the outputs of the stage ``target``."""
    return f"backward of micro-batch {micro_batch}, stage {target + 1} to {target}"


def open_schedule(
    name: str, stages: Sequence[ZeroStage], micro_batches: int, loss: Callable[[Any, Any], Tensor]
) -> Any:
    """torch's schedule over this rank's stages. ``loss(output, labels)`` is called on the last stage.

    It returns a tensor that is no view: a backward detaches it in place.

    Raises:
        UnsupportedError: this version of torch lacks a name that is used here.
    """
    if missing := missing_names():
        raise UnsupportedError(
            f"pipeline parallelism uses names that torch {torch.__version__} does not have: "
            f"{', '.join(missing)}. Install torch 2.13, with which it was tested."
        )
    given = list(stages) if SCHEDULES[name].several else stages[0]
    kind: Any = getattr(pipelining, CLASSES[name])
    schedule = kind(given, micro_batches, loss_fn=loss, scale_grads=False)
    setattr(schedule, _set_up(name), _nothing)
    return schedule


def _nothing(*_: Any, **__: Any) -> None:
    """What a schedule does before its first step: a stage infers no metadata and sends none."""


def run_schedule(
    schedule: Any,
    stages: Sequence[ZeroStage],
    inputs: list[tuple[Any, ...]] | None,
    labels: list[Any] | None,
    *,
    backward: bool,
) -> list[Tensor]:
    """Run one step. Returns the losses of the micro-batches on the last stage, else an empty list.

    ``inputs``: by micro-batch, on the first stage. ``labels``: by micro-batch, on the last one.
    ``backward=False``: only forwards.
    """
    losses: list[Tensor] = []
    before, schedule._has_backward = schedule._has_backward, backward
    try:
        for stage in stages:
            stage.has_backward = backward
            stage.clear_runtime_states()
        schedule._step_microbatches(inputs, None, labels, losses, return_outputs=False)
    finally:
        schedule._has_backward = before
    for stage in stages:
        stage.clear_runtime_states()
    return losses
