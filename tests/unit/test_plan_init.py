"""What `zeroshard plan` says if the highest peak is not in a step."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.core.texts import gib_text

WIDTH = 128


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


def meta() -> tuple[nn.Module, tuple[Tensor, None]]:
    with torch.device("meta"):
        model = Net()
    return model, (torch.empty(1, WIDTH), None)


def whole() -> tuple[nn.Module, tuple[Tensor, None]]:
    return Net(), (torch.empty(1, WIDTH), None)


@pytest.fixture
def planned(tmp_path):
    def call(model: str, *options: str, **keys: object) -> str:
        config = {
            "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
            "unit_min_numel": 1, "bf16": {"enabled": True},
        }  # fmt: skip
        (tmp_path / "ds.json").write_text(json.dumps(config | keys))
        words = [model, "--config", str(tmp_path / "ds.json"), "--target", "cuda"]
        result = CliRunner().invoke(main, ["plan", *words, *options])
        assert result.exit_code in (0, 3), result.output
        return result.stdout

    return call


def test_a_step_is_shown_beside_the_peak_of_a_model_that_is_cut_after_it_is_built(
    planned, tmp_path
):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=256, vocab_size=32, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    words = (str(tmp_path), "--ranks", "8", "--seq", "4")
    keys = {"tensor_parallel": {"autotp_size": 4}, "zero_optimization": {"stage": 2}}
    found = json.loads(planned(*words, "--json", **keys))
    step, top = found["step_peak"]["nbytes"], found["peak_nbytes"]
    phases = {name: each["device_nbytes"] for name, each in found["phases"].items()}
    assert found["peak_phase"] == "init" and top == phases["init"]
    assert step == max(phases[name] for name in ("forward", "backward", "step")) < top
    between, below = ((step + top) / 2**31, step / 2**31)
    for gib, verdict in (
        (between, "fits, "),
        (below, "does not fit: "),
        (None, "needs less; peak"),
    ):
        options = () if gib is None else ("--memory", str(gib), "--check")
        first, second, third, *_ = planned(*words, *options, **keys).splitlines()
        assert first.startswith("peak " if gib is None else "does not fit: ")
        assert second.startswith(f"a step alone {verdict}")
        assert f"peak {gib_text(step)} in {found['step_peak']['phase']}" in second
        assert third.startswith(
            "init: each rank builds the whole model, before it is cut over tensor"
        )
        assert 'torch.device("meta")' in third


def test_a_model_on_the_meta_device_takes_less_in_init(planned):
    peaks = {}
    for name in ("whole", "meta"):
        words = (f"{__name__}:{name}", "--ranks", "8")
        found = json.loads(planned(*words, "--json", zero_optimization={"stage": 2}))
        peaks[name] = found["phases"]["init"]["device_nbytes"]
        told = "init: " in planned(*words, zero_optimization={"stage": 2})
        assert told is (found["peak_phase"] == "init")
    assert peaks["meta"] < peaks["whole"]
