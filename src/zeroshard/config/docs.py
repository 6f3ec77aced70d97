"""Generates ``docs/config.md``, the page about the configuration.

``python -m zeroshard.config.docs > docs/config.md`` writes it from the fields that read a configuration.
A test compares the committed page with this output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from zeroshard.config.fields import VERDICT_MEANING, Section, show
from zeroshard.config.keys import KEYS, REFUSED, RENAMED, Key
from zeroshard.config.params import OPTIMIZERS, SCHEDULERS, UNAVAILABLE_OPTIMIZERS
from zeroshard.config.schema import Config, section_type

INTRO = """\
# Configuration

A configuration is a dict, a path to a JSON file, or urlsafe base64 of JSON. The format is
DeepSpeed's: existing files work unchanged. Comments (`//`, `#`, `/* */`) and trailing commas are
legal; a key given twice is an error. Your dict is never written to.

* **Everything is checked before anything starts.** An unknown key is an error that names the
  nearest known one or the section it belongs to; all problems are reported at once, in the same
  words on every rank. `"unknown_keys": "warn"` turns unknown keys into notices while you migrate.
* **Batch sizes.** `train_batch_size` = `train_micro_batch_size_per_gpu` x
  `gradient_accumulation_steps` x world size. Give any two, or one of the first two; the rest
  follows.
* **`"auto"`** is legal for every key and resolved here: batch sizes follow from the others, sizes
  from the model's width where it is known, `warmup_max_lr` is the optimizer's `lr`, all else is the
  default. Arguments without a default (`total_num_steps`) cannot be `"auto"`.
* **`"auto"` as precision** (`bf16.enabled`, or `fp16.enabled` where a launcher left it) is bf16 where
  the hardware multiplies it: CUDA devices of compute capability 8 and up, CPUs with AVX512-BF16,
  AMX-BF16 or Arm's BF16 that `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA` do not hold back. It is
  fp32 elsewhere, where bf16 would take 10 to 100 times as long, and where `torch_autocast`,
  `data_types.param_dtype` or the other section decides. fp16 is never chosen: it needs a loss scale.
  Integrations fill in their own precision first. Ranks on unlike hardware are an error that names
  the key; write `true` or `false` then. `zero.Init` keeps the model's own dtype until the engine
  decides.
* **Numbers** may be written as floats (`5e8`) or strings (`"8"`, with a notice). Booleans are
  `true` or `false`, nothing else. *Elements* count numbers, not bytes. A *dtype* is one of `fp32`,
  `fp16`, `bf16`, `fp64` or torch's word for it. *Globs* are matched against dotted names.
* **Where a value came from** (file, argument, auto, derived, default) is shown in one table at
  start.

What ZeroShard does with a key is one of:

"""

OWN = (
    *("unknown_keys", "units", "unit_max_numel", "unit_min_numel", "conditional_modules"),
    *("keep_fp32", "uneven", "transport", "compile_update", "trust", "trackio"),
)

SAMPLE = """\
```json
{
  "train_micro_batch_size_per_gpu": 8,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000}}
}
```
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield INTRO.rstrip("\n") + "\n"
    for verdict, meaning in VERDICT_MEANING.items():
        yield f"* **{verdict}**: {meaning}."
    yield f"\nA small example:\n\n{SAMPLE}"
    yield "## Keys of ZeroShard\n"
    own = [KEYS[name] for name in OWN]
    yield from _table(key for key in own if not key.is_section)
    yield from _sections([key for key in own if key.is_section])
    top = [KEYS[name] for name in Config.model_fields if name not in OWN]
    yield "## DeepSpeed's keys: top level\n"
    yield from _table(key for key in top if not key.is_section)
    yield from _sections([key for key in top if key.is_section])
    yield "## Optimizers\n"
    yield (
        "`optimizer.type` is matched without regard to case; any other class of `torch.optim` may "
        "be named and takes its own arguments.\n"
    )
    yield from _params("optimizer", OPTIMIZERS)
    yield "### Not available\n"
    yield from (f"* `{name}`: {why}" for name, why in UNAVAILABLE_OPTIMIZERS.items())
    yield "\n## Schedules\n"
    yield (
        "Any class of `torch.optim.lr_scheduler` may be named instead. The schedule moves on after "
        "each applied update, not after a skipped one.\n"
    )
    yield from _params("scheduler", SCHEDULERS)
    yield "## Old spellings\n"
    yield from (f"* `{old}`: read as `{new}`, with a notice" for old, new in RENAMED.items())
    yield "* `zero_optimization: true`: read as stage 1, with a notice\n"
    yield "\n## Refused\n"
    yield "Accepted in silence when switched off; otherwise an error that gives the reason.\n"
    yield from (f"* `{path}`: {why}" for path, why in REFUSED.items())


def _sections(sections: Iterable[Key]) -> Iterator[str]:
    for key in sections:
        assert key.field is not None  # sections come from the schema
        model = section_type(key.field.annotation)
        assert model is not None  # is_section says so
        verdict = "" if key.verdict == "honour" else f" (**{key.verdict}**)"
        yield f"### `{key.path}`{verdict}\n"
        yield f"{key.doc}\n"
        rows = [KEYS[f"{key.path}.{name}"] for name in model.model_fields]
        if rows and not all(row.is_section for row in rows):
            yield from _table(row for row in rows if not row.is_section)
        yield from _sections([row for row in rows if row.is_section])


def _params(section: str, types_: dict[str, type[Section]]) -> Iterator[str]:
    for model in dict.fromkeys(types_.values()):
        names = [name for name, theirs in types_.items() if theirs is model]
        yield f"### `{section}.params` of {' and '.join(f'`{n}`' for n in names)}\n"
        rows = []
        for field_name, field in model.model_fields.items():
            extra: Any = field.json_schema_extra
            doc = field.description or ""
            rows.append(Key(field_name, extra["verdict"], extra["why"], doc, field))
        yield from _table(rows)


def _table(keys: Iterable[Key]) -> Iterator[str]:
    yield "| key | type | default | ZeroShard | meaning |"
    yield "|---|---|---|---|---|"
    for key in keys:
        assert key.field is not None  # only keys of the schema come here
        reason = f" ({key.reason})" if key.reason else ""
        name = key.path.rpartition(".")[2]
        yield (
            f"| `{name}` | {type_words(key.field)} | {_default(key.field)} "
            f"| {key.verdict} | {key.doc}{reason} |"
        )
    yield ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{show(field.get_default(call_default_factory=True))}`"


def type_words(field: FieldInfo) -> str:
    """The type of a key in words, with its bounds."""
    return _words(field.annotation) + _bounds(field.metadata)


def _bounds(metadata: Iterable[object]) -> str:
    found = {
        name: getattr(bound, name)
        for item in metadata
        for bound in (item.metadata if isinstance(item, FieldInfo) else (item,))
        for name in ("gt", "ge", "le")
        if getattr(bound, name, None) is not None
    }
    if "le" in found:
        return f" from {found['ge']} to {found['le']}"
    return "".join(f" {_SIGNS[name]} {limit}" for name, limit in found.items())


_SIGNS = {"gt": ">", "ge": ">="}
_NAMES: dict[object, str] = {
    bool: "bool",
    int: "int",
    float: "number",
    str: "string",
    type(None): "null",
    Any: "any",
    Literal["float32", "float16", "bfloat16", "float64"]: "dtype",
}


def _words(annotation: object) -> str:
    if annotation in _NAMES:
        return _NAMES[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(args[0]) + _bounds(args[1:])
    if origin is Literal:
        return ", ".join(f"`{show(arg)}`" for arg in args)
    if origin is tuple:
        return f"list of {_words(args[0])}s"
    if origin is dict:
        return "object"
    return " or ".join(_words(option) for option in args)


if __name__ == "__main__":
    sys.stdout.write(page())
