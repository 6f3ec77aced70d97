"""The key ``compile_blocks``: each wrapped block is one graph inside its hooks, with the same numbers."""

from __future__ import annotations

import os
import sys
from functools import partial
from unittest import mock

import kit
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from zeroshard_testing import on_ranks

EAGER = partial(torch.compile, backend="aot_eager")
"""Traces forward and backward, and runs the operations of plain PyTorch."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *, checkpoints: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def forget_compiler() -> None:
    """Remove what torch leaves: a variable, and the thread of a progress bar."""
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None and bars.monitor is not None:
        bars.monitor.exit()
        bars.monitor = None


def losses(
    stage: int, *, compiles: bool, checkpoints: bool = False, steps: int = 4
) -> list[torch.Tensor]:
    torch.compiler.reset()
    counters.clear()
    found, graphs = [], []
    model = Net(checkpoints=checkpoints)
    keys = {"units": ["blocks.?"], "unit_min_numel": 1, "compile_blocks": compiles}
    with (
        mock.patch("zeroshard.zero.compiled_blocks.torch.compile", EAGER),
        kit.engine(model, stage, **keys) as engine,
    ):
        assert ("forward" in vars(model.blocks[0])) is compiles
        for step in range(steps):
            torch.manual_seed(step)
            loss = engine(torch.randn(5, 8)).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.detach())
            graphs.append(counters["stats"]["unique_graphs"])
        with torch.no_grad():
            found.append(engine(torch.ones(2, 8)).sum())
    forget_compiler()
    assert "forward" not in vars(model.blocks[0])
    assert not counters["graph_break"], counters["graph_break"]
    if compiles:
        # With gradients of the input and without; and the first forward, in which views are counted.
        assert 1 <= graphs[1] <= 3, "equal blocks share their code"
        assert graphs[1] == graphs[-1], "no step after the second compiles anything"
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_run_has_the_bits_of_one_that_is_not_compiled(stage):
    plain, compiled = (losses(stage, compiles=compiles) for compiles in (False, True))
    assert all(map(torch.equal, plain, compiled))


@on_ranks(2)
def test_blocks_that_are_recomputed_are_compiled_too():
    plain, compiled = (losses(3, compiles=compiles, checkpoints=True) for compiles in (False, True))
    assert all(map(torch.equal, plain, compiled))


@on_ranks(1)
def test_a_forward_that_the_program_has_replaced_comes_back():
    model = Net()
    own = model.blocks[0].forward
    model.blocks[0].forward = own
    keys = {"units": ["blocks.?"], "unit_min_numel": 1, "compile_blocks": True}
    with kit.engine(model, 2, **keys):
        assert vars(model.blocks[0])["forward"] is not own
    assert vars(model.blocks[0])["forward"] is own


# ---------------------------------------------------------------------- public models, compiled for real

FAMILIES = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 8}, "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8}, "phi3": {"pad_token_id": 0}, "olmo2": {}, "gpt2": {}, "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "bert": {"is_decoder": True},
}  # fmt: skip
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip


def trained(family: str, *, compiles: bool, **more) -> tuple[list[float], int]:
    """Losses of four steps, and how many operations the last forward called."""
    transformers = pytest.importorskip("transformers")
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]}, **more)
    for name in ("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
                 "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"):  # fmt: skip
        if hasattr(settings, name):
            setattr(settings, name, 0.0)
    model = transformers.AutoModelForCausalLM.from_config(settings).train()
    keys = {"unit_min_numel": 1, "compile_blocks": compiles}
    found, graphs = [], []
    import torch._inductor.config as inductor

    # A pool of compilers would outlive the test.
    with inductor.patch(compile_threads=1), kit.engine(model, 3, **keys) as engine:
        for step in range(4):
            torch.manual_seed(step)
            ids = torch.randint(1, 90, (2, 16))
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
            graphs.append(counters["stats"]["unique_graphs"])
        with torch.no_grad():
            engine(input_ids=ids, labels=ids, use_cache=False)  # a graph of its own
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as calls:
                engine(input_ids=ids, labels=ids, use_cache=False)
    forget_compiler()
    operations = sum(event.name.startswith("aten::") for event in calls.events())
    if compiles:
        assert graphs[0] > 0
        assert graphs[1] == graphs[-1], f"compiled anew: {graphs}"
        assert not counters["graph_break"], counters["graph_break"]
    return found, operations


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2, timeout=300)
def test_a_public_model_trains_alike_with_fewer_operations(family):
    plain, before = trained(family, compiles=False)
    compiled, after = trained(family, compiles=True)
    assert compiled == pytest.approx(plain, abs=1e-6, rel=1e-6)
    assert after < before
