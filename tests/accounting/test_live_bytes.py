"""Plan, ledger and real allocations agree with each other and with the formulas of the ZeRO paper."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from census import Stack, assert_plan_is_real, everything_alive, planned, stack_config
from support.edge_case_models import BATCH, CASES, Case
from support.parity import cast_batch, make_batches
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.config.params import OPTIMIZERS as DECLARED

STAGES = (0, 1, 2, 3)
STEP_NBYTES = 4  # Adam counts the steps of every fragment


def bytes_per_parameter(
    stage: int, world: int, precision: str, accumulation: int
) -> dict[str, float]:
    """Section 3.1 of the ZeRO paper: 2 + 2 + 12 bytes in 16 bit, 4 + 4 + 8 in fp32."""
    low = 4 if precision == "fp32" else 2
    return {
        "parameters": low / (world if stage >= 3 else 1),
        "gradients": (4 if accumulation > 1 else low) / (world if stage >= 2 else 1),
        "master": (0 if precision == "fp32" else 4) / (world if stage >= 1 else 1),
        "optimizer": 8 / (world if stage >= 1 else 1),
    }


ALL = [("bf16", 1), ("bf16", 3), ("fp16", 1), ("fp32", 3)]


def stack_bytes_equal_the_formula(precisions: list[tuple[str, int]]) -> None:
    for stage in STAGES:
        for precision, accumulation in precisions:
            before = everything_alive()
            model = Stack()
            numel = sum(p.numel() for p in model.parameters())
            with Engine(model, config=stack_config(stage, precision, accumulation)) as engine:
                assert_plan_is_real(engine, before)
                optimizer = engine.runtime.optimizer
                fragments = sum(len(shard.fragments) for shard in optimizer.shards)
                formula = {
                    category: per_parameter * numel
                    for category, per_parameter in bytes_per_parameter(
                        stage, engine.dp_size, precision, accumulation
                    ).items()
                }
                formula["optimizer"] += STEP_NBYTES * fragments
                assert planned(engine) == formula
            del model, engine, optimizer


@on_ranks(1)
def test_one_rank_holds_what_the_paper_says():
    stack_bytes_equal_the_formula(ALL)


@pytest.mark.smoke
@on_ranks(2)
def test_two_ranks_hold_what_the_paper_says():
    stack_bytes_equal_the_formula(ALL)


@on_ranks(3)
def test_three_ranks_hold_what_the_paper_says():
    stack_bytes_equal_the_formula([("bf16", 1), ("fp32", 3)])


# ---------------------------------------------------------------------- padding and awkward models


def micro_of(case: Case, dtype: torch.dtype, engine: Engine) -> None:
    (((batch, *_),),) = make_batches(case, steps=1, world=1)
    engine.backward(case.loss(engine, cast_batch(batch, dtype, engine.device)))


def check_case(name: str, config: dict, dtype: torch.dtype = torch.float32, optimizer=None) -> None:
    case = CASES[name]
    for stage in STAGES:
        before = everything_alive()
        model = case.build()
        whole = {
            "train_micro_batch_size_per_gpu": BATCH,
            "units": "auto" if name == "complex" else ["Block"],
            **case.config,
            **config,
            "zero_optimization": {"stage": stage},
        }
        with Engine(model, config=whole, optimizer=optimizer) as engine:
            assert_plan_is_real(engine, before, micro=partial(micro_of, case, dtype))
        del model, engine


AWKWARD = ["mlp", "frozen", "lora", "shared_block", "scalars", "empty", "checkpointed", "complex"]
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize("name", AWKWARD)
@on_ranks(3)
def test_padding_frozen_and_tied_parameters_are_planned(name):
    check_case(name, {**ADAMW, "bf16": {"enabled": True}}, torch.bfloat16)


@on_ranks(2)
def test_parameters_kept_in_fp32_are_planned():
    config = {**ADAMW, "bf16": {"enabled": True}, "keep_fp32": ["*.norm.*"]}
    check_case("mlp", config, torch.bfloat16)


OPTIMIZERS = {
    "Adam": {"lr": 1e-3},
    "SGD": {"lr": 1e-3},
    "SGD with momentum": {"lr": 1e-3, "momentum": 0.9},
    "Adagrad": {"lr": 1e-3},
    "Lion": {"lr": 1e-3},
    "RMSprop": {"lr": 1e-3, "centered": True, "momentum": 0.9},
    "NAdam": {"lr": 1e-3},
    "RAdam": {"lr": 1e-3},
    "Adamax": {"lr": 1e-3},
    "Adadelta": {"lr": 1e-3},
    "ASGD": {"lr": 1e-3},
    "Rprop": {"lr": 1e-3},
    "Muon": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3},
    "Lamb": {"lr": 1e-3},
}


def test_the_table_has_every_optimizer_with_declared_arguments():
    assert {name.split()[0] for name in OPTIMIZERS} >= DECLARED.keys()


@pytest.mark.parametrize("which", OPTIMIZERS)
@on_ranks(2)
def test_the_state_of_every_optimizer_is_planned(which):
    section = {"type": which.split()[0], "params": OPTIMIZERS[which]}
    check_case("mlp", {"optimizer": section})


@on_ranks(2)
def test_param_groups_with_different_state_are_planned():
    def factory(params):
        first, *rest = params
        groups = [{"params": [first], "amsgrad": True}, {"params": rest}]
        return torch.optim.AdamW(groups, lr=1e-3, foreach=False)

    check_case("mlp", {"bf16": {"enabled": True}}, torch.bfloat16, factory)


@on_ranks(2)
def test_a_model_of_two_dtypes_is_planned():
    for stage in STAGES:
        before = everything_alive()
        model = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 30, dtype=torch.float64))

        def micro(engine):
            x = engine.module[0](torch.ones(2, 70))
            engine.backward(engine.module[1](x.double()).square().mean())

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            **ADAMW,
        }
        with Engine(model, config=config) as engine:
            assert_plan_is_real(engine, before, micro=micro)
        del model, engine, micro
