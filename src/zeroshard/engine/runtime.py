"""The parts of an engine that train, as one object."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from zeroshard.core.ledger import Ledger
from zeroshard.core.nbytes import UnitBytes
from zeroshard.core.stages import Stage
from zeroshard.engine.pipeline_traffic import PipelineTraffic
from zeroshard.offload.stores import Stores
from zeroshard.zero.life import Life
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.prefetch import Prefetcher, WrappedModule
from zeroshard.zero.reduce import GradReducer
from zeroshard.zero.unit import Unit


@dataclass(eq=False)
class ZeroRuntime:
    """The parts that take a training step."""

    stage: Stage
    units: list[Unit]
    wrapped_modules: list[WrappedModule]
    prefetcher: Prefetcher
    reducer: GradReducer
    optimizer: ShardedOptimizer | None
    ledger: Ledger
    plan: list[UnitBytes]
    stores: Stores
    forecast: list[str]  # the forecast of disk times: lines of text
    life: Life
    traffic: PipelineTraffic  # of a pipeline: how often it gathers and reduces
    tied: list[Unit]  # over pipeline stages, in the same order on every rank

    def close(self, *, wait: bool = True) -> None:
        """Give all memory back. Resident parameters stay readable, shards are gone.

        ``wait=False``: drop collectives in flight, because they will never finish.
        """
        # The last entry runs first. All of them run, also after an error.
        with contextlib.ExitStack() as rest:
            rest.callback(self.stores.close, wait=wait)
            if self.optimizer is not None:
                rest.callback(self.optimizer.close)
            rest.callback(self.reducer.close, wait=wait)
            for unit in reversed(self.units):
                rest.callback(unit.close, wait=wait)
            # Before units free memory that is copied to. Copies that the worker starts come later.
            rest.callback(self.stores.finish_copies, wait=wait)
