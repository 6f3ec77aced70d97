"""DeepSpeed's checkpoint engines, through which programs write files of their own."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


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
