"""Lets an ordinary ``torch.optim`` optimizer update sharded parameters.

[Note: the sharded update]

*What the optimizer sees.* Its param groups hold fragments instead of parameters: one-dimensional views of
the masters, or a view in the parameter's shape where this rank owns all of the parameter. An element-wise
optimizer computes the same on fragments as on parameters (ADR 0001). What a rank updates, where that is
stored and who owns it: see [Note: what a rank updates] in ``zero/optimizer_shard.py``.

*How a chunk is updated.* Chunks are updated one after the other, in the order of forward. Each has an
updater (:mod:`zeroshard.zero.updaters`), which is chosen when the engine is built, and again where that
is needed (:mod:`zeroshard.zero.turns`). ``update`` yields each unit when its update is complete or has
been started, and the caller makes the new values available to the other ranks.

*Edits.* Each updater compares parameter and rounded master first, and starts from the parameter where
they differ. Without this, the update would overwrite what the program wrote (ADR 0009).

*Optimizers of the program.* A class without a kernel may count for a group or for itself, and hooks see
each ``step``. They get one ``step`` for all chunks in memory; see :mod:`zeroshard.zero.optimizer_object`.

*Invariants.* Gradients are in the buffers. ``.grad`` of a fragment is set only while the optimizer's
``step`` runs on its chunk; only then may it be written (:mod:`zeroshard.zero.master_piece`).
``params`` of the groups are a chunk's fragments only while ``step`` runs on that chunk alone. A direct
``optimizer.step()`` would therefore do nothing without an error, and is refused. An update that fails
midway leaves parameters of two different steps. The caller then fails the engine
(:mod:`zeroshard.zero.life`), so no step or checkpoint uses them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import TIERS, Span, Tier
from zeroshard.errors import UsageError
from zeroshard.offload.async_update import AsyncUpdateWorker, PendingUpdates
from zeroshard.offload.host_chunk import HostStaging
from zeroshard.optim.fragment_norms import in_order_of_clipping
from zeroshard.optim.state_tree import flat, nested
from zeroshard.zero import sharded_parameter
from zeroshard.zero.clip import Cuts, measure
from zeroshard.zero.gradients import GradBuffer, Norms
from zeroshard.zero.held_grads import HeldGrads
from zeroshard.zero.life import Life
from zeroshard.zero.make_shard import GiveMemory, StateDtypes, make_optimizer_shard
from zeroshard.zero.optimizer_object import FragmentState, OptimizerObject, SettledState
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard, OwnedFragment
from zeroshard.zero.turns import Turns
from zeroshard.zero.unit import Unit, UnitState
from zeroshard.zero.updaters import StepInputs

if TYPE_CHECKING:
    from zeroshard.offload.pager import Page, Pager


_NOTHING = contextlib.nullcontext()


class ShardedOptimizer:
    """A ``torch.optim`` optimizer that updates this rank's fragments. See [Note: the sharded update].

    The optimizer object remains the user's. Its groups keep their options and learning rates; its
    ``state`` is keyed by fragment. Only ``params`` of the groups are replaced: ``rebind(inner, params of
    each group)`` does this. ``compiles``: a fused update may be compiled. ``spans``: for each buffer,
    positions and tiers of its chunks. ``chunk_memory`` and ``state_dtypes`` are needed for tiers that
    give a chunk its memory, ``pager`` for chunks on pages, ``host`` and ``worker`` for
    chunks that are updated in another memory than the device's.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        buffers: Sequence[GradBuffer],
        *,
        spans: Sequence[Sequence[Span]],
        shards_optimizer: bool,
        ledger: Ledger,
        life: Life,
        rebind: Callable[[torch.optim.Optimizer, Sequence[Sequence[Tensor]]], None],
        compiles: bool = True,
        pager: Pager | None = None,
        chunk_memory: GiveMemory = lambda *_: None,
        state_dtypes: Callable[[GradBuffer], StateDtypes] = lambda _buffer: lambda _group: {},
        host: HostStaging | None = None,
        worker: AsyncUpdateWorker | None = None,
    ) -> None:
        _refuse_used(inner)
        self.inner = inner
        self.early = None if worker is None else worker.early
        inner.state = (FragmentState if self.early is None else SettledState)(dict, inner.state)
        self.ledger = ledger
        self.life = life
        self.pager = pager
        self.numbers = None if host is None else host.numbers  # that the host reads in each step
        self._worker = worker
        self._place_of = _places(inner)
        group_of = {key: group for key, (group, _) in self._place_of.items()}
        self.shards = [
            make_optimizer_shard(
                buffer,
                group_of,
                places,
                whole=not shards_optimizer,
                pager=pager,
                chunk_memory=chunk_memory,
                state_dtypes=state_dtypes(buffer),
                host=host,
            )
            for buffer, places in zip(buffers, spans, strict=True)
        ]
        self._frozen = _not_trained(inner, self.shards)
        groups = self.members(fragment for shard in self.shards for fragment in shard.fragments)
        rebind(inner, groups)
        for shard in self.shards:
            shard.attach(stores_on_host=worker is not None and not worker.delayed)
        self._num_groups = len(groups)
        self.object = OptimizerObject(inner, groups)
        self._guards = []
        self.stand_ins = _stand_ins_of_groups(self.shards)
        self._own_zero_grad = inner.zero_grad
        inner.zero_grad = self._zero_grad  # type: ignore[method-assign]
        if pager is not None:
            self._guards.append(inner.register_state_dict_pre_hook(_refuse_state_dict))
            ledger.hold("scratch", "buffers of the pager", pager.slots_nbytes, Tier.HOST)
        self._turns = Turns(
            self.object, self.shards, ledger=ledger, worker=worker, compiles=compiles
        )
        self._let_updates_begin_early()
        self.report()

    def _let_updates_begin_early(self) -> None:
        early, state = self.early, self.inner.state
        if early is None:
            return
        assert isinstance(state, SettledState)
        state.settle = early.withdraw
        for at, shard in enumerate(self.shards):
            if shard.unit.name in early.units:
                shard.begin_early(partial(self._turns.begin_early, at), early)

    @cached_property
    def skips_on_device(self) -> bool:
        """Whether a step can be skipped without a wait. Chunks on the host skip it there."""
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False)) or all(
            chunk.host_chunk is not None for shard in self.shards for chunk in shard.chunks
        )

    @cached_property
    def _dtype_of(self) -> dict[int, torch.dtype]:
        """The dtype of each parameter's master, by position."""
        return {
            position: shard.unit.row.master
            for shard in self.shards
            for position in shard.unit.positions
        }

    def members(self, fragments: Iterable[OwnedFragment]) -> list[list[Tensor]]:
        """What the optimizer sees of the fragments, by param group, in the order of the program."""
        place_of = self._place_of
        groups: list[list[Tensor]] = [[] for _ in self.inner.param_groups]
        for fragment in sorted(fragments, key=lambda f: (place_of[id(f.param)], f.begin)):
            groups[fragment.group].append(fragment.value)
        return groups

    # ------------------------------------------------------------------ the step

    def norms(self) -> Norms:
        """2-norms of this rank's fragments of the reduced gradient, in the order of the parameters.

        Those of a gradient in a store were measured when it was stored. The others are measured together.
        """
        found: Norms = []
        here: list[tuple[Cuts, Tensor]] = []
        for shard in self.shards:
            buffer = shard.buffer
            if buffer.norms is not None:
                found += buffer.norms
                continue
            grad_R = buffer.reduced_N if shard.is_whole else buffer.peek()
            assert grad_R is not None, "GradReducer.finish() comes before the norm"
            if buffer.is_stored:  # its memory is needed for the next one
                found += shard.measure(grad_R)
            else:
                here.append((shard.measured(), grad_R))
        return in_order_of_clipping(found + measure(here), self._dtype_of)

    def update(
        self,
        factor: Tensor,
        *,
        found_inf: Tensor | None = None,
        untouched: Mapping[int, frozenset[int]] | None = None,
    ) -> Generator[tuple[Unit, PendingUpdates | None], None, None]:
        """One optimizer step with gradients multiplied by ``factor`` (0-dim). Yields what to publish.

        ``found_inf``: 0-dim float, 1 if nothing may change; passed to optimizers that skip on the device.
        ``untouched``: by ``id(unit)``, the slots to which no rank gave a gradient. They are left out of
        the step, as PyTorch leaves out parameters with ``grad is None``.

        Yields ``(unit, pending)`` once for each unit. If the unit's update is complete, ``pending`` is
        None, and the unit's shard is readable until the next unit is asked for. If there is a worker,
        units whose shard is always in memory come after the last chunk of the model was started, and
        ``pending`` waits for the unit's update (None: it is complete).
        """
        turns = self._turns.current()
        if self.early is not None:
            self.early.hand_over()
        late: list[tuple[Unit, PendingUpdates | None]] = []
        with self._turns.one_step(), contextlib.closing(self._walk_pages()) as pages:
            inputs = StepInputs(factor, found_inf, untouched or {}, pages)
            for turn in turns:
                shard = turn.shard
                with shard.loaded() if turn.loads else _NOTHING:
                    for prefetch in turn.prefetches:
                        prefetch()
                    waits = [updater.step(inputs) for updater in turn.updaters]
                    if shard.has_new_state:
                        shard.report(self.ledger, self.inner.state)
                    started = [wait for wait in waits if wait is not None]
                    pending = PendingUpdates(started) if started else None
                    if turn.is_late:
                        late.append((shard.unit, pending))
                    else:
                        if pending is not None:
                            pending.wait()
                        yield shard.unit, None
                for free in turn.frees:
                    free()
            for _ in pages:
                raise AssertionError("a page follows the last page")
        yield from late

    def _walk_pages(self) -> Generator[Page, None, None]:
        """Open the pages of all chunks, in the order of the update."""
        if self.pager is not None:
            pages = [chunk.page for shard in self.shards for chunk in shard.chunks if chunk.page]
            yield from self.pager.walk(pages)

    def sync_edits(self) -> None:
        """Take over what the program wrote into parameters, so that the next step starts from it.

        This writes edits back into the shards. :meth:`update` then copies them into the masters.

        Raises:
            UsageError: a gradient was assigned to ``.grad``, a param group was added, or a parameter that
                was frozen when the engine was built has a gradient; the step would ignore each.
        """
        self._refuse_unknown()
        for shard in self.shards:
            shard.refuse_grad()
        for shard in self.shards:
            if shard.unit.state is not UnitState.SHARDED:
                shard.unit.wait_for_unshard()
                shard.unit.write_back_edits()

    def _zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """``zero_grad()`` of the optimizer object, for the parameters of its fragments."""
        was_shown = bool(self.stand_ins.shown)
        self.stand_ins.hide()
        self._own_zero_grad(*args, **kwargs)
        if was_shown:
            self.stand_ins.show(None, None)
        to_none = bool(args[0] if args else kwargs.get("set_to_none", True))
        for shard in self.shards:
            shard.buffer.stand_ins.drop(to_none)
        HeldGrads(self._frozen, ()).drop(to_none)

    def wait_for_worker(self) -> None:
        """Block this thread until no update runs in host memory. Parameters are not all-gathered."""
        if self.early is not None:
            self.early.withdraw()
        if self._worker is not None:
            self._worker.wait()

    def _refuse_unknown(self) -> None:
        """Refuse param groups and trained parameters for which no optimizer state was planned."""
        if added := len(self.inner.param_groups) - self._num_groups:
            raise UsageError(
                f"the optimizer has {len(self.inner.param_groups)} param groups, and had "
                f"{self._num_groups} when the engine was built ({added:+d}). How state is "
                "sharded was planned then. Build the engine with all groups, freeze what is not trained "
                "yet (param.requires_grad_(False)) after that, and unfreeze it later."
            )
        with torch._C.DisableTorchFunctionSubclass():
            woken = [param for param in self._frozen if param.grad is not None]
        if woken:
            unit = sharded_parameter.owner_of(woken[0])
            assert isinstance(unit, Unit)
            raise UsageError(
                f"{unit.layout.slots[unit.index(woken[0])].fqn!r} (and {len(woken) - 1} more) was "
                "frozen when the engine was built, and has a gradient now. The optimizer has no state "
                "for it, so step() would not update it. Freeze it after the engine is built: then it "
                "may be unfrozen at any time. Or leave it out of the optimizer."
            )

    # ------------------------------------------------------------------ state

    def state_of(self, fragment: OwnedFragment) -> dict[str, Any]:
        """The optimizer's state of one fragment, flat; empty before the first step."""
        return dict(flat(self.inner.state.get(fragment.value, {})))

    def seat_state(
        self, chunk: OptimizerChunk, fragment: OwnedFragment, state: Mapping[str, Any]
    ) -> None:
        """Replace the optimizer's state of one fragment by flat ``state``; empty: as before any step.

        The chunk's page, if it has one, must be open.
        """
        self.inner.state.pop(fragment.value, None)
        if state:
            self.inner.state[fragment.value] = nested(state)
        if chunk.page is not None:
            chunk.page.filled_nbytes = chunk.page.nbytes

    def discard_fused_updates(self) -> None:
        """Drop the prepared fused updates, because state is in other memory now."""
        self._turns.choose(anew=True)

    def offload(self, category: str) -> list[Tensor]:
        """Make masters or optimizer state (``category``) unusable until :meth:`reload`.

        Returns the tensors on the device whose bytes must be kept. The caller copies these bytes; it may
        release the storages, and fills the same storages again before it calls :meth:`reload`.
        """
        shared = [t for shard in self.shards for t in (shard.unit.full_N, shard.unit.shard_S)]
        if category != "master":  # state may share memory with masters, which stay
            shared += [t for shard in self.shards for t in shard.movable("master", {})]
        others = {t.untyped_storage()._cdata for t in shared}
        leaving = []
        for shard in self.shards:
            for tensor in shard.movable(category, self.inner.state):
                if tensor.untyped_storage()._cdata not in others:
                    leaving.append(tensor)
            shard.is_offloaded |= {category}
        self.report()
        return leaving

    def reload(self) -> None:
        """End :meth:`offload`. The bytes must be back in the same storages."""
        for shard in self.shards:
            shard.is_offloaded = frozenset()
        self.discard_fused_updates()
        self.report()

    def report(self) -> None:
        """Report bytes of masters and optimizer state to the ledger."""
        for shard in self.shards:
            shard.report(self.ledger, self.inner.state)

    def close(self) -> None:
        """Free masters and state."""
        if self.early is not None:
            self.early.close()
        for handle in self._guards:
            handle.remove()
        self.stand_ins.close()
        vars(self.inner).pop("zero_grad", None)
        self.object.close()
        self._turns.close()
        for shard in self.shards:
            shard.buffer.measure = shard.buffer.store = None
            for category in ("master", "optimizer"):
                for tier in TIERS.values():
                    self.ledger.hold(category, shard.unit.name, 0, tier)
        if self.pager is not None:
            self.ledger.hold("scratch", "buffers of the pager", 0, Tier.HOST)
        if self._worker is not None:
            self._worker.close()
        self.shards = []
        self.early = None


def _places(inner: torch.optim.Optimizer) -> dict[int, tuple[int, int]]:
    """By ``id(param)``, the index of its param group and its index in that group."""
    return {
        id(param): (group_index, index)
        for group_index, group in enumerate(inner.param_groups)
        for index, param in enumerate(group["params"])
    }


def _not_trained(
    inner: torch.optim.Optimizer, shards: Iterable[OptimizerShard]
) -> list[nn.Parameter]:
    """The optimizer's parameters that no shard updates: frozen ones."""
    trained = {id(param) for shard in shards for param in shard.unit.params}
    given = [param for group in inner.param_groups for param in group["params"]]
    return [param for param in given if id(param) not in trained]


def _stand_ins_of_groups(shards: Sequence[OptimizerShard]) -> HeldGrads:
    """Stand-ins of one fragment of each group: enough to refuse a loop over ``params`` of a group."""
    firsts = {
        fragment.group: (fragment.value, shard.unit.layout.slots[fragment.index].fqn)
        for shard in reversed(shards)
        for fragment in reversed(shard.fragments)
    }
    return HeldGrads([value for value, _ in firsts.values()], [fqn for _, fqn in firsts.values()])


def _refuse_used(inner: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has made steps: it is not known how its state would be cut."""
    used = [
        s
        for key, s in inner.state.items()
        if isinstance(key, Tensor) and ("momentum_buffer" in s or float(s.get("step", 0)) > 0)
    ]
    if used:
        raise UsageError(
            "the optimizer was stepped before the engine was built, and its state would be lost. Build "
            "the engine first; load a saved optimizer through the engine."
        )


def _refuse_state_dict(*_: object) -> None:
    """Refuse ``state_dict()``: tensors of chunks on disk share memory with those of other chunks."""
    raise UsageError(
        "optimizer.state_dict() with state on disk would read memory that contains other state "
        "now. Read single values with zeroshard.zero.safe_get_full_optimizer_state(param, key)."
    )
