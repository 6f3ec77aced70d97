"""Parameters are scattered to the shards, in one pass or piece by piece; the meta device is checked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroshard.comm.collectives import SoloComm
from zeroshard.core.layout import pack
from zeroshard.zero import materialize

SHAPES = [(3, 5), (64,), (), (0,), (7, 11), (2, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("missing", [(), (0,), (2, 4), (5,), range(6)], ids=str)
def test_one_pass_gives_what_pieces_give(monkeypatch, dtype, missing):
    layout = pack([(f"p{i}", shape) for i, shape in enumerate(SHAPES)], num_shards=1)
    values = [torch.randn(shape) for shape in SHAPES]
    values[4] = values[4].T.contiguous().T  # in another order in memory
    given = [(s, v) for i, (s, v) in enumerate(zip(layout.slots, values)) if i not in missing]
    calls = []
    for piece_numel in (layout.full_numel, 64):
        monkeypatch.setattr(materialize, "PIECE_NUMEL", piece_numel)
        comm = SoloComm()
        shard = materialize.scatter(
            layout, given, dtype=dtype, device=torch.device("cpu"), comm=comm, name="", source=0
        )
        expected = torch.zeros(layout.full_numel, dtype=dtype)
        for slot, value in given:
            expected[slot.start : slot.stop] = value.reshape(-1)
        assert shard.dtype == dtype
        assert torch.equal(shard, expected)
        calls.append(comm.recorder.seq)
    assert calls == [1, layout.full_numel // 64]


class OwnRule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def _init_weights(self, module: nn.Module) -> None:
        nn.init.zeros_(module.weight)


@pytest.mark.parametrize(
    ("model", "device", "warns"),
    [(OwnRule, "meta", True), (OwnRule, "cpu", False), (lambda: nn.Linear(4, 4), "meta", False)],
)
def test_a_rule_of_the_model_that_is_not_called_is_told(caplog, monkeypatch, model, device, warns):
    monkeypatch.setattr(materialize.logger, "propagate", True)  # an engine switches it off
    with torch.device(device):
        made = model()
    with caplog.at_level("WARNING", logger="zeroshard"):
        materialize.check_meta(made)
    assert ("OwnRule has _init_weights(), which is not called" in caplog.text) is warns
