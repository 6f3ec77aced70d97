"""Checks before a model is cut: that each layer can be, and that all tensor ranks would do the same.

Tensor ranks compare plans, models and values by short texts in the store of ``torch.distributed``, not by
a collective. So a rank that differs becomes an error on all of them, not a hang or a wrong number.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroshard.comm.agreement import alike_plans, mismatch_text, plans_of, post_plan
from zeroshard.comm.connect import default_store
from zeroshard.comm.env import run_name
from zeroshard.comm.store_keys import FAILED, Rendezvous, namespace, no_check, ranks_key
from zeroshard.core.texts import rank_ranges
from zeroshard.errors import RankMismatch, UsageError, in_short
from zeroshard.parallel.cut_layer import draws
from zeroshard.parallel.heads import FUSED
from zeroshard.parallel.tensor_styles import StyleRow, kind_of, part
from zeroshard.session.join import waiting_for_partners
from zeroshard.zero.param_bucket import fingerprint_of
from zeroshard.zero.sharded_parameter import owner_of


def check_model(model: Any) -> None:
    """Check that it is a module whose parameters are whole, plain ones."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is a {type(model).__name__}, not a torch.nn.Module. Pass the model itself."
        )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise UsageError(
                f"parameter {name!r} is a DTensor with placements {param.placements}: the model has "
                "been cut already. Pass a plain model, or leave the plan out."
            )
        if owner_of(param) is not None:
            raise UsageError(
                f"parameter {name!r} belongs to an engine or to zero.Init, which has sharded it. Cut "
                "the model for tensor parallelism first, and pass it to initialize() afterwards."
            )


def check_layer(name: str, module: nn.Module, row: StyleRow, size: int) -> None:
    """Check that the style fits the layer and that the layer can be cut into ``size`` parts."""
    kind = kind_of(module)
    if kind not in row.kinds:
        names = {"norm": "a norm", "Conv1D": "Conv1D of Transformers"}
        fits = " or ".join(names.get(kind, f"nn.{kind}") for kind in row.kinds)
        raise UsageError(
            f'plan: {name!r} is a {type(module).__name__}, and the style "{row.name}" fits {fits} '
            "only. Name the layers inside it, or leave it out of the plan."
        )
    _check_contents(name, module)
    _check_options(name, module, row)
    if row.name == "colwise" and FUSED.search(name.rpartition(".")[2].lower()):
        raise UsageError(
            f"plan: {name!r} looks like several projections in one weight. A cut through all of its "
            "rows would give the first rank all of the first and none of the last. If they lie one "
            'after another, use the style "colwise_fused". If its rows are ordered head by head (q, k '
            'and v of head 0, then of head 1, ...), use "colwise_by_head".'
        )
    if row.weight_axis is None:
        return
    extent = module.get_parameter("weight").shape[row.weight_axis]
    if row.name in ("vocab", "colwise_gather"):  # uneven parts meet in one tensor
        begin, end = part(extent, size, size - 1)
        if begin == end:
            raise UsageError(
                f"plan: {name!r} has {extent} rows. In parts of {part(extent, size, 0)[1]} the last of "
                f"{size} tensor ranks would have none. Use fewer tensor ranks."
            )
        return
    if extent % size:
        what = "out_features" if row.bias_axis == 0 else "in_features"
        if kind == "Embedding":
            what = "embedding_dim"
        raise UsageError(
            f"plan: {name!r} has {what} = {extent}, which {size} tensor ranks cannot share evenly. "
            f"Use a number of tensor ranks that divides {extent}, or leave the layer and its partner "
            "out of the plan."
        )


def _check_contents(name: str, module: nn.Module) -> None:
    """Check that the layer has nothing that a cut would forget."""
    buffers = [leaf for leaf, buffer in module.named_buffers() if buffer.numel() != 1]
    if buffers:
        raise UsageError(
            f"plan: {name!r} has the buffer {buffers[0]!r}, and the plan does not say how to cut it. "
            "Leave this layer and its partner out of the plan."
        )
    others = [leaf for leaf, _ in module.named_parameters() if leaf not in ("weight", "bias")]
    if others or any(True for _ in module.children()):
        what = repr(others[0]) if others else "modules inside it"
        raise UsageError(
            f"plan: {name!r} has, besides weight and bias, {what}, such as a parametrization, and the "
            "plan does not say how to cut that. Leave this layer and its partner out of the plan."
        )
    for leaf, param in module.named_parameters():
        if not param.is_floating_point() or isinstance(param.grad, torch.Tensor):
            why = "has a gradient" if param.is_floating_point() else f"is {param.dtype}"
            raise UsageError(
                f"plan: '{name}.{leaf}' {why}, and only floating-point parameters without a gradient "
                "can be cut. Cut the model before its first backward and before it is quantized."
            )


def _check_options(name: str, module: nn.Module, row: StyleRow) -> None:
    """Check that the layer was made with options that parts of it can follow."""
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    ):
        raise UsageError(
            f"plan: {name!r} is an Embedding with max_norm, sparse or scale_grad_by_freq, which need "
            "the whole table on each rank. Leave it out of the plan, or turn these options off."
        )
    if (
        isinstance(module, nn.LayerNorm)
        and len(module.normalized_shape) > 1
        and row.name != "replicate"
    ):
        raise UsageError(
            f"plan: {name!r} normalizes over {len(module.normalized_shape)} dimensions, and the style "
            f'"{row.name}" cuts one of them. Leave it out of the plan.'
        )


def check_stream(model: nn.Module, rows: Mapping[str, StyleRow]) -> None:
    """Check a plan with a residual stream that is cut over the sequence: it has to name every layer.

    The gradient of a layer that the plan does not know would be a sum over this rank's tokens only.
    """
    if hasattr(model, "base_model_prefix") or hasattr(model, "_tp_plan"):
        raise UsageError(
            f'plan: {type(model).__name__} is a model of Transformers, and the style "sequence" cuts '
            "the sequence that these models compute positions and masks from. Use a plan without it."
        )
    for name, module in model.named_modules():
        own = [leaf for leaf, param in module.named_parameters(recurse=False)]
        if own and name not in rows:
            raise UsageError(
                f'plan: the style "sequence" cuts the residual stream, and the plan does not name '
                f"{name or 'the model itself'!r} ({type(module).__name__}), which has the parameter "
                f"{own[0]!r}. Its gradient would count a part of the tokens only. Name it, with the "
                'style "replicate" if it works on each token alone.'
            )


TIMEOUT_S = 600.0
"""How long a tensor rank waits for the others, in seconds."""


def agree(
    mesh: DeviceMesh,
    model: nn.Module,
    styles: Mapping[str, str],
    check: Callable[[Sequence[int]], None],
) -> None:
    """Return if all tensor ranks have the same model, values and ``styles``. Reads all values once.

    ``check``: called a few times a second while this rank waits; it may end the wait by raising.

    Raises:
        RankMismatch: they differ; it names the first difference and the ranks.
    """
    if not _has_others(mesh):
        return
    meeting = _meeting(mesh, check)
    fields = _shapes(model) | {f"style of {name}": style for name, style in styles.items()}
    groups = alike_plans(meeting, fields)
    if len(groups) > 1:
        ranks = _ranks(mesh)
        named = [[ranks[at] for at in places] for places in groups]
        raise RankMismatch(mismatch_text(named, plans_of(meeting.store, groups)))
    mine = _values(model)
    text = ",".join(mine.values())
    everyone = meeting.exchange(text, "values")
    if len(set(everyone)) > 1:
        raise RankMismatch(_values_text(list(mine), everyone, _ranks(mesh)))


def announce_failure(mesh: DeviceMesh, error: Exception) -> None:
    """Tell the other tensor ranks that this one cannot go on, so that they do not wait."""
    if _has_others(mesh):
        post_plan(_meeting(mesh), {FAILED: in_short(error)})


@contextlib.contextmanager
def waiting_for_tensor_ranks(mesh: DeviceMesh) -> Iterator[Callable[[Sequence[int]], None]]:
    """A context of waits in this mesh. Yields a check for them, which ends a wait that has no end.

    See :func:`~zeroshard.session.join.waiting_for_partners`.
    """
    if not _has_others(mesh):
        yield lambda _missing: None
        return
    with waiting_for_partners(_ranks(mesh), "tensor_parallel", timeout_s=TIMEOUT_S) as check:
        yield check


def agreed_seed(mesh: DeviceMesh, seed: int | None, check: Callable[[Sequence[int]], None]) -> int:
    """``seed``, or the first tensor rank's ``torch.initial_seed()`` if it is None.

    ``check``: as in :func:`agree`.

    Raises:
        RankMismatch: the tensor ranks were given different seeds.
    """
    own = torch.initial_seed() if seed is None else seed
    if not _has_others(mesh):
        return own
    text = f"{seed is None} {own}"
    everyone = _meeting(mesh, check).exchange(text, "seed")
    if seed is not None and len(set(everyone)) > 1:
        raise RankMismatch(
            f"RankMismatch: tensor ranks {_ranks(mesh)} were given the seeds "
            f"{[int(one.split()[1]) for one in everyone]}. Pass the same seed on all of them."
        )
    return int(everyone[0].split()[1])


def _has_others(mesh: DeviceMesh) -> bool:
    """Whether there are other processes to compare with; a simulated group has none."""
    return mesh.size() > 1 and dist.get_backend(mesh.get_group()) != "fake"


def _ranks(mesh: DeviceMesh) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group())


def _meeting(mesh: DeviceMesh, check: Callable[[Sequence[int]], None] = no_check) -> Rendezvous:
    """Of the tensor ranks. A wait ends a minute after the watchdog should have ended it."""
    name, me = run_name(), mesh.get_local_rank()
    label = f"zs/{name.run}/{name.attempt}/tensor/{ranks_key(_ranks(mesh))}"
    store = namespace(default_store(), label, me)
    return Rendezvous(store, me, mesh.size(), TIMEOUT_S + 60.0, check)


def _shapes(model: nn.Module) -> dict[str, str]:
    """Shape, dtype and trainability of each parameter, and what dropout draws from."""
    found = {
        f"parameter {name}": f"{tuple(param.shape)} {param.dtype} trained={param.requires_grad}"
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    if any(map(draws, model.modules())):  # the same elements on all tensor ranks
        state = torch.get_rng_state().numpy().tobytes()
        found["state of torch's generator (the model has dropout)"] = hashlib.sha256(
            state
        ).hexdigest()[:16]
    return found


def _values(model: nn.Module) -> dict[str, str]:
    """A fingerprint of each parameter and buffer that has values, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        prints = {
            name: fingerprint_of(tensor.detach().contiguous())
            for name, tensor in tensors.items()
            if not tensor.is_meta
        }
    return dict(zip(prints, _hex(prints.values()), strict=True))


def _hex(prints: Iterable[Tensor]) -> list[str]:
    """One transfer from the device for each tensor would be slow, so all are moved at once."""
    values = list(prints)
    if not values:
        return []
    host = torch.stack([value.to(values[0].device) for value in values]).tolist()
    return [f"{number & (2**64 - 1):x}" for number in host]


def _values_text(names: list[str], everyone: list[str], ranks: list[int]) -> str:
    rows = [one.split(",") for one in everyone]
    at = next(i for i in range(len(names)) if len({row[i] for row in rows}) > 1)
    odd = [rank for rank, row in zip(ranks, rows, strict=True) if row[at] != rows[0][at]]
    return (
        f"RankMismatch: {names[at]!r} has other values on {rank_ranges(odd)} than on rank {ranks[0]}. "
        "Tensor ranks cut one model, so all of them must have the same values.\n"
        "  Call torch.manual_seed() with one number on all ranks before you build the model, load "
        "the same weights on all of them, or build the model on the meta device."
    )
