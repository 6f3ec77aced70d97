"""Runs a program that samples tokens, unedited. Each sample depends only on its position in the global
batch.

    python same_draws.py PROGRAM ARGUMENTS...

Three ranks with batches of four then sample the same tokens as two ranks with batches of six.
"""

from __future__ import annotations

import runpy
import sys
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import GenerationMixin

GOLDEN = (5**0.5 - 1) / 2
LONGEST = 64  # tokens of an answer


def main() -> None:
    del sys.argv[0]
    program = sys.argv[0]
    generate, tokens = GenerationMixin.generate, count()

    def from_the_first(*args: Any, **kwargs: Any) -> Any:
        nonlocal tokens
        tokens = count()
        return generate(*args, **kwargs)

    def draw(probs_BV: torch.Tensor, num_samples: int) -> torch.Tensor:
        """In place of ``torch.multinomial``: one number in [0, 1) for each place in all ranks' batch
        and each token of an answer."""
        assert num_samples == 1
        first, token = dist.get_rank() * len(probs_BV), next(tokens)
        place_B = torch.arange(first, first + len(probs_BV))
        number_B = (place_B * LONGEST + token) * GOLDEN % 1
        below_BV = probs_BV.double().cumsum(-1) <= number_B[:, None]
        return below_BV.sum(-1, keepdim=True).clamp(max=probs_BV.shape[-1] - 1)

    with (
        mock.patch.object(GenerationMixin, "generate", from_the_first),
        mock.patch("torch.multinomial", draw),
    ):
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
