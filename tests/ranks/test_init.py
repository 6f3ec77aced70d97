"""A model that was built sharded, or on the meta device, is the same model."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.errors import RankMismatch, ShardedAccess, UsageError
from zeroshard.parallel.initial_values import draw_values
from zeroshard.zero import GatheredParameters, Init, materialize
from zeroshard.zero.sharded_parameter import ShardedParameter

VOCABULARY, WIDTH = 53, 24


def config(precision: str = "bf16", stage: int = 3, **keys: object) -> dict:
    mode = {} if precision == "fp32" else {precision: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "units": ["Block"],
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **mode,
        **keys,
    }


class Block(nn.Module):
    """Buffers, a bare parameter, a frozen one, and a custom initialiser."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.125), requires_grad=False)
        self.register_buffer("inv_freq", torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain, 0.5, 1.5)
        nn.init.constant_(self.shift, 0.125)
        self.inv_freq.copy_(10000.0 ** -torch.arange(0, 1, 1 / WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.gain * self.inv_freq).to(x.dtype)
        y: Tensor = self.down(self.up(x).relu()) * scale
        return x + y + self.shift.to(x.dtype)


class Model(nn.Module):
    """An embedding tied to the head; weights initialised once more at the end, Hugging Face style."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.07)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.05)
            with torch.no_grad():
                module.weight[module.padding_idx].fill_(0)
        for name, param in module.named_parameters(recurse=False):
            if name == "gain":
                param.data.normal_(1.0, 0.1 / math.sqrt(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def train(engine: Engine, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        ids = (torch.arange(12).view(2, 6) * 7 + step + engine.global_rank) % VOCABULARY
        loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def outcome(build: Callable[[], nn.Module], settings: dict, context: object = None) -> tuple:
    """Losses and final parameters of a model built under ``context``."""
    torch.manual_seed(7)
    with context or nullcontext():
        model = build()
    with Engine(model, config=settings) as engine:
        losses = train(engine)
        return losses, {name: full.clone() for name, full in engine.iter_full_params()}


def assert_same(one: tuple, other: tuple) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    different = [name for name in one[1] if not torch.equal(one[1][name], other[1][name])]
    assert not different


# ---------------------------------------------------------------------- the same model


@pytest.mark.smoke
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@on_ranks(2)
def test_a_model_built_under_init_trains_bit_for_bit_like_the_ordinary_one(precision):
    settings = config(precision)
    ordinary = outcome(Model, settings)
    assert_same(outcome(Model, settings, Init(config_dict_or_path=settings)), ordinary)


@pytest.mark.parametrize("world", [1, 3])
def test_it_does_so_on_one_and_on_three_ranks(world):
    from zeroshard_testing import run_ranks

    run_ranks(_same_on_these_ranks, world)


def _same_on_these_ranks() -> None:
    ordinary = outcome(Model, config())
    assert_same(outcome(Model, config(), Init(config_dict_or_path=config())), ordinary)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_below_stage_3_init_does_nothing(stage):
    settings = config(stage=stage)
    torch.manual_seed(7)
    with Init(config_dict_or_path=settings):
        model = Model()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert model.head.weight.dtype == torch.float32
    with Engine(model, config=settings) as engine:
        train(engine, 1)


@on_ranks(2)
def test_a_model_built_under_init_also_trains_at_stage_1():
    ordinary = outcome(Model, config(stage=1))
    assert_same(outcome(Model, config(stage=1), Init(config_dict_or_path=config())), ordinary)


@on_ranks(2)
def test_rank_0_decides_the_values():
    torch.manual_seed(100 + torch.distributed.get_rank())
    with Init(config_dict_or_path=config()):
        model = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(100)
    assert torch.equal(model.weight.float(), nn.Linear(WIDTH, WIDTH).weight.bfloat16().float())


# ---------------------------------------------------------------------- while it is built


@on_ranks(2)
def test_what_rests_is_a_half_in_16_bit_and_buffers_are_left_alone():
    with Init(config_dict_or_path=config()):
        model = Model()
    for param in model.parameters():
        assert type(param) is ShardedParameter
        assert param.dtype == torch.bfloat16
    assert model.blocks[0].up.weight.shape == (3 * WIDTH, WIDTH)
    assert not model.blocks[0].shift.requires_grad
    assert model.blocks[0].inv_freq.dtype == torch.float32
    assert torch.equal(model.blocks[0].inv_freq, 10000.0 ** -torch.arange(0, 1, 1 / WIDTH))


@on_ranks(2)
def test_the_dtype_argument_wins():
    with Init(config_dict_or_path=config("bf16"), dtype=torch.float16):
        model = nn.Linear(WIDTH, WIDTH)
    assert model.weight.dtype == torch.float16


@on_ranks(2)
def test_without_config_parameters_keep_their_dtype():
    with Init():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2


@on_ranks(2)
def test_tied_weights_stay_one_parameter():
    with Init(config_dict_or_path=config()):
        model = Model()
    assert model.head.weight is model.embedding.weight


@on_ranks(2)
def test_copied_layers_are_sharded_too():
    with Init(config_dict_or_path=config()):
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, batch_first=True)
        model = nn.TransformerEncoder(layer, num_layers=2)
    assert all(type(param) is ShardedParameter for param in model.parameters())


@on_ranks(2)
def test_reading_gives_full_values_inside_and_after_the_block():
    with Init(config_dict_or_path=config("fp32")):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        first = model[0].weight.detach().clone()
        model[1].weight.data.zero_()
    assert first.abs().sum() > 0
    assert torch.equal(model[0].weight.detach(), first)
    assert model[1].weight.detach().abs().sum() == 0


@on_ranks(2)
def test_one_operation_may_use_parameters_of_many_modules():
    with Init(config_dict_or_path=config("fp32")):
        model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        with torch.no_grad():
            model[0].weight.copy_(model[1].weight + model[2].weight)
            torch.add(model[1].bias, model[2].bias, out=model[3].bias)
    assert torch.equal(model[0].weight.detach(), model[1].weight + model[2].weight)
    assert torch.equal(model[3].bias.detach(), model[1].bias + model[2].bias)


@on_ranks(2)
def test_a_write_through_an_alias_that_was_kept_is_not_lost():
    with Init(config_dict_or_path=config("fp32")):
        model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        kept = model[0].weight.data
        for layer in model[1:]:
            layer.weight.data.zero_()
        kept.fill_(3.0)
        del kept
    assert model[0].weight.detach().unique().tolist() == [3.0]


@on_ranks(2)
def test_gathered_parameters_edit_a_model_that_no_engine_has_yet():
    with Init(config_dict_or_path=config("fp32")):
        model = nn.Linear(WIDTH, WIDTH)
    with GatheredParameters(model.weight, modifier_rank=1):
        model.weight.data.fill_(float(torch.distributed.get_rank()))
    assert model.weight.detach().unique().tolist() == [1.0]


@pytest.mark.parametrize("editor", [0, 1])
@on_ranks(2)
def test_an_edit_in_a_block_for_reading_is_refused_on_every_rank_and_taken_back(editor):
    with Init(config_dict_or_path=config()):
        model = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Embedding(WIDTH, 5), nn.LayerNorm(3)])
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ShardedAccess, match=r"'Embedding\.weight' changed"):
        with GatheredParameters(model.parameters()):
            if torch.distributed.get_rank() == editor:
                model[1].weight.data[-1, -1] += 1
    assert all(map(torch.equal, model.parameters(), before))


@on_ranks(2)
def test_a_block_for_reading_keeps_values_and_sends_nothing_back():
    context = Init(config_dict_or_path=config())
    with context:
        model = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Embedding(WIDTH, 5)])
    before = [param.detach().clone() for param in model.parameters()]
    with GatheredParameters(model.parameters()):
        assert all(map(torch.equal, model.parameters(), before))
        with GatheredParameters(model[0].bias, modifier_rank=1):
            model[0].bias.data.fill_(float(torch.distributed.get_rank()))
    assert model[0].bias.detach().unique().tolist() == [1.0]
    calls = context.comm.recorder.seq
    with GatheredParameters(model.parameters()):
        pass
    assert context.comm.recorder.seq == calls + 2  # the values, and a look whether they were edited
    assert torch.equal(model[1].weight, before[2])


@on_ranks(2)
def test_inside_init_a_block_without_modifier_rank_may_initialise():
    with Init(config_dict_or_path=config("fp32")):
        model = nn.Linear(WIDTH, WIDTH)
        with GatheredParameters(model.weight):
            model.weight.data.fill_(2.0)
    assert model.weight.detach().unique().tolist() == [2.0]


@on_ranks(2)
def test_a_write_after_the_block_is_refused_with_the_way_out():
    with Init(config_dict_or_path=config()):
        model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ShardedAccess, match="GatheredParameters"), torch.no_grad():
        model.weight.zero_()


@on_ranks(2)
def test_contexts_may_be_nested():
    outer = Init(config_dict_or_path=config())
    torch.manual_seed(7)
    with outer, Init(config_dict_or_path=config()), outer:
        model = Model()
    assert all(type(param) is ShardedParameter for param in model.parameters())
    torch.manual_seed(7)
    ordinary = Model()
    for (name, param), other in zip(model.named_parameters(), ordinary.parameters(), strict=True):
        assert torch.equal(param.detach(), other.bfloat16()), name


@on_ranks(2)
def test_a_whole_model_can_be_sharded_afterwards():
    torch.manual_seed(7)
    model = Model()
    Init(module=model, config_dict_or_path=config())
    assert all(type(param) is ShardedParameter for param in model.parameters())
    with Engine(model, config=config()) as engine:
        losses = train(engine)
    assert losses == outcome(Model, config())[0]


@on_ranks(2)
def test_an_exception_inside_leaves_no_hook_and_a_readable_model():
    parts = []
    with pytest.raises(ValueError, match="half way"), Init(config_dict_or_path=config()):
        parts += [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        raise ValueError("half way")
    assert type(nn.Linear(2, 2).weight) is nn.Parameter
    assert all(part.weight.detach().isfinite().all() for part in parts)


@on_ranks(2)
def test_a_model_that_no_engine_took_is_freed_with_its_connections():
    context = Init(config_dict_or_path=config())
    with context:
        model = Model()
    alive = [weakref.ref(context), weakref.ref(context.comm)]
    del context
    gc.collect()
    assert model.head.weight.detach().isfinite().all()  # its parameters still need both
    del model
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@on_ranks(2)
def test_an_engine_that_took_the_model_frees_the_connections_of_init():
    context = Init(config_dict_or_path=config())
    with context:
        model = Model()
    alive = weakref.ref(context)
    del context
    with Engine(model, config=config()) as engine:
        gc.collect()
        assert alive() is None
        train(engine, 1)


@on_ranks(2)
def test_an_optimizer_made_from_a_sharded_model_is_taken():
    settings = config()
    section = settings.pop("optimizer")
    torch.manual_seed(7)
    with Init(config_dict_or_path=settings):
        model = Model()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], **section["params"], weight_decay=0.0
    )
    with Engine(model, config=settings, optimizer=optimizer) as engine:
        losses = train(engine)
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], **section["params"], weight_decay=0.0
    )
    with Engine(model, config=settings, optimizer=optimizer) as engine:
        assert train(engine) == losses


# ---------------------------------------------------------------------- what constructors do


class Doubled(nn.Module):
    """A parametrization with an inverse."""

    def forward(self, half: Tensor) -> Tensor:
        return half * 2

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2


class Symmetric(nn.Module):
    """A parametrization without one."""

    def forward(self, value: Tensor) -> Tensor:
        return (value + value.mT) / 2


def in_the_same_memory(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight)


WRAPS: dict[str, Callable[[nn.Linear], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda layer: register_parametrization(layer, "weight", Doubled()),
    "own without inverse": lambda layer: register_parametrization(layer, "weight", Symmetric()),
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "nn.Parameter": in_the_same_memory,
}


class Wrapped(nn.Module):
    """Layers are wrapped late, when their weights may already be sharded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for layer in self.blocks:
            WRAPS[kind](layer)

    forward = Model.forward


PIECES = [
    pytest.param(materialize.PIECE_NUMEL, id="small ones wait"),
    pytest.param(64, id="none waits"),
]
"""How much is exchanged at a time: all of a tiny model, or nearly each parameter by itself."""


@contextmanager
def piece_numel(numel: int) -> Iterator[None]:
    before, materialize.PIECE_NUMEL = materialize.PIECE_NUMEL, numel
    try:
        yield
    finally:
        materialize.PIECE_NUMEL = before


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("kind", WRAPS)
@on_ranks(2)
def test_parameters_are_wrapped_and_replaced_in_constructors(kind, piece):
    settings = config("fp32", units="auto", unit_min_numel=1)
    with warnings.catch_warnings(), piece_numel(piece):
        warnings.simplefilter("ignore", FutureWarning)  # of torch's old ways
        ordinary = outcome(lambda: Wrapped(kind), settings)
        context = Init(config_dict_or_path=settings)
        assert_same(outcome(lambda: Wrapped(kind), settings, context), ordinary)


@pytest.mark.parametrize("piece", PIECES)
@on_ranks(2)
def test_16_bit_parameters_are_wrapped_in_the_dtype_that_they_are_built_in(piece):
    torch.manual_seed(7)
    ordinary = Wrapped("own")
    torch.manual_seed(7)
    with piece_numel(piece), Init(config_dict_or_path=config("bf16")):
        model = Wrapped("own")
        assert {param.dtype for param in model.parameters()} == {torch.float32}
    for (name, param), other in zip(model.named_parameters(), ordinary.parameters(), strict=True):
        assert param.dtype == torch.bfloat16
        assert torch.equal(param.detach(), other.bfloat16()), name


@pytest.mark.parametrize("piece", PIECES)
@on_ranks(2)
def test_a_parameter_made_of_another_one_shares_its_memory_while_both_are_built(piece):
    with piece_numel(piece), Init(config_dict_or_path=config("fp32")):
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        layers[2].weight = nn.Parameter(layers[0].weight)
        layers[1].weight.data.zero_()
        layers[0].weight.data.fill_(3.0)
    assert [layer.weight.detach().max().item() for layer in layers] == [3.0, 0.0, 3.0]


@on_ranks(2)
def test_a_parameter_made_of_a_sharded_one_after_the_block_is_an_error_with_the_way_out():
    with Init(config_dict_or_path=config("fp32")):
        model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ShardedAccess, match="clone"):
        nn.Parameter(model.weight)
    assert torch.equal(nn.Parameter(model.weight.detach().clone()), model.weight.detach())


@pytest.mark.parametrize("piece", PIECES)
@on_ranks(2)
def test_a_parameter_that_is_given_another_shape_while_it_is_built_keeps_it(piece):
    with piece_numel(piece), Init(config_dict_or_path=config("fp32")):
        model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        model[0].weight.data = torch.full((3, 5), 2.0)
        model.append(nn.Linear(WIDTH, WIDTH))
    assert type(model[0].weight) is ShardedParameter
    assert torch.equal(model[0].weight.detach(), torch.full((3, 5), 2.0))


@on_ranks(2)
def test_a_thousand_small_parameters_are_sent_in_two_collectives():
    context = Init(config_dict_or_path=config("fp32"))
    with context:
        model = nn.ModuleList(nn.Linear(8, 8) for _ in range(500))
        for layer in model:
            layer.weight.data.zero_()
    assert all(type(param) is ShardedParameter for param in model.parameters())
    assert context.comm.recorder.seq == 2  # a look whether ranks agree, and the values


@on_ranks(2)
def test_ranks_that_build_different_models_hear_of_it():
    width = WIDTH + torch.distributed.get_rank()
    with pytest.raises(RankMismatch, match="different models"), Init():
        nn.Linear(width, WIDTH)


# ---------------------------------------------------------------------- from the meta device


class Plain(nn.Module):
    """Everything is filled by ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    forward = Model.forward


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_model_on_the_meta_device_becomes_the_ordinary_one(stage):
    settings = config("bf16", stage)
    torch.manual_seed(7)
    with torch.device("meta"):
        model = Plain()
    with Engine(model, config=settings) as engine:
        losses = train(engine)
        params = {name: full.clone() for name, full in engine.iter_full_params()}
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert model.head.weight is model.embedding.weight
        assert model.blocks[0].inv_freq.dtype == torch.float32
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert_same((losses, params), outcome(_filled, settings))


def _filled() -> nn.Module:
    """An ordinary model in which each module was filled with the seed and its name."""
    with torch.device("meta"):
        model = Plain()
    draw_values(model, 7)
    return model


@on_ranks(2)
def test_an_optimizer_made_from_a_meta_model_updates_the_real_parameters():
    settings = config()
    section = settings.pop("optimizer")
    torch.manual_seed(7)
    with torch.device("meta"):
        model = Plain()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **section["params"], weight_decay=0.0)
    with Engine(model, config=settings, optimizer=optimizer) as engine:
        losses = train(engine)
    torch.manual_seed(7)
    with torch.device("meta"):
        model = Plain()
    with Engine(model, config=config()) as engine:
        assert train(engine) == losses


@on_ranks(2)
def test_weights_loaded_before_are_kept():
    with torch.device("meta"):
        model = Plain()
    model.embedding.to_empty(device="cpu")
    model.head.weight = model.embedding.weight
    with torch.no_grad():
        model.embedding.weight.fill_(0.5)
    with Engine(model, config=config()) as engine:
        full = dict(engine.iter_full_params())
        assert full["embedding.weight"].unique().tolist() == [0.5]
        assert full["head.bias"].abs().sum() > 0  # reset, without touching the tied weight


class Mute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class MuteBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.empty(3))


@pytest.mark.parametrize("kind", [Mute, MuteBuffer])
@on_ranks(2)
def test_a_module_that_cannot_fill_itself_is_named(kind):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), kind())
    with pytest.raises(UsageError, match=rf"module '1' \({kind.__name__}\).*reset_parameters"):
        Engine(model, config=config(units="auto"))


@on_ranks(1)
def test_attributes_of_meta_parameters_survive():
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    model.weight.weight_decay_rate = 0.5
    with Engine(model, config=config(units="auto", stage=1)):
        assert model.weight.weight_decay_rate == 0.5


@on_ranks(2)
def test_a_deep_copy_of_a_sharded_model_is_an_ordinary_model():
    with Init(config_dict_or_path=config("fp32")):
        model = nn.Linear(WIDTH, WIDTH)
    twin = copy.deepcopy(model)
    assert type(twin.weight) is nn.Parameter
    assert torch.equal(twin.weight, model.weight)
