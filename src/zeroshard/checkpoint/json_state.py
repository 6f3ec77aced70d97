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
import re
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from math import isfinite, prod
from pathlib import Path, PurePath
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor, nn

from zeroshard.errors import CheckpointError
from zeroshard.zero.sharded_parameter import ReadOnlyCopy, ShardedParameter

JsonTree: TypeAlias = Union[bool, int, float, str, "list[JsonTree]", "dict[str, JsonTree]", None]
"""A value for ``json.dumps(tree, allow_nan=False)``."""

MAX_DEPTH = 64
"""Largest nesting of containers; far below the limit of Python's stack."""

MAX_VALUES = 10_000_000
"""Largest number of values. Lists that hold one list twice, many levels deep, have too many to write."""

STORED = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # dtypes that every safetensors file can hold  # fmt: skip
STORED_AS_BYTES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.complex32, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    )
}  # fmt: skip
DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict, set)
}
NUMPY_DTYPE = re.compile(r"[<>|][biufcmMSU][0-9]{1,6}(\[[0-9]*[a-zA-Z]+\])?")
ALLOW = '"checkpoint": {"allow_pickle": true}'


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
    return _Decoder(where, tensors, allow_pickle).value(json)


class _Walk:
    """A walk over a tree: its position, and the number of values seen."""

    def __init__(self, where: str, allow_pickle: bool) -> None:
        self.where = where
        self.allow_pickle = allow_pickle
        self.values_seen = 0
        self.steps: list[tuple[str, Any]] = []  # the path: kind of each step, and its key

    def value(self, value: Any) -> Any:
        """The encoded, or decoded, value."""
        raise NotImplementedError

    def below(self, step: str, key: Any, value: Any) -> Any:
        """The value one step down. An error ends the walk, and leaves the step in ``steps``."""
        self.values_seen += 1
        if len(self.steps) >= MAX_DEPTH:
            raise self.error(f"is nested in more than {MAX_DEPTH} containers. Use fewer levels")
        if self.values_seen > MAX_VALUES:
            raise self.error(
                f"comes after {MAX_VALUES} other values: too many, or many references to the same "
                "values. Put numbers into a tensor or an array"
            )
        self.steps.append((step, key))
        result = self.value(value)
        self.steps.pop()
        return result

    def items(self, values: Iterable[Any]) -> list[Any]:
        """A sequence, value by value."""
        return [self.below("item", i, item) for i, item in enumerate(values)]

    def error(self, text: str) -> CheckpointError:
        """An error about the current value. ``text`` follows the value's path."""
        path = "".join(_written[step](key) for step, key in self.steps)
        return CheckpointError(f"{self.where}{path} {text}.")


def _shown(key: Any) -> str:
    """A key in a message, cut. An int of 5000 digits has no ``repr``."""
    if type(key) is str:
        return repr(key if len(key) <= 40 else key[:40] + "...")
    if type(key) in (bool, float, type(None)) or (type(key) is int and key.bit_length() <= 64):
        return repr(key)
    return f"<{type(key).__name__}>"


_written: dict[str, Callable[[Any], str]] = {
    "item": lambda key: f"[{_shown(key)}]",
    "attribute": lambda key: (
        f".{key}" if type(key) is str and len(key) <= 40 else f".{_shown(key)}"
    ),
    "key": lambda i: f" (key {i})",
    "member": lambda i: f" (member {i})",
}


def _kind_of(value: Any) -> str:
    """The class of a value in a message, with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# ---------------------------------------------------------------------- to JSON


class _Encoder(_Walk):
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

    def _str(self, value: str) -> JsonTree:
        data = value if _is_text(value) else value.encode("utf-8", "surrogatepass")
        return data if isinstance(data, str) else {"$str": _to_text(data)}

    def _set(self, value: set[Any] | frozenset[Any]) -> JsonTree:
        """Sorted by encoding, so that the order does not depend on the process."""
        members = [self._looked_up("member", i, member) for i, member in enumerate(value)]
        return {f"${type(value).__name__}": sorted(members, key=json.dumps)}

    def _dict(self, value: dict[Any, Any]) -> JsonTree:
        if all(type(key) is str and _is_text(key) and not key.startswith("$") for key in value):
            return {key: self.below("item", key, item) for key, item in value.items()}
        return {"$dict": self._pairs(value)}

    def _default(self, value: defaultdict[Any, Any]) -> JsonTree:
        factory: Any = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            if self.allow_pickle:
                return self._pickled(value)
            raise self.error(
                f"is a defaultdict whose factory is {_kind_of(factory)}. Use one of "
                f"{', '.join(FACTORIES)}, or store dict(...) of it"
            )
        return {"$defaultdict": [name, self._pairs(value)]}

    def _namespace(self, value: Namespace) -> JsonTree:
        return {
            "$namespace": [
                [self._looked_up("key", i, name), self.below("attribute", name, item)]
                for i, (name, item) in enumerate(vars(value).items())
            ]
        }

    def _pairs(self, value: Mapping[Any, Any]) -> list[JsonTree]:
        return [
            [self._looked_up("key", i, key), self.below("item", key, item)]
            for i, (key, item) in enumerate(value.items())
        ]

    def _looked_up(self, step: str, i: int, value: Any) -> JsonTree:
        by_identity, self._by_identity = self._by_identity, False
        encoded: JsonTree = self.below(step, i, value)
        self._by_identity = by_identity
        return encoded

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
            f"is {_kind_of(value)}. Checkpoints contain plain data and tensors; nothing is pickled, "
            f"because loading a pickle can run any code. {_instead(value)}, or set {ALLOW}"
        )

    def _pickled(self, value: Any) -> JsonTree:
        try:
            return {"$pickle": _to_text(pickle.dumps(value, protocol=4))}
        except Exception as error:
            raise self.error(
                f"is {_kind_of(value)}, which cannot even be pickled ({type(error).__name__}: {error}). "
                f"{_instead(value)}"
            ) from error


_WRITE: dict[type, Callable[[_Encoder, Any], JsonTree]] = {
    int: lambda _, value: value if -(2**63) <= value < 2**63 else {"$int": hex(value)},
    float: lambda _, value: value if isfinite(value) else {"$float": repr(value)},
    str: _Encoder._str,
    bytes: lambda _, value: {"$bytes": _to_text(value)},
    list: _Encoder.items,
    tuple: lambda self, value: {"$tuple": self.items(value)},
    set: _Encoder._set,
    frozenset: _Encoder._set,
    dict: _Encoder._dict,
    OrderedDict: lambda self, value: {"$ordereddict": self._pairs(value)},
    defaultdict: _Encoder._default,
    Counter: lambda self, value: {"$counter": self._pairs(value)},
    Namespace: _Encoder._namespace,
    torch.Size: lambda _, value: {"$size": [int(extent) for extent in value]},
    torch.dtype: lambda _, value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _, value: {"$device": str(value)},
    **dict.fromkeys(
        (type(Path()), type(PurePath())), lambda self, value: {"$path": self._str(str(value))}
    ),
    **dict.fromkeys((Tensor, nn.Parameter, ShardedParameter, ReadOnlyCopy), _Encoder._tensor),
}
_CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict, defaultdict, Counter, Namespace)


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


# ---------------------------------------------------------------------- from JSON


class _Decoder(_Walk):
    """Makes values from the JSON of a checkpoint, which is not trusted."""

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
            raise self.error(f"is {_kind_of(value)}, which JSON does not have")
        tags = [key for key in value if type(key) is not str or key.startswith("$")]
        if not tags:
            return {key: self.below("item", key, item) for key, item in value.items()}
        read = _READ.get(tags[0]) if len(value) == 1 and type(tags[0]) is str else None
        if read is None:
            raise self.error(
                f"has the unknown mark {_shown(tags[0])}: the checkpoint is damaged, or a newer "
                "version wrote it"
            )
        try:
            return read(self, value[tags[0]])
        except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise self.error(f"is damaged: {_shown(tags[0])} has wrong contents") from error

    def _pairs(self, value: Any) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for i, (raw_key, raw_item) in enumerate(map(_list, _list(value))):
            key = self.below("key", i, raw_key)
            if key in result:
                raise self.error(f"is damaged: it contains the key {_shown(key)} twice")
            result[key] = self.below("item", key, raw_item)
        return result

    def _default(self, value: Any) -> defaultdict[Any, Any]:
        name, pairs = _list(value)
        factory = None if name is None else FACTORIES[_text(name)]
        return defaultdict(factory, self._pairs(pairs))

    def _namespace(self, value: Any) -> Namespace:
        namespace = Namespace()
        for i, (raw_name, raw_item) in enumerate(map(_list, _list(value))):
            name = _text(self.below("key", i, raw_name))
            vars(namespace)[name] = self.below("attribute", name, raw_item)
        return namespace

    def _tensor(self, value: Any) -> Tensor:
        name = _text(value)
        if name not in self._tensors:
            raise self.error(f"is damaged: the checkpoint has no tensor {_shown(name)}")
        if name in self._taken:
            raise self.error(f"is damaged: it uses the tensor {_shown(name)} a second time")
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


_READ: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$int": lambda _, value: int(_text(value), 16),
    "$float": lambda _, value: float(_text(value)),
    "$str": lambda _, value: _to_bytes(value).decode("utf-8", "surrogatepass"),
    "$bytes": lambda _, value: _to_bytes(value),
    "$path": lambda self, value: Path(_text(self.below("attribute", "path", value))),
    "$tuple": lambda self, value: tuple(self.items(_list(value))),
    "$set": lambda self, value: set(self.items(_list(value))),
    "$frozenset": lambda self, value: frozenset(self.items(_list(value))),
    "$dict": _Decoder._pairs,
    "$ordereddict": lambda self, value: OrderedDict(self._pairs(value)),
    "$counter": lambda self, value: Counter(self._pairs(value)),
    "$defaultdict": _Decoder._default,
    "$namespace": _Decoder._namespace,
    "$size": lambda _, value: torch.Size(_shape(value)),
    "$dtype": lambda _, value: DTYPES[_text(value)],
    "$device": lambda _, value: torch.device(_text(value)),
    "$tensor": _Decoder._tensor,
    "$tensor_bytes": _Decoder._tensor_bytes,
    "$numpy": _Decoder._numpy,
    "$ndarray": _Decoder._ndarray,
    "$pickle": _Decoder._pickle,
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
