"""Compares the layers with experts in a model with the mesh of the run, and numbers their experts."""

from __future__ import annotations

import logging
from collections.abc import Collection

from torch import nn

from zeroshard.comm.dtensors import KINDS, is_part
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.experts.dispatch import TokenLink
from zeroshard.experts.layer import Experts, MoE
from zeroshard.experts.marks import ranks_of_layer
from zeroshard.experts.stacked import SharedStack, WholeValues, share_stacks

logger = logging.getLogger("zeroshard")


def place_experts(
    model: nn.Module,
    mesh: Mesh,
    rank: int,
    origin: str,
    ties: Collection[str] | None = None,
    whole: WholeValues = lambda param: param.data,
) -> tuple[int, ...]:
    """How many ranks share the experts of a layer: each number above 1 once, in order.

    Keeps ``rank``'s part of stacked experts. ``model`` has the layers of all pipeline stages.
    ``origin``: who gave the mesh its number of expert ranks, for messages. ``ties``: parameters of
    several pipeline stages; None: the model is no pipeline. ``whole``: see
    :func:`~.stacked.share_stacks`.

    Raises:
        UsageError: no layer has experts to share, or an expert has no name of its own.
        UnsupportedError: stacked experts that ranks share have buffers.
    """
    if mesh.expert > 1:
        share_stacks(model, mesh, rank, origin, whole)
    layers = expert_layers(model)
    for name, layer in layers.items():
        if isinstance(layer, MoE):
            if rank == 0:
                _warn_of_whole_experts(name, layer, mesh)
        elif layer.ep_size > 1:
            _refuse_buffers(name, layer, layer.ep_size)
    found = _sizes_of(model, layers.values(), ties or ())
    if mesh.expert > 1 and not found:
        raise UsageError(
            f"the mesh has {mesh.expert} expert ranks ({origin}), but no layer of the model has experts "
            "that ranks can share. Use a model of Transformers with a plan for its experts, or "
            f"zeroshard.parallel.MoE (deepspeed.moe.layer.MoE) with ep_size={mesh.expert}. Or leave the "
            "size out: ZeRO then shards experts as all other parameters."
        )
    return found


def number_experts(
    model: nn.Module, mesh: Mesh, rank: int, origin: str, *, may_rename: bool
) -> None:
    """Give the experts in layers ``MoE`` the numbers that those of ``rank`` have.

    Before tensor ranks compare the names of their parameters. ``may_rename``: see :meth:`MoE.move_to`.

    Raises:
        UsageError: a layer's ``ep_size`` does not fit the mesh, or its experts cannot be renamed.
        UnsupportedError: a layer is a ``MoE`` by name only.
    """
    for name, layer in expert_layers(model).items():
        if not isinstance(layer, MoE):
            continue
        _check_constructed(name, layer)
        if mesh.expert > 1 and layer.ep_size != mesh.expert:
            raise UsageError(
                f"the MoE layer {name!r} has ep_size {layer.ep_size}, but the mesh has {mesh.expert} "
                f"expert ranks ({origin}). Give both the same number, or leave the size of the mesh out."
            )
        if layer.ep_size > 1:
            mesh.check_experts(layer.ep_size)
            layer.move_to(mesh.expert_place(rank, layer.ep_size), may_rename=may_rename)


def expert_layers(model: nn.Module) -> dict[str, MoE | SharedStack]:
    """The layers of ``model`` whose experts ranks may share, by name."""
    kinds = (MoE, SharedStack)
    return {name: each for name, each in model.named_modules() if isinstance(each, kinds)}


def links_of(model: nn.Module) -> dict[int, TokenLink]:
    """What connects the ranks that share experts, by their number, of the layers that are connected."""
    return {
        layer.ep_size: layer.link
        for layer in expert_layers(model).values()
        if layer.link.group is not None
    }


def _check_constructed(name: str, layer: MoE) -> None:
    """A program may derive a layer with experts of its own from ``MoE``, only to be taken for one."""
    if "deepspeed_moe" not in layer._modules:
        raise UnsupportedError(
            f"{name!r} is a {type(layer).__name__}, which is derived from MoE and does not call its "
            "constructor, so it is unknown which experts each rank has, and a checkpoint would hold "
            "those of one rank. Let it call super().__init__(hidden_size, expert, num_experts, ep_size) "
            "and MoE's forward. Or derive it from torch.nn.Module and keep all experts on every rank: "
            "ZeRO then shards them as all other parameters."
        )


def _warn_of_whole_experts(name: str, layer: MoE, mesh: Mesh) -> None:
    params = layer.deepspeed_moe.experts.parameters()
    is_cut = any(type(param) in KINDS or is_part(param) for param in params)
    if layer.enable_expert_tensor_parallelism and mesh.tensor > 1 and not is_cut:
        logger.warning(
            "the MoE layer %r asks for enable_expert_tensor_parallelism, but the plan of the tensor "
            "ranks does not name the layers of its experts, so each of the %d tensor ranks holds whole "
            "experts. Results are the same; experts take %d times the memory. Give these layers styles "
            "in the plan: %s.deepspeed_moe.experts.deepspeed_experts.*.LAYER",
            *(name, mesh.tensor, mesh.tensor, name),
        )


def _refuse_buffers(name: str, experts: nn.Module, size: int) -> None:
    """It is unknown which part of a buffer of stacked experts belongs to which expert."""
    found = [leaf for leaf, _ in experts.named_buffers()]
    if found:
        raise UnsupportedError(
            f"the stacked experts {name!r}, which {size} ranks share, have buffers ({found[0]!r} and "
            f"{len(found) - 1} more), and it is unknown which part of them belongs to which expert. Use "
            "zeroshard.parallel.MoE, whose experts may have buffers, or leave out the expert ranks."
        )


def sizes_of_buffers(model: nn.Module) -> dict[int, int]:
    """``id`` of each buffer of an expert -> how many ranks share the experts of its layer (above 1)."""
    return {
        id(buffer): layer.ep_size
        for layer in expert_layers(model).values()
        if isinstance(layer, MoE) and layer.ep_size > 1
        for buffer in layer.deepspeed_moe.experts.buffers()
    }


def _refuse_shared(model: nn.Module) -> None:
    """Another layer with a parameter of an expert would have another one on each rank."""
    experts: dict[int, str] = {}
    stack, dense, seen = [("", model)], [], set()
    while stack:
        at, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, (Experts, SharedStack)):
            if module.ep_size > 1:
                experts |= {id(p): f"{at}{leaf}" for leaf, p in module.named_parameters()}
            continue
        dense += [(f"{at}{leaf}", p) for leaf, p in module.named_parameters(recurse=False)]
        stack += [(f"{at}{leaf}.", child) for leaf, child in module.named_children()]
    for name, param in dense:
        if id(param) in experts:
            raise UsageError(
                f"parameter {name!r} is also {experts[id(param)]!r}, of an expert that ranks share. "
                f"Other ranks have other experts, so {name!r} would be another parameter there. Give the "
                "layer a parameter of its own, or use ep_size=1."
            )


def _sizes_of(
    model: nn.Module, layers: Collection[nn.Module], ties: Collection[str]
) -> tuple[int, ...]:
    known = {id(param) for layer in layers for param in layer.parameters()}
    _refuse_shared(model)
    sizes = set()
    for name, param in model.named_parameters():
        size = ranks_of_layer(param, name)
        if size > 1 and id(param) not in known:
            raise UsageError(
                f"parameter {name!r} has the mark of an expert that {size} ranks share, but is in no MoE "
                "layer, so the same name stands for other values on other ranks, and a checkpoint would "
                "hold one of them. Use zeroshard.parallel.MoE, which numbers its experts over all ranks."
            )
        if size > 1 and name in ties:
            raise UsageError(
                f"parameter {name!r} of an expert that {size} ranks share is in several pipeline stages. "
                "Use the MoE layer in one stage: other ranks have the experts of other stages."
            )
        sizes.add(size)
    return tuple(sorted(sizes - {1}))
