"""Loads a checkpoint into an engine.

All ranks compare the checkpoint with the engine before anything is changed. After that, until everything
is loaded, the engine's state belongs to two runs, and the engine refuses to train.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint import restore, rng
from zeroshard.checkpoint.directory import open_checkpoint
from zeroshard.checkpoint.local_state import LocalState, global_shape, persistent_buffers
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.checkpoint.reader import Source
from zeroshard.checkpoint.remote_files import fetch_missing
from zeroshard.comm.agreement import ControlGroup, run_on_all_ranks
from zeroshard.comm.collectives import Comm
from zeroshard.comm.env import RankInfo
from zeroshard.config.sections import CheckpointConfig
from zeroshard.core.mesh import Mesh
from zeroshard.engine.checkpoint_saver import IMPLEMENTATION, Counters, TrainingState
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.experts.marks import matched_groups
from zeroshard.optim.state_tree import unkeyed
from zeroshard.parallel.program_parts import order_of_parts
from zeroshard.zero.life import Life

logger = logging.getLogger("zeroshard")


@dataclass(frozen=True, eq=False, slots=True)
class Loaded:
    """What a load gives back. ``counters``: None if only weights were loaded."""

    path: Path
    client_state: dict[str, Any]
    counters: Counters | None


@dataclass(frozen=True, eq=False, slots=True)
class _Opened:
    """An open checkpoint, and this rank's own state in it: generators and data position.

    ``rank``: the saved rank whose buffers this rank gets.
    """

    source: Source
    own: Mapping[str, Any]
    rank: int


@dataclass(frozen=True, eq=False)
class CheckpointLoader:
    """Loads checkpoints into one engine. ``life``: of that engine; it is half loaded meanwhile.

    ``comm`` and ``control_group`` are over all ranks of the run, whatever ranks share units.
    """

    section: CheckpointConfig
    _: KW_ONLY
    local: LocalState
    comm: Comm
    control_group: ControlGroup
    rank_info: RankInfo
    device: torch.device
    life: Life
    mesh: Mesh

    def load(
        self,
        directory: str | PathLike[str],
        tag: object,
        state: TrainingState,
        *,
        strict: bool,
        optimizer_states: bool,
        scheduler_states: bool,
        module_only: bool,
        missing_ok: bool,
    ) -> Loaded | None:
        """See :meth:`zeroshard.engine.engine.Engine.load_checkpoint`. None: there is none.

        The objects of ``state`` are changed in place. The caller takes over the counters.
        """
        assert self.comm.size == self.control_group.size, "files are sent between all ranks"
        self._check_pins()
        root = Path(directory)
        tried: list[str] = []
        with_state = optimizer_states and not module_only
        candidates = self._candidates(root, tag, missing_ok=missing_ok)
        if not candidates:
            return None
        for name in candidates:
            try:
                opened = self._open(root, name)
            except CheckpointError as error:
                tried.append(str(error))
                continue
            with contextlib.closing(opened.source) as source:
                names, shared = self._check(
                    opened, state, strict=strict, optimizer_states=with_state
                )
                damage = self._fill(
                    opened,
                    names,
                    state.module,
                    with_state=with_state,
                    only_finite=tag is places.NEWEST,
                )
                if damage:
                    tried.append(damage)
                    continue
                restored = functools.partial(
                    self._restore, state, shared, opened.own,
                    with_optimizer=optimizer_states, with_scheduler=scheduler_states,
                )  # fmt: skip
                failed, doing = f"{source.path} was not loaded", "restoring the state of the engine"
                counters = None
                if not module_only:
                    counters, _ = run_on_all_ranks(self.control_group, failed, doing, restored)
                self.life.end_load()
                self._report(tried, source)
                return Loaded(source.path, shared.get("client_state", {}), counters)
        # With separate directories ranks may have other reasons. Rank 0's is raised, as elsewhere.
        why = f"no checkpoint was loaded from {root}: {' '.join(tried)}"
        raise CheckpointError(self.control_group.broadcast(why, topic="telling why"))

    def _check_pins(self) -> None:
        for unit in self.local.units:
            if unit.pin_count:
                raise UsageError(
                    f"engine.load_checkpoint() while unit {unit.name!r} is gathered by "
                    "GatheredParameters: leave the context first."
                )

    def _candidates(self, root: Path, tag: object, *, missing_ok: bool) -> list[str]:
        """The checkpoints to try, in order; rank 0 decides. Empty: there is none, and ``missing_ok``."""

        def look() -> list[str]:
            if self.rank_info.rank:
                return []
            if root.exists() and not root.is_dir():
                raise CheckpointError(
                    f"{root} is not a directory. A run that began anew would lose what was saved. "
                    "Pass the directory that was given to save_checkpoint()."
                )
            if tag is places.NEWEST:
                return places.newest_first(root)
            if tag is None and missing_ok and not (root / places.LATEST).exists():
                return []
            if tag is not None:
                return [places.resolve(root, tag).name]
            newest = places.latest(root)
            places.restore_replaced(root, newest)
            return [newest, *places.fallbacks(root, newest)]

        _, names = run_on_all_ranks(
            self.control_group,
            f"no checkpoint was loaded from {root}",
            "looking for the checkpoint",
            look,
            say=lambda names: names,
            decide=lambda said: said[0],
        )
        found: list[str] = names
        return found

    def _open(self, root: Path, name: str) -> _Opened:
        """Open a checkpoint, and read this rank's own state.

        Everything small is read here, before the engine changes. Raises :class:`CheckpointError` on all
        ranks if the checkpoint is not complete.
        """
        failed = f"{root / name} cannot be loaded"

        def needs(manifest: Manifest) -> set[int]:
            dp_ranks = manifest.dp_ranks or range(manifest.world_size)
            before = self._predecessor(manifest.mesh or "", dp_ranks)
            return restore.needed_files(manifest, self.local, before.rank, before.read_ranks)

        fetch_missing(
            root / name, self.comm, self.control_group, failed, needs=needs, device=self.device
        )
        with contextlib.ExitStack() as on_error:  # another rank's error closes the files too

            def look() -> _Opened:
                source = open_checkpoint(root, name)
                on_error.callback(source.close)
                before = self._predecessor(source.mesh, source.dp_ranks)
                source.probe(before.rank)
                return _Opened(source, _own_state(source, before), before.rank)

            opened, _ = run_on_all_ranks(self.control_group, failed, "opening it", look)
            on_error.pop_all()
        return opened

    def _predecessor(self, mesh: str, dp_ranks: Sequence[int]) -> rng.Predecessor:
        return rng.predecessor(self.rank_info.rank, self.mesh, mesh, dp_ranks)

    def _names_elsewhere(self, module: torch.nn.Module) -> tuple[set[str], set[str]]:
        """Parameters and buffers of all ranks, by name; empty if every rank has all. Collective."""
        if self.mesh.pipeline * self.mesh.expert == 1:
            return set(), set()
        own = {
            "parameters": [slot.fqn for unit in self.local.units for slot in unit.layout.slots],
            "buffers": list(persistent_buffers(module)),
        }
        _, joined = run_on_all_ranks(
            self.control_group,
            "the model cannot be loaded",
            "collecting the names of its parameters",
            lambda: own,
            say=lambda names: names,
            decide=lambda said: {
                kind: sorted({name for part in said for name in part[kind]}) for kind in own
            },
        )
        return set(joined["parameters"]), set(joined["buffers"])

    def _check(
        self, opened: _Opened, state: TrainingState, *, strict: bool, optimizer_states: bool
    ) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        """Compare the checkpoint with the model and the optimizer.

        Returns the checkpoint's name of each parameter, and the state that ranks share.
        """
        local, source = self.local, opened.source
        other_parameters, other_buffers = self._names_elsewhere(state.module)
        shapes = {s.fqn: global_shape(s) for unit in local.units for s in unit.layout.slots}

        def compare() -> tuple[Mapping[str, str], Mapping[str, Any]]:
            names = restore.match(source, shapes, strict=strict, elsewhere=other_parameters)
            shared = source.shared(allow_pickle=self.section.allow_pickle)
            if optimizer_states:
                shared = {**shared, "groups": _fitting_groups(source, shared, local, names, state)}
            if strict:
                buffers = source.buffers(opened.rank)
                _check_buffers(buffers, state.module, other_buffers, source.path)
            return names, shared

        def say(own: tuple[Mapping[str, str], Mapping[str, Any]]) -> dict[str, Any]:
            names, _ = own
            digests = restore.digests_to_compare(local, source.parameters, names)
            return {"digests": digests, "names": {fqn: names[fqn] for fqn in digests}}

        def judge(said: list[dict[str, Any]]) -> None:
            digests = [part["digests"] for part in said]
            names = {fqn: name for part in said for fqn, name in part["names"].items()}
            if strict:
                restore.refuse_other_frozen(digests, source.parameters, names, path=source.path)

        checked, _ = run_on_all_ranks(
            self.control_group,
            f"{source.path} was not loaded",
            "comparing it with the model",
            compare,
            say=say,
            decide=judge,
        )
        return checked

    def _fill(
        self,
        opened: _Opened,
        names: Mapping[str, str],
        module: torch.nn.Module,
        *,
        with_state: bool,
        only_finite: bool,
    ) -> str:
        """Read all values. Returns "", or why some rank could not read.

        An error of another kind is raised at once. Other ranks may be in collectives; they learn of it
        when this engine is closed.
        """
        source = opened.source
        loader = restore.Loader(
            self.local,
            source,
            names,
            with_state=with_state,
            max_buffer_nbytes=self.section.max_buffer_mb << 20,
            only_finite=only_finite,
        )
        self.life.begin_load()
        loader.fill()

        def finish() -> None:
            if loader.failure is not None:
                raise loader.failure
            buffers = source.buffers(opened.rank)
            for name, buffer in persistent_buffers(module).items():
                if name in buffers:
                    buffer.copy_(buffers[name])

        try:
            run_on_all_ranks(self.control_group, f"{source.path} is damaged", "reading it", finish)
        except CheckpointError as error:
            return str(error)
        return ""

    def _restore(
        self,
        state: TrainingState,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        *,
        with_optimizer: bool,
        with_scheduler: bool,
    ) -> Counters:
        """Restore everything that does not belong to a parameter. Returns the saved counters."""
        saved = shared.get("counters", {})
        steps = int(saved.get("global_steps", 0))
        counters = Counters(
            global_steps=steps,
            micro_steps=int(saved.get("micro_steps", steps * state.accumulation_steps)),
            global_samples=int(saved.get("global_samples", 0)),
            skipped_steps=int(saved.get("skipped_steps", 0)),
        )
        if with_optimizer:
            same_class = shared.get("optimizer") == type(state.optimizer).__name__
            for group, options in zip(state.groups, shared.get("groups", []), strict=True):
                _restore_group(group, options, same_class=same_class)
            if same_class and state.optimizer is not None:
                for key in unkeyed(state.optimizer.state):
                    del state.optimizer.state[key]
                state.optimizer.state.update(shared.get("optimizer_state", {}))
            if state.scaler.state_dict().keys() <= shared.get("scaler", {}).keys():
                state.scaler.load_state_dict(shared["scaler"])
        if with_scheduler and state.scheduler is not None and "scheduler" in shared:
            state.scheduler.load_state_dict(shared["scheduler"])
        if "data" in own and hasattr(state.data_loader, "load_state_dict"):
            state.data_loader.load_state_dict(own["data"])
        if "rng" in own:
            rng.set_rng_state(own["rng"], self.device)
        return counters

    def _report(self, tried: Sequence[str], source: Source) -> None:
        if not self.rank_info.is_main_rank:
            return
        if tried:
            logger.warning("%s Using %s instead.", " ".join(tried), source.path.name)
        for what in source.left_behind:
            logger.warning("%s: not loaded: %s", source.path, what)
        params = (param for unit in self.local.units for param in unit.params)
        if told := order_of_parts(params, source.mesh, self.mesh.tensor):
            logger.warning("%s %s", source.path, told)


def _own_state(source: Source, before: rng.Predecessor) -> dict[str, Any]:
    """This rank's generators and data position; empty if none were saved."""
    ranks = source.ranks()
    if not ranks:
        return {}
    own = ranks[before.rank]
    if not before.is_same:
        own["rng"] = rng.rng_state_for(
            before.dp_rank, [ranks[rank]["rng"] for rank in before.firsts]
        )
    return own


def _check_buffers(
    saved: Mapping[str, Tensor], module: torch.nn.Module, elsewhere: Collection[str], path: Path
) -> None:
    """``elsewhere``: buffers that other ranks have (of other pipeline stages)."""
    own = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module).items()}
    there = {
        name: tuple(buffer.shape)
        for name, buffer in saved.items()
        if name in own or name not in elsewhere
    }
    wrong = sorted(n for n in own.keys() | there.keys() if own.get(n) != there.get(n))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{path}: {len(wrong)} buffers differ from the model's; {name!r} has shape "
            f"{there.get(name, 'none')} there and {own.get(name, 'none')} here. "
            "load_module_strict=False loads the buffers whose names match."
        )


def _fitting_groups(
    source: Source,
    shared: Mapping[str, Any],
    local: LocalState,
    names: Mapping[str, str],
    state: TrainingState,
) -> list[dict[str, Any]]:
    """The saved options for each param group of the optimizer.

    Raises :class:`CheckpointError` if optimizer state does not fit, before anything is changed.
    """
    hint = " load_optimizer_states=False loads only the weights."
    saved = shared.get("groups", [])
    kind, own = shared.get("optimizer"), type(state.optimizer).__name__
    if state.optimizer is None:
        raise CheckpointError(f"{source.path} has optimizer state, and this engine has none.{hint}")
    if kind is not None and kind != own:
        raise CheckpointError(
            f"{source.path} was saved with {kind}, and this engine has {own}.{hint}"
        )
    matched = matched_groups(saved, state.groups)
    if matched is None:
        raise CheckpointError(
            f"{source.path} has {len(saved)} param groups, and this optimizer has "
            f"{len(state.groups)}.{hint}"
        )
    for unit in local.units:
        for fqn, group in local.groups(unit).items():
            there = source.parameters[names[fqn]].group if fqn in names else None
            if there is not None and group not in matched[there]:
                raise CheckpointError(
                    f"{source.path}: {fqn!r} was in param group {there}, and is in group {group} "
                    f"now: options such as the weight decay would go to the wrong parameters.{hint}"
                )
    return [
        next(saved[at] for at, groups in enumerate(matched) if number in groups)
        for number in range(len(state.groups))
    ]


def _restore_group(group: dict[str, Any], saved: Mapping[str, Any], *, same_class: bool) -> None:
    """Set the options of a group. Those that ``step()`` makes are not there yet: they may be set only if
    the same class saved them, since another class for the same algorithm has other options."""
    for name, value in saved.items():
        if name in IMPLEMENTATION or not (name in group or same_class):
            continue
        own = group.get(name)
        if isinstance(own, Tensor):
            own.copy_(torch.as_tensor(value))
        elif isinstance(own, tuple):
            group[name] = tuple(value)
        else:
            group[name] = value
