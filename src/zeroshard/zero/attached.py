"""How does a fact stay with a tensor or a module for as long as that lives?"""

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
    """Object -> value, by identity; an entry goes away with its object, and is not that of an equal one.

    A look costs a tenth of torch's ``WeakIdKeyDictionary``: construction asks several times for each
    parameter. Keys are ids: memory becomes another object only after the callback of the weak reference
    has removed the entry.
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
        """Forget the object's value, if there is one."""
        self._entries.pop(id(holder), None)
