"""Prints the error that rounded traffic makes in small models: the table of ``docs/hierarchy.md``.

Run from the root of a checkout, on four CPU ranks, which are two nodes::

    python -m torch.distributed.run --nproc-per-node 4 tools/rounding_table.py

Each model trains 20 steps in fp32 with AdamW, exactly and with rounded traffic, on the same batches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support import edge_case_models  # type: ignore[import-not-found]
from support.parity import (  # type: ignore[import-not-found]
    adamw,
    engine_run,
    make_batches,
)

MODELS = ("transformer", "experts", "tied")
KEYS = {
    "weights": {"zero_quantized_weights": True},
    "gradients": {"zero_quantized_gradients": True},
    "both": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
}


def trained(name: str, **keys: bool) -> Any:
    """The numbers of one run. Collective."""
    case = edge_case_models.CASES[name]
    zero = {"stage": 3, "zero_hpz_partition_size": 2, **keys}
    batches = make_batches(case, steps=20, world=4)
    return engine_run(case, adamw(), batches, stage=3, clip=1.0, config={"zero_optimization": zero})


def main() -> None:
    """Print the table on rank 0."""
    dist.init_process_group("gloo")
    rows = ["| model | rounded | first loss | first norm | loss after 20 steps | parameters |"]
    rows.append("|---|---|--:|--:|--:|--:|")
    for name in MODELS:
        exact = trained(name)
        for label, keys in KEYS.items():
            found = trained(name, **keys)
            loss = abs(found.losses[0] / exact.losses[0] - 1)
            norm = abs(found.grad_norms[0] / exact.grad_norms[0] - 1)
            last = found.losses[-1] / exact.losses[-1] - 1
            first, second = (
                torch.cat([*map(torch.flatten, r.params.values())]) for r in (exact, found)
            )
            off = float((first - second).norm() / first.norm())
            rows.append(f"| {name} | {label} | {loss:.1e} | {norm:.1e} | {last:+.2%} | {off:.1%} |")
    if dist.get_rank() == 0:
        print("\n".join(rows))


if __name__ == "__main__":
    main()
