"""Brings the experts of other ranks to rank 0 while the weights of a model are written.

Rank 0 has ``1 / ep`` of the experts of a layer, and the ranks that share the layer with it have the rest.
What those are called is exchanged once (:func:`find_shared`), since every rank follows the plan of rank
0. Then their values travel to rank 0, one parameter at a time: besides its own unit, rank 0 needs memory
for one parameter. Other groups that share the same experts gather their units and send nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.local_state import persistent_buffers, state_names
from zeroshard.comm.dtensors import whole_of
from zeroshard.core.layout import Slot, is_split
from zeroshard.core.mesh import Mesh
from zeroshard.experts.dispatch import TokenLink
from zeroshard.experts.layer import MoE
from zeroshard.experts.marks import ranks_of_layer
from zeroshard.experts.placement import links_of
from zeroshard.zero.unit import Unit

_TOPIC = "names of experts"


class ExpertBuffer(NamedTuple):
    """A persistent buffer of an expert that the rank at ``place`` of ``size`` has."""

    name: str
    dtype: str
    shape: Sequence[int]
    size: int
    place: int


@dataclass(frozen=True, eq=False, slots=True)
class SharedExperts:
    """The experts that ranks share with rank 0, by rank 0's names. Empty if ranks share none.

    ``is_first``: this is rank 0. ``links``: by the number of ranks that share a layer, what connects this
    rank with rank 0; missing if they share no experts. ``units``: for each unit of experts, and for each
    place, all names of each parameter there. ``buffers``: of all places. ``after``: a name in the state
    dict of rank 0's model -> the names that follow it in that of the whole model.
    """

    is_first: bool = True
    links: Mapping[int, TokenLink] = field(default_factory=dict)
    units: Mapping[str, Sequence[Sequence[Sequence[str]]]] = field(default_factory=dict)
    buffers: Sequence[ExpertBuffer] = ()
    after: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def named(
        self, unit: Unit, slots: Sequence[Slot], own: Mapping[str, tuple[str, ...]]
    ) -> Iterator[tuple[Slot, tuple[str, ...]]]:
        """All names of each parameter of ``slots``, and of those that stand for it at other places.

        ``own``: all names of this rank's parameters, by the first.
        """
        if unit.name not in self.units:
            yield from ((slot, own[slot.fqn]) for slot in slots)
        for names_of_place in self.units.get(unit.name, ()):
            for slot, names in zip(slots, names_of_place, strict=True):
                yield slot, tuple(names)

    def values(
        self, unit: Unit, slots: Sequence[Slot], full_N: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """First name and global tensor of each of :meth:`named`, in its order, on rank 0. Collective."""
        params = dict(zip((slot.fqn for slot in unit.layout.slots), unit.params, strict=True))
        if unit.name not in self.units:
            for slot in slots:
                local = full_N[slot.start : slot.stop].view(slot.shape).detach()
                yield slot.fqn, self._whole(slot, params[slot.fqn], local)
            return
        size = ranks_of_layer(unit.params[0], unit.name)
        for place, names_of_place in enumerate(self.units[unit.name]):
            for slot, names in zip(slots, names_of_place, strict=True):
                local = full_N[slot.start : slot.stop].view(slot.shape).detach()
                own = whole_of(params[slot.fqn], local)  # of an expert that tensor ranks share
                shape = slot.shape if slot.block is None else slot.block.shape
                yield names[0], self._sent(own, size, place, shape)

    def values_of_buffers(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Name and values of ``buffers``; values on rank 0. Collective."""
        own = persistent_buffers(module) if self.buffers else {}
        device = next((buffer.device for buffer in own.values()), None)
        for name, dtype, shape, size, place in self.buffers:
            here = own.get(name)
            if here is None:
                here = torch.empty(0, dtype=getattr(torch, dtype), device=device)
            yield name, self._sent(here, size, place, shape)

    def _whole(self, slot: Slot, param: nn.Parameter, local: Tensor) -> Tensor:
        if not is_split(slot, "expert"):
            return whole_of(param, local)
        assert slot.block is not None
        size = ranks_of_layer(param, slot.fqn)
        link = self.links.get(size)
        if link is None:
            return local
        all_N = local.new_empty(prod(slot.block.shape) if self.is_first else 0)
        all_N[: slot.numel] = local.reshape(-1)[: all_N.numel()]
        for place in range(1, size):
            part = link.to_first(local, place, slot.numel)
            all_N[place * slot.numel :][: part.numel()] = part
        return all_N.view(slot.block.shape) if self.is_first else local

    def _sent(self, own: Tensor, size: int, place: int, shape: Sequence[int]) -> Tensor:
        link = self.links.get(size)
        if link is None or not place:
            return own
        found = link.to_first(own, place, prod(shape))
        return found.view(tuple(shape)) if self.is_first else found


NO_EXPERTS = SharedExperts()


class _Told(NamedTuple):
    """What a rank that shares experts with rank 0 says of its own; empty on other ranks.

    ``units``: by name, how many ranks share its experts, and all names of each parameter. ``layers``: of
    each layer, by how many ranks it is shared, and its names in the order of the state dict. ``buffers``:
    name, dtype, shape, and how many ranks share the layer.
    """

    units: Mapping[str, tuple[int, Sequence[Sequence[str]]]]
    layers: Sequence[tuple[int, Sequence[str]]]
    buffers: Sequence[tuple[str, str, Sequence[int], int]]


def find_shared(
    engine: Any, names: Mapping[str, tuple[str, ...]], buffers: Mapping[str, Tensor]
) -> SharedExperts:
    """The shared experts among the parameters ``names`` (first name -> all) and ``buffers`` of this rank.

    Collective if ranks share experts, else free.
    """
    mesh, module = engine.mesh, engine.module
    if mesh.expert == 1:
        return NO_EXPERTS
    links = {
        size: link
        for size, link in links_of(module).items()
        if engine.global_rank in mesh.expert_group(0, size)
    }
    own = _Told(
        _units(engine.runtime.units, names, links) if links else {},
        _layers(module) if links else [],
        _buffers(module, buffers) if links else [],
    )
    engine.wait_for_checkpoint()  # an asynchronous save uses the same control group
    control_group = engine._watch.control_group
    rows = control_group.gather(json.dumps(own), topic=_TOPIC)
    united = None
    if rows is not None:
        united = json.dumps(united_of([_Told(*json.loads(row)) for row in rows], mesh))
    units, found, after = json.loads(control_group.broadcast(united, topic=_TOPIC))
    return SharedExperts(
        engine.is_main_rank, links, units, [ExpertBuffer(*row) for row in found], after
    )


def united_of(
    told: Sequence[_Told], mesh: Mesh
) -> tuple[dict[str, Any], list[ExpertBuffer], dict[str, list[str]]]:
    """``units``, ``buffers`` and ``after`` of :class:`SharedExperts`, from what all ranks told. Pure."""

    def sharing(size: int) -> list[_Told]:
        return [told[rank] for rank in mesh.expert_group(0, size)]

    first = told[0]
    units = {
        unit: [each.units[unit][1] for each in sharing(size)]
        for unit, (size, _) in first.units.items()
    }
    after = {
        names[-1]: [name for each in sharing(size)[1:] for name in each.layers[at][1]]
        for at, (size, names) in enumerate(first.layers)
        if names
    }
    buffers = [
        ExpertBuffer(*row, place)
        for size in sorted({size for size, _ in first.layers})
        for place, each in enumerate(sharing(size))
        for row in each.buffers
        if row[3] == size
    ]
    return units, buffers, after


def _units(
    units: Sequence[Unit], names: Mapping[str, tuple[str, ...]], sizes: Mapping[int, Any]
) -> dict[str, Any]:
    """Units of whole experts. Those that are parts of tensors have the same names on all ranks."""
    found = {}
    for unit in units:
        slots = unit.layout.slots
        size = ranks_of_layer(unit.params[0], slots[0].fqn)
        kept = [names[slot.fqn] for slot in slots if slot.fqn in names]
        if size in sizes and kept and not any(is_split(slot, "expert") for slot in slots):
            found[unit.name] = size, kept
    return found


def _layers(module: nn.Module) -> list[tuple[int, list[str]]]:
    """Also under second names, which a state dict has too."""
    order = list(state_names(module))
    return [
        (size, [name for name in order if name.startswith(prefix)])
        for prefix, size in _prefixes(module)
    ]


def _buffers(
    module: nn.Module, buffers: Mapping[str, Tensor]
) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [
        (name, str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape), size)
        for prefix, size in _prefixes(module)
        for name, buffer in buffers.items()
        if name.startswith(prefix)
    ]


def names_of_experts(module: nn.Module) -> list[str]:
    """The names in the state dict of this rank's experts that ranks share."""
    return [name for _, names in _layers(module) for name in names]


def _prefixes(module: nn.Module) -> list[tuple[str, int]]:
    """With what the names of shared experts begin, and how many ranks share them."""
    return [
        (f"{name}.deepspeed_moe.experts.".lstrip("."), layer.ep_size)
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, MoE) and layer.ep_size > 1
    ]
