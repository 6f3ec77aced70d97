"""Fine-tune GPT-2 XL with Accelerate under ZeRO-3, with offload to host memory.

    export PYTHONPATH="$(zeroshard compat --path)"
    accelerate launch --config_file examples/gpt2_accelerate/zero3_offload.yaml \\
        examples/gpt2_accelerate/train.py
    ... train.py --smoke              a tiny model, nothing is downloaded

The text is the source of Python's own argparse, or that of ``--text FILE``.
"""

from __future__ import annotations

import argparse
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from torch.utils.data import DataLoader

try:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        ByT5Tokenizer,
        GPT2Config,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )
except ImportError as error:
    raise SystemExit(f"{error}; this program needs: pip install 'zeroshard[hf]'") from error


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator()
    set_seed(args.seed)
    # The YAML says zero3_init_flag: the model is built, and its weights are read, already sharded.
    model, tokenizer, context = build(args)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    ids = tokenizer(args.text.read_text(), add_special_tokens=False)["input_ids"]
    rows = torch.tensor(ids[: len(ids) // context * context]).view(-1, context)
    loader = DataLoader(rows, args.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    batches = chain.from_iterable(repeat(loader))
    for step, tokens_BT in enumerate(islice(batches, args.steps), start=1):
        loss = model(input_ids=tokens_BT, labels=tokens_BT).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach().float(), "mean").item()
        accelerator.print(f"step {step} loss {mean:.7f} norm {float(norm):.6f}", flush=True)

    accelerator.print(repr(continue_text(accelerator, model, tokenizer, "import ")))
    if args.output is not None:
        state = accelerator.get_state_dict(model)  # whole, on the first rank alone
        accelerator.unwrap_model(model).save_pretrained(
            args.output,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=state,
        )
    accelerator.end_training()


@torch.no_grad()
def continue_text(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
) -> str:
    """Every rank generates: each layer is gathered from all of them."""
    model.eval()
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    out = accelerator.unwrap_model(model).generate(
        ids.to(accelerator.device),
        attention_mask=torch.ones_like(ids).to(accelerator.device),
        max_new_tokens=16,
        do_sample=False,
        pad_token_id=0,
        synced_gpus=True,
    )
    model.train()
    return tokenizer.decode(out[0])


def build(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int]:
    """Model, tokenizer, and tokens in a row."""
    if not args.smoke:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        return model, AutoTokenizer.from_pretrained(args.model), 512
    tokenizer = ByT5Tokenizer()  # bytes: no vocabulary to download
    if Path(args.model).is_dir():
        return AutoModelForCausalLM.from_pretrained(args.model), tokenizer, 32
    shape = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(shape), tokenizer, 32


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model, random or --model FOLDER"
    )
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--output", type=Path, help="where the model is saved")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=4, help="per rank")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
