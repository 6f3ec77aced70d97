"""Cuts one layer over tensor ranks by a style, and converts what enters and leaves it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import ParallelStyle

from zeroshard.comm.dtensors import mark_addends
from zeroshard.errors import UsageError
from zeroshard.parallel.dropout_streams import RegionStreams
from zeroshard.parallel.tensor_styles import (
    SEQUENCE_DIM,
    SharedInput,
    StyleRow,
    as_dtensor,
    compute_locally,
    features,
    kind_of,
    look_up,
    moved,
    multiply,
    part,
)
from zeroshard.parallel.tensor_sums import add_values


class CutLayer(ParallelStyle):
    """Cuts one layer and converts what enters and leaves it.

    ``cut``: gives the new parameter for a parameter of the layer and its axis; the same object for the
    same parameter, so that ties stay. ``shared``: one object for all layers that may share inputs; None:
    this layer's input is its own. ``sequence``: the residual stream is cut over the sequence.
    ``streams``: the generators of regions that are cut over features; None: the model draws nothing.
    ``starts_region``: such a region begins after this layer.
    """

    def __init__(
        self,
        name: str,
        row: StyleRow,
        cut: Callable[[nn.Parameter, int | None], nn.Parameter],
        shared: SharedInput | None,
        *,
        sequence: bool,
        streams: RegionStreams | None = None,
        starts_region: bool = False,
    ) -> None:
        super().__init__()
        self.streams = streams
        self.starts_region = starts_region
        self.name = name
        self.row = row
        self.cut = cut
        self.shares = shared is not None
        self.shared = shared or SharedInput()
        self.sequence = sequence
        self._stream: Placement = Shard(SEQUENCE_DIM) if sequence else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter, leave = self._borders()
        buffers = dict(module._buffers)
        module._buffers.clear()  # distribute_module would broadcast them and make them DTensors
        try:
            distribute_module(module, device_mesh, self._cut_params, enter, leave)
        finally:
            module._buffers.update(buffers)
            del self.cut  # the layer's hooks keep this object, and it knows all whole parameters
        forward: Any = module.forward
        if kind_of(module) == "Conv1D":
            forward = partial(multiply, module)
        if isinstance(module, nn.Embedding) and self.row.name == "vocab":
            module.forward = partial(look_up, module, forward, device_mesh)  # type: ignore[method-assign]
        elif self.row.weight_axis is not None:
            # The bias of a row-parallel layer is added after the sum over tensor ranks.
            leaves = ("weight",) if self.row.bias_axis is None else ("weight", "bias")
            module.forward = partial(compute_locally, module, forward, leaves)  # type: ignore[method-assign]
        return module

    def _cut_params(self, _name: str, module: nn.Module, _mesh: DeviceMesh) -> None:
        for leaf, param in list(module._parameters.items()):
            if param is not None:
                new: Any = self.cut(param, self.row.axis(leaf))
                module.register_parameter(leaf, new)
                if self.row.axis(leaf) is None:
                    mark_addends(new, self._gives_addends(module))
                elif new.device_mesh.ndim > 1:  # key/value heads, read by this rank's query heads
                    mark_addends(new, adds=True)

    def _gives_addends(self, module: nn.Module) -> bool:
        """Whether gradients of whole parameters are of this rank's tokens or heads only.

        An embedding looks up all tokens on every rank.
        """
        if self.row.name == "head_norm":
            return True
        return self.sequence and not isinstance(module, nn.Embedding)

    def _borders(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return {
            "colwise": (self._shared_in, self._cut_out),
            "colwise_by_head": (self._shared_in, self._cut_out),
            "colwise_fused": (self._shared_in, self._cut_out),
            "colwise_gather": (self._whole_in, self._gathered_out),
            "rowwise": (self._cut_in, self._added_out),
            "rowwise_split": (self._split_in, self._added_out),
            "vocab": (self._checked_ids, self._added_out),
            "head_bias": (self._ids_inside, self._inside_out),
            "head_norm": (self._heads_in, self._local_out),
            "sequence": (self._sequence_in, self._sequence_out),
            "replicate": (self._stream_in, self._stream_out),
        }[self.row.name]

    # ------------------------------------------------------------------ what enters

    def _whole_in(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Tensor:
        self._end_region()
        whole = self._marked(module, inputs, mesh)
        self.shared.forget()
        return whole

    def _shared_in(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Tensor:
        return (self._marked if self.shares else self._whole_in)(module, inputs, mesh)

    def _marked(self, _module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Tensor:
        x = self._first(inputs)
        if self.sequence and not isinstance(x, DTensor):
            self._fail(
                "got a plain tensor, but the plan cuts the residual stream over the sequence, so the "
                "input of this layer would be a part of it. Give the norm before this layer the "
                'style "sequence".'
            )
        return self.shared.of(x, mesh)

    def _cut_in(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Tensor:
        self._end_region()
        self.shared.forget()
        x: Tensor = self._first(inputs)
        if isinstance(x, DTensor):
            return moved(x, Shard(x.ndim - 1)).to_local()
        width, _ = features(module)
        begin, end = part(width, mesh.size(), mesh.get_local_rank())
        if x.shape[-1] != end - begin:
            self._fail(
                f"got {x.shape[-1]} features, but this tensor rank has the {end - begin} columns from "
                f"{begin} of {width}. The layer that computes its input must have the style "
                '"colwise"; for an input that is whole, use "rowwise_split".'
            )
        return x

    def _split_in(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Tensor:
        whole = self._whole_in(module, inputs, mesh)
        begin, end = part(whole.shape[-1], mesh.size(), mesh.get_local_rank())
        return whole[..., begin:end]

    def _ids_in(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
        ids = self._checked_ids(module, inputs, mesh)
        return DTensor.from_local(ids, mesh, [Replicate()], run_check=False)

    def _checked_ids(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Tensor:
        self._end_region()
        return self._ids_inside(module, inputs, mesh)

    def _ids_inside(self, module: nn.Module, inputs: Any, _mesh: DeviceMesh) -> Tensor:
        """Indices that enter a layer inside a region that is cut over heads, which goes on after it."""
        ids: Tensor = self._first(inputs)
        if isinstance(ids, DTensor):
            ids = moved(ids, Replicate()).to_local()
        count = int(module.num_embeddings)  # type: ignore[arg-type]
        has_values = ids.device.type == "cpu" and not isinstance(ids, FakeTensor)
        if has_values and ids.numel() and not 0 <= ids.min() <= ids.max() < count:
            self._fail(
                f"got the index {int(ids.max())} (smallest {int(ids.min())}), but it has {count} rows. "
                "No tensor rank has that row, so the result would be zero."
            )
        return ids

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
            return moved(x, self._stream)
        return DTensor.from_local(x, mesh, [self._stream], run_check=False)

    # ------------------------------------------------------------------ what leaves

    def _cut_out(self, module: nn.Module, y: Tensor, _mesh: DeviceMesh) -> Tensor:
        if self.streams is not None and self.starts_region and module.training:
            self.streams.open()
        return y

    def _end_region(self) -> None:
        if self.streams is not None:
            self.streams.close()

    def _gathered_out(self, module: nn.Module, y: Tensor, mesh: DeviceMesh) -> Tensor:
        _, width = features(module)
        parts = as_dtensor(y, torch.Size((*y.shape[:-1], width)), y.ndim - 1, mesh)
        return moved(parts, Replicate()).to_local()

    def _added_out(self, module: nn.Module, y: Tensor, mesh: DeviceMesh) -> Tensor:
        if self.sequence:
            self._check_sequence(y.shape, SEQUENCE_DIM, mesh)
            addends = DTensor.from_local(y, mesh, [Partial()], run_check=False)
            total = moved(addends, self._stream).to_local()
        else:
            total = add_values(y, mesh.get_group())
        bias: Any = module._parameters.get("bias")
        if bias is None:
            return total
        # Of a stream cut over the sequence, each rank's gradient counts its own tokens only.
        own: Tensor = bias.to_local(grad_placements=[Partial()] if self.sequence else None)
        return total + own

    def _stream_out(self, _module: nn.Module, y: DTensor, mesh: DeviceMesh) -> Tensor:
        self._check_sequence(y.shape, y.ndim - 2, mesh)  # a table of positions gives [T, features]
        return moved(y, Shard(y.ndim - 2)).to_local()

    def _inside_out(self, _module: nn.Module, y: Tensor, _mesh: DeviceMesh) -> Tensor:
        return y

    def _local_out(self, _module: nn.Module, y: DTensor, _mesh: DeviceMesh) -> Tensor:
        return y.to_local()

    def _sequence_out(self, _module: nn.Module, y: DTensor, _mesh: DeviceMesh) -> DTensor:
        return moved(y, Replicate())

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
