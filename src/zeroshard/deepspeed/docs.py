"""Generates ``docs/compat.md``, the page about compatibility with DeepSpeed.

``python -m zeroshard.deepspeed.docs > docs/compat.md`` writes it from the tables of names, of libraries
and of keys. A test compares the committed page with this output.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

from zeroshard.config.docs import OWN
from zeroshard.config.keys import KEYS
from zeroshard.deepspeed.api_table import MEMBERS, NAMES, SAME_MODULE, VERSION, Name
from zeroshard.deepspeed.version_check import CONSUMERS

INTRO = f"""\
# Programs written for DeepSpeed

They run unchanged. Something has to make `import deepspeed` mean ZeroShard, in one of three ways:

* **A launcher's flag**: `zeroshard launch --as-deepspeed train.py ...` instead of
  `deepspeed train.py ...`.
* **A shell**: `eval "$(zeroshard compat)"`, and then whatever starts the program: `accelerate launch`,
  `torchrun`, `deepspeed`. (`zeroshard compat --path` prints the directory alone:
  `PYTHONPATH=$(zeroshard compat --path) accelerate launch train.py`.)
* **A line of code**, before anything that looks for DeepSpeed is imported:
  `import zeroshard.compat; zeroshard.compat.install()`.

What answers is `deepspeed {VERSION}`, a package and its metadata in one directory inside
ZeroShard. It is found first, also where DeepSpeed is installed; `initialize` says which one answered. A
folder `deepspeed` beside the program comes before it (a warning says so), and `python -I` and `-E` ignore
`PYTHONPATH`. `import zeroshard.deepspeed as deepspeed` needs none of this.

On ranks without a GPU, `DS_ACCELERATOR=cpu` is understood, and Accelerate and the Trainer find gloo by
themselves; programs that parse `TrainingArguments` (TRL's do) want `--use_cpu true` there for bf16.
Lightning's own strategy insists on CUDA;
`Trainer(strategy=zeroshard.integrations.lightning.ZeroShardStrategy(stage=3))` is the same one without
that, and needs no preparation.
"""

NAMES_INTRO = """\
*works*: does what DeepSpeed's does. *accepted*: may be used, and changes nothing here. *refused*: there
is no such thing here. *later*: planned, and refused until then. A name that is refused raises, with the
reason.
"""

FIT_INTRO = """\
## When something does not fit

**Versions.** A library is judged when it calls `init_distributed` or `initialize`, and only if it drives
the training: Accelerate by an `Accelerator`, Transformers by its `Trainer`. One that is too old is a
`UsageError` on every rank; one that is newer than tested is one line on rank 0.

| library | oldest | tested up to | an older one |
|---|---|---|---|
"""

FIT = """\
**Packages.** `zeroshard[hf]` brings Accelerate, Transformers and PEFT, `zeroshard[lightning]` Lightning,
`zeroshard[monitor]` TensorBoard and Weights & Biases. A monitor that is enabled and cannot be imported is
an error before training starts.

**Values in two places.** Accelerate, the Trainer and Lightning replace `"auto"` and compare their own
arguments with the file; their errors arrive as they are. Where the numbers that they wrote cannot hold
together, our `ConfigError` ends with who wrote which. An `"auto"` that nobody replaced means the default
(as precision: bf16 if the hardware multiplies it); if it decides about learning rate or clipping, one
line at start names it.

| program | configuration | |
|---|---|---|
"""

DISAGREEMENTS = (
    (
        "an optimizer, or a schedule",
        "`optimizer`, or `scheduler`",
        "the object acts, and one line says so; a `DummyOptim` stands for the configuration's",
    ),
    (
        "keys that no page lists",
        "at the top level, or in sections that DeepSpeed does not check",
        "one line, if the program calls `deepspeed`; an error for who chose ZeroShard",
    ),
    ("`args.deepspeed_config`", "`config=`", "error"),
    ("a model in `DistributedDataParallel`", "", "error: pass the model itself"),
    ("a model of an engine that is still open", "", "error: close that engine first"),
    (
        "`zero.Init` at stage 3, or in one dtype",
        "another stage, or dtype, for `initialize`",
        "`initialize` decides",
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
        "the configuration clips; Accelerate passes no `max_norm` on",
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

*honour*: does what it says. *accept*: changes nothing here, and one line at start says so. *refuse* and
*later* are errors unless the value switches them off. Types, defaults and meanings are in
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
    yield "Different in more than its messages:\n"
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
    yield "| name | | why, and what instead |"
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
