"""What a plan says of experts that ranks share: how many a rank has, and where tokens go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from zeroshard.comm.dtensors import local_of
from zeroshard.core.mesh import Mesh
from zeroshard.core.sizes import gib_text
from zeroshard.experts.dispatch import all_tokens_here
from zeroshard.experts.layer import MoE
from zeroshard.experts.placement import expert_layers


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """Layers of one rank whose experts ``ranks`` ranks share, ``own`` of ``experts`` on each.

    ``numel``: parameters of the experts of this rank, in all ``count`` layers. ``holders``: ranks with
    the same experts. ``drops``: each expert has places for so many tokens of each rank.
    """

    count: int
    experts: int
    own: int
    ranks: int
    holders: int
    numel: int
    drops: bool


def shared_layers(model: nn.Module, mesh: Mesh, rank: int) -> tuple[SharedLayers, ...]:
    """The layers of ``model`` whose experts ranks share: one row for all that are alike."""
    counts: Counter[tuple[int, int, bool]] = Counter()
    numels: Counter[tuple[int, int, bool]] = Counter()
    for layer in expert_layers(model).values():
        if layer.ep_size == 1:
            continue
        if isinstance(layer, MoE):
            experts: nn.Module = layer.deepspeed_moe.experts
            key = layer.num_experts, layer.ep_size, layer.deepspeed_moe.gate.drop_tokens
        else:
            experts, key = layer, (layer.all_experts, layer.ep_size, False)
        counts[key] += 1
        numels[key] += sum(local_of(param).numel() for param in experts.parameters())
    return tuple(
        SharedLayers(
            count, all_experts, all_experts // size, size, len(mesh.expert_holders(rank, size)),
            numels[all_experts, size, drops], drops,
        )
        for (all_experts, size, drops), count in counts.items()
    )  # fmt: skip


def said_of_experts(layers: Sequence[SharedLayers], again: Callable[[], int] | None) -> list[str]:
    """What is assumed, in sentences. ``again`` simulates once more, and returns the highest peak."""
    worst_nbytes = None
    if again is not None and any(not each.drops for each in layers):
        with all_tokens_here():
            worst_nbytes = again()
    return list(_lines(list(dict.fromkeys(layers)), worst_nbytes))


def _lines(layers: Sequence[SharedLayers], worst_nbytes: int | None) -> Iterator[str]:
    for each in layers:
        yield (
            f"{each.ranks} ranks share the {each.experts} experts of {each.count} layer(s): a rank has "
            f"{each.own} of each, {each.numel:,} parameters, which {each.holders} rank(s) shard"
        )
    if any(each.drops for each in layers):
        yield "layers that drop tokens send all places of an expert, full or not: traffic is exact"
    if any(not each.drops for each in layers):
        worst = "" if worst_nbytes is None else f": its peak is {gib_text(worst_nbytes)}"
        ranks = max(each.ranks for each in layers)
        yield (
            "each expert is planned with equally many tokens. Nothing is dropped, so in the worst case "
            f"one rank computes those of {ranks} ranks{worst}"
        )
