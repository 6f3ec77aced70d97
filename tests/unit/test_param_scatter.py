"""Parameters are scattered to the shards with the same result in one pass and piece by piece."""

from __future__ import annotations

import pytest
import torch

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
