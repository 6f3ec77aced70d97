"""Programs that read parameters beside the engine are equal to plain PyTorch or refused, each time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from test_aliases import (
    PROGRAMS,
    TRANSPORTS,
    Keeps,
    Net,
    mean_square,
    open_engine,
    plain_losses,
    step_of,
)
from zeroshard_testing.ranks import run_ranks

from zeroshard.errors import NonFiniteError, ShardedAccess
from zeroshard.zero import GatheredParameters

ALL = {**PROGRAMS, "keeps": (Keeps, mean_square)}
SETTINGS = [(1, True), (2, True), (3, True), (3, False)]
"""Stage, and whether it prefetches: below stage 3 nothing is gathered in forward."""


def aliases_of(model: Any) -> dict[str, Any]:
    """Tensors that share the parameters' memory in plain PyTorch."""
    with GatheredParameters(model.parameters()):
        gathered = list(model.state_dict().values())
    return {
        "data": [p.data for p in model.parameters()],
        "views": [p.detach()[:1] for p in model.parameters()],
        "gathered": gathered,
        "before": [p.detach().clone() for p in model.parameters()],
    }


def outcomes(model: Any, aliases: dict[str, Any], stage: int) -> Counter[str]:
    """How many tensors are equal to what they must be, and how many reads were refused."""
    after, before = [p.detach().clone() for p in model.parameters()], aliases.pop("before")
    counts: Counter[str] = Counter()
    for kind, tensors in aliases.items():
        for tensor, new, old in zip(tensors, after, before, strict=True):
            expected = old if kind == "gathered" and stage == 3 else new
            try:
                same = torch.equal(tensor + 0, expected[:1] if kind == "views" else expected)
            except ShardedAccess:
                same = None
            counts[f"{kind} " + {True: "equal", False: "DIFFERENT", None: "refused"}[same]] += 1
    return counts


def repeated(
    name: str, stage: int, prefetches: bool, transport: str, steps: int
) -> tuple[list[Any], Counter[str]]:
    """The losses of all steps (None: refused), and what became of aliases."""
    kind, loss_of = ALL[name]
    zero = {} if prefetches else {"stage3_prefetch_bucket_size": 0}
    losses: list[Any] = []
    counts: Counter[str] = Counter()
    with open_engine(Net(kind), stage, transport=transport, zero_optimization=zero) as engine:
        for step in range(steps):
            block = engine.module.blocks[1].norm
            aliases = aliases_of(block)
            try:
                losses.append(step_of(engine, loss_of, step % 3))
            except NonFiniteError as error:
                assert "saved_tensors_hooks" in str(error)
                losses.append(None)
                continue
            counts += outcomes(block, aliases, stage)
    return losses, counts


def several(
    cases: list[tuple[str, int, bool, str]], runs: int, steps: int
) -> list[tuple[list[Any], Counter[str]]]:
    """Each case, ``runs`` times."""
    return [repeated(*case, steps) for case in cases for _ in range(runs)]


def judged(case: tuple[str, int, bool, str], runs: int, steps: int, found: Any) -> Counter[str]:
    """Check the runs of one case. Returns the number of steps and reads of each kind."""
    kind, loss_of = ALL[case[0]]
    plain = plain_losses(kind, loss_of, [step % 3 for step in range(steps)])
    counts: Counter[str] = Counter()
    for losses, reads in found:
        refused = losses.count(None)
        assert refused in (0, steps), (case, "two answers in one run")
        assert losses == found[0][0], (case, "two answers")
        if not refused:
            torch.testing.assert_close(torch.stack(losses), plain, rtol=1e-10, atol=1e-10)
        counts += reads
        counts += Counter({"steps equal": steps - refused, "steps refused": refused})
    assert not any("DIFFERENT" in key for key in counts), (case, counts)
    return counts


def check(
    runs: int, steps: int, settings: list[tuple[int, bool]], transports: list[str]
) -> Counter[str]:
    total: Counter[str] = Counter()
    for transport in transports:
        cases = [(name, *setting, transport) for name in ALL for setting in settings]
        ranks = run_ranks(several, 2, cases, runs, steps, timeout=1500)
        for found in ranks:
            for at, case in enumerate(cases):
                total += judged(case, runs, steps, found[at * runs : (at + 1) * runs])
    assert total["steps refused"] < total["steps equal"]
    return total


def test_readers_of_parameters_get_equal_values_or_an_error_each_time():
    check(1, 3, [(2, True), (3, True)], ["shm"])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_readers_of_parameters_get_equal_values_or_an_error_fifty_times(transport):
    print(sorted(check(2, 25, SETTINGS, [transport]).items()))
