"""Tensor parallelism by a plan: a plain model becomes one that has a part of its layers on each rank.

A plan names layers by globs and says how each is cut:

    {"blocks.*.attn.[qkv]": "colwise", "blocks.*.attn.o": "rowwise", "embed": "vocab"}

A glob has as many parts between dots as the names it matches; ``*`` stands for anything within one part.
The styles are :data:`zeroshard.parallel.tensor_styles.STYLES`. ``"auto"`` derives the plan from the
model.

:func:`tensor_parallel` decides first, from the model, the plan and the number of tensor ranks alone.
Then the tensor ranks compare what they decided and the values they have, through the store. Then each
rank cuts its own copy, layer by layer, without any collective. Cut parameters become ``DTensor``
parameters; others stay as they are and are equal on all tensor ranks.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from zeroshard.comm.dtensors import HEAD_DIMS, is_part
from zeroshard.comm.env import local_device
from zeroshard.comm.fused_dtensors import mark_fused
from zeroshard.errors import UsageError
from zeroshard.parallel.auto_plan import derive_plan
from zeroshard.parallel.cut_layer import (
    CutLayer,
    RegionStreams,
    SharedInput,
    draws,
    share_inputs,
    starts_region,
)
from zeroshard.parallel.heads import (
    GROUPS,
    HeadCount,
    fused_sizes,
    head_counts,
    key_value_copies,
)
from zeroshard.parallel.initial_values import draw_own_values
from zeroshard.parallel.plan_checks import (
    agree,
    agreed_seed,
    announce_failure,
    check_layer,
    check_model,
    check_stream,
    waiting_for_tensor_ranks,
)
from zeroshard.parallel.tensor_styles import (
    STYLES,
    StyleRow,
    as_dtensor,
    generic,
    local_part,
    row_of,
)
from zeroshard.parallel.whole_copy import note_uncut
from zeroshard.zero.materialize import check_meta

logger = logging.getLogger("zeroshard")

TENSOR_DIMS = ("tensor", "tp", "model")
"""Names of the tensor dimension in meshes of ZeroShard, torchtitan and DeepSpeed."""


CALLER = "the caller"
"""The source of a plan that is given by names."""


@dataclass(frozen=True)
class CutWeight:
    """One parameter that is cut: its first name, its shape in the model, and the axis.

    ``sizes``: of the matrices that it joins along this axis; empty if it is one matrix.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class TensorPlan:
    """What tensor parallelism does to one model. A function of model, plan and ``size`` alone.

    ``styles``: the style of each named layer. ``fused``: for a layer that joins several matrices, their
    sizes. ``copies``: for a layer of fewer key/value heads than ranks, how many ranks share each head.
    ``cuts``: the parameters that are cut. ``heads``: numbers of heads that are divided.
    ``sequence``: the residual stream is cut over the sequence. ``source``:
    where the plan comes from.
    """

    size: int
    styles: Mapping[str, str]
    fused: Mapping[str, tuple[int, ...]]
    copies: Mapping[str, int]
    cuts: tuple[CutWeight, ...]
    heads: tuple[HeadCount, ...]
    sequence: bool
    source: str

    @property
    def text(self) -> str:
        """The plan in lines, for a log: layers that differ only in a number are on one line."""
        rows: dict[tuple[str, str], int] = defaultdict(int)
        for name, style in self.styles.items():
            rows[(generic(name), style)] += 1
        lines = [f"tensor parallel over {self.size} ranks, plan from {self.source}:"]
        lines += [f"  {name} (x{count}): {style}" for (name, style), count in rows.items()]
        heads = {(h.attribute, h.whole, h.own) for h in self.heads}
        lines += [f"  {name}: {whole} -> {own} on each rank" for name, whole, own in sorted(heads)]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class AppliedPlan:
    """A plan that was applied. ``replaced``: parameters of the model before -> its parameters now."""

    plan: TensorPlan
    replaced: Mapping[nn.Parameter, nn.Parameter]

    def renewed(self, params: Iterable[Any]) -> list[Any]:
        """``params`` with the model's parameters of now: parameters, named pairs, or param groups."""
        return [self._renewed(member) for member in params]

    def renew_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer that was built before train the model's parameters of now.

        Raises:
            UsageError: it has state of a parameter that was cut.
        """
        if any(param in optimizer.state for param in self.replaced):
            raise UsageError(
                f"the optimizer ({type(optimizer).__name__}) has state of whole parameters, and "
                "the model was cut after it had trained. Cut the model first, and build the optimizer "
                "over its parameters."
            )
        for group in optimizer.param_groups:
            group["params"] = self.renewed(group["params"])

    def _renewed(self, member: Any) -> Any:
        if isinstance(member, dict):
            return {**member, "params": self.renewed(_listed(member["params"]))}
        if isinstance(member, tuple):
            return (member[0], self._renewed(member[1]))
        return self.replaced.get(member, member)


def _listed(params: Any) -> Iterable[Any]:
    return [params] if isinstance(params, torch.Tensor) else params


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    plan: Mapping[str, str] | str = "auto",
    *,
    seed: int | None = None,
) -> nn.Module:
    """Cut the layers of ``model`` over the tensor ranks; returns the same model. Collective.

    ``mesh``: a one-dimensional mesh, a mesh with a dimension named ``tensor``, ``tp`` or ``model``, or a
    process group. ``plan``: globs and styles, or ``"auto"``. A model on the meta device gets its values
    here, the same for any number of tensor ranks; ``seed`` is for them, default: the first rank's
    ``torch.initial_seed()``. A model that has values must have the same on all tensor ranks.

    Cut parameters are new objects, so build optimizers afterwards. Ties stay.

    Raises:
        UsageError: model, plan and mesh do not fit together; the same text on every rank.
        RankMismatch: tensor ranks have different plans, models or values.
    """
    made = apply_plan(model, mesh, plan, seed=seed).plan
    if made.size > 1 and dist.get_rank() == 0:
        logger.info("%s", made.text)
    return model


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    plan: Mapping[str, str] | str = "auto",
    *,
    seed: int | None = None,
    check: Callable[[Sequence[int]], None] | None = None,
) -> AppliedPlan:
    """Like :func:`tensor_parallel`, but returns what was done, and logs nothing.

    ``check(missing)`` gets the positions of tensor ranks that this one waits for, a few times a second.
    It may end the wait by raising. None: the watchdog ends it if one of them ended, is frozen or late.

    Raises:
        RankLost: the process of a tensor rank ended, or failed after it had joined the ranks.
    """
    mesh = tensor_mesh(mesh)
    try:
        made = decide(model, mesh.size(), plan)
        check_meta(model)
    except Exception as error:
        announce_failure(mesh, error)
        raise
    waiting = contextlib.nullcontext(check) if check else waiting_for_tensor_ranks(mesh)
    with waiting as look:
        agree(mesh, model, made.styles, look)
        if any(param.is_meta for param in model.parameters()):
            seed = agreed_seed(mesh, seed, look)
    return AppliedPlan(made, _cut(model, mesh, made, seed or 0))


def neighbours(size: int) -> DeviceMesh:
    """The mesh of this rank's ``size`` tensor ranks, which are neighbours. Collective over all ranks.

    ``size`` must divide the number of ranks. The tensor dimension of a :class:`zeroshard.core.mesh.Mesh`
    is the innermost, so its groups are these.
    """
    shape = (dist.get_world_size() // size, size)
    with unset_fake_temporarily():  # a device mesh reads its own numbers
        names = ("others", "tensor")
        return init_device_mesh(local_device().type, shape, mesh_dim_names=names)["tensor"]


def tensor_mesh(mesh: DeviceMesh | dist.ProcessGroup) -> DeviceMesh:
    """The one-dimensional mesh of the tensor ranks.

    Raises:
        UsageError: the mesh has several dimensions and none is named for tensor parallelism.
    """
    if isinstance(mesh, dist.ProcessGroup):
        return DeviceMesh.from_group(mesh, local_device().type, mesh_dim_names=("tensor",))
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"mesh is a {type(mesh).__name__}, neither a DeviceMesh nor a process group. Pass the mesh "
            "of the tensor ranks, such as init_device_mesh(...)['tp']."
        )
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names or ()
    for name in TENSOR_DIMS:
        if name in names:
            return mesh[name]
    raise UsageError(
        f"the mesh has {mesh.ndim} dimensions {tuple(names)}, and none is named "
        f"{' or '.join(map(repr, TENSOR_DIMS))}. Pass the one-dimensional mesh of the tensor ranks."
    )


# ---------------------------------------------------------------------- deciding


def decide(model: nn.Module, size: int, plan: Mapping[str, str] | str) -> TensorPlan:
    """What ``plan`` does to ``model`` on ``size`` tensor ranks. Changes nothing and needs no ranks.

    Raises:
        UsageError: model and plan do not fit together, or ``size`` does not fit the model.
    """
    check_model(model)
    plan, source = derive_plan(model, size) if plan == "auto" else (plan, CALLER)
    styles = _matched(model, plan)
    rows = {name: row_of(style, model.get_submodule(name)) for name, style in styles.items()}
    by_style: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        by_style[row.name].append(name)
    sequence = "sequence" in by_style
    copies = key_value_copies(model, by_style["colwise"], size)
    for name, row in rows.items():
        check_layer(name, model.get_submodule(name), row, size // copies.get(name, 1))
    fused = {
        name: fused_sizes(model, name, styles[name], size) for name in by_style["colwise_fused"]
    }
    if sequence:
        check_stream(model, rows)
    cuts = _cut_weights(model, rows, fused)
    colwise = {
        name: fused.get(name, ())
        for name, row in rows.items()
        if row.name in ("colwise", "colwise_by_head", "colwise_fused")
    }
    heads = head_counts(model, colwise, size, copies) if size > 1 else []
    if source == "transformers":  # these models compute the number of heads from the shape
        heads = [count for count in heads if count.attribute in GROUPS]
    return TensorPlan(size, styles, fused, copies, tuple(cuts), tuple(heads), sequence, source)


def _matched(model: nn.Module, plan: Mapping[str, str] | str) -> dict[str, str]:
    """Style by name of a layer, in the model's order."""
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            f'plan is {plan!r}. Pass "auto", or a dict of globs and styles such as '
            '{"blocks.*.mlp.up": "colwise"}.'
        )
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, tuple[str, str]] = {}
    for glob, style in plan.items():
        if str(style).partition(":")[0] not in STYLES:
            close = difflib.get_close_matches(str(style), STYLES, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(
                f"plan: {glob!r} has the unknown style {style!r}.{hint} Styles: {', '.join(STYLES)}."
            )
        matches = [name for name in names if _matches(name, glob)]
        if not matches:
            raise UsageError(
                f"plan: {glob!r} matches no module of the model, so nothing would be cut there."
                f"{_similar(glob, names)}"
            )
        for name in matches:
            other, before = found.setdefault(name, (glob, style))
            if before != style:
                raise UsageError(
                    f"plan: {name!r} matches {other!r} with the style {before!r} and {glob!r} with the "
                    f"style {style!r}. Change one of the globs so that each layer has one style."
                )
    return {name: found[name][1] for name in names if name in found}


def _matches(name: str, glob: str) -> bool:
    tokens, patterns = name.split("."), glob.split(".")
    return len(tokens) == len(patterns) and all(map(fnmatchcase, tokens, patterns))


def _similar(glob: str, names: list[str]) -> str:
    generic_names = dict.fromkeys(map(generic, names))
    close = difflib.get_close_matches(glob, generic_names, n=3, cutoff=0.5)
    return (
        f" Similar names: {', '.join(close)}." if close else " Globs name modules, not parameters."
    )


def _cut_weights(
    model: nn.Module, rows: Mapping[str, StyleRow], fused: Mapping[str, tuple[int, ...]]
) -> list[CutWeight]:
    """The parameters that are cut, each once."""
    users: dict[nn.Parameter, list[tuple[str, str, _Cut]]] = {}
    for name, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            axis = rows[name].axis(leaf) if name in rows else None
            users.setdefault(param, []).append((name, leaf, (axis, fused.get(name, ()))))
    cuts = []
    for param, uses in users.items():
        ways = {way for _, _, way in uses}
        if len(ways) > 1:
            (first, leaf, way), (second, _, other) = (
                uses[0],
                next(u for u in uses if u[2] != uses[0][2]),
            )
            raise UsageError(
                f"plan: {first!r} and {second!r} share one {leaf}, of shape {tuple(param.shape)}. The "
                f"plan cuts it {_on(way)} in the first and {_on(other)} in the second. Give both a "
                'style that cuts the same axis, such as "vocab" for the embedding and '
                '"colwise_gather" for the head, or untie them.'
            )
        axis, sizes = ways.pop()
        if axis is not None:
            cuts.append(CutWeight(f"{uses[0][0]}.{uses[0][1]}", tuple(param.shape), axis, sizes))
    return cuts


_Cut = tuple[int | None, tuple[int, ...]]
"""How a layer cuts a parameter: the axis, and the sizes of fused matrices."""


def _on(way: _Cut) -> str:
    axis, sizes = way
    if axis is None:
        return "nowhere"
    return f"on axis {axis}" + (f" in matrices of the sizes {list(sizes)}" if sizes else "")


# ---------------------------------------------------------------------- cutting


def _cut(
    model: nn.Module, mesh: DeviceMesh, plan: TensorPlan, seed: int
) -> dict[nn.Parameter, nn.Parameter]:
    """Cut the model, module by module, and return the new parameter for each one that is replaced.

    Of a model on the meta device, one module at a time is whole.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # the old objects are kept: ids must stay unique
    shared, meshes = SharedInput(), functools.cache(partial(head_mesh, mesh))
    sharing = share_inputs(plan.styles)
    device = torch.device(mesh.device_type)
    streams = None
    if any(map(draws, model.modules())):
        streams = RegionStreams(mesh.get_local_rank(), device)
    for name, module in list(model.named_modules()):
        for leaf, param in module._parameters.items():
            if param in made:  # before draw_own_values could fill it a second time
                module._parameters[leaf] = made[param]
        draw_own_values(name, module, seed, device)
        style = plan.styles.get(name)
        if plan.size == 1 or style is None or (style == "replicate" and not plan.sequence):
            continue
        common = shared if name in sharing or not style.startswith("colwise") else None
        where = meshes(plan.copies.get(name, 1))
        cutter = partial(_new_param, mesh=where, made=made, sizes=plan.fused.get(name, ()))
        layer = CutLayer(
            name,
            row_of(style, module),
            cutter,
            common,
            sequence=plan.sequence,
            streams=streams,
            starts_region=starts_region(name, plan.styles),
        )
        note_uncut(module, by_sequence=plan.sequence, counts={})
        parallelize_module(module, mesh, layer, src_data_rank=None)
    for count in plan.heads:
        module = model.get_submodule(count.module)
        counts = {count.attribute: count.whole}
        note_uncut(module, by_sequence=plan.sequence, counts=counts)
        setattr(module, count.attribute, count.own)
    return made


def _new_param(
    param: nn.Parameter,
    axis: int | None,
    *,
    mesh: DeviceMesh,
    made: dict[nn.Parameter, nn.Parameter],
    sizes: tuple[int, ...],
) -> nn.Parameter:
    """The parameter that replaces ``param``: this rank's part of it, as a DTensor."""
    if isinstance(param, DTensor):  # tied, and cut at its first use
        return param
    if param not in made:
        values = as_dtensor(local_part(param, axis, mesh, sizes), param.shape, axis, mesh)
        new = nn.Parameter(values, requires_grad=param.requires_grad)
        # A cache of torch may give the result of detach() in nn.Parameter() an equal mesh of an earlier
        # session, whose groups are gone.
        new._spec = values._spec  # type: ignore[attr-defined]
        new.__dict__.update(param.__dict__)
        if sizes:
            mark_fused(new, sizes)
        made[param] = new
    return made[param]


def head_mesh(mesh: DeviceMesh, copies: int) -> DeviceMesh:
    """The mesh for layers of which ``copies`` neighbouring tensor ranks share each part.

    Collective in the tensor group if ``copies`` is above 1.
    """
    if copies == 1:
        return mesh
    with unset_fake_temporarily():  # a device mesh reads its own numbers
        ranks = mesh.mesh.view(-1, copies)
        row, column = divmod(mesh.get_local_rank(), copies)
        groups = [
            dist.new_group(members.tolist(), use_local_synchronization=True)
            for members in (ranks[:, column], ranks[row])
        ]
        return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=HEAD_DIMS)


def is_cut(model: nn.Module) -> bool:
    """Whether the model has parameters that are parts of global tensors: it needs no plan any more."""
    return any(isinstance(param, DTensor) or is_part(param) for param in model.parameters())
