"""The engine's calls that save and load checkpoints.

The first argument of a public function is ``self``: libraries inspect the signatures of methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

from zeroshard.checkpoint.directory import check_directory
from zeroshard.engine.training_state import Counters, TrainingState
from zeroshard.errors import UnsupportedError


def save_checkpoint(
    self: Any,
    save_dir: str | PathLike[str],
    tag: object = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Save a checkpoint: the directory ``save_dir/tag``. Every rank calls it.

    The directory gets its name when it is complete. After that ``latest`` names it
    (``docs/checkpoints.md``, ``docs/format.md``). ``tag``: default ``global_step<N>``.
    ``client_state``: plain data and tensors of the caller; those of rank 0 are saved.
    ``exclude_frozen_parameters``: only their digests are saved, and a load needs a model with the
    same values. With ``"checkpoint": {"asynchronous": true}`` this returns when the values are
    copied. :meth:`wait_for_checkpoint` waits for the rest. So does the next save. Returns True.

    Raises:
        CheckpointError: on every rank: it cannot be written. Earlier checkpoints are unchanged.
    """
    if not self.life.is_open:
        self.life.check("engine.save_checkpoint()")
    check_directory(save_dir, "engine.save_checkpoint()")
    with self._watch.recorder.in_section("save"):
        self._wait_for_save()
        agreed = self._saver.save(
            save_dir,
            tag,
            client_state or {},
            training_state(self),
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )
    self._non_finite.checkpoint = (fspath(save_dir), agreed)
    return True


def wait_for_checkpoint(self: Any) -> None:
    """Wait until the last save is complete. Raises its error, if it failed."""
    with self._watch.recorder.in_section("save"):
        self._wait_for_save()


def load_checkpoint(
    self: Any,
    load_dir: str | PathLike[str],
    tag: object = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: object = None,
    *,
    missing_ok: bool = False,
    resumes_data: bool = True,
) -> tuple[str | None, dict[str, Any]]:
    """Load a checkpoint of ZeroShard or of DeepSpeed. Every rank calls it.

    World size, stage, tiers and units may differ from those of the save. ``tag=None``: the checkpoint
    that ``latest`` names; if that is damaged, the newest older one that is not, with a warning.
    ``load_module_strict=False``: load the parameters and buffers whose names fit.
    ``load_module_only``: load only weights; counters, schedule and generators do not change.
    ``custom_load_fn``: DeepSpeed's argument, which is refused. ``missing_ok``: for a directory
    without ``latest`` return ``(None, {})`` and change nothing. ``resumes_data=False``: the loader of
    ``training_data`` goes on where it is.

    Returns the directory and the ``client_state``.

    Raises:
        CheckpointError: on every rank. If the checkpoint is of another model or optimizer, nothing
            has been changed.
    """
    self.life.check("engine.load_checkpoint()", may_load=True)
    check_directory(load_dir, "engine.load_checkpoint()")
    if custom_load_fn is not None:
        raise UnsupportedError(
            "load_checkpoint(custom_load_fn=...): values are loaded directly into shards, and "
            "no rank has a full state dict. Load without custom_load_fn, then edit parameters "
            "under zero.GatheredParameters."
        )
    with self._watch.recorder.in_section("load"):
        self._wait_for_save()
        self._drop_gradients()
        self._resolve_last_step()
        self._non_finite.skipped = None  # the state that the step left is replaced
        loaded = self._savers[1].load(
            load_dir,
            tag,
            training_state(self, resumes_data=resumes_data),
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
            missing_ok=missing_ok,
        )
    if loaded is None:
        return None, {}
    if loaded.counters is not None:
        _set_counters(self, loaded.counters)
        if load_module_strict and load_optimizer_states:  # else it is of another run
            self._non_finite.checkpoint = (fspath(loaded.path.parent), loaded.path.name)
    return str(loaded.path), loaded.client_state


def training_state(self: Any, *, resumes_data: bool = True) -> TrainingState:
    """What a checkpoint contains besides units. Gets the outcome of the last step first."""
    self._judge_last_step()
    self._update.all_gather_late()
    if self.runtime.optimizer is not None:
        self.runtime.optimizer.wait_for_worker()  # it counts steps in the state that is read here
    accumulation = self.accumulation
    return TrainingState(
        Counters(self.global_steps, self.micro_steps, self.global_samples, self._skipped.count),
        self.module,
        self.basic_optimizer,
        self._groups,
        self.scaler,
        self.lr_scheduler,
        self.training_dataloader if resumes_data else None,
        accumulation_steps=accumulation.steps,
        lost_backwards=accumulation.backwards if accumulation.divided else None,
    )


def _set_counters(self: Any, counters: Counters) -> None:
    self.global_steps = counters.global_steps
    self.micro_steps = counters.micro_steps
    self.global_samples = counters.global_samples
    self._skipped.count = counters.skipped_steps
    self._skipped.in_a_row = 0
