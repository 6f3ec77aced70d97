"""Whether rows of a planned batch hold several samples, which decides how attention is masked.

Transformers reads the positions of tokens to find out, if no cache is there. Without values it has to
make a mask of all pairs of tokens, which a run with one sample in each row does not make. With such a
mask attention also takes another kernel.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch import Tensor

from zeroshard.sequence.token_positions import sample_numbers

_FINDS = "find_packed_sequence_indices"


@contextlib.contextmanager
def rows_as_in(inputs: Any) -> Iterator[None]:
    """Inside, models of Transformers take rows for one sample each, unless ``inputs`` have several.

    ``inputs``: of the model, with values. Positions without values are those of one sample. Does nothing
    for programs that have not imported Transformers.
    """
    own = inputs.get("position_ids") if isinstance(inputs, Mapping) else None
    if "transformers" not in sys.modules or _are_packed(own):
        yield
        return
    from transformers import masking_utils

    if not hasattr(masking_utils, _FINDS):  # before packed rows were looked for
        yield
        return
    with mock.patch.object(masking_utils, _FINDS, return_value=None):
        yield


def _are_packed(positions: Any) -> bool:
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.is_meta:
        return False
    return bool(sample_numbers(positions).any())
