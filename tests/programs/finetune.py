"""Fine-tunes a saved model on a common task with Transformers' Trainer, as public examples do.

    python finetune.py --task classify --model_name_or_path FOLDER --data FILE --output_dir out ...

This program does not mention ZeroShard. Only the argument ``--deepspeed FILE`` selects it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, HfArgumentParser, Seq2SeqTrainingArguments


@dataclass
class Arguments:
    """The model, the data and the task."""

    task: str
    model_name_or_path: str
    data: str


MODELS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classify": "AutoModelForSequenceClassification",
    "answer": "AutoModelForQuestionAnswering",
    "tag": "AutoModelForTokenClassification",
    "translate": "AutoModelForSeq2SeqLM",
}
LENGTH = 16  # tokens


def features(task: str, row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A row of the file as the model's inputs."""
    pair = {"text_pair": row["context"]} if task == "answer" else {}
    if task == "translate":
        pair = {"text_target": row["target"]}
    options: dict[str, Any] = {"truncation": True, "max_length": LENGTH}
    if task != "translate":
        options["padding"] = "max_length"
    found = dict(tokenizer(row["text"], **pair, **options))
    if task == "classify":
        found["label"] = row["label"]
    elif task == "masked":
        hidden = [place % 3 == 1 and place < len(row["text"].split()) for place in range(LENGTH)]
        ids = found["input_ids"]
        found["labels"] = [one if hide else -100 for one, hide in zip(ids, hidden, strict=True)]
        found["input_ids"] = [
            tokenizer.mask_token_id if hide else one for one, hide in zip(ids, hidden, strict=True)
        ]
    elif task == "answer":
        found |= {"start_positions": row["start"], "end_positions": row["end"]}
    elif task == "tag":
        found["labels"] = (row["tags"] + [-100] * LENGTH)[:LENGTH]
    return found


def collator(task: str, tokenizer: Any, model: Any) -> Any:
    """The function that makes a batch of rows."""
    if task == "causal":
        return transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    if task == "translate":
        return transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    return transformers.default_data_collator


def main() -> None:
    parser = HfArgumentParser((Arguments, Seq2SeqTrainingArguments))
    arguments, args = parser.parse_args_into_dataclasses()
    transformers.set_seed(args.seed)
    task = arguments.task
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    heads = {"num_labels": 3} if task in ("classify", "tag") else {}
    loader = getattr(transformers, MODELS[task])
    model = loader.from_pretrained(arguments.model_name_or_path, **heads)

    rows = [json.loads(line) for line in Path(arguments.data).read_text().splitlines()]
    data = [features(task, row, tokenizer) for row in rows]
    if task == "translate":
        trainer_class: Any = transformers.Seq2SeqTrainer
        args.predict_with_generate = True
    else:
        trainer_class = transformers.Trainer
    trainer = trainer_class(
        model, args, train_dataset=data, eval_dataset=data[:8], processing_class=tokenizer,
        data_collator=collator(task, tokenizer, model),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_state()
    trainer.save_model()

    answers = trainer.predict(data[:8])
    if trainer.is_world_process_zero():
        Path(args.output_dir, "answers.json").write_text(
            json.dumps({"loss": answers.metrics["test_loss"], "said": said(answers.predictions)})
        )


def said(predictions: Any) -> Any:
    """Predictions as lists."""
    if isinstance(predictions, tuple):
        return [said(part) for part in predictions]
    return predictions.tolist()


if __name__ == "__main__":
    main()
