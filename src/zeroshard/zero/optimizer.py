"""Lets an ordinary ``torch.optim`` optimizer update sharded parameters.

[Note: the sharded update]

*What the optimizer sees.* Its param groups hold fragments instead of parameters: one-dimensional views of
the masters, or a view in the parameter's shape where this rank owns all of the parameter. An element-wise
optimizer computes the same on fragments as on parameters (ADR 0001). What a rank updates, where that is
stored and who owns it: see [Note: what a rank updates] in ``zero/optimizer_shard.py``.

*How a chunk is updated.* Chunks are updated one after the other, in the order of forward. There are two
computations with the same bits (ADR 0007). If the optimizer's class has a known kernel, a chunk in CPU
memory takes one fused pass (:mod:`~zeroshard.optim.fused_update`). Else the optimizer's ``step`` runs on
the chunk's fragments, and gradients in the master's dtype exist for one chunk at a time. A chunk with a
:class:`~zeroshard.offload.host_chunk.HostChunk` first gets its gradient copied to the host; its update
runs on the worker thread if it can, else on this thread (ADR 0008).

*Edits.* Each of these ways compares parameter and rounded master first, and starts from the parameter
where they differ. Without this, the update would overwrite what the program wrote (ADR 0009).

*Invariants.* Gradients are in the buffers. ``.grad`` of a fragment is set only while the optimizer's
``step`` runs on its chunk, and ``params`` of the groups are the chunk's fragments only then. A direct
``optimizer.step()`` would therefore do nothing without an error, and ``_refuse_direct_step`` raises. An
update that fails midway leaves parameters of two different steps. The engine is failed from then on
(:mod:`zeroshard.zero.life`), so no step or checkpoint uses them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Span, Tier
from zeroshard.errors import UsageError
from zeroshard.memory import storage
from zeroshard.offload.async_update import AsyncUpdateWorker, PendingUpdates
from zeroshard.offload.copy_streams import CopyHandle
from zeroshard.offload.host_chunk import HostChunk, HostGradTransfer, HostStaging
from zeroshard.optim import native_adam
from zeroshard.optim.fused_update import PIECE_NUMEL, FusedUpdate, UpdateKernel
from zeroshard.zero import sharded_parameter
from zeroshard.zero.gradients import GradBuffer, Norms
from zeroshard.zero.life import Life
from zeroshard.zero.optimizer_shard import (
    OptimizerChunk,
    OptimizerShard,
    OwnedFragment,
    StateDtypes,
    make_optimizer_shard,
)
from zeroshard.zero.unit import Unit

if TYPE_CHECKING:
    from zeroshard.offload.pager import Pager


class ShardedOptimizer:
    """A ``torch.optim`` optimizer that updates this rank's fragments. See [Note: the sharded update].

    The optimizer object remains the user's. Its groups keep their options and learning rates; its
    ``state`` is keyed by fragment. Only ``params`` of the groups are replaced, by ``seat(inner, params of
    each group)``. ``kernel_of`` gives the fused update of an optimizer, None if there is none. ``spans``:
    for each buffer, positions and tiers of its chunks. ``pager`` and ``state_dtypes`` are needed for
    chunks on disk, ``host`` and ``behind`` (the worker) for chunks that are updated in another memory
    than the device's.
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
        seat: Callable[[torch.optim.Optimizer, Sequence[Sequence[Tensor]]], None],
        kernel_of: Callable[[torch.optim.Optimizer], UpdateKernel | None],
        pager: Pager | None = None,
        state_dtypes: Callable[[GradBuffer], StateDtypes] | None = None,
        host: HostStaging | None = None,
        behind: AsyncUpdateWorker | None = None,
    ) -> None:
        _refuse_used(inner)
        self.inner = inner
        self.ledger = ledger
        self.life = life
        self.pager = pager
        group_of = {
            id(param): at
            for at, group in enumerate(inner.param_groups)
            for param in group["params"]
        }
        self.shards: list[OptimizerShard] = []
        for buffer, places in zip(buffers, spans, strict=True):
            shard = make_optimizer_shard(
                buffer,
                group_of,
                places,
                whole=not shards_optimizer,
                pager=pager,
                state_dtypes=state_dtypes(buffer) if state_dtypes else lambda _group: {},
                host=host,
            )
            self.shards.append(shard)
            shard.report(ledger, inner.state)
        trained = {id(param) for shard in self.shards for param in shard.unit.params}
        self._frozen = [
            param
            for group in inner.param_groups
            for param in group["params"]
            if id(param) not in trained
        ]
        self._groups: list[list[Tensor]] = [[] for _ in inner.param_groups]
        for fragment in self._fragments():
            self._groups[fragment.group].append(fragment.value)
        seat(inner, self._groups)
        self._updating = False
        self._kernel_of = kernel_of
        self._kernel: UpdateKernel | None = None
        self._fused_updates: dict[int, FusedUpdate] = {}  # by ``id(chunk)``
        self._worker = behind
        for shard in self.shards:
            shard.buffer.measure = shard.measure
            if behind is not None and not behind.delayed and shard.is_updated_asynchronously:
                shard.buffer.store = shard.grad_on_host()
        self._guards = [inner.register_step_pre_hook(self._refuse_direct_step)]
        if pager is not None:
            self._guards.append(inner.register_state_dict_pre_hook(_refuse_state_dict))
            ledger.hold("scratch", "slots of the disk", pager.slots_nbytes, Tier.HOST)
        self.skips_on_device = bool(getattr(inner, "_step_supports_amp_scaling", False))
        self.report()

    def _fragments(self) -> Iterator[OwnedFragment]:
        for shard in self.shards:
            yield from shard.fragments

    # ------------------------------------------------------------------ the step

    def norms(self) -> Norms:
        """2-norms of this rank's fragments of the reduced gradient, in the order of the parameters.

        See :meth:`OptimizerShard.norms`.
        """
        found = [norm for shard in self.shards for norm in shard.norms()]
        return sorted(found, key=lambda item: item[0])

    def update(
        self,
        factor: Tensor,
        *,
        found_inf: Tensor | None = None,
        untouched: Mapping[int, frozenset[int]] | None = None,
        published: Callable[[Unit, PendingUpdates | None], object] = lambda _unit, _pending: None,
    ) -> None:
        """One optimizer step with gradients multiplied by ``factor`` (0-dim).

        ``found_inf``: 0-dim float, 1 if nothing may change; passed to optimizers that skip on the device.
        ``untouched``: by ``id(unit)``, the slots to which no rank gave a gradient. They are left out of
        the step, as PyTorch leaves out parameters with ``grad is None``.

        ``published(unit, pending)`` is called once for each unit. If the unit's update is complete,
        ``pending`` is None and the call follows its last chunk. If there is a worker, units whose
        parameters are not on disk are published after the last chunk of the model was started, and
        ``pending`` waits for the unit's update (None: it is complete).
        """
        inner = self.inner
        has_kernel = self._choose_kernel()
        pending: dict[int, PendingUpdates] = {}
        self._updating = True
        try:
            for shard, chunk in self._in_turn():
                skipped = (untouched or {}).get(id(shard.unit), frozenset())
                prepared = self._fused_update(chunk) if has_kernel and not skipped else None
                if chunk.host_chunk is not None:
                    stays = chunk.page is None and shard.unit.store.tier is not Tier.DISK
                    if not shard.buffer.is_stored:
                        chunk.host_chunk.send_gradient(shard.gradient_of(chunk))
                    transfer = chunk.host_chunk.send_numbers(factor, found_inf)
                    sent = (
                        self._worker.submit(
                            prepared, chunk.host_chunk, transfer, inner.param_groups
                        )
                        if self._worker is not None and prepared is not None and stays
                        else self._update_on_host(
                            chunk, chunk.host_chunk, transfer, prepared, skipped
                        )
                    )
                    pending.setdefault(id(shard.unit), PendingUpdates()).add(chunk.host_chunk, sent)
                elif prepared is not None and found_inf is None:
                    self._run(prepared, chunk, shard.gradient_of(chunk), factor)
                else:
                    chunk.sync_from_param()
                    grad_C = shard.gradient_of(chunk)
                    self._update_chunk(chunk, grad_C, factor, skipped, found_inf)
                self._settle(chunk)
                stays = self._worker is not None and shard.unit.store.tier is not Tier.DISK
                if chunk is shard.chunks[-1] and not stays:
                    if (here := pending.pop(id(shard.unit), None)) is not None:
                        here.wait()
                    published(shard.unit, None)
            for shard in self.shards if self._worker is not None else ():
                if shard.unit.store.tier is not Tier.DISK:
                    published(shard.unit, pending.get(id(shard.unit)))
        except BaseException as error:
            self.life.fail(
                f"an update ended in the middle ({type(error).__name__}: {error}): parameters before it "
                "are one step ahead of those after it, and what was on its way is lost. Close this "
                "engine, build a new one and continue from the last checkpoint."
            )
            raise
        finally:
            self._updating = False
            for group, params in zip(inner.param_groups, self._groups, strict=True):
                group["params"] = params
        self.report()

    def _in_turn(self) -> Iterator[tuple[OptimizerShard, OptimizerChunk]]:
        """Yield every chunk with its memory, which is valid until the next one.

        The shard and the gradient of the next unit are prefetched.
        """
        paged = [chunk.page for shard in self.shards for chunk in shard.chunks if chunk.page]
        pages = self.pager.walk(paged) if self.pager is not None else (page for page in paged)
        with contextlib.closing(pages):
            for shard, following in zip(self.shards, [*self.shards[1:], None], strict=True):
                with shard.loaded():
                    if following is not None:
                        following.unit.store.prefetch()
                        following.buffer.prefetch()
                    for chunk in shard.chunks:
                        if chunk.page is not None:
                            page = next(pages)
                            assert page is chunk.page
                        yield shard, chunk
                shard.buffer.discard_reduced()
            for _ in pages:
                raise AssertionError("the walk goes on after its last page")

    def _settle(self, chunk: OptimizerChunk) -> None:
        """Move state that the optimizer allocated itself to the chunk's page."""
        if chunk.page is None:
            return
        for fragment in chunk.fragments:
            state = self.inner.state.get(fragment.value, {})
            for name, flat_C in chunk.state_C.items():
                value = state.get(name)
                if (
                    isinstance(value, Tensor)
                    and value.shape == fragment.value.shape
                    and not storage.is_shared(value, flat_C)
                ):
                    state[name] = fragment.of(flat_C).copy_(value)
        chunk.page.filled_nbytes = chunk.page.nbytes

    def _choose_kernel(self) -> bool:
        """Choose the kernel for this step. Options and hooks may have changed since the last one."""
        inner = self.inner
        hooked = len(inner._optimizer_step_pre_hooks) > 1 or bool(inner._optimizer_step_post_hooks)
        kernel = None if hooked else self._kernel_of(inner)
        if kernel != self._kernel:
            self._kernel = kernel
            self._fused_updates.clear()
            if kernel is not None and kernel.compiles:
                native_adam.prepare()
        return kernel is not None

    def _fused_update(self, chunk: OptimizerChunk) -> FusedUpdate | None:
        """The chunk's fused update; None on other devices and until the optimizer has made its state."""
        kernel = self._kernel
        assert kernel is not None
        if chunk.master_C.device.type != "cpu" or isinstance(chunk.master_C, FakeTensor):
            return None
        states = [self.inner.state.get(fragment.value, {}) for fragment in chunk.fragments]
        prepared = self._fused_updates.get(id(chunk))
        if prepared is not None and prepared.is_current(states):
            return prepared
        names = {*kernel.shaped, *(["step"] if kernel.counts else [])}
        if not all(names <= state.keys() for state in states):
            return None
        self._fused_updates[id(chunk)] = made = FusedUpdate(
            kernel,
            [(fragment.group, fragment.at, fragment.value) for fragment in chunk.fragments],
            states,
            master_R=chunk.master_C,
            param_R=chunk.param_on_update_device,
        )
        return made

    def _update_on_host(
        self,
        chunk: OptimizerChunk,
        host_chunk: HostChunk,
        transfer: HostGradTransfer,
        prepared: FusedUpdate | None,
        skipped: frozenset[int],
    ) -> Callable[[], CopyHandle | None]:
        """Update a chunk in host memory at once, on this thread.

        For chunks whose memory is valid only now, or whose optimizer has no kernel.
        """
        assert self._worker is not None
        if prepared is not None:
            self._worker.update(prepared, host_chunk, transfer, self.inner.param_groups)
        else:
            transfer.wait()
            if transfer.is_edited:
                host_chunk.sync_edits_from_device()
            chunk.sync_from_param()
            if not transfer.is_skipped:
                factor = torch.tensor(transfer.factor, dtype=torch.float64)
                self._update_chunk(chunk, transfer.grad_C, factor, skipped)
        if chunk.page is None:
            return host_chunk.send_param
        arrival = host_chunk.send_param()
        if arrival is not None:
            arrival.synchronize()  # the next chunk uses the same memory
        return lambda: arrival

    def _run(
        self, prepared: FusedUpdate, chunk: OptimizerChunk, grad_C: Tensor, factor: Tensor
    ) -> None:
        master_C = chunk.master_C
        casts = grad_C.dtype != master_C.dtype
        piece_nbytes = min(PIECE_NUMEL, chunk.numel) * master_C.element_size()
        with self.ledger.lend("update", piece_nbytes if casts else 0):
            prepared.run(grad_C, float(factor), self.inner.param_groups)

    def _update_chunk(
        self,
        chunk: OptimizerChunk,
        grad_C: Tensor,
        factor: Tensor,
        skipped: frozenset[int],
        found_inf: Tensor | None = None,
    ) -> None:
        master_C = chunk.master_C
        if grad_C.dtype == master_C.dtype:
            self._step_chunk(chunk, grad_C, factor, skipped, found_inf)
            return
        with self.ledger.lend("update", master_C.nbytes):
            self._step_chunk(chunk, grad_C.to(master_C.dtype), factor, skipped, found_inf)

    def _step_chunk(
        self,
        chunk: OptimizerChunk,
        grad_C: Tensor,
        factor: Tensor,
        skipped: frozenset[int],
        found_inf: Tensor | None,
    ) -> None:
        grad_C.mul_(factor.to(grad_C.dtype))
        members: list[list[Tensor]] = [[] for _ in self._groups]
        for fragment in chunk.fragments:
            if fragment.index not in skipped:
                fragment.value.grad = fragment.of(grad_C)
                members[fragment.group].append(fragment.value)
        if not any(members):
            return
        for group, params in zip(self.inner.param_groups, members, strict=True):
            group["params"] = params
        with self._skipping(found_inf):
            self.inner.step()
        for fragment in chunk.fragments:
            fragment.value.grad = None
        chunk.round_master_into_param()

    @contextlib.contextmanager
    def _skipping(self, found_inf: Tensor | None) -> Iterator[None]:
        """Makes the optimizer's ``step`` change nothing if ``found_inf`` is 1, inside the block."""
        if found_inf is None:
            yield
            return
        self.inner.found_inf, self.inner.grad_scale = found_inf, None  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del self.inner.found_inf, self.inner.grad_scale  # type: ignore[attr-defined]

    def _refuse_direct_step(self, *_: object) -> None:
        """Refuse ``step()`` calls of the program. Without ``.grad`` they would do nothing."""
        if not self._updating:
            raise UsageError(
                "optimizer.step() was called directly. Its gradients are sharded and belong to the "
                "engine: call engine.step(), which also clips and advances the schedule."
            )

    def sync_edits(self) -> None:
        """Make what the program wrote into parameters the start of the next step.

        Writes edits back into the shards. :meth:`update` copies them into the masters, when it reads
        these.

        Raises:
            UsageError: a gradient was assigned to ``.grad``, a param group was added, or a parameter that
                was frozen when the engine was built has a gradient; the step would ignore each.
        """
        self._refuse_unknown()
        for shard in self.shards:
            shard.refuse_grad()
            shard.unit.wait_for_unshard()
            shard.unit.write_back_edits()

    def _refuse_unknown(self) -> None:
        """Refuse param groups and trained parameters for which no optimizer state was planned."""
        if added := len(self.inner.param_groups) - len(self._groups):
            raise UsageError(
                f"the optimizer has {len(self.inner.param_groups)} param groups, and had "
                f"{len(self._groups)} when the engine was built ({added:+d}); what is sharded how was "
                "planned then. Build the engine with all groups, freeze what is not trained yet "
                "(param.requires_grad_(False)) after that, and unfreeze it later."
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
        """The optimizer's state of one fragment; empty before the first step."""
        return dict(self.inner.state.get(fragment.value, {}))

    def seat_state(
        self, chunk: OptimizerChunk, fragment: OwnedFragment, state: Mapping[str, Any]
    ) -> None:
        """Replace the optimizer's state of one fragment; empty: as before the first step.

        The chunk's page, if it has one, must be open.
        """
        self.inner.state.pop(fragment.value, None)
        if state:
            self.inner.state[fragment.value] = dict(state)
        if chunk.page is not None:
            chunk.page.filled_nbytes = chunk.page.nbytes

    def discard_fused_updates(self) -> None:
        """Drop the prepared fused updates, because state is in other tensors now."""
        self._fused_updates.clear()

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
        for handle in self._guards:
            handle.remove()
        self.inner.state.clear()
        for group in self.inner.param_groups:
            group["params"] = []
        for shard in self.shards:
            shard.buffer.measure = shard.buffer.store = None
            for category in ("master", "optimizer"):
                for tier in Tier:
                    self.ledger.hold(category, shard.unit.name, 0, tier)
        if self.pager is not None:
            self.ledger.hold("scratch", "slots of the disk", 0, Tier.HOST)
        if self._worker is not None:
            self._worker.close()
        self.shards, self._groups, self._fused_updates = [], [], {}


def _refuse_used(inner: torch.optim.Optimizer) -> None:
    """Refuse an optimizer with state of earlier steps: it is not known how to cut its tensors."""
    used = [
        s for s in inner.state.values() if "momentum_buffer" in s or float(s.get("step", 0)) > 0
    ]
    if used:
        raise UsageError(
            "the optimizer was stepped before the engine was built, and its state would be lost. Build "
            "the engine first; load a saved optimizer through the engine."
        )


def _refuse_state_dict(*_: object) -> None:
    """Refuse ``state_dict()``: tensors of chunks on disk share memory with those of other chunks."""
    raise UsageError(
        "optimizer.state_dict() with state on disk would read memory that other state has used since. "
        "Read single values with zeroshard.zero.safe_get_full_optimizer_state(param, key)."
    )
