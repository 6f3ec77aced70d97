"""Train a Llama of Transformers over tensor ranks, cut by the plan that the model itself has.

    zeroshard launch --nproc 4 examples/llama_tensor/train.py --tensor 2      tensor 2 x data 2
    python examples/llama_tensor/train.py --compare                           one rank: the same losses

The model is Transformers' own class, unchanged. Values are drawn from a seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard

sys.path.append(str(Path(__file__).parents[1] / "train_gpt"))
from data import Corpus, load_by_turns

BATCH = 8
TOLERANCE = 1e-3  # fp32 rounds sums in another order on each mesh; nats per token


def main() -> None:
    args = parse_arguments()
    place = zeroshard.init_distributed(verbose=False)
    corpus = load_by_turns(
        args.text, rank=place.rank, vocab=args.vocab, context=args.context, cache=args.runs
    )
    with build(args, len(corpus.token_nbytes)) as engine:
        losses = train(engine, corpus, args.steps)
        file = args.runs / "losses.json"
        if args.compare:
            compare(engine, json.loads(file.read_text()), losses)
        elif engine.is_main_rank:
            file.write_text(json.dumps({"mesh": engine.mesh.text, "losses": losses}) + "\n")


def build(args: argparse.Namespace, vocab: int) -> zeroshard.Engine:
    torch.manual_seed(args.seed)  # every rank starts from the same values
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=args.dim,
            intermediate_size=3 * args.dim,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=args.context,
        )
    )
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "parallel": {"tensor": args.tensor},
    }
    # "auto": Transformers' plan for this model. The optimizer is built after the cut.
    engine, *_ = zeroshard.initialize(model=model, config=config, plan="auto")
    return engine


def train(engine: zeroshard.Engine, corpus: Corpus, steps: int) -> list[float]:
    """Train, and return the loss of each step: the mean over the whole batch."""
    losses = []
    for step in range(steps):
        windows = [corpus.train[step * BATCH + at] for at in range(BATCH)]
        # The ranks of a tensor group have the same dp_rank, and so the same samples.
        share_BT = torch.stack(windows[engine.dp_rank :: engine.dp_size]).to(engine.device)
        # All sequences are equally long, so the mean of the ranks' losses is that of the batch.
        loss = engine(input_ids=share_BT, labels=share_BT).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double() / engine.mesh.world_size
        dist.all_reduce(mean)
        losses.append(float(mean))
        if engine.is_main_rank and (step + 1) % max(1, steps // 5) == 0:
            print(f"step {step + 1:4d} of {steps}   loss {losses[-1]:.4f}", flush=True)
    return losses


def compare(engine: zeroshard.Engine, saved: dict[str, object], losses: list[float]) -> None:
    """Print how far this run is from the saved one.

    Raises:
        SystemExit: the runs differ by more than the tolerance, or in their number of steps.
    """
    others = saved["losses"]
    assert isinstance(others, list)
    if len(others) != len(losses):
        raise SystemExit(f"that run had {len(others)} steps, and this one {len(losses)}")
    apart = max(abs(one - other) for one, other in zip(losses, others, strict=True))
    if engine.is_main_rank:
        print(f"largest difference of the losses from those of {saved['mesh']}: {apart:.1e}")
    if not apart < TOLERANCE:
        raise SystemExit(f"the runs differ by more than {TOLERANCE}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks; the others share data")
    parser.add_argument("--compare", action="store_true", help="compare with the run before")
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--context", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--text", type=Path, help="a text file to learn instead")
    parser.add_argument("--runs", type=Path, default=Path("runs/llama"), help="where results go")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
