"""A GPT whose embedding is also its output, as a ``PipelineModule`` in DeepSpeed's calls.

``main`` is written as users of DeepSpeed write it. ``plain`` trains the same model in one process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 32, 8, 16, 2, 3
BATCH, MICRO_BATCH, SEED, LR, CLIP = 16, 2, 77, 3e-3, 0.5


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.word(tokens_BT) + self.place(torch.arange(LENGTH))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x_BTD)).chunk(3, dim=-1)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(y.transpose(1, 2).flatten(2))
        return x_BTD + self.down(self.up(self.norm2(x_BTD)).tanh())


def logits(embedding: Embedding, x_BTD: Tensor) -> Tensor:
    return linear(x_BTD, embedding.word.weight)


def loss_fn(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def layers() -> list[Any]:
    tied = {"tied_weight_attr": "word.weight"}
    return [
        TiedLayerSpec("embed", Embedding, **tied),
        *(LayerSpec(Block, WIDTH, HEADS) for _ in range(BLOCKS)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", Embedding, forward_fn=logits, **tied),
    ]


def samples(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one step of all ranks."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draw)
    return tokens, (3 * tokens + 1) % VOCABULARY


def micro_batches(steps: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(steps):
        parts = [part.chunk(ranks)[rank].split(MICRO_BATCH) for part in samples(step)]
        yield from zip(*parts, strict=True)


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--interval", type=int, default=0)
    parser.add_argument("--save")
    args = deepspeed.add_config_arguments(parser).parse_args(argv)
    deepspeed.init_distributed()

    ranks = deepspeed.comm.get_world_size() // args.stages
    net = PipelineModule(
        layers=layers(),
        topology=PipeDataParallelTopology(num_pp=args.stages, num_dp=ranks),
        loss_fn=loss_fn,
        seed_layers=True,
        base_seed=SEED,
        partition_method="type:Block",
        activation_checkpoint_interval=args.interval,
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad]
    )
    own = engine.grid.get_data_parallel_rank()
    feed = micro_batches(args.steps, own, ranks)
    losses = [float(engine.train_batch(data_iter=feed)) for _ in range(args.steps)]
    tested = float(engine.eval_batch(micro_batches(1, own, ranks)))
    if args.save:
        engine.save_checkpoint(args.save)
    found = {
        "losses": losses,
        "tested": tested,
        "stage": (net.num_stages, engine.is_first_stage(), engine.is_last_stage()),
        "params": {name: value.clone() for name, value in engine.iter_full_params()},
    }
    engine.destroy()
    return found


class Plain(nn.Module):
    """The same model without pipelines. Each layer is seeded before it is built."""

    def __init__(self) -> None:
        super().__init__()
        built: list[nn.Module] = []
        for at, spec in enumerate(layers()[:-1]):
            torch.manual_seed(SEED + at)
            built.append(spec.build())
        self.tied_modules = nn.ModuleDict({"embed": built[0]})
        for at, layer in enumerate(built[1:], 1):
            self.add_module(str(at), layer)
        self.run = built

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x: Any = tokens_BT
        for layer in self.run:
            x = layer(x)
        return logits(self.tied_modules["embed"], x)


def plain(steps: int) -> dict[str, Any]:
    net, losses = Plain(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    for step in range(steps):
        tokens, labels = samples(step)
        loss = loss_fn(net(tokens), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        tokens, labels = samples(0)
        tested = float(loss_fn(net(tokens), labels))
    params = {name: param.detach() for name, param in net.named_parameters()}
    return {"losses": losses, "tested": tested, "params": params}


def write_config(file: Path, stage: int, micro_batches: int) -> Path:
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "Adam", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
    }
    file.write_text(json.dumps(config))
    return file
