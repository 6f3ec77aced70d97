"""The arguments of optimizers and schedules in a configuration.

There is one section per type that DeepSpeed knows by name. Other classes of ``torch.optim`` and
``torch.optim.lr_scheduler`` take their own arguments, which only torch can check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from zeroshard.config.fields import (
    Amount,
    Betas,
    Count,
    Flag,
    Float,
    Fraction,
    Int,
    Natural,
    PerGroup,
    Section,
    Text,
    accept,
    honour,
    later,
)


def required(doc: str) -> Any:
    """A field for an argument without a default."""
    return Field(description=doc, json_schema_extra={"verdict": "honour", "why": ""})


class AdamParams(Section):
    lr: Amount = honour(1e-3, "Learning rate.")
    betas: Betas = honour((0.9, 0.999), "Decay rates of the two moments.")
    eps: Amount = honour(1e-8, "Added to the denominator.")
    weight_decay: Amount = honour(
        0.0, "Weight decay. The default is 0.01 with torch_adam and AdamW."
    )
    bias_correction: Flag = honour(True, "Correct the bias of moments that start at zero.")
    amsgrad: Flag = honour(False, "Use the maximum of all second moments so far.")
    adam_w_mode: Flag = honour(True, "Decoupled weight decay. false (type Adam only): L2 penalty.")
    torch_adam: Flag = honour(False, "Use torch.optim.Adam or AdamW with the defaults of torch.")
    fp32_optimizer_states: Flag = honour(True, "The moments are fp32.")
    foreach: Flag | None = accept(None, "Chooses between two kernels.")
    fused: Flag | None = honour(None, "false: torch's fused kernel is not used.")
    set_grad_none: Flag | None = accept(None, "How gradients are cleared.")


class AdagradParams(Section):
    lr: Amount = honour(1e-2, "Learning rate.")
    eps: Amount = honour(1e-10, "Added to the denominator.")
    weight_decay: Amount = honour(0.0, "L2 penalty.")


class LionParams(Section):
    lr: Amount = honour(1e-3, "Learning rate.")
    betas: Betas = honour(
        (0.9, 0.999), "Weight of the momentum in the update, and decay rate of the momentum."
    )
    weight_decay: Amount = honour(0.0, "Decoupled weight decay.")


class MuonParams(Section):
    lr: Amount = honour(1e-3, "Learning rate if muon_lr or adam_lr is not given.")
    momentum: Fraction = honour(0.95, "Momentum for matrices.")
    weight_decay: Amount = honour(0.0, "Decoupled weight decay.")
    ns_method: Text | None = accept(
        None, "Order of the matrix products in the iteration. It does not change the result."
    )
    muon_lr: Amount | None = honour(None, "Learning rate of matrices. null: lr.")
    adam_lr: Amount | None = honour(None, "Learning rate of other parameters. null: lr.")
    betas: Betas = honour((0.9, 0.999), "Decay rates of the moments of other parameters.")
    eps: Amount = honour(1e-8, "Added to the denominator, for other parameters.")
    per_head_muon: Flag = later(False, "Treat each attention head as a separate matrix.")


class LambParams(Section):
    lr: Amount = honour(1e-3, "Learning rate.")
    betas: Betas = honour((0.9, 0.999), "Decay rates of the two moments.")
    eps: Amount = honour(1e-8, "Added to the denominator.")
    eps_inside_sqrt: Flag = honour(False, "Add eps before the square root is taken.")
    weight_decay: Amount = honour(0.0, "Weight decay. The trust ratio includes it.")
    bias_correction: Flag = honour(True, "Correct the bias of moments that start at zero.")
    max_coeff: Amount = honour(10.0, "Maximum trust ratio of a parameter.")
    min_coeff: Amount = honour(0.01, "Minimum trust ratio of a parameter.")
    amsgrad: Literal[False] = honour(False, "Only false: Lamb has no such variant.")


class SGDParams(Section):
    lr: Amount = honour(1e-3, "Learning rate.")
    momentum: Amount = honour(0.0, "Momentum.")
    dampening: Float = honour(0.0, "Dampening of the momentum.")
    weight_decay: Amount = honour(0.0, "L2 penalty.")
    nesterov: Flag = honour(False, "Nesterov momentum.")
    maximize: Flag = honour(False, "Maximize the loss instead of minimizing it.")
    foreach: Flag | None = accept(None, "Chooses between two kernels.")
    fused: Flag | None = honour(None, "false: torch's fused kernel is not used.")


class OptimizerRow(NamedTuple):
    """One optimizer that a configuration can name.

    ``arguments``: what ``optimizer.params`` may hold. ``made_by``: ``module:name`` of its class, or of a
    function ``(name, options, state_dtype) -> (class, options)`` that chooses one. It is text, since
    configurations are read without torch. ``narrow_state``: its state can have a narrower dtype than the
    parameters that it updates.
    """

    arguments: type[Section]
    made_by: str
    narrow_state: bool = False


OPTIMIZERS: dict[str, OptimizerRow] = {
    "Adam": OptimizerRow(AdamParams, "zeroshard.optim.factory:choose_adam", narrow_state=True),
    "AdamW": OptimizerRow(AdamParams, "zeroshard.optim.factory:choose_adam", narrow_state=True),
    "Adagrad": OptimizerRow(AdagradParams, "zeroshard.optim.factory:choose_adagrad"),
    "Lion": OptimizerRow(LionParams, "zeroshard.optim.optimizers:Lion"),
    "Lamb": OptimizerRow(LambParams, "zeroshard.optim.factory:choose_lamb"),
    "Muon": OptimizerRow(MuonParams, "zeroshard.optim.factory:choose_muon"),
    "SGD": OptimizerRow(SGDParams, "torch.optim:SGD"),
}
"""Every optimizer with declared arguments, one row each. Names match without regard to case, as in
DeepSpeed."""

TORCH_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop"),
    "SparseAdam",
)

UNAVAILABLE_OPTIMIZERS: dict[str, str] = {
    "MuAdam": "planned, not implemented yet; build it with the package mup and pass the object",
    "MuAdamW": "planned, not implemented yet; build it with the package mup and pass the object",
    "MuSGD": "planned, not implemented yet; build it with the package mup and pass the object",
    "OneBitAdam": "not supported: DeepSpeed has removed it; use AdamW",
    "OneBitLamb": "not supported: DeepSpeed has removed it; use AdamW",
    "ZeroOneAdam": "not supported: DeepSpeed has removed it; use AdamW",
}


class ScheduleParams(Section):
    last_batch_iteration: Int = honour(-1, "Index of the last update. -1: no update was made yet.")


class WarmupLRParams(ScheduleParams):
    warmup_min_lr: PerGroup = honour(
        0.0, "First learning rate. A list gives one number for each param group."
    )
    warmup_max_lr: PerGroup | None = honour(
        None, "Learning rate after the warm-up. null: the learning rate of the optimizer."
    )
    warmup_num_steps: Natural = honour(1000, "Number of steps of the warm-up, at least 2.")
    warmup_type: Text = honour("log", "Shape of the warm-up: log or linear.")


class WarmupDecayLRParams(WarmupLRParams):
    total_num_steps: Count = required("Number of optimizer steps in the whole run.")
    warmup_max_lr: PerGroup | None = honour(1e-3, "Learning rate after the warm-up.")


class WarmupCosineLRParams(ScheduleParams):
    total_num_steps: Count = required("Number of optimizer steps in the whole run.")
    warmup_min_ratio: Amount = honour(
        0.0, "First learning rate, as a fraction of the optimizer's learning rate."
    )
    warmup_num_steps: Natural = honour(1000, "Number of steps of the warm-up, at least 2.")
    cos_min_ratio: Amount = honour(
        1e-4, "Last learning rate, as a fraction of the optimizer's learning rate."
    )
    warmup_type: Text = honour("log", "Shape of the warm-up: log or linear.")


class LRRangeTestParams(ScheduleParams):
    lr_range_test_min_lr: PerGroup = honour(1e-3, "First learning rate.")
    lr_range_test_step_size: Count = honour(
        2000, "Number of steps after which the learning rate has grown by step_rate."
    )
    lr_range_test_step_rate: Float = honour(
        1.0, "Growth, as a fraction of the first learning rate."
    )
    lr_range_test_staircase: Flag = honour(False, "Grow in steps instead of linearly.")


class OneCycleParams(ScheduleParams):
    cycle_min_lr: PerGroup = required("Learning rate at the beginning and the end of the cycle.")
    cycle_max_lr: PerGroup = required("Learning rate at the maximum of the cycle.")
    decay_lr_rate: Amount = honour(0.0, "Decay rate of the learning rate after the cycle.")
    cycle_first_step_size: Count = honour(
        2000, "Number of steps in which the learning rate increases."
    )
    cycle_second_step_size: Natural | None = honour(
        None, "Number of steps in which it decreases. null: the same number."
    )
    cycle_first_stair_count: Natural = honour(
        0, "Number of stairs of the increase. 0: it is linear."
    )
    cycle_second_stair_count: Natural | None = honour(None, "Number of stairs of the decrease.")
    decay_step_size: Natural = honour(
        0, "Number of steps between two decays after the cycle. 0: no decay."
    )
    cycle_momentum: Flag = honour(
        True, "The momentum decreases while the learning rate increases, and the reverse."
    )
    cycle_min_mom: Fraction = honour(0.8, "Momentum at the maximum of the learning rate.")
    cycle_max_mom: Fraction = honour(0.9, "Momentum at the beginning and the end of the cycle.")
    decay_mom_rate: Amount = honour(0.0, "Growth rate of the momentum after the cycle.")


class ScheduleRow(NamedTuple):
    """One schedule that a configuration can name. ``arguments``: what ``scheduler.params`` may hold."""

    arguments: type[Section]


SCHEDULERS: dict[str, ScheduleRow] = {
    "WarmupLR": ScheduleRow(WarmupLRParams),
    "WarmupDecayLR": ScheduleRow(WarmupDecayLRParams),
    "WarmupCosineLR": ScheduleRow(WarmupCosineLRParams),
    "LRRangeTest": ScheduleRow(LRRangeTestParams),
    "OneCycle": ScheduleRow(OneCycleParams),
}

TORCH_SCHEDULERS = (
    *("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts"),
    *("CyclicLR", "ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR"),
    *("OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "SequentialLR", "StepLR"),
)


OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    section: {name: kind for kind, names in kinds.items() for name in names.split()}
    for section, kinds in {
        "optimizer": {
            "AdamW": "adamw_torch adamw_torch_fused adamw_hf fusedadamw adamw_apex_fused torch_adamw "
            "adamw_anyprecision adamw_8bit adamw_bnb_8bit paged_adamw_8bit paged_adamw "
            "paged_adamw_32bit",
            "Adam": "fusedadam cpuadam deepspeedcpuadam torch_adam",
            "Lamb": "fusedlamb deepspeedcpulamb",
            "Lion": "fusedlion cpulion deepspeedcpulion lion_32bit",
            "Adagrad": "cpuadagrad deepspeedcpuadagrad",
        },
        "scheduler": {
            "WarmupCosineLR": "cosine cosine_with_min_lr cosine_warmup",
            "WarmupDecayLR": "linear linear_with_warmup",
            "WarmupLR": "constant_with_warmup warmup",
            "CosineAnnealingWarmRestarts": "cosine_with_restarts",
            "ConstantLR": "constant",
            "PolynomialLR": "polynomial",
            "StepLR": "step",
            "ExponentialLR": "exponential",
            "MultiStepLR": "multistep",
            "CosineAnnealingLR": "cosineannealing",
        },
    }.items()
}
"""Section -> names that other libraries have for a type, in small letters -> the type that is meant."""


ARGUMENTS: Mapping[str, Mapping[str, OptimizerRow | ScheduleRow]] = {
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
}
"""Section -> its types, with the arguments that each takes."""
