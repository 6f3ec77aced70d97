"""The answers to programs that query where the engine stores its state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zeroshard.config import load_config
from zeroshard.deepspeed.engine import GETTERS

CPU = {"device": "cpu", "ratio": 0.5}
DISK = {"device": "nvme", "nvme_path": "/d"}


def ask(name: str, **zero: Any) -> Any:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3, **zero}}
    return GETTERS[name](SimpleNamespace(settings=load_config(config, world_size=1).config))


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
def test_the_sections_themselves_are_given(name: str) -> None:
    section = ask(f"zero_{name}", **{name: DISK})
    assert (section.device, section.nvme_path) == ("nvme", "/d")
    assert ask(f"zero_{name}") is None


@pytest.mark.parametrize(("scale", "is_dynamic"), [(0, True), (128, False)])
def test_a_loss_scale_that_is_given_is_not_dynamic(scale: int, is_dynamic: bool) -> None:
    config = {"train_batch_size": 1, "fp16": {"enabled": True, "loss_scale": scale}}
    settings = load_config(config, world_size=1).config
    engine = SimpleNamespace(settings=settings, scales_loss=True)
    assert GETTERS["dynamic_loss_scale"](engine) is is_dynamic


@pytest.mark.parametrize(
    ("section", "on_host", "off_device", "ratio"),
    [
        (None, False, False, 1.0),
        ({"device": "none"}, False, False, 1.0),
        (CPU, True, True, 0.5),
        (DISK, False, True, 1.0),
    ],
    ids=["nothing", "none", "cpu", "nvme"],
)
def test_short_questions_about_the_optimizer(
    section: dict[str, Any] | None, on_host: bool, off_device: bool, ratio: float
) -> None:
    given = {} if section is None else {"offload_optimizer": section}
    assert ask("zero_cpu_offload", **given) is on_host
    assert ask("zero_use_cpu_optimizer", **given) is off_device
    assert ask("zero_partial_offload", **given) == ratio
