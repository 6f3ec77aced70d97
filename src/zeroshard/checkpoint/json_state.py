"""Encodes small nested Python state as JSON and tensors, without pickling.

It is for ``client_state``, a schedule's ``state_dict`` and generators. What JSON has is written as it is.
Everything else becomes an object with one key that begins with ``$``. So does a dict whose keys are no
strings or begin with ``$``. Each value has exactly one encoding, and no two values share one.

    None True 1 0.5 "a" [1]      as they are                {"a": 1}        {"a": 1}
    2**64                        {"$int": "0x1..."}         {1: 2}          {"$dict": [[1, 2]]}
    nan                          {"$float": "nan"}          (1, 2)          {"$tuple": [1, 2]}
    b"a"                         {"$bytes": "YQ=="}         Counter("a")    {"$counter": [["a", 1]]}
    torch.float32                {"$dtype": "float32"}      a tensor        {"$tensor": "where/0"}

The text is strict JSON: no NaN, no lone surrogates. The order of keys is kept; writers must not sort. An
object that is referenced twice is decoded as two objects.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from enum import Enum
from math import isfinite
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.json_decoder import Decoder
from zeroshard.checkpoint.json_walk import (
    ALLOW,
    FACTORIES,
    NUMPY_DTYPE,
    STORED,
    STORED_AS_BYTES,
    JsonTree,
    Walk,
    kind_of,
)
from zeroshard.zero.sharded_parameter import ReadOnlyCopy, ShardedParameter

_TENSORS = (Tensor, nn.Parameter, ShardedParameter, ReadOnlyCopy)


def encode(
    value: Any, *, where: str, allow_pickle: bool = False
) -> tuple[JsonTree, dict[str, Tensor]]:
    """``value`` as JSON, and the tensors that the JSON refers to.

    Takes None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, OrderedDict, defaultdict,
    Counter, ``argparse.Namespace``, paths, numpy scalars and arrays, ``torch.Size``, ``torch.dtype``,
    ``torch.device`` and tensors. Subclasses are refused, because their class would be lost. The tensors
    are private contiguous copies on the CPU, named ``where/0``, ``where/1``, ...; a parameter becomes a
    tensor. Collective if ``value`` holds a sharded parameter.

    ``where``: the name of the value in messages ("client_state"). ``allow_pickle``: pickle what is not in
    the list, and mark it so that :func:`decode` can refuse it.

    Raises:
        CheckpointError: a value that cannot be encoded, a cycle, or nesting deeper than 64.
    """
    encoder = _Encoder(where, allow_pickle)
    return encoder.value(value), encoder.tensors


def decode(
    json: JsonTree, tensors: Mapping[str, Tensor], *, where: str, allow_pickle: bool = False
) -> Any:
    """The value that :func:`encode` was given. Tensors are taken from ``tensors`` without a copy.

    Raises:
        CheckpointError: JSON that :func:`encode` does not write, or a pickle without ``allow_pickle``. No
            other exception.
    """
    return Decoder(where, tensors, allow_pickle).value(json)


# ---------------------------------------------------------------------- to JSON


class _Encoder(Walk):
    def __init__(self, where: str, allow_pickle: bool) -> None:
        super().__init__(where, allow_pickle)
        self.tensors: dict[str, Tensor] = {}
        self._open: set[int] = set()  # ids of the containers around the current value
        self._by_identity = True  # False in keys and set members, which are looked up by equality

    def value(self, value: Any) -> JsonTree:
        kind = type(value)
        if value is None or kind is bool:
            return value  # type: ignore[no-any-return]
        write = _WRITE.get(kind)
        if write is None:
            return self._other(value)
        if kind not in _CONTAINERS:
            return write(self, value)
        if id(value) in self._open:
            raise self.error(
                f"is a {kind.__name__} that contains itself. A cycle cannot be stored; store a "
                "name or an index instead"
            )
        self._open.add(id(value))
        encoded = write(self, value)
        self._open.discard(id(value))
        return encoded

    def _int(self, value: int) -> JsonTree:
        return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}

    def _float(self, value: float) -> JsonTree:
        return value if isfinite(value) else {"$float": repr(value)}

    def _str(self, value: str) -> JsonTree:
        return (
            value if _is_text(value) else {"$str": _to_text(value.encode("utf-8", "surrogatepass"))}
        )

    def _bytes(self, value: bytes) -> JsonTree:
        return {"$bytes": _to_text(value)}

    def _path(self, value: PurePath) -> JsonTree:
        return {"$path": self._str(str(value))}

    def _list(self, value: list[Any]) -> JsonTree:
        return self.items(value)

    def _tuple(self, value: tuple[Any, ...]) -> JsonTree:
        return {"$tuple": self.items(value)}

    def _set(self, value: set[Any] | frozenset[Any]) -> JsonTree:
        """Sorted by encoding, so that the order does not depend on the process."""
        by_identity, self._by_identity = self._by_identity, False
        members = [self.below("member", i, member) for i, member in enumerate(value)]
        self._by_identity = by_identity
        return {f"${type(value).__name__}": sorted(members, key=json.dumps)}

    def _dict(self, value: dict[Any, Any]) -> JsonTree:
        if all(type(key) is str and _is_text(key) and not key.startswith("$") for key in value):
            return {key: self.below("item", key, item) for key, item in value.items()}
        return {"$dict": self._pairs(value)}

    def _ordered(self, value: OrderedDict[Any, Any]) -> JsonTree:
        return {"$ordereddict": self._pairs(value)}

    def _counter(self, value: Counter[Any]) -> JsonTree:
        return {"$counter": self._pairs(value)}

    def _default(self, value: defaultdict[Any, Any]) -> JsonTree:
        factory: Any = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            if self.allow_pickle:
                return self._pickled(value)
            raise self.error(
                f"is a defaultdict whose factory is {kind_of(factory)}. Use one of "
                f"{', '.join(FACTORIES)}, "
                "or store dict(...) of it"
            )
        return {"$defaultdict": [name, self._pairs(value)]}

    def _namespace(self, value: Namespace) -> JsonTree:
        return {
            "$namespace": [
                [self._key(i, name), self.below("attribute", name, item)]
                for i, (name, item) in enumerate(vars(value).items())
            ]
        }

    def _pairs(self, value: Mapping[Any, Any]) -> list[JsonTree]:
        return [
            [self._key(i, key), self.below("item", key, item)]
            for i, (key, item) in enumerate(value.items())
        ]

    def _key(self, i: int, key: Any) -> JsonTree:
        by_identity, self._by_identity = self._by_identity, False
        encoded: JsonTree = self.below("key", i, key)
        self._by_identity = by_identity
        return encoded

    def _size(self, value: torch.Size) -> JsonTree:
        return {"$size": [int(extent) for extent in value]}

    def _dtype(self, value: torch.dtype) -> JsonTree:
        return {"$dtype": str(value).removeprefix("torch.")}

    def _device(self, value: torch.device) -> JsonTree:
        return {"$device": str(value)}

    def _tensor(self, value: Tensor) -> JsonTree:
        if not self._by_identity:
            raise self.error(
                "is a tensor in a key or a set, which cannot be looked up after loading"
            )
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            raise self.error(
                "is a sparse, nested or quantized tensor. Store a dense tensor, or the tensors "
                "that it consists of"
            )
        if value.is_meta:
            raise self.error("is a tensor on the meta device, which has no values. Store its shape")
        name = str(value.dtype).removeprefix("torch.")
        if value.dtype not in STORED and name not in STORED_AS_BYTES:
            raise self.error(
                f"is a tensor of dtype {name}, which files cannot contain. Store it in another "
                "dtype"
            )
        values = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        if value.dtype in STORED:
            return {"$tensor": self._keep(values)}
        as_bytes = self._keep(values.reshape(-1).view(torch.uint8))
        return {"$tensor_bytes": [as_bytes, name, list(values.shape)]}

    def _keep(self, values: Tensor) -> str:
        name = f"{self.where}/{len(self.tensors)}"
        self.tensors[name] = values
        return name

    def _other(self, value: Any) -> JsonTree:
        """numpy's types, and values without an encoding."""
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and (isinstance(value, numpy.generic) or type(value) is numpy.ndarray):
            dtype = value.dtype.str
            if NUMPY_DTYPE.fullmatch(dtype):
                if isinstance(value, numpy.generic):
                    return {"$numpy": [dtype, _to_text(value.tobytes()[: value.nbytes])]}
                data = bytearray(value.tobytes() or b"0")  # torch refuses an empty buffer
                stored = torch.frombuffer(data, dtype=torch.uint8)[: value.nbytes]
                return {"$ndarray": [self._keep(stored), dtype, list(value.shape)]}
        if self.allow_pickle:
            return self._pickled(value)
        raise self.error(
            f"is {kind_of(value)}. Checkpoints contain plain data and tensors; nothing is pickled, "
            f"because loading a pickle can run any code. {_instead(value)}, or set {ALLOW}"
        )

    def _pickled(self, value: Any) -> JsonTree:
        try:
            return {"$pickle": _to_text(pickle.dumps(value, protocol=4))}
        except Exception as error:
            raise self.error(
                f"is {kind_of(value)}, which cannot even be pickled ({type(error).__name__}: {error}). "
                f"{_instead(value)}"
            ) from error


_WRITE: dict[type, Callable[[_Encoder, Any], JsonTree]] = {
    int: _Encoder._int,
    float: _Encoder._float,
    str: _Encoder._str,
    bytes: _Encoder._bytes,
    list: _Encoder._list,
    tuple: _Encoder._tuple,
    set: _Encoder._set,
    frozenset: _Encoder._set,
    dict: _Encoder._dict,
    OrderedDict: _Encoder._ordered,
    defaultdict: _Encoder._default,
    Counter: _Encoder._counter,
    Namespace: _Encoder._namespace,
    torch.Size: _Encoder._size,
    torch.dtype: _Encoder._dtype,
    torch.device: _Encoder._device,
    type(Path()): _Encoder._path,
    type(PurePath()): _Encoder._path,
    **dict.fromkeys(_TENSORS, _Encoder._tensor),
}
_CONTAINERS = (
    list, tuple, set, frozenset, dict, OrderedDict, defaultdict, Counter, Namespace
)  # fmt: skip


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _is_text(value: str) -> bool:
    """Whether the text has a UTF-8 encoding. Half of a surrogate pair (in some file names) has none."""
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _instead(value: Any) -> str:
    if isinstance(value, Enum):
        return "Store its name or its value"
    if isinstance(value, Tensor):
        return "Store the plain tensors that it consists of, or its values"
    for kind in (bool, int, float, str, bytes, list, tuple, dict, set):
        if isinstance(value, kind):
            return f"Store {kind.__name__}(...) of it"
    if hasattr(value, "state_dict"):
        return "Store its state_dict()"
    if hasattr(value, "__dict__") and not callable(value):
        return "Store vars(...) of it"
    return "Store plain data"
