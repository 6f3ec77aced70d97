"""The peak of a simulated rank has gathers that are freed before anything else is allocated."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.memory.storage import resize
from zeroshard.planner.allocations import Allocations
from zeroshard.planner.places import Places


def test_a_gather_that_is_freed_at_once_is_in_the_peak():
    ledger, watch = Ledger(), Allocations(lambda *_: None)
    with FakeTensorMode(), watch:
        flat, host = torch.empty(100), torch.empty(50)
        resize(flat, 0)
        ledger.hold("optimizer", "host state", host.nbytes, Tier.HOST)
        watch.measure(ledger, Places())
        watch.phase = "forward"
        for nbytes in (flat.nbytes, 0):  # a unit tells the ledger right after the resize
            resize(flat, nbytes)
            ledger.hold("gathered", "a unit", nbytes)
    assert watch.peak_nbytes == 400
    assert watch.activations_nbytes == 0
    top = watch.moments["forward"]
    assert (top.device_nbytes, top.op, top.activations_nbytes) == (400, "gather of a unit", 0)
    assert top.held["gathered", "device"] == 400
    assert [row.nbytes for row in watch.largest(top, 2)] == [400, 200]
