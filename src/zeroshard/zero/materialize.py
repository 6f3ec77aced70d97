"""Gives a unit's parameters memory and their first values, and cuts those into shards.

Parameters on the meta device get memory module by module, right before a module's unit takes its
parameters: the module's own ``reset_parameters`` fills it, as its constructor would have done.

Whole parameters become flat shards piece by piece, without a whole unit in memory: rank 0's values are
copied into a small buffer in the order of the layout and broadcast, and every rank keeps what belongs to
its shard. Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.collectives import Comm
from zeroshard.core.layout import Slot, UnitLayout
from zeroshard.errors import UsageError

logger = logging.getLogger("zeroshard")

PIECE_NUMEL = 2**22
"""Elements per broadcast. Bounds the memory that construction needs besides shards and one parameter."""


def check_meta(model: nn.Module) -> None:
    """Check that all modules on the meta device can compute their first values.

    Logs a warning if the model has other first values than its modules: ``_init_weights``, as models of
    Transformers do, is not called.

    Raises:
        UsageError: some have no ``reset_parameters``; it names them.
    """
    empty = {name: module for name, module in model.named_modules() if _on_meta(module)}
    mute = {
        name or "the model itself": type(module).__name__
        for name, module in empty.items()
        if not hasattr(module, "reset_parameters")
    }
    if mute:
        first, kind = next(iter(mute.items()))
        more = f", and {len(mute) - 1} more modules," if len(mute) > 1 else ""
        raise UsageError(
            f"module {first!r} ({kind}){more} on the meta device without reset_parameters(), so "
            "the initial values are unknown. Add that method (for buffers too), build the model "
            "under zeroshard.zero.Init instead, or load weights before initialize()."
        )
    rules = (
        type(module).__name__ for module in model.modules() if hasattr(module, "_init_weights")
    )
    if empty and (own := next(rules, None)) is not None:
        logger.warning(
            "%s has _init_weights(), which is not called for modules on the meta device: they start with "
            "the values of their own reset_parameters(). For the values of the model itself, build it "
            "under zeroshard.zero.Init, or load weights.", own,
        )  # fmt: skip


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give the module's own meta parameters and buffers memory and values. Others are not changed.

    Parameters keep their identity, because ties and optimizers built earlier refer to the objects.
    """
    empty = _on_meta(module)
    if not empty:
        return
    for leaf, tensor in empty.items():
        if isinstance(tensor, nn.Parameter):
            if tensor.is_meta:  # otherwise it was swapped under another name already
                values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                real = nn.Parameter(values, requires_grad=tensor.requires_grad)
                # Of a fake tensor, the device is in this dict too.
                real.__dict__.update({**tensor.__dict__, **real.__dict__})
                exchange(tensor, real)
        else:
            module._buffers[leaf] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    # reset_parameters must not change parameters that have values (tied, loaded or sharded).
    kept = {n: p for n, p in module._parameters.items() if p is not None and n not in empty}
    for leaf, param in kept.items():
        stand_in = torch.empty(param.shape, dtype=param.dtype, device=device)
        module._parameters[leaf] = nn.Parameter(stand_in, requires_grad=param.requires_grad)
    try:
        with torch.no_grad():
            module.reset_parameters()  # type: ignore[operator]  # see check_meta
    finally:
        module._parameters.update(kept)


def exchange(a: Tensor, b: Tensor) -> None:
    """Exchange what two tensors are. Both objects stay.

    A fake mode keeps weak references to the fake tensors that operations returned, and torch's function
    refuses tensors that have any. They are looked up only by the tensor inside the fake one, which no
    longer exists.
    """
    if not isinstance(b, FakeTensor):
        torch.utils.swap_tensors(a, b)
        return
    a.__class__, b.__class__ = b.__class__, a.__class__  # type: ignore[assignment]
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


def _on_meta(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None and tensor.is_meta}


def scatter(
    layout: UnitLayout,
    values: Sequence[tuple[Slot, Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    comm: Comm,
    name: str,
    source: int,
) -> Tensor:
    """This rank's shard ``[S]`` of parameters that every rank holds whole, with rank ``source``'s values.

    Collective. ``values``: in the order of the layout, on one device; slots that are not given become
    zero, as padding is. A layout that fits into one piece takes one broadcast, however many parameters it
    has.
    """
    begin, end = layout.shard_range(comm.rank)
    if layout.full_numel > PIECE_NUMEL:
        shard_S = torch.zeros(layout.shard_numel, dtype=dtype, device=device)
        scatterer = ParamScatterer(layout, shard_S, begin, comm=comm, name=name, source=source)
        for slot, value in values if comm.rank == source else ():
            scatterer.add(slot, value)
        scatterer.finish()
        return shard_S
    if comm.rank == source:
        full_N = _joined(layout, values, dtype).to(device)
    else:
        full_N = torch.empty(layout.full_numel, dtype=dtype, device=device)
    comm.broadcast(full_N, source, name=name).wait()
    return full_N[begin:end].clone()


def _joined(
    layout: UnitLayout, values: Sequence[tuple[Slot, Tensor]], dtype: torch.dtype
) -> Tensor:
    """``full_N`` on the device of the values."""
    if not values:
        return torch.zeros(layout.full_numel, dtype=dtype)
    first = values[0][1]
    gaps: dict[int, Tensor] = {}
    parts: list[Tensor] = []
    at = 0
    for slot, value in values:
        if gap := slot.start - at:
            if gap not in gaps:
                gaps[gap] = first.new_zeros(gap)
            parts.append(gaps[gap])
        parts.append(value.reshape(-1))
        at = slot.start + value.numel()
    parts.append(first.new_zeros(layout.full_numel - at))
    return torch.cat(parts, out=first.new_empty(layout.full_numel, dtype=dtype))


class ParamScatterer:
    """Broadcasts the parameters of one layout in pieces. Each rank keeps a ``part`` of the flat whole.

    ``part`` is ``full_N[begin : begin + len(part)]`` and complete after :meth:`finish`; padding is zero.
    :meth:`add` takes parameters in the order of the layout, in any dtype, on any device. ``device``:
    where ranks exchange pieces; default: where ``part`` is. Collective. The values of rank ``source`` are
    used.
    """

    def __init__(
        self,
        layout: UnitLayout,
        part: Tensor,
        begin: int,
        *,
        comm: Comm,
        name: str,
        source: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.layout = layout
        self.part = part
        self.begin, self.end = begin, begin + len(part)
        self.comm = comm
        self.name = name
        self.source = source
        self._low = 0  # the position in full_N where the current piece begins
        self._is_fake = isinstance(part, FakeTensor)  # then there are no values to copy
        self._piece = torch.zeros(
            min(PIECE_NUMEL, layout.full_numel), dtype=part.dtype, device=device or part.device
        )

    def add(self, slot: Slot, values: Tensor) -> None:
        """Add the next parameter, of shape ``slot.shape``."""
        flat = values if self._is_fake else values.detach().reshape(-1)
        at = slot.start
        while at < slot.stop:
            self._send_until(at)
            stop = min(slot.stop, self._low + len(self._piece))
            if not self._is_fake:
                self._piece[at - self._low : stop - self._low].copy_(
                    flat[at - slot.start : stop - slot.start]
                )
            at = stop

    def finish(self) -> None:
        """Broadcast what is left."""
        self._send_until(self.layout.full_numel)

    def _send_until(self, position: int) -> None:
        """Broadcast pieces until the current one contains ``position``."""
        while self._low < self.layout.full_numel and position >= self._low + len(self._piece):
            low, high = self._low, self._low + len(self._piece)
            self.comm.broadcast(self._piece, self.source, name=self.name).wait()
            begin, end = max(self.begin, low), min(self.end, high)
            if begin < end and not self._is_fake:
                self.part[begin - self.begin : end - self.begin].copy_(
                    self._piece[begin - low : end - low]
                )
            self._low = high
            rest = min(len(self._piece), self.layout.full_numel - high)
            if rest < len(self._piece):
                self._piece = self._piece[:rest]
            if not self._is_fake:
                self._piece.zero_()
