"""Trains with the real DeepSpeed and saves checkpoints, together with the state in the engine's memory.

``python deepspeed_runs.py OUT WORLD_SIZE CASE...`` forks the ranks (gloo, CPU) and makes for each case

    OUT/CASE/global_step3/*.pt    the checkpoint
    OUT/CASE/reference.pt         the results of DeepSpeed's own getters and converter, as plain tensors

``DS_ACCELERATOR=cpu`` must be in the environment, because DeepSpeed reads it when it is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

T = TypeVar("T")
STEPS, MORE_STEPS = 3, 3
TAG = f"global_step{STEPS}"
LR = 0.01


@dataclass(frozen=True)
class Case:
    """One run. ``keys``: additional keys of its configuration."""

    stage: int
    precision: str = "fp32"
    model: str = "plain"  # or "tied", "frozen"
    groups: int = 1
    keys: tuple[tuple[str, Any], ...] = ()


CASES = {
    "fp32-0": Case(0, model="tied"),
    "bf16-0": Case(0, "bf16"),
    "fp16-0": Case(0, "fp16"),
    "fp32-1": Case(1, groups=2),
    "fp32-2": Case(2, model="frozen"),
    "fp32-3": Case(3, model="tied", groups=2),
    "bf16-1": Case(1, "bf16", "tied"),
    "bf16-1-frozen": Case(1, "bf16", "frozen"),
    "bf16-2": Case(2, "bf16", "tied", groups=2),
    "bf16-3": Case(3, "bf16", "frozen"),
    "fp16-1": Case(1, "fp16", "frozen", groups=2),
    "fp16-2": Case(2, "fp16", "tied"),
    "fp16-3": Case(3, "fp16", "plain", groups=2),
    "round-robin-1": Case(
        1, "bf16", "tied", groups=2, keys=(("zero_optimization.round_robin_gradients", True),)
    ),
    "round-robin-2": Case(2, "fp32", keys=(("zero_optimization.round_robin_gradients", True),)),
    "bf16-fp32-grads-1": Case(
        1, "bf16", "tied", groups=2, keys=(("data_types", {"grad_accum_dtype": "fp32"}),)
    ),
    "elastic-2": Case(2, "bf16", groups=2, keys=(("zero_optimization.elastic_checkpoint", True),)),
    "small-sub-groups-3": Case(3, "bf16", keys=(("zero_optimization.sub_group_size", 40),)),
    "aligned-2": Case(
        2,
        "bf16",
        groups=2,
        keys=(
            ("zero_optimization.parameter_alignment", True),
            ("zero_optimization.round_robin_gradients", True),
        ),
    ),
}


class Model(nn.Module):
    """Uneven sizes, a scalar, buffers of three dtypes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(7, 11, bias=kind != "tied")
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            self.up.requires_grad_(False)
            self.norm.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens))
        self.seen += tokens.numel()
        self.mean.lerp_(hidden.detach().mean(0).to(self.mean.dtype), 0.5)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return F.cross_entropy((self.head(hidden) * self.gain).float(), tokens.roll(1))


def parameter_groups(model: nn.Module, groups: int) -> list[dict[str, Any]]:
    """One group, or matrices in one and the rest in another."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if groups == 1:
        return [{"params": trained}]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": LR / 2},
    ]


def tokens(step: int, rank: int) -> Tensor:
    """The batch of one rank."""
    return torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(100 * step + rank))


def config(case: Case) -> dict[str, Any]:
    """The configuration of one run."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": case.stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 8},
        },
    }
    if case.precision == "bf16":
        found["bf16"] = {"enabled": True}
    if case.precision == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2}
    if case.stage == 3:
        found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    for key, value in case.keys:
        section, _, name = key.rpartition(".")
        (found[section] if section else found)[name] = value
    return found


def run(case: Case, folder: Path, rank: int) -> None:
    """Train, save, record the state, and train further."""
    import deepspeed  # as every program that uses it

    torch.manual_seed(0)
    model = Model(case.model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(parameter_groups(model, case.groups), lr=LR),
        config=config(case),
        dist_init_required=False,
    )

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
    client_state = {"epoch": 2, "best": {"loss": 0.5, "at": torch.arange(3)}}
    engine.save_checkpoint(str(folder), client_state=client_state)
    reference |= noted(engine, case)
    reference["scale"] = float(getattr(engine.optimizer, "loss_scale", 1.0))
    reference["lr"] = engine.get_lr()
    reference["counters"] = {
        name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")
    }
    if rank == 0 and case.stage and "data_types" not in dict(case.keys):  # which it cannot convert
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        reference["zero_to_fp32"] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    reference["next losses"] = train(STEPS, STEPS + MORE_STEPS)
    if rank == 0:
        torch.save(reference, folder / "reference.pt")
    engine.destroy()


def noted(engine: Any, case: Case) -> dict[str, Any]:
    """Masters and Adam's state of every trained parameter, and the buffers."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {"value": {}, "exp_avg": {}, "exp_avg_sq": {}}
    trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    relink(engine.optimizer)
    for at, (name, p) in enumerate(trained):
        if case.stage:
            found["value"][name] = safe_get_full_fp32_param(p).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[key][name] = safe_get_full_optimizer_state(p, key).clone()
            continue
        optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        master = optimizer.param_groups[0]["params"][at]
        found["value"][name] = master.detach().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[key][name] = optimizer.state[master][key].clone()
    found["buffers"] = {name: b.clone() for name, b in engine.module.named_buffers()}
    return found


def relink(optimizer: Any) -> None:
    """Link the state of stages 1 and 2 for the getters. DeepSpeed links it after the update of the first
    group, when the other groups have no state yet, and in an order that round robin changed."""
    if getattr(optimizer, "round_robin_gradients", False):
        groups = optimizer.bit16_groups
        optimizer.bit16_groups = optimizer.round_robin_bit16_groups
        optimizer._link_all_hp_params()
        optimizer.bit16_groups = groups
    if getattr(optimizer, "_hp_optimizer_states_linked", False):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def rank_main(rank: int, ranks: int, meeting: str) -> None:
    """Join the other ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(meeting, ranks), rank=rank, world_size=ranks
    )
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # it is: only without special instructions
    dtypes = [torch.float, torch.bfloat16, torch.float16]
    accelerator.supported_dtypes = lambda: dtypes


def main(arguments: list[str], cases: Mapping[str, T], run: Callable[[T, Path, int], None]) -> int:
    """Import DeepSpeed, then fork the ranks, which ``run`` all cases. Returns 1 if one of them failed."""
    out, ranks, names = Path(arguments[0]), int(arguments[1]), arguments[2:] or list(cases)
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401  # once, for all ranks
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    rank_main(rank, ranks, f"{folder}/meeting")
                    for name in names:
                        run(cases[name], out / name, rank)
                    dist.destroy_process_group()
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES, run))
