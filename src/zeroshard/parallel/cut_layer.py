"""Cuts one layer over tensor ranks by a style, and converts what enters and leaves it.

Between a column-parallel and a row-parallel layer is a *region* whose activations are cut over features.
Outside, activations are equal on all tensor ranks, so dropout must draw equal masks there. Inside, each
rank has other features or heads, and equal generators would drop the same positions in all of them. So a
region starts with one draw from the common generator. This number and the tensor rank seed the generators
for the region. At its end they continue where they were. A region's numbers depend on the state of the
common generator only. Activation checkpointing, which restores that state, therefore draws them again,
and a checkpoint of the run needs no further state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
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
from zeroshard.device.choice import ops_of
from zeroshard.errors import UsageError
from zeroshard.parallel.tensor_styles import (
    SEQUENCE_DIM,
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
from zeroshard.parallel.tensor_sums import add_gradients, add_values

_ODD = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: seeds of neighbouring ranks differ in many bits


class RegionStreams:
    """The generators of one rank for the regions of one model. ``rank``: in its tensor group.

    The CPU's generator and that of ``device`` change together. A region costs a few microseconds on the
    CPU, and no wait for an accelerator.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._ops = ops_of(device)
        self._common: tuple[Tensor, Tensor | None] | None = None

    def open(self) -> None:
        """Begin a region, unless one is open."""
        if self._common is not None:
            return
        draw = int(torch.randint(2**62, (), device="cpu"))
        seed = (draw + (self._rank + 1) * _ODD) % 2**63
        self._common = torch.default_generator.get_state(), self._ops.rng_state()
        torch.default_generator.manual_seed(seed)
        self._ops.manual_seed(seed)

    def close(self) -> None:
        """End the region, if one is open."""
        if self._common is None:
            return
        (common, on_device), self._common = self._common, None
        torch.default_generator.set_state(common)
        if on_device is not None:
            self._ops.set_rng_state(on_device)


def draws(module: nn.Module) -> bool:
    """Whether the module draws random numbers, as layers of torch or attributes of models say."""
    rates = [getattr(module, name, 0.0) for name in ("p", "dropout", "attention_dropout")]
    return any(isinstance(rate, float) and rate > 0.0 for rate in rates)


def starts_region(name: str, styles: Mapping[str, str]) -> bool:
    """Whether a region begins after the layer: it is column-parallel, and a row-parallel layer ends it.

    The row-parallel layer comes later in the model. The two belong to one module, or to two neighbouring
    ones, such as ``attention.self.query`` and ``attention.output.dense``.

    >>> plan = {"mlp.up": "colwise", "mlp.down": "rowwise", "head": "colwise"}
    >>> [starts_region(name, plan) for name in plan]
    [True, False, False]
    """
    if not styles[name].startswith("colwise") or styles[name] == "colwise_gather":
        return False
    near, names = _owners(name), list(styles)
    later = names[names.index(name) :]
    return any(styles[other] == "rowwise" and near & _owners(other) for other in later)


def _owners(name: str) -> set[str]:
    parent = name.rpartition(".")[0]
    return {parent, parent.rpartition(".")[0]} - {""} or {""}


class SharedInput:
    """The whole input that several column-parallel layers read, as one tensor.

    q, k and v read the same tensor. If each marked it by itself, backward would have an all-reduce for
    each of them. With one mark, autograd adds their gradients first. It is kept until the next layer that
    is not column-parallel, and so keeps no graph alive.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._key: tuple[int, bool] = (-1, False)
        self._made: Tensor | None = None

    def of(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """``x``, equal on all tensor ranks, with gradients to be added; one object for the same ``x``.

        A DTensor adds them itself.
        """
        key = (x._version, torch.is_grad_enabled())
        if (
            self._made is None
            or self._source is None
            or self._source() is not x
            or self._key != key
        ):
            if isinstance(x, DTensor):
                self._made = moved(x, Replicate()).to_local(grad_placements=[Partial()])
            else:
                self._made = add_gradients(x, mesh.get_group())
            self._source, self._key = weakref.ref(x), key
        return self._made

    def forget(self) -> None:
        """Drop the tensor."""
        self._source = self._made = None


def share_inputs(styles: Mapping[str, str]) -> set[str]:
    """The column-parallel layers that may read one input: those with a sibling that is one too.

    >>> plan = {"a.q": "colwise", "a.k": "colwise", "a.o": "rowwise", "head": "colwise"}
    >>> share_inputs(plan) == {"a.q", "a.k"}
    True
    """
    owners: dict[str, set[str]] = {}
    for name, style in styles.items():
        if style.startswith("colwise"):
            owners.setdefault(name.rpartition(".")[0], set()).add(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


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
            "head_bias": (self._ids_inside, lambda _, y, __: y),
            "head_norm": (self._heads_in, lambda _, y, __: y.to_local()),
            "sequence": (self._sequence_in, lambda _, y, __: moved(y, Replicate())),
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
        if not isinstance(module, nn.Embedding):
            return self._sequence_in(module, inputs, mesh)
        ids = self._checked_ids(module, inputs, mesh)
        return DTensor.from_local(ids, mesh, [Replicate()], run_check=False)

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
