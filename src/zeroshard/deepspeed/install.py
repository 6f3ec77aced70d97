"""Makes ``import deepspeed`` mean ZeroShard, and detects what prevents that.

The directory ``compat`` contains a ``deepspeed`` package and its metadata. Imports, ``find_spec`` and
``importlib.metadata`` all take the first match on Python's path, so the directory has to be first. It has
the commands ``deepspeed`` and ``ds_report``, too, which are at the end of this file.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from zeroshard.deepspeed.api_table import VERSION
from zeroshard.deepspeed.import_hook import PACKAGE, is_ours
from zeroshard.errors import UsageError

DIRECTORY = Path(__file__).parent / "compat"
"""The directory that is put first on the path."""


def install() -> None:
    """Make ``import deepspeed`` import ZeroShard, in this process and in the processes that it spawns.

    Call it before anything that looks for DeepSpeed is imported.

    Raises:
        UsageError: another ``deepspeed`` was imported, or Accelerate or Transformers found none.
    """
    if blind := found_none():
        raise UsageError(
            f"{' and '.join(blind)} looked for deepspeed when imported, and did not find it. Call "
            f"zeroshard.compat.install() before importing {' and '.join(blind)}."
        )
    come_first()


def come_first() -> None:
    """:func:`install` for callers that do not need Accelerate and Transformers to find it (Lightning).

    Raises:
        UsageError: another ``deepspeed`` was imported.
    """
    found = sys.modules.get(PACKAGE)
    if found is not None and not is_ours(found):
        raise UsageError(
            f"another deepspeed was imported already, from {origin_of(found)}: parts of the "
            "program would use it instead of ZeroShard. Call zeroshard.compat.install() before "
            "the first import of deepspeed, or start the program with `zeroshard launch "
            "--as-deepspeed`."
        )
    entry = str(DIRECTORY)
    if entry in sys.path:
        sys.path.remove(entry)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()


def found_none() -> list[str]:
    """Libraries that were imported, and looked for ``deepspeed``, before there was one."""
    blind = []
    accelerate = sys.modules.get("accelerate.utils")
    if accelerate is not None and not hasattr(accelerate, "DummyOptim"):
        blind.append("accelerate")
    transformers = sys.modules.get("transformers.integrations.deepspeed")
    if transformers is not None and getattr(transformers, "DeepSpeedConfig", None) is object:
        blind.append("transformers")
    return blind


def origin_of(module: object) -> str:
    """The file that a module was loaded from, for messages."""
    return str(getattr(module, "__file__", None) or "nowhere on disk")


def rivals(path: Iterable[str]) -> list[Path]:
    """Other ``deepspeed`` packages that are found before ours on ``path``, in order.

    If ours is not on the path: all of them. An empty entry is the working directory.
    """
    found = []
    for entry in path:
        folder = Path(entry or ".")
        if folder.resolve() == DIRECTORY.resolve():
            break
        for candidate in (folder / PACKAGE, folder / f"{PACKAGE}.py"):
            if candidate.exists():
                found.append(candidate)
    return found


def winner() -> str:
    """Where a new interpreter finds another ``deepspeed``, with our directory first on PYTHONPATH.

    Empty if it finds ours. A ``.pth`` file in site-packages can put a directory before all others. This
    starts an interpreter.
    """
    code = f"import importlib.util as u; print(getattr(u.find_spec({PACKAGE!r}), 'origin', ''))"
    command = ["env", f"PYTHONPATH={DIRECTORY}", sys.executable, "-P", "-c", code]
    if sys.version_info < (3, 11):
        command.remove("-P")  # unknown before 3.11: the working directory is searched, too
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""  # no interpreter answered
    found = done.stdout.strip()
    return "" if Path(found).is_relative_to(DIRECTORY) else found


def disagreement() -> str:
    """What is wrong if the package ``deepspeed`` is ours and its metadata is not; else empty."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""  # used without the compatibility directory
    if version == VERSION:
        return ""
    return (
        f"importlib.metadata finds deepspeed {version}, but the imported package is ZeroShard's "
        f"({VERSION}): libraries will expect the features of the other version. Put the directory "
        "that `zeroshard compat --path` prints first on PYTHONPATH."
    )


# ---------------------------------------------------------------------- commands


def main(args: Sequence[str] | None = None) -> None:
    """``deepspeed [flags] script args``: replace this process by our launcher.

    The launcher passes ``--local_rank`` to the script unless a flag switches it off. The process id
    stays, so the caller can signal the launcher and gets its exit code.
    """
    words = list(sys.argv[1:] if args is None else args)
    command = [sys.executable, "-m", "zeroshard.cli.main", "launch", "--as-deepspeed"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], [*command, "--pass_local_rank", *words])


def report(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """``ds_report``: print the versions of the packages in use, and where ZeroShard is installed."""
    import torch

    import zeroshard

    print(
        f"deepspeed {VERSION}: ZeroShard {zeroshard.__version__} in {next(iter(zeroshard.__path__))}"
    )
    cuda = torch.version.cuda or "none"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {cuda}")
    for package in ("accelerate", "transformers", "peft", "lightning"):
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} is not installed")
    print("No operator is compiled at install or at import.")
