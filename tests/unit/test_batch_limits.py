"""The tool that runs the largest planned micro-batch under a real limit: arithmetic, and one limit."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import batch_limits as tool
from plan_check import SMALL, Case

MB = 1_000_000


@pytest.mark.parametrize(
    ("beside", "runs", "told"),
    [(15, True, True), (75, False, True), (-75, True, False)],
    ids=["as measured", "more beside the plan", "less beside the plan"],
)
def test_the_limit_is_between_two_batches_and_above_what_is_not_planned(
    monkeypatch, beside, runs, told
):
    """A sample takes 100 MB, the rest of the plan 300. The first run found 15 MB beside the plan."""
    asked = []

    def ends(case: Case, samples: int, limit_nbytes: int) -> list[str]:
        asked.append(limit_nbytes)
        fits = (300 + 100 * samples + beside) * MB <= limit_nbytes
        return ["", "" if fits else f"RuntimeError: 4 bytes {tool.TOLD}"]

    monkeypatch.setattr(tool, "peak_nbytes", lambda _case, samples: (300 + 100 * samples) * MB)
    monkeypatch.setattr(tool, "unplanned_nbytes", lambda _case: 15 * MB)
    monkeypatch.setattr(tool, "ends", ends)
    row = tool.row_of(tool.CASES[0])
    assert asked == [765 * MB] * 2
    assert (row["samples"], row["planned_nbytes"], row["next_planned_nbytes"]) == (
        4, 700 * MB, 800 * MB,
    )  # fmt: skip
    assert (row["runs"], row["next_is_told"]) == (runs, told)


def test_the_limit_holds_for_the_process():
    """4,096 samples take gigabytes."""
    (text,) = tool.ends(Case("gpt2", 1, False, ranks=1, size=SMALL), 4096, 20 * MB)
    assert tool.TOLD in text
