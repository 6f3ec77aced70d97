"""Resolves a configuration for a world size: no "auto" is left, and every value has an origin.

``load_config`` is the only entry. Its result is one immutable ``Config`` with solved batch sizes, and for
every value a text that says where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeroshard.config.batch import solve_batch
from zeroshard.config.contradictions import contradictions
from zeroshard.config.fewer_ranks import RunBatch, keep_batch
from zeroshard.config.fields import is_auto, show
from zeroshard.config.hierarchy import with_nodes
from zeroshard.config.keys import UNCHECKED, is_argument, is_misspelt
from zeroshard.config.loaded import BATCH, Hardware, LoadedConfig, leaves
from zeroshard.config.mesh_keys import mesh_from_config
from zeroshard.config.notices import notices, warnings
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
from zeroshard.core.mesh import Mesh
from zeroshard.core.mesh_sources import MeshSource, ResolvedMesh, resolve_mesh
from zeroshard.errors import ConfigError

NOT_GUESSED = {
    "optimizer.params.lr": "a number",
    "scheduler.params.warmup_num_steps": "a whole number",
    "scheduler.params.lr_range_test_min_lr": "a number",
    "zero_optimization.stage": "0, 1, 2 or 3",
}
"""Keys whose "auto" is an error if no library has replaced it -> what to write."""


_INNER = "zero_optimization.hierarchy.inner"


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
    read = _read(
        raw, where, arguments or {}, replaced, hidden_size, hardware,
        for_training=for_training, as_deepspeed=as_deepspeed,
    )  # fmt: skip
    if not for_training:
        return _solved(read, None, Mesh(data_shard=world_size), world_hint)
    resolved = _resolve_mesh(read.config, read.found, mesh_sources, world_size)
    if resolved is None:  # no batch size would fit a mesh: the errors are complete
        raise ConfigError(_report(read.found.errors, where))
    if as_deepspeed:
        read = replace(read, config=_without_copies(read.config, read.found, resolved.mesh))
    config = _with_batch_of_run(read.config, read.found, resolved.mesh, run_batch)
    return _solved(replace(read, config=config), resolved, resolved.mesh, world_hint)


@dataclass(frozen=True)
class _Read:
    """A configuration that is checked, apart from what depends on the number of ranks.

    ``where``: the source in words. ``reasons``: the origins of what "auto" became. ``from_arguments``:
    keys that arguments gave. ``derived``: the batch sizes that are not given. ``as_deepspeed``: the
    program was written for DeepSpeed.
    """

    raw: dict[str, Any]
    where: str
    config: Config
    found: Findings
    reasons: dict[str, str]
    from_arguments: set[str]
    derived: set[str]
    as_deepspeed: bool


def _one_source(source: Source, args_config: Source) -> tuple[dict[str, Any], str]:
    if source is not None and args_config is not None:
        raise ConfigError(
            "the configuration is given twice: as config= and as args.deepspeed_config; remove "
            "one of them"
        )
    return read_source(source if source is not None else args_config)


def _read(
    raw: dict[str, Any],
    where: str,
    arguments: Mapping[str, Any],
    replaced: Collection[str],
    hidden_size: int | None,
    hardware: Callable[[], Hardware] | None,
    *,
    for_training: bool,
    as_deepspeed: bool,
) -> _Read:
    """Check every key by itself and with the others. Arguments as for :func:`load_config`."""
    found = Findings()
    work = rename(copy_tree(raw), found)
    from_arguments = _apply_arguments(work, arguments, found)
    _notice_replaced(work, replaced, found)
    skipped = replaced if for_training else ARGUMENTS
    ignores = _ignoring(work, as_deepspeed=as_deepspeed)
    given = tidy(_without(work, skipped), Config, "", found, ignores=ignores)
    _resolve_auto_sizes(given, found, hidden_size)
    if for_training:
        _refuse_left_auto(found)
    config = validate(Config, given, "", found) or Config()
    config, reasons = _resolve_auto_precision(config, found, hardware)
    unknown = found.rejected if for_training else found.rejected | found.autos
    found.errors.extend(contradictions(config, given=found.given, unknown=unknown))
    return _Read(
        raw, where, config, found, reasons, from_arguments, _missing_sizes(config), as_deepspeed
    )


def _solved(
    read: _Read, resolved: ResolvedMesh | None, mesh: Mesh, world_hint: str | None
) -> LoadedConfig:
    """The result for the ranks of ``mesh``. ``resolved``: None if it was not read for training.

    Raises:
        ConfigError: every problem that was found.
    """
    found, reasons = read.found, read.reasons
    is_for_training = resolved is not None
    config, solved = _solve(read.config, found, mesh, world_hint, require_batch=is_for_training)
    if found.errors:
        raise ConfigError(_report(found.errors, read.where))
    if resolved is not None:
        config, sized = _with_sizes(config, resolved, found)
        reasons = reasons | sized
    found.notices.extend(notices(config, found))
    found.warnings.extend(warnings(config, found, resolved=reasons, as_deepspeed=read.as_deepspeed))
    changing = dict.fromkeys(found.warnings)
    origins = _origins(config, found, read.where, read.from_arguments, read.derived | solved)
    return LoadedConfig(
        config=config,
        raw=read.raw,
        origins=origins | reasons,
        notices=tuple(dict.fromkeys(found.notices) | changing),
        warnings=tuple(changing),
        mesh=resolved,
    )


def _without(work: Mapping[str, Any], sections: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in work.items() if key not in sections}


def _notice_replaced(work: Mapping[str, Any], replaced: Collection[str], found: Findings) -> None:
    """A notice for each section that is there, although the program passed an object for it."""
    for section in replaced:
        if work.get(section) is not None:
            found.notices.append(
                f"{section}: the object that the program passed is used, not {_type(work[section])}"
            )


def _missing_sizes(config: Config) -> set[str]:
    """The batch sizes that are not known."""
    return {name for name in BATCH if getattr(config, name) is None}


def _refuse_left_auto(found: Findings) -> None:
    """An error for each "auto" whose default would train something else than the user meant."""
    for path, write in NOT_GUESSED.items():
        if path in found.autos and path not in found.rejected:
            found.reject(
                path,
                f'"auto" is left: libraries such as Transformers and Accelerate replace it, here nothing '
                f"did, and a default would decide what is trained; write {write}",
            )
    if _INNER in found.autos and _INNER not in found.rejected:
        found.reject(
            _INNER,
            '"auto" is not possible: how many ranks of a shard group share a host is not known from the '
            "configuration; write the number, such as 8 for hosts of 8 GPUs without tensor ranks",
        )


def _resolve_mesh(
    config: Config, found: Findings, sources: Sequence[MeshSource], world_size: int
) -> ResolvedMesh | None:
    """The mesh of all sources; None, with a recorded error, if there is none."""
    if any(path.startswith(_SIZES_OF_MESH) for path in found.rejected):
        return None  # its error is recorded
    try:
        ours = mesh_from_config(config)
        resolved = resolve_mesh([*([ours] if ours is not None else []), *sources], world_size)
        return with_nodes(resolved, config.zero_optimization)
    except ConfigError as error:
        found.errors.extend(str(error).split("\n"))
        return None


_SIZES_OF_MESH = (
    *("parallel", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"),
    *("sequence_parallel_size", "data_parallel_size", "expert_parallel"),
    *("zero_optimization.hierarchy", "zero_optimization.zero_hpz_partition_size"),
)


def _with_sizes(
    config: Config, resolved: ResolvedMesh, found: Findings
) -> tuple[Config, dict[str, str]]:
    """``config`` with the sizes of the mesh in ``parallel``; and the origins of those it did not give."""
    sizes = {dim: getattr(resolved.mesh, dim) for dim in resolved.origins}
    section = config.parallel.model_copy(update=sizes)
    origins = {}
    for dim, origin in resolved.origins.items():
        path = f"parallel.{dim}"
        if path not in found.given:
            computed = path in found.autos and origin in ("default", "derived")
            origins[path] = "auto" if computed else origin
    return config.model_copy(update={"parallel": section}), origins


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


def _apply_arguments(
    work: dict[str, Any], arguments: Mapping[str, Any], found: Findings
) -> set[str]:
    taken: set[str] = set()
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
        taken.add(path)
    return taken


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
) -> tuple[Config, dict[str, str]]:
    """``config`` with bf16 on if "auto" allows it and the hardware multiplies it.

    Also returns the origins of the keys that were "auto". fp16 is never chosen, because it needs a loss
    scale. "auto" for fp16 leads to the same decision.
    """
    autos = [path for path in ("bf16.enabled", "fp16.enabled") if path in found.autos]
    if not autos or hardware is None:
        return config, {}
    because = _decided(config, found)
    if because:
        return config, dict.fromkeys(autos, f"auto: {because}")
    is_asked = config.data_types.param_dtype is not None  # bfloat16: _decided() excludes the others
    answer = Hardware(True, True, "data_types.param_dtype is bfloat16") if is_asked else hardware()
    origin = f"auto: {answer.because}"
    if not answer.bf16:
        return config, dict.fromkeys(autos, origin)
    bf16 = config.bf16.model_copy(update={"enabled": True})
    reasons = {"bf16.enabled": origin}
    if "fp16.enabled" in autos:
        reasons["fp16.enabled"] = "auto: bf16 is on"
    return config.model_copy(update={"bf16": bf16}), reasons


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


def _without_copies(config: Config, found: Findings, mesh: Mesh) -> Config:
    """``config`` with a ``train_batch_size`` that counts samples of tensor ranks once.

    Accelerate and Transformers write micro batch x steps x number of ranks, also where tensor ranks get
    the same samples.
    """
    train, micro, gas = (getattr(config, name) for name in BATCH)
    if mesh.tensor * mesh.sequence == 1 or None in (train, micro, gas):
        return config
    product = micro * gas * mesh.dp_size
    if (
        train == product
        or train != micro * gas * mesh.world_size
        or found.rejected.intersection(BATCH)
    ):
        return config
    found.warnings.append(
        f"train_batch_size: {train} counts the samples of all {mesh.world_size} ranks, but "
        f"{'sequence' if mesh.tensor == 1 else 'tensor'} ranks get the same samples, so it is {product}"
    )
    return config.model_copy(update={"train_batch_size": product})


def _with_batch_of_run(config: Config, found: Findings, mesh: Mesh, run: RunBatch | None) -> Config:
    """``config`` with the batch that the run began with, if it has fewer ranks now."""
    if run is None:
        return config
    given = {name: getattr(config, name) for name in BATCH}
    dp_before = run.dp_size(mesh)
    if dp_before == mesh.dp_size or found.rejected.intersection(BATCH) or not any(given.values()):
        return config
    train, micro, gas = given.values()
    kept = keep_batch(train, micro, gas, dp_before=dp_before, dp_now=mesh.dp_size)
    if not isinstance(kept, str) and run.batches and kept[0] not in run.batches:
        began = ", ".join(map(str, run.batches))
        kept = (
            f"train_batch_size is {kept[0]} with the ranks that are left, and was {began} when the run "
            "began: give the batch of the whole run"
        )
    if isinstance(kept, str):
        found.errors.append(kept)
        return config
    found.notices.append(
        f"train_batch_size stays {kept[0]} with {mesh.dp_size} data-parallel ranks, before {dp_before}: "
        f"micro-batches of {kept[1]}, {kept[2]} per step"
    )
    return config.model_copy(update=dict(zip(BATCH, kept, strict=True)))


def _solve(
    config: Config,
    found: Findings,
    mesh: Mesh,
    hint: str | None,
    *,
    require_batch: bool,
) -> tuple[Config, set[str]]:
    """``config`` with all batch sizes, and the names of the keys that were derived."""
    zero = config.zero_optimization
    if zero.overlap_comm is None:
        zero = zero.model_copy(update={"overlap_comm": True})
    update: dict[str, Any] = {}
    if not config.zero_optimization.compute_grad_norm and "gradient_clipping" not in found.given:
        update["gradient_clipping"] = 0.0
    if not found.rejected.intersection(BATCH):
        sizes = (getattr(config, name) for name in BATCH)
        word = "world size" if mesh.is_data_only else f"data-parallel size (mesh {mesh.text})"
        solved = solve_batch(
            *sizes, dp_size=mesh.dp_size, require=require_batch, word=word, autos=found.autos
        )
        if isinstance(solved, str):
            found.errors.append(f"{solved} ({hint})" if hint else solved)
        else:
            update |= {name: solved[BATCH.index(name)] for name in _missing_sizes(config)}
    solved_config = config.model_copy(update=update | {"zero_optimization": zero})
    return solved_config, set(update)


def _origins(
    config: Config, found: Findings, where: str, from_arguments: set[str], derived: set[str]
) -> dict[str, str]:
    origins: dict[str, str] = {}
    for path, _ in leaves(config):
        if path in derived:
            origins[path] = "auto" if path in found.autos else "derived"
        elif path in found.autos:
            origins[path] = "auto"
        elif any(path == taken or path.startswith(f"{taken}.") for taken in from_arguments):
            origins[path] = "argument"
        else:
            origins[path] = where if path in found.given else "default"
    return origins
