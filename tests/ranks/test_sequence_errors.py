"""What sequence ranks get wrong is the same error on every rank, and never a rank that waits."""

from __future__ import annotations

import copy
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from support import sequence_models as tiny
from support.sequence_models import Setting
from zeroshard_testing import on_ranks

from zeroshard import sequence
from zeroshard.errors import DistributedError, UnsupportedError, UsageError
from zeroshard.sequence.token_positions import PositionExchange

pytest.importorskip("transformers")

SETTING = Setting(kv_heads=2)


def whole() -> dict[str, torch.Tensor]:
    return copy.copy(tiny.batches(SETTING, 1)[0][0][0])


def raised(kind: type[Exception], call: Any) -> str:
    """The text of the error of ``call``, which every rank of the default group must raise."""
    with pytest.raises(kind) as error:
        call()
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, str(error.value))
    assert len({*texts}) == 1, texts
    return texts[0]


@on_ranks(2)
def test_attention_that_does_not_fit_together_is_an_error():
    rank, group = dist.get_rank(), dist.group.WORLD
    sequence.register("sdpa", group)
    net = tiny.model(SETTING).train()
    own = sequence.split_batch(whole(), group)
    del own["shift_labels"]
    fewer = {key: value[: 2 - rank] for key, value in own.items()}
    text = raised(UsageError, lambda: net(**fewer))
    assert "rank 1 has 1 samples, and rank 0 has 2" in text
    shorter = {key: value[:, : 8 - rank] for key, value in own.items()}
    text = raised(UsageError, lambda: net(**shorter))
    assert "rank 1 has 7 tokens, and rank 0 has 8" in text
    text = raised(UsageError, lambda: net(input_ids=own["input_ids"]))
    assert "position_ids are 0 to 7 in every row of the ranks 0, 1, one sequence group" in text
    hiding = torch.ones(2, 8, dtype=torch.bool)
    hiding[0, : 3 * rank] = False
    text = raised(UsageError, lambda: net(**own, attention_mask=hiding))
    assert "attention of rank 1 got an attention_mask that hides more" in text
    assert net(**own, attention_mask=torch.ones(2, 8)).logits.isfinite().all()
    attention = net.model.layers[0].self_attn
    q, k = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    function = sequence.register("sdpa", group)
    text = raised(UsageError, lambda: function(attention, q, k, k, None))
    assert "3 heads, which 2 sequence ranks cannot divide" in text
    q = torch.randn(2, 4, 8, 8)
    text = raised(UsageError, lambda: function(attention, q, k, k, None))
    assert "3 key/value heads and 2 sequence ranks" in text
    k = torch.randn(2, 2, 8, 8)
    text = raised(UsageError, lambda: function(attention, q, k, k, None))
    assert "LlamaAttention got no position_ids" in text
    places = torch.zeros(3, 2, 8, dtype=torch.int64)
    text = raised(UnsupportedError, lambda: function(attention, q, k, k, None, position_ids=places))
    assert "(3, 2, 8)" in text
    with pytest.raises(UnsupportedError, match="'eager' cannot be spread"):
        sequence.register("eager", group)
    with pytest.raises(UsageError, match="knows no attention implementation 'sdqa'"):
        sequence.register("sdqa", group)
    sequence.unregister()


@on_ranks(2)
def test_samples_that_begin_at_ranks_in_every_row_are_no_mistake():
    group = dist.group.WORLD
    sequence.register("sdpa", group)
    net = tiny.model(SETTING).train()
    packed = whole() | {"position_ids": torch.arange(8).repeat(2, 2)}
    own = sequence.split_batch(packed, group)
    del own["shift_labels"]
    halves = [
        {key: packed[key][:, at : at + 8] for key in ("input_ids", "position_ids")} for at in (0, 8)
    ]
    shared = net(**own).logits
    sequence.unregister()
    assert torch.allclose(shared, net(**halves[dist.get_rank()]).logits, atol=1e-12)


@on_ranks(2)
def test_positions_at_the_address_of_others_are_gathered_again():
    """Of another model, whose positions were made after those of the first model were freed."""
    exchange = PositionExchange(dist.group.WORLD)
    q, models = torch.zeros(1, 2, 4, 8), [torch.nn.Linear(1, 1) for _ in range(3)]
    early = torch.arange(4)[None] + 4 * dist.get_rank()
    late = early + 100
    reused = False
    for _ in range(100):
        ids = early.clone()
        found = exchange.of(models[0], q, q, ids, None, None)
        assert exchange.of(models[1], q, q, ids, None, None) is found  # another layer
        address = id(ids)
        del ids
        ids = late.clone()
        reused = reused or id(ids) == address
        found = exchange.of(models[2], q, q, ids, None, None)
        assert found.all_RT.tolist() == [[*range(100, 108)]]
    assert reused
    ids.sub_(50)
    assert exchange.of(models[1], q, q, ids, None, None).all_RT.tolist() == [[*range(50, 58)]]


@on_ranks(2)
def test_a_module_in_eval_mode_can_get_whole_sequences():
    sequence.register("sdpa", dist.group.WORLD, off_in_eval=True)
    net = tiny.model(SETTING).eval()
    batch = whole()
    del batch["labels"]
    alone = net(**batch).logits
    sequence.unregister()
    assert torch.equal(alone, net(**batch).logits)


@on_ranks(2)
def test_batches_that_cannot_be_shared_are_an_error():
    rank, group = dist.get_rank(), dist.group.WORLD
    other = whole()
    other["input_ids"] = other["input_ids"] + rank
    text = raised(UsageError, lambda: sequence.split_batch(other, group, check=True))
    assert "ranks 1 have another batch than rank 0" in text
    odd = {key: value[:, :15] for key, value in whole().items()}
    text = raised(UsageError, lambda: sequence.split_batch(odd, group))
    assert "15 tokens, which 2 sequence ranks cannot divide. Pad its samples to 16 tokens" in text
    left = torch.ones(2, 16)
    left[0, 0] = 0
    text = raised(
        UsageError, lambda: sequence.split_batch({**whole(), "attention_mask": left}, group)
    )
    assert "hides tokens before others" in text
    right = {**whole(), "attention_mask": left.flip(1)}
    assert "attention_mask" not in sequence.split_batch(right, group)


class Faulty:
    """A loader of one batch, after which it fails."""

    def __init__(self, batches: list[Any], error: Exception | None = None) -> None:
        self.batches, self.error = batches, error

    def __iter__(self) -> Any:
        yield from self.batches
        if self.error is not None:
            raise self.error


def loaded(loader: Any) -> sequence.SequenceLoader:
    rank, group = dist.get_rank(), dist.group.WORLD
    return sequence.SequenceLoader(loader, rank, group, 2, "cpu")


@on_ranks(2)
def test_a_loader_of_one_rank_that_fails_ends_all_of_them():
    rank, batch = dist.get_rank(), whole()
    bare = {key: value for key, value in batch.items() if key != "position_ids" or rank == 0}
    for loader, kind, message in (
        (Faulty([batch] * (2 - rank)), UsageError, "ranks 1 have no further batch"),
        (Faulty([bare]), UsageError, "a batch has no position_ids"),
        (Faulty([batch], KeyError("x") if rank else None), KeyError, "x"),
    ):
        mine = kind if rank == 1 or "further" in message else DistributedError
        with pytest.raises(mine, match=message):
            list(loaded(loader))


@on_ranks(2)
def test_a_loader_gives_each_rank_its_tokens_of_the_batches_of_all_ranks():
    rank = dist.get_rank()
    short = {key: value[:1, :8] for key, value in whole().items()}
    own = {**(short if rank else whole()), "name": f"of {rank}", "weight": torch.tensor(rank)}
    loader = loaded([own])
    for _ in range(2):  # epochs
        first, second = loader
        assert first["input_ids"].shape == (2, 8) and second["input_ids"].shape == (1, 4)
        assert torch.equal(first["input_ids"], whole()["input_ids"][:, 8 * rank : 8 * rank + 8])
        shifted = tiny.shifted(short["labels"])
        assert torch.equal(second["shift_labels"], shifted[:, 4 * rank : 4 * rank + 4])
        assert "labels" not in second
        assert [first["name"], second["name"]] == ["of 0", "of 1"]
        assert [int(first["weight"]), int(second["weight"])] == [0, 1]
    with TestCase().assertLogs("zeroshard", "WARNING") as logs:
        list(loaded([whole()]))
    assert "every sample will be used 2 times" in logs.output[0]
