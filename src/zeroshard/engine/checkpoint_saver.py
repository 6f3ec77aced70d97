"""Saves an engine's checkpoints, synchronously or on a thread.

:mod:`zeroshard.checkpoint` decides which bytes are where. This module collects the engine's part
(:class:`TrainingState`, which a load changes): counters, groups, schedule, loss scaler, generators and
data position. It also owns the thread of an asynchronous save and the memory of its copies.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint import json_state, rng
from zeroshard.checkpoint.local_state import LocalState, other_names, persistent_buffers
from zeroshard.checkpoint.save import no_fault, plan, run, snapshot
from zeroshard.checkpoint.save_decisions import CheckpointMetadata, Options
from zeroshard.checkpoint.save_layout import SaveTask, files_of_rank, write_nbytes
from zeroshard.checkpoint.zero_to_fp32 import SCRIPT
from zeroshard.comm.agreement import Attempt, ControlGroup, attempt
from zeroshard.comm.env import RankInfo
from zeroshard.config.sections import CheckpointConfig
from zeroshard.core.ledger import Ledger
from zeroshard.core.mesh import Mesh
from zeroshard.core.tiers import Tier
from zeroshard.data.data_loader import ResumableLoader
from zeroshard.device.pinned import host_bytes
from zeroshard.memory.host_limits import gib, host_limits
from zeroshard.optim.state_tree import unkeyed
from zeroshard.precision.loss_scaler import LossScaler
from zeroshard.version import __version__

logger = logging.getLogger("zeroshard")

_OWNER = "copy for a checkpoint"


IMPLEMENTATION = frozenset(
    ["params", "param_names", "foreach", "fused", "capturable", "differentiable"]
)
"""Options of a param group that choose an implementation, not a result. They are not saved."""


@dataclass(frozen=True, slots=True)
class Counters:
    """How far a run has come. ``skipped_steps`` are part of ``global_steps``."""

    global_steps: int = 0
    micro_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class TrainingState:
    """State of one engine at one moment. Objects are the engine's own: a load changes them in place.

    ``optimizer``, ``scheduler`` and ``data_loader`` may be None. ``accumulation_steps``: micro-batches
    per step. ``lost_batches``: micro-batches of an unfinished step, whose gradients are not saved.
    """

    counters: Counters
    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    groups: list[dict[str, Any]]  # the optimizer's param groups
    scaler: LossScaler
    scheduler: Any
    data_loader: Any
    accumulation_steps: int
    lost_batches: int = 0


@dataclass(frozen=True, slots=True)
class SaveNeeds:
    """What a save needs on one rank.

    ``files``: bytes by name. ``write_nbytes``: host memory of the buffers that files are written from.
    ``copy_nbytes``: host memory of the copy that an asynchronous save makes; 0: it makes none.
    """

    files: Mapping[str, int]
    write_nbytes: int
    copy_nbytes: int


@dataclass(eq=False)
class CheckpointSaver:
    """Saves one engine. At most one save is in progress.

    ``uses_disk``: state of the engine is on disk. ``ledger``: counts the memory of copies.
    ``control_group`` is over all ranks of the run.
    """

    section: CheckpointConfig
    _: KW_ONLY
    stage: int
    local: LocalState
    control_group: ControlGroup
    rank_info: RankInfo
    device: torch.device
    ledger: Ledger
    uses_disk: bool
    mesh: Mesh
    watch_point: Callable[[str], None] = no_fault  # see ``save.FAULT_POINTS``
    _thread: threading.Thread | None = None
    _failure: BaseException | None = None  # of the asynchronous save
    _images: list[Tensor] = field(
        default_factory=list
    )  # memory for snapshots, kept for the next save

    def save(
        self,
        directory: str | PathLike[str],
        tag: object,
        client_state: Mapping[str, Any],
        state: TrainingState,
        *,
        save_latest: bool,
        exclude_frozen: bool,
    ) -> str:
        """See :meth:`zeroshard.engine.engine.Engine.save_checkpoint`. No other save is in progress.

        Returns the tag on which the ranks agreed.
        """
        section = self.section
        steps = state.counters.global_steps
        name = places.check_tag(f"global_step{steps}" if tag is None else tag)
        if state.lost_batches and self.rank_info.is_main_rank:
            logger.warning(
                "saving in the middle of a step, with %d of %d micro-batches done: their gradients are "
                "not saved. %s",
                state.lost_batches,
                state.accumulation_steps,
                _fate_of_batches(state.data_loader),
            )
        task = plan(
            Path(directory),
            name,
            local=self.local,
            control_group=self.control_group,
            metadata=lambda: self._metadata(state, client_state, save_latest=save_latest),
            options=self._options(exclude_frozen=exclude_frozen),
            at=self.watch_point,
        )
        if section.asynchronous and self._can_copy(task):
            images = attempt(lambda: snapshot(task, self._taker()))
            self._thread = threading.Thread(
                target=self._run, args=(task, images), name="zeroshard-checkpoint"
            )
            self._thread.start()
        else:
            run(task)
        return task.tag

    def _options(self, *, exclude_frozen: bool) -> Options:
        section = self.section
        return Options(
            frozen="reference" if exclude_frozen else section.frozen,
            keep_last=section.keep_last,
            max_buffer_nbytes=section.max_buffer_mb << 20,
            tag_validation=section.tag_validation,
        )

    def needs(self, state: TrainingState) -> SaveNeeds:
        """What the first save of this state needs on this rank, without a ``client_state``. For plans.

        Reads shapes and dtypes only. What other ranks have is not asked.
        """
        info, options = self.rank_info, self._options(exclude_frozen=False)
        metadata = self._metadata(state, {}, save_latest=True)
        files = files_of_rank(self.local, metadata, options, info.rank, info.world_size)
        sizes = {file.name: file.nbytes for file in files}
        copies = self.section.asynchronous and not self.uses_disk
        return SaveNeeds(sizes, write_nbytes(files, options), sum(sizes.values()) if copies else 0)

    def _run(self, task: SaveTask, images: Attempt[Sequence[Tensor]]) -> None:
        """Run a save on its thread. Its error is logged, and kept for :meth:`wait`."""
        try:
            run(task, images)
        except BaseException as error:
            logger.error("%s", error)
            self._failure = error

    def wait(self) -> None:
        """Wait until the last save is complete. Raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, *, quiet: bool = False) -> None:
        """Wait for the save in progress, and free the memory of snapshots.

        ``quiet``: do not raise the save's error, which was logged: another error ends the engine.
        """
        try:
            with contextlib.suppress(Exception) if quiet else contextlib.nullcontext():
                self.wait()
        finally:
            self._images.clear()
            self.ledger.hold("scratch", _OWNER, 0, Tier.HOST)

    def _can_copy(self, task: SaveTask) -> bool:
        """Whether host memory has room for a copy of this rank's bytes. Else the save is synchronous."""
        if self.uses_disk:
            logger.info(
                "state is stored on disk to save host memory, so it is not copied to host memory: "
                "this checkpoint is written before training continues"
            )
            return False
        free, wanted = host_limits().free_nbytes, task.nbytes - sum(i.nbytes for i in self._images)
        ranks = self.rank_info.local_world_size
        if free is not None and wanted * ranks > free:
            logger.warning(
                "no memory for a copy: %d ranks of this host need %s each, and %s are free. This "
                "checkpoint is written before training continues.", ranks, gib(wanted), gib(free),
            )  # fmt: skip
            return False
        return True

    def _taker(self) -> Callable[[int], Tensor]:
        """A function that returns host memory for each file in turn: the last save's, if large enough."""
        images, turn = self._images, count()

        def take(nbytes: int) -> Tensor:
            at = next(turn)
            if at == len(images) or images[at].nbytes < nbytes:
                images[at : at + 1] = [host_bytes(nbytes, self.device)]
            held = sum(image.nbytes for image in images)
            self.ledger.hold("scratch", _OWNER, held, Tier.HOST)
            return images[at][:nbytes]

        return take

    def _metadata(
        self, state: TrainingState, client_state: Mapping[str, Any], *, save_latest: bool
    ) -> CheckpointMetadata:
        # Collective if it has parameters.
        shared, shared_tensors = self._shared(state, client_state)
        mine = {"rng": rng.rng_state(self.device)}
        if isinstance(state.data_loader, ResumableLoader):
            mine["data"] = state.data_loader.state_dict(before_step=state.lost_batches > 0)
        elif hasattr(state.data_loader, "state_dict"):
            mine["data"] = state.data_loader.state_dict()
        own, own_tensors = json_state.encode(mine, where="rank")
        mesh = self.mesh
        return CheckpointMetadata(
            step=state.counters.global_steps,
            stage=self.stage,
            writer={"zeroshard": __version__, "torch": str(torch.__version__)},
            # of all stages of a pipeline
            aliases=getattr(state.module, "other_names", None) or other_names(state.module),
            shared=shared,
            shared_tensors=shared_tensors,
            own=own,
            own_tensors=own_tensors,
            buffers=persistent_buffers(state.module),
            mesh=rng.mesh_text(mesh),
            dp_ranks=()
            if mesh.is_data_only
            else [mesh.dp_rank(rank) for rank in range(mesh.world_size)],
            save_latest=save_latest,
            script=SCRIPT,
        )

    def _shared(
        self, state: TrainingState, client_state: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """State that is saved once, by rank 0, for all ranks: encoded, and its tensors."""
        plain: dict[str, Any] = {
            "counters": asdict(state.counters),
            "scaler": state.scaler.state_dict(),
            "groups": [
                {k: v for k, v in group.items() if k not in IMPLEMENTATION}
                for group in state.groups
            ],
        }
        if state.optimizer is not None:
            plain["optimizer"] = type(state.optimizer).__name__
            if own := unkeyed(state.optimizer.state):
                plain["optimizer_state"] = own
        if state.scheduler is not None:
            plain["scheduler"] = state.scheduler.state_dict()
        node: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, value in {**plain, "client_state": dict(client_state)}.items():
            node[name], found = json_state.encode(
                value, where=name, allow_pickle=self.section.allow_pickle
            )
            tensors |= found
        return node, tensors


def _fate_of_batches(loader: Any) -> str:
    """What becomes of the micro-batches of a step that is not saved."""
    if not isinstance(loader, ResumableLoader):
        return "After a resume, let the data go on where the step began, or save when it has ended."
    if loader.is_inside:
        return (
            "A resumed run reads them again: its data go on where the step began, or at the beginning of "
            "this pass if the step began before it."
        )
    return (
        "They were left over at the end of the data, and a resumed run goes on without them. Choose "
        "gradient_accumulation_steps so that it divides the micro-batches of a pass, and none is left."
    )
