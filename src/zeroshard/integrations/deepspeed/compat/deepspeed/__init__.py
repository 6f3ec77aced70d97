"""``import deepspeed``, answered by ZeroShard.

Every name is bound to one of :mod:`zeroshard.integrations.deepspeed`; this file knows none of them.
"""

import sys
from typing import Any

from zeroshard.integrations.deepspeed import modules

__zeroshard__ = True
modules.serve()


def __getattr__(name: str) -> Any:
    return modules.attribute(sys.modules[__name__], "", name)


def __dir__() -> list[str]:
    return modules.known("")
