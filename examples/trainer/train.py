"""Train with the Trainer of Transformers and a DeepSpeed configuration; resume on other ranks.

    zeroshard launch --as-deepspeed --nproc 2 examples/trainer/train.py \\
        --deepspeed examples/trainer/ds_zero3.json --output_dir runs/trainer
    ... train.py --resume_from_checkpoint runs/trainer/checkpoint-20 ...     on any number of ranks
    ... train.py --smoke ...                a tiny model, nothing is downloaded

All options of ``TrainingArguments`` are understood. The model that is kept is the one with the
lowest loss on held-out text. The text is Python's own argparse.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset

try:
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        ByT5Tokenizer,
        HfArgumentParser,
        LlamaConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        Trainer,
        TrainingArguments,
        set_seed,
    )
except ImportError as error:
    raise SystemExit(f"{error}; this program needs: pip install 'zeroshard[hf]'") from error

DEFAULTS = {
    "output_dir": "runs/trainer",
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-4,
    "max_steps": 40,
    "warmup_steps": 4,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "save_steps": 10,
    "load_best_model_at_end": True,
    "report_to": "none",
}


@dataclass
class Options:
    model: str = "HuggingFaceTB/SmolLM2-135M"
    smoke: bool = field(default=False, metadata={"help": "a tiny model, random or --model FOLDER"})


def main() -> None:
    parser = HfArgumentParser((Options, TrainingArguments))
    parser.set_defaults(**DEFAULTS)
    # The arguments come first: from then on models are built and loaded already sharded (ZeRO-3).
    options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    model, tokenizer = build(options)
    rows = Rows(Path(argparse.__file__).read_text(), tokenizer, 32 if options.smoke else 256)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows.part(0, len(rows) - 8),
        eval_dataset=rows.part(len(rows) - 8, len(rows)),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    held_out = trainer.evaluate()["eval_loss"]  # of the best model, which was loaded again
    trainer.save_model()  # whole, for from_pretrained
    if trainer.is_world_process_zero():
        summary = {"best": trainer.state.best_metric, "held_out": held_out}
        print(json.dumps(summary))
        trainer.state.save_to_json(str(Path(args.output_dir, "trainer_state.json")))


def build(options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not options.smoke:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        return model, AutoTokenizer.from_pretrained(options.model)
    tokenizer = ByT5Tokenizer()  # bytes: no vocabulary to download
    if Path(options.model).is_dir():
        return AutoModelForCausalLM.from_pretrained(options.model), tokenizer
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(shape), tokenizer


class Rows(Dataset):
    """A text as rows of ``context`` tokens."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        self.rows = torch.tensor(ids[: len(ids) // context * context]).view(-1, context)

    def part(self, begin: int, end: int) -> Rows:
        part = object.__new__(Rows)
        part.rows = self.rows[begin:end]
        return part

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


if __name__ == "__main__":
    main()
