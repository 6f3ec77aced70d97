"""The environment variables that change what a run does, for records and reports."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from zeroshard.core.hidden import without_secrets

_BEHAVIOUR = re.compile(
    r"(NCCL|TORCH|GLOO|OMP|MKL|ZEROSHARD|PYTORCH)_|CUDA_LAUNCH_BLOCKING$|CUDA_VISIBLE_DEVICES$"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|PASS$|PASS_|CREDENTIAL", re.IGNORECASE)


def variables_of_behaviour(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that change what a run does, sorted by name; secrets are hidden.

    A name tells a secret, or an address with a user and a password in the value.

    >>> variables_of_behaviour({"NCCL_DEBUG": "INFO", "HOME": "/h", "TORCH_TOKEN": "x"})
    {'NCCL_DEBUG': 'INFO', 'TORCH_TOKEN': '(hidden)'}
    """
    return {
        name: "(hidden)" if _SECRET.search(name) else without_secrets(value)
        for name, value in sorted((os.environ if env is None else env).items())
        if _BEHAVIOUR.match(name)
    }
