"""Fine-tune a classifier of sentence pairs with Accelerate, ZeRO-2, fp16 or bf16.

    export PYTHONPATH="$(zeroshard compat --path)"
    accelerate launch --config_file examples/mrpc/zero2.yaml examples/mrpc/train.py --data FOLDER
    accelerate launch --mixed_precision bf16 ... --report_to wandb
    ... train.py --smoke              a tiny model on generated sentences, nothing is downloaded

FOLDER holds ``msr_paraphrase_train.txt`` and ``msr_paraphrase_test.txt``, the Microsoft Research
Paraphrase Corpus (MRPC) as published: tab-separated, a title line, then label, two identifiers and
two sentences. Stage, precision, accumulation and clipping are in the YAML; without DeepSpeed in it
(or ACCELERATE_USE_CPU=true) the same program is plain data parallelism.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

try:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process
    from accelerate.utils import set_seed
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        ByT5Tokenizer,
        DebertaV2Config,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        get_linear_schedule_with_warmup,
    )
except ImportError as error:
    raise SystemExit(f"{error}; this program needs: pip install 'zeroshard[hf]'") from error

Pair = tuple[int, str, str]


def main() -> None:
    args = parse_arguments()
    services = [] if args.report_to == "none" else [args.report_to]
    accelerator = Accelerator(
        log_with=[JsonLines(args.output), *services],
        project_dir=args.output,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    accelerator.init_trackers("mrpc", config={"model": args.model, "lr": args.lr})
    set_seed(args.seed)
    model, tokenizer = build(args)
    train, test = read_pairs(args)

    def collate(pairs: list[Pair]) -> dict[str, torch.Tensor]:
        labels, first, second = zip(*pairs, strict=True)
        batch = tokenizer(
            list(first), list(second),
            padding=True, truncation=True, max_length=args.length, return_tensors="pt",
        )  # fmt: skip
        return {**batch, "labels": torch.tensor(labels)}

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    test_loader = DataLoader(test, 2 * args.batch_size, collate_fn=collate)
    # In steps of one rank: Accelerate advances the schedule once per rank.
    steps = args.epochs * len(loader) // args.gradient_accumulation_steps
    steps = min(steps, (args.max_steps or steps) * accelerator.num_processes)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )

    step = 0
    losses: list[torch.Tensor] = []
    for batch in epochs(loader, args.epochs):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach().float())
        if accelerator.sync_gradients:
            step += 1
            mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
            losses.clear()
            accelerator.log({"loss": mean, "lr": scheduler.get_last_lr()[0]}, step=step)
            if step == args.max_steps:
                break
    scores = evaluate(accelerator, model, test_loader)
    accelerator.log(scores, step=step)
    accelerator.print(json.dumps(scores))
    accelerator.save_state(str(args.output / "state"))
    accelerator.unwrap_model(model).save_pretrained(
        args.output / "model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.end_training()


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader
) -> dict[str, Any]:
    """Accuracy, and F1 of "they mean the same", over the whole test set."""
    model.eval()
    right = hits = said = true = total = 0
    for batch in loader:
        answers = model(**batch).logits.argmax(-1)
        answers, labels = accelerator.gather_for_metrics((answers, batch["labels"]))
        right += (answers == labels).sum().item()
        hits += (answers * labels).sum().item()
        said, true, total = (
            said + answers.sum().item(),
            true + labels.sum().item(),
            total + len(labels),
        )
    model.train()
    return {"accuracy": right / total, "f1": 2 * hits / max(1, said + true), "examples": total}


def build(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not args.smoke:
        model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
        return model, AutoTokenizer.from_pretrained(args.model)
    tokenizer = ByT5Tokenizer()  # bytes: no vocabulary to download
    shape = DebertaV2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        relative_attention=True,
        position_buckets=16,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return AutoModelForSequenceClassification.from_config(shape), tokenizer


def read_pairs(args: argparse.Namespace) -> tuple[list[Pair], list[Pair]]:
    if args.data is None:
        if not args.smoke:
            raise SystemExit("--data FOLDER: where msr_paraphrase_train.txt is (or --smoke)")
        pairs = list(made_pairs(150))
        return pairs[:128], pairs[128:]
    return tuple(_read(args.data / f"msr_paraphrase_{part}.txt") for part in ("train", "test"))


def _read(path: Path) -> list[Pair]:
    """The file as published has bare quotation marks; copies from spreadsheets have quoted cells, and
    tabs where there were commas."""
    lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")[1:]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        rows = list(csv.reader(lines, delimiter="\t", quoting=quoting))
        if len(rows) == len(lines) and all(len(row) == 5 for row in rows):
            return [
                (int(row[0]), row[3].replace("\t", ","), row[4].replace("\t", ",")) for row in rows
            ]
    raise SystemExit(f"{path} is not a title line and lines of five columns, tab-separated")


def made_pairs(count: int) -> Iterator[Pair]:
    """Sentences, each beside itself in other words or beside another one."""
    dice = random.Random(0)
    people, things, verbs = ["Ann", "Bob", "Eve"], ["bread", "milk", "tea"], ["buys", "sells"]
    for _ in range(count):
        who, what, verb = dice.choice(people), dice.choice(things), dice.choice(verbs)
        other = dice.choice([thing for thing in things if thing != what])
        same = dice.randrange(2)
        yield same, f"{who} {verb} {what}", f"{what if same else other} is what {who} {verb}"


def epochs(loader: DataLoader, count: int) -> Iterator[dict[str, torch.Tensor]]:
    return chain.from_iterable(loader for _ in range(count))


class JsonLines(GeneralTracker):
    """Writes what is logged to ``metrics.jsonl``, one line per call."""

    name = "jsonl"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "metrics.jsonl"

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The command line is enough."""

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="microsoft/deberta-v2-xlarge")
    parser.add_argument("--data", type=Path, help="the folder of the corpus")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model")
    parser.add_argument("--output", type=Path, default=Path("runs/mrpc"))
    parser.add_argument("--report_to", default="none", choices=["none", "tensorboard", "wandb"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max_steps", type=int, help="stop earlier")
    parser.add_argument("--batch_size", type=int, default=8, help="per rank and micro-batch")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--length", type=int, default=128, help="tokens of a pair")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.report_to != "none" and find_spec(args.report_to) is None:
        # Accelerate would log nothing, and not say so.
        parser.error(f"--report_to {args.report_to} needs it: pip install 'zeroshard[monitor]'")
    return args


if __name__ == "__main__":
    main()
