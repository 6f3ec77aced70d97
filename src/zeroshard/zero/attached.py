"""Attaches a value to an object, for as long as the object lives."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Entry(weakref.ref[K], Generic[K, V]):
    __slots__ = ("key", "value")

    key: int
    value: V


class Attached(Generic[K, V]):
    """Maps objects to values, by identity. An entry is removed when its object is freed.

    A look-up costs a tenth of one in torch's ``WeakIdKeyDictionary``; construction does several per
    parameter. Keys are ``id()`` values. The callback of the weak reference removes an entry before the
    object's memory can belong to another object.
    """

    def __init__(self) -> None:
        entries: dict[int, _Entry[K, V]] = {}

        def forget(entry: weakref.ref[K]) -> None:
            assert isinstance(entry, _Entry)
            entries.pop(entry.key, None)

        self._entries, self._forget = entries, forget

    def get(self, holder: K) -> V | None:
        """The object's value, or None."""
        entry = self._entries.get(id(holder))
        return None if entry is None else entry.value

    def __contains__(self, holder: K) -> bool:
        return id(holder) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __setitem__(self, holder: K, value: V) -> None:
        entry: _Entry[K, V] = _Entry(holder, self._forget)
        entry.key, entry.value = id(holder), value
        self._entries[entry.key] = entry

    def discard(self, holder: K) -> None:
        """Remove the object's value, if there is one."""
        self._entries.pop(id(holder), None)
