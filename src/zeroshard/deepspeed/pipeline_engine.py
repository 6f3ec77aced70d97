"""The engine that ``deepspeed.initialize`` builds for a ``PipelineModule``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from zeroshard.data.batches import loader_for
from zeroshard.deepspeed import collectives as comm
from zeroshard.deepspeed.engine import DeepSpeedEngine
from zeroshard.deepspeed.getters import GETTERS
from zeroshard.deepspeed.helpers import RepeatingLoader
from zeroshard.deepspeed.logs import log_dist
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.engine.pipeline import Evaluation
from zeroshard.errors import UsageError


class PipelineEngine(DeepSpeedEngine):
    """Trains a :class:`PipelineModule`. If it has several stages, ``forward``, ``backward`` and ``step``
    raise an error.

    ``grid``: this rank's place in the topology. ``stage_id``: the number of its stage.
    """

    module: PipelineModule

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
        self.agg_train_loss: Tensor | None = None
        self._own_loader: Any = None  # of training_data
        self._began_s = time.perf_counter()

    # ------------------------------------------------------------------ where this rank is

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch of one rank."""
        return self.train_micro_batch_size_per_gpu()

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

    def get_pipeline_parallel_rank(self) -> int:
        """The number of this rank's stage."""
        return self.stage_id

    # ------------------------------------------------------------------ data

    def loader_of(self, dataset: Any, collate_fn: Callable[..., Any] | None) -> Any:
        """A loader of samples in their order. ``train_batch()`` reads it again and again."""
        loader = loader_for(self, dataset, route="pipeline", collate_fn=collate_fn)
        self._own_loader = loader
        self.set_dataloader(RepeatingLoader(loader))
        return loader

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Train on the batches of a loader. Ranks without first and last stage ignore it."""
        self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Train on the batches of an iterator. Ranks without first and last stage ignore it."""
        if self.is_first_stage() or self.is_last_stage():
            self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Change each batch by ``fn``. A rank without data calls it with None."""
        self.batch_fn = fn

    def _batches(self, iterator: Iterator[Any] | None) -> Iterator[Any] | None:
        if self.batch_fn is None:
            return iterator
        if iterator is None and not (self.is_first_stage() or self.is_last_stage()):
            return None
        return map(self.batch_fn, repeat(None) if iterator is None else iterator)

    # ------------------------------------------------------------------ steps

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """As :meth:`zeroshard.Engine.train_batch`. An iterator stays in use for later calls.

        None: the iterator of the call before, or the data passed to ``initialize``.

        Raises:
            UsageError: also inside ``torch.no_grad()``.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "engine.train_batch() inside torch.no_grad() could not train. Leave the context, or call "
                "eval_batch()."
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.train()
        loss = super().train_batch(self._batches(self.data_iterator))
        self.agg_train_loss = loss
        every: float = GETTERS["steps_per_print"](self)
        if every and self.global_steps % every == 0:
            self._print_step(loss, every)
        return loss

    def _print_step(self, loss: Tensor, steps: float) -> None:
        now_s = time.perf_counter()
        step_s, self._began_s = (now_s - self._began_s) / steps, now_s
        log_dist(
            f"steps: {self.global_steps} loss: {float(loss):0.4f} iter time (s): {step_s:0.3f} "
            f"samples/sec: {self.train_batch_size() / step_s:0.3f}",
            ranks=[0],
        )

    def _tell(self, name: str, loss: Tensor) -> None:
        """Send a loss to the monitors."""
        if self.is_main_rank and self.monitor.enabled:
            self.monitor.write_events([(f"Train/Samples/{name}", float(loss), self.global_samples)])

    def eval_batch(  # type: ignore[override]
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run forwards only, in evaluation mode. Collective.

        Returns the mean loss over micro-batches and data-parallel ranks (0-dim fp64) on every rank; with
        ``bcast_loss=False`` None where the last stage is not. ``compute_loss=False``: the mean of the
        outputs instead, on the last stage, else None. ``reduce_output=None``: the losses or outputs of
        this rank's micro-batches as a list, on the last stage, else None. ``return_logits``: a pair of
        that and the output of the last micro-batch (None if the last stage is elsewhere).
        ``num_micro_batches``: default as in a training step.

        Raises:
            UsageError: an argument has another value, or as :meth:`train_batch`.
        """
        _check_evaluation(reduce_output, num_micro_batches)
        asked = Evaluation(
            num_micro_batches or self.gradient_accumulation_steps(),
            keeps_outputs=return_logits or not compute_loss,
            computes_loss=compute_loss,
        )
        reads = data_iter is not None and (self.is_first_stage() or self.is_last_stage())
        loss = self._evaluate(self._batches(iter(data_iter) if reads else None), asked)  # type: ignore[arg-type]
        if loss is not None:
            self._tell("eval_loss", loss)
        found: Any = None
        if self.is_last_stage() or (compute_loss and bcast_loss and reduce_output):
            found = self._result_of(asked, loss, whole_list=reduce_output is None)
        if return_logits:
            return found, asked.outputs[-1] if asked.outputs else None
        return found

    def _result_of(self, asked: Evaluation, loss: Tensor | None, *, whole_list: bool) -> Any:
        """The loss or the mean of the outputs; ``whole_list``: those of all micro-batches."""
        if whole_list:
            return asked.losses if asked.computes_loss else asked.outputs
        return loss if asked.computes_loss else self._mean_output(asked.outputs)

    def _mean_output(self, outputs: list[Any]) -> Any:
        """The mean of equal outputs over micro-batches and data-parallel ranks, tensor by tensor."""
        if isinstance(outputs[0], (tuple, list)):
            return [
                self._mean_output([one[at] for one in outputs]) for at in range(len(outputs[0]))
            ]
        mean = torch.stack(outputs).mean(0)
        if self.is_data_parallel:
            comm.all_reduce(mean, group=self.grid.get_data_parallel_group())
            mean /= self.grid.data_parallel_size
        return mean

    # ------------------------------------------------------------------ checkpoints, and old names

    def load_checkpoint(self, load_dir: str | PathLike[str], *args: Any, **options: Any) -> Any:
        """As :meth:`zeroshard.Engine.load_checkpoint`. ``training_data`` continues where it was."""
        found = super().load_checkpoint(load_dir, *args, **options)
        if self._own_loader is not None and options.get("resumes_data", True):
            self.set_dataloader(RepeatingLoader(self._own_loader))
        return found

    def reset_activation_shape(self) -> None:
        """Nothing: each step sends its shapes ahead."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing: booleans are sent as they are."""


def _check_evaluation(reduce_output: Any, num_micro_batches: Any) -> None:
    if reduce_output is not None and str(reduce_output).lower() != "avg":
        raise UsageError(
            f'eval_batch(reduce_output={reduce_output!r}): give "avg" for the mean, or None for a list.'
        )
    is_count = type(num_micro_batches) is int and num_micro_batches > 0
    if num_micro_batches is not None and not is_count:
        raise UsageError(
            f"eval_batch(num_micro_batches={num_micro_batches!r}): give a number of at least 1, or None."
        )
