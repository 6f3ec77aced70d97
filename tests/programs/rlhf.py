"""PPO with an actor, a critic and a frozen reference. Each is an engine, as in RLHF programs.

    deepspeed rlhf.py --model FOLDER --stage 3 --output_dir out

Without ``--stage`` it uses plain DistributedDataParallel. This program does not mention ZeroShard.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, set_seed
from transformers.integrations import HfDeepSpeedConfig

PROMPT, ANSWER = 5, 6  # tokens
CLIP, KL = 0.2, 0.1


class Critic(torch.nn.Module):
    """A transformer's states and one number for each token."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.rwtransformer = AutoModel.from_pretrained(folder)
        self.v_head = torch.nn.Linear(self.rwtransformer.config.hidden_size, 1, bias=False)
        with torch.no_grad():
            self.v_head.weight.copy_(torch.linspace(-0.3, 0.3, self.v_head.weight.numel())[None])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.rwtransformer(ids, use_cache=False).last_hidden_state
        return self.v_head(states).squeeze(-1)


def train_config(stage: int, micro: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro, "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"},
            "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False,
        },
        "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
    }  # fmt: skip


def eval_config(stage: int, micro: int) -> dict[str, Any]:
    zero = {"stage": 3 if stage == 3 else 0, "stage3_param_persistence_threshold": 1e4,
            "offload_param": {"device": "none"}, "memory_efficient_linear": False}  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": micro, "steps_per_print": 10, "zero_optimization": zero,
        "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
    }  # fmt: skip


class Plain:
    """The calls of an engine, by DistributedDataParallel."""

    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        self.module, self.optimizer = module, optimizer
        self.wrapped = module
        if optimizer is not None:
            self.wrapped = torch.nn.parallel.DistributedDataParallel(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        self.wrapped.train()

    def eval(self) -> None:
        self.wrapped.eval()


def engine_of(build: Any, args: argparse.Namespace, lr: float | None) -> Any:
    """The model as an engine; without a rate it is not trained."""
    if args.stage is None:
        model = build()
        optimizer = None if lr is None else torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95))
        return Plain(model, optimizer)
    import deepspeed

    make = eval_config if lr is None else train_config
    config = make(args.stage, args.batch)
    alive = HfDeepSpeedConfig(config) if args.stage == 3 else None
    model = build()
    optimizer = None if lr is None else torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    del alive
    return engine


def log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of each token after the first."""
    said = F.log_softmax(logits[:, :-1], -1)
    return said.gather(-1, ids[:, 1:, None]).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--output_dir")
    parser.add_argument("--stage", type=int)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    if args.stage is None:
        dist.init_process_group("gloo")
    else:
        import deepspeed

        deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    set_seed(3)

    actor = engine_of(lambda: AutoModelForCausalLM.from_pretrained(args.model), args, 1e-3)
    reference = engine_of(lambda: AutoModelForCausalLM.from_pretrained(args.model), args, None)
    critic = engine_of(lambda: Critic(args.model), args, 1e-3)
    first = 0
    if args.resume:
        actor.load_checkpoint(f"{args.output_dir}/actor")
        _, state = critic.load_checkpoint(f"{args.output_dir}/critic")
        first = state["step"]

    lines = []
    for step in range(first, args.steps):
        every = torch.Generator().manual_seed(step)
        prompts = torch.randint(3, 30, (ranks * args.batch, PROMPT), generator=every)
        prompts = prompts[rank * args.batch : (rank + 1) * args.batch]
        actor.eval()
        critic.eval()
        with torch.no_grad():
            ids = actor.module.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                min_new_tokens=ANSWER, max_new_tokens=ANSWER, synced_gpus=args.stage == 3,
            )  # fmt: skip
            old = log_probs(actor(ids).logits, ids)
            ref = log_probs(reference(ids).logits, ids)
            values = critic(ids)[:, :-1]
        reward = -KL * (old - ref)
        reward[:, -1] += (ids[:, PROMPT:] % 3 == 0).float().mean(-1)
        answer = slice(PROMPT - 1, None)
        returns = reward[:, answer].flip(-1).cumsum(-1).flip(-1)
        advantages = returns - values[:, answer]

        actor.train()
        critic.train()
        new = log_probs(actor(ids, use_cache=False).logits, ids)
        ratio = (new - old)[:, answer].exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        actor_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
        actor.backward(actor_loss)
        actor.step()
        value_loss = 0.5 * (critic(ids)[:, :-1][:, answer] - returns).pow(2).mean()
        critic.backward(value_loss)
        critic.step()

        both = torch.stack([actor_loss.detach(), value_loss.detach(), reward.mean()])
        dist.all_reduce(both)
        lines.append((both / ranks).tolist())
        if args.stage is not None and step == 1 and not args.resume:
            actor.save_checkpoint(f"{args.output_dir}/actor", client_state={"step": 2})
            critic.save_checkpoint(f"{args.output_dir}/critic", client_state={"step": 2})
    if rank == 0:
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "losses.json").write_text(json.dumps({"losses": lines}))
    dist.barrier()


if __name__ == "__main__":
    main()
