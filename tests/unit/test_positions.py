"""The longest sample that a plan allows is the longest one that the real model takes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.errors import UsageError
from zeroshard.planner.model_source import model_source
from zeroshard.planner.planned_batch import LENGTH, MOST_VALUES, most_positions

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

POSITIONS = 32
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 16),
    **dict.fromkeys(("word_embed_proj_dim", "d_kv", "rotary_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1),
    **dict.fromkeys(("num_key_value_heads",), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), POSITIONS),
    "vocab_size": 48, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
TWO_LAYERS = {"attention_types": [[["global", "local"], 1]], "num_layers": 2}

LIMITED = [  # class, more of its configuration, tokens, and the key that limits them
    ("GPT2LMHeadModel", {}, POSITIONS, "n_positions"),
    ("GPTNeoForCausalLM", TWO_LAYERS, POSITIONS, "max_position_embeddings"),
    ("GPTJForCausalLM", {}, POSITIONS, "n_positions"),  # a table of sines that does not grow
    ("OPTForCausalLM", {}, POSITIONS, "max_position_embeddings"),  # two more rows
    ("BartForConditionalGeneration", {}, POSITIONS, "max_position_embeddings"),  # two more rows
    ("MarianMTModel", {}, POSITIONS, "max_position_embeddings"),
    ("BertForMaskedLM", {}, POSITIONS, "max_position_embeddings"),
    ("DistilBertForMaskedLM", {}, POSITIONS, "max_position_embeddings"),
    ("ElectraForMaskedLM", {}, POSITIONS, "max_position_embeddings"),
    ("AlbertForMaskedLM", {}, POSITIONS, "max_position_embeddings"),
    ("RobertaForMaskedLM", {}, POSITIONS - 3, "max_position_embeddings"),  # pad_token_id + 1
    ("RobertaForMaskedLM", {"pad_token_id": 5}, POSITIONS - 6, "max_position_embeddings"),
    ("XLMRobertaForMaskedLM", {}, POSITIONS - 3, "max_position_embeddings"),
    ("CamembertForMaskedLM", {}, POSITIONS - 3, "max_position_embeddings"),
    ("MPNetForMaskedLM", {}, POSITIONS - 2, "max_position_embeddings"),  # its own pad token
    ("MptForCausalLM", {}, POSITIONS, "max_seq_len"),
]
FREE = [
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "GPTNeoXForCausalLM",
    "FalconForCausalLM", "BloomForCausalLM", "PhiForCausalLM", "T5ForConditionalGeneration",
    "XGLMForCausalLM",  # a table of sines that grows
]  # fmt: skip


def tiny(name: str, **keys: Any) -> tuple[type, Any]:
    transformers.utils.logging.disable_progress_bar()  # it leaves a thread behind
    cls = getattr(transformers, name)
    known = {each.name for each in dataclasses.fields(cls.config_class)}
    given = {key: value for key, value in SIZES.items() if key in known}
    if "t5" in cls.config_class.model_type:
        keys |= {"decoder_start_token_id": 2}
    config = cls.config_class(**given | keys)
    config.use_cache = False
    config.architectures = [name]
    return cls, config


def runs(model: nn.Module, length: int) -> bool:
    ids = torch.full((1, length), 7)
    try:
        with torch.no_grad():
            model(input_ids=ids, labels=ids)
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize(("name", "keys", "most", "key"), LIMITED)
def test_the_limit_is_that_of_the_real_model(name, keys, most, key):
    cls, config = tiny(name, **keys)
    real = cls(config).eval()
    assert runs(real, most) and not runs(real, most + 1)
    for length in (most + 1, 3 * POSITIONS):
        found = most_positions(lambda: cls(config), config, length)
        assert found is not None and (found.most, found.key) == (most, key)
    assert most_positions(lambda: cls(config), config, most) is None


@pytest.mark.parametrize("name", FREE)
def test_a_model_without_a_limit_is_not_refused(name):
    cls, config = tiny(name)
    assert runs(cls(config).eval(), 3 * POSITIONS)
    assert most_positions(lambda: cls(config), config, 3 * POSITIONS) is None


def test_a_model_with_enough_positions_is_not_built():
    def build() -> nn.Module:
        raise AssertionError

    _, config = tiny("LlamaForCausalLM")
    assert most_positions(build, config, POSITIONS - 3) is None


def test_a_long_sample_is_refused_and_the_default_is_as_long_as_the_model_allows(tmp_path):
    _, config = tiny("RobertaForMaskedLM")
    config.save_pretrained(tmp_path)
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW"},
                "zero_optimization": {"stage": 3},
            }
        )
    )
    words = ["plan", str(tmp_path), "--config", str(tmp_path / "ds.json"), "--ranks", "2"]
    long = CliRunner().invoke(main, [*words, "--seq", "30"])
    assert long.exit_code == 2 and not long.stdout
    said = " ".join(long.output.split())
    for part in (
        "--seq is 30, and ", " takes at most 29 tokens of a sample: max_position_embeddings is 32 in its "
        "configuration, of which 3 are not for tokens.", "end with an error in its forward",
        "Give --seq 29 or less, or a larger max_position_embeddings if",
    ):  # fmt: skip
        assert part in said
    fits = CliRunner().invoke(main, [*words, "--seq", "29", "--json"])
    assert fits.exit_code == 0, fits.output
    unsaid = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert unsaid["peak_nbytes"] == json.loads(fits.stdout)["peak_nbytes"]
    said = " ".join(unsaid["assumed"])
    assert (
        "of 2 x 29 tokens, without attention mask; the model takes no longer samples: max_" in said
    )
    for option in ("--fit", "speed"), ("--batch", "max"):
        searched = CliRunner().invoke(main, [*words, "--seq", "30", "--memory", "1", *option])
        assert searched.exit_code == 2 and "takes at most 29 tokens" in " ".join(
            searched.output.split()
        )


class Own(nn.Module):
    """A model that is not of Transformers, with a table of positions."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(48, 8), nn.Embedding(rows, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        place = torch.arange(input_ids.shape[1])
        return (self.words(input_ids) + self.places(place)).mean() + labels.sum()


def short() -> nn.Module:
    return Own(40)


def long() -> nn.Module:
    return Own(LENGTH)


def test_a_table_of_a_model_without_a_configuration_is_a_limit():
    with pytest.raises(UsageError, match=r"at most 40 tokens.*its table 'places' has 40 rows"):
        model_source(f"{__name__}:short", 2, 41, sharded=False)
    assert model_source(f"{__name__}:short", 2, None, sharded=False).batch[0]["labels"].shape == (
        2, 40,
    )  # fmt: skip
    source = model_source(f"{__name__}:long", 2, None, sharded=False)
    assert source.batch[0]["input_ids"].shape == (2, LENGTH)
    assert "no longer samples" not in " ".join(source.assumed)


def test_large_tensors_have_no_values_and_no_random_number_is_drawn():
    class Wide(Own):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            made = torch.randint(4, (MOST_VALUES + 1,)).view(-1)
            torch.randint(4, (8,))
            if type(made) is Tensor:
                raise ValueError("a large tensor has values")
            return super().forward(input_ids, labels)

    before = torch.random.get_rng_state()
    found = most_positions(lambda: Wide(40), None, 50, tables=(48, 40))
    assert torch.equal(before, torch.random.get_rng_state())
    assert found is not None and (found.most, found.table, found.rows) == (40, "places", 40)
