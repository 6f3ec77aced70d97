"""What an engine is made of and counts, and what a program reads of that."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeroshard.comm.dtensors import whole_of
from zeroshard.config import LoadedConfig
from zeroshard.core.stages import state_nbytes
from zeroshard.device.choice import read
from zeroshard.engine import out_of_memory
from zeroshard.engine.build import EngineParts
from zeroshard.engine.restarts import Resumed
from zeroshard.metrics.monitors import Monitors
from zeroshard.metrics.step_report import (
    MemoryReport,
    StepReport,
    measured_nbytes,
    memory_rows,
    rows_from_vector,
    vector_of,
)


class EngineBase(nn.Module):
    """The parts of an engine, which :func:`~zeroshard.engine.build.build_engine` has made."""

    def __init__(self, model: nn.Module, parts: EngineParts) -> None:
        super().__init__()
        self.module = model
        draft, rank_info = parts.draft, parts.draft.rank_info
        self.loaded: LoadedConfig = draft.loaded
        self.settings = draft.loaded.config
        self.device = draft.device
        self.policy = draft.policy
        self.runtime = parts.runtime
        self.life = parts.runtime.life
        self.scaler = parts.scaler
        self.scales_loss = parts.scales_loss
        self.lr_scheduler = draft.scheduler
        self.optimizer = parts.runtime.optimizer.inner if parts.runtime.optimizer else None
        self.world_size = rank_info.world_size
        self.global_rank = rank_info.rank
        self.local_rank = rank_info.local_rank
        self.local_world_size = rank_info.local_world_size
        self.is_main_rank = rank_info.is_main_rank
        self.mesh = draft.mesh
        self.dp_rank = draft.mesh.dp_rank(rank_info.rank)
        self.dp_size = draft.mesh.dp_size
        self.accumulation = parts.accumulation
        self.global_steps = self.micro_steps = self.global_samples = 0
        self.resumed: Resumed | None = None  # set by initialize(resume=...)
        self.last_step: StepReport | None = None
        self.training_dataloader: Any = None  # set by initialize(), from training_data
        self._watch = parts.watch
        self._update = parts.update
        self.memory_baseline = out_of_memory.MemoryBaseline(parts.runtime.ledger)
        self._hooks = parts.hooks
        self._offloader = parts.offloader
        self._observer = parts.observer
        self._make_savers = parts.make_savers

    if TYPE_CHECKING:
        # That of Module has every name: a type checker would take a misspelt method for a Tensor.
        __getattr__: None  # type: ignore[misc, assignment]
    else:

        def __getattr__(self, name: str) -> Any:
            """What Module has in its dictionaries, such as ``module``. Called for no method."""
            try:
                return nn.Module.__getattr__(self, name)
            except AttributeError as error:
                raise AttributeError(f"{error}{nearest_name(self, name)}") from None

    @property
    def monitors(self) -> Monitors:
        """The sinks of events. ``add(function)`` sends them to a function too. Empty but on rank 0."""
        return self._observer.monitors

    @property
    def transport(self) -> str:
        """The name of the transport, for instance ``p2p`` or ``nccl``."""
        return self._watch.gathers.transport

    @property
    def dtypes(self) -> str:
        """The table of dtypes of this run."""
        return self.policy.table()

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradient before clipping; None before the first step."""
        return self.last_step.grad_norm if self.last_step is not None else None

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` updated the parameters."""
        return self.last_step is not None and not self.last_step.skipped

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was passed; if that was a path, the contents of the file."""
        return self.loaded.raw

    def iter_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, full values)`` of every parameter, one unit in memory at a time. Collective."""
        self.life.check()
        self._update.all_gather_late()
        for unit in self.runtime.units:
            unit.wait_for_unshard()
            unit.write_back_edits()
            nbytes = 0 if unit.resident else unit.full_nbytes
            with self.runtime.ledger.lend("iter_full_params", nbytes):
                full_N = unit.full_N if unit.resident else unit.gathered_copy()
                for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                    local = full_N[slot.start : slot.stop].view(slot.shape).detach()
                    yield slot.fqn, whole_of(param, local)
                del full_N, local

    def memory_report(self, *, all_ranks: bool = False) -> MemoryReport:
        """Planned and measured bytes per category and tier. Collective if ``all_ranks``."""
        planned = state_nbytes(self.runtime.plan, self.runtime.stage, self._watch.gathers.rank)
        outside = self.memory_baseline.peaks(self.device)
        measured = measured_nbytes(self.runtime.ledger, self._watch.scratch_peak_nbytes, outside)
        notes = self.runtime.traffic.lines
        if not all_ranks:
            return MemoryReport({self.global_rank: memory_rows(planned, measured)}, notes)
        self.life.check()
        vector = torch.tensor(vector_of(planned, measured), dtype=torch.float64, device=self.device)
        rows = read(self._watch.world.all_gather_small(vector, name="memory report"))
        return MemoryReport({at: rows_from_vector(row) for at, row in enumerate(rows)}, notes)


def nearest_name(engine: nn.Module, name: str) -> str:
    """The end of an error about an attribute that an engine does not have: what may be meant instead.

    >>> nearest_name(nn.Linear(1, 1), "forwrd")
    ". Did you mean 'forward'?"
    """
    if name.startswith("_"):
        return ""
    model = engine._modules.get("module")
    if model is not None and hasattr(model, name):
        return f". Its model has one: engine.module.{name}"
    public = [each for each in dir(engine) if not each.startswith("_")]
    near = get_close_matches(name, public, n=1, cutoff=0.7)
    return f". Did you mean {near[0]!r}?" if near else ""


class ManualGC:
    """No cyclic garbage collection but at step boundaries (key ``disable_python_gc``)."""

    def __init__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def collect(self) -> None:
        """Collect what recent steps left; what has survived several collections is not looked at."""
        gc.collect(1)

    def close(self) -> None:
        """Give the interpreter its collector back."""
        if self._was_on:
            gc.enable()
