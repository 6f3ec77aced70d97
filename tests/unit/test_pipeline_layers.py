"""How ``PipelineModule`` is cut, what it builds, what its parameters are named, and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard import deepspeed
from zeroshard.deepspeed.pipeline_layers import (
    LayerSpec,
    TiedLayerSpec,
    outline,
    outlines_of,
    partition,
    trained_numel,
)
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.deepspeed.topology import PipeDataParallelTopology
from zeroshard.errors import UnsupportedError, UsageError


class Block(nn.Linear):
    """A layer whose name a pattern can match."""


def wave(x: torch.Tensor) -> torch.Tensor:
    """A layer without parameters."""
    return x.sin()


def cut(layers: list[Any], stages: int, method: str) -> list[int]:
    made = [outline(x) if isinstance(x, LayerSpec) else x for x in layers]
    modules = [x if isinstance(x, nn.Module) else None for x in made]
    return partition(layers, lambda: [trained_numel(x) for x in modules], stages, method)


LAYERS = [LayerSpec(nn.Linear, 64, 64), wave, *(LayerSpec(Block, 8, 8) for _ in range(6)), wave]


@pytest.mark.parametrize(
    ("method", "stages", "parts"),
    [
        ("uniform", 2, [0, 5, 9]),
        ("UNIFORM", 3, [0, 3, 6, 9]),
        ("parameters", 2, [0, 2, 9]),
        ("type:block", 2, [0, 5, 9]),
        ("type:^linear$", 1, [0, 9]),
    ],
)
def test_layers_are_divided_by_each_method(method, stages, parts):
    found = cut(LAYERS, stages, method)
    if method.startswith("type:block"):
        counts = [sum(2 <= at < 8 for at in range(*pair)) for pair in pairwise(found)]
        assert counts == [3, 3]
    else:
        assert found == parts


def test_frozen_parameters_have_no_weight_in_the_partition():
    frozen = nn.Linear(64, 64).requires_grad_(False)
    assert cut([frozen, Block(8, 8), Block(8, 8)], 2, "parameters") == [0, 2, 3]


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        ("best", UnsupportedError, "no such method. Choose parameters, uniform or type:REGEX"),
        ("profile", UnsupportedError, "None of them measures times"),
        ("type:", UnsupportedError, "no such method"),
        (
            "type:attention",
            UsageError,
            "no layer has a name that matches. The layers are Linear, wave",
        ),
    ],
)
def test_methods_that_do_not_exist_or_match_nothing_are_refused(method, error, text):
    with pytest.raises(error, match=text):
        cut(LAYERS, 2, method)


def module(layers: list[Any], **options: Any) -> PipelineModule:
    return PipelineModule(layers, **{"num_stages": 1, **options})


@pytest.mark.parametrize(
    ("layers", "options", "text"),
    [
        ([], {}, "there is no layer"),
        ([nn.Linear], {}, r"layer 0 of PipelineModule is <class .*LayerSpec\(Class"),
        ([wave, 3], {}, "layer 1 of PipelineModule is 3"),
        ([wave], {"num_stages": None}, "num_stages=None"),
        ([wave], {"num_stages": 0}, "at least 1"),
        ([wave, wave], {"num_stages": 2}, "1 ranks were started"),
        ([wave], {"topology": PipeDataParallelTopology(1, 2)}, "has 2 ranks"),
        ([wave], {"num_stages": 2, "topology": PipeDataParallelTopology(1, 1)}, "has 1 on the axis"),
        ([wave], {"checkpointable_layers": "Block"}, "list of names"),
        ([wave], {"num_stages": 1, "gather": "never"}, "gather='never'"),
        ([wave], {"num_stages": 1, "gather": "auto", "auto_limit_nbytes": 0.5}, "limit_nbytes=0.5"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(layers, options, text):
    with pytest.raises(UsageError, match=text):
        module(layers, **options)


def test_a_pipeline_inside_a_pipeline_is_refused():
    with pytest.raises(UsageError, match="layer 1 of PipelineModule is a PipelineModule"):
        module([wave, module([wave, Block(2, 2)])])


def test_specs_say_what_they_build_and_refuse_what_they_cannot():
    assert repr(LayerSpec(Block, 2, 3, bias=False)) == "LayerSpec(Block, 2, 3, bias=False)"
    with pytest.raises(UsageError, match="give a class of modules"):
        LayerSpec(wave)
    with pytest.raises(UsageError, match="names 'wight', which is not a parameter of the module"):
        module([TiedLayerSpec("a", Block, 2, 2, tied_weight_attr="wight")])


def through_weight(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight


def test_names_have_the_number_of_the_layer_and_the_key_of_tied_ones():
    made = module(
        [
            TiedLayerSpec("table", Block, 4, 4),
            wave,
            LayerSpec(Block, 4, 4, bias=False),
            nn.LayerNorm(4),
            TiedLayerSpec("table", Block, 4, 4, forward_fn=through_weight),
        ]
    )
    names = [
        "tied_modules.table.weight",
        "tied_modules.table.bias",
        "2.weight",
        "3.weight",
        "3.bias",
    ]
    assert list(dict(made.named_parameters())) == names
    assert list(made.state_dict()) == names
    x = torch.randn(2, 4)
    table, inner, norm = (
        made.tied_modules["table"],
        made.get_submodule("2"),
        made.get_submodule("3"),
    )
    assert torch.equal(made(x), norm(inner(table(x).sin())) @ table.weight)
    assert len(made.forward_funcs) == 5


class Reads(nn.Linear):
    """A layer whose constructor needs values, which the meta device does not have."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = float(self.weight.detach().abs().max())


def test_outlines_have_shapes_without_memory_and_draw_nothing():
    state = torch.get_rng_state()
    for spec in (LayerSpec(Block, 4, 5), LayerSpec(Reads)):
        made = outline(spec)
        assert all(param.is_meta for param in made.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(TypeError):
        outline(LayerSpec(Block, 4, width=3))


class OnItsDevice(nn.Module):
    """Names the device and draws from a stream of the program, as Megatron's layers do."""

    stream = torch.Generator().manual_seed(7).get_state()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3, device="cpu"))
        self.register_buffer("mask", torch.ones(3).to("cpu"))
        common = torch.get_rng_state()
        torch.set_rng_state(OnItsDevice.stream)
        nn.init.normal_(self.weight)
        OnItsDevice.stream = torch.get_rng_state()
        torch.set_rng_state(common)
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            self.more = nn.Parameter(torch.randn(2, device="cpu"))


def test_the_outline_of_a_layer_that_names_its_device_has_no_memory_and_draws_nothing():
    checkpointing = deepspeed.checkpointing
    before = OnItsDevice.stream
    checkpointing.model_parallel_cuda_manual_seed(7)
    first = OnItsDevice().state_dict()
    checkpointing.model_parallel_cuda_manual_seed(7)
    OnItsDevice.stream = before
    made = outline(LayerSpec(OnItsDevice)).state_dict()
    assert all(tensor.is_meta for tensor in made.values())
    assert torch.equal(OnItsDevice.stream, before)
    again = OnItsDevice().state_dict()
    assert all(torch.equal(again[name], first[name]) for name in first)
    checkpointing.get_cuda_rng_tracker().reset()


class ReadsOwn(Reads):
    """Its first values are those of a tensor rank, and it reads them: it cannot be on the meta device."""

    def __init__(self) -> None:
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            super().__init__()


def test_streams_are_restored_after_a_layer_that_had_to_draw():
    checkpointing = deepspeed.checkpointing
    checkpointing.model_parallel_cuda_manual_seed(7)
    first = ReadsOwn().weight
    checkpointing.model_parallel_cuda_manual_seed(7)
    outline(LayerSpec(ReadsOwn))
    assert torch.equal(ReadsOwn().weight, first)
    checkpointing.get_cuda_rng_tracker().reset()


def test_layers_are_seeded_one_by_one_if_asked_for():
    seeds: list[int] = []
    made = module(
        [LayerSpec(Block, 2, 2), wave, LayerSpec(Block, 2, 2)],
        seed_layers=True, seed_fn=seeds.append, base_seed=10,
    )  # fmt: skip
    assert seeds == [10, 11, 12]
    made(torch.ones(1, 2))
    made(torch.ones(1, 2))
    assert seeds[3:] == [20, 21, 22, 30, 31, 32]


def test_activation_checkpoints_are_for_layers_with_parameters_or_of_given_classes():
    calls: list[int] = []

    def counted(run: Any, *inputs: Any) -> Any:
        calls.append(len(inputs))
        return run(*inputs)

    layers = [LayerSpec(Block, 2, 2), wave, LayerSpec(nn.Linear, 2, 2), wave, wave]
    options = {"activation_checkpoint_interval": 1, "activation_checkpoint_func": counted}
    made, x = module(layers, **options), torch.ones(1, 2)
    expected = made(x)
    assert calls == [1, 1]
    made.set_checkpoint_interval(0)
    assert torch.equal(made(x), expected)
    assert calls == [1, 1]
    module(layers, checkpointable_layers=["Block"], **options)(x)
    assert calls == [1, 1, 1]
    with pytest.raises(UsageError, match="give a number of layers"):
        made.set_checkpoint_interval(-1)


class Embedding(nn.Module):
    """Has its weight under another name, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(2, 2)

    @property
    def weight_of_all(self) -> nn.Parameter:
        return self.table.weight

    @property
    def size(self) -> int:
        return 2


def test_a_tied_weight_may_be_named_by_a_property():
    assert len(outlines_of([TiedLayerSpec("e", Embedding, tied_weight_attr="weight_of_all")])) == 1
    for name in ("size", "other", "table"):
        with pytest.raises(UsageError, match=f"names '{name}', which is not a parameter"):
            outlines_of([TiedLayerSpec("e", Embedding, tied_weight_attr=name)])
