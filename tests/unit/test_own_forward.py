"""Models of Transformers are cut into stages that run the models' own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel import pipeline

COMMON = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 2, "sliding_window_pattern": 2},
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 4, "n_positions": 16, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"ffn_dim": 24, "max_position_embeddings": 16, "word_embed_proj_dim": 8, "dropout": 0.0},
    "gpt_neox": {},
}  # fmt: skip


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
    return AutoModelForCausalLM.from_config(config).double()


def blocks_of(model: nn.Module) -> str:
    return next(n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == 4)


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 32, (2, 6), generator=generator)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_in_a_row_are_the_model(family, ranks):
    """The loss has the same bits. Tied parameters get the sum of their stages' gradients."""
    whole = build(family)
    given, labels = inputs(), inputs()["input_ids"]
    expected = whole(**given, labels=labels, use_cache=False).loss
    expected.backward()
    wanted = dict(whole.named_parameters())
    names = blocks_of(whole)
    split = [f"{names}.{at}" for at in ((2,) if ranks == 2 else (1, 2, 3))]
    parts = []
    for rank in range(ranks):
        part = pipeline(build(family), split=split)
        assert part.loss_fn is not None
        part.keep(rank, ranks)
        part.given_names = tuple(given)
        parts.append(part)
    value: Any = tuple(given.values())
    for stage, part in enumerate(parts):
        value = part(*value, stage=stage)
    loss = parts[-1].loss_fn(value, labels)
    assert torch.equal(loss, expected)
    loss.backward()
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, param in part.named_parameters():
            if param.grad is not None:
                found[name] = found.get(name, 0) + param.grad
    for name, param in wanted.items():
        if param.grad is None:
            assert name not in found
        else:
            assert torch.allclose(found[name], param.grad, rtol=1e-13, atol=1e-15), name
    held = sum(p.numel() for part in parts for p in part.parameters())
    tied = sum(wanted[name].numel() * (len(s) - 1) for name, s in parts[0].ties.items())
    assert held == sum(p.numel() for p in wanted.values()) + tied


class Skips(nn.Module):
    """A model whose head reads the embeddings once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first)


def test_a_stage_computes_again_what_it_needs_beside_the_blocks():
    tokens = torch.arange(8)
    expected = Skips()(tokens)
    parts = []
    for rank in range(3):
        part = pipeline(Skips(), split=["layers.1", "layers.2"], example={"tokens": tokens})
        assert part.ties == {"embed.weight": (0, 2)}
        part.keep(rank, 3)
        part.given_names = ("tokens",)
        parts.append(part)
    value: Any = (tokens,)
    for stage, part in enumerate(parts):
        value = part(*value, stage=stage)
    assert torch.equal(value, expected)


class Asks(Skips):
    """Asks for the device of the embedding, and reads what a method of it returns, on all stages."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.embed.register_buffer("scale", torch.full((), 2.0))
        self.reads = reads

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.to(self.embed.weight.device)).to(self.embed.scale.dtype)
        for layer in self.layers:
            x = layer(x)
        if self.reads:
            x = x * getattr(self.embed, self.reads).detach().mean()
        return self.head(x)


def last_stage(model: nn.Module, tokens: Tensor) -> Tensor:
    """The output of the second of two stages, for hidden states of ones."""
    part = pipeline(model, split=["layers.2"], example={"tokens": tokens})
    part.keep(1, 2)
    part.given_names = ("tokens",)
    return part(torch.ones(8, 4), tokens, stage=1)


def test_a_stage_may_ask_what_kind_of_tensors_others_have():
    whole = Asks()
    expected = whole.head(whole.layers[2](torch.ones(8, 4)))
    assert torch.equal(last_stage(Asks(), torch.arange(8)), expected)


@pytest.mark.parametrize("tensor", ["weight", "scale"])
def test_values_of_other_stages_are_never_made_up(tensor):
    with pytest.raises(UnsupportedError, match=rf"reads the values of 'embed\.{tensor}'"):
        last_stage(Asks(tensor), torch.arange(8))


class Changes(Skips):
    """Its blocks are a ``Sequential``, and the embedding's output is changed in place, on all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x += 1.0
        return self.head(self.layers(x))


def test_a_stage_may_change_what_it_does_not_have_in_place():
    whole = Changes()
    expected = whole.head(whole.layers[2](torch.ones(8, 4)))
    assert torch.equal(last_stage(Changes(), torch.arange(8)), expected)


@pytest.mark.parametrize("name", ["stages", "keep"])
def test_a_module_with_a_name_of_the_pipeline_is_refused(name):
    model = Skips()
    model.add_module(name, nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match=f"has a module named {name!r}"):
        pipeline(model, split=["layers.1"], example={"tokens": torch.arange(8)})
    with pytest.raises(UnsupportedError, match=f"has a module named {name!r}"):
        pipeline(model, split=["layers.1"], order=["embed", "layers", "head", name])


class Chooses(Skips):
    """Its forward asks which elements a mask chooses, as routers and models of images do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        x, chosen = self.embed(tokens), tokens > 2
        match self.how:
            case "nonzero":
                places = torch.nonzero(chosen).squeeze(1)
            case "as_tuple":
                (places,) = chosen.nonzero(as_tuple=True)
            case "where":
                (places,) = torch.where(chosen)
            case _:
                places = chosen
        x[places] = x[places] * 3
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("how", ["nonzero", "as_tuple", "where", "mask"])
def test_a_forward_may_choose_elements_by_a_mask(how):
    tokens = torch.arange(8)
    value: Any = (tokens,)
    for stage in range(2):
        part = pipeline(Chooses(how), split=["layers.1"], example={"tokens": tokens})
        part.keep(stage, 2)
        part.given_names = ("tokens",)
        value = part(*value, stage=stage)
    assert torch.equal(value, Chooses(how)(tokens))


def test_groups_of_matrices_are_followed():
    """Transformers multiplies the matrices of all experts in one call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mixtral", **COMMON, num_local_experts=2, experts_implementation="grouped_mm"
    )
    whole = AutoModelForCausalLM.from_config(config)
    given = inputs()
    expected = whole(**given, use_cache=False).logits
    value: Any = tuple(given.values())
    for stage in range(2):
        again = AutoModelForCausalLM.from_config(config)
        again.load_state_dict(whole.state_dict())
        part = pipeline(again, split=["model.layers.2"])
        part.keep(stage, 2)
        part.given_names = tuple(given)
        value = part(*value, stage=stage)
    assert torch.equal(value.logits, expected)


class Between(Skips):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) * 2
        return self.head(x)


class Backwards(Skips):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


class Reads(Skips):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) if tokens.sum().item() > 3 else tokens


class Uncut(Skips):
    """Its blocks do not return what they are given, but something else in a fixed structure."""

    def __init__(self, *returned: Any) -> None:
        super().__init__()
        for layer, value in zip(self.layers, returned, strict=True):
            layer.register_forward_hook(lambda _, __, y, value=value: value(y))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x if (y := layer(x)) is None else y if isinstance(y, Tensor) else y[0]
        return self.head(x)


class Nothing(Uncut):
    def __init__(self) -> None:
        super().__init__(*3 * [lambda _: {}])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            layer(x)
        return self.head(x)


class Sometimes(Uncut):
    def __init__(self) -> None:
        super().__init__(lambda y: y, lambda y: (y,), lambda y: y)


class Forgets(Skips):
    """The last block's result is not used."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(first)


class Two(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y.mean(0)


class Means(Skips):
    """The blocks' second results change the output of the model in training, after a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Two(4, 4) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x, total = self.embed(tokens), 0
        for layer in self.layers:
            x, mean = layer(x)
            total = total + mean
        return self.head(x + total if self.training else x)


@pytest.mark.parametrize(
    ("kind", "split", "kind_of_error", "text"),
    [
        (Between, ["layers.1"], UnsupportedError, r"cannot be cut before layers\.1"),
        (Backwards, ["layers.1"], UnsupportedError, r"in the order \[2, 1, 0\]"),
        (
            Means,
            ["layers.1"],
            UnsupportedError,
            "return several tensors that the model may use later",
        ),
        (Reads, ["layers.1"], UnsupportedError, "could not be followed: its forward raised"),
        (Nothing, ["layers.1"], UnsupportedError, r"block layers\.0 returned no hidden states"),
        (Sometimes, ["layers.1"], UnsupportedError, "do not all return the same structure"),
        (Forgets, ["layers.1"], UnsupportedError, "stage 1 of Forgets does not depend on"),
        (Skips, ["head"], UsageError, "Its lists are layers"),
        (Skips, ["layers.0"], UsageError, r"Give names from layers\.1 to layers\.2"),
        (Skips, ["layers.2", "layers.1"], UsageError, "not in the order"),
    ],
)
def test_what_cannot_be_cut_says_why(kind, split, kind_of_error, text):
    with pytest.raises(kind_of_error, match=text):
        pipeline(kind(), split=split, example={"tokens": torch.arange(8)})


def test_a_model_without_lists_says_so():
    model = nn.Module()
    model.embed = nn.Embedding(8, 4)
    with pytest.raises(UsageError, match="It has no list of modules"):
        pipeline(model, split=["layers.1"], example={"tokens": torch.arange(8)})


def test_a_model_without_example_inputs_is_refused():
    with pytest.raises(UsageError, match="example="):
        pipeline(Skips(), split=["layers.1"])
