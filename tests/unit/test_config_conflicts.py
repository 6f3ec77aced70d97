"""Contradictions of the configuration are reported with the right text, and nothing else is reported."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace

import pytest
import torch

from zeroshard.config import load_config
from zeroshard.deepspeed import conflicts
from zeroshard.engine.optimizer_step import Accumulation
from zeroshard.parallel import MoE
from zeroshard.precision.policy import Policy, policy_from

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def policy(**sections: object) -> Policy:
    return policy_from(
        load_config({"train_micro_batch_size_per_gpu": 1, **sections}, world_size=1).config
    )


FP16 = {"fp16": {"enabled": True}}
BF16_ON = {"bf16": {"enabled": True}}

# ---------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("dtypes", "config"),
    [
        ({F32: 8}, {}),
        ({F32: 8}, FP16),
        ({F32: 8}, BF16_ON),
        ({BF16: 8}, BF16_ON),
        ({F16: 8}, FP16),
        ({F16: 8}, BF16_ON),
        ({torch.float64: 8}, {}),
        ({}, {}),
    ],
)
def test_a_model_that_loses_nothing_is_not_mentioned(dtypes, config):
    assert conflicts.precision_notice(dtypes, policy(**config)) == ""


@pytest.mark.parametrize(
    ("dtypes", "word", "mode"),
    [
        ({BF16: 1200}, "bfloat16", "bf16"),
        ({F16: 1200, F32: 5000}, "float16", "fp16"),
        ({F16: 7, BF16: 1200}, "bfloat16", "bf16"),
    ],
)
def test_trained_16_bit_parameters_without_masters_are_told(dtypes, word, mode):
    assert conflicts.precision_notice(dtypes, policy()) == (
        f"1,200 trained elements of the model are {word}, and the configuration enables neither "
        f"bf16 nor fp16. They are updated in {word}, so small updates are lost to rounding. Write "
        f'"{mode}": {{"enabled": true}} for float32 masters, or load the model in float32.'
    )


def test_a_bfloat16_model_in_fp16_is_told():
    assert conflicts.precision_notice({BF16: 12}, policy(**FP16)) == (
        "12 trained elements of the model are bfloat16, and the configuration enables fp16. In "
        "fp16, weights and activations above 65504 are infinite. Train models made for bfloat16 "
        'with "bf16": {"enabled": true}.'
    )


def test_only_trained_floating_parameters_count():
    def unit(trainable: bool, **numels: int) -> SimpleNamespace:
        slots = [SimpleNamespace(fqn=name, numel=numel) for name, numel in numels.items()]
        return SimpleNamespace(
            trainable=trainable, layout=SimpleNamespace(slots=slots), params=[*numels]
        )

    came_in = {"base": BF16, "adapter": F32, "gate": BF16, "codes": torch.int8}
    units = [unit(False, base=100), unit(True, adapter=8, gate=2, codes=5)]
    assert conflicts.trained_dtypes(came_in, units) == {F32: 8, BF16: 2}


def test_the_dtype_of_an_expert_is_found_under_another_number():
    layer = MoE(4, torch.nn.Linear(4, 4), 4)
    came_in = conflicts.dtypes_by_name(torch.nn.ModuleDict({"moe": layer.bfloat16()}))
    name = "moe.deepspeed_moe.experts.deepspeed_experts.7.weight"
    slots = [SimpleNamespace(fqn=name, numel=16)]
    unit = SimpleNamespace(trainable=True, layout=SimpleNamespace(slots=slots))
    assert conflicts.trained_dtypes(came_in, [unit]) == {BF16: 16}


# ---------------------------------------------------------------------- who wrote a number


@pytest.fixture
def accelerate_passes(monkeypatch):
    """Of two plugins, the second passes a configuration."""

    def passing(config: dict, wrapper: str = "HfDeepSpeedConfig", alone: bool = False) -> None:
        plugin = SimpleNamespace(deepspeed_config=config, hf_ds_config=type(wrapper, (), {})())
        other = SimpleNamespace(deepspeed_config={}, hf_ds_config=None)
        shared = {"deepspeed_plugins": plugin if alone else {"a": other, "b": plugin}}
        module = ModuleType("accelerate.state")
        module.AcceleratorState = SimpleNamespace(_shared_state=shared)
        monkeypatch.setitem(sys.modules, "accelerate.state", module)

    return passing


@pytest.mark.parametrize("alone", [True, False])
def test_only_values_that_the_error_names_are_explained(accelerate_passes, alone):
    config: dict = {}
    accelerate_passes(config, alone=alone)
    assert conflicts.writers("train_micro_batch_size_per_gpu 4 is wrong", config) == (
        '(where the file says "auto", Accelerate filled in train_micro_batch_size_per_gpu from the '
        "DataLoader's batch_size)"
    )
    assert conflicts.writers("zero_optimization.stage is wrong", config) == ""


def test_the_trainer_has_its_own_sources(accelerate_passes):
    config: dict = {}
    accelerate_passes(config, "HfTrainerDeepSpeedConfig")
    assert conflicts.writers("optimizer.params.lr: no", config) == (
        '(where the file says "auto", the Trainer filled in optimizer.params.lr from learning_rate)'
    )


def test_a_configuration_of_the_program_s_own_is_nobody_s_but_its(accelerate_passes, monkeypatch):
    accelerate_passes({})
    assert conflicts.writers("train_micro_batch_size_per_gpu", {}) == ""
    assert conflicts.writers("train_micro_batch_size_per_gpu", None) == ""
    monkeypatch.setitem(sys.modules, "accelerate.state", None)
    assert conflicts.writers("train_micro_batch_size_per_gpu", {}) == ""


# ---------------------------------------------------------------------- short steps


def said(
    steps: Iterable[int], *, gas: int = 4, declares: bool = True, divides: bool = True
) -> list[str]:
    """The messages of several steps, each with the given number of backwards."""
    look, accumulation, lines = conflicts.ShortSteps(), Accumulation(gas, managed=True), []
    for backwards in steps:
        for at in range(backwards):
            accumulation.declared = at + 1 == backwards if declares else None
            look.saw_backward(divides=divides)
            if accumulation.declared is not False:  # Accelerate steps at boundaries alone
                lines.append(look.saw_step(accumulation))
                accumulation.advance()
        accumulation.restart()
    return [line for line in lines if line]


def test_a_loop_that_steps_at_every_backward_is_told_once():
    assert said([1] * 9) == [
        "3 steps in a row had 1 backward(s), and each loss was divided by "
        "gradient_accumulation_steps=4: gradients are too small. Accumulate gradients (with "
        "Accelerate: inside accelerator.accumulate(model)), or set gradient_accumulation_steps to "
        "the number of backwards in a step."
    ]


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        ([4] * 9, {}),
        ([4, 4, 1] * 5, {}),  # the last step of each epoch is short
        ([1] * 9, {"gas": 1}),
        ([1] * 9, {"divides": False}),  # the Trainer divides by the number that it sums
        ([8] * 5, {}),
        ([4] * 9, {"declares": False}),
        ([1, 1], {}),
    ],
)
def test_legal_loops_are_left_alone(steps, options):
    assert said(steps, **options) == []
