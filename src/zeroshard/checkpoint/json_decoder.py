"""Makes values from the JSON of a checkpoint, which is not trusted."""

from __future__ import annotations

import base64
import pickle
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.json_walk import (
    ALLOW,
    DTYPES,
    FACTORIES,
    NUMPY_DTYPE,
    STORED_AS_BYTES,
    Walk,
    kind_of,
    shown,
)
from zeroshard.errors import CheckpointError


class Decoder(Walk):
    def __init__(self, where: str, tensors: Mapping[str, Tensor], allow_pickle: bool) -> None:
        super().__init__(where, allow_pickle)
        self._tensors = tensors
        self._taken: set[str] = set()

    def value(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return self.items(value)
        if type(value) is not dict:
            raise self.error(f"is {kind_of(value)}, which JSON does not have")
        tags = [key for key in value if type(key) is not str or key.startswith("$")]
        if not tags:
            return {key: self.below("item", key, item) for key, item in value.items()}
        read = _READ.get(tags[0]) if len(value) == 1 and type(tags[0]) is str else None
        if read is None:
            raise self.error(
                f"has the unknown mark {shown(tags[0])}: the checkpoint is damaged, or a newer "
                "version wrote it"
            )
        try:
            return read(self, value[tags[0]])
        except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise self.error(f"is damaged: {shown(tags[0])} has wrong contents") from error

    def _int(self, value: Any) -> int:
        return int(_text(value), 16)

    def _float(self, value: Any) -> float:
        return float(_text(value))

    def _str(self, value: Any) -> str:
        return _to_bytes(value).decode("utf-8", "surrogatepass")

    def _bytes(self, value: Any) -> bytes:
        return _to_bytes(value)

    def _path(self, value: Any) -> Path:
        return Path(_text(self.below("attribute", "path", value)))

    def _tuple(self, value: Any) -> tuple[Any, ...]:
        return tuple(self.items(_list(value)))

    def _set(self, value: Any) -> set[Any]:
        return set(self.items(_list(value)))

    def _frozenset(self, value: Any) -> frozenset[Any]:
        return frozenset(self.items(_list(value)))

    def _pairs(self, value: Any) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for i, (raw_key, raw_item) in enumerate(map(_list, _list(value))):
            key = self.below("key", i, raw_key)
            if key in result:
                raise self.error(f"is damaged: it contains the key {shown(key)} twice")
            result[key] = self.below("item", key, raw_item)
        return result

    def _ordered(self, value: Any) -> OrderedDict[Any, Any]:
        return OrderedDict(self._pairs(value))

    def _counter(self, value: Any) -> Counter[Any]:
        return Counter(self._pairs(value))

    def _default(self, value: Any) -> defaultdict[Any, Any]:
        name, pairs = _list(value)
        factory = None if name is None else FACTORIES.get(_text(name))
        if name is not None and factory is None:
            raise ValueError(name)
        return defaultdict(factory, self._pairs(pairs))

    def _namespace(self, value: Any) -> Namespace:
        namespace = Namespace()
        for i, (raw_name, raw_item) in enumerate(map(_list, _list(value))):
            name = _text(self.below("key", i, raw_name))
            vars(namespace)[name] = self.below("attribute", name, raw_item)
        return namespace

    def _size(self, value: Any) -> torch.Size:
        return torch.Size(_shape(value))

    def _dtype(self, value: Any) -> torch.dtype:
        dtype = DTYPES.get(_text(value))
        if dtype is None:
            raise ValueError(value)
        return dtype

    def _device(self, value: Any) -> torch.device:
        return torch.device(_text(value))

    def _tensor(self, value: Any) -> Tensor:
        name = _text(value)
        if name not in self._tensors:
            raise self.error(f"is damaged: the checkpoint has no tensor {shown(name)}")
        if name in self._taken:
            raise self.error(f"is damaged: it uses the tensor {shown(name)} a second time")
        self._taken.add(name)
        return self._tensors[name]

    def _data(self, name: Any) -> Tensor:
        """A stored tensor of bytes, copied: a view as a wider dtype needs an aligned address."""
        data = self._tensor(name)
        if data.dtype is not torch.uint8 or data.dim() != 1:
            raise ValueError(name)
        return data.clone()

    def _tensor_bytes(self, value: Any) -> Tensor:
        name, dtype, shape = _list(value)
        return self._data(name).view(STORED_AS_BYTES[_text(dtype)]).view(_shape(shape))

    def _numpy(self, value: Any) -> Any:
        dtype, data = _list(value)
        return _array(dtype, (), _to_bytes(data))[()]

    def _ndarray(self, value: Any) -> Any:
        name, dtype, shape = _list(value)
        return _array(dtype, _shape(shape), self._data(name).numpy().tobytes())

    def _pickle(self, value: Any) -> Any:
        if not self.allow_pickle:
            raise self.error(
                "is a pickle, and loading one can run any code. If you trust its author, set "
                f"{ALLOW}"
            )
        try:
            return pickle.loads(_to_bytes(value))
        except Exception as error:
            raise self.error(f"cannot be unpickled ({type(error).__name__}: {error})") from error


_READ: dict[str, Callable[[Decoder, Any], Any]] = {
    "$int": Decoder._int,
    "$float": Decoder._float,
    "$str": Decoder._str,
    "$bytes": Decoder._bytes,
    "$path": Decoder._path,
    "$tuple": Decoder._tuple,
    "$set": Decoder._set,
    "$frozenset": Decoder._frozenset,
    "$dict": Decoder._pairs,
    "$ordereddict": Decoder._ordered,
    "$counter": Decoder._counter,
    "$defaultdict": Decoder._default,
    "$namespace": Decoder._namespace,
    "$size": Decoder._size,
    "$dtype": Decoder._dtype,
    "$device": Decoder._device,
    "$tensor": Decoder._tensor,
    "$tensor_bytes": Decoder._tensor_bytes,
    "$numpy": Decoder._numpy,
    "$ndarray": Decoder._ndarray,
    "$pickle": Decoder._pickle,
}
"""For wrong contents these functions raise ``TypeError``, ``ValueError`` and the like."""


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(type(value))
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(type(value))
    return value


def _shape(value: Any) -> list[int]:
    if any(type(extent) is not int or not 0 <= extent < 2**63 for extent in _list(value)):
        raise ValueError("no shape")
    return _list(value)


def _to_bytes(value: Any) -> bytes:
    return base64.b64decode(_text(value), validate=True)


def _array(dtype: Any, shape: Iterable[int], data: bytes) -> Any:
    import numpy

    if not NUMPY_DTYPE.fullmatch(_text(dtype)):
        raise ValueError("no dtype")
    shape, kind = tuple(shape), numpy.dtype(dtype)
    if len(data) != prod(shape) * kind.itemsize:
        raise ValueError("too few or too many bytes")
    if kind.kind == "U" and (numpy.frombuffer(data, f"{dtype[0]}u4") > sys.maxunicode).any():
        raise ValueError("no characters")
    return numpy.ndarray(shape, kind, buffer=data).copy()
