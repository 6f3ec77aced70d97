"""What a plan of tensor parallelism decides for a model, and which plans are errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.tensor_models import BLOCKS, PLANS, STREAM, VOCABULARY, TinyGPT
from torch import Tensor, nn

from zeroshard import Engine
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.tensor_plan import decide
from zeroshard.parallel.tensor_styles import STYLES, part


def refused(model: nn.Module, plan: object, size: int = 2) -> str:
    with pytest.raises((UsageError, UnsupportedError)) as caught:
        decide(model, size, plan)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_plan_says_which_weights_are_cut_where():
    made = decide(TinyGPT(tied=True), 2, PLANS["vocabulary"])
    cuts = {cut.name: (cut.shape, cut.axis) for cut in made.cuts}
    assert cuts["embed.weight"] == ((33, 16), 0)
    assert "head.weight" not in cuts  # counted at its first name
    assert cuts["blocks.1.attn.o.weight"] == ((16, 16), 1)
    assert cuts["blocks.1.attn.q.bias"] == ((16,), 0)
    assert "blocks.1.attn.o.bias" not in cuts
    assert {(h.attribute, h.whole, h.own) for h in made.heads} == {("n_head", 4, 2)}
    assert "blocks.*.mlp.down (x2): rowwise" in made.text
    assert "n_head: 4 -> 2 on each rank" in made.text


def test_deciding_changes_nothing():
    model = TinyGPT()
    before = dict(model.named_parameters())
    decide(model, 2, PLANS["sequence"])
    decide(model, 2, "auto")
    assert all(before[name] is param for name, param in model.named_parameters())
    assert model.blocks[0].attn.n_head == 4


MISTAKES = {
    "style": (
        BLOCKS | {"head": "columnwise"},
        "'head' has the unknown style 'columnwise'. Did you mean 'colwise'?",
    ),
    "glob": (
        BLOCKS | {"block.*.mlp.up": "colwise"},
        "'block.*.mlp.up' matches no module of the model, so nothing would be cut there. Similar "
        "names: blocks.*.mlp.up",
    ),
    "parameter": ({"head.weight": "colwise"}, "matches no module"),
    "two globs": (
        BLOCKS | {"blocks.0.*.up": "rowwise"},
        "'blocks.0.mlp.up' matches 'blocks.*.mlp.up' with the style 'colwise' and 'blocks.0.*.up' "
        "with the style 'rowwise'",
    ),
    "kind": (
        {"norm": "colwise"},
        "'norm' is a LayerNorm, and the style \"colwise\" fits nn.Linear or Conv1D of Transformers only",
    ),
    "module": (
        {"blocks.*.mlp": "rowwise"},
        "'blocks.0.mlp' is a MLP, and the style \"rowwise\" fits nn.Linear or Conv1D of Transformers "
        "only. Name the layers inside it",
    ),
    "rows": (
        {"head": "colwise"},
        "'head' has out_features = 33, which 2 tensor ranks cannot share evenly",
    ),
    "empty": ({}, "plan is {}"),
    "word": ("columns", "plan is 'columns'. Pass \"auto\", or a dict"),
    "stream": (
        BLOCKS | STREAM,
        "does not name 'embed' (Embedding), which has the parameter 'weight'",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_the_plan_is_an_error_with_name_value_and_remedy(case):
    plan, text = MISTAKES[case]
    assert text in refused(TinyGPT(), plan)


def test_plans_that_cut_a_tied_weight_in_two_ways_are_errors():
    text = refused(TinyGPT(tied=True), BLOCKS | {"embed": "vocab"})
    assert "'embed' and 'head' share one weight, of shape (33, 16)" in text
    assert "on axis 0 in the first and nowhere in the second" in text
    assert "untie them" in text
    decide(TinyGPT(), 2, BLOCKS | {"embed": "vocab"})


def test_heads_that_do_not_divide_are_errors():
    assert "'blocks.0.attn.q' has 4 heads of 4 rows, which 8 tensor ranks" in refused(
        TinyGPT(), BLOCKS, 8
    )
    model = TinyGPT()
    for block in model.blocks:
        block.attn.k, block.attn.v = nn.Linear(16, 8), nn.Linear(16, 8)
    decide(model, 2, BLOCKS)
    made = decide(model, 4, BLOCKS)
    assert made.copies == {f"blocks.{i}.attn.{leaf}": 2 for i in range(2) for leaf in "kv"}
    for block in model.blocks:
        block.attn.k = nn.Linear(16, 12)
    assert "'blocks.0.attn.k' has 3 key/value heads of 4 rows, fewer than the 4 tensor" in refused(
        model, BLOCKS, 4
    )


class Fused(nn.Module):
    """q, k and v in one weight, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 4
        self.qkv, self.o = nn.Linear(16, 32), nn.Linear(16, 16)


def test_the_sizes_of_fused_matrices_are_known_given_or_asked_for():
    layer, plan = nn.ModuleList([Fused()]), {"0.qkv": "colwise_fused", "0.o": "rowwise"}
    assert decide(layer, 2, plan).fused == {"0.qkv": (16, 8, 8)}
    assert decide(layer, 2, {"0.qkv": "colwise_fused:8,24"}).fused == {"0.qkv": (8, 24)}
    assert "joins matrices of [4, 2, 2] heads of 4 rows, and 4 tensor ranks cannot" in refused(
        layer, plan, 4
    )
    for sizes in ("16,8", "a", "40,-8", "32"):
        text = refused(layer, {"0.qkv": f"colwise_fused:{sizes}"})
        assert "'0.qkv' has 32 output features" in text
        assert "Give the sizes in their order after a colon" in text
    assert "cannot share 15 evenly" in refused(layer, {"0.qkv": "colwise_fused:15,17"})
    del layer[0].num_kv_heads
    assert "does not say of which matrices they are" in refused(layer, plan)
    assert "'0.qkv' looks like several projections in one weight" in refused(
        layer, {"0.qkv": "colwise"}
    )


def test_a_rank_without_rows_is_an_error():
    model = nn.ModuleDict({"table": nn.Embedding(5, 4)})
    assert decide(model, 3, {"table": "vocab"}).cuts
    text = refused(model, {"table": "vocab"}, 4)
    assert "'table' has 5 rows. In parts of 2 the last of 4 tensor ranks would have none" in text


def test_a_number_of_heads_that_the_program_has_divided_is_left_alone():
    model = TinyGPT()
    for block in model.blocks:
        block.attn.n_head = 2
    assert decide(model, 2, BLOCKS).heads == ()
    model.blocks[1].attn.n_head = 3
    assert "n_head = 3 and heads of 4 rows, but its projection has 16 rows" in refused(
        model, BLOCKS
    )


def test_layers_with_more_than_a_weight_and_a_bias_are_refused():
    def changed(change: object) -> str:
        model = TinyGPT()
        change(model.blocks[0].mlp)  # type: ignore[operator]
        return refused(model, BLOCKS)

    assert "'blocks.0.mlp.up' has the buffer 'scales'" in changed(
        lambda mlp: mlp.up.register_buffer("scales", torch.ones(2))
    )
    assert "besides weight and bias, 'extra'" in changed(
        lambda mlp: mlp.up.register_parameter("extra", nn.Parameter(torch.ones(2)))
    )
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    assert "such as a parametrization" in changed(lambda mlp: weight_norm(mlp.up))
    assert "'blocks.0.mlp.up.bias' has a gradient" in changed(
        lambda mlp: setattr(mlp.up.bias, "grad", torch.ones(24))
    )
    assert "max_norm, sparse or scale_grad_by_freq" in refused(
        TinyGPT(max_norm=1.0), BLOCKS | VOCABULARY
    )


def test_fused_projections_are_refused_unless_their_rows_are_ordered_by_head():
    model = nn.ModuleDict({"qkv": nn.Linear(8, 24)})
    assert "looks like several projections in one weight" in refused(model, {"qkv": "colwise"})
    assert decide(model, 2, {"qkv": "colwise_by_head"}).cuts[0].axis == 0


def test_models_that_have_been_sharded_are_refused():
    model = TinyGPT()
    engine = Engine(model, config={"train_micro_batch_size_per_gpu": 1})
    try:
        assert "belongs to an engine" in refused(model, BLOCKS)
    finally:
        engine.close()
    assert "model is a list" in refused([], BLOCKS)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- the plan "auto"


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Normed(Gated):
    """Its middle is not elementwise, so its parts do not add up."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.normalize(self.w1(x) * self.w3(x), dim=-1))


class Two(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def stack(make: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(Two(make()) for _ in range(2)))


def test_the_structure_of_gated_and_sequential_mlps_is_recognised():
    assert decide(stack(Gated), 2, "auto").styles == {
        f"{i}.mlp.{leaf}": style
        for i in range(2)
        for leaf, style in (("w1", "colwise"), ("w3", "colwise"), ("w2", "rowwise"))
    }
    plain = stack(lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)))  # type: ignore[arg-type]
    assert set(decide(plain, 2, "auto").styles.values()) == {"colwise", "rowwise"}


def test_a_guess_that_does_not_compute_the_same_is_refused():
    assert "these layers were not recognised: 0.mlp.w1, 0.mlp.w3, 0.mlp.w2" in refused(
        stack(Normed), "auto"
    )
    model = TinyGPT()
    model.blocks[0].attn.forward = None  # type: ignore[method-assign,assignment]
    assert "a trial run with one tensor [batch, sequence, features] failed" in refused(
        model, "auto"
    )


def test_a_plan_of_the_model_that_names_nothing_is_an_error():
    model = TinyGPT()
    model._tp_plan = {"model.layers.*.q_proj": "colwise"}  # type: ignore[assignment]
    assert "the plan of TinyGPT names no module that it has, such as 'model.layers.*.q_proj'" in (
        refused(model, "auto")
    )


def test_a_plan_of_the_model_that_leaves_all_blocks_whole_is_an_error():
    model = TinyGPT()
    head = next(n for n, m in model.named_children() if isinstance(m, nn.Linear))
    model._tp_plan = {head: "colwise_gather_output"}  # type: ignore[assignment]
    assert f"cuts {head}, and no layer of its 2 blocks such as 'blocks.0'" in refused(model, "auto")


def test_a_model_without_a_known_structure_lists_its_layers():
    assert "has no repeated blocks" in refused(nn.Linear(4, 4), "auto")
    model = TinyGPT()
    model.blocks[1].mlp.gate = nn.Linear(16, 3)
    assert "not recognised: blocks.1.mlp.up, blocks.1.mlp.down, blocks.1.mlp.gate" in refused(
        model, "auto"
    )
    assert "cannot share evenly" in refused(TinyGPT(), "auto", 3)


def test_parts_are_those_of_chunk():
    for extent in range(9):
        for size in range(1, 6):
            chunks = [len(c) for c in torch.arange(extent).chunk(size)] if extent else []
            parts = [part(extent, size, r) for r in range(size)]
            assert [b - a for a, b in parts] == chunks + [0] * (size - len(chunks))


def test_every_style_says_what_it_cuts():
    assert all(row.meaning and row.kinds for row in STYLES.values())
