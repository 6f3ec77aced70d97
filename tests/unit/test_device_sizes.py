"""``--memory``: the spellings of a device's size, and what they mean."""

from __future__ import annotations

import pytest
import typer

from zeroshard.cli.plan import device_gib


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        *((text, 73.0) for text in ("73", "73GiB", "73 gib", "73Gi")),
        ("74752MiB", 73.0),
        ("1Ti", 1024.0),
        *(
            (text, (80e9 - 1.2e9) / 2**30)
            for text in ("80GB", "80G", "80g", " 80 Gb ", "80000MB", "0.08T")
        ),
    ],
)
def test_sizes_of_devices_in_their_usual_spellings(text, gib):
    """GB and G are what a card is called; no unit and GiB are what tensors may take."""
    assert device_gib(text) == pytest.approx(gib, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("80K", "73, 73GiB"),
        ("80 B", "80GB or 80G"),
        ("", "73"),
        ("1.2GB", "nothing is left"),
        ("-80G", "nothing"),
    ],
)
def test_what_is_no_size_of_a_device_is_told(text, says):
    with pytest.raises(typer.BadParameter, match=says):
        device_gib(text)
