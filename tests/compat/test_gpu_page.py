"""The configurations and keys of ``docs/gpu.md`` exist and mean what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zeroshard.config import load_config

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
CONFIGS = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]


def loaded(config: dict[str, Any]) -> Any:
    return load_config(config, world_size=2).config


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_each_configuration_is_accepted(config: dict[str, Any]) -> None:
    assert loaded(config).train_micro_batch_size_per_gpu == 1


def value_of(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def test_each_key_of_the_table_exists_and_has_the_default_that_is_given() -> None:
    section = PAGE.split("\n## Overlap and prefetch\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|", section, re.MULTILINE)
    given = {
        key: default
        for keys, defaults in rows
        for key, default in zip(re.findall(r"`(.+?)`", keys), defaults.split(", "), strict=True)
    }
    config = loaded({"train_micro_batch_size_per_gpu": 1})
    words = {"on": True, "null": None, "auto": "auto"}
    assert len(given) == 8
    for key, default in given.items():
        wanted = words[default] if default in words else int(float(default))
        assert value_of(config, key) == wanted, key


@pytest.mark.parametrize(
    "path",
    [
        "bf16.check_grad_overflow", "data_types.grad_accum_dtype", "compile_update", "transport",
        "communication_data_type", "steps_per_print", "zero_optimization.offload_optimizer",
        "zero_optimization.offload_param",
    ],
)  # fmt: skip
def test_each_key_in_the_text_exists(path: str) -> None:
    assert path.rsplit(".", maxsplit=1)[-1] in PAGE
    value_of(loaded({"train_micro_batch_size_per_gpu": 1}), path)


def test_links_lead_to_files() -> None:
    folder = Path(__file__).parents[2] / "docs"
    for link in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (folder / link).exists(), link
