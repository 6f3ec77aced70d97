"""Value types and verdicts of configuration keys, for all sections.

The value types accept unambiguous spellings and never guess: ``Int`` takes ``5e8`` and ``"8"``, ``Flag``
takes only true and false. A verdict says what ZeroShard does with a key (``VERDICT_MEANING``). Each key
is declared once, as a field made by ``honour``, ``accept``, ``not_yet``, ``later`` or ``refuse``. The key
table, the errors, the notices and ``docs/config.md`` are derived from the fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from zeroshard.core.tiers import TIERS

Verdict = Literal["honour", "accept", "not yet", "later", "refuse"]

VERDICT_MEANING: dict[Verdict, str] = {
    "honour": "works as described",
    "accept": "read and checked, but has no effect; one notice lists such keys when they are set",
    "not yet": "read and checked; belongs to a feature that is not implemented yet, so using it is an "
    "error when it would have an effect",
    "later": "planned; an error unless it is switched off",
    "refuse": "not supported and not planned; an error with the reason, unless it is switched off",
}


class Section(BaseModel):
    """One object of the configuration: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def _word(verdict: Verdict) -> Callable[..., Any]:
    def field(default: Any, doc: str, *, why: str = "", done: Any = None) -> Any:
        """``done``: a value that asks for what ZeroShard always does, so that it gets no notice."""
        extra: dict[str, Any] = {"verdict": verdict, "why": why, "done": done}
        if callable(default):
            return Field(default_factory=default, description=doc, json_schema_extra=extra)
        return Field(default, description=doc, json_schema_extra=extra)

    return field


honour = _word("honour")
accept = _word("accept")
not_yet = _word("not yet")
later = _word("later")
refuse = _word("refuse")


def is_auto(value: object) -> bool:
    """Whether this is the word "auto", which leaves the value to the reader of the configuration."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def is_off(value: object, default: object = None) -> bool:
    """Whether this is one of the values by which configurations switch a feature off.

    >>> is_off({"enabled": False, "theta": 0.5}), is_off({"a": {"enabled": False}, "b": {}})
    (True, True)
    >>> is_off({"theta": 0.5}), is_off(0), is_off("auto"), is_off(True)
    (False, True, True, False)
    """
    if isinstance(value, Mapping):
        if "enabled" in value:
            return is_off(value["enabled"])
        return all(is_off(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return not value or value == default
    if is_auto(value) or value is None or value in (False, 0, "", "none"):
        return True
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def show(value: object) -> str:
    """The value as JSON text, cut to a readable length."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = str(value) if isinstance(value, Real) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def problem(text: str) -> PydanticCustomError:
    """A validation error whose text is shown to the user as it is."""
    return PydanticCustomError("zeroshard", "{text}", {"text": text})


def read_number(value: object) -> int | float | None:
    """``value`` as a number if it is one or is the text of one, else None. Booleans are not numbers."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value.strip())
            except ValueError:
                continue
    return None


def _int(value: object) -> int:
    number = read_number(value)
    if number is None:
        raise problem(f"must be a whole number, not {show(value)}")
    if isinstance(number, float):
        if not math.isfinite(number) or number != int(number):
            raise problem(f"must be a whole number, not {show(value)}")
        return int(number)
    return number


def _float(value: object) -> float:
    number = read_number(value)
    if number is None or math.isnan(number):
        raise problem(f"must be a number, not {show(value)}")
    return float(number)


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("true", "false", "1", "0"):
        meant = "true" if word in ("true", "1") else "false"
        kind = "string" if isinstance(value, str) else "number"
        raise problem(f"must be true or false, not the {kind} {show(value)}; write {meant}")
    raise problem(f"must be true or false, not {show(value)}")


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if hasattr(value, "__fspath__"):
        return str(value)
    raise problem(f"must be a string, not {show(value)}")


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if isinstance(value, str):
        raise problem(f"must be a list of strings; write [{show(value)}]")
    raise problem(f"must be a list of strings, not {show(value)}")


def _count_or_auto(value: object) -> int | Literal["auto"]:
    if is_auto(value):
        return "auto"
    number = read_number(value)
    if number is None or number < 1 or number != int(number):
        raise problem(f'must be a whole number of at least 1, or "auto", not {show(value)}')
    return int(number)


def _texts_or_auto(value: object) -> tuple[str, ...] | Literal["auto"]:
    return "auto" if is_auto(value) else _texts(value)


def _floats(value: object) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        raise problem(f"must be a list of numbers, not {show(value)}")
    return tuple(_float(item) for item in value)


def _pair(value: object) -> tuple[float, ...]:
    pair = _floats(value)
    if len(pair) != 2 or not all(0 <= beta < 1 for beta in pair):
        raise problem(f"must be two numbers in [0, 1), such as [0.9, 0.999], not {show(value)}")
    return pair


def _per_group(value: object) -> float | tuple[float, ...]:
    return _floats(value) if isinstance(value, (list, tuple)) else _float(value)


DTYPES: dict[str, str] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp64", "float64", "double", "torch.float64"), "float64"),
}


def _dtype(value: object) -> str:
    word = str(value).strip().lower()
    if word not in DTYPES:
        raise problem(f'must be a dtype such as "fp32", "fp16" or "bf16", not {show(value)}')
    return DTYPES[word]


def _autocast_dtype(value: object) -> object:
    word = DTYPES.get(str(value).strip().lower())
    if value is not None and word not in ("float16", "bfloat16"):
        raise problem(f'must be "bfloat16" or "float16", not {show(value)}')
    return None if value is None else word


def _stage(value: object) -> object:
    number = read_number(value)
    return number if number not in (0, 1, 2, 3) else int(number)


def _device(value: object) -> object:
    word = "none" if value is None else str(value).strip().lower()
    if word not in TIERS:
        *others, last = [show(name) for name in TIERS]
        raise problem(f"must be {', '.join(others)} or {last}, not {show(word)}")
    return word


def _directory(value: object) -> object:
    """None for null, "none" and "": launchers pass these when they have no path."""
    is_none = isinstance(value, str) and value.strip().lower() in ("", "none", "null")
    return None if is_none else value


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


Flag = Annotated[bool, BeforeValidator(_flag)]
Int = Annotated[int, BeforeValidator(_int)]
Natural = Annotated[int, Field(ge=0), BeforeValidator(_int)]
Count = Annotated[int, Field(gt=0), BeforeValidator(_int)]
CountOrAuto = Annotated[int | Literal["auto"], PlainValidator(_count_or_auto)]
Float = Annotated[float, BeforeValidator(_float)]
Amount = Annotated[float, Field(ge=0), BeforeValidator(_float)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(_float)]
AboveOne = Annotated[float, Field(gt=1), BeforeValidator(_float)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(_float)]
Text = Annotated[str, BeforeValidator(_text)]
Texts = Annotated[tuple[str, ...], PlainValidator(_texts)]
TextsOrAuto = Annotated[tuple[str, ...] | Literal["auto"], PlainValidator(_texts_or_auto)]
Betas = Annotated[tuple[float, ...], PlainValidator(_pair)]
PerGroup = Annotated[float | tuple[float, ...], PlainValidator(_per_group)]
Dtype = Annotated[Literal["float32", "float16", "bfloat16", "float64"], BeforeValidator(_dtype)]
Lower = BeforeValidator(_lower)
AUTOCAST_DTYPE = BeforeValidator(_autocast_dtype)
STAGE = BeforeValidator(_stage)
DEVICE = BeforeValidator(_device)
DIRECTORY = BeforeValidator(_directory)
Free = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """One key: dotted path, verdict, the reason for it, meaning, and the field if the key has one."""

    path: str
    verdict: Verdict
    reason: str
    doc: str
    field: FieldInfo | None = None
    is_section: bool = False


def key_of(path: str, field: FieldInfo) -> Key:
    """The key at ``path`` that ``field`` of a section declares."""
    extra: Any = field.json_schema_extra
    return Key(
        path,
        extra["verdict"],
        extra["why"],
        field.description or "",
        field,
        section_type(field.annotation) is not None,
    )


def section_type(annotation: Any) -> type[Section] | None:
    """The section class in a field's annotation (``X`` or ``X | None``), or None."""
    options = (annotation, *getattr(annotation, "__args__", ()))
    found = [o for o in options if isinstance(o, type) and issubclass(o, Section)]
    return found[0] if found else None
