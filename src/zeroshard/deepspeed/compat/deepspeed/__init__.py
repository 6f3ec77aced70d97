"""The package ``deepspeed``, implemented by ZeroShard.

Every name is bound to one of :mod:`zeroshard.deepspeed` on first use. This file contains none of them.
"""

import sys
from typing import Any

from zeroshard.deepspeed import import_hook

__zeroshard__ = True
import_hook.serve()


def __getattr__(name: str) -> Any:
    return import_hook.attribute(sys.modules[__name__], "", name)


def __dir__() -> list[str]:
    return import_hook.known("")
