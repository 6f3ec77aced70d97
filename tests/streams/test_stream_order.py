"""No operation on a CUDA device comes before one that it depends on. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scenarios import ALL, DIMENSIONS, PROGRAMS, Scenario, run_scenario
from support.covering import covering

from zeroshard.testing import on_ranks

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


def test_the_scenarios_have_every_program_with_every_offload_and_every_stage():
    assert len({(s.offload, s.program) for s in SCENARIOS}) == 6 * len(PROGRAMS)
    assert len({(s.stage, s.program) for s in SCENARIOS}) == 4 * len(PROGRAMS)
    for name, values in DIMENSIONS.items():
        assert {getattr(s, name) for s in SCENARIOS} == set(values)
