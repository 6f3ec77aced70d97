"""The search for the largest batch, on peaks of several shapes."""

from __future__ import annotations

import pytest

from zeroshard.errors import UsageError
from zeroshard.planner.changes import MOST, largest_batch


@pytest.mark.parametrize("limit", [130, 131, 1000, 3_000_000])
@pytest.mark.parametrize(
    ("peak", "most_tries"),
    [
        (lambda n: 100 + 30 * n, 6),
        (lambda n: max(900, 30 * n), 40),  # at first the batch is not the peak
        (lambda n: 100 + 30 * n // 8 * 8, 9),
        (lambda n: 100 + n + n * n // 100, 40),
    ],
)
def test_one_more_never_fits(peak, most_tries, limit):
    tried: list[int] = []

    def peak_nbytes(samples: int) -> int:
        assert samples not in tried
        tried.append(samples)
        return peak(samples)

    if peak(1) > limit:
        with pytest.raises(UsageError, match="no micro-batch fits"):
            largest_batch(peak_nbytes, limit)
        return
    samples, one_more = largest_batch(peak_nbytes, limit)
    assert peak(samples) <= limit < peak(samples + 1) == one_more
    assert {samples, samples + 1} <= set(tried)
    assert len(tried) <= most_tries


def test_a_peak_that_does_not_grow_is_a_mistake():
    with pytest.raises(UsageError, match="memory does not limit"):
        largest_batch(lambda samples: 5, 10)
    assert MOST == 2**20
