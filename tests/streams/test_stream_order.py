"""No operation on a CUDA device comes before one that it depends on. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from scenarios import ALL, DIMENSIONS, OFFLOADS, PROGRAMS, Scenario, run_scenario
from support.covering import covering
from zeroshard_testing import on_ranks

from zeroshard.device.accelerator import AcceleratorOps, CudaOps

SCENARIOS = [Scenario(*row) for row in covering(ALL)]


KNOWN: list[tuple[str, str, Callable[[Scenario], bool]]] = []
"""Findings that are not repaired yet: the kind, what happens, and in which scenarios.

A repair removes its row: a scenario that finds less than its rows say fails too.
"""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
@on_ranks(1, group=False)
def test_nothing_comes_too_early(scenario: Scenario):
    outcome = run_scenario(scenario)
    found = {finding.kind for finding in outcome.findings}
    assert found == {kind for kind, _, has in KNOWN if has(scenario)}, str(outcome)
    assert outcome.is_equal in (True, None), "values differ from those of the CPU"


@contextmanager
def generic_streams() -> Iterator[None]:
    """Streams of torch's generic family beside events of ``torch.cuda``."""
    with (
        mock.patch.object(CudaOps, "current_stream", AcceleratorOps.current_stream),
        mock.patch.object(CudaOps, "new_stream", AcceleratorOps.new_stream),
    ):
        yield


@pytest.mark.parametrize("offload", [offload for offload in OFFLOADS if offload != "none"])
@on_ranks(1, group=False)
def test_two_families_of_streams_are_found_with_every_offload(offload: str):
    stage = 3 if offload in ("parameters", "all disk") else 2
    outcome = run_scenario(Scenario(stage, offload, "plain"), without=generic_streams())
    assert "family" in {finding.kind for finding in outcome.findings}


def test_the_scenarios_have_every_program_with_every_offload_and_every_stage():
    assert len({(s.offload, s.program) for s in SCENARIOS}) == 6 * len(PROGRAMS)
    assert len({(s.stage, s.program) for s in SCENARIOS}) == 4 * len(PROGRAMS)
    for name, values in DIMENSIONS.items():
        assert {getattr(s, name) for s in SCENARIOS} == set(values)
