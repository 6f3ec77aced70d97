"""The commands ``deepspeed`` and ``ds_report``."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata


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
    from zeroshard.deepspeed.api_table import VERSION

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
