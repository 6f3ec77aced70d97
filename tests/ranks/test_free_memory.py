"""State that surely does not fit into memory ends a run before anything is allocated."""

from __future__ import annotations

import json
import re
from unittest import mock

import kit
import pytest
import torch.distributed as dist
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard.engine import out_of_memory
from zeroshard.engine.out_of_memory import Need, verdict
from zeroshard.errors import HostMemoryError

GIB = 2**30


def test_ranks_of_a_host_share_its_memory_and_devices_do_not():
    needs = [
        Need(0, 7, 3 * GIB, 5 * GIB),
        Need(1, 7, 3 * GIB, 5 * GIB),
        Need(2, 8, 3 * GIB, 5 * GIB),
    ]
    assert verdict(needs, shared=False) == (None, [])
    short, _ = verdict(needs, shared=True)
    assert short is not None
    assert short.who == "2 ranks of one host (from rank 0)"
    assert (short.wanted_nbytes, short.missing_nbytes) == (6 * GIB, GIB // 2)
    assert verdict(needs[1:], shared=True) == (None, [])


def test_a_device_that_is_too_small_is_named_and_a_tight_one_is_a_line():
    short, _ = verdict([Need(0, 7, 1, GIB), Need(1, 7, 3 * GIB, 2 * GIB)], shared=False)
    assert short is not None
    assert (short.who, short.wanted_nbytes, short.free_nbytes) == ("rank 1", 3 * GIB, 2 * GIB)
    _, (line,) = verdict([Need(0, 7, 9 * GIB, 10 * GIB)], shared=False)
    assert "9.00 GiB of the 10.00 GiB that are free for rank 0" in line
    assert "probably do not fit" in line


WIDTH, DEPTH = 256, 8


def refused(free_nbytes: int) -> str:
    """What two ranks say whose host has so much memory. The model takes 2 MiB in fp32."""
    limits = out_of_memory.host_limits()
    small = type(limits)(limits.host_total_nbytes, free_nbytes, None)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    # The process of a rank runs other tests afterwards, so the limit is taken back.
    with (
        mock.patch.object(out_of_memory, "host_limits", lambda: small),
        pytest.raises(HostMemoryError) as caught,
    ):
        kit.engine(model, 0, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    shapes = {tuple(param.shape) for param in model.parameters() if param.grad is None}
    assert shapes == {(WIDTH, WIDTH)}
    return str(caught.value)


def changes_in(text: str) -> list[tuple[int, str, float]]:
    """Stage, the words before the changes, and MiB that it frees."""
    head = text.splitlines()[1]
    found = re.findall(r"about ([0-9.]+) MiB per rank\n +(\{.*\})$", text, re.MULTILINE)
    return [(json.loads(line)["zero_optimization"]["stage"], head, float(n)) for n, line in found]


@on_ranks(2)
def test_all_ranks_refuse_with_the_same_changes_before_they_allocate():
    """A rank needs gradients and two moments, 6 MiB, and at stages 2 and 3 half of it or less."""
    head = "Each of these frees memory, by arithmetic:"
    text = refused(10 << 20)
    assert "need another 12.3 MiB of host memory on 2 ranks of one host (from rank 0)" in text
    assert [found[:2] for found in changes_in(text)] == [(2, head), (3, head)]
    texts = [text, ""]
    dist.all_gather_object(texts, text)
    assert texts[0] == texts[1]
    assert f"--memory {(5 << 20) / 2**30 + 2 / 2**10:.6g}" in text  # with the 2 MiB of the model
    assert "(none of them alone" not in text
    assert "(none of them alone is enough)" in refused(2 << 20)
