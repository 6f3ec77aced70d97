"""``import deepspeed``, answered by ZeroShard.

Every name is bound to one of :mod:`zeroshard.deepspeed`; this file knows none of them.
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
