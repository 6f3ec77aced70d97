"""Runs of an optimizer under every stage and store, beside plain PyTorch in fp64."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.edge_case_models import Case
from support.parity import engine_run, make_batches, reference_run


def offload(where: str, folder: Path, stage: int) -> dict[str, Any]:
    """The keys that put optimizer state to ``where``, and parameters at stage 3 on disk; "": none."""
    if not where:
        return {}
    place = {"device": where} | ({"nvme_path": str(folder)} if where == "nvme" else {})
    params = {"offload_param": place} if stage == 3 and where == "nvme" else {}
    return {"zero_optimization": {"offload_optimizer": place, **params}}


def compare(
    case: Case, make: Any, places: Iterable[tuple[int, str]], folder: Path,
    *, steps: int, world: int, most: float,
) -> None:  # fmt: skip
    """Check that parameters differ by at most ``most`` at each stage and store of ``places``."""
    batches = make_batches(case, steps=steps, world=world)
    wanted = reference_run(case, make, batches, precision="fp64").params
    for stage, where in places:
        config = offload(where, folder, stage)
        run = engine_run(case, make, batches, stage=stage, precision="fp64", config=config)
        for name, value in wanted.items():
            error = (run.params[name] - value).abs().max().item()
            assert error <= most, (stage, where, name, error)
