"""State that surely does not fit into memory ends a run before anything is allocated."""

from __future__ import annotations

import json
import re
from unittest import mock

import kit
import pytest
from torch import nn

from zeroshard.engine import free_memory
from zeroshard.engine.free_memory import Need, verdict
from zeroshard.engine.remedies import Run
from zeroshard.errors import HostMemoryError
from zeroshard.testing import on_ranks

GIB = 2**30
NOTHING = Run([], [], 0, 0, 1, 1, 0, False, False, False, False, 0)


def test_ranks_of_a_host_share_its_memory_and_devices_do_not():
    needs = [
        Need(0, 7, 3 * GIB, 5 * GIB),
        Need(1, 7, 3 * GIB, 5 * GIB),
        Need(2, 8, 3 * GIB, 5 * GIB),
    ]
    assert verdict(needs, NOTHING, shared=False) == []
    with pytest.raises(
        HostMemoryError, match=r"6\.00 GiB of host memory more for 2 ranks of one host"
    ):
        verdict(needs, NOTHING, shared=True)
    assert verdict(needs[1:], NOTHING, shared=True) == []


def test_a_device_that_is_too_small_is_named_and_a_tight_one_is_a_line():
    with pytest.raises(
        HostMemoryError, match=r"take 3\.00 GiB of device memory more for rank 1, and 2"
    ):
        verdict([Need(0, 7, 1, GIB), Need(1, 7, 3 * GIB, 2 * GIB)], NOTHING, shared=False)
    (line,) = verdict([Need(0, 7, 9 * GIB, 10 * GIB)], NOTHING, shared=False)
    assert "9.00 of the 10.00 GiB that are free for rank 0" in line
    assert "probably do not fit" in line


@on_ranks(2)
def test_all_ranks_refuse_with_remedies_before_they_allocate():
    limits = free_memory.host_limits()
    small = type(limits)(limits.host_total_nbytes, 3 << 20, None)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))  # 2 MiB in fp32
    # The process of a rank runs other tests afterwards, so the limit is taken back.
    with (
        mock.patch.object(free_memory, "host_limits", lambda: small),
        pytest.raises(HostMemoryError) as caught,
    ):
        kit.engine(model, 0, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    text = str(caught.value)
    assert "take 0.01 GiB of host memory more for 2 ranks of one host (from rank 0)" in text
    assert text.endswith("}")
    assert all(param.shape == (256, 256) and param.grad is None for param in model.parameters())
    for line in re.findall(r"^ +(\{.*\})$", text, re.MULTILINE):
        assert json.loads(line)["zero_optimization"]["stage"] in (2, 3)
