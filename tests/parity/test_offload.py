"""Offload to host memory or disk changes no bit of training."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from unittest import mock

import kit
import pytest
import torch
from compare import CASES, trained
from support.bus import a_bus_between
from support.covering import covering, each_value, sampled
from support.parity import assert_bit_equal
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.core import tiers
from zeroshard.errors import UsageError
from zeroshard.offload.grad_store import DiskGradStore
from zeroshard.optim import native_adam
from zeroshard.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)

CHUNK_NUMEL = 192
"""Small enough that the parameters of these models are cut on disk."""


def stores(path: Path, stage: int) -> dict[str, dict]:
    """All offload settings of this stage, as keys of DeepSpeed's configuration."""
    disk = {"device": "nvme", "nvme_path": str(path)}
    found = {
        "optimizer in host memory": {"offload_optimizer": {"device": "cpu"}},
        "half of it": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "optimizer on disk": {"offload_optimizer": disk},
        "a third in each": {"offload_optimizer": {**disk, "ratio": 0.67, "max_in_cpu": 700}},
    }
    if stage == 3:
        found |= {
            "parameters in host memory": {"offload_param": {"device": "cpu"}},
            "parameters on disk": {"offload_param": disk},
            "some parameters on disk": {"offload_param": {**disk, "max_in_cpu": 1500}},
            "some of all on disk": {
                "offload_optimizer": {**disk, "ratio": 0.67, "max_in_cpu": 700},
                "offload_param": {**disk, "max_in_cpu": 1500},
            },
            "all on disk": {"offload_optimizer": disk, "offload_param": disk},
            "all in host memory": {
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
        }
    return found


PLACES = ("half of it", "some of all on disk", "all on disk")
"""Settings that together store state in every tier. Other tests below train three models with all."""


def chunks_of(numel: int) -> contextlib.AbstractContextManager[int]:
    """Chunks on disk are this long at most."""
    return mock.patch.object(tiers, "CHUNK_NUMEL", numel)


def check_stores(
    path: Path,
    name: str,
    precision: str,
    accumulation: int,
    *,
    stages: tuple[int, ...],
    world: int,
    only: tuple[str, ...] = (),
) -> None:
    for stage in stages:
        found = {s: keys for s, keys in stores(path, stage).items() if not only or s in only}
        if not found:
            continue
        plain = trained(name, precision, accumulation, stage=stage, world=world)
        for store, keys in found.items():
            config = {"zero_optimization": keys}
            with chunks_of(CHUNK_NUMEL):
                run = trained(
                    name, precision, accumulation, stage=stage, world=world, config=config
                )
            try:
                assert_bit_equal(run, plain)
            except AssertionError as error:
                raise AssertionError(f"stage {stage}, {store}: {error}") from error


@pytest.mark.parametrize(
    "name",
    ["complex", *sampled([name for name in CASES if name != "complex"], every=3)],  # pages differ
)
@on_ranks(2)
def test_no_store_changes_a_bit_on_two_ranks(name, tmp_path):
    check_stores(tmp_path, name, "bf16", 1, stages=(3,), world=2, only=PLACES)


def combined(trainings: list[tuple]) -> list[tuple]:
    """Trainings with stages and stores: a training, a stage, and the names of stores that take turns."""
    rows: dict[tuple, list[str]] = {}
    table = [
        (training, stage, store)
        for training, stage in itertools.product(trainings, (1, 2, 3))
        for store in stores(Path(), stage)
    ]
    for training, stage, store in each_value(table):
        rows.setdefault((training, stage), []).append(store)
    return [(*training, stage, tuple(found)) for (training, stage), found in rows.items()]


AT_ANY_PRECISION = [
    *((name, "bf16", 3) for name in ("transformer", "tied", "lora")),
    *(("transformer", "fp64", 1), ("lora", "fp16", 1), ("tied", "fp32", 1)),
]


@pytest.mark.parametrize(
    ("name", "precision", "accumulation", "stage", "places"),
    [
        pytest.param(*row, marks=pytest.mark.smoke if row[1] == "fp32" else ())
        for row in combined(AT_ANY_PRECISION)
    ],
)
@on_ranks(2)
def test_no_store_changes_a_bit_at_any_stage_and_precision(
    name, precision, accumulation, stage, places, tmp_path
):
    check_stores(tmp_path, name, precision, accumulation, stages=(stage,), world=2, only=places)


@pytest.mark.parametrize("name", sampled(["experts", "transformer"], every=2))
@on_ranks(3)
def test_no_store_changes_a_bit_on_three_ranks(name, tmp_path):
    check_stores(tmp_path, name, "bf16", 1, stages=(1, 3), world=3, only=PLACES)


@pytest.mark.parametrize("precision", sampled(["bf16", "fp32"], every=2))
@on_ranks(1)
def test_no_store_changes_a_bit_on_one_rank(precision, tmp_path):
    check_stores(tmp_path, "transformer", precision, 1, stages=(1, 2, 3), world=1)


def check_gradients_on_disk(
    path: Path,
    precision: str,
    accumulation: int,
    *,
    world: int,
    stages: tuple[int, ...] = (1, 2, 3),
) -> None:
    disk = {"device": "nvme", "nvme_path": str(path)}
    for stage in stages:
        plain = trained("unused", precision, accumulation, stage=stage, world=world)
        for keys in ({}, {"offload_param": disk} if stage == 3 else {"reduce_bucket_size": 640}):
            config = {"zero_optimization": {"offload_optimizer": disk, **keys}}
            with chunks_of(CHUNK_NUMEL):
                run = trained(
                    "unused", precision, accumulation, stage=stage, world=world, config=config
                )
            assert_bit_equal(run, plain)


GRID = pytest.mark.parametrize(
    ("stage", "precision", "accumulation"),
    each_value([*itertools.product((1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2))]),
)
DIAGONAL = pytest.mark.parametrize(
    ("precision", "accumulation"), [("fp32", 1), ("bf16", 2), ("fp16", 1)]
)
"""For one and three ranks."""


@DIAGONAL
@on_ranks(1)
def test_gradients_on_disk_change_no_bit_on_one_rank(precision, accumulation, tmp_path):
    check_gradients_on_disk(tmp_path, precision, accumulation, world=1)


@GRID
@on_ranks(2)
def test_gradients_on_disk_change_no_bit_on_two_ranks(stage, precision, accumulation, tmp_path):
    check_gradients_on_disk(tmp_path, precision, accumulation, world=2, stages=(stage,))


@pytest.mark.parametrize(
    ("precision", "accumulation"), sampled([("bf16", 2), ("fp32", 1), ("fp16", 1)], every=3)
)
@on_ranks(3)
def test_gradients_on_disk_change_no_bit_on_three_ranks(precision, accumulation, tmp_path):
    check_gradients_on_disk(tmp_path, precision, accumulation, world=3)


class Stumbling(torch.nn.Module):
    """Three layers, an unused layer, and a backward that fails at a given point."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.spare = torch.nn.Linear(64, 64)
        self.stumbles = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
            if self.stumbles and layer is self.layers[0]:
                x.register_hook(self.fail)  # the other layers are reduced by then
        return x

    def fail(self, _grad: torch.Tensor) -> None:
        raise KeyError("in backward")


def eventful_training(
    keys: dict, *, stage: int, precision: str, accumulation: int
) -> dict[str, torch.Tensor]:
    """Train while the program reads, sets, drops and moves gradients, and interrupts a backward.

    Returns the gradients that the program read, and masters and moments at the end.
    """
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "units": ["Linear"],
        "unit_min_numel": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **keys},
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
    }
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    found: dict[str, torch.Tensor] = {}
    model = Stumbling()
    with Engine(model, config=config) as engine:
        first, last = model.layers[0].weight, model.layers[-1].weight

        def backward(seed: int, scale: float = 1.0) -> None:
            generator = torch.Generator().manual_seed(10 * seed + engine.global_rank)
            x = scale * torch.randn(4, 64, generator=generator).to(first.dtype)
            engine.backward(engine(x).float().square().mean())

        def read(when: str) -> None:
            for name, param in model.named_parameters():
                if (grad := safe_get_full_grad(param)) is not None:
                    found[f"{when}: {name}"] = grad.clone()

        for step in range(8):
            for micro in range(accumulation):
                if step == 3 and micro == 0:  # drop the computed gradient
                    backward(step)
                    read("dropped")
                    engine.zero_grad()
                if step == 4 and micro == 0:  # fail when others are on their way
                    model.stumbles = True
                    with pytest.raises(KeyError, match="in backward"):
                        backward(step)
                    model.stumbles = False
                overflows = step == 6 and precision == "fp16" and micro == 0
                backward(10 * step + micro, scale=float("inf") if overflows else 1.0)
                if step == 1:
                    read(f"micro-batch {micro}")
                if step == 5:
                    engine.offload_states(include=["lp_grads"])
                    engine.reload_states()
                    read(f"moved {micro}")
                if step == 2 and micro == accumulation - 1:
                    for _ in range(2):  # read the gradient that was set, and set it again
                        safe_set_full_grad(last, 2 * safe_get_full_grad(last))
                    safe_set_full_grad(first, torch.ones_like(first, dtype=torch.float32))
                    read("set")
                    assert not keys or engine.runtime.ledger.nbytes("gradients") == 0
                engine.step()
            assert engine.last_step.skipped == (precision == "fp16" and step == 6)
        for name, param in model.named_parameters():
            found[name] = safe_get_full_fp32_param(param)
            if (moment := safe_get_full_optimizer_state(param, "exp_avg")) is not None:
                found[f"{name} exp_avg"] = moment
        rests = {type(buffer.store) for buffer in engine.runtime.reducer.buffers}
        assert rests == {DiskGradStore if keys else type(None)}
    return found


def check_events(path: Path, **how) -> None:
    plain = eventful_training({}, **how)
    disk = {"device": "nvme", "nvme_path": str(path)}
    keys = {"offload_optimizer": disk}
    with chunks_of(512):
        found = eventful_training(keys, **how)
    assert found.keys() == plain.keys()
    different = [name for name, value in plain.items() if not torch.equal(found[name], value)]
    assert different == []


@GRID
@on_ranks(2)
def test_programs_that_touch_gradients_on_disk_see_the_same(
    stage, precision, accumulation, tmp_path
):
    check_events(tmp_path, stage=stage, precision=precision, accumulation=accumulation)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1)
def test_a_program_on_one_rank_that_touches_them_sees_the_same(stage, tmp_path):
    check_events(tmp_path, stage=stage, precision="bf16", accumulation=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(3)
def test_a_program_on_three_ranks_that_touches_them_sees_the_same(stage, tmp_path):
    check_events(tmp_path, stage=stage, precision="bf16", accumulation=2)


def edit(weight: torch.nn.Parameter, stage: int, rank: int) -> None:
    """The program writes into a parameter. Parameter and master get the value in every tier."""
    if stage < 3:
        weight.data[3].mul_(2)
        return
    with GatheredParameters(weight, modifier_rank=0):
        if rank == 0:
            weight.data[3].mul_(2)


def two_layers(zero: dict) -> tuple[torch.nn.Module, dict]:
    """A model of two units, and how it is trained."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 200), torch.nn.Tanh(), torch.nn.Linear(200, 7))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "units": ["Linear"],
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }
    return model, config


def batch_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 96, generator=generator).bfloat16()


def bits_of_training(keys: dict, *, stage: int = 3, steps: int = 6) -> dict[str, torch.Tensor]:
    """Parameters, masters and moments after a few steps of the fused AdamW that config names."""
    model, config = two_layers({"stage": stage, **keys})
    with Engine(model, config=config) as engine:
        for step in range(steps):
            x = batch_of(step, engine.global_rank)
            engine.backward(engine(x).float().square().mean())
            engine.step()
            if step == 3:
                edit(model[0].weight, stage, engine.global_rank)
        found = {name: full.clone() for name, full in engine.iter_full_params()}
        for name, param in model.named_parameters():
            found[f"{name} master"] = safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key)
        return found


@on_ranks(2)
def test_the_compiled_update_gives_the_same_bits_in_every_store(tmp_path):
    native_adam.prepare()
    native_adam.wait()  # otherwise it would be used from some later step on
    plain = bits_of_training({})
    for store, keys in stores(tmp_path, 3).items():
        with chunks_of(4096):
            found = bits_of_training(keys)
        assert found.keys() == plain.keys()
        for name, value in plain.items():
            assert torch.equal(found[name], value), f"{store}: {name}"


@on_ranks(2)
def test_an_edit_that_pytorch_does_not_count_is_written_to_the_disk(tmp_path):
    def weight_after_an_edit(keys: dict) -> torch.Tensor:
        def halve(module: torch.nn.Module, _: object) -> None:
            module.weight.data.mul_(0.5)

        model, config = two_layers({"stage": 3, **keys})
        with Engine(model, config=config) as engine, torch.no_grad():
            hook = model[0].register_forward_pre_hook(halve)
            engine(batch_of(0, engine.global_rank))
            hook.remove()
            return dict(engine.iter_full_params())["0.weight"].clone()

    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    found = weight_after_an_edit({"offload_param": disk, "offload_optimizer": disk})
    assert torch.equal(found, weight_after_an_edit({}))


@on_ranks(2)
def test_values_on_disk_are_read_and_written_like_any_others(tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    model = torch.nn.Linear(96, 200)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": disk, "offload_param": disk},
    }
    with chunks_of(4096), Engine(model, config=config) as engine:
        engine.backward(engine(torch.ones(4, 96).bfloat16()).float().square().mean())
        engine.step()
        value = torch.arange(96 * 200).view(200, 96).float()
        safe_set_full_fp32_param(model.weight, value)
        safe_set_full_optimizer_state(model.weight, value / 2, "exp_avg")
        local = safe_get_local_fp32_param(model.weight)
        begin = engine.global_rank * engine.runtime.units[0].layout.shard_numel
        assert torch.equal(local, value.view(-1)[begin : begin + len(local)])
        assert torch.equal(safe_get_full_fp32_param(model.weight), value)
        assert torch.equal(safe_get_full_optimizer_state(model.weight, "exp_avg"), value / 2)
        assert torch.equal(dict(engine.iter_full_params())["weight"], value.bfloat16())
        safe_set_local_optimizer_state(model.weight, torch.zeros_like(local), "exp_avg")
        assert not safe_get_full_optimizer_state(model.weight, "exp_avg").any()
        with pytest.raises(UsageError, match="state on disk"):
            engine.optimizer.state_dict()


OVER_A_BUS = [
    *((name, "bf16", 1) for name in ("transformer", "tied", "experts", "unused")),
    *(("transformer", "fp32", 1), ("unused", "fp16", 1)),
]


@pytest.mark.parametrize(
    ("name", "precision", "accumulation", "stage", "places"), combined(OVER_A_BUS)
)
@on_ranks(2)
def test_a_bus_between_device_and_host_changes_no_bit(
    name, precision, accumulation, stage, places, tmp_path
):
    with a_bus_between():
        check_stores(tmp_path, name, precision, accumulation, stages=(stage,), world=2, only=places)


def check_the_worker(path: Path, stage: int) -> None:
    native_adam.prepare()
    native_adam.wait()
    plain = bits_of_training({}, stage=stage)
    with a_bus_between(), chunks_of(4096):
        for store, keys in stores(path, stage).items():
            found = bits_of_training(keys, stage=stage)
            for name, value in plain.items():
                assert torch.equal(found[name], value), f"{store}: {name}"


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_the_update_on_the_worker_gives_the_same_bits(stage, tmp_path):
    check_the_worker(tmp_path, stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1)
def test_the_update_beside_the_next_forward_gives_the_same_bits(stage, tmp_path):
    check_the_worker(tmp_path, stage)


def after_each_backward(keys: dict, *, reads: bool, losses: int) -> tuple[list, list[int]]:
    """The gradients (if ``reads``) and the final parameters, and the bytes on the device between
    backward and step. ``losses``: backwards in one step."""
    model, config = two_layers(keys)
    seen, held = [], []
    with Engine(model, config=config) as engine:
        for step in range(4):
            x = batch_of(step, engine.global_rank)
            for part in range(losses):
                engine.backward(engine(x + part).float().square().mean())
            held.append(engine.runtime.ledger.nbytes("gradients"))
            if reads:
                seen += [safe_get_full_grad(param) for param in model.parameters()]
            engine.step()
        seen += [full.clone() for _, full in engine.iter_full_params()]
    return seen, held


@pytest.mark.parametrize(
    ("stage", "losses", "reads", "where"),
    covering([*itertools.product((1, 2, 3), (1, 2), (False, True), ("host", "disk"))]),
)
@on_ranks(2)
def test_gradients_leave_during_backward_and_are_there_for_readers(
    stage, losses, reads, where, tmp_path
):
    native_adam.prepare()
    native_adam.wait()
    keys = {"stage": stage}
    plain, held = after_each_backward(keys, reads=reads, losses=losses)
    assert min(held) > 0
    with a_bus_between() if where == "host" else contextlib.nullcontext():
        place = {"device": "cpu"} if where == "host" else {"device": "nvme", "nvme_path": tmp_path}
        keys["offload_optimizer"] = place
        found, held = after_each_backward(keys, reads=reads, losses=losses)
    assert max(held) == 0
    assert len(found) == len(plain)
    assert all(map(torch.equal, found, plain))


@on_ranks(1)
def test_half_of_a_gradient_does_not_leave():
    keys = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    with a_bus_between():
        _, held = after_each_backward(keys, reads=False, losses=1)
    assert min(held) > 0


@on_ranks(1)
def test_an_error_of_the_worker_is_raised_where_its_unit_is_used(tmp_path):
    native_adam.prepare()
    native_adam.wait()
    model = torch.nn.Linear(64, 64)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    with a_bus_between() as streams, Engine(model, config=config) as engine:
        x = torch.ones(1, 64).bfloat16()
        for _ in range(2):
            engine.backward(engine(x).float().sum())
            engine.step()
        engine.backward(engine(x).float().sum())
        with mock.patch.object(streams, "h2d", side_effect=MemoryError("no room")):
            engine.step()
            with pytest.raises(MemoryError, match="no room"):
                engine(x)


def train_matrix(config: dict, *, steps: int) -> list[torch.Tensor]:
    """A bf16 matrix of 64 x 64 after each step, trained by SGD: simple enough to check by hand."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **config}
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, fused=True)
    with Engine(model, config=config, optimizer=optimizer) as engine:
        for step in range(steps):
            with GatheredParameters(model.weight):
                seen.append(model.weight.detach().clone())
            x = torch.full((1, 64), float(step + 1)).bfloat16()
            engine.backward(engine(x).float().sum())
            engine.step()
    return seen


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_two_bytes_an_element_cross_the_bus_each_way(stage):
    keys = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    with a_bus_between() as streams:
        train_matrix({"zero_optimization": keys}, steps=5)
    shard_nbytes, numbers_nbytes = 2 * 64 * 64 // 2, 3 * 8  # factor, overflow, edited
    assert streams.up_nbytes == 5 * shard_nbytes
    assert streams.down_nbytes == 5 * (shard_nbytes + numbers_nbytes)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_delayed_update_reaches_the_parameters_one_step_later(stage):
    keys = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    exact = train_matrix({"zero_optimization": keys}, steps=4)
    keys["offload_optimizer"]["delayed_update"] = True
    delayed = train_matrix({"zero_optimization": keys}, steps=5)
    # The gradient of this model does not depend on its parameters, so only the delay shows.
    assert torch.equal(delayed[0], exact[0])
    for late, on_time in zip(delayed[1:], exact, strict=True):
        assert torch.equal(late, on_time)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_edits_during_a_delayed_update_start_from_its_values_and_stay(stage):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "delayed_update": True},
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    with Engine(model, config=config, optimizer=optimizer) as engine:
        for step in range(3):  # every gradient is 1
            engine.backward(engine(torch.ones(1, 64).bfloat16()).float().sum())
            engine.step()
            with GatheredParameters(model.weight, modifier_rank=0), torch.no_grad():
                assert not step or model.weight.unique().tolist() == [7.0]
                model.weight.fill_(8)
        engine.backward(engine(torch.ones(1, 64).bfloat16()).float().sum())
        engine.step()
        for _, values in engine.iter_full_params():  # waits for the update
            assert values.unique().tolist() == [7.0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(2)
def test_an_optimizer_without_state_trains_with_its_state_on_disk(precision, tmp_path):
    """In fp32 the masters are the parameters: nothing is left that could be on disk."""
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    for stage in (1, 2, 3):
        weights = []
        for zero in (
            {},
            {"offload_optimizer": disk},
            {"offload_optimizer": disk, "offload_param": disk},
        ):
            if stage < 3 and "offload_param" in zero:
                continue
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(7, 5))
            sgd = {"type": "SGD", "params": {"lr": 0.1}}
            keys = {"stage": stage, **zero}
            with kit.engine(
                model, stage, precision, optimizer=sgd, zero_optimization=keys
            ) as engine:
                x = torch.linspace(0, 1, 18).view(2, 9).to(kit.DTYPES[precision])
                for _ in range(3):
                    engine.backward(engine(x).float().square().sum())
                    engine.step()
                weights.append([full.clone() for _, full in engine.iter_full_params()])
        for found in weights[1:]:
            for a, b in zip(found, weights[0], strict=True):
                assert torch.equal(a, b)
