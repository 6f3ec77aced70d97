"""Generates ``docs/config.md``, the page about the configuration.

``python tools/config_page.py > docs/config.md`` writes it from the fields that read a configuration.
A test compares the committed page with this output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from zeroshard.config.fields import DEVICE, VERDICT_MEANING, Key, section_type, show
from zeroshard.config.keys import KEYS, REFUSED, RENAMED
from zeroshard.config.params import ARGUMENTS, UNAVAILABLE_OPTIMIZERS
from zeroshard.config.schema import Config
from zeroshard.core.tiers import TIERS

INTRO = """\
# Configuration

A configuration is a dict, the path of a JSON file, JSON text, or URL-safe base64-encoded JSON. The
format is DeepSpeed's: existing files work unchanged. Comments (`//`, `#`, `/* */`) and trailing commas
are allowed; a key that occurs twice is an error. A dict that you pass is not changed.

* **The whole configuration is checked before anything starts.** An unknown key is an error that
  names the nearest known key, or the section that the key belongs to. All problems are reported at
  once, with the same text on every rank. `"unknown_keys": "warn"` turns unknown keys into notices
  while you migrate.
* **Batch sizes.** `train_batch_size` = `train_micro_batch_size_per_gpu` x
  `gradient_accumulation_steps` x world size. Give any two of the first three, or one of the first two.
  The others are computed.
* **`"auto"`** is allowed for every key that has a default. ZeroShard computes the value: batch
  sizes from the other batch sizes, buffer sizes from the model's width if it is known,
  `warmup_max_lr` from the optimizer's `lr`. Any other `"auto"` is the default. Arguments without a
  default (`total_num_steps`) cannot be `"auto"`.
* **`"auto"` as precision** (`bf16.enabled`, or `fp16.enabled` if a launcher left it) is bf16 if the
  hardware has instructions for it: CUDA devices of compute capability 8 and up, and CPUs with
  AVX512-BF16, AMX-BF16 or Arm's BF16, unless `ATEN_CPU_CAPABILITY` or `ONEDNN_MAX_CPU_ISA` disables
  these. On other hardware it is fp32, because bf16 would take 10 to 100 times as long. It is also
  fp32 if `torch_autocast`, `data_types.param_dtype` or the other section determines the precision.
  It is never fp16, which needs a loss scale. Integrations set their own precision before. If ranks
  have different hardware, an error names the key; then write `true` or `false`. `zero.Init` keeps
  the model's own dtype until the engine is built.
* **Numbers** may be written as floats (`5e8`) or strings (`"8"`, with a notice). Booleans are
  `true` or `false`, nothing else. *Elements* count numbers, not bytes. A *dtype* is one of `fp32`,
  `fp16`, `bf16`, `fp64` or torch's name for it. *Globs* are matched against dotted names.
* **The origin of every value** (file, argument, auto, derived, default) is shown in one table at the
  start of a run with `"log_level": "debug"`.

Each key has one of these verdicts:

"""

OWN = (
    *(
        "unknown_keys",
        "units",
        "block_max_numel",
        "unit_max_numel",
        "unit_min_numel",
        "conditional_modules",
    ),
    *("compile_blocks",),
    *("keep_fp32", "uneven", "transport", "compile_update", "trust", "parallel"),
    "trackio",
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
  "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 100}}
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
        "Upper and lower case are the same in `optimizer.type`. It may also name any other class of "
        "`torch.optim`, with that class's arguments.\n"
    )
    yield from _params("optimizer")
    yield "### Not available\n"
    yield from (f"* `{name}`: {why}" for name, why in UNAVAILABLE_OPTIMIZERS.items())
    yield "\n## Schedules\n"
    yield (
        "`scheduler.type` may also name any class of `torch.optim.lr_scheduler`. The schedule advances "
        "after each applied update, and not after a skipped one.\n"
    )
    yield from _params("scheduler")
    yield "## Old spellings\n"
    yield from (f"* `{old}`: read as `{new}`, with a notice" for old, new in RENAMED.items())
    yield "* `zero_optimization: true`: read as stage 1, with a notice\n"
    yield "\n## Refused\n"
    yield "No message if the value switches it off; otherwise an error with the reason.\n"
    yield from (f"* `{path}`: {why}" for path, why in REFUSED.items())


def _sections(sections: Iterable[Key]) -> Iterator[str]:
    for key in sections:
        assert key.field is not None  # sections come from the schema
        model = section_type(key.field.annotation)
        assert model is not None  # is_section says so
        rows = [KEYS[f"{key.path}.{name}"] for name in model.model_fields]
        has_some = any(row.verdict == "honour" for row in rows)  # then the table says which are not
        verdict = "" if key.verdict == "honour" or has_some else f" (**{key.verdict}**)"
        yield f"### `{key.path}`{verdict}\n"
        yield f"{key.doc}\n"
        if rows and not all(row.is_section for row in rows):
            yield from _table(row for row in rows if not row.is_section)
        yield from _sections([row for row in rows if row.is_section])


def _params(section: str) -> Iterator[str]:
    types = {name: row.arguments for name, row in ARGUMENTS[section].items()}
    for model in dict.fromkeys(types.values()):
        names = [name for name, theirs in types.items() if theirs is model]
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
    if DEVICE in field.metadata:
        return ", ".join(f"`{show(name)}`" for name in TIERS)
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
