"""Plans of stacked experts in any dtype. The fake products of torch take bf16 only."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.planner.fakes import fake_tensors

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def products(dtype: torch.dtype) -> list[Tensor]:
    """A product of two groups of tokens with their matrices, and both gradients."""
    tokens = torch.ones(6, 24, dtype=dtype, requires_grad=True)
    experts = torch.ones(2, 40, 24, dtype=dtype, requires_grad=True)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    out = grouped_mm(tokens, experts.transpose(1, 2), offs=ends)
    return [out, *torch.autograd.grad(out, (tokens, experts), torch.ones_like(out))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_products_of_groups_are_as_those_of_a_run(dtype):
    real = products(dtype)
    with fake_tensors():
        fake = products(dtype)
    for own, planned in zip(real, fake, strict=True):
        assert planned.shape == own.shape
        assert (planned.dtype, planned.stride()) == (own.dtype, own.stride())


@pytest.mark.parametrize("where", [("--machine", "h100"), ("--target", "cuda"), ()], ids=" ".join)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_mixtral_is_planned_in_every_precision(where, precision, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, vocab_size=64, architectures=["MixtralForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    (tmp_path / "ds.json").write_text(json.dumps(config | {"zero_optimization": {"stage": 3}}))
    words = [str(tmp_path), "--config", str(tmp_path / "ds.json"), "--ranks", "2", "--seq", "8"]
    result = CliRunner().invoke(main, ["plan", *words, *where, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["peak_nbytes"] > 0
