"""Measures the CPU time of a step with experts, beside a dense model of equal work and DeepSpeed's layer.

    python benchmarks/expert_cost.py [--rounds N] [--only PART] [--out FILE]

Two ranks with one thread each share the experts of every layer (ep 2). In the dense model an MLP has
as many elements as the experts of one token together, so it multiplies as much. Systems of a part take
turns, with the same samples, clipping and AdamW in fp32. The measure is the CPU time of both ranks in
one step.
Part "layers": blocks of a norm and an MLP or a MoE layer; each expert takes 1.0 times its even share of
tokens, or nothing is dropped. DeepSpeed's lines need DeepSpeed. Part "mixtral": a small Mixtral of
Transformers, and Mistral as its dense model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interleaving import Clock, step_ms
from machine import describe

if TYPE_CHECKING:
    from torch import Tensor, nn

RANKS, BLOCKS, WIDTH, INNER, EXPERTS, PER_TOKEN, TOKENS = 2, 4, 256, 512, 8, 2, 512
CLIP, LR = 1.0, 1e-4


@dataclass(frozen=True)
class System:
    """A line: ``kind`` is "dense", "places", "all", "deepspeed", "mistral" or "mixtral"."""

    name: str
    kind: str
    stage: int
    sharing: int = RANKS

    def prepare(self) -> None:
        """Import what the system needs."""
        if self.kind == "deepspeed":
            import deepspeed  # noqa: F401
        if self.kind.startswith("mi"):
            import transformers  # noqa: F401

    def open(self, rank: int) -> Trained:
        """Build the system."""
        import torch

        torch.manual_seed(0)
        if self.kind.startswith("mi"):
            return _of_transformers(self, rank)
        if self.kind == "deepspeed":
            return _of_deepspeed(self, rank)
        return Trained(_engine(self, blocks(self)), *samples(rank))


PARTS: dict[str, tuple[System, ...]] = {
    "layers": (
        System("dense, stage 3", "dense", 3),
        System("MoE, stage 3", "places", 3),
        System("MoE, no tokens dropped, stage 3", "all", 3),
        System("MoE on one rank each, stage 3", "places", 3, sharing=1),
        *(System(f"MoE, stage {stage}", "places", stage) for stage in (0, 1, 2)),
        *(System(f"MoE of DeepSpeed, stage {stage}", "deepspeed", stage) for stage in (0, 1, 2)),
    ),
    "mixtral": (
        System("Mistral, stage 3", "mistral", 3),
        System("Mixtral, stage 3", "mixtral", 3, sharing=1),
        System("Mixtral, experts shared, stage 3", "mixtral", 3),
    ),
}


class Trained:
    """An engine and its samples."""

    def __init__(self, engine: Any, x: Tensor, loss: Callable[[Any, Tensor], Tensor]) -> None:
        self.engine, self.x, self.loss = engine, x, loss

    def turn(self, steps: int) -> list[float]:
        """CPU seconds of each step."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        clock = Clock()
        self.engine.backward(self.loss(self.engine, self.x))
        self.engine.step()
        return clock.read()[0]

    def close(self) -> None:
        """Close the engine."""
        getattr(self.engine, "close", self.engine.destroy)()


def blocks(system: System, make: Callable[..., nn.Module] | None = None) -> nn.Module:
    """The model of part "layers". ``make``: DeepSpeed's class of layers; None: ours."""
    from torch import nn

    from zeroshard.parallel import MoE

    def mlp(inner: int = INNER) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            if system.kind == "dense":
                self.inner = mlp(PER_TOKEN * INNER)
                return
            self.inner = (make or MoE)(
                WIDTH, mlp(), EXPERTS, system.sharing, k=PER_TOKEN, capacity_factor=1.0,
                drop_tokens=system.kind != "all", top2_2nd_expert_sampling=False,
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            found = self.inner(self.norm(x))
            return x + (found[0] if isinstance(found, tuple) else found)

    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def samples(rank: int) -> tuple[Tensor, Callable[[Any, Tensor], Tensor]]:
    """Tokens of a rank, and the loss."""
    import torch

    made = torch.Generator().manual_seed(1 + rank)
    return torch.randn(TOKENS, WIDTH, generator=made), lambda net, x: net(x).square().mean()


def _keys(system: System, micro_batch: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": system.stage},
    }


def _engine(system: System, model: nn.Module, micro_batch: int = TOKENS, **keys: Any) -> Any:
    import zeroshard

    adam = {"type": "AdamW", "params": {"lr": LR}}
    config = {**_keys(system, micro_batch), "optimizer": adam, **keys}
    return zeroshard.Engine(model, config=config)


def _of_deepspeed(system: System, rank: int) -> Trained:
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    deepspeed.init_distributed("gloo")
    model = blocks(system, MoE)
    named = {"params": list(model.parameters()), "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(named)
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=_keys(system, TOKENS)
    )
    return Trained(engine, *samples(rank))


def _of_transformers(system: System, rank: int) -> Trained:
    import torch
    import transformers

    sizes = {
        "vocab_size": 512, "hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 8,
        "num_key_value_heads": 2, "max_position_embeddings": TOKENS,
    }  # fmt: skip
    if system.kind == "mistral":
        config = transformers.MistralConfig(**sizes, intermediate_size=PER_TOKEN * INNER)
        net: Any = transformers.MistralForCausalLM(config)
    else:
        shape = {"num_local_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN}
        config = transformers.MixtralConfig(**sizes, **shape, intermediate_size=INNER)
        net = transformers.MixtralForCausalLM(config)
    shared = system.kind == "mixtral" and system.sharing > 1
    keys = {"expert_parallel": {"autoep_size": RANKS}} if shared else {}
    words = torch.randint(512, (1, TOKENS), generator=torch.Generator().manual_seed(1 + rank))
    engine = _engine(system, net, 1, **keys)
    return Trained(engine, words, lambda net, x: net(input_ids=x, labels=x).loss)


def measure(systems: Sequence[System], rounds: int, burst: int) -> dict[str, float]:
    """See :func:`step_ms`."""
    jobs = {system.name: system for system in systems}
    return step_ms(jobs, ranks=RANKS, rounds=rounds, burst=burst)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--burst", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine, result = describe(), {}
    for part in given.only:
        peer = machine["versions"]["deepspeed"]
        systems = [each for each in PARTS[part] if each.kind != "deepspeed" or peer]
        found = result[part] = measure(systems, given.rounds, given.burst)
        first = systems[0].name
        for name, ms in found.items():
            print(f"{name:<36} {ms:8.2f} ms  {ms / found[first]:.2f} of {first}", flush=True)
    if given.out:
        text = {"machine": machine, "rounds": given.rounds, "milliseconds": result}
        given.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
