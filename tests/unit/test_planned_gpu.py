"""Plans for a GPU: what dropout, attention and autocast of CUDA keep, and what is left of its memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.core.mesh import Mesh
from zeroshard.planner import Simulation, simulate
from zeroshard.planner.gpu_kernels import attention_kernel, kernels_of

BATCH, LENGTH, WIDTH, HEADS = 2, 48, 64, 4


class Layer(nn.Module):
    """Attention, dropout and a projection."""

    def __init__(self, attention: float, dropout: float) -> None:
        super().__init__()
        self.rates = attention, dropout
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.qkv(x_BTD).view(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, None, self.rates[0], True)
        y = F.dropout(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH), self.rates[1])
        out: Tensor = self.out(y)
        return out


def planned(attention: float = 0.0, dropout: float = 0.0, target: Any = "cuda") -> Simulation:
    return simulate(
        lambda: Layer(attention, dropout),
        {
            "train_micro_batch_size_per_gpu": BATCH, "bf16": {"enabled": True}, "unit_min_numel": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
        (torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16), None),
        mesh=Mesh(data_shard=2), rank=0, loss_fn=lambda y, _: y.sum(), target=target,
    )  # fmt: skip


def test_a_layer_keeps_the_bytes_that_are_computed_by_hand():
    numel = BATCH * LENGTH * WIDTH
    kept = 2 * numel * (1 + 3 + 1 + 1 + 1)  # batch, q k v, attention, dropout, projection: bf16
    kept += numel  # the mask of dropout: one byte per element
    kept += 4 * BATCH * HEADS * LENGTH  # logarithms of the sums of scores
    kept += 2 * 8 + 8  # state of the random numbers
    found = planned(0.1, 0.1).moments["forward"].activations_nbytes
    assert 0 <= found - kept <= 64  # the loss, and single numbers of the engine


def test_dropout_of_attention_costs_nothing_on_a_gpu_and_keeps_scores_on_the_cpu():
    assert planned(0.1).peak_nbytes == planned(0.0).peak_nbytes
    scores = 2 * BATCH * HEADS * LENGTH**2
    assert planned(0.1, target="cpu").peak_nbytes > planned(0.0, target="cpu").peak_nbytes + scores


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        ("flash", {}),
        ("flash", {"width": 256}),
        ("flash", {"causal": True}),
        ("flash", {"kv_heads": 2, "grouped": True}),
        ("efficient", {"width": 264}),
        ("efficient", {"masked": True}),
        ("efficient", {"dtype": torch.float32}),
        ("efficient", {"causal": True, "keys": 9}),
        ("math", {"dtype": torch.float64}),
        ("math", {"kv_heads": 2, "grouped": True, "masked": True}),
        ("math", {"dtype": torch.float32, "width": 10}),
    ],
)
def test_the_kernel_of_attention(kernel, changes):
    at: dict[str, Any] = {
        "dtype": torch.bfloat16, "width": 64, "kv_heads": 4, "keys": 8, "masked": False,
        "causal": False, "grouped": False,
    } | changes  # fmt: skip
    with torch.device("meta"):
        query = torch.empty(1, 4, 8, at["width"], dtype=at["dtype"])
        key = torch.empty(1, at["kv_heads"], at["keys"], at["width"], dtype=at["dtype"])
    how = {name: at[name] for name in ("masked", "causal", "grouped")}
    assert attention_kernel(query, key, key, **how) == kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [None, "bool", "learned"])
@pytest.mark.parametrize("width", [8, 12])
def test_attention_has_the_shapes_of_the_cpu_and_a_gradient(dtype, mask, width):
    with kernels_of("cuda"), FakeTensorMode():
        query = torch.zeros(2, 4, 18, width, dtype=dtype, requires_grad=True)
        bias = None if mask is None else torch.ones(1, 4, 18, 18, dtype=torch.bool)
        if mask == "learned":
            bias = torch.zeros(1, 4, 18, 18, dtype=dtype, requires_grad=True)
        out = F.scaled_dot_product_attention(query, query, query, bias, 0.1)
        out.sum().backward()
        assert (out.shape, out.dtype) == (query.shape, dtype)
        assert query.grad is not None
        assert mask != "learned" or bias.grad.shape == bias.shape


def test_autocast_is_that_of_cuda_inside_the_block_only():
    def dtypes() -> list[torch.dtype]:
        with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(torch.zeros(2, 8), torch.zeros(8, 8, requires_grad=True))
            return [t.dtype for t in (y, F.layer_norm(y, (8,)), y.softmax(-1), y**2, F.gelu(y))]

    low, full = torch.bfloat16, torch.float32
    with kernels_of("cuda"):
        assert dtypes() == [low, full, full, full, low]
    assert dtypes() == [low] * 5


NET = """
from torch import nn
import torch

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()

def net():
    return Net(8, 8), (torch.empty(2, 8), None)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "net_for_gpu.py").write_text(NET)
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def call(*options: str) -> Any:
        words = ["plan", "net_for_gpu:net", "--config", "ds.json", "--ranks", "4", *options]
        return CliRunner().invoke(main, words)

    return call


def test_a_preset_is_a_gpu_whose_context_and_communicators_are_not_for_tensors(run):
    found = json.loads(run("--machine", "h100", "--json").stdout)
    assert found["target"] == "cuda"
    communicators = 2  # gathers, and reductions at the same time at stage 3
    assert found["limit_nbytes"] == 80e9 - 5e8 - communicators * 1e9
    assert any("2 x 0.931 for communicators of NCCL (assumed" in line for line in found["assumed"])
    assert "on rank 0, a GPU" in run("--machine", "h100").stdout
    assert json.loads(run("--json").stdout)["target"] == "cpu"
    assert json.loads(run("--json", "--target", "cuda").stdout)["target"] == "cuda"


def test_a_target_of_another_kind_than_the_machine_is_a_mistake(run):
    result = run("--machine", "h100", "--target", "cpu")
    assert result.exit_code == 2
    assert "--target is cpu, and the machine 'H100 SXM 80 GB, nodes of 8' is of the kind cuda" in (
        " ".join(result.output.split())
    )
