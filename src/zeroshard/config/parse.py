"""Reads a configuration from its source into a typed section, and collects every problem in one pass.

A source is a dict, a path to a JSON file, JSON text, or urlsafe base64 of JSON. Comments (``//``, ``#``,
``/* */``) and trailing commas are allowed, as in DeepSpeed's files. A key given twice is an error.

There are two walks over the dict. ``tidy`` goes through what the user wrote: it sets "auto" values aside
and finds unknown and refused keys. ``validate`` lets pydantic read the rest. A rejected value is recorded
and replaced by its default, and reading goes on, so that one wrong value hides no other. Nothing here
depends on the process or its variables: the messages are the same on every rank.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from zeroshard.config.fields import (
    Section,
    is_auto,
    is_off,
    key_of,
    read_number,
    section_type,
    show,
)
from zeroshard.config.keys import ALIASES, MEANT, OFF, REFUSED, RENAMED, SURE, advice, nearest
from zeroshard.config.params import (
    ARGUMENTS,
    OTHER_NAMES,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    UNAVAILABLE_OPTIMIZERS,
)
from zeroshard.core.texts import without_secrets
from zeroshard.errors import ConfigError

S = TypeVar("S", bound=Section)

Source = Mapping[str, Any] | str | PathLike[str] | None

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")

_TOO_DEEP = "is nested too deeply, or contains itself"


def read_source(source: Source) -> tuple[dict[str, Any], str]:
    """The configuration as a new dict, and where it came from: "config" or "file PATH".

    Containers are copied, so that the caller's dict is never changed.

    Raises:
        ConfigError: a missing file, text that is not JSON, a duplicate key, or not a JSON object.
    """
    if source is None:
        return {}, "config"
    if isinstance(source, Mapping):
        try:
            return copy_tree(source), "config"
        except RecursionError:
            raise ConfigError(f"the configuration {_TOO_DEEP}") from None
    if isinstance(source, PathLike):
        return _read_file(Path(source))
    if not isinstance(source, str):
        name = type(source).__name__
        raise ConfigError(
            f"the configuration must be a dict, a path to a JSON file, or base64 of JSON, "
            f"not {'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
        )
    if not source.strip():
        raise ConfigError("the configuration is an empty string; give the path of a JSON file")
    if source.lstrip().startswith("{"):
        return parse_json(source, "the JSON text"), "config"
    # Before the file: a text this long may not be a valid file name.
    if (decoded := _decode(source)) is not None:
        return parse_json(decoded, "the base64 JSON"), "config"
    return _read_file(Path(source))


def copy_tree(value: Any) -> Any:
    """A copy of all dicts, lists and tuples in ``value``. Other values are shared with it.

    A member of an enum, such as DeepSpeed's ``OffloadDeviceEnum.cpu``, becomes its value.
    """
    if isinstance(value, Enum):
        return value.value
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
                both = [show(without_secrets(each, key)) for each in (seen[key], value)]
                twice.append(
                    f'"{key}" is given twice in the same object: {", then ".join(both)}; keep one'
                )
            seen[key] = value
        return seen

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{name} {_TOO_DEEP}") from None
    if twice:
        raise ConfigError("\n".join(f"{name}: {line}" for line in sorted(set(twice))))
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name} must contain one JSON object {{...}}, not {show(parsed)}")
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
        return f"config file not found: {str(path)!r} (there is no directory {folder})"
    close = get_close_matches(path.name, sorted(p.name for p in folder.iterdir()), n=1, cutoff=0.7)
    hint = f". Did you mean {folder / close[0]}?" if close else ""
    if not close and not path.suffix:
        hint = ". A configuration is a path, a dict, or a string of JSON, also in base64"
    return f"config file not found: {str(path)!r}, searched in {folder.resolve()}{hint}"


def _decode(source: str) -> str | None:
    """The text that ``source`` encodes in urlsafe base64, or None if it is not base64."""
    padded = source + "=" * (-len(source) % 4)
    try:
        text = base64.b64decode(padded, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


@dataclass
class Findings:
    """What was found in a configuration. All that read it add to this.

    ``given``: keys that the user wrote, ``autos`` as "auto", ``from_arguments`` as an argument.
    ``derived``: keys that got a value from others. ``reasons``: more origins, by key.
    """

    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    autos: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    hints: set[str] = field(default_factory=set)
    from_arguments: set[str] = field(default_factory=set)
    derived: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)

    def reject(self, path: str, text: str) -> None:
        self.rejected.add(path)
        self.errors.append(f"{path}: {text}")


def tidy(
    raw: Mapping[Any, Any],
    model: type[Section],
    prefix: str,
    found: Findings,
    *,
    ignores: Callable[[str, str], bool],
) -> dict[str, Any]:
    """The part of ``raw`` that ``model`` can read. Everything else is recorded in ``found``.

    ``ignores(section, name)``: whether this unknown key is recorded without an error. ``section`` is
    dotted; the top level is empty.
    """
    out: dict[str, Any] = {}
    for name, value in raw.items():
        path = f"{prefix}{name}"
        known = model.model_fields.get(name) if isinstance(name, str) else None
        if path in REFUSED:
            if not is_off(value, OFF.get(path)):
                found.errors.append(f"{path}: not supported: {REFUSED[path]}")
        elif known is None:
            _unknown(path, name, value, model, found, ignore=ignores(prefix.rstrip("."), str(name)))
        elif is_auto(value):
            found.autos.add(path)
        elif not _dropped(path, value, known, found):
            inner = section_type(known.annotation)
            if inner is None:
                out[name] = value
                found.given.add(path)
            elif isinstance(value, Mapping):
                out[name] = tidy(value, inner, f"{path}.", found, ignores=ignores)
                if path in ARGUMENTS:
                    _typed_params(path, out[name], found, ignores=ignores)
            else:
                example = _example(inner, value)
                found.reject(path, f"must be an object such as {example}, not {show(value)}")
    return out


def _unknown(
    path: str, name: object, value: object, model: type[Section], found: Findings, *, ignore: bool
) -> None:
    if path == "optimizer.params.max_grad_norm" and is_off(value):
        return
    siblings = list(model.model_fields)
    section, dot, _ = str(name).partition(".")
    home = section if section in siblings else nearest(section, siblings, cutoff=SURE)
    if ignore:
        close = MEANT.get(str(name).lower()) or nearest(str(name), siblings, cutoff=SURE)
        found.ignored.append(f'{path} (did you mean "{close}"?)' if close else path)
    elif dot and home and _holds_keys(model.model_fields[home]):
        found.errors.append(f'{path}: no such key. Write it inside "{home}", without the dot.')
    else:
        # The dots of a name part no sections.
        one = path.removesuffix(str(name)) + str(name).replace(".", "_")
        found.errors.append(f"{path}: no such key. {advice(one, siblings)}")


def _holds_keys(field: FieldInfo) -> bool:
    """Whether a value is a section or a mapping such as ``params``."""
    kinds = (field.annotation, *get_args(field.annotation))
    return section_type(field.annotation) is not None or any(get_origin(k) is dict for k in kinds)


def _dropped(path: str, value: object, known: FieldInfo, found: Findings) -> bool:
    """Whether this value is left out of the configuration: the feature is switched off, or refused."""
    row = key_of(path, known)
    if row.is_section and (value == {} or (is_off(value) and not isinstance(value, Mapping))):
        return True
    if row.verdict == "accept":
        return value is None or (value is False and known.annotation is not bool)
    if row.verdict in ("later", "refuse"):
        if not is_off(value, known.get_default(call_default_factory=True)):
            promise = "planned, not implemented yet" if row.verdict == "later" else "not supported"
            reason = f": {row.reason}" if row.reason else ""
            found.reject(path, f"{promise}{reason}; it is {show(value)}, leave it out")
        return True
    return False


def _example(model: type[Section], value: object) -> str:
    """How the section is written: with ``value`` if its first key can have it."""
    name, known = next(iter(model.model_fields.items()))
    trial = Findings()
    if not isinstance(value, bool):
        validate(model, {name: value}, "", trial)
        if not trial.errors:
            return "{" + f'"{name}": {show(value)}' + "}"
    if known.is_required():
        return "{" + f'"{name}": ...' + "}"
    default = known.get_default(call_default_factory=True)
    return "{" + f'"{name}": {show(True if default is False else default)}' + "}"


def rename(raw: dict[str, Any], found: Findings) -> dict[str, Any]:
    """``raw`` with today's spelling of old keys. ``raw`` is our own copy, and is changed in place."""
    zero = raw.get("zero_optimization")
    if isinstance(zero, bool):
        raw["zero_optimization"] = {"stage": 1} if zero else {}
        if zero:
            found.notices.append('zero_optimization: true was read as {"stage": 1}')
    for old, new in RENAMED.items():
        section, _, name = old.rpartition(".")
        parent = _section_of(raw, section)
        if parent is not None and name in parent:
            _rename_key(parent, old, new, found)
    return raw


def _section_of(raw: dict[str, Any], path: str) -> dict[str, Any] | None:
    """The section with this dotted path; ``raw`` itself for ""; None: there is none."""
    section: Any = raw
    for name in path.split(".") if path else ():
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else None


def _rename_key(parent: dict[str, Any], old: str, new: str, found: Findings) -> None:
    """Give the key ``old``, which is in the section ``parent``, its new name."""
    name, new_name = old.rpartition(".")[2], new.rpartition(".")[2]
    value = parent.pop(name)
    if name.startswith("cpu_offload") and not is_auto(value):
        if is_off(value):
            return
        if value is not True:
            found.errors.append(f"{old}: must be true or false, not {show(value)}")
            return
        value = {"device": "cpu"}
    if new_name in parent:
        if parent[new_name] != value:
            found.errors.append(
                f"{old}: another name of {new}, which is given too; keep one of them"
            )
        return
    parent[new_name] = value
    if name not in ALIASES:
        found.notices.append(f"{old}: old name, read as {new}")


def _typed_params(
    section: str, given: dict[str, Any], found: Findings, *, ignores: Callable[[str, str], bool]
) -> None:
    """Check ``params`` against what the type takes. Changes ``given`` in place."""
    kind, params = given.get("type"), given.get("params") or {}
    if not isinstance(params, Mapping):
        example = '{"lr": 0.001}' if section == "optimizer" else "{...}"
        found.reject(
            f"{section}.params", f"must be an object such as {example}, not {show(params)}"
        )
        params = {}
    given["params"] = params
    if not isinstance(kind, str):
        return
    types = ARGUMENTS[section]
    if section == "optimizer":
        by_lower = {name.lower(): name for name in (*types, *UNAVAILABLE_OPTIMIZERS)}
        kind = given["type"] = by_lower.get(kind.lower(), kind)
        if kind in UNAVAILABLE_OPTIMIZERS:
            found.reject("optimizer.type", f'"{kind}" is {UNAVAILABLE_OPTIMIZERS[kind]}')
            return
    found.given.discard(f"{section}.params")
    prefix = f"{section}.params."
    if kind in types:
        arguments = types[kind].arguments
        tidied = tidy(params, arguments, prefix, found, ignores=ignores)
        _refuse_auto(tidied, arguments, prefix, found)
        read = validate(arguments, tidied, prefix, found)
        fields = arguments.model_fields
        hints = {name for name in tidied if key_of(prefix + name, fields[name]).verdict == "accept"}
        found.hints |= {prefix + name for name in hints}
        given["params"] = read.model_dump(exclude_unset=True, exclude=hints) if read else {}
        return
    _torch_class(section, kind, [*types, *UNAVAILABLE_OPTIMIZERS], found)
    given["params"] = _torch_params(prefix, params, found)


def _refuse_auto(
    params: dict[str, Any], model: type[Section], prefix: str, found: Findings
) -> None:
    """Reject "auto" for arguments without a default. They get the value 1, so that reading goes on."""
    for name, known in model.model_fields.items():
        if known.is_required() and prefix + name in found.autos:
            found.reject(
                prefix + name, '"auto" is not possible: the number cannot be computed; write it'
            )
            params[name] = 1


def _torch_class(section: str, kind: str, named: list[str], found: Findings) -> None:
    torch_names = TORCH_OPTIMIZERS if section == "optimizer" else TORCH_SCHEDULERS
    if kind in torch_names:
        return
    home = "torch.optim" if section == "optimizer" else "torch.optim.lr_scheduler"
    close = OTHER_NAMES[section].get(kind.lower()) or nearest(kind, [*named, *torch_names])
    if close or not kind.isidentifier():
        hint = f'. Did you mean "{close}"?' if close else f"; write the name of a class of {home}"
        found.reject(f"{section}.type", f"there is no {section} {show(kind)}{hint}")


def _torch_params(prefix: str, params: Mapping[str, Any], found: Findings) -> dict[str, Any]:
    """Arguments of a torch class: passed on, with strings that are numbers converted to numbers."""
    out: dict[str, Any] = {}
    for name, value in params.items():
        path = f"{prefix}{name}"
        if path == "optimizer.params.max_grad_norm":
            if not is_off(value):
                found.errors.append(f"{path}: no such key. {advice(path, [])}")
        elif is_auto(value):
            found.autos.add(path)
        else:
            number = read_number(value) if isinstance(value, str) else None
            out[str(name)] = value if number is None else number
            found.given.add(path)
            if number is not None:
                found.notices.append(f"{path}: the string {show(value)} was read as a number")
    return out


def validate(model: type[S], given: dict[str, Any], prefix: str, found: Findings) -> S | None:
    """``given`` as an immutable ``model``. A rejected value is recorded and replaced by its default.

    None if ``model`` itself lacks a value that has no default. A section that lacks one is left out.
    """
    try:
        read = model.model_validate(given)
    except ValidationError as error:
        incomplete: set[int | str] = set()
        for item in error.errors(include_url=False):
            loc = item["loc"]
            known = _field_at(model, loc)
            if item["type"] == "missing":
                incomplete.add(loc[0])
            path = prefix + ".".join(str(part) for part in loc)
            value = _take(given, loc)
            hidden = show(without_secrets(value, str(loc[-1])))
            found.reject(path, _describe(item, value, known).replace(show(value), hidden))
        for name in incomplete:
            given.pop(str(name), None)
        try:
            return model.model_validate(given)
        except ValidationError:
            return None
    _note_coercions(given, read, prefix, found)
    return read


def _take(given: dict[str, Any], loc: tuple[int | str, ...]) -> object:
    """Remove the rejected value from ``given``, so that its default is used, and return it."""
    parent: Any = given
    for part in loc[:-1]:
        parent = parent[part]
    return parent.pop(loc[-1], None)


def _field_at(model: type[Section], loc: tuple[int | str, ...]) -> FieldInfo:
    for part in loc:
        known = model.model_fields[str(part)]
        model = section_type(known.annotation) or model
    return known


def _describe(item: Any, value: object, known: FieldInfo) -> str:
    ctx = item.get("ctx", {})
    kind = item["type"]
    if kind == "missing":
        return f"missing, and it has no default: {known.description}"
    if kind == "zeroshard":
        if value is not None or known.is_required():
            return str(ctx["text"])
        default = show(known.get_default(call_default_factory=True))
        return f"{ctx['text']}; leave the key out for its default, {default}"
    for error, words, key in (
        ("greater_than", "must be greater than", "gt"),
        ("greater_than_equal", "must be at least", "ge"),
        ("less_than_equal", "must be at most", "le"),
    ):
        if kind == error:
            return f"{words} {ctx[key]:g}, not {show(value)}"
    if kind == "literal_error":
        expected = str(ctx["expected"]).replace("'", '"')
        return f"must be {expected}, not {show(value)}"
    if kind == "dict_type":
        return f"must be an object {{...}}, not {show(value)}"
    return f"{item['msg']}, not {show(value)}"


def _note_coercions(given: Any, read: object, path: str, found: Findings) -> None:
    """Record which strings were read as numbers."""
    if isinstance(given, Mapping):
        for name, value in given.items():
            inner = getattr(read, name, None) if isinstance(read, Section) else None
            _note_coercions(value, inner, f"{path}{name}.", found)
    elif isinstance(given, (list, tuple)) and isinstance(read, tuple) and len(given) == len(read):
        for value, inner in zip(given, read, strict=True):
            _note_coercions(value, inner, path, found)
    elif isinstance(given, str) and isinstance(read, (int, float)):
        key = path.removesuffix(".")
        found.notices.append(f"{key}: the string {show(given)} was read as a number")
