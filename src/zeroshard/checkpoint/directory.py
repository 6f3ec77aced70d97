"""Lists, names, opens, commits and prunes the checkpoints of a directory.

A save writes into ``.TAG.saving-NONCE``, which readers ignore. When everything is on disk it is renamed
to ``TAG``, and then ``latest`` is replaced. If ``TAG`` exists already, it is first renamed to
``.TAG.replaced``. A crash between the two renames leaves ``.TAG.replaced`` without ``TAG``: the next
reader or save renames it back (:func:`restore_replaced`).

A tag may be a link that the user has made, also to another directory: it can be loaded. It is not listed,
and whatever replaces or removes it leaves alone what it refers to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from os import PathLike
from pathlib import Path
from typing import Final

from zeroshard.checkpoint.deepspeed.files import is_deepspeed
from zeroshard.checkpoint.deepspeed.reader import DeepSpeedReader
from zeroshard.checkpoint.manifest import MANIFEST, Manifest
from zeroshard.checkpoint.reader import CheckpointReader, Source, read_manifest, read_small
from zeroshard.core.files import reason
from zeroshard.errors import CheckpointError, UsageError

_log = logging.getLogger("zeroshard")

LATEST, SCRIPT = "latest", "zero_to_fp32.py"
NEWEST: Final = object()
"""Instead of a tag: the checkpoint that was saved last and has no fault."""
_SAVING = re.compile(r"\..+\.saving-[0-9a-f]{8}")
_REPLACED = re.compile(r"\..+\.replaced")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@=+,-]{0,199}")


def check_tag(tag: object) -> str:
    """``tag`` as the name of a directory.

    Raises:
        UsageError: the text cannot name a checkpoint.
    """
    text = str(tag)
    if not _TAG.fullmatch(text) or text in (LATEST, SCRIPT) or text.startswith("frozen-"):
        raise UsageError(
            f"tag={tag!r} cannot be the name of a checkpoint. Use letters, digits and _ . - = + , @, not "
            "starting with a dot or 'frozen-', and neither 'latest' nor 'zero_to_fp32.py'."
        )
    return text


def check_directory(directory: object, call: str) -> None:
    """Check that ``directory`` is a path. ``call``: the function that got it, for the message.

    Raises:
        UsageError: it is None, an empty text, or not a path.
    """
    if not isinstance(directory, (str, PathLike)) or not str(directory).strip():
        raise UsageError(
            f"{call} got {directory!r} as the directory. Pass a path; '.' is the working directory."
        )


def saving_name(tag: str, nonce: str) -> str:
    """The directory that a save writes into until it is complete."""
    return f".{tag}.saving-{nonce}"


def latest(directory: str | Path) -> str:
    """The tag in the file ``latest``.

    Raises:
        CheckpointError: the file is missing or holds no tag. The text lists the tags that exist.
    """
    path = Path(directory) / LATEST
    try:
        text = read_small(path, 4096).decode().strip()
    except FileNotFoundError as error:
        what = "does not exist" if not Path(directory).is_dir() else "has no file 'latest'"
        raise CheckpointError(f"{directory} {what}. {_hint(directory)}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{error} {directory}: {_hint(directory)}") from error
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise CheckpointError(f"{path} cannot be read: {why}. {_hint(directory)}") from error
    if not _TAG.fullmatch(text):
        raise CheckpointError(f"{path} names {text[:80]!r}, which is not a tag. {_hint(directory)}")
    return text


def _hint(directory: str | Path) -> str:
    there = tags(directory)
    if there:
        return f"It contains {', '.join(there[-5:])}: pass one of them as tag=."
    anew = "To begin without one, give load_checkpoint missing_ok=True."
    if not Path(directory).is_dir():
        return f"Check the path. {anew}"
    return f"It contains no checkpoint: check the path, and whether a save was completed. {anew}"


def tags(directory: str | Path) -> list[str]:
    """The complete checkpoints of a directory, oldest first: by step, then by time of the save."""
    found = sorted((saved.step, saved.saved_at, tag) for tag, saved in _complete(Path(directory)))
    return [tag for _, _, tag in found]


def _complete(directory: Path) -> Iterator[tuple[str, Manifest]]:
    for path in _subdirectories(directory):
        with contextlib.suppress(CheckpointError):
            yield path.name, read_manifest(path)


def _subdirectories(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for path in sorted(directory.iterdir()):
            if _TAG.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield path


def resolve(directory: str | Path, tag: object = None) -> Path:
    """The directory of one checkpoint. ``tag=None``: of the one that ``latest`` names.

    Raises:
        CheckpointError: there is no such checkpoint. The text lists those that exist.
    """
    name = latest(directory) if tag is None else check_tag(tag)
    path = Path(directory) / name
    restore_replaced(Path(directory), name)
    if not path.is_dir():
        others = tags(directory)
        hint = f"There are {', '.join(others[-5:])}." if others else "There is no other checkpoint."
        raise CheckpointError(f"{path} does not exist. {hint}")
    return path


def open_checkpoint(directory: str | Path, tag: object = None) -> Source:
    """Open a checkpoint of ZeroShard or of DeepSpeed. ``tag=None``: the latest.

    Raises:
        CheckpointError: there is none, or it is not complete.
    """
    path = resolve(directory, tag)
    if not (path / MANIFEST).exists() and is_deepspeed(path):
        return DeepSpeedReader(path)
    return CheckpointReader(path)


def restore_replaced(directory: Path, tag: str) -> None:
    """Undo a replacement of ``tag`` that ended between its two renames: rename the old one back."""
    aside = directory / f".{tag}.replaced"
    if aside.is_dir() and not (directory / tag).exists():
        with contextlib.suppress(FileNotFoundError):  # another rank has done it
            aside.rename(directory / tag)


def newest_first(directory: str | Path) -> list[str]:
    """The complete checkpoints, that which was saved last first. Those set aside are renamed back.

    A save that was killed before it replaced ``latest`` counts. One that ``latest`` names and whose
    manifest cannot be read is in the list too, so that loading it says what is wrong. If ``latest``
    cannot be read, the manifests decide.

    Raises:
        CheckpointError: ``latest`` cannot be read, and there is no complete checkpoint.
    """
    root = Path(directory)
    with contextlib.suppress(OSError):
        for left in [path for path in root.iterdir() if _REPLACED.fullmatch(path.name)]:
            restore_replaced(root, left.name[1 : -len(".replaced")])
    found = sorted((saved.saved_at, saved.step, tag) for tag, saved in _complete(root))
    names = [name for _, _, name in reversed(found)]
    if (root / LATEST).exists():
        try:
            last = latest(root)
        except CheckpointError as error:
            if not names:  # a run that began anew would hide what happened
                raise
            _log.warning("%s The newest complete checkpoint is %s.", error, names[0])
            return names
        if last not in names:
            names.insert(0, last)
    return names


def fallbacks(directory: str | Path, tag: str) -> list[str]:
    """Complete checkpoints older than ``tag``, newest first; all of them if ``tag`` is not complete."""
    there = tags(directory)
    older = there[: there.index(tag)] if tag in there else there
    return older[::-1]


# ---------------------------------------------------------------------- writing


def begin(directory: Path, name: str) -> None:
    """Make the directory of a new save, unless another rank has made it.

    Raises:
        CheckpointError: the directory cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{directory / name} cannot be created: {reason(error)}.") from error


def remove_leftovers(directory: Path) -> None:
    """Remove what interrupted saves left in a directory.

    At most one save at a time may write to ``directory``, and it begins after this.

    Raises:
        OSError: the directory cannot be read.
    """
    for left in list(directory.iterdir()):
        if _SAVING.fullmatch(left.name):
            _delete(left)
        elif _REPLACED.fullmatch(left.name):
            restore_replaced(directory, left.name[1 : -len(".replaced")])
            _delete(left)  # not renamed back: its successor exists


def commit(place: Path, final: Path, between: Callable[[], None] = lambda: None) -> None:
    """Rename ``place`` to ``final``. Its files must be durable.

    ``between`` is called while an older checkpoint of that name is set aside.

    Raises:
        CheckpointError: the rename failed; an older checkpoint of that name is back.
    """
    sync_directory(place)
    aside = final.with_name(f".{final.name}.replaced")
    if os.path.lexists(final):
        _delete(aside)
        final.rename(aside)
        between()
    try:
        with _naming(final):
            place.rename(final)
    except CheckpointError:
        restore_replaced(final.parent, final.name)
        raise
    sync_directory(final.parent)
    _delete(aside)


def write_durably(path: Path, text: str) -> None:
    """Replace a small file atomically: a reader finds the old text or the new one.

    Raises:
        CheckpointError: the file cannot be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    with _naming(path):
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable.

    Raises:
        CheckpointError: the directory cannot be synced.
    """
    with _naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a :class:`CheckpointError` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {reason(error)}.") from error


def prune(directory: str | Path, keep: int, *, dry_run: bool = False) -> list[str]:
    """Remove all complete checkpoints but the ``keep`` newest, and frozen weights that are not used.

    The checkpoint that ``latest`` names stays, and those that links in the directory refer to. Frozen
    weights stay while a remaining directory refers to them. All of them stay while a manifest cannot be
    read: a newer release may have written it. Returns the names that were removed; with ``dry_run`` those
    that would be.
    """
    root = Path(directory)
    there = tags(root)
    stays = set(there[max(0, len(there) - keep) :])
    with contextlib.suppress(CheckpointError):
        stays.add(latest(root))
    links = [path.resolve() for path in root.glob("*") if path.is_symlink()]
    stays |= {path.name for path in links if path.parent == root.resolve()}
    removed = [tag for tag in there if tag not in stays]
    if not dry_run:
        for tag in removed:
            _remove(root / tag)
    used = _frozen_in_use(root, gone=removed)
    for path in _subdirectories(root):
        if used is not None and path.name.startswith("frozen-") and path.name not in used:
            removed.append(path.name)
            if not dry_run:
                _remove(path)
    return removed


def _frozen_in_use(root: Path, *, gone: Collection[str]) -> set[str] | None:
    """Frozen weights that directories refer to, including those set aside, but not those in ``gone``.

    None: a manifest cannot be read.
    """
    used: set[str] = set()
    for file in root.glob(f"*/{MANIFEST}"):
        try:
            used |= frozen_names(file.parent) if file.parent.name not in gone else set()
        except CheckpointError:
            return None
    return used


def _remove(path: Path) -> None:
    """Rename it, then remove it: an interrupted removal must not look like a checkpoint."""
    gone = path.with_name(saving_name(path.name, "00000000"))
    _delete(gone)
    path.rename(gone)
    _delete(gone)


def _delete(path: Path) -> None:
    """Remove a directory, if there is one; of a link, the link alone. Quiet if that is not possible."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def frozen_names(path: Path) -> set[str]:
    """The directories of frozen weights that a checkpoint refers to.

    Raises:
        CheckpointError: its manifest cannot be read.
    """
    files = read_manifest(path).files
    return {f.name.split("/")[1] for f in files if f.name.startswith("../")}


def find_frozen(directory: Path, name: str) -> Manifest | None:
    """The manifest of the newest complete checkpoint that refers to these frozen weights.

    None if there is none, or if one of the files is missing.
    """
    if not (directory / name).is_dir():
        return None
    for tag in reversed(tags(directory)):
        with contextlib.suppress(CheckpointError), CheckpointReader(directory / tag) as saved:
            own = [f for f in saved.manifest.files if f.name.startswith(f"../{name}/")]
            if own and not saved.problems():
                return saved.manifest
    return None


def is_frozen_in_use(directory: Path, name: str) -> bool:
    """Whether a checkpoint of the directory needs, or may need, these frozen weights."""
    used = _frozen_in_use(directory, gone=())
    return used is None or name in used
