"""Reads a configuration from its source into a dict.

A source is a dict, a path to a JSON file, JSON text, or urlsafe base64 of JSON. Comments (``//``, ``#``,
``/* */``) and trailing commas are allowed, as in DeepSpeed's files. A key given twice is an error.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

from zeroshard.config.fields import show
from zeroshard.errors import ConfigError

Source = Mapping[str, Any] | str | PathLike[str] | None

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")


def read_source(source: Source) -> tuple[dict[str, Any], str]:
    """The configuration as a new dict, and where it came from: "config" or "file PATH".

    Containers are copied, so that the caller's dict is never changed.

    Raises:
        ConfigError: a missing file, text that is not JSON, a duplicate key, or not a JSON object.
    """
    if source is None:
        return {}, "config"
    if isinstance(source, Mapping):
        return copy_tree(source), "config"
    if isinstance(source, PathLike):
        return _read_file(Path(source))
    if not isinstance(source, str):
        raise ConfigError(
            f"the configuration must be a dict, a path to a JSON file, or base64 of JSON, "
            f"not {_article(type(source).__name__)}"
        )
    if not source.strip():
        raise ConfigError("the configuration is an empty string; give the path of a JSON file")
    if source.lstrip().startswith("{"):
        return parse_json(source, "the JSON text"), "config"
    decoded = _decode(source)  # before the file: a text this long may not be a valid file name
    if decoded is not None:
        return parse_json(decoded, "the base64 JSON"), "config"
    return _read_file(Path(source))


def copy_tree(value: Any) -> Any:
    """A copy of all dicts, lists and tuples in ``value``. Other values are shared with it."""
    if isinstance(value, Mapping):
        return {key: copy_tree(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_tree(inner) for inner in value]
    return value


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Parse JSON with comments and trailing commas. ``name``: the text's name in errors.

    >>> parse_json('{"a": 1, // one\\n "b": ["#",],}', "it")
    {'a': 1, 'b': ['#']}
    """
    text = _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text)
    text = _TRAILING_COMMA.sub(lambda m: m[0] if m[0][0] == '"' else " ", text)
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                twice.append(
                    f'"{key}" is given twice in the same object: {show(seen[key])}, then '
                    f"{show(value)}; keep one"
                )
            seen[key] = value
        return seen

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    if twice:
        raise ConfigError("\n".join(f"{name}: {line}" for line in sorted(set(twice))))
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name} must hold one JSON object {{...}}, not {show(parsed)}")
    return parsed


def _read_file(path: Path) -> tuple[dict[str, Any], str]:
    try:
        if not path.is_file():
            raise ConfigError(_missing_file(path))
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {show(str(path))} cannot be read: {error}") from None
    return parse_json(text, str(path)), f"file {path}"


def _missing_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a directory; give the path of a JSON file in it"
    folder = path.parent
    if not folder.is_dir():
        return f"config file not found: {path} (there is no directory {folder})"
    close = get_close_matches(path.name, sorted(p.name for p in folder.iterdir()), n=1, cutoff=0.7)
    hint = f". Did you mean {folder / close[0]}?" if close else ""
    return f"config file not found: {path}, searched in {folder.resolve()}{hint}"


def _decode(source: str) -> str | None:
    """The text that ``source`` encodes in urlsafe base64, or None if it is not base64."""
    try:
        padded = source + "=" * (-len(source) % 4)
        text = base64.b64decode(padded, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


def _article(name: str) -> str:
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
