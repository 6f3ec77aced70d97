"""Files of checkpoints under DeepSpeed's names, with DeepSpeed's defaults.

:mod:`zeroshard.checkpoint` reads and writes them. Through checkpoint engines programs write their own.
"""

from __future__ import annotations

import abc
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import zero_to_fp32
from zeroshard.checkpoint.deepspeed.reader import load_file
from zeroshard.checkpoint.directory import open_checkpoint
from zeroshard.checkpoint.export_plan import parse_dtype
from zeroshard.checkpoint.zero_to_fp32 import export_checkpoint
from zeroshard.deepspeed.logs import logger
from zeroshard.errors import CheckpointError, UnsupportedError


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """:func:`zeroshard.checkpoint.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict`.

    The default, ``safe_serialization=False``, writes ``pytorch_model.bin``.
    """
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """:func:`convert_zero_checkpoint_to_fp32_state_dict` for another dtype.

    Raises:
        UnsupportedError: a 16-bit dtype without ``safe_serialization``.
    """
    if parse_dtype(dtype) == torch.float32:
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag,
            exclude_frozen_parameters,
        )  # fmt: skip
        return
    if not safe_serialization:
        raise UnsupportedError(
            f"weights in {dtype} are written as safetensors only: pass safe_serialization=True."
        )
    with closing(open_checkpoint(checkpoint_dir, tag)) as source:
        export_checkpoint(
            source,
            output_dir,
            dtype=dtype,
            max_shard_size=max_shard_size,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """The file of rank 0's module states in DeepSpeed's layout.

    Raises:
        FileNotFoundError: there is none.
    """
    name = "zero_pp_rank_0_mp_rank_00" if zero_stage == 3 else "mp_rank_00"
    return _files(checkpoint_dir, f"{name}_model_states.pt")[0]


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """The files of optimizer states in DeepSpeed's layout.

    Raises:
        FileNotFoundError: there are none.
    """
    return _files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """The files of module states in DeepSpeed's layout.

    Raises:
        FileNotFoundError: there are none.
    """
    return _files(checkpoint_dir, "*_model_states.pt")


def parse_optim_states(
    files: Sequence[str], ds_checkpoint_dir: str
) -> tuple[int, int, list[Any], Any]:
    """Read DeepSpeed's optimizer files, one for each rank, without running code in them.

    Returns the stage, the number of ranks, each rank's flat fp32 groups, and their padding (None where
    the files do not have it).

    Raises:
        CheckpointError: the files are not of a ZeRO run, or there are too few or too many.
    """
    states = [load_file(Path(file))["optimizer_state_dict"] for file in files]
    first = states[0] if states else {}
    if "zero_stage" not in first:
        raise CheckpointError(f"{ds_checkpoint_dir} contains no optimizer states of ZeRO.")
    stage, ranks = int(first["zero_stage"]), first["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else int(ranks)
    if ranks != len(states):
        raise CheckpointError(
            f"{ds_checkpoint_dir} was saved by {ranks} ranks, and there are {len(states)} files "
            "of optimizer states. Put the files of all ranks of one save there."
        )
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    return stage, ranks, [s[key] for s in states], first.get("param_alignment_paddings")


def _files(folder: str, pattern: str) -> list[str]:
    found = sorted(Path(folder).glob(pattern), key=lambda path: _by_number(path.name))
    if not found:
        raise FileNotFoundError(
            f"no {pattern} in {folder}. Checkpoints of ZeroShard have other files: read them with "
            "get_fp32_state_dict_from_zero_checkpoint, or `zeroshard ckpt`."
        )
    return [str(path) for path in found]


def _by_number(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in name.replace(".", "_").split("_")]


def copy_as_universal(args: Any) -> None:
    """Copy a checkpoint. ZeroShard's checkpoints need no conversion for another world size or stage.

    ``args``: those of DeepSpeed's converter, with ``input_folder`` and ``output_folder``.

    Raises:
        CheckpointError: ``input_folder`` is no directory.
    """
    source, target = Path(args.input_folder), Path(args.output_folder)
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a directory; give a checkpoint as --input_folder.")
    shutil.copytree(source, target, dirs_exist_ok=True)
    logger.info("%s is copied to %s: it loads at any world size without conversion", source, target)


# ---------------------------------------------------------------------- engines for files of programs


@dataclass
class CheckpointCommitInfo:
    """Identifies a checkpoint."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(abc.ABC):
    """Writes and reads files. Programs derive their own classes from it."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None

    @abc.abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins."""

    @abc.abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write one file."""

    @abc.abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file."""

    @abc.abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """All files of a checkpoint are written."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory, and those above it."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)


class TorchCheckpointEngine(CheckpointEngine):
    """``torch.save`` and ``torch.load``. Loading runs no code of the file.

    Raises:
        pickle.UnpicklingError: a file holds something other than plain data and tensors.
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = "TorchCheckpointEngine"

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing: each file is independent."""

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """True: each file is complete when ``save`` returns."""
        return True
