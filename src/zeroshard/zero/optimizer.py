"""How does an ordinary ``torch.optim`` optimizer update sharded parameters?

It is given fragments instead of parameters: one-dimensional slices of the flat shards (or the parameter
in its own shape, where a rank owns all of it), in the same param groups. An element-wise optimizer never
learns the difference. Units are updated one after the other. Where the class's kernel is known, a unit
goes through it in one pass over memory (:mod:`zeroshard.zero.onepass`); else the optimizer's own
``step`` runs, and fp32 gradients exist for one unit at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.ledger import Ledger
from zeroshard.errors import UsageError
from zeroshard.native import adam
from zeroshard.zero.clip import norm_of
from zeroshard.zero.onepass import PIECE_NUMEL, Kernel, OnePass, follow
from zeroshard.zero.reduce import GradBuffer
from zeroshard.zero.unit import Unit


@dataclass(frozen=True, eq=False, slots=True)
class OwnedFragment:
    """The part of one parameter that this rank updates: ``tile[at : at + numel]``."""

    param: nn.Parameter  # the model's parameter
    index: int  # its slot in the unit
    group: int  # its param group
    at: int
    numel: int
    value: Tensor  # what the optimizer sees: a view of the master

    def of(self, tile_R: Tensor) -> Tensor:
        """The fragment's place in a flat tensor of the tile, in the optimizer's shape."""
        return tile_R[self.at : self.at + self.numel].view(self.value.shape)


@dataclass(frozen=True, eq=False, slots=True)
class Tile:
    """What this rank updates of one unit: ``R`` elements, S where state is sharded, else N.

    ``low_R`` is the parameter memory itself. ``master_R`` is what the optimizer updates: the same
    tensor, or an fp32 copy for 16-bit parameters. ``own`` is this rank's shard inside the tile: the
    part that it measures for the global norm.
    """

    unit: Unit
    buffer: GradBuffer
    low_R: Tensor
    master_R: Tensor
    fragments: tuple[OwnedFragment, ...]
    own: tuple[int, int]

    @property
    def has_master(self) -> bool:
        return self.master_R is not self.low_R

    def gradient(self) -> Tensor:
        """The reduced gradient ``[R]`` of the running step (a sum over ranks, still loss-scaled)."""
        whole = self.buffer.reduced_N
        grad = whole if self.low_R is self.unit.full_N else self.buffer.reduced_S
        assert grad is not None, "GradReducer.finish() comes before the update"
        return grad

    def publish_master(self) -> None:
        """Round the master into the parameter memory."""
        if self.has_master:
            self.low_R.copy_(self.master_R)

    def refuse_grad(self) -> None:
        """Gradients leave ``.grad`` as they arrive: what is there was put there, and would be ignored."""
        with torch._C.DisableTorchFunctionSubclass():
            strays = [i for i, param in enumerate(self.unit.params) if param.grad is not None]
        if strays:
            raise UsageError(
                f"{self.unit.layout.slots[strays[0]].fqn!r}.grad was assigned after backward; the "
                "gradient that step() uses is sharded and kept elsewhere. Use "
                "zeroshard.zero.safe_set_full_grad(param, value)."
            )

    def follow(self) -> None:
        """The master takes over what the program wrote into the parameters, by whatever means."""
        self.unit.wait()
        self.unit.absorb()
        self.follow_low()

    def follow_low(self) -> None:
        """The master takes what differs from it in ``low_R``, without waiting for the device."""
        if self.has_master and not isinstance(self.low_R, FakeTensor):
            piece = PIECE_NUMEL if self.low_R.device.type == "cpu" else max(1, self.low_R.numel())
            for master, low in zip(
                self.master_R.split(piece), self.low_R.split(piece), strict=True
            ):
                follow(master, low)


class ShardedOptimizer:
    """A ``torch.optim`` optimizer re-seated on this rank's fragments.

    The optimizer object stays the user's: its groups keep their options and learning rates, its
    ``state`` is keyed by fragment. Only ``params`` of the groups are replaced, by ``seat(inner, params
    of each group)``. ``kernel_of`` knows which optimizers can be updated in one pass, and how.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        buffers: Sequence[GradBuffer],
        *,
        shards_optimizer: bool,
        rank: int,
        ledger: Ledger,
        seat: Callable[[torch.optim.Optimizer, Sequence[Sequence[Tensor]]], None],
        kernel_of: Callable[[torch.optim.Optimizer], Kernel | None],
    ) -> None:
        _refuse_used(inner)
        self.inner = inner
        self.ledger = ledger
        group_of = {
            id(param): at
            for at, group in enumerate(inner.param_groups)
            for param in group["params"]
        }
        self.tiles = [
            _make_tile(buffer, group_of, shards_optimizer=shards_optimizer, rank=rank)
            for buffer in buffers
        ]
        for tile in self.tiles:
            nbytes = tile.master_R.numel() * tile.master_R.element_size() if tile.has_master else 0
            ledger.hold("master", tile.unit.name, nbytes)
        self._groups: list[list[Tensor]] = [[] for _ in inner.param_groups]
        for fragment in self._fragments():
            self._groups[fragment.group].append(fragment.value)
        seat(inner, self._groups)
        self._updating = False
        self._kernel_of = kernel_of
        self._kernel: Kernel | None = None
        self._passes: dict[int, OnePass] = {}  # by position of the tile
        self._guard = inner.register_step_pre_hook(self._refuse_direct_step)
        self.skips_on_device = bool(getattr(inner, "_step_supports_amp_scaling", False))
        self.account()

    def _fragments(self) -> Iterator[OwnedFragment]:
        for tile in self.tiles:
            yield from tile.fragments

    # ------------------------------------------------------------------ the step

    def norms(self) -> list[tuple[int, Tensor]]:
        """2-norm of every own fragment's reduced gradient, in the order of the model's parameters:
        pairs of the position in ``model.parameters()`` and a 0-dim tensor.

        With one rank these are the very norms that ``clip_grad_norm_`` takes: none for a parameter
        without gradient, zero for one without elements.
        """
        found: list[tuple[int, Tensor]] = []
        for tile in self.tiles:
            grad_R, (low, high) = tile.gradient(), tile.own
            alone, touched = tile.buffer.comm.world_size == 1, tile.buffer.touched
            for fragment in tile.fragments:
                begin, end = max(low, fragment.at), min(high, fragment.at + fragment.numel)
                if begin < end and (touched[fragment.index] or not alone):
                    place = tile.unit.positions[fragment.index]
                    found.append((place, norm_of(grad_R[begin:end])))
            for index, slot in enumerate(tile.unit.layout.slots):
                if slot.numel == 0 and alone and touched[index]:
                    found.append((tile.unit.positions[index], norm_of(grad_R[:0])))
        return sorted(found, key=lambda item: item[0])

    def update(
        self,
        factor: Tensor,
        *,
        found_inf: Tensor | None = None,
        untouched: Mapping[int, frozenset[int]] | None = None,
        published: Callable[[Unit], object] = id,
    ) -> None:
        """One optimizer step with gradients multiplied by ``factor`` (0-dim).

        ``found_inf``: 0-dim float, 1 where nothing may change; passed to optimizers that skip on the
        device. ``untouched``: per unit (by id) the slots that no rank gave a gradient: like PyTorch
        with ``grad is None``, they are left out of the step. ``published(unit)`` is called as soon as
        the unit is updated, before the next one is.
        """
        inner = self.inner
        in_one_pass = self._choose_kernel() and found_inf is None
        if found_inf is not None:
            inner.found_inf, inner.grad_scale = found_inf, None  # type: ignore[attr-defined]
        self._updating = True
        try:
            for at, tile in enumerate(self.tiles):
                skipped = (untouched or {}).get(id(tile.unit), frozenset())
                prepared = self._one_pass(at, tile) if in_one_pass and not skipped else None
                if prepared is not None:
                    self._run(prepared, tile, factor)
                else:
                    tile.follow_low()
                    self._update_tile(tile, factor, skipped)
                published(tile.unit)
        finally:
            self._updating = False
            for group, params in zip(inner.param_groups, self._groups, strict=True):
                group["params"] = params
            if found_inf is not None:
                del inner.found_inf, inner.grad_scale  # type: ignore[attr-defined]
        self.account()

    def _choose_kernel(self) -> bool:
        """Is there a kernel, now? Options and hooks may have changed since the last step."""
        inner = self.inner
        hooked = len(inner._optimizer_step_pre_hooks) > 1 or bool(inner._optimizer_step_post_hooks)
        kernel = None if hooked else self._kernel_of(inner)
        if kernel != self._kernel:
            self._kernel = kernel
            self._passes.clear()
            if kernel is not None and kernel.compiles:
                adam.prepare()
        return kernel is not None

    def _one_pass(self, at: int, tile: Tile) -> OnePass | None:
        """The tile's prepared pass; None on other devices, and until the optimizer made its state."""
        kernel = self._kernel
        assert kernel is not None
        if tile.master_R.device.type != "cpu" or isinstance(tile.master_R, FakeTensor):
            return None
        states = [self.inner.state.get(fragment.value, {}) for fragment in tile.fragments]
        prepared = self._passes.get(at)
        if prepared is not None and prepared.is_current(states):
            return prepared
        names = {*kernel.shaped, *(["step"] if kernel.counts else [])}
        if not all(names <= state.keys() for state in states):
            return None
        self._passes[at] = made = OnePass(
            kernel,
            [(fragment.group, fragment.at, fragment.value) for fragment in tile.fragments],
            states,
            master_R=tile.master_R,
            low_R=tile.low_R,
        )
        return made

    def _run(self, prepared: OnePass, tile: Tile, factor: Tensor) -> None:
        grad_R, master_R = tile.gradient(), tile.master_R
        casts = grad_R.dtype != master_R.dtype
        piece_nbytes = min(PIECE_NUMEL, master_R.numel()) * master_R.element_size()
        with self.ledger.lend("update", piece_nbytes if casts else 0):
            prepared.run(grad_R, float(factor), self.inner.param_groups)

    def _update_tile(self, tile: Tile, factor: Tensor, skipped: frozenset[int]) -> None:
        grad_R, master = tile.gradient(), tile.master_R
        if grad_R.dtype == master.dtype:
            self._step_tile(tile, grad_R, factor, skipped)
            return
        with self.ledger.lend("update", master.numel() * master.element_size()):
            self._step_tile(tile, grad_R.to(master.dtype), factor, skipped)

    def _step_tile(
        self, tile: Tile, grad_R: Tensor, factor: Tensor, skipped: frozenset[int]
    ) -> None:
        grad_R.mul_(factor.to(grad_R.dtype))
        members: list[list[Tensor]] = [[] for _ in self._groups]
        for fragment in tile.fragments:
            if fragment.index not in skipped:
                fragment.value.grad = fragment.of(grad_R)
                members[fragment.group].append(fragment.value)
        if not any(members):
            return
        for group, params in zip(self.inner.param_groups, members, strict=True):
            group["params"] = params
        self.inner.step()
        for fragment in tile.fragments:
            fragment.value.grad = None
        tile.publish_master()

    def _refuse_direct_step(self, *_: object) -> None:
        """Gradients are in the buffers, not in ``.grad``: a direct step would silently do nothing."""
        if not self._updating:
            raise UsageError(
                "optimizer.step() was called directly. Its gradients are sharded and belong to the "
                "engine: call engine.step(), which also clips and advances the schedule."
            )

    def follow_edits(self) -> None:
        """What the program wrote into parameters is what the step starts from.

        Parameters are brought home here; masters follow in :meth:`update`, which reads them anyway.
        """
        for tile in self.tiles:
            tile.refuse_grad()
            tile.unit.wait()
            tile.unit.absorb()

    # ------------------------------------------------------------------ state

    def state_of(self, fragment: OwnedFragment) -> dict[str, Any]:
        """The optimizer's state of one fragment; empty before the first step."""
        return dict(self.inner.state.get(fragment.value, {}))

    def account(self) -> None:
        """Report optimizer state to the ledger."""
        for tile in self.tiles:
            nbytes = sum(
                value.numel() * value.element_size()
                for fragment in tile.fragments
                for value in self.inner.state.get(fragment.value, {}).values()
                if isinstance(value, Tensor)
            )
            self.ledger.hold("optimizer", tile.unit.name, nbytes)

    def close(self) -> None:
        """Give master and state back."""
        self._guard.remove()
        self.inner.state.clear()
        for group in self.inner.param_groups:
            group["params"] = []
        for tile in self.tiles:
            for category in ("master", "optimizer"):
                self.ledger.hold(category, tile.unit.name, 0)
        self.tiles, self._groups, self._passes = [], [], {}


def _make_tile(
    buffer: GradBuffer, group_of: Mapping[int, int], *, shards_optimizer: bool, rank: int
) -> Tile:
    unit = buffer.unit
    layout = unit.layout
    low, high = layout.shard_range(rank)
    if shards_optimizer:
        low_R, begin, end, own = unit.shard_S, low, high, (0, high - low)
    else:
        low_R, begin, end, own = unit.full_N, 0, layout.full_numel, (low, high)
    same = unit.row.master == unit.row.param
    master_R = low_R if same else low_R.to(unit.row.master)
    index_of = {slot.fqn: i for i, slot in enumerate(layout.slots)}
    fragments = []
    for piece in layout.fragments_between(begin, end):
        index = index_of[piece.fqn]
        param, slot = unit.params[index], layout.slots[index]
        value = master_R[piece.at : piece.at + piece.numel]
        if piece.numel == slot.numel:
            value = value.view(slot.shape)
        fragments.append(
            OwnedFragment(param, index, group_of[id(param)], piece.at, piece.numel, value.detach())
        )
    return Tile(unit, buffer, low_R, master_R, tuple(fragments), own)


def _refuse_used(inner: torch.optim.Optimizer) -> None:
    """State of earlier steps cannot be cut: nobody knows which tensors follow the parameters."""
    used = [
        s for s in inner.state.values() if "momentum_buffer" in s or float(s.get("step", 0)) > 0
    ]
    if used:
        raise UsageError(
            "the optimizer was stepped before the engine was built, and its state would be lost. Build "
            "the engine first; load a saved optimizer through the engine."
        )
