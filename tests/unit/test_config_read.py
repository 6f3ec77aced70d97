"""A configuration is the same if it is read from a dict, a file, text or base64."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from zeroshard.config import load_config
from zeroshard.config.parse import parse_json, read_source
from zeroshard.errors import ConfigError

pytestmark = pytest.mark.smoke

PLAIN = '{"train_batch_size": 8, "bf16": {"enabled": true}}'
COMMENTED = """
{
  // a comment, with "quotes" and { braces }
  "train_batch_size": 8,  # another
  /* one over
     two lines */
  "bf16": {"enabled": true,},
}
"""


def error_of(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_source(source)
    return str(caught.value)


def base64_of(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "source",
    [
        PLAIN,
        COMMENTED,
        base64_of(PLAIN),
        base64_of(PLAIN).rstrip("="),
        {"train_batch_size": 8, "bf16": {"enabled": True}},
        MappingProxyType({"train_batch_size": 8, "bf16": MappingProxyType({"enabled": True})}),
    ],
    ids=["text", "comments", "base64", "base64 without padding", "dict", "mapping"],
)
def test_sources_agree(source: Any) -> None:
    assert read_source(source)[0] == {"train_batch_size": 8, "bf16": {"enabled": True}}


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_read(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "ds.json"
    path.write_text(COMMENTED)
    raw, where = read_source(kind(path))
    assert (raw["train_batch_size"], where) == (8, f"file {path}")


def test_comment_signs_inside_strings_are_text() -> None:
    text = '{"a": "http://x/#y /* z */", "b": ",}", "c": "\\"//"}'
    assert parse_json(text, "it") == {"a": "http://x/#y /* z */", "b": ",}", "c": '"//'}


def test_a_missing_file_is_named_with_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(PLAIN)
    missing = tmp_path / "ds_confg.json"
    assert error_of(str(missing)) == (
        f"config file not found: {str(missing)!r}, searched in {tmp_path}. "
        f"Did you mean {tmp_path / 'ds_config.json'}?"
    )


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "ds.json"
    assert error_of(missing) == (
        f"config file not found: {str(missing)!r} (there is no directory {missing.parent})"
    )


def test_a_directory_is_no_config(tmp_path: Path) -> None:
    assert error_of(tmp_path) == f"{tmp_path} is a directory; give the path of a JSON file in it"


def test_a_syntax_error_gives_the_line_in_the_commented_file() -> None:
    text = '{\n  /* two\n  lines */\n  "a": 1 "b": 2\n}'
    assert (
        error_of(text) == "the JSON text is not JSON: Expecting ',' delimiter at line 4, column 10"
    )


def test_every_duplicate_key_is_named_with_both_values() -> None:
    text = '{"a": 1, "a": 2, "zero_optimization": {"stage": 2, "stage": 3}}'
    assert error_of(text) == (
        'the JSON text: "a" is given twice in the same object: 1, then 2; keep one\n'
        'the JSON text: "stage" is given twice in the same object: 2, then 3; keep one'
    )


def test_json_that_is_no_object_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("[1, 2]")
    assert error_of(path) == f"{path} must contain one JSON object {{...}}, not [1, 2]"


def test_a_configuration_that_is_nested_without_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    endless: dict[str, Any] = {}
    endless["zero_optimization"] = endless
    for text in ("[" * 100_000, '{"a":' * 100_000):
        path.write_text(text)
        assert error_of(path) == f"{path} is nested too deeply, or contains itself"
    assert error_of(endless) == "the configuration is nested too deeply, or contains itself"


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xff\xfe\x00{")
    assert error_of(path).startswith("config file ")
    assert "cannot be read: " in error_of(path)


def test_a_text_too_long_for_a_file_name_is_an_error() -> None:
    assert "cannot be read: " in error_of("x" * 5000)


def test_base64_may_be_longer_than_a_file_name() -> None:
    long = {"train_batch_size": 8, "keep_fp32": ["layer" * 2000]}
    assert read_source(base64_of(json.dumps(long)))[0] == long


def test_another_type_is_an_error() -> None:
    assert error_of(3) == (
        "the configuration must be a dict, a path to a JSON file, or base64 of JSON, not an int"
    )


def test_the_callers_dict_is_neither_changed_nor_shared() -> None:
    inner = {"stage": 1, "reduce_bucket_size": "auto", "cpu_offload": False}
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}
    config["zero_optimization"] = inner
    loaded = load_config(config, world_size=1)
    assert config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto", "cpu_offload": False},
    }
    assert loaded.raw == config
    assert loaded.raw["zero_optimization"] is not inner


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_string_is_no_configuration(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text, world_size=1)
    wanted = "the configuration is an empty string; give the path of a JSON file"
    assert str(caught.value) == wanted
