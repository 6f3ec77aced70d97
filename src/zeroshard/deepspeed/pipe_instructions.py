"""Runs the instructions of a schedule on one stage, as DeepSpeed's pipeline engine does.

A program may derive a class from ``PipelineEngine`` and override ``_exec_forward_pass``, change
``_INSTRUCTION_MAP``, or call ``_exec_schedule`` with a schedule of its own. Then its code runs at the
place of the instruction (ADR 0028). An engine of a program that does none of this runs torch's schedules,
and nothing of this file.

*Buffers.* ``pipe_buffers["inputs"]``, ``["labels"]`` and ``["outputs"]`` have one entry per micro-batch
that the stage holds. ``loss`` (last stage) and ``grad_layer`` (other stages: the received gradients of
the outputs) are those of the micro-batch in the buffer of the running instruction. In DeepSpeed they are
those of the last forward or receive; where a schedule runs a backward right after it, there is no
difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zeroshard.deepspeed import collectives as comm
from zeroshard.deepspeed import import_hook, topology
from zeroshard.deepspeed import pipe_schedule as instructions
from zeroshard.deepspeed.engine import DeepSpeedEngine
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.engine.pipeline import mean_loss
from zeroshard.engine.pipeline_batches import as_pair, on_device
from zeroshard.engine.pipeline_parts import ACTIVATIONS, GRADIENTS, StepParts
from zeroshard.engine.training_engine import TrainingEngine
from zeroshard.errors import UsageError


class InstructionEngine(DeepSpeedEngine):
    """An engine with one method for each instruction, and what they read and write.

    ``fwd_outputs``: the detached losses of the micro-batches of a schedule, on the last stage; outputs,
    if ``_compute_loss`` is False. ``total_loss``: their sum since it was set to None. ``outputs``: those
    of the last micro-batch, if ``eval_return_logits``.
    """

    module: PipelineModule
    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., Any]]] = {}

    is_pipe_partitioned = is_grad_partitioned = False  # activations are sent whole
    using_bf16_optimizer = False

    def __init__(self, model: PipelineModule, **options: Any) -> None:
        """As :class:`zeroshard.Engine`."""
        super().__init__(model, **options)
        self.grid = self.mpu = model.mpu()
        self.num_stages, self.stage_id = model.num_stages, model.stage_id
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.is_pipe_parallel = self.num_stages > 1
        self.is_data_parallel = self.grid.data_parallel_size > 1
        self.is_model_parallel = self.mesh.tensor > 1
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.num_pipe_buffers = 0
        self.pipe_buffers: dict[str, list[Any]] = {
            name: [] for name in ("inputs", "labels", "outputs", "output_tensors")
        }
        self.loss: Any = None
        self.grad_layer: Any = None
        self.total_loss: Any = None
        self.fwd_outputs: list[Any] = []
        self.outputs: Any = None
        self.agg_additional_losses: dict[str, Tensor] | None = None
        self.eval_return_logits, self._compute_loss = False, True
        self._losses_of: dict[int, Any] = {}  # by buffer
        self._grads_of: dict[int, Any] = {}
        self._loaded = 0  # micro-batches that the running schedule has taken from the data
        topology.init_process_groups(self.grid)
        self._parts = StepParts(self.stage_id, self.num_stages, self._watch.pipeline, self.device)

    def close(self, reason: str = "") -> None:
        """As :meth:`zeroshard.Engine.close`. Empties the buffers, whose graphs refer to the model."""
        super().close(reason)
        self.pipe_buffers, self.num_pipe_buffers = {name: [] for name in self.pipe_buffers}, 0
        self.loss = self.grad_layer = self.total_loss = self.outputs = None
        self._losses_of, self._grads_of, self.fwd_outputs = {}, {}, []

    destroy = close

    # ------------------------------------------------------------------ where this rank is

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.gradient_accumulation_steps()

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage, which gets the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage, which gets the labels."""
        return self.stage_id == self.num_stages - 1

    # ------------------------------------------------------------------ schedules

    def _train_schedule(self) -> Any:
        return current("TrainSchedule")(
            micro_batches=self.micro_batches, stages=self.num_stages, stage_id=self.stage_id
        )

    def _inference_schedule(self, micro_batches: int) -> Any:
        return current("InferenceSchedule")(
            micro_batches=micro_batches, stages=self.num_stages, stage_id=self.stage_id
        )

    def running_instructions(self) -> contextlib.AbstractContextManager[None]:
        """A context in which instructions may run, in a loop of the program's own. Collective.

        Outside of ``torch.no_grad()`` they train. Inside another one it does nothing.

        Raises:
            UsageError: on some ranks torch's schedule runs, or messages of neighbours do not fit
                together; the same on every rank.
        """
        return self._parts.opened(self, training=torch.is_grad_enabled())

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """Run the instructions of a schedule on this stage. Collective over all ranks.

        Raises:
            UsageError: an instruction has no entry in ``_INSTRUCTION_MAP``, or as
                :meth:`running_instructions`.
        """
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self.fwd_outputs, self._loaded = [], 0
        with self.running_instructions():
            for step in pipe_schedule:
                for instruction in step:
                    self._run_instruction(instruction)

    def _run_instruction(self, instruction: Any) -> None:
        entry = self._INSTRUCTION_MAP.get(type(instruction))
        if entry is None:
            raise UsageError(
                f"{type(self).__name__} has no method for the instruction {instruction!r}. Add one: "
                f"PipelineEngine._INSTRUCTION_MAP[{type(instruction).__name__}] = function, which is "
                "called with the engine and the instruction's arguments."
            )
        arguments = instruction.kwargs
        buffer_id = arguments.get("buffer_id")
        self._select_buffer(buffer_id)
        loss, grads = self.loss, self.grad_layer
        name = OWN.get(entry)
        if name is not None:  # by name: a derived class may override it
            getattr(self, name)(**arguments)
        else:
            MethodType(entry, self)(**arguments)
            if torch.is_grad_enabled():
                self._parts.collect(self)
        if isinstance(buffer_id, int):
            if self.loss is not loss:
                self._losses_of[buffer_id] = self.loss
            if self.grad_layer is not grads:
                self._grads_of[buffer_id] = self.grad_layer

    def _select_buffer(self, buffer_id: Any) -> None:
        """Let ``loss`` and ``grad_layer`` be those of a buffer, if it has some."""
        if isinstance(buffer_id, int):
            self.loss = self._losses_of.get(buffer_id, self.loss)
            self.grad_layer = self._grads_of.get(buffer_id, self.grad_layer)

    def _reserve_pipe_buffers(self, num_buffers: int) -> None:
        """Make room for so many micro-batches, without memory for tensors."""
        for entries in self.pipe_buffers.values():
            entries.extend([None] * (num_buffers - len(entries)))
        self.num_pipe_buffers = max(self.num_pipe_buffers, num_buffers)

    # ------------------------------------------------------------------ data

    def _next_batch(self) -> Any:
        batch = None if self.data_iterator is None else next(self.data_iterator)
        return batch if self.batch_fn is None else self.batch_fn(batch)

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        try:
            batch = as_pair(self._next_batch())
        except StopIteration:
            raise UsageError(
                f"rank {self.global_rank} has {self._loaded} micro-batches of the step: its data_iter "
                "has ended. Instructions load them one by one, so a step that has begun cannot be "
                "dropped. Give every rank a multiple of gradient_accumulation_steps, and count the steps."
            ) from None
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise UsageError(
                f"rank {self.global_rank} loaded a {type(batch).__name__}, not a pair (inputs, labels). "
                "The ranks with the first and with the last stage need a data_iter, or a batch_fn, that "
                "gives pairs."
            )
        self._loaded += 1
        for name, wanted, part in zip(
            ("inputs", "labels"), (self.is_first_stage(), self.is_last_stage()), batch, strict=True
        ):
            if wanted:
                value = tuple(part) if isinstance(part, list) else part
                self.pipe_buffers[name][buffer_id] = on_device(self.device, value)

    # ------------------------------------------------------------------ computation

    def _exec_forward_pass(self, buffer_id: int) -> None:
        if torch.is_grad_enabled() or any(not unit.resident for unit in self.runtime.tied):
            self._parts.check_open("_exec_forward_pass()")
        inputs = self.pipe_buffers["inputs"][buffer_id]
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        outputs = super().forward(*given)
        self.pipe_buffers["outputs"][buffer_id] = outputs
        if self.is_last_stage():
            self._note_outputs(outputs, self.pipe_buffers["labels"][buffer_id])

    def _note_outputs(self, outputs: Any, labels: Any) -> None:
        """Compute the loss of a micro-batch, and add it to the total."""
        loss_fn = self.module.loss_fn if self._compute_loss else None
        self.loss = loss = outputs if loss_fn is None else loss_fn(outputs, labels)
        self.module.note_additional_losses()
        if self.eval_return_logits:
            self.outputs = outputs
        found = loss.detach() if isinstance(loss, Tensor) else [part.detach() for part in loss]
        self.fwd_outputs.append(found)
        if isinstance(found, Tensor):
            self.total_loss = found.clone() if self.total_loss is None else self.total_loss + found
        else:
            before = self.total_loss or [torch.zeros_like(part) for part in found]
            self.total_loss = [total + part for total, part in zip(before, found, strict=True)]

    def _exec_backward_pass(self, buffer_id: int) -> None:
        self._parts.check_open("_exec_backward_pass()")
        if self.is_last_stage():
            TrainingEngine.backward(self, self.loss)
            self.loss = self.loss.detach()  # its graph would keep the inputs, and the outputs' too
            self.pipe_buffers["outputs"][buffer_id] = tree_map_only(
                Tensor, Tensor.detach, self.pipe_buffers["outputs"][buffer_id]
            )
            return
        outputs = self.pipe_buffers["outputs"][buffer_id]
        needing = [each for each in _tensors_of(outputs) if each.requires_grad]
        grads = [each for each in _tensors_of(self.grad_layer) if each is not None]
        if len(needing) != len(grads):
            raise UsageError(
                f"stage {self.stage_id} received {len(grads)} gradients for {len(needing)} outputs that "
                "need one. RecvGrad of a buffer comes after its ForwardPass and before its "
                "BackwardPass, and every output that needs a gradient is sent."
            )
        if needing:  # none if all parameters up to here are frozen
            torch.autograd.backward(needing, grads)
        self.pipe_buffers["outputs"][buffer_id] = None
        self.grad_layer = None

    # ------------------------------------------------------------------ messages

    def _exec_send_activations(self, buffer_id: int) -> None:
        self._parts.send(ACTIVATIONS, self.pipe_buffers["outputs"][buffer_id], self.next_stage)

    def _exec_recv_activations(self, buffer_id: int) -> None:
        value = self._parts.receive(ACTIVATIONS, self.prev_stage)
        self.pipe_buffers["inputs"][buffer_id] = value

    def _exec_send_grads(self, buffer_id: int) -> None:
        inputs = self.pipe_buffers["inputs"][buffer_id]
        needing = [each for each in _tensors_of(inputs) if each.requires_grad]
        grads = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in needing)
        self._parts.send(GRADIENTS, grads, self.prev_stage)
        self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int) -> None:
        grads = self._parts.receive(GRADIENTS, self.next_stage)
        is_one = isinstance(self.pipe_buffers["outputs"][buffer_id], Tensor)
        self.grad_layer = grads[0] if is_one and grads else list(grads)

    # ------------------------------------------------------------------ the update

    def _exec_reduce_tied_grads(self) -> None:
        """Nothing: :meth:`_exec_reduce_grads` reduces tied weights after all others, on every rank."""

    def _exec_reduce_grads(self) -> None:
        self._parts.reduce(self)

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        self._parts.update(self, lr_kwargs)

    # ------------------------------------------------------------------ losses

    def _scale_loss_by_gas(self, prescaled_loss: Any, eval_micro_batches: int | None = None) -> Any:
        """A sum over micro-batches, or a list of such sums, divided by their number."""
        count = (
            self.gradient_accumulation_steps() if eval_micro_batches is None else eval_micro_batches
        )
        if isinstance(prescaled_loss, (tuple, list)):
            return [part / count for part in prescaled_loss]
        return prescaled_loss / count

    def _aggregate_total_loss(self) -> Tensor:
        """The mean of ``total_loss`` over micro-batches and data-parallel ranks, on every rank.

        0-dim fp64. Collective over all ranks.
        """
        losses = []
        if self.is_last_stage():
            if not isinstance(self.total_loss, Tensor):
                raise UsageError(
                    f"the total loss of the step is a {type(self.total_loss).__name__}, not a tensor: "
                    "the schedule ran no ForwardPass, or the loss function gives several losses. "
                    "Override _aggregate_total_loss to combine them."
                )
            losses = [self._scale_loss_by_gas(self.total_loss).detach().view(())]
        return mean_loss(self, losses)[0]

    def _aggregate_additional_losses(self) -> dict[str, Tensor] | None:
        """The means of the module's additional losses, as :meth:`_aggregate_total_loss`; None without."""
        names = self.module.get_additional_losses()
        sums, self.module.additional_losses = self.module.additional_losses, {}
        if names is None:
            return None
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        own = [sums.get(name, zero) / self.gradient_accumulation_steps() for name in names]
        own.append(torch.ones_like(zero) if sums else zero)
        rows = self._watch.world.all_gather_small(torch.stack(own), name="additional losses")
        means = rows[:, :-1].sum(0) / rows[:, -1].sum()
        return dict(zip(names, means.unbind(), strict=True))

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """The means of the last step by name, 0-dim fp64, on every rank. None: the module has none."""
        return self.agg_additional_losses

    def _reduce_outputs(
        self,
        outputs: Any,
        reduce: str | None = "avg",
        reduce_dp: bool = True,
        micro_batches: int | None = None,
    ) -> Any:
        """The mean of losses or outputs over micro-batches and, if ``reduce_dp``, data-parallel ranks.

        ``reduce=None``: the list itself. ``micro_batches``: their number, that of the list.
        """
        if reduce is None:
            return outputs
        if isinstance(outputs[0], (tuple, list)):
            columns = [[one[at] for one in outputs] for at in range(len(outputs[0]))]
            return [
                self._reduce_outputs(each, reduce, reduce_dp, micro_batches) for each in columns
            ]
        each = torch.stack(outputs)
        mean = (each.double() if each[0].numel() == 1 else each).mean(0)
        if reduce_dp and self.is_data_parallel:
            comm.all_reduce(mean, group=self.grid.get_data_parallel_group())
            mean /= self.grid.data_parallel_size
        return mean

    def _build_data_iter(self, dataset: Any) -> None:
        """Train on the samples of a data set, in their order, again and again."""
        self.training_dataloader = self.loader_of(dataset, None)

    def _loss_stage_global_rank(self) -> int:
        """The rank of this pipeline that computes the loss."""
        return self.grid.stage_to_global(self.num_stages - 1)

    def _bcast_pipe_scalar(
        self, data: Any, src_rank: int | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """A scalar of ``src_rank`` (default: the last stage's), on all stages of this pipeline."""
        source = self._loss_stage_global_rank() if src_rank is None else src_rank
        result = torch.zeros((), dtype=dtype, device=self.device)
        if self.global_rank == source:
            result.copy_(data.detach().view(()))
        if self.is_pipe_parallel:
            comm.broadcast(result, src=source, group=self.grid.get_pipe_parallel_group())
        return result


def _tensors_of(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else () if value is None else (value,)


def current(name: str) -> Any:
    """A class of ``deepspeed.runtime.pipe.schedule``, or what the program has put in its place."""
    return getattr(import_hook.module("runtime.pipe.schedule"), name)


METHODS: dict[type, str] = {
    instructions.OptimizerStep: "_exec_optimizer_step",
    instructions.ReduceGrads: "_exec_reduce_grads",
    instructions.ReduceTiedGrads: "_exec_reduce_tied_grads",
    instructions.LoadMicroBatch: "_exec_load_micro_batch",
    instructions.ForwardPass: "_exec_forward_pass",
    instructions.BackwardPass: "_exec_backward_pass",
    instructions.SendActivation: "_exec_send_activations",
    instructions.RecvActivation: "_exec_recv_activations",
    instructions.SendGrad: "_exec_send_grads",
    instructions.RecvGrad: "_exec_recv_grads",
}
"""Instruction -> the method that runs it."""
InstructionEngine._INSTRUCTION_MAP.update(
    {kind: getattr(InstructionEngine, name) for kind, name in METHODS.items()}
)
OWN: dict[Callable[..., Any], str] = {
    getattr(InstructionEngine, name): name for name in METHODS.values()
}
"""Function of this file -> its name."""
