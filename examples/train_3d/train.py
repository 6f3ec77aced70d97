"""Train a GPT over pipeline 2 x data 2 x tensor 2 at ZeRO stage 3, then again on one rank, and compare.

    zeroshard launch --nproc 8 examples/train_3d/train.py                 the mesh of eight ranks
    python examples/train_3d/train.py --compare                           one rank: the same losses

The second command trains the same model on the same samples, in one process, and prints the largest
difference between the loss curves. Then it loads the checkpoint of the eight ranks into its one rank.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from model import GPT, ORDER, TENSOR_PLAN, GPTConfig, loss_fn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard.parallel import pipeline, tensor_parallel

sys.path.append(str(Path(__file__).parents[1] / "train_gpt"))
from data import Corpus, load_by_turns

MESH = {"pipeline": 2, "tensor": 2}  # the other ranks share the data
BATCH, MICRO_BATCHES = 16, 4
TOLERANCE = 1e-3  # fp32 rounds sums in another order on each mesh; nats per token


def main() -> None:
    args = parse_arguments()
    place = zeroshard.init_distributed(verbose=False)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    mesh = MESH if place.world_size > 1 else dict.fromkeys(MESH, 1)
    if place.world_size % math.prod(mesh.values()):
        raise SystemExit(f"start 1 rank, or a multiple of {math.prod(mesh.values())}")
    corpus = load_by_turns(
        args.text, rank=place.rank, vocab=args.vocab, context=args.context, cache=args.runs
    )
    shape = GPTConfig(
        vocab=len(corpus.token_nbytes),
        context=args.context,
        dim=args.dim,
        layers=args.layers,
        head_dim=32,
    )
    with build(shape, mesh, place.world_size, args) as engine:
        losses = train(engine, corpus, args.steps)
        tested = evaluate(engine, corpus, args.tests)
        say(engine, f"held-out text: {tested:.6f} nats per token")
        if args.compare:
            compare(engine, corpus, args, losses, tested)
        else:
            engine.save_checkpoint(args.runs / "checkpoints", tag="last")
            save_losses(engine, args.runs / "losses.json", losses, tested)


def build(
    shape: GPTConfig, mesh: dict[str, int], ranks: int, args: argparse.Namespace
) -> zeroshard.Engine:
    """The engine of this rank's part of the model."""
    torch.manual_seed(args.seed)  # every rank starts from the same values
    model = GPT(shape)
    if mesh["tensor"] > 1:
        groups = (ranks // mesh["tensor"], mesh["tensor"])
        grid = init_device_mesh("cpu", groups, mesh_dim_names=("others", "tensor"))
        tensor_parallel(model, grid["tensor"], TENSOR_PLAN)
    # With one pipeline rank, its one stage is the whole model.
    middle = [f"blocks.{shape.layers // 2}"]
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": args.steps, "warmup_num_steps": max(2, args.steps // 20)},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "parallel": mesh,
    }
    cut = pipeline(model, split=middle, order=ORDER, loss_fn=loss_fn, schedule="1F1B")
    engine, *_ = zeroshard.initialize(model=cut, config=config)
    return engine


def train(engine: zeroshard.Engine, corpus: Corpus, steps: int) -> list[float]:
    """Train, and return the loss of each step: the mean over the whole batch."""
    losses, start = [], time.perf_counter()
    order = torch.randperm(len(corpus.train), generator=torch.Generator().manual_seed(1)).tolist()
    for step in range(steps):
        first = step * BATCH % (len(order) - BATCH)
        samples = [corpus.train[i] for i in order[first : first + BATCH]]
        losses.append(float(engine.train_batch(micro_batches(engine, samples))))
        if (step + 1) % max(1, steps // 10) == 0:
            passed_s = time.perf_counter() - start
            say(engine, f"step {step + 1:4d} of {steps}   loss {losses[-1]:.4f}   {passed_s:.0f} s")
    return losses


def micro_batches(
    engine: zeroshard.Engine, samples: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of this rank's share. Ranks of one pipeline have the same ``dp_rank``."""
    share_BT = torch.stack(samples[engine.dp_rank :: engine.dp_size]).to(engine.device)
    return iter([(part[:, :-1], part[:, 1:]) for part in share_BT.chunk(MICRO_BATCHES)])


def evaluate(engine: zeroshard.Engine, corpus: Corpus, batches: int) -> float:
    """The mean loss of the first ``batches`` batches of held-out text."""
    windows = [corpus.held_out[i] for i in range(batches * BATCH)]
    parts = [windows[at : at + BATCH] for at in range(0, len(windows), BATCH)]
    losses = [float(engine.eval_batch(micro_batches(engine, part))) for part in parts]
    return sum(losses) / len(losses)


def save_losses(engine: zeroshard.Engine, file: Path, losses: list[float], tested: float) -> None:
    if engine.is_main_rank:
        text = json.dumps({"mesh": engine.mesh.text, "losses": losses, "held_out": tested})
        file.write_text(text + "\n")


def compare(
    engine: zeroshard.Engine,
    corpus: Corpus,
    args: argparse.Namespace,
    losses: list[float],
    tested: float,
) -> None:
    """Print how far this run is from that of the mesh, and load the checkpoint of the mesh.

    Raises:
        SystemExit: a difference is larger than the tolerance.
    """
    saved = json.loads((args.runs / "losses.json").read_text())
    if len(saved["losses"]) != len(losses):
        raise SystemExit(f"that run had {len(saved['losses'])} steps, and this one {len(losses)}")
    apart = [abs(one - other) for one, other in zip(losses, saved["losses"], strict=True)]
    largest = max(apart)
    say(engine, f"largest difference of the losses from those of {saved['mesh']}: {largest:.1e}")
    engine.load_checkpoint(args.runs / "checkpoints", tag="last")
    loaded = evaluate(engine, corpus, args.tests)
    say(engine, f"its checkpoint, loaded into one rank, on held-out text: {loaded:.6f}")
    far = abs(loaded - saved["held_out"])
    if not max(largest, abs(tested - saved["held_out"])) < TOLERANCE or not far < 1e-5:
        raise SystemExit(f"the runs differ by more than {TOLERANCE}, or the checkpoint by {far}")


def say(engine: zeroshard.Engine, text: str) -> None:
    if engine.is_main_rank:
        print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", action="store_true", help="compare with the run before")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tests", type=int, default=4, help="batches of held-out text")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--context", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--text", type=Path, help="a text file to learn instead")
    parser.add_argument("--runs", type=Path, default=Path("runs/3d"), help="where results go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="of each rank; 0: torch's choice")
    return parser.parse_args()


if __name__ == "__main__":
    main()
