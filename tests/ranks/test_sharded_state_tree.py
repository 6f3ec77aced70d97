"""Client state that contains sharded parameters: every rank saves their full values."""

from __future__ import annotations

import torch
from loops import CASE, open_engine
from zeroshard_testing import on_ranks

from zeroshard.checkpoint.json_state import decode, encode
from zeroshard.zero.sharded_parameter import ShardedParameter


@on_ranks(2)
def test_sharded_parameters_are_stored_with_their_values():
    full = dict(CASE.build().named_parameters())
    with open_engine(3) as engine:
        params = dict(engine.module.named_parameters())
        assert any(isinstance(p, ShardedParameter) for p in params.values())
        rows = {name: p[0] for name, p in params.items() if p.dim() == 2}
        form, tensors = encode({"whole": params, "rows": rows}, where="state")
    back = decode(form, tensors, where="state")
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in tensors.values())
    assert all(torch.equal(back["whole"][name], full[name]) for name in full)
    assert all(torch.equal(row, full[name][0]) for name, row in back["rows"].items())
