"""The engine's calls that read all parameters and count bytes.

The first argument of a public function is ``self``: libraries inspect the signatures of methods.
"""

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


def iter_full_params(self: Any) -> Iterator[tuple[str, Tensor]]:
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


def memory_report(self: Any, *, all_ranks: bool = False) -> MemoryReport:
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
