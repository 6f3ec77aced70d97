"""Folders with tiny random models, a tokenizer of whole words, and generated sentences."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from programs import with_deepspeed

WORDS = (
    "the a cat dog bird fish sees likes hears finds big small red blue old runs sleeps sings today now "
    "and but why because good bad here there user assistant"
).split()
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "[turn]", "[end]"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 48}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0,
              "attention_dropout": 0.0, "activation_dropout": 0.0}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # model type, class, sizes
    "llama": ("llama", "LlamaForCausalLM",
              {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}),
    "bert": ("bert", "BertForMaskedLM", {**SIZES, "max_position_embeddings": 32}),
    "marian": ("marian", "MarianMTModel",
               {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
                "max_position_embeddings": 32, "decoder_start_token_id": 0, "forced_eos_token_id": None}),
}  # fmt: skip


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
    )
    found = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        unk_token="<unk>", mask_token="<mask>", model_max_length=64, padding_side="right",
    )  # fmt: skip
    found.chat_template = (
        "{% for message in messages %}[turn] {{ message['role'] }} {{ message['content'] }} [end] "
        "{% endfor %}{% if add_generation_prompt %}[turn] assistant {% endif %}"
    )
    return found


@with_deepspeed
def save_model(name: str, folder: str) -> None:
    """The model of a name, and the tokenizer, as ``from_pretrained`` finds them."""
    import torch
    import transformers

    kind, class_name, sizes = MODELS[name]
    size = len(SPECIAL) + len(WORDS)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=size, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes, **NO_DROPOUT
    )
    torch.manual_seed(4)
    getattr(transformers, class_name)(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def sentence(chance: random.Random, shortest: int = 3, longest: int = 8) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(shortest, longest)))


def write_rows(file: Path, rows: list[dict[str, Any]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def task_rows(count: int = 36) -> list[dict[str, Any]]:
    """Rows with the fields of all common tasks. All texts have one length, and so have all targets.
    The mean over ranks of their means then equals the mean over all rows, on any number of ranks."""
    chance = random.Random(1)
    return [
        {"text": sentence(chance, 6, 6), "context": sentence(chance), "target": sentence(chance, 7, 7),
         "label": chance.randrange(3), "start": chance.randrange(4), "end": chance.randrange(4, 8),
         "tags": [chance.randrange(3) for _ in range(4)]}
        for _ in range(count)
    ]  # fmt: skip


def reward(completions: list[str], **_columns: Any) -> list[float]:
    """The reward of sampled answers."""
    return [answer.count("cat") - 0.1 * len(set(answer.split())) for answer in completions]
