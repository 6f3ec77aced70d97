"""The peak of a simulated rank has gathers that are freed before anything else is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard.core.ledger import Ledger
from zeroshard.core.mesh import Mesh
from zeroshard.core.tiers import Tier
from zeroshard.memory.storage import resize
from zeroshard.planner.allocations import Allocations, Places
from zeroshard.planner.simulate import simulate

WIDTH = 1024


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
    assert watch.activations_nbytes == 0
    top = watch.moments["forward"]
    assert (top.device_nbytes, top.op, top.activations_nbytes) == (400, "gather of a unit", 0)
    assert top.held["gathered", "device"] == 400
    assert [row.nbytes for row in watch.largest(top, 2)] == [400, 200]


def scratch_of_update(optimizer: str, dtype: str, target: str) -> int:
    """The bytes of the category "scratch" at the peak of an update after the first one."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    found = simulate(
        lambda: nn.Linear(WIDTH, WIDTH),
        config,
        (torch.zeros(1, WIDTH), torch.zeros(1, WIDTH)),
        mesh=Mesh(data_shard=2),
        rank=0,
        loss_fn=lambda output, labels: (output - labels).pow(2).sum(),
        target=target,
    )
    return found.moments["step"].held.get(("scratch", "device"), 0)


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
def test_an_update_by_a_kernel_on_a_gpu_needs_no_scratch(optimizer):
    assert scratch_of_update(optimizer, "bf16", "cuda") == 0


@pytest.mark.parametrize(("optimizer", "target"), [("AdamW", "cpu"), ("Adagrad", "cuda")])
def test_an_update_by_the_optimizer_itself_needs_the_gradient_in_fp32(optimizer, target):
    """On a CPU it makes the first step, also where a kernel makes those after it."""
    assert scratch_of_update(optimizer, "bf16", target) == 4 * WIDTH * (WIDTH + 1) / 2
    assert scratch_of_update(optimizer, "fp32", target) == 0
