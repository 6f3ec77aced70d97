"""A plan has the bytes, the traffic and the peak of the real run of two ranks."""

from __future__ import annotations

import itertools
import operator
from dataclasses import astuple

import plan_check
import pytest

CASES = plan_check.pairwise()


def test_every_two_values_are_together_in_a_case():
    assert len(CASES) == 16 < len(plan_check.ALL) == 56
    for pair in itertools.combinations(range(4), 2):
        of_pair = operator.itemgetter(*pair)
        assert {of_pair(astuple(c)) for c in CASES} == {of_pair(astuple(c)) for c in plan_check.ALL}


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, astuple(c))))
def test_a_plan_is_what_the_run_needs(case):
    pytest.importorskip("transformers", reason="transformers is not installed")
    real, plan = plan_check.run_and_plan(case)
    assert plan_check.differences(real, plan) == []
    assert real.peak_nbytes == max(m.device_nbytes for n, m in real.moments.items() if n != "init")
    for phase, off in plan_check.offs(real, plan).items():
        assert abs(off) <= plan_check.TOLERANCE, phase
