"""The engine's calls that read all parameters and count bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.dtensors import whole_of
from zeroshard.core.nbytes import state_nbytes
from zeroshard.device.choice import read
from zeroshard.metrics.step_report import (
    MemoryReport,
    measured_nbytes,
    memory_rows,
    rows_from_vector,
    vector_of,
)


def iter_full_params(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, full values)`` of every parameter, one unit in memory at a time. Collective."""
    engine.life.check()
    engine._update.all_gather_late()
    for unit in engine.runtime.units:
        unit.wait_for_unshard()
        unit.write_back_edits()
        nbytes = 0 if unit.resident else unit.full_nbytes
        with engine.runtime.ledger.lend("iter_full_params", nbytes):
            full_N = unit.full_N if unit.resident else unit.gathered_copy()
            for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                local = full_N[slot.start : slot.stop].view(slot.shape).detach()
                yield slot.fqn, whole_of(param, local)
            del full_N, local


def memory_report(engine: Any, *, all_ranks: bool = False) -> MemoryReport:
    """Planned and measured bytes per category and tier. Collective if ``all_ranks``."""
    planned = state_nbytes(engine.runtime.plan, engine.runtime.stage, engine._watch.gathers.rank)
    outside = engine.memory_baseline.peaks(engine.device)
    measured = measured_nbytes(engine.runtime.ledger, engine._watch.scratch_peak_nbytes, outside)
    notes = engine.runtime.traffic.lines
    if not all_ranks:
        return MemoryReport({engine.global_rank: memory_rows(planned, measured)}, notes)
    engine.life.check()
    vector = torch.tensor(vector_of(planned, measured), dtype=torch.float64, device=engine.device)
    rows = read(engine._watch.world.all_gather_small(vector, name="memory report"))
    return MemoryReport({at: rows_from_vector(row) for at, row in enumerate(rows)}, notes)
