"""Hides secrets in values that are shown or written: of a configuration, of the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
"""What is shown in place of a secret."""

_SECRET = re.compile(r"api_?key|secret|passw(or)?d|credential|(^|_)token$", re.IGNORECASE)
_OF_ADDRESS = re.compile(r"(?<=://)[^/@\s\"]*@")


def without_secrets(value: Any, name: str = "") -> Any:
    """``value`` of the key ``name`` with :data:`HIDDEN` for secrets, in containers of our own.

    Secrets are values of keys such as ``api_key`` and ``token``, and the user in an address.

    >>> without_secrets({"comet": {"api_key": "k"}, "uris": ["http://me:pw@host/a"], "token": None})
    {'comet': {'api_key': '***'}, 'uris': ['http://***@host/a'], 'token': None}
    """
    if _SECRET.search(name) and value is not None and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(inner) for inner in value]
    return _OF_ADDRESS.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value
