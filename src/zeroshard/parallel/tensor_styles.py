"""The styles of tensor parallelism: how one layer is cut, and what enters and leaves it.

A style is a ``ParallelStyle`` of torch, applied by ``parallelize_module``. ZeroShard has its own
because torch's lose ``requires_grad`` of norms and attributes of parameters, break ties, take widths and
sequences that do not divide for equal parts, and do not notice that a layer got the wrong input.

Between layers, activations are plain tensors in one of three forms: *whole* (equal on all tensor ranks),
*cut over features* (between a ``colwise`` and a ``rowwise`` layer), and *cut over the sequence* (the
residual stream of a plan with ``sequence`` norms). Such a norm gives the whole sequence as a ``DTensor``,
so that backward needs one reduce-scatter for all layers that read it.

Letters: ``T`` tensor ranks, ``r`` this rank's number among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import ParallelStyle

from zeroshard.errors import UsageError

SEQUENCE_DIM = 1
"""Activations are ``[batch, sequence, features]``."""


@dataclass(frozen=True)
class StyleRow:
    """One style: ``kinds`` of layers it fits, and the axis on which weight and bias are cut.

    ``None``: every tensor rank has the whole parameter.
    """

    name: str
    kinds: tuple[str, ...]
    weight_axis: int | None
    bias_axis: int | None
    meaning: str

    def axis(self, leaf: str) -> int | None:
        """The axis on which the parameter ``leaf`` of a layer is cut."""
        return self.bias_axis if leaf == "bias" else self.weight_axis


STYLES: Mapping[str, StyleRow] = {
    row.name: row
    for row in (
        StyleRow("colwise", ("Linear",), 0, 0, "rows of the weight; the output is cut over features"),
        StyleRow("colwise_by_head", ("Linear",), 0, 0,
                 "colwise, for a fused projection whose rows are ordered head by head"),
        StyleRow("colwise_gather", ("Linear",), 0, 0, "colwise, and the output is gathered"),
        StyleRow("rowwise", ("Linear",), 1, None, "columns of the weight; the outputs are added"),
        StyleRow("rowwise_split", ("Linear",), 1, None, "rowwise, for an input that is whole"),
        StyleRow("vocab", ("Embedding",), 0, None, "rows of the vocabulary; the outputs are added"),
        StyleRow("head_norm", ("norm",), None, None,
                 "a norm over each head, between colwise and rowwise; gradients are added"),
        StyleRow("sequence", ("norm",), None, None,
                 "the input is cut over the sequence, the output is the whole sequence"),
        StyleRow("replicate", ("Linear", "Embedding", "norm"), None, None,
                 "every tensor rank has the whole parameter; it reads and gives the residual stream"),
    )
}  # fmt: skip
"""The styles of a plan by name."""

NORMS = (nn.LayerNorm, nn.RMSNorm)


def kind_of(module: nn.Module) -> str | None:
    """``Linear``, ``Embedding`` or ``norm``; None for a module that no style fits."""
    if isinstance(module, nn.Linear):
        return "Linear"
    if isinstance(module, nn.Embedding):
        return "Embedding"
    named = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    return "norm" if isinstance(module, NORMS) or named else None


def part(extent: int, parts: int, index: int) -> tuple[int, int]:
    """Begin and end of part ``index`` of ``extent`` elements, as ``torch.chunk`` cuts them.

    >>> [part(5, 4, r) for r in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-extent // parts)
    return min(extent, index * step), min(extent, (index + 1) * step)


def local_part(values: Tensor, axis: int | None, mesh: DeviceMesh) -> Tensor:
    """A copy of the part of ``values`` that this tensor rank keeps, on the mesh's device."""
    if axis is not None:
        begin, end = part(values.shape[axis], mesh.size(), mesh.get_local_rank())
        values = values.narrow(axis, begin, end - begin)
    return values.detach().to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)


def as_dtensor(local: Tensor, shape: torch.Size, axis: int | None, mesh: DeviceMesh) -> DTensor:
    """``local`` as this rank's part of a contiguous tensor of ``shape``, cut on ``axis``."""
    placement: Placement = Replicate() if axis is None else Shard(axis)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


class CutLayer(ParallelStyle):
    """Cuts one layer and converts what enters and leaves it.

    ``cut``: gives the new parameter for a parameter of the layer and its axis; the same object for the
    same parameter, so that ties stay. ``sequence``: the residual stream is cut over the sequence.
    """

    def __init__(
        self,
        name: str,
        row: StyleRow,
        cut: Callable[[nn.Parameter, int | None], nn.Parameter],
        *,
        sequence: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.row = row
        self.cut = cut
        self.sequence = sequence
        self._stream: Placement = Shard(SEQUENCE_DIM) if sequence else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter, leave = self._borders()
        buffers = dict(module._buffers)
        module._buffers.clear()  # distribute_module would broadcast them and make them DTensors
        try:
            return distribute_module(module, device_mesh, self._cut_params, enter, leave)
        finally:
            module._buffers.update(buffers)

    def _cut_params(self, _name: str, module: nn.Module, _mesh: DeviceMesh) -> None:
        for leaf, param in list(module._parameters.items()):
            if param is not None:
                module.register_parameter(leaf, self.cut(param, self.row.axis(leaf)))

    def _borders(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return {
            "colwise": (self._whole_in, self._cut_out),
            "colwise_by_head": (self._whole_in, self._cut_out),
            "colwise_gather": (self._whole_in, self._gathered_out),
            "rowwise": (self._cut_in, self._added_out),
            "rowwise_split": (self._split_in, self._added_out),
            "vocab": (self._ids_in, self._added_out),
            "head_norm": (self._heads_in, self._local_out),
            "sequence": (self._sequence_in, self._sequence_out),
            "replicate": (self._stream_in, self._stream_out),
        }[self.row.name]

    # ------------------------------------------------------------------ what enters

    def _whole_in(self, _module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
        x = self._first(inputs)
        if isinstance(x, DTensor):
            return x.redistribute(placements=[Replicate()])
        if self.sequence:
            self._fail(
                "got a plain tensor, but the plan cuts the residual stream over the sequence, so the "
                "input of this layer would be a part of it. Give the norm before this layer the "
                'style "sequence".'
            )
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    def _cut_in(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
        x = self._first(inputs)
        if isinstance(x, DTensor):
            return x.redistribute(placements=[Shard(-1)])
        width = int(module.in_features)  # type: ignore[arg-type]
        begin, end = part(width, mesh.size(), mesh.get_local_rank())
        if x.shape[-1] != end - begin:
            self._fail(
                f"got {x.shape[-1]} features, but this tensor rank has the {end - begin} columns from "
                f"{begin} of {width}. The layer that computes its input must have the style "
                '"colwise"; for an input that is whole, use "rowwise_split".'
            )
        return as_dtensor(x, torch.Size((*x.shape[:-1], width)), x.ndim - 1, mesh)

    def _split_in(self, _module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
        whole = self._whole_in(_module, inputs, mesh)
        return whole.redistribute(placements=[Shard(whole.ndim - 1)])

    def _ids_in(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
        ids = self._first(inputs)
        if isinstance(ids, DTensor):
            return ids
        count = int(module.num_embeddings)  # type: ignore[arg-type]
        if ids.device.type == "cpu" and ids.numel() and not 0 <= ids.min() <= ids.max() < count:
            self._fail(
                f"got the index {int(ids.max())} (smallest {int(ids.min())}), but it has {count} rows. "
                "No tensor rank has that row, so the result would be zero."
            )
        return DTensor.from_local(ids, mesh, [Replicate()], run_check=False)

    def _stream_in(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
        embeds = isinstance(module, nn.Embedding)
        return (self._ids_in if embeds else self._sequence_in)(module, inputs, mesh)

    def _heads_in(self, _module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
        x = self._first(inputs)
        if x.ndim < 2:
            self._fail(f"got {x.ndim} dimension(s), but its input must be [..., heads, head size].")
        if isinstance(x, DTensor):
            return x
        return DTensor.from_local(x, mesh, [Shard(x.ndim - 2)], run_check=False)

    def _sequence_in(self, _module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
        x = self._first(inputs)
        if x.ndim != 3:
            self._fail(
                f"got {x.ndim} dimension(s), but activations that are cut over the sequence must be "
                "[batch, sequence, features]."
            )
        if isinstance(x, DTensor):
            return x.redistribute(placements=[self._stream])
        return DTensor.from_local(x, mesh, [self._stream], run_check=False)

    # ------------------------------------------------------------------ what leaves

    def _cut_out(self, _module: nn.Module, y: DTensor, _mesh: DeviceMesh) -> Tensor:
        return y.redistribute(placements=[Shard(y.ndim - 1)]).to_local()

    def _gathered_out(self, _module: nn.Module, y: DTensor, _mesh: DeviceMesh) -> Tensor:
        return y.redistribute(placements=[Replicate()]).to_local()

    def _added_out(self, _module: nn.Module, y: DTensor, mesh: DeviceMesh) -> Tensor:
        if self.sequence:
            self._check_sequence(y.shape, SEQUENCE_DIM, mesh)
        return y.redistribute(placements=[self._stream]).to_local()

    def _stream_out(self, _module: nn.Module, y: DTensor, mesh: DeviceMesh) -> Tensor:
        self._check_sequence(y.shape, y.ndim - 2, mesh)  # a table of positions gives [T, features]
        return y.redistribute(placements=[Shard(y.ndim - 2)]).to_local()

    def _local_out(self, _module: nn.Module, y: DTensor, _mesh: DeviceMesh) -> Tensor:
        return y.to_local()

    def _sequence_out(self, _module: nn.Module, y: DTensor, _mesh: DeviceMesh) -> DTensor:
        return y.redistribute(placements=[Replicate()])

    # ------------------------------------------------------------------ checks

    def _first(self, inputs: Any) -> Any:
        if not inputs or not isinstance(inputs[0], Tensor):
            self._fail(
                "was called without a tensor as its first positional argument, and only that one "
                "is converted for tensor parallelism. Call it as layer(x)."
            )
        return inputs[0]

    def _check_sequence(self, shape: torch.Size, dim: int, mesh: DeviceMesh) -> None:
        if len(shape) <= dim or dim < 0:
            self._fail(
                f"gives {len(shape)} dimension(s), but activations that are cut over the sequence must "
                "be [batch, sequence, features]."
            )
        if shape[dim] % mesh.size():
            self._fail(
                f"gives a sequence of length {shape[dim]}, which {mesh.size()} tensor ranks cannot cut "
                "into equal parts. Pad the sequence and ignore the padding in the loss, or leave "
                'the style "sequence" out of the plan.'
            )

    def _fail(self, what: str) -> NoReturn:
        raise UsageError(f'{self.name!r} (tensor parallel, style "{self.row.name}") {what}')
