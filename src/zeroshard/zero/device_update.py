"""Updates chunks in device memory in one pass, with Triton (ADR 0015).

One object updates all chunks after whose update nothing has to be sent: then one launch updates them all.
Units that are all-gathered after their update have an object each, so that the all-gather of one runs
beside the update of the next. Where the pass is not possible, the optimizer's own step runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.ledger import Ledger
from zeroshard.optim import triton_check
from zeroshard.optim.fused_update import UpdateKernel
from zeroshard.optim.triton_update import NAMES, DeviceFragment, TritonUpdate
from zeroshard.zero.optimizer_object import OptimizerObject
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard
from zeroshard.zero.updaters import OwnStep, StepInputs

_NO_SLOTS: frozenset[int] = frozenset()

Part = tuple[OptimizerShard, OptimizerChunk]


def may_update(chunk: OptimizerChunk, kernel: UpdateKernel | None) -> bool:
    """Whether :class:`DeviceUpdate` may update the chunk."""
    master_C = chunk.master_C
    return (
        kernel is not None
        and kernel.device_form is not None
        and chunk.host_chunk is None
        and chunk.page is None
        and not isinstance(master_C, FakeTensor)
        and triton_check.has_kernels(master_C.device)
        and master_C.dtype == torch.float32
        and chunk.param_C.dtype in NAMES
    )


class DeviceUpdate:
    """The updater of some chunks for which :func:`may_update` holds. Temporary memory: none.

    Prepared once, and again if tensors are replaced or move, or if other slots get no gradient. The state
    of the first step is made here if it starts with zeros. ``name``: for the ledger.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        kernel: UpdateKernel,
        optimizer: OptimizerObject,
        ledger: Ledger,
        *,
        name: str,
    ) -> None:
        self._parts = list(parts)
        self._kernel = kernel
        self._inner = optimizer.inner
        self._owns = [OwnStep(shard, chunk, optimizer, ledger) for shard, chunk in parts]
        self._ledger = ledger
        self._owner = f"tables of the update of {name}"
        self._can_run = True
        self._update: TritonUpdate | None = None
        self._skipped: list[frozenset[int]] = []
        self._addresses: list[int] = []
        self._known: list[tuple[Tensor, str, Tensor]] = []  # fragment, name and tensor of its state

    def step(self, inputs: StepInputs) -> None:
        """See :class:`~zeroshard.zero.updaters.Updater`. Updates all chunks of this object."""
        skipped = [inputs.untouched.get(id(shard.unit), _NO_SLOTS) for shard, _ in self._parts]
        if all(skipped) and self._leaves_out_all(skipped):
            return
        grads = [shard.gradient_of(chunk) for shard, chunk in self._parts]
        update = self._prepared(skipped, grads) if self._can_run else None
        if update is None:
            for own in self._owns:
                own.step(inputs)
        else:
            update.run(grads, inputs.factor, inputs.found_inf, self._inner.param_groups)

    def close(self) -> None:
        """Free the tables."""
        self._update = None
        self._ledger.hold("scratch", self._owner, 0)

    def _leaves_out_all(self, skipped: Sequence[frozenset[int]]) -> bool:
        return all(
            fragment.index in slots
            for (_, chunk), slots in zip(self._parts, skipped, strict=True)
            for fragment in chunk.fragments
        )

    def _prepared(
        self, skipped: list[frozenset[int]], grads: Sequence[Tensor]
    ) -> TritonUpdate | None:
        """The prepared pass; None if the optimizer's own step has to run.

        ``skipped``: by part, the slots without gradient.
        """
        update = self._update
        if (
            update is not None
            and skipped == self._skipped
            and self._addresses == self._locate()
            and self._has_same_state()
            and update.matches(grads)
        ):
            return update
        self._skipped = skipped
        self._update = update = self._prepare(grads)
        self._ledger.hold("scratch", self._owner, 0 if update is None else update.nbytes)
        return update

    def _locate(self) -> list[int]:
        """Addresses of masters and parameters. (A shard in host memory has others in each step.)"""
        return [t.data_ptr() for _, chunk in self._parts for t in (chunk.master_C, chunk.param_C)]

    def _has_same_state(self) -> bool:
        """Whether the optimizer's state is in the same tensors. (Loading it replaces them.)"""
        state = self._inner.state
        for value, name, tensor in self._known:
            here = dict.get(state, value)  # a program's get() has an error
            if here is None or here.get(name) is not tensor:
                return False
        return True

    def _prepare(self, grads: Sequence[Tensor]) -> TritonUpdate | None:
        kernel = self._kernel
        self._known = []
        fragments: list[DeviceFragment] = []
        for at, (shard, chunk) in enumerate(self._parts):
            self._make_state(shard, chunk, self._skipped[at])
            found = self._fragments_of(at, chunk)
            if found is None:
                return None
            fragments += found
        if not fragments or not all(fragment.fits for fragment in fragments):
            return None
        dtypes = {(grads[f.chunk].dtype, None if f.low is None else f.low.dtype) for f in fragments}
        device = fragments[0].master.device
        answers = [triton_check.ready(kernel, device, *pair) for pair in sorted(dtypes, key=str)]
        usable = [answer for answer in answers if answer is not None]
        if len(usable) < len(answers):
            self._can_run = False
            return None
        self._addresses = self._locate()
        # Orders differ only in the last bits, and are almost surely the same for all dtypes.
        return TritonUpdate(kernel, usable[0].launcher, usable[0].order, fragments, grads)

    def _make_state(
        self, shard: OptimizerShard, chunk: OptimizerChunk, skipped: frozenset[int]
    ) -> None:
        """Make the state that the first step of the optimizer would make."""
        kernel, state = self._kernel, self._inner.state
        assert kernel.device_form is not None
        if kernel.names and kernel.device_form.starts_at_zero:
            for fragment in chunk.fragments:
                if fragment.index not in skipped and not state.get(fragment.value):
                    state[fragment.value] = {
                        name: torch.zeros_like(fragment.master)
                        if name in kernel.shaped
                        else torch.zeros((), dtype=torch.float32, device=chunk.master_C.device)
                        for name in kernel.names
                    }
                    shard.has_new_state = True
        chunk.adopt_state(state)

    def _fragments_of(self, at: int, chunk: OptimizerChunk) -> list[DeviceFragment] | None:
        """The chunk's fragments that get a gradient; None if the optimizer has not made their state."""
        kernel, state = self._kernel, self._inner.state
        low_C = chunk.param_C if chunk.has_master else None
        fragments = []
        for fragment in chunk.fragments:
            if fragment.index in self._skipped[at]:
                continue
            found = state.get(fragment.value, {})
            if not kernel.is_in(found):
                return None
            self._known += [(fragment.value, name, found[name]) for name in kernel.names]
            span = slice(fragment.at, fragment.at + fragment.numel)
            fragments.append(
                DeviceFragment(
                    chunk=at,
                    group=fragment.group,
                    grad_at=fragment.at,
                    master=chunk.master_C[span],
                    state=tuple(found[name] for name in kernel.shaped),
                    step=found["step"] if kernel.counts else None,
                    low=None if low_C is None else low_C[span],
                )
            )
        return fragments
