"""Fine-tune a chatbot (Blenderbot) with Accelerate and an "auto" DeepSpeed file.

    export PYTHONPATH="$(zeroshard compat --path)"
    accelerate launch --config_file examples/chatbot/deepspeed.yaml examples/chatbot/train.py \\
        --data talks.tsv
    accelerate launch --mixed_precision fp16 ...
    ... train.py --smoke              a tiny model on generated text, nothing is downloaded

``--data`` is tab-separated: a message, and its answer. Optimizer and schedule are in ds_config.json, so
the program has placeholders for them, ``DummyOptim`` and ``DummyScheduler``.
"""

from __future__ import annotations

import argparse
import csv
from itertools import chain, repeat
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

try:
    from accelerate import Accelerator
    from accelerate.utils import DummyOptim, DummyScheduler, set_seed
    from transformers import (
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
        BlenderbotSmallConfig,
        ByT5Tokenizer,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )
except ImportError as error:
    raise SystemExit(f"{error}; this program needs: pip install 'zeroshard[hf]'") from error

Talk = tuple[str, str]


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    model, tokenizer = build(args)

    def collate(talks: list[Talk]) -> dict[str, torch.Tensor]:
        said, answered = zip(*talks, strict=True)
        options = {"padding": True, "truncation": True, "max_length": args.length}
        batch = tokenizer(list(said), text_target=list(answered), return_tensors="pt", **options)
        batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100  # not to be learned
        return batch

    loader = DataLoader(
        read_talks(args), args.batch_size, shuffle=True, drop_last=True, collate_fn=collate
    )
    optimizer, scheduler = optimizer_and_schedule(accelerator, model, args)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step = 0
    losses: list[torch.Tensor] = []
    for batch in chain.from_iterable(repeat(loader)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach().float())
        if accelerator.sync_gradients:
            step += 1
            mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
            losses.clear()
            accelerator.print(f"step {step} loss {mean:.7f} norm {float(norm):.6f}", flush=True)
            if step == args.steps:
                break
    if args.output is not None:
        accelerator.unwrap_model(model).save_pretrained(
            args.output,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
    accelerator.end_training()


def optimizer_and_schedule(
    accelerator: Accelerator, model: PreTrainedModel, args: argparse.Namespace
) -> tuple[torch.optim.Optimizer | DummyOptim, LambdaLR | DummyScheduler]:
    """Placeholders if the DeepSpeed file has them, else the same two in plain PyTorch."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    ranks = accelerator.num_processes  # Accelerate advances the schedule once per rank
    if accelerator.state.deepspeed_plugin is not None:
        optimizer = DummyOptim(groups, lr=args.lr)
        return optimizer, DummyScheduler(
            optimizer, total_num_steps=args.steps * ranks, warmup_num_steps=args.warmup_steps
        )

    def share(position: int) -> float:
        done, warm = position // ranks - 1, max(2, args.warmup_steps)
        if done < warm:
            return max(0, done) / warm
        return (args.steps - done) / (args.steps - warm)

    adamw = torch.optim.AdamW(groups, lr=args.lr)
    return adamw, LambdaLR(adamw, share)


def build(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not args.smoke:
        model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
        return model, AutoTokenizer.from_pretrained(args.model)
    tokenizer = ByT5Tokenizer()  # bytes: no vocabulary to download
    shape = BlenderbotSmallConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        forced_eos_token_id=None,
    )
    return AutoModelForSeq2SeqLM.from_config(shape), tokenizer


def read_talks(args: argparse.Namespace) -> list[Talk]:
    if args.data is not None:
        with args.data.open(encoding="utf-8", newline="") as file:
            return [(row[0], row[1]) for row in csv.reader(file, delimiter="\t")]
    if not args.smoke:
        raise SystemExit("--data FILE: lines of two columns, said and answered (or --smoke)")
    names, moods = ["Ann", "Bob", "Eve", "Max"], ["fine", "tired", "busy", "happy"]
    talks = [(f"How is {name}?", f"{name} is {mood}.") for name in names for mood in moods]
    return 4 * talks


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="facebook/blenderbot_small-90M")
    parser.add_argument("--data", type=Path, help="a file of two columns, tab-separated")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model")
    parser.add_argument("--output", type=Path, help="where the model is saved")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup_steps", type=int, default=10)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=4, help="per rank and micro-batch")
    parser.add_argument("--length", type=int, default=64, help="most tokens of a line")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
