"""Replaces attributes, and puts the old ones back."""

from __future__ import annotations

import sys
from typing import Any

_MISSING = object()


class Patches:
    """Replacements that :meth:`undo` takes back in reverse order."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []
        self._modules = [
            module for name, module in sys.modules.items() if name.partition(".")[0] == "zeroshard"
        ]

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Make ``owner.name`` be ``value``."""
        own = vars(owner) if isinstance(owner, type) else None
        old = own.get(name, _MISSING) if own is not None else getattr(owner, name, _MISSING)
        self._old.append((owner, name, old))
        setattr(owner, name, value)

    def everywhere(self, owner: Any, name: str, value: Any) -> None:
        """As :meth:`set`, and in the modules of the project that imported the function by name."""
        old = getattr(owner, name, _MISSING)
        self.set(owner, name, value)
        for module in self._modules:
            if vars(module).get(name) is old:
                self.set(module, name, value)

    def undo(self) -> None:
        """Put everything back."""
        while self._old:
            owner, name, old = self._old.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
