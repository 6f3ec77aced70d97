"""A custom training loop with Accelerate, in the form of Accelerate's documentation.

    accelerate launch --config_file zero3.yaml loop.py --model FOLDER --data FILE --output_dir out

This program does not mention ZeroShard. The launcher chooses how the model is trained.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--output_dir")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in Path(args.data).read_text().splitlines()]

    def collate(batch: list[dict[str, Any]]) -> Any:
        found = tokenizer(
            [row["text"] for row in batch], padding="max_length", max_length=16, return_tensors="pt"
        )
        found["labels"] = torch.tensor([row["label"] for row in batch])
        return found

    train = DataLoader(rows, batch_size=args.batch, collate_fn=collate, drop_last=True)
    test = DataLoader(rows[:9], batch_size=args.batch, collate_fn=collate)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 20)
    model, optimizer, train, test, schedule = accelerator.prepare(
        model, optimizer, train, test, schedule
    )
    first = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        first = 4  # micro-batches

    losses = []
    for epoch in range(1):
        model.train()
        loader = accelerator.skip_first_batches(train, first) if first and not epoch else train
        for step, batch in enumerate(loader, first):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
            if step == 3 and not first:
                accelerator.save_state(f"{args.output_dir}/step_2")
    model.eval()
    right = torch.zeros(0, dtype=torch.bool)
    for batch in test:
        with torch.no_grad():
            logits = model(**batch).logits
        found, wanted = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
        right = torch.cat([right, found == wanted])
    weights = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=weights)
        Path(args.output_dir, "losses.json").write_text(
            json.dumps({"losses": losses, "right": right.tolist()})
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
