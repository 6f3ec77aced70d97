"""Trains layers of experts with the real DeepSpeed, and saves checkpoints and what the engine held.

``python deepspeed_expert_runs.py OUT RANKS CASE...`` makes the same files as ``deepspeed_runs.py``, and
one ``reference-R.pt`` for each rank, with the numbers that experts have in the layer.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_runs import main
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, MORE_STEPS, LR = 3, 3, 0.01
TAG = f"global_step{STEPS}"
WIDTH, EXPERTS = 6, 4
AT = "deepspeed_moe.experts.deepspeed_experts."


@dataclass(frozen=True)
class Case:
    """One run. ``groups``: groups of the optimizer without experts; 0: the configuration has it."""

    stage: int
    ep_size: int = 2
    precision: str = "fp32"
    far: bool = False
    groups: int = 0


CASES = {
    "1": Case(1), "2": Case(2), "0": Case(0), "all-2": Case(2, 4), "one-1": Case(1, 1),
    "bf16-1": Case(1, precision="bf16"), "bf16-2": Case(2, precision="bf16"), "far-2": Case(2, far=True),
    "groups-1": Case(1, groups=2),
}  # fmt: skip


class Expert(nn.Module):
    """Uneven sizes, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)
        self.register_buffer("factor", torch.tensor([1.25]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.factor.to(x.dtype)


class Model(nn.Module):
    """Two layers with experts; ``layer``: the class of such a layer."""

    def __init__(self, layer: Any, ep_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(
            layer(
                WIDTH, Expert(), EXPERTS, ep_size, k=k, drop_tokens=False, use_rts=False,
                top2_2nd_expert_sampling=False, use_residual=k == 2, min_capacity=0,
            )
            for k in (1, 2)
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, aux = self.embed(tokens), 0.0
        for layer in self.layers:
            more, l_aux, _ = layer(hidden)
            hidden, aux = hidden + more, aux + l_aux
        return F.cross_entropy(self.head(hidden).float(), tokens.roll(1)) + 0.01 * aux


def tokens(step: int, rank: int) -> Tensor:
    """The batch of one rank."""
    return torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(100 * step + rank))


def config(case: Case) -> dict[str, Any]:
    """The configuration of one run. Clipping is off: DeepSpeed's norm of experts is another one."""
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "use_data_before_expert_parallelism": case.far,
        "zero_optimization": {"stage": case.stage, "overlap_comm": False},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "weight_decay": 0.01, "torch_adam": True},
        },
        **({} if case.precision == "fp32" else {case.precision: {"enabled": True}}),
    }


def groups_of(model: nn.Module, groups: int) -> Any:
    """Param groups for ``model_parameters``; None: all parameters in one."""
    if not groups:
        return None
    flat = [p for p in model.parameters() if p.dim() <= 1]
    whole = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": whole, "weight_decay": 0.1, "name": "matrices"},
        {"params": flat, "weight_decay": 0.0, "name": "vectors"},
    ]


def in_layer(name: str, place: int, own: int) -> str:
    """The name with the number of the expert in the layer."""
    before, found, rest = name.partition(AT)
    if not found:
        return name
    number, _, leaf = rest.partition(".")
    return f"{before}{AT}{place * own + int(number)}.{leaf}"


def run(case: Case, folder: Path, rank: int) -> None:
    """Train, save, record the state, and train further."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    model = Model(MoE, case.ep_size)
    params = groups_of(model, case.groups) or list(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=params, config=config(case), dist_init_required=False
    )
    place = groups._get_expert_parallel_rank(f"ep_size_{case.ep_size}")

    def train(begin: int, end: int) -> list[float]:
        losses = []
        for step in range(begin, end):
            loss = engine(tokens(step, rank))
            engine.backward(loss)
            engine.step()
            total = loss.detach().float().clone()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        return losses

    reference: dict[str, Any] = {"losses": train(0, STEPS)}
    engine.save_checkpoint(str(folder))
    own = EXPERTS // case.ep_size
    for key, values in noted(engine, case).items():
        reference[key] = {in_layer(name, place, own): each for name, each in values.items()}
    reference["next losses"] = train(STEPS, STEPS + MORE_STEPS)
    reference["next"] = {
        in_layer(name, place, own): p.detach().clone() for name, p in model.named_parameters()
    }
    torch.save(reference, folder / f"reference-{rank}.pt")
    engine.destroy()
    # The next case has other ranks that share experts.
    for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
        for each in (name, f"{name}_RANKS"):
            getattr(groups, each).clear()


def noted(engine: Any, case: Case) -> dict[str, dict[str, Tensor]]:
    """Masters and Adam's state of every parameter of this rank."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, dict[str, Tensor]] = {"value": {}, "exp_avg": {}, "exp_avg_sq": {}}
    optimizer = engine.optimizer
    if getattr(optimizer, "_hp_optimizer_states_linked", False):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        if case.stage:
            found["value"][name] = safe_get_full_fp32_param(p).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[key][name] = safe_get_full_optimizer_state(p, key).clone()
        else:
            found["value"][name] = p.detach().clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[key][name] = optimizer.state[p][key].clone()
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES, run))
