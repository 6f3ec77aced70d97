"""Generates ``docs/compat.md``, the page about compatibility with DeepSpeed.

``python tools/compat_page.py > docs/compat.md`` writes it from the tables of names, of libraries
and of keys. A test compares the committed page with this output.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

from config_page import OWN

from zeroshard.config.keys import KEYS
from zeroshard.deepspeed.api_table import MEMBERS, NAMES, SAME_MODULE, VERSION, Name
from zeroshard.deepspeed.distributed import CONSUMERS

INTRO = f"""\
# Programs written for DeepSpeed

Programs written for DeepSpeed run unchanged if `import deepspeed` imports ZeroShard. There are three
ways:

* **A launcher's flag**: `zeroshard launch --as-deepspeed train.py ...` instead of
  `deepspeed train.py ...`.
* **A shell command**: `eval "$(zeroshard compat)"`, and then the usual command: `accelerate launch`,
  `torchrun`, `deepspeed`. (`zeroshard compat --path` prints only the directory:
  `PYTHONPATH=$(zeroshard compat --path) accelerate launch train.py`.)
* **A line of code**, before the first import of a library that looks for DeepSpeed:
  `import zeroshard.compat; zeroshard.compat.install()`.

The program then imports `deepspeed {VERSION}`, a package and its metadata in one directory inside
ZeroShard. It is found first, even if DeepSpeed is installed; `initialize` prints which of the two
is used. Two things prevent it: a folder `deepspeed` next to the program is found before it (there
is a warning), and `python -I` and `-E` ignore `PYTHONPATH`. `import zeroshard.deepspeed as
deepspeed` always works.

On ranks without a GPU, `DS_ACCELERATOR=cpu` works, and Accelerate and the Trainer choose gloo.
Programs that parse `TrainingArguments`, such as TRL's, need `--use_cpu true` there for bf16.
Lightning's own strategy for DeepSpeed requires CUDA.
`Trainer(strategy=zeroshard.integrations.lightning.ZeroShardStrategy(stage=3))` is the same strategy
without that requirement; it needs none of the three ways.
"""

NAMES_INTRO = """\
*works*: does the same as in DeepSpeed. *accepted*: can be used and has no effect. *refused*:
ZeroShard does not have it. *later*: planned, and refused until then. Using a refused name raises an
error with the reason.
"""

FIT_INTRO = """\
## When something does not fit

**Versions.** A library's version is checked when `init_distributed` or `initialize` is called, and
only if the library runs the training: Accelerate through an `Accelerator`, Transformers through its
`Trainer`. A version that is too old raises a `UsageError` on every rank. A version newer than the
tested ones prints one line on rank 0.

| library | oldest | tested up to | problem with older versions |
|---|---|---|---|
"""

FIT = """\
**Packages.** `zeroshard[hf]` installs Accelerate, Transformers and PEFT, `zeroshard[lightning]`
Lightning, `zeroshard[monitor]` TensorBoard and Weights & Biases. A monitor that is enabled and
cannot be imported is an error before training starts.

**Values in two places.** Accelerate, the Trainer and Lightning replace `"auto"` and compare their
own arguments with the file; their errors are not changed. If the numbers that they wrote contradict
each other, ZeroShard's `ConfigError` says which library wrote which number. An `"auto"` that no
library replaced means the default (for precision: bf16 if the hardware multiplies it). If such an
`"auto"` affects the learning rate or clipping, one line at the start names it.

| the program has | the configuration has | result |
|---|---|---|
"""

DISAGREEMENTS = (
    (
        "an optimizer, or a schedule",
        "`optimizer`, or `scheduler`",
        "the object is used, and one line says so; a `DummyOptim` means the configuration's",
    ),
    (
        "keys that no page lists",
        "at the top level, or in sections that DeepSpeed does not check",
        "one line, if the program calls `deepspeed`; an error in programs that import ZeroShard by name",
    ),
    ("`args.deepspeed_config`", "`config=`", "error"),
    ("a model in `DistributedDataParallel`", "", "error: pass the model itself"),
    ("a model of an engine that is still open", "", "error: close that engine first"),
    (
        "`zero.Init` at stage 3, or in one dtype",
        "another stage, or dtype, for `initialize`",
        "those of `initialize` are used",
    ),
    (
        "trained parameters in bfloat16 or float16",
        "neither `bf16` nor `fp16` enabled",
        "one line: there are no float32 masters",
    ),
    ("trained parameters in bfloat16", "`fp16`", "one line: the range is smaller"),
    (
        "`set_gradient_accumulation_boundary(True)` at every backward",
        "`gradient_accumulation_steps` above 1",
        "one line after three steps: gradients are too small",
    ),
    (
        "`accelerator.clip_grad_norm_(parameters, max_norm)`",
        "`gradient_clipping`",
        "the configuration's value is used; Accelerate does not pass `max_norm` on",
    ),
    (
        "`ZeroShardStrategy(stage=...)`, `Trainer(gradient_clip_val=...)`, `Trainer(precision=...)`",
        "other values in `config=`",
        "error",
    ),
)
"""Rows of a table: what the program has, what the configuration has, what happens."""

KEYS_INTRO = """\
## Keys of the configuration

*honour*: works as described. *accept*: has no effect, and one line at the start says so. *refuse* and
*later* are errors unless the value switches the feature off. Types, defaults and meanings are in
[config.md](config.md).
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield INTRO
    yield FIT_INTRO + "\n".join(
        f"| {row.name} | {row.oldest} | {row.tested} | {row.why} |" for row in CONSUMERS
    )
    yield f"\n{FIT}" + "\n".join(f"| {' | '.join(row)} |" for row in DISAGREEMENTS)
    yield "\n## Names\n"
    yield NAMES_INTRO
    yield "| module | works |"
    yield "|---|---|"
    by_module: dict[str, list[str]] = defaultdict(list)
    for row in NAMES:
        if row.verdict == "works" and row.path not in SAME_MODULE:
            module, _, name = row.path.rpartition(".")
            by_module[module].append(name)
    for module, found in sorted(by_module.items()):
        listed = " ".join(f"`{name}`" for name in dict.fromkeys(found))
        yield f"| `{'.'.join(filter(None, ['deepspeed', module]))}` | {listed} |"
    yield ""
    short = ", ".join(f"`deepspeed.{name}` is `deepspeed.{m}`" for name, m in SAME_MODULE.items())
    yield f"{short}.\n"
    yield "These work, but differ from DeepSpeed's in more than their messages:\n"
    for row in NAMES:
        if row.verdict == "works" and row.why and row.path not in SAME_MODULE:
            yield f"* `deepspeed.{row.path}`: {row.why}"
    yield ""
    yield from _not_working(row for row in NAMES if row.verdict != "works")
    yield "## What `initialize` returns, and parameters at stage 3\n"
    for owner in dict.fromkeys(row.path.partition(".")[0] for row in MEMBERS):
        own = [row for row in MEMBERS if row.path.startswith(f"{owner}.")]
        listed = " ".join(f"`{_last(row)}`" for row in own if row.verdict == "works")
        yield f"### {owner}\n\nworks: {listed}\n"
        if any(row.verdict != "works" for row in own):
            yield from _not_working(row for row in own if row.verdict != "works")
    yield "Every key of `zero_optimization` is also a method of the engine, `zero_<key>()`.\n"
    yield KEYS_INTRO
    yield "| key | ZeroShard | why |"
    yield "|---|---|---|"
    for path, key in KEYS.items():
        if path.partition(".")[0] in OWN:
            continue
        yield f"| `{path}` | {key.verdict} | {key.reason} |"


def _not_working(rows: Iterable[Name]) -> Iterator[str]:
    yield "| name | | reason, and what to use instead |"
    yield "|---|---|---|"
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        grouped[row.verdict, row.why].append(row.path)
    for (verdict, why), paths in grouped.items():
        yield f"| {' '.join(f'`{path}`' for path in paths)} | {verdict} | {why} |"
    yield ""


def _last(row: Name) -> str:
    return row.path.rpartition(".")[2]


if __name__ == "__main__":
    sys.stdout.write(page())
