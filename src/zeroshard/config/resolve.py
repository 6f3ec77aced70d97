"""Resolves a configuration for a world size: no "auto" is left, and every value has an origin.

``load_config`` is the only entry. Its result has one immutable ``Config`` with solved batch sizes, and
for every value a text that says where it came from.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeroshard.config.batch import (
    BATCH,
    RunBatch,
    solve_batch,
    with_batch_of_run,
    without_copies,
)
from zeroshard.config.contradictions import contradictions, notices, warnings
from zeroshard.config.fields import Section, is_auto, show
from zeroshard.config.keys import UNCHECKED, is_argument, is_misspelt
from zeroshard.config.mesh_keys import INNER, mesh_of_run, with_sizes
from zeroshard.config.params import ARGUMENTS
from zeroshard.config.parse import (
    Findings,
    Source,
    copy_tree,
    read_source,
    rename,
    tidy,
    validate,
)
from zeroshard.config.schema import Config
from zeroshard.config.sections import MonitorSections
from zeroshard.core.mesh import Mesh
from zeroshard.core.mesh_sources import MeshSource, ResolvedMesh
from zeroshard.core.texts import without_secrets
from zeroshard.errors import ConfigError

NOT_GUESSED = {
    "optimizer.params.lr": "a number",
    "scheduler.params.warmup_num_steps": "a whole number",
    "scheduler.params.lr_range_test_min_lr": "a number",
    "zero_optimization.stage": "0, 1, 2 or 3",
}
"""Keys whose "auto" is an error if no library has replaced it -> what to write."""

WATCHERS = frozenset(
    (
        *MonitorSections.model_fields,
        *("comms_logger", "dump_state", "flops_profiler", "log_level", "memory_breakdown"),
        *("steps_per_print", "timers", "wall_clock_breakdown"),
    )
)
ALWAYS_SHOWN = (*BATCH, "zero_optimization.stage", "gradient_clipping", "transport", "uneven")


class Hardware(NamedTuple):
    """Which 16-bit dtypes the device multiplies at full speed, and the reason in words."""

    bf16: bool
    fp16: bool
    because: str


@dataclass(frozen=True)
class LoadedConfig:
    """A resolved configuration, and where its values came from.

    ``raw``: what the user gave, parsed, in containers of our own. ``origins``: dotted key -> "file PATH",
    "config" (a dict), "argument", "auto" (in some cases with a reason), "derived" or "default".
    ``notices``: one line each, to be shown once; ``warnings``: those of them that change what is trained,
    which come last. ``mesh``: the ranks; its sizes are also the values of
    ``parallel``. None if the configuration was not read for training.
    """

    config: Config
    raw: dict[str, Any]
    origins: dict[str, str]
    notices: tuple[str, ...]
    mesh: ResolvedMesh | None = None
    warnings: tuple[str, ...] = ()

    def agreed(self) -> dict[str, str]:
        """Dotted key -> JSON of every value that must be the same on all ranks.

        Keys that only observe (monitors, printing) may differ: many programs log on rank 0 only.
        """
        return {
            path: json.dumps(value, sort_keys=True, default=_class_of)
            for path, value in leaves(self.config).items()
            if path.partition(".")[0] not in WATCHERS
        }

    def fingerprint(self) -> str:
        """SHA-256 of ``agreed()`` in hexadecimal. Equal on all ranks of a correct run."""
        return hashlib.sha256(json.dumps(self.agreed(), sort_keys=True).encode()).hexdigest()

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Key, value as JSON, and origin of every key. Secrets are hidden."""
        for path, value in leaves(self.config).items():
            shown = show(without_secrets(value, path.rpartition(".")[2]))
            yield path, shown, self.origins[path]

    def table(self, *, every_key: bool = False) -> str:
        """Key, value and origin as plain text. Keys at their default only with ``every_key``."""
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, pad_edge=False)
        for title in ("key", "value", "origin"):
            grid.add_column(title, overflow="fold")
        hidden = 0
        for path, shown, origin in self.rows():
            if origin == "default" and path not in ALWAYS_SHOWN and not every_key:
                hidden += 1
            else:
                grid.add_row(path, shown, origin)
        out = io.StringIO()
        Console(file=out, width=100, color_system=None, highlight=False).print(grid)
        more = f"({hidden} other keys have their default values)\n" if hidden else ""
        lines = [line.rstrip() for line in (out.getvalue() + more).splitlines()]
        return "\n".join(lines)


def leaves(section: Section, prefix: str = "") -> dict[str, Any]:
    """The value of every dotted key in ``section``. Optimizer arguments are separate keys."""
    found: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            found |= leaves(value, f"{prefix}{name}.")
        elif name == "params":
            found |= {f"{prefix}params.{key}": value[key] for key in sorted(value)}
        else:
            found[prefix + name] = value
    return found


def _class_of(value: object) -> str:
    return type(value).__name__


def load_config(
    source: Source,
    *,
    world_size: int,
    mesh_sources: Sequence[MeshSource] = (),
    args_config: Source = None,
    arguments: Mapping[str, Any] | None = None,
    hidden_size: int | None = None,
    world_hint: str | None = None,
    for_training: bool = True,
    as_deepspeed: bool = False,
    replaced: Collection[str] = (),
    hardware: Callable[[], Hardware] | None = None,
    run_batch: RunBatch | None = None,
) -> LoadedConfig:
    """Read, check and resolve a configuration for ``world_size`` ranks.

    ``source``: dict, path, JSON text or urlsafe base64 of JSON. ``args_config``: the same, from
    ``args.deepspeed_config``; only one of the two may be given. ``arguments``: dotted key -> value, from
    the command line or an API; they replace values of the source, and None means not given.
    ``mesh_sources``: what the program says about the mesh, beside the configuration.
    ``hidden_size``: width of the model, from which "auto" sizes follow. ``world_hint``: a sentence that
    is added to errors about batch sizes, for example why the world is small.

    ``for_training=False`` is for callers that only build a model, such as ``zero.Init``. Much may still
    be "auto" then: batch sizes that are not given are 1, optimizer and schedule are not read, and the
    mesh is not resolved, because the program may give other sources of it later.
    ``as_deepspeed``: an unknown key is a notice where DeepSpeed ignores it, unless it is a misspelt one
    or ``unknown_keys`` says otherwise. ``replaced``: sections ("optimizer", "scheduler") for which the
    program passed an object; they are not read. ``hardware`` is called if a precision is "auto"; without
    it "auto" means off. ``run_batch``: the run may go on with fewer ranks than it began with, and keeps
    its batch.

    Raises:
        ConfigError: every problem, one per line, in the same order on every rank.
        UsageError: a source of the mesh numbers the ranks in another order.
    """
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1, not {world_size}")
    raw, where = _one_source(source, args_config)
    found = Findings()
    config = _checked(
        raw, arguments or {}, replaced, hidden_size, hardware, found,
        for_training=for_training, as_deepspeed=as_deepspeed,
    )  # fmt: skip
    resolved, mesh = None, Mesh(data_shard=world_size)
    if for_training:
        resolved = mesh_of_run(config, found, mesh_sources, world_size)
        if resolved is None:  # no batch size would fit a mesh: the errors are complete
            raise ConfigError(_report(found.errors, where))
        mesh = resolved.mesh
        if as_deepspeed:
            config = without_copies(config, found, mesh)
        config = with_batch_of_run(config, found, mesh, run_batch)
    config = _solve(config, found, mesh, world_hint, require_batch=for_training)
    if found.errors:
        raise ConfigError(_report(found.errors, where))
    return _loaded(config, found, raw, where, resolved, as_deepspeed=as_deepspeed)


def _one_source(source: Source, args_config: Source) -> tuple[dict[str, Any], str]:
    if source is not None and args_config is not None:
        raise ConfigError(
            "the configuration is given twice: as config= and as args.deepspeed_config; remove "
            "one of them"
        )
    return read_source(source if source is not None else args_config)


def _checked(
    raw: dict[str, Any],
    arguments: Mapping[str, Any],
    replaced: Collection[str],
    hidden_size: int | None,
    hardware: Callable[[], Hardware] | None,
    found: Findings,
    *,
    for_training: bool,
    as_deepspeed: bool,
) -> Config:
    """Check every key by itself and with the others, apart from what depends on the number of ranks."""
    work = rename(copy_tree(raw), found)
    _apply_arguments(work, arguments, found)
    for section in replaced:
        if work.get(section) is not None:
            found.notices.append(
                f"{section}: the object that the program passed is used, not {_type(work[section])}"
            )
    skipped = replaced if for_training else ARGUMENTS
    read = {key: value for key, value in work.items() if key not in skipped}
    ignores = _ignoring(work, as_deepspeed=as_deepspeed)
    given = tidy(read, Config, "", found, ignores=ignores)
    _resolve_auto_sizes(given, found, hidden_size)
    if for_training:
        _refuse_left_auto(found)
    config = validate(Config, given, "", found) or Config()
    config = _resolve_auto_precision(config, found, hardware)
    unknown = found.rejected if for_training else found.rejected | found.autos
    found.errors.extend(contradictions(config, given=found.given, unknown=unknown))
    found.derived.update(name for name in BATCH if getattr(config, name) is None)
    return config


def _loaded(
    config: Config,
    found: Findings,
    raw: dict[str, Any],
    where: str,
    resolved: ResolvedMesh | None,
    *,
    as_deepspeed: bool,
) -> LoadedConfig:
    """The result of a configuration without errors."""
    if resolved is not None:
        config = with_sizes(config, resolved, found)
    found.notices.extend(notices(config, found))
    found.warnings.extend(warnings(config, found, as_deepspeed=as_deepspeed))
    changing = dict.fromkeys(found.warnings)
    return LoadedConfig(
        config=config,
        raw=raw,
        origins=_origins(config, found, where) | found.reasons,
        notices=tuple(dict.fromkeys(found.notices) | changing),
        warnings=tuple(changing),
        mesh=resolved,
    )


def _refuse_left_auto(found: Findings) -> None:
    """An error for each "auto" whose default would train something else than the user meant."""
    for path, write in NOT_GUESSED.items():
        if path in found.autos and path not in found.rejected:
            found.reject(
                path,
                f'"auto" is left: libraries such as Transformers and Accelerate replace it, here nothing '
                f"did, and a default would decide what is trained; write {write}",
            )
    if INNER in found.autos and INNER not in found.rejected:
        found.reject(
            INNER,
            '"auto" is not possible: how many ranks of a shard group share a host is not known from the '
            "configuration; write the number, such as 8 for hosts of 8 GPUs without tensor ranks",
        )


def _type(section: Any) -> str:
    kind = section.get("type") if isinstance(section, Mapping) else None
    return f"the configuration's {show(kind)}" if kind else "the configuration's section"


def _ignoring(work: Mapping[str, Any], *, as_deepspeed: bool) -> Callable[[str, str], bool]:
    """A function of section and name: whether this unknown key gives a notice, not an error."""
    word = str(work.get("unknown_keys", "as DeepSpeed" if as_deepspeed else "error")).lower()
    if word != "as deepspeed":
        return lambda _section, _name: word == "warn"
    return lambda section, name: (
        section in UNCHECKED
        and not (section == "" and is_misspelt(name, work.get(name), work))
        and not (section in ARGUMENTS and is_argument(section, name))
    )


def _report(errors: list[str], where: str) -> str:
    lines = sorted({line.replace("\n", "\\n") for line in errors})
    place = where.removeprefix("file ") if where.startswith("file ") else "the configuration"
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n".join([f"{count} in {place}:", *(f"  {line}" for line in lines)])


def _apply_arguments(work: dict[str, Any], arguments: Mapping[str, Any], found: Findings) -> None:
    for path, value in arguments.items():
        if value is None:
            continue
        *sections, name = path.split(".")
        parent = work
        for section in sections:
            inner = parent.get(section)
            parent[section] = parent = inner if isinstance(inner, dict) else {}
        before = parent.get(name)
        if before is not None and not is_auto(before) and before != value:
            found.warnings.append(f"{path}: the argument {show(value)} replaces {show(before)}")
        parent[name] = copy_tree(value)
        found.from_arguments.add(path)


def _resolve_auto_sizes(given: dict[str, Any], found: Findings, hidden_size: int | None) -> None:
    """Set sizes that follow from the model's width, and the schedule's highest learning rate."""
    zero = given.setdefault("zero_optimization", {})
    if hidden_size is not None:
        for name, size in (
            ("reduce_bucket_size", hidden_size * hidden_size),
            ("stage3_prefetch_bucket_size", int(0.9 * hidden_size * hidden_size)),
            ("stage3_param_persistence_threshold", 10 * hidden_size),
        ):
            if f"zero_optimization.{name}" in found.autos:
                zero[name] = size
    lr = given.get("optimizer", {}).get("params", {}).get("lr")
    if "scheduler.params.warmup_max_lr" in found.autos:  # None: the learning rate of the group
        given["scheduler"]["params"]["warmup_max_lr"] = lr


def _resolve_auto_precision(
    config: Config, found: Findings, hardware: Callable[[], Hardware] | None
) -> Config:
    """``config`` with bf16 on if "auto" allows it and the hardware multiplies it.

    fp16 is never chosen, because it needs a loss scale. "auto" for fp16 leads to the same decision.
    """
    autos = [path for path in ("bf16.enabled", "fp16.enabled") if path in found.autos]
    if not autos or hardware is None:
        return config
    if because := _decided(config, found):
        found.reasons |= dict.fromkeys(autos, f"auto: {because}")
        return config
    is_asked = config.data_types.param_dtype is not None  # bfloat16: _decided() excludes the others
    answer = Hardware(True, True, "data_types.param_dtype is bfloat16") if is_asked else hardware()
    found.reasons |= dict.fromkeys(autos, f"auto: {answer.because}")
    if not answer.bf16:
        return config
    found.reasons["bf16.enabled"] = f"auto: {answer.because}"
    if "fp16.enabled" in autos:
        found.reasons["fp16.enabled"] = "auto: bf16 is on"
    bf16 = config.bf16.model_copy(update={"enabled": True})
    return config.model_copy(update={"bf16": bf16})


def _decided(config: Config, found: Findings) -> str:
    """Why other keys have decided the precision; "" if they have not."""
    if config.bf16.enabled or config.fp16.enabled:
        return f"{'bf16' if config.bf16.enabled else 'fp16'} is on"
    if "bf16.enabled" in found.given:
        return "bf16 is off"
    if config.torch_autocast.enabled:
        return "torch_autocast is on"
    if config.data_types.param_dtype not in (None, "bfloat16"):
        return f"data_types.param_dtype is {config.data_types.param_dtype}"
    return ""


def _solve(
    config: Config, found: Findings, mesh: Mesh, hint: str | None, *, require_batch: bool
) -> Config:
    """``config`` with all batch sizes. ``hint``: is added to an error about them."""
    zero = config.zero_optimization
    if zero.overlap_comm is None:
        zero = zero.model_copy(update={"overlap_comm": True})
    update: dict[str, Any] = {}
    if not zero.compute_grad_norm and "gradient_clipping" not in found.given:
        update["gradient_clipping"] = 0.0
    if not found.rejected.intersection(BATCH):
        sizes = [getattr(config, name) for name in BATCH]
        word = "world size" if mesh.is_data_only else f"data-parallel size (mesh {mesh.text})"
        solved = solve_batch(
            *sizes, dp_size=mesh.dp_size, require=require_batch, word=word, autos=found.autos
        )
        if isinstance(solved, str):
            found.errors.append(f"{solved} ({hint})" if hint else solved)
        else:
            update |= dict(zip(BATCH, solved, strict=True))
    found.derived.update(name for name in update if getattr(config, name) != update[name])
    return config.model_copy(update=update | {"zero_optimization": zero})


def _origins(config: Config, found: Findings, where: str) -> dict[str, str]:
    origins: dict[str, str] = {}
    for path in leaves(config):
        if path in found.derived:
            origins[path] = "auto" if path in found.autos else "derived"
        elif path in found.autos:
            origins[path] = "auto"
        elif found.from_arguments and _is_in(path, found.from_arguments):
            origins[path] = "argument"
        else:
            origins[path] = where if path in found.given else "default"
    return origins


def _is_in(path: str, keys: Collection[str]) -> bool:
    """Whether a key is one of ``keys``, or in a section that is."""
    return any(path == key or path.startswith(f"{key}.") for key in keys)
