"""Fine-tune LLaVA-1.5 with LoRA: Trainer, PEFT and ZeRO-2 or ZeRO-3. Only adapters are saved.

    zeroshard launch --as-deepspeed --nproc 2 examples/llava_lora/train.py \\
        --deepspeed examples/llava_lora/ds_zero3.json --data talks.json --bf16
    ... train.py --smoke ...          a tiny model on generated images, nothing is downloaded

``--data`` is LLaVA's own format: a JSON list of ``{"image": FILE, "conversations": [{"from": "human",
"value": "<image>\\n..."}, {"from": "gpt", "value": "..."}]}``; images are in the same directory.
The vision tower is frozen, the language model is trained with LoRA, the projector completely.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

try:
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForImageTextToText,
        AutoProcessor,
        CLIPVisionConfig,
        HfArgumentParser,
        LlamaConfig,
        LlavaConfig,
        PreTrainedModel,
        Trainer,
        TrainingArguments,
        set_seed,
    )
except ImportError as error:
    raise SystemExit(f"{error}; this program needs: pip install 'zeroshard[hf]'") from error

DEFAULTS = {
    "output_dir": "runs/llava",
    "per_device_train_batch_size": 4,
    "learning_rate": 2e-4,
    "max_steps": 100,
    "warmup_steps": 0.03,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "save_strategy": "no",
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "remove_unused_columns": False,
    "report_to": "none",
}
LANGUAGE_LINEARS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
IGNORED = -100  # label of a token that is not to be learned


@dataclass
class Options:
    model: str = "llava-hf/llava-1.5-7b-hf"
    data: Path | None = None
    smoke: bool = field(default=False, metadata={"help": "a tiny model, random or --model FOLDER"})
    lora_rank: int = 128


def main() -> None:
    parser = HfArgumentParser((Options, TrainingArguments))
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    model, dataset = build(options)
    rank = 4 if options.smoke else options.lora_rank
    adapters = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=LANGUAGE_LINEARS,
        modules_to_save=["multi_modal_projector"],
        task_type="CAUSAL_LM",
    )
    set_seed(args.seed)  # loading draws random numbers too, more of them where nothing is sharded
    model.enable_input_require_grads()  # gradient checkpointing reaches the adapters
    model = get_peft_model(model, adapters)
    model.print_trainable_parameters()
    trainer = Trainer(model=model, args=args, train_dataset=dataset, data_collator=dataset.collate)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # what PEFT trains, and nothing else
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(Path(args.output_dir, "trainer_state.json")))


def build(options: Options) -> tuple[PreTrainedModel, Talks]:
    if not options.smoke:
        if options.data is None:
            raise SystemExit("--data FILE: LLaVA's JSON of conversations (or --smoke)")
        model = AutoModelForImageTextToText.from_pretrained(options.model)
        return model, Talks(options.data, AutoProcessor.from_pretrained(options.model))
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, projection_dim=16, num_hidden_layers=2,
        num_attention_heads=2, image_size=16, patch_size=8,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    shape = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=63,
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    if Path(options.model).is_dir():
        model = AutoModelForImageTextToText.from_pretrained(options.model)
    else:
        model = AutoModelForImageTextToText.from_config(shape)
    return model, MadeTalks(shape)


class Talks(Dataset):
    """Conversations about images; only the answers are learned."""

    def __init__(self, path: Path, processor: Any) -> None:
        self.folder, self.processor = path.parent, processor
        self.talks = [talk for talk in json.loads(path.read_text()) if "image" in talk]

    def __len__(self) -> int:
        return len(self.talks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        from PIL import Image

        talk = self.talks[index]
        question, answer = (turn["value"] for turn in talk["conversations"][:2])
        image = Image.open(self.folder / talk["image"]).convert("RGB")
        prompt = f"USER: {question} ASSISTANT:"
        asked = self.processor(text=prompt, images=image, return_tensors="pt")
        whole = self.processor(text=f"{prompt} {answer}</s>", images=image, return_tensors="pt")
        ids = whole["input_ids"][0]
        labels = ids.clone()
        labels[: asked["input_ids"].shape[1]] = IGNORED
        return {"input_ids": ids, "labels": labels, "pixel_values": whole["pixel_values"][0]}

    @property
    def pad(self) -> int:
        return self.processor.tokenizer.pad_token_id

    def collate(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Pad on the right: a batch of ``[B, T]`` tokens and ``[B, 3, H, W]`` pixels."""
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad([item["input_ids"] for item in items], True, self.pad)
        return {
            "input_ids": ids,
            "attention_mask": (ids != self.pad).long(),
            "labels": pad([item["labels"] for item in items], True, IGNORED),
            "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        }


class MadeTalks(Talks):
    """Images of one brightness; the answer says which."""

    pad = 0

    def __init__(self, shape: LlavaConfig) -> None:
        self.talks = list(range(64))
        self.image = [shape.image_token_index] * shape.image_seq_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        shade = index % 8
        question = [1, *self.image, *range(10, 10 + index % 3)]
        answer = [20 + shade, 2]
        return {
            "input_ids": torch.tensor(question + answer),
            "labels": torch.tensor([IGNORED] * len(question) + answer),
            "pixel_values": torch.full((3, 16, 16), shade / 4 - 1),
        }


if __name__ == "__main__":
    main()
