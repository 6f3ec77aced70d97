"""Saves an engine's checkpoints, synchronously or on a thread.

:mod:`zeroshard.checkpoint` decides which bytes are where. This module collects the engine's part:
counters, groups, schedule, loss scaler, generators and data position. It also owns the thread of an
asynchronous save and the memory of its copies.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint import json_state, rng
from zeroshard.checkpoint.local_state import LocalState
from zeroshard.checkpoint.merge import CheckpointMetadata
from zeroshard.checkpoint.save import Options, SaveTask, plan
from zeroshard.checkpoint.zero_to_fp32 import SCRIPT
from zeroshard.core.tiers import Tier
from zeroshard.engine.names import other_names, persistent_buffers
from zeroshard.memory.host_limits import gib, host_limits
from zeroshard.memory.pages import aligned_bytes
from zeroshard.version import __version__

if TYPE_CHECKING:
    from zeroshard.engine.engine import Engine

logger = logging.getLogger("zeroshard")

_OWNER = "copy for a checkpoint"
IMPLEMENTATION = frozenset(
    ["params", "param_names", "foreach", "fused", "capturable", "differentiable"]
)
"""Options of a param group that choose an implementation, not a result. They are not saved."""


class CheckpointSaver:
    """Saves one engine. At most one save is in progress."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._section = engine.settings.checkpoint
        self._thread: threading.Thread | None = None
        self._outcome: list[BaseException] = []  # the error of the asynchronous save, if it failed
        self._images: list[Tensor] = []  # host memory for snapshots, kept for the next save
        self.watch_point: Callable[[str], None] = lambda _point: None  # see ``save.FAULT_POINTS``

    def save(
        self,
        directory: str | PathLike[str],
        tag: object,
        client_state: Mapping[str, Any],
        *,
        save_latest: bool,
        exclude_frozen: bool,
    ) -> Path:
        """See :meth:`zeroshard.engine.engine.Engine.save_checkpoint`."""
        engine, section = self._engine, self._section
        name = places.check_tag(f"global_step{engine.global_steps}" if tag is None else tag)
        self.wait()
        engine._resolve_last_step()
        engine._update.all_gather_late()
        if engine.accumulation.divided and engine.global_rank == 0:
            logger.warning(
                "saving in the middle of a step: gradients of %d backwards are not saved, and a resumed "
                "run begins the step anew. Save after engine.step().",
                engine.accumulation.backwards,
            )
        job = plan(
            Path(directory),
            name,
            local=LocalState(engine.runtime.units, engine.runtime.optimizer),
            control_group=engine._watch.control_group,
            facts=lambda: self._facts(client_state, save_latest, exclude_frozen),
            options=Options(
                frozen=section.frozen,
                keep_last=section.keep_last,
                max_buffer_nbytes=section.max_buffer_mb << 20,
                tag_validation=section.tag_validation,
            ),
            at=self.watch_point,
        )
        if section.asynchronous and self._can_copy(job):
            job.snapshot(self._taker())
            self._thread = threading.Thread(
                target=self._run, args=(job,), name="zeroshard-checkpoint"
            )
            self._thread.start()
        else:
            job.run()
        return job.root / job.tag

    def _run(self, job: SaveTask) -> None:
        """Run a save on its thread. Its error is logged, and kept for :meth:`wait`."""
        try:
            job.run()
        except BaseException as error:
            logger.error("%s", error)
            self._outcome.append(error)

    def wait(self) -> None:
        """Wait until the last save is complete. Raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._outcome:
            raise self._outcome.pop()

    def close(self, *, quiet: bool = False) -> None:
        """Wait for the save in progress, and free the memory of snapshots.

        ``quiet``: do not raise the save's error, which was logged: another error ends the engine.
        """
        try:
            with contextlib.suppress(Exception) if quiet else contextlib.nullcontext():
                self.wait()
        finally:
            self._images.clear()
            self._engine.runtime.ledger.hold("scratch", _OWNER, 0, Tier.HOST)

    def _can_copy(self, job: SaveTask) -> bool:
        """Is there host memory for a copy of this rank's bytes? Otherwise the save is synchronous."""
        if self._engine.runtime.stores.uses_disk:
            logger.info("state rests on disk, and a copy of it in host memory is what that avoids: "
                        "this checkpoint is written before training goes on")  # fmt: skip
            return False
        free, wanted = host_limits().free_nbytes, job.nbytes - sum(i.nbytes for i in self._images)
        ranks = self._engine.local_world_size
        if free is not None and wanted * ranks > free:
            logger.warning(
                "no memory for a copy: %d ranks of this host need %s each, and %s are free. This "
                "checkpoint is written before training goes on.", ranks, gib(wanted), gib(free),
            )  # fmt: skip
            return False
        return True

    def _taker(self) -> Callable[[int], Tensor]:
        """A function that returns host memory for each file in turn: the last save's, if large enough."""
        images, turn = self._images, count()

        def take(nbytes: int) -> Tensor:
            at = next(turn)
            if at == len(images) or images[at].nbytes < nbytes:
                pin = self._engine.device.type == "cuda"
                fresh = (
                    torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                    if pin
                    else aligned_bytes(nbytes)
                )
                images[at : at + 1] = [fresh]
            held = sum(image.nbytes for image in images)
            self._engine.runtime.ledger.hold("scratch", _OWNER, held, Tier.HOST)
            return images[at][:nbytes]

        return take

    def _facts(
        self, client_state: Mapping[str, Any], save_latest: bool, exclude_frozen: bool
    ) -> CheckpointMetadata:
        engine = self._engine
        shared, shared_tensors = self._shared(client_state)  # collective if it holds parameters
        mine = {"rng": rng.rng_state(engine.device)}
        if hasattr(engine.training_dataloader, "state_dict"):
            mine["data"] = engine.training_dataloader.state_dict()
        own, own_tensors = json_state.encode(mine, where="rank")
        return CheckpointMetadata(
            step=engine.global_steps,
            stage=int(engine.settings.zero_optimization.stage),
            writer={"zeroshard": __version__, "torch": str(torch.__version__)},
            aliases=other_names(engine.module),
            shared=shared,
            shared_tensors=shared_tensors,
            own=own,
            own_tensors=own_tensors,
            buffers=persistent_buffers(engine.module),
            exclude_frozen=exclude_frozen,
            save_latest=save_latest,
            script=SCRIPT,
        )

    def _shared(self, client_state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        """State that is saved once, by rank 0, for all ranks: encoded, and its tensors."""
        engine = self._engine
        plain: dict[str, Any] = {
            "counters": {
                "global_steps": engine.global_steps,
                "micro_steps": engine.micro_steps,
                "global_samples": engine.global_samples,
                "skipped_steps": engine.skipped_steps,
            },
            "scaler": engine.scaler.state_dict(),
            "groups": [
                {k: v for k, v in group.items() if k not in IMPLEMENTATION}
                for group in engine._groups
            ],
        }
        if engine.basic_optimizer is not None:
            plain["optimizer"] = type(engine.basic_optimizer).__name__
        if engine.lr_scheduler is not None:
            plain["scheduler"] = engine.lr_scheduler.state_dict()
        node: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, value in {**plain, "client_state": dict(client_state)}.items():
            node[name], found = json_state.encode(
                value, where=name, allow_pickle=self._section.allow_pickle
            )
            tensors |= found
        return node, tensors
