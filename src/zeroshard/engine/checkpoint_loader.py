"""Loads a checkpoint into an engine.

All ranks compare the checkpoint with the engine before anything is changed. After that, until everything
is loaded, the engine's state belongs to two runs, and the engine refuses to train.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint import restore, rng
from zeroshard.checkpoint.all_ranks import run_on_all_ranks
from zeroshard.checkpoint.local_state import LocalState
from zeroshard.checkpoint.open_checkpoint import open_checkpoint
from zeroshard.checkpoint.reader import Source
from zeroshard.checkpoint.remote_files import fetch_missing
from zeroshard.engine.checkpoint_saver import IMPLEMENTATION
from zeroshard.engine.names import persistent_buffers
from zeroshard.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from zeroshard.engine.engine import Engine

logger = logging.getLogger("zeroshard")


class CheckpointLoader:
    """Loads checkpoints into one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._section = engine.settings.checkpoint

    @property
    def _local(self) -> LocalState:
        return LocalState(self._engine.runtime.units, self._engine.runtime.optimizer)

    def load(
        self,
        directory: str | PathLike[str],
        tag: object,
        *,
        strict: bool,
        optimizer_states: bool,
        scheduler_states: bool,
        module_only: bool,
        missing_ok: bool,
    ) -> tuple[str | None, dict[str, Any]]:
        """See :meth:`zeroshard.engine.engine.Engine.load_checkpoint`."""
        self._check_idle()
        root = Path(directory)
        failed = f"no checkpoint of {root} was loaded"
        tried: list[str] = []
        candidates = self._candidates(root, tag, missing_ok=missing_ok)
        if not candidates:
            return None, {}
        for name in candidates:
            try:
                source, own = self._open(root, name)
            except CheckpointError as error:
                tried.append(str(error))
                continue
            with contextlib.closing(source):
                shared = self._check(
                    source, strict=strict, optimizer_states=optimizer_states and not module_only
                )
                loaded = self._fill(source, tried, with_state=optimizer_states and not module_only)
                if not loaded:
                    continue
                if not module_only:
                    restore = functools.partial(
                        self._restore, shared, own, optimizer_states, scheduler_states
                    )
                    self._agree(f"{source.path} was not loaded", "restoring the rest", restore)
                self._engine.life.end_load()
                self._report(tried, source)
                return str(source.path), shared.get("client_state", {})
        # With separate directories ranks may have other reasons. Rank 0's is raised, as elsewhere.
        why = f"{failed}: {' '.join(tried)}"
        raise CheckpointError(self._engine._watch.control_group.broadcast(why, topic="telling why"))

    def _check_idle(self) -> None:
        engine = self._engine
        engine._drop_gradients()
        for unit in engine.runtime.units:
            if unit.pin_count:
                raise UsageError(
                    f"engine.load_checkpoint() while unit {unit.name!r} is gathered by "
                    "GatheredParameters: leave the context first."
                )
        engine._resolve_last_step()
        engine._update.all_gather_late()

    def _candidates(self, root: Path, tag: object, *, missing_ok: bool) -> list[str]:
        """The checkpoints to try, in order; rank 0 decides. Empty: there is none, and ``missing_ok``."""

        def look() -> dict[str, Any]:
            if self._engine.global_rank:
                return {}
            if tag is None and missing_ok and not (root / places.LATEST).exists():
                return {"names": []}
            if tag is not None:
                return {"names": [places.resolve(root, tag).name]}
            newest = places.latest(root)
            places.restore_replaced(root, newest)
            return {"names": [newest, *places.fallbacks(root, newest)]}

        found = self._agree(
            f"no checkpoint of {root} was loaded", "looking for it", look, lambda said: said[0]
        )
        names: list[str] = found["names"]
        return names

    def _open(self, root: Path, name: str) -> tuple[Source, dict[str, Any]]:
        """Open a checkpoint, and read this rank's own state.

        Everything small is read here, before the engine changes. Raises :class:`CheckpointError` on all
        ranks if the checkpoint is not complete.
        """
        opened: list[Source] = []
        failed = f"{root / name} cannot be loaded"
        fetch_missing(
            root / name,
            self._engine._comm,
            self._engine._watch.control_group,
            failed,
            needs=lambda manifest: restore.needed_files(
                manifest, self._local, self._engine.global_rank, self._engine.world_size
            ),
            device=self._engine.device,
        )
        own: dict[str, Any] = {}

        def look() -> None:
            opened.append(open_checkpoint(root, name))
            opened[0].probe(self._engine.global_rank)
            own.update(self._own_state(opened[0]))

        try:
            self._agree(failed, "opening it", look)
        except BaseException:
            for source in opened:
                source.close()
            raise
        return opened[0], own

    def _own_state(self, source: Source) -> dict[str, Any]:
        """This rank's generators and data position; empty if none were saved."""
        rank, ranks = self._engine.global_rank, source.ranks()
        if not ranks:
            return {}
        own = ranks[rank % len(ranks)]
        if len(ranks) != self._engine.world_size:
            own["rng"] = rng.rng_state_for(rank, [one["rng"] for one in ranks])
        return own

    def _check(self, source: Source, *, strict: bool, optimizer_states: bool) -> dict[str, Any]:
        """Compare the checkpoint with the model and the optimizer. Returns the shared state."""
        engine, local = self._engine, self._local
        shapes = {s.fqn: s.shape for unit in local.units for s in unit.layout.slots}
        dtypes = {s.fqn: unit.row.param for unit in local.units for s in unit.layout.slots}
        found: dict[str, Any] = {}

        def compare() -> dict[str, Any]:
            self._names = restore.match(source, shapes, strict=strict).names
            found["shared"] = source.shared(allow_pickle=self._section.allow_pickle)
            if optimizer_states:
                _check_groups(
                    source,
                    found["shared"],
                    local,
                    self._names,
                    engine._groups,
                    engine.basic_optimizer,
                )
            if strict:
                _check_buffers(source.buffers(engine.global_rank), engine.module, source.path)
            return {"digests": restore.digests_to_compare(local, source.parameters, self._names)}

        def judge(said: list[dict[str, Any]]) -> dict[str, Any]:
            parts = [part["digests"] for part in said]
            if strict:
                restore.refuse_other_frozen(
                    parts, source.parameters, self._names, dtypes, path=source.path
                )
            return {}

        self._agree(f"{source.path} was not loaded", "comparing it with the model", compare, judge)
        shared: dict[str, Any] = found["shared"]
        return shared

    def _fill(self, source: Source, tried: list[str], *, with_state: bool) -> bool:
        """Read all values. Returns False, and adds the reason to ``tried``, if some rank could not read.

        An error of another kind is raised at once. Other ranks may be in collectives; they learn of it
        when this engine is closed.
        """
        engine = self._engine
        loader = restore.Loader(
            self._local,
            source,
            self._names,
            with_state=with_state,
            max_buffer_nbytes=self._section.max_buffer_mb << 20,
        )
        engine.life.begin_load()
        loader.fill()

        def finish() -> None:
            if loader.failure is not None:
                raise loader.failure
            buffers = source.buffers(engine.global_rank)
            for name, buffer in persistent_buffers(engine.module).items():
                if name in buffers:
                    buffer.copy_(buffers[name])

        try:
            self._agree(f"{source.path} is damaged", "reading it", finish)
        except CheckpointError as error:
            tried.append(str(error))
            return False
        return True

    def _restore(
        self,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        optimizer_states: bool,
        scheduler_states: bool,
    ) -> None:
        """Restore everything that does not belong to a parameter."""
        engine = self._engine
        counters = shared.get("counters", {})
        engine.global_steps = int(counters.get("global_steps", 0))
        per_step = engine.gradient_accumulation_steps()
        engine.micro_steps = int(counters.get("micro_steps", engine.global_steps * per_step))
        engine.global_samples = int(counters.get("global_samples", 0))
        engine._skipped.count = int(counters.get("skipped_steps", 0))
        engine._skipped.in_a_row = 0
        if optimizer_states:
            for group, saved in zip(engine._groups, shared.get("groups", []), strict=True):
                _restore_group(group, saved)
            if engine.scaler.state_dict().keys() <= shared.get("scaler", {}).keys():
                engine.scaler.load_state_dict(shared["scaler"])
        if scheduler_states and engine.lr_scheduler is not None and "scheduler" in shared:
            engine.lr_scheduler.load_state_dict(shared["scheduler"])
        if "data" in own and hasattr(engine.training_dataloader, "load_state_dict"):
            engine.training_dataloader.load_state_dict(own["data"])
        if "rng" in own:
            rng.set_rng_state(own["rng"], engine.device)

    def _report(self, tried: Sequence[str], source: Source) -> None:
        if self._engine.global_rank:
            return
        if tried:
            logger.warning("%s Using %s instead.", " ".join(tried), source.path.name)
        for what in source.left_behind:
            logger.warning("%s: not taken over: %s", source.path, what)

    def _agree(
        self,
        failed: str,
        topic: str,
        act: Callable[[], dict[str, Any] | None],
        decide: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda _said: {},
    ) -> dict[str, Any]:
        return run_on_all_ranks(self._engine._watch.control_group, failed, topic, act, decide)


def _check_buffers(saved: Mapping[str, Tensor], module: torch.nn.Module, path: Path) -> None:
    own = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module).items()}
    there = {name: tuple(buffer.shape) for name, buffer in saved.items()}
    wrong = sorted(n for n in own.keys() | there.keys() if own.get(n) != there.get(n))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{path}: {len(wrong)} buffers differ from the model's; {name!r} has shape "
            f"{there.get(name, 'none')} there and {own.get(name, 'none')} here. "
            "load_module_strict=False loads what fits by name."
        )


def _check_groups(
    source: Source,
    shared: Mapping[str, Any],
    local: LocalState,
    names: Mapping[str, str],
    groups: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Raise :class:`CheckpointError` if optimizer state does not fit, before anything is changed."""
    hint = " load_optimizer_states=False loads the weights alone."
    saved = shared.get("groups", [])
    kind, own = shared.get("optimizer"), type(optimizer).__name__
    if optimizer is None:
        raise CheckpointError(f"{source.path} has optimizer state, and this engine has none.{hint}")
    if kind is not None and kind != own:
        raise CheckpointError(
            f"{source.path} was saved with {kind}, and this engine has {own}.{hint}"
        )
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{source.path} has {len(saved)} param groups, and this optimizer has {len(groups)}.{hint}"
        )
    for unit in local.units:
        for fqn, group in local.groups(unit).items():
            there = source.parameters[names[fqn]].group if fqn in names else None
            if there is not None and there != group:
                raise CheckpointError(
                    f"{source.path}: {fqn!r} was in param group {there}, and is in group {group} "
                    f"now: options such as the weight decay would go to the wrong parameters.{hint}"
                )


def _restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        if name in IMPLEMENTATION or name not in group:  # saved by another class for this algorithm
            continue
        own = group.get(name)
        if isinstance(own, Tensor):
            own.copy_(torch.as_tensor(value))
        elif isinstance(own, tuple):
            group[name] = tuple(value)
        else:
            group[name] = value
