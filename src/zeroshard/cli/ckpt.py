"""The ``zeroshard ckpt`` commands: list, show, verify, export, compare and remove checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.cli.saved_folders import check_is_free, copy_model_files, holder, holders
from zeroshard.cli.telling import AsJson, errors_told, note
from zeroshard.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from zeroshard.checkpoint.compare import RunDifference
    from zeroshard.checkpoint.export import Progress
    from zeroshard.checkpoint.reader import Source

ckpt = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show, verify, export, compare and remove checkpoints.",
)

Place = Annotated[
    Path,
    typer.Argument(
        help="Directory of one checkpoint, or the directory that contains the checkpoints."
    ),
]
Holder = Annotated[Path, typer.Argument(help="Directory that contains the checkpoints.")]
Tag = Annotated[
    str | None,
    typer.Option("--tag", "-t", help="Tag (name) of the checkpoint. Default: the latest one."),
]


@ckpt.command("ls")
def ls_command(
    directory: Holder,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a directory. For those that cannot be loaded, the reason is printed."""
    with errors_told():
        found = rows(directory)
    if as_json:
        print(json.dumps([asdict(row) for row in found], indent=2))
        return
    if not found:
        print(f"There is no checkpoint in {directory}.")
        return
    _print_table(
        ["tag", "step", "saved at", "ranks", "stage", "size", "parameters", "state"],
        [
            [
                f"{row.tag} (latest)" if row.latest else row.tag,
                *map(_text, (row.step, row.saved_at, row.world_size, row.stage)),
                _size(row.nbytes),
                _text(row.numel),
                row.state,
            ]
            for row in found
        ],
    )


@ckpt.command("show")
def show_command(directory: Place, tag: Tag = None, as_json: AsJson = False) -> None:
    """Show the contents of a checkpoint: counters, parameters with their state, buffers, files."""
    with errors_told(), contextlib.closing(_open(directory, tag)) as source:
        facts = facts_of(source)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        if not isinstance(value, list):
            print(f"{key}: {value if not isinstance(value, dict) else json.dumps(value)}")
    for title in ("parameters", "buffers", "files"):
        table: list[dict[str, Any]] = facts.get(title, [])
        if table:
            print(f"\n{len(table):,} {title}")
            _print_table(list(table[0]), [list(map(_text, row.values())) for row in table])


@ckpt.command("verify")
def verify_command(directory: Place, tag: Tag = None) -> None:
    """Read every byte of a checkpoint and compare checksums. The exit code is 1 if data is damaged."""
    from zeroshard.checkpoint.manifest import MANIFEST

    with errors_told():
        path = _path(directory, tag)
        problems = problems_of(path)
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    ours = (path / MANIFEST).exists()
    read = "all values can be read; this format has no checksums"
    print(f"{path}: {'every byte is what was saved' if ours else read}.")


@ckpt.command("export")
def export_command(
    directory: Place,
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write to.")],
    tag: Tag = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="float32, float16 or bfloat16. Default: the dtype of each weight in the checkpoint.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", "--max_shard_size", help="Maximum size of one file.")
    ] = "5GB",
    exclude_frozen: Annotated[
        bool,
        typer.Option(
            "--exclude-frozen", "--exclude_frozen_parameters", help="Write only trained parameters."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model that the directory has.")
    ] = False,
) -> None:
    """Write the weights as safetensors files for Hugging Face libraries, and verify the files.

    Configuration and tokenizer are copied if they lie beside the checkpoint, as with the Trainer.
    """
    from zeroshard.checkpoint.zero_to_fp32 import export_checkpoint

    with errors_told():
        if not overwrite:
            check_is_free(out)
    with errors_told(), contextlib.closing(_open(directory, tag)) as source, _bar() as progress:
        paths = export_checkpoint(
            source,
            out,
            dtype=dtype,
            max_shard_size=max_shard_size,
            exclude_frozen_parameters=exclude_frozen,
            progress=progress,
        )
        paths += copy_model_files(source.path, out, overwrite=overwrite)
    for path in paths:
        print(path)
    if not (out / "config.json").exists():
        note(
            f"no config.json lies beside the checkpoint, so {out} has the weights only. "
            "from_pretrained() of Transformers needs the model's config.json there too."
        )


@ckpt.command("diff")
def diff_command(
    first: Place,
    second: Annotated[Path, typer.Argument(help="The same for the second checkpoint.")],
    tag: Tag = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints, name by name. The exit code is 1 if they differ.

    They may be saved by different numbers of ranks.
    """
    from zeroshard.checkpoint.compare import differences

    with (
        errors_told(),
        contextlib.closing(_open(first, tag)) as left,
        contextlib.closing(_open(second, tag)) as right,
    ):
        found = list(differences(left, right))
    if as_json:
        print(json.dumps([_as_json(difference) for difference in found], indent=2))
    elif found:
        _print_table(
            ["name", "of", "different", "max |a - b|"],
            [
                [d.name, d.part, d.what, "" if d.max_abs is None else f"{d.max_abs:g}"]
                for d in found
            ],
        )
    else:
        print("No difference.")
    if found:
        raise typer.Exit(1)


@ckpt.command("prune")
def prune_command(
    directory: Holder,
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="Number of newest checkpoints to keep.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
) -> None:
    """Remove all but the newest complete checkpoints. The one in the file 'latest' is always kept."""
    from zeroshard.checkpoint.directory import prune

    with errors_told():
        _check_directory(directory)
        going = prune(directory, keep, dry_run=True)
        for name in going:
            print(f"{name}  {_size(_nbytes_below(directory / name))}")
        if not going:
            print("Nothing to remove.")
        elif not dry_run:
            if not yes:
                typer.confirm(f"Remove {len(going)} checkpoints from {directory}?", abort=True)
            prune(directory, keep)


# ---------------------------------------------------------------------- what is there


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``ls``. None: not known. ``state``: ``complete``, or why it cannot be loaded."""

    tag: str
    state: str
    nbytes: int
    step: int | None = None
    saved_at: str | None = None
    world_size: int | None = None
    stage: int | None = None
    numel: int | None = None
    latest: bool = False


def rows(directory: Path) -> list[Row]:
    """The directories in ``directory`` that look like checkpoints, by step.

    If there is none: the checkpoint that ``directory`` is, or else those one level below, where a Trainer
    saves (``checkpoint-20/global_step20``).
    """
    _check_directory(directory)
    found = _rows_in(directory)
    if not found and (own := _row(directory.resolve(), "")) is not None:
        found = [own]
    if found:
        return found
    return [
        replace(row, tag=f"{folder.name}/{row.tag}", latest=folder == below[-1] and row.latest)
        for below in [holders(directory)]
        for folder in below
        for row in _rows_in(folder)
    ]


def _rows_in(directory: Path) -> list[Row]:
    from zeroshard.checkpoint import directory as places

    latest = ""
    with contextlib.suppress(CheckpointError):
        latest = places.latest(directory)
    paths = [path for path in sorted(directory.iterdir()) if path.is_dir()]
    found = [row for path in paths if (row := _row(path, latest)) is not None]
    return sorted(found, key=lambda row: (row.step is None, row.step, row.saved_at))


def _row(path: Path, latest: str) -> Row | None:
    from zeroshard.checkpoint.deepspeed.files import is_deepspeed
    from zeroshard.checkpoint.manifest import MANIFEST
    from zeroshard.checkpoint.reader import CheckpointReader

    nbytes = _nbytes_below(path)
    is_latest = path.name == latest
    if path.name.startswith("."):
        unfinished = ".saving-" in path.name
        return Row(path.name, "incomplete: the save did not finish", nbytes) if unfinished else None
    if not (path / MANIFEST).exists():
        if is_deepspeed(path):
            return Row(path.name, "written by DeepSpeed", nbytes, latest=is_latest)
        missing = f"{MANIFEST} is missing"
        return Row(path.name, missing, nbytes, latest=True) if is_latest else None
    try:
        with CheckpointReader(path) as saved:
            manifest, problems = saved.manifest, saved.problems()
    except CheckpointError as error:
        return Row(path.name, str(error), nbytes, latest=is_latest)
    return Row(
        path.name,
        next(iter(problems.values()), "complete"),
        nbytes,
        manifest.step,
        manifest.saved_at,
        manifest.world_size,
        manifest.stage,
        manifest.numel,
        is_latest,
    )


def facts_of(source: Source) -> dict[str, Any]:
    """What ``show`` prints, as JSON values. Lists of dicts are printed as tables."""
    from zeroshard.checkpoint.manifest import VALUE
    from zeroshard.checkpoint.reader import CheckpointReader

    facts: dict[str, Any] = {"path": str(source.path)}
    if isinstance(source, CheckpointReader):
        m = source.manifest
        facts |= {"tag": m.tag, "step": m.step, "saved_at": m.saved_at, "writer": m.writer}
        facts |= {"world_size": m.world_size, **({"mesh": m.mesh} if m.mesh else {})}
        facts |= {"stage": m.stage, "nbytes": m.nbytes}
    facts["numel"] = sum(parameter.numel for parameter in source.parameters.values())
    facts |= _shared_facts(source)
    facts["parameters"] = [
        {
            "name": name,
            "shape": list(parameter.shape),
            "dtype": parameter.tensors[VALUE].dtype if VALUE in parameter.tensors else None,
            "trained": parameter.trained,
            "group": parameter.group,
            "state": [key for key in parameter.tensors if key != VALUE],
            "numbers": {key: number for key, (_, number) in parameter.scalars.items()},
            "aliases": list(parameter.aliases),
        }
        for name, parameter in source.parameters.items()
    ]
    facts["buffers"] = [
        {"name": name, "shape": list(b.shape), "dtype": str(b.dtype).removeprefix("torch.")}
        for name, b in source.buffers(0).items()
    ]
    if isinstance(source, CheckpointReader):
        facts["files"] = [{"name": f.name, "nbytes": f.nbytes} for f in source.manifest.files]
    return facts


def _shared_facts(source: Source) -> dict[str, Any]:
    try:
        shared = source.shared()
    except CheckpointError as error:  # the rest can still be shown
        return {"shared state": str(error)}
    names = {
        "state": sorted(shared),
        "client_state": sorted(map(str, shared.get("client_state") or {})),
    }
    return {"counters": shared.get("counters", {}), **{k: ", ".join(v) for k, v in names.items()}}


def problems_of(path: Path) -> list[str]:
    """What is wrong with the checkpoint at ``path``. Reads all of its bytes."""
    from zeroshard.checkpoint.directory import open_checkpoint
    from zeroshard.checkpoint.reader import CheckpointReader

    try:
        with contextlib.closing(open_checkpoint(path.parent, path.name)) as source:
            return source.verify() if isinstance(source, CheckpointReader) else _unreadable(source)
    except CheckpointError as error:
        return [str(error)]


def _unreadable(source: Source) -> list[str]:
    """The tensors that cannot be read, of a checkpoint in a format without checksums."""
    from zeroshard.checkpoint.reader import full

    found = []
    for name, parameter in source.parameters.items():
        for tensor in parameter.tensors:
            try:
                full(source, name, tensor)
            except CheckpointError as error:
                found.append(str(error))
    return found


def _path(directory: Path, tag: str | None) -> Path:
    """The directory of one checkpoint."""
    from zeroshard.checkpoint.deepspeed.files import is_deepspeed
    from zeroshard.checkpoint.directory import resolve
    from zeroshard.checkpoint.manifest import MANIFEST

    _check_directory(directory)
    if (directory / MANIFEST).exists() or is_deepspeed(directory):
        if tag is not None and tag != directory.resolve().name:
            raise UsageError(
                f"{directory} is itself a checkpoint, and its tag is not {tag}. With --tag, give "
                "the directory that contains the checkpoints."
            )
        return directory.resolve()
    directory, tag = holder(directory, tag)
    return resolve(directory, tag).resolve()


def _open(directory: Path, tag: str | None) -> Source:
    from zeroshard.checkpoint.directory import open_checkpoint

    path = _path(directory, tag)
    return open_checkpoint(path.parent, path.name)


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory.")


def _nbytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# ---------------------------------------------------------------------- in words


def _as_json(difference: RunDifference) -> dict[str, Any]:
    """The difference as JSON values. NaN and infinity, which JSON does not have, become texts."""
    largest = difference.max_abs
    odd = largest is not None and not math.isfinite(largest)
    return {**asdict(difference), "max_abs": str(largest) if odd else largest}


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar, if standard error is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = _console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _console(*, stderr: bool = False) -> Console:
    """A console that wraps lines only if the stream is a terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 1000, highlight=False)


def _print_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for line in lines:
        table.add_row(*map(Text, line))
    _console().print(table)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {v}" for key, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _size(nbytes: int) -> str:
    """A size in decimal units, as for disks and ``max_shard_size``.

    >>> _size(1_234_000)
    '1.23 MB'
    """
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if unit != "B" else f"{nbytes} B"
