"""What one rank tells the others of the error that ended it."""

from __future__ import annotations

import pytest

from zeroshard.errors import ENDED, in_short


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad\n sample"), "ValueError: bad sample"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit(0), ENDED),
        (SystemExit(), ENDED),
    ],
    ids=repr,
)
def test_an_error_is_one_line_and_a_program_that_ends_by_itself_has_none(error, text):
    assert in_short(error) == text
