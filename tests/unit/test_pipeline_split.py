"""How a model is cut into the stages of a pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.parallel import pipeline


class Decoder(nn.Module):
    """A model with a forward of its own and repeated blocks."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


ORDER = ["embed", "layers", "head"]


def test_stages_together_are_the_model_and_names_stay_global():
    torch.manual_seed(0)
    whole = Decoder()
    expected, names = whole(torch.arange(8)), dict(whole.named_parameters())
    values: Tensor = torch.arange(8)
    found: dict[str, Tensor] = {}
    for rank in range(2):
        torch.manual_seed(0)
        part = pipeline(Decoder(), split=["layers.0", "layers.2", "head"], order=ORDER)
        assert torch.equal(part(torch.arange(8)), expected)
        assert list(dict(part.named_parameters())) == list(names)
        part.keep(rank, 2)
        assert list(part.kept) == [rank, rank + 2]
        found |= dict(part.named_parameters())
        assert all(part.stage_of(name) in part.kept for name, _ in part.named_parameters())
        assert set(part.state_dict()) == set(dict(part.named_parameters()))
    assert {name: p.shape for name, p in found.items()} == {n: p.shape for n, p in names.items()}
    for stage in range(4):
        torch.manual_seed(0)
        part = pipeline(Decoder(), split=["layers.0", "layers.2", "head"], order=ORDER)
        part.keep(stage % 2, 2)
        values = part(values, stage=stage)
    assert torch.equal(values, expected)


def test_a_sequential_is_cut_at_any_depth():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)
    )
    expected = model(torch.ones(2, 4))
    part = pipeline(model, split=["1.1"])
    assert part.stages == [["0", "1.0"], ["1.1", "2"]]
    assert torch.equal(part(torch.ones(2, 4)), expected)
    part.keep(1, 2)
    assert [name for name, _ in part.named_parameters()] == ["2.weight", "2.bias"]


def test_one_rank_keeps_the_model_as_one_stage():
    part = pipeline(Decoder(), split=["layers.2"], order=ORDER)
    expected = part(torch.arange(8))
    part.keep(0, 1)
    part.keep(0, 1)  # another engine over the same model
    assert torch.equal(part(torch.arange(8)), expected)
    assert len(part.stages) == 1


def test_a_rank_with_a_part_of_the_model_does_not_run_it_alone():
    part = pipeline(Decoder(), split=["layers.2"], order=ORDER)
    part.keep(0, 2)
    with pytest.raises(UsageError, match="has 1 of 2 pipeline stages"):
        part(torch.arange(8))
    with pytest.raises(UsageError, match="was cut for pipeline rank 0 of 2"):
        part.keep(1, 2)


class Tied(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Positions(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(8, 4))


CUT = {"split": ["layers.2"], "order": ORDER}


@pytest.mark.parametrize(
    ("model", "keys", "text"),
    [
        (Decoder, {"split": "layers.2", "order": ORDER}, "is one name"),
        (Decoder, {"split": ["layers.2"]}, "has a forward of its own"),
        (Decoder, {"split": ["layers.9"], "order": ORDER}, "'layers.9', which is not a piece"),
        (Decoder, {"split": ["embed"], "order": ORDER}, "the stage before it is empty"),
        (Decoder, {"split": ["head", "layers.2"], "order": ORDER}, "not in the order"),
        (Decoder, {"split": ["head", "head"], "order": ORDER}, "has a name twice"),
        (Decoder, {"split": ["layers.2"], "order": ["embed", "blocks"]}, "names 'blocks'"),
        (Decoder, {"split": ["layers.2"], "order": ["embed", "layers"]}, "'head.weight' .and 1 more"),
        (Decoder, {"split": ["layers.2"], "order": ORDER, "schedule": "ZBV"}, "choose one of GPipe"),
        (Decoder, {"split": ["layers.2"], "order": ORDER, "gather": "never"}, "gather='never'"),
        (Decoder, {"split": ["layers.2"], "order": ORDER, "reduce": "never"}, "reduce='never'"),
        (Decoder, {**CUT, "gather": "auto", "auto_limit_nbytes": "1G"}, "auto_limit_nbytes='1G'"),
        (Decoder, {**CUT, "reduce": "auto", "auto_limit_nbytes": -1}, "auto_limit_nbytes=-1"),
        (Decoder, {**CUT, "auto_limit_nbytes": 9}, "gather='micro_batch' and reduce='micro_batch'"),
        (Positions, {"split": ["layers.2"], "order": ORDER}, "'positions'"),
        (lambda: nn.Sequential(Decoder()), {"split": ["0.layers.1"]}, "inside '0', a Decoder"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_by_name(model, keys, text):
    with pytest.raises(UsageError, match=text):
        pipeline(model(), **keys)


def test_what_cannot_be_kept_is_refused_by_name():
    with pytest.raises(UsageError, match="3 stages, which is not a multiple of 2 pipeline ranks"):
        pipeline(Decoder(), split=["layers.1", "layers.2"], order=ORDER).keep(0, 2)


def test_a_tied_parameter_has_its_first_name_on_every_rank_that_holds_it():
    for rank in range(3):
        part = pipeline(Tied(), split=["layers.1", "layers.2"], order=ORDER)
        part.keep(rank, 3)
        assert part.tied_ranks == [(0, 2)]
        assert part.other_names == {"embed.weight": ["head.weight"]}
        names = [name for name, _ in part.named_parameters()]
        assert ("embed.weight" in names, "head.weight" in names) == (rank != 1, False)
        if rank != 1:
            assert part.holders_of("embed.weight") == (0, 2)
            assert part.stage_of("embed.weight") is None
        if rank == 2:
            assert part.embed.weight is part.head.weight
            assert names.index("embed.weight") == 0
    alone = pipeline(Tied(), split=["layers.1"], order=ORDER)
    alone.keep(0, 1)
    assert alone.tied_ranks == []
    assert alone.stage_of("embed.weight") == 0
