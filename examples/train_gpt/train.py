"""Train a GPT on Python's standard library, with ZeRO.

    zeroshard launch --nproc 2 examples/train_gpt/train.py       two ranks
    python examples/train_gpt/train.py                           one rank

The same program runs on CPUs and GPUs; the batch, the optimizer, its schedule, the precision and
the ZeRO stage are in ds_config.json. Losses are in bits per byte of text, so that they can be
compared between vocabularies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from data import Corpus, load_by_turns
from model import GPT, SIZES, GPTConfig
from report import Report
from torch import Tensor
from torch.utils.data import DataLoader

import zeroshard

PROMPT = 'def read_lines(path):\n    """'


def main() -> None:
    args = parse_arguments()
    config = json.loads(args.config.read_text())
    schedule = config["scheduler"]["params"]
    if args.steps:
        schedule.update(total_num_steps=args.steps, warmup_num_steps=args.steps // 20)

    place = zeroshard.init_distributed(verbose=False)
    corpus = load_by_turns(
        args.text, rank=place.rank, vocab=args.vocab, context=args.context, cache=args.runs
    )
    shape = GPTConfig(
        vocab=len(corpus.token_nbytes),
        context=args.context,
        checkpoint=args.checkpoint,
        tied=args.tied,
        **SIZES[args.size],
    )
    torch.manual_seed(args.seed)
    with zeroshard.zero.Init(config_dict_or_path=config):  # no rank holds the whole model
        model = GPT(shape)
    engine, _, loader, _ = zeroshard.initialize(
        model=model, training_data=corpus.train, config=config
    )
    folder = args.runs / (args.name or args.size)
    with engine, Report(folder, engine.global_rank) as report:
        if args.resume:
            engine.load_checkpoint(*checkpoint(args.resume))
        saving = Saving(folder / "checkpoints", args.save_every)
        train(engine, loader, corpus, schedule["total_num_steps"], report, saving)
        report.say("the model continues a prompt:")
        report.say(f"\n{sample(engine, corpus, length=160, seed=args.seed)}\n")
        report.say(str(engine.memory_report(all_ranks=True)))


def train(
    engine: zeroshard.Engine,
    loader: DataLoader[Tensor],
    corpus: Corpus,
    steps: int,
    report: Report,
    saving: Saving,
) -> None:
    """Train to optimizer step ``steps``. Report about 100 times, and evaluate about 5 times."""
    report_every, evaluate_every = math.ceil(steps / 100), math.ceil(steps / 5)
    accumulation = engine.gradient_accumulation_steps()
    batches = repeat(loader)
    bits = BitsPerByte(corpus, engine.device)
    tokens, start = 0, time.perf_counter()

    for step in range(engine.global_steps + 1, steps + 1):
        for _ in range(accumulation):
            inputs, targets = split(next(batches), engine.device)
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()  # updates after the last micro-batch of the step
            bits.add(loss, targets)
            tokens += targets.numel() * engine.dp_size

        tokens_per_s = tokens / (time.perf_counter() - start)
        report.tick(step=step, of=steps, loss=bits.here, tokens_per_s=tokens_per_s)
        if step % report_every == 0 or step == steps:
            report.step(
                step=step,
                of=steps,
                train=bits.take(),
                tokens_per_s=tokens_per_s,
                learning_rate=float(engine.last_step.lr),
                grad_norm=float(engine.last_step.grad_norm),
            )
            if step % evaluate_every == 0 or step == steps:
                report.held_out(step=step, held_out=evaluate(engine, corpus, report))
            tokens, start = 0, time.perf_counter()
        if saving.every and step % saving.every == 0:
            engine.save_checkpoint(saving.directory)  # including the position in the data


@dataclass(frozen=True)
class Saving:
    """When and where to save: a checkpoint after each ``every`` steps; 0: none."""

    directory: Path
    every: int


def checkpoint(path: Path) -> tuple[Path, str | None]:
    """The directory and the tag to load. The tag is None if ``path`` contains several checkpoints."""
    return (path.parent, path.name) if (path / "manifest.json").exists() else (path, None)


@torch.no_grad()
def evaluate(engine: zeroshard.Engine, corpus: Corpus, report: Report) -> float:
    """Bits per byte of the held-out text. Each rank reads an equal share of it."""
    windows, size = corpus.held_out, engine.train_micro_batch_size_per_gpu()
    # The ranks run the same number of forward passes: each gathers parameters from all of them.
    share = range(engine.dp_rank, len(windows), engine.dp_size)
    share = share[: len(windows) // engine.dp_size]
    bits = BitsPerByte(corpus, engine.device)
    engine.eval()
    for first in range(0, len(share), size):
        batch = torch.stack([windows[i] for i in share[first : first + size]])
        inputs, targets = split(batch, engine.device)
        bits.add(engine(inputs, targets), targets)
        report.working(f"held-out text: {first + len(batch)} of {len(share)} windows")
    engine.train()
    return bits.take()


@torch.no_grad()
def sample(engine: zeroshard.Engine, corpus: Corpus, length: int, seed: int) -> str:
    """Continue the prompt. Every rank draws the same tokens, so that all gather together."""
    context = corpus.train.context
    dice = torch.Generator().manual_seed(seed)
    tokens = corpus.tokenizer.encode(PROMPT).ids
    engine.eval()
    for _ in range(length):
        window = torch.tensor([tokens[-context:]], device=engine.device)
        likely, ids = engine(window)[0, -1].cpu().topk(20)
        tokens.append(int(ids[torch.multinomial(likely.softmax(-1), 1, generator=dice)]))
    engine.train()
    return str(corpus.tokenizer.decode(tokens))


class BitsPerByte:
    """Adds up losses, and the bytes of text that they are of, on the device."""

    def __init__(self, corpus: Corpus, device: torch.device) -> None:
        self.token_nbytes = corpus.token_nbytes.to(device)
        self.seen = torch.zeros(2, device=device)  # nats, bytes

    def add(self, loss: Tensor, targets: Tensor) -> None:
        """Add a micro-batch. ``loss``: the mean over ``targets`` in nats per token."""
        nbytes = self.token_nbytes[targets].sum()
        self.seen += torch.stack([loss.detach().float() * targets.numel(), nbytes])

    def here(self) -> float:
        """The mean over what this rank has added since the last :meth:`take`. Waits for the device."""
        nats, nbytes = self.seen.tolist()
        return float(nats / nbytes / math.log(2))

    def take(self) -> float:
        """The mean over what all ranks have added since the last call. Collective."""
        if dist.is_initialized():
            dist.all_reduce(self.seen)
        nats, nbytes = self.seen.tolist()
        self.seen.zero_()
        return float(nats / nbytes / math.log(2))


def split(batch_BT: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    batch_BT = batch_BT.to(device, non_blocking=True)
    return batch_BT[:, :-1], batch_BT[:, 1:]


def repeat(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    """Batches without end. Each pass through the text has another order."""
    if not len(loader):
        raise SystemExit("the text is shorter than one batch")
    for epoch in itertools.count(loader.sampler.epoch):  # type: ignore[attr-defined]
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--text", type=Path, help="a text file to learn instead")
    parser.add_argument("--steps", type=int, help="default: the schedule's length")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--checkpoint", action="store_true", help="compute activations twice")
    parser.add_argument("--tied", action="store_true", help="one matrix to embed and to predict")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("ds_config.json"))
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where results go")
    parser.add_argument("--name", help="the folder in runs (default: the model's)")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints")
    parser.add_argument("--resume", type=Path, help="a checkpoint, or a directory of them")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
