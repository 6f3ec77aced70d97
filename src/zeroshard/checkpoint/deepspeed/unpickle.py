"""Restricted unpickler for files that ``torch.save`` wrote; unknown objects become placeholders.

torch's restricted unpickler makes numbers, texts, containers and tensors. A few named classes become a
:class:`Likeness`, without methods. Any other object becomes an :class:`Unread`. Nothing that a file names
is imported or called. Tensors are mapped from the file, so that those that are not used are not read.

Torch writes the CRC-32 of each record of such a file, and does not look at it when it reads. Small
records are compared when a file is opened, all others before the first value of a tensor is used.
"""

from __future__ import annotations

import stat
import threading
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from copy import deepcopy
from enum import EnumMeta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zeroshard.errors import CheckpointError

T = TypeVar("T")

_SMALL_NBYTES = 2**20
_READ_NBYTES = 2**20
_CHECK = "_zeroshard_check"


class RecordCheck:
    """Compares the records of a file with their CRC-32. A record without one (0) is not compared."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left: list[zipfile.ZipInfo] = []
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.file_size > _SMALL_NBYTES:
                    self._left.append(info)
                else:
                    _compare(archive, info)

    def finish(self) -> None:
        """Compare the large records, once.

        Raises:
            CheckpointError: a value differs from what was written.
        """
        left, self._left = self._left, []
        if not left:
            return
        try:
            with zipfile.ZipFile(self._path) as archive:
                for info in left:
                    _compare(archive, info)
        except Exception as error:  # the file may have changed since it was opened
            self._left = left
            raise CheckpointError(
                f"{self._path} is damaged: {_short(error)}. Use another copy of the file."
            ) from error


def _compare(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Raises ``zipfile.BadZipFile`` if the CRC-32 differs."""
    if info.CRC or not info.file_size:  # torch.serialization.set_crc32_options(False) writes 0
        with archive.open(info) as record:
            while record.read(_READ_NBYTES):
                pass


def check_values(tensor: Tensor) -> None:
    """Check the file that a tensor of :func:`load_plain` is mapped from, before its values are used.

    Raises:
        CheckpointError: a value of the file differs from what was written.
    """
    check = getattr(tensor, _CHECK, None)
    if check is not None:
        check.finish()


def checked_copy(value: T) -> T:
    """A copy of nested data, whose tensors are in memory. Raises what :func:`check_values` does."""
    for tensor in tensors_in(value):
        check_values(tensor)
    copied = deepcopy(value)
    for tensor in tensors_in(copied):
        vars(tensor).pop(_CHECK, None)
    return copied


class Unread:
    """Stands for an object that only unpickling could make.

    Using it raises a :class:`CheckpointError` that names the file and the object's class.
    """

    _what = "an object"

    def __new__(cls, *_args: Any) -> Unread:
        return super().__new__(cls)

    def __setstate__(self, _state: Any) -> None:
        """The object's content is dropped."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python's protocols (copy, repr) expect this error
        self.refuse()

    def __repr__(self) -> str:
        return f"<not read: {self._what}>"

    def refuse(self, *_args: Any) -> NoReturn:
        """Raise the error.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"{self._what}, which is not created, because unpickling can run any code. If you "
            "need the value, load the checkpoint in a program that has its class, and save it as "
            "plain data (numbers, texts, lists, dicts, tensors)."
        )

    __call__ = __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = refuse
    __int__ = __float__ = __index__ = refuse


class Likeness:
    """The attributes of an object, without the methods of its class."""

    def __new__(cls, *_args: Any) -> Likeness:
        return super().__new__(cls)


class _NumpyDtype:
    """``numpy.dtype(name, ...)``. Its state, the byte order, is always little endian in these files."""

    def __init__(self, name: str, *_flags: Any) -> None:
        self.name = name

    def __setstate__(self, _state: Any) -> None:
        """Nothing: the name is enough."""


def _numpy_scalar(dtype: _NumpyDtype, data: Any) -> bool | int | float:
    """A numpy scalar as a Python number. Programs often save one, such as the best loss."""
    kind = np.dtype(dtype.name)
    if kind.kind not in "biuf":
        raise ValueError(f"a scalar of {dtype.name!r}")
    value: bool | int | float = np.frombuffer(data, dtype=kind, count=1)[0].item()
    return value


def _member(owner: Any, name: str) -> Any:
    """The value of an enum's member, which early versions of Python 3.11 save as ``getattr(enum, name)``.

    Attributes of other classes are not read: methods would be a way to any code.
    """
    if isinstance(owner, EnumMeta):
        return owner[name].value
    if isinstance(owner, type) and issubclass(owner, Unread):
        return owner()
    raise ValueError(f"getattr of {owner!r}")


_KNOWN: tuple[tuple[Any, str], ...] = (
    (_member, "builtins.getattr"),
    (Namespace, "argparse.Namespace"),
    (_NumpyDtype, "numpy.dtype"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
)

_safe_list = threading.Lock()  # torch has one list of safe globals for the process


def load_plain(path: Path, likenesses: Mapping[str, Any]) -> Any:
    """The content of a file.

    ``likenesses``: full name of a class -> what is called instead of it.

    Raises:
        CheckpointError: the file cannot be read without running code. No other exception, for any bytes.
    """
    known: list[Any] = [*_KNOWN, *((stand_in, name) for name, stand_in in likenesses.items())]
    unknown: list[str] = []
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
            raise CheckpointError(f"{path} is a pipe, a socket or a device, and not a file.")
        path.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from error
    try:
        with _safe_list:
            with safe_globals(known):
                unknown = sorted(get_unsafe_globals_in_checkpoint(path))
            others = [(_unread_class(name, path), name) for name in unknown]
            with safe_globals([*known, *others]):
                found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        check = RecordCheck(path)
    except Exception as error:  # a pickle can make its reader raise anything
        refers = f" It refers to {', '.join(unknown)}." if unknown else ""
        raise CheckpointError(
            f"{path} cannot be read without running code, or is damaged: {_short(error)}.{refers} "
            "If it was truncated or damaged by copying, use another copy."
        ) from error
    for tensor in tensors_in(found):
        setattr(tensor, _CHECK, check)
    return found


def _unread_class(name: str, path: Path) -> type[Unread]:
    return type("Unread", (Unread,), {"_what": f"{path} contains an object of type {name}"})


def _short(error: Exception) -> str:
    """The line of torch's long text that says what went wrong."""
    before, _, after = str(error).partition("WeightsUnpickler error: ")
    lines = (after or before).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def unread_in(value: Any) -> Iterator[Unread]:
    """The placeholders in nested data."""
    for leaf in _leaves(value):
        if isinstance(leaf, Unread):
            yield leaf
        elif isinstance(leaf, type) and issubclass(leaf, Unread):  # the class itself was saved
            yield leaf()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested data."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))


def _leaves(value: Any) -> Iterator[Any]:
    """What is in mappings, lists and tuples. A :class:`Likeness` has small values only."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
