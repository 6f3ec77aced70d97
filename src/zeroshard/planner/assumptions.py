"""What a plan assumes, and what it does not contain, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroshard.comm.dtensors import local_of
from zeroshard.config import Config
from zeroshard.config.mesh_keys import mesh_from_config
from zeroshard.core.mesh import Mesh
from zeroshard.core.mesh_sources import resolve_mesh
from zeroshard.core.texts import gib_text
from zeroshard.errors import UsageError
from zeroshard.experts.dispatch import all_tokens_here
from zeroshard.experts.layer import MoE
from zeroshard.experts.placement import expert_layers
from zeroshard.planner.gpu_kernels import Target

NOT_MODELLED = (
    "memory of the allocator (reserved and fragmented blocks), of the device's context and of the "
    "program itself, of whose process only the interpreter is a row",
    "the first step, which creates optimizer state",
    "of a checkpoint: client_state, the position in the data and the text of the manifest; on a GPU up "
    "to 32 MiB of pinned host memory that values pass through",
    "scratch memory inside kernels",
    "on a GPU without Triton, the gradient in the master's dtype that an update needs",
    "before the engine exists, everything counts as device memory, also state that goes to host or disk",
    "other ranks are as far as this one; a rank that waits for others may need some more windows",
)
"""What a plan does not contain."""

PROCESS_NBYTES = 290_000_000
"""Host memory of a rank's process beside its tensors, in bytes: interpreter, libraries, threads.

Measured by ``tools/process_room.py`` on CPU ranks: 250 MB without Transformers, 290 MB with it.
"""

NOT_MODELLED_OF_STAGES = (
    "with shared memory, the blocks that hold messages between pipeline stages until they are read",
)
"""What a plan of a pipeline does not contain besides."""

NOT_MODELLED_OF: Mapping[Target, str] = {
    "cpu": "attention takes the form that torch chooses on the CPU, which keeps its scores if it has "
    "dropout or a learned mask, where fused kernels of a GPU do not: for a GPU use --target cuda",
    "cuda": "convolutions, recurrent layers and nn.RMSNorm keep what they keep on the CPU; products of a "
    "GPU may need a workspace; what an update in host memory needs for a moment counts on the device",
}
"""What a plan for a kind of device does not contain."""


def not_modelled(target: Target, *, passes_blocks: bool) -> tuple[str, ...]:
    """What a plan does not contain. ``passes_blocks``: stages of a pipeline share memory."""
    of_stages = NOT_MODELLED_OF_STAGES if passes_blocks else ()
    return (*NOT_MODELLED, NOT_MODELLED_OF[target], *of_stages)


def stands_for_all(mesh: Mesh) -> str:
    """Which ranks were simulated."""
    one = "rank 0" if mesh.pipeline == 1 else "one rank of each pipeline stage"
    return f"{one} stands for all {mesh.world_size} ranks: shards have equal sizes"


def check_tokens(length: int | None, mesh: Mesh) -> None:
    """Check that sequence ranks can divide a sample of ``length`` tokens; None: not given."""
    if length is not None and length % mesh.sequence:
        raise UsageError(
            f"a sample has {length} tokens, which {mesh.sequence} sequence ranks cannot divide. Give a "
            "multiple of their number."
        )


def mesh_of(config: Config, ranks: int) -> Mesh:
    """The mesh of a configuration on ``ranks`` ranks."""
    named = mesh_from_config(config)
    return resolve_mesh([] if named is None else [named], ranks).mesh


def of_sequence_ranks(mesh: Mesh) -> tuple[str, ...]:
    """What a plan assumes if ranks share the tokens of a sequence."""
    if mesh.sequence == 1:
        return ()
    return (
        f"the batch is what one of {mesh.sequence} sequence ranks has of the tokens; models of "
        "Transformers exchange tokens for heads around sdpa and flash attention, in rows of one sample "
        "each, and other models do what their code does",
    )


def of_two_memories(device_nbytes: int, together_nbytes: int) -> list[str]:
    """What is said of a CPU if not all that it needs is on the device."""
    if together_nbytes <= device_nbytes:
        return []
    return [
        "the device has memory of its own, with which the limit is compared; CPU ranks have one "
        f"memory, and need {gib_text(together_nbytes)} of it"
    ]


def shares_memory(target: Target, ranks: int, config: Mapping[str, Any]) -> bool:
    """Whether ranks may communicate through shared memory."""
    return target == "cpu" and ranks > 1 and config.get("transport", "auto") in ("auto", "shm")


def on_one_host(ranks: int, ranks_per_node: int | None, config: Mapping[str, Any]) -> list[str]:
    """What is said of ranks that share memory, if nobody said that they are on several hosts."""
    if config.get("transport") != "shm" and ranks_per_node is not None and ranks > ranks_per_node:
        return []
    return [
        "all ranks are on one host and communicate through shared memory; for ranks of several "
        'hosts, --ranks-per-node or "transport": "p2p"'
    ]


# ---------------------------------------------------------------------- experts that ranks share


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
