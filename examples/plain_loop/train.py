"""Train a language model in a plain loop: ``deepspeed.initialize``, ZeRO-1, fp16.

    zeroshard launch --as-deepspeed --nproc 2 examples/plain_loop/train.py \\
        --deepspeed_config examples/plain_loop/ds_config.json
    ... train.py --smoke --deepspeed_config ...      a tiny model, nothing is downloaded

This file does not mention ZeroShard: it is written for DeepSpeed. The text is the source of argparse.
"""

from __future__ import annotations

import argparse
from itertools import chain, repeat
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GPT2Config
except ImportError as error:
    raise SystemExit(f"{error}; this program needs: pip install 'zeroshard[hf]'") from error


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    deepspeed.runtime.utils.set_random_seed(args.seed)
    model, dataset = build(args)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=dataset
    )
    accumulation = engine.gradient_accumulation_steps()
    batches = chain.from_iterable(repeat(loader))
    losses = []
    while engine.global_steps < args.steps:
        (tokens_BT,) = next(batches)
        tokens_BT = tokens_BT.to(engine.device)
        loss = engine(input_ids=tokens_BT, labels=tokens_BT).loss
        engine.backward(loss)
        engine.step()  # updates when all micro-batches of the step have been seen
        losses.append(loss.detach())
        if len(losses) == accumulation:
            mean = over_ranks(torch.stack(losses).float().mean())
            losses.clear()
            if engine.global_rank == 0:
                lr, scale = engine.get_lr()[0], engine.optimizer.cur_scale
                print(
                    f"step {engine.global_steps} loss {mean:.7f} lr {lr:.2e} scale {scale:g}",
                    flush=True,
                )
    if args.save is not None:
        engine.save_checkpoint(args.save, client_state={"seed": args.seed})
    dist.destroy_process_group()


def build(args: argparse.Namespace) -> tuple[nn.Module, TensorDataset]:
    """The model, and the text as rows of ``context`` tokens."""
    text = Path(argparse.__file__).read_text()
    if args.smoke:
        tokenizer, context = ByT5Tokenizer(), 32  # bytes: no vocabulary to download
        shape = GPT2Config(
            vocab_size=len(tokenizer), n_positions=context, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(shape)
        text = text[:16_000]
    else:
        tokenizer, context = AutoTokenizer.from_pretrained(args.model), 256
        model = AutoModelForCausalLM.from_pretrained(args.model)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = torch.tensor(ids[: len(ids) // context * context]).view(-1, context)
    return model, TensorDataset(rows)


def over_ranks(value: Tensor) -> float:
    """The mean of a scalar over all ranks."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="a folder for a checkpoint at the end")
    parser.add_argument("--local_rank", type=int, default=-1, help="from the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


if __name__ == "__main__":
    main()
