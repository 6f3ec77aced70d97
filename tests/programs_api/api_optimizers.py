"""Programs around the optimizer and the schedules of its learning rate."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from typing import Any

import torch
from api_rows import NOT_APPLICABLE, Program, named, row, sgd
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# ---------------------------------------------------------------------- Optimizer


@row("Optimizer.step", raises=r"engine\.step\(\)")
def optimizer_step_by_the_program(p: Program) -> None:
    p.backward()
    p.optimizer.step()


@row("Optimizer.step", raises=r"engine\.step\(\)")
def optimizer_step_with_a_closure(p: Program) -> None:
    p.optimizer.step(lambda: p.loss().backward())


@row("Optimizer.zero_grad")
def optimizer_zero_grad_drops_a_batch(p: Program) -> None:
    p.train()
    p.backward(7)
    p.optimizer.zero_grad()
    p.train(2)


@row("Optimizer.zero_grad")
def optimizer_zero_grad_before_and_after(p: Program) -> None:
    for at in range(3):
        p.optimizer.zero_grad()
        p.backward(at)
        p.step()
        p.optimizer.zero_grad(set_to_none=False)


@row("Optimizer.zero_grad")
def optimizer_zero_grad_leaves_zeros(p: Program) -> None:
    p.train()
    p.backward(7)
    p.optimizer.zero_grad(set_to_none=False)
    p.backward(1)
    p.step()


@row("Optimizer.state_dict Optimizer.load_state_dict")
def optimizer_state_goes_back_into_it(p: Program) -> None:
    p.train(2)
    p.optimizer.load_state_dict(p.optimizer.state_dict())
    p.train(2)


@row("Optimizer.state_dict Optimizer.load_state_dict")
def optimizer_goes_back_to_a_copy_of_its_state(p: Program) -> None:
    p.train(2)
    kept = copy.deepcopy(p.optimizer.state_dict())
    p.train(1, first=5)
    p.optimizer.load_state_dict(kept)
    p.train(1)


@row("Optimizer.state_dict Optimizer.load_state_dict")
def optimizer_loads_another_learning_rate(p: Program) -> Any:
    p.train()
    state = p.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    p.optimizer.load_state_dict(state)
    p.train()
    return [group["lr"] for group in p.optimizer.param_groups]


@row("Optimizer.load_state_dict", raises=r"(?i)parameter group|param.?group")
def optimizer_loads_state_with_more_groups(p: Program) -> None:
    state = p.optimizer.state_dict()
    state["param_groups"] = state["param_groups"] * 2
    p.optimizer.load_state_dict(state)
    p.train()


@row("Optimizer.state_dict")
def optimizer_state_dict_lists_the_options(p: Program) -> Any:
    p.train()
    groups = p.optimizer.state_dict()["param_groups"]
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


@row("Optimizer.add_param_group", raises=r"(?i)param.?group")
def optimizer_gets_a_group(p: Program) -> None:
    p.train()
    p.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4).double())]})
    p.train()


@row("Optimizer.register_step_pre_hook")
def optimizer_pre_hook_sets_the_learning_rate(p: Program) -> Any:
    calls = []

    def warm(optimizer: Any, args: Any, kwargs: Any) -> None:
        calls.append(len(args))
        optimizer.param_groups[0]["lr"] = 0.01 * len(calls)

    p.optimizer.register_step_pre_hook(warm)
    p.train(3)
    return len(calls)


@row("Optimizer.register_step_post_hook")
def optimizer_post_hook_runs_once_a_step(p: Program) -> Any:
    calls = []
    handle = p.optimizer.register_step_post_hook(lambda *a: calls.append(1))
    p.train(2)
    handle.remove()
    p.train()
    return len(calls)


@row("Optimizer.OptimizerPreHook Optimizer.OptimizerPostHook")
def hooks_of_all_optimizers_run_once_a_step(p: Program) -> Any:
    before, after = [], []
    handles = [
        register_optimizer_step_pre_hook(lambda *a: before.append(1)),
        register_optimizer_step_post_hook(lambda *a: after.append(1)),
    ]
    try:
        p.train(2)
    finally:
        for handle in handles:
            handle.remove()
    return len(before), len(after)


@row("Optimizer.register_step_pre_hook")
def parameter_is_frozen_between_steps_with_a_hook(p: Program) -> int:
    """With a hook, one call of the optimizer's own step updates all that a rank has."""
    seen: list[int] = []
    handle = p.optimizer.register_step_pre_hook(lambda *a: seen.append(1))
    p.train()
    p.module.second.weight.requires_grad_(False)
    p.module.first.bias.requires_grad = False
    p.train(2)
    p.module.second.weight.requires_grad_(True)
    p.train(1)
    handle.remove()
    return len(seen)


@row("Optimizer.register_state_dict_pre_hook Optimizer.register_state_dict_post_hook")
def optimizer_hooks_of_state_dict(p: Program) -> Any:
    calls = []
    p.optimizer.register_state_dict_pre_hook(lambda *a: calls.append("pre"))
    p.optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "mine": 1})
    return calls, p.optimizer.state_dict()["mine"], calls


@row("Optimizer.register_load_state_dict_pre_hook Optimizer.register_load_state_dict_post_hook")
def optimizer_hooks_of_load_state_dict(p: Program) -> Any:
    calls = []
    p.train()
    p.optimizer.register_load_state_dict_pre_hook(lambda *a: calls.append("pre"))
    p.optimizer.register_load_state_dict_post_hook(lambda *a: calls.append("post"))
    p.optimizer.load_state_dict(p.optimizer.state_dict())
    p.train()
    return calls


NOT_APPLICABLE["Optimizer.profile_hook_step"] = "decorates step() of a class when it is defined"


@row()
def optimizer_options_change_between_steps(p: Program) -> None:
    p.train()
    p.optimizer.param_groups[0].update(lr=0.3, betas=(0.5, 0.6), weight_decay=0.2)
    p.train(2)


@row()
def optimizer_learning_rate_is_a_tensor(p: Program) -> None:
    p.train()
    p.optimizer.param_groups[0]["lr"] = torch.tensor(0.3, dtype=torch.float64)
    p.train(2)


@row()
def optimizer_option_of_the_program(p: Program) -> Any:
    p.optimizer.param_groups[0]["label"] = "all"
    p.train()
    return p.optimizer.param_groups[0]["label"]


@row()
def optimizer_groups_are_replaced_by_a_copy(p: Program) -> None:
    p.train()
    p.optimizer.param_groups = [dict(group, lr=0.3) for group in p.optimizer.param_groups]
    p.train(2)


@row(optimizer=sgd, raises="param_groups was written")
def optimizer_parameters_of_groups_are_written(p: Program) -> None:
    p.train()
    with torch.no_grad():
        for group in p.optimizer.param_groups:
            for param in group["params"]:
                param.mul_(0.5)
    p.train()


@row()
def optimizer_state_is_cleared(p: Program) -> None:
    p.train(2)
    p.optimizer.state.clear()
    p.train()


@row()
def optimizer_state_is_replaced(p: Program) -> None:
    p.train(2)
    p.optimizer.state = defaultdict(dict)
    p.train()


@row(raises=r"safe_get_full_optimizer_state")
def optimizer_state_of_a_parameter(p: Program) -> Any:
    p.train(2)
    return [p.optimizer.state[q]["exp_avg"] for q in p.model.parameters()]


@row()
def optimizer_state_is_halved(p: Program) -> None:
    p.train(2)
    for state in p.optimizer.state.values():
        state["exp_avg"].mul_(0.5)
    p.train()


@row(raises=r"(?i)param.?group")
def optimizer_loses_a_group(p: Program) -> None:
    p.train()
    p.optimizer.param_groups.clear()
    p.train()


@row()
def optimizer_is_printed(p: Program) -> Any:
    return repr(p.optimizer)


@row()
def optimizer_defaults(p: Program) -> Any:
    p.optimizer.defaults["lr"] = 9.0
    p.train()
    return p.optimizer.defaults["betas"]


@row()
def optimizer_is_pickled_and_steps(p: Program) -> None:
    p.train()
    pickle.loads(pickle.dumps(p.optimizer)).step()


class Warm(torch.optim.AdamW):
    """Sets its learning rate from a counter of its own."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)


@row(optimizer=lambda params: Warm(params, lr=0.1, eps=1e-3))
def optimizer_counts_its_steps(p: Program) -> Any:
    p.train(3)
    return p.optimizer.count


class GroupCounter(torch.optim.SGD):
    """Keeps a counter in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


@row(optimizer=lambda params: GroupCounter(params, lr=0.1))
def optimizer_counts_in_its_groups(p: Program) -> Any:
    p.train(3)
    return p.optimizer.param_groups[0]["k"]


# ---------------------------------------------------------------------- optimizers of torch

_REFUSED = {
    "Adafactor": "Adafactor",
    "LBFGS": "(?i)lbfgs|closure",
    "SparseAdam": "(?i)sparse",
    "Muon": "(?i)2-?D",
}


def _with_class(name: str) -> None:
    def program(p: Program) -> None:
        p.train(3)

    def make(params: Any) -> torch.optim.Optimizer:
        options = {"eps": (None, 1e-3)} if name == "Adafactor" else {}
        if name == "Muon":
            params = [param for param in params if param.ndim == 2]
        return getattr(torch.optim, name)(params, lr=1e-2, **options)

    row(f"optim.{name}", optimizer=make, raises=_REFUSED.get(name), close=1e-9)(
        named(program, f"optimizer_class_{name}")
    )


for _name in torch.optim.__all__:
    if isinstance(getattr(torch.optim, _name), type) and _name != "Optimizer":
        _with_class(_name)
NOT_APPLICABLE["optim.Optimizer"] = "the base class; its methods have rows"
NOT_APPLICABLE["optim.lr_scheduler"] = "a module; its names have rows"
NOT_APPLICABLE["optim.swa_utils"] = "a module; its names have rows"
NOT_APPLICABLE["optim.swap_in_optimizer_params_and_state"] = "for torch.compile of a whole step"

# ---------------------------------------------------------------------- schedules

_ARGUMENTS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": lambda at: 1 / (at + 1)},
    "MultiplicativeLR": {"lr_lambda": lambda at: 0.7},
    "StepLR": {"step_size": 1},
    "MultiStepLR": {"milestones": [1, 2]},
    "ConstantLR": {"total_iters": 2},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 3},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 5},
    "PolynomialLR": {"total_iters": 3},
}


def _with_schedule(name: str) -> None:
    def program(p: Program) -> Any:
        schedule = getattr(lr_scheduler, name)(p.optimizer, **_ARGUMENTS[name])
        seen = []
        for at in range(3):
            p.train(first=at)
            schedule.step()
            seen.append(schedule.get_last_lr())
        return seen

    covers = f"lr_scheduler.{name} LRScheduler.step LRScheduler.get_last_lr"
    row(covers)(named(program, f"schedule_{name}"))


for _name in _ARGUMENTS:
    _with_schedule(_name)
NOT_APPLICABLE["lr_scheduler.LRScheduler"] = "the base class; its methods have rows"


@row("lr_scheduler.SequentialLR")
def schedule_of_two_after_one_another(p: Program) -> Any:
    parts = [lr_scheduler.ConstantLR(p.optimizer), lr_scheduler.ExponentialLR(p.optimizer, 0.5)]
    schedule = lr_scheduler.SequentialLR(p.optimizer, parts, milestones=[1])
    for at in range(3):
        p.train(first=at)
        schedule.step()
    return schedule.get_last_lr()


@row("lr_scheduler.ChainedScheduler")
def schedule_of_two_at_once(p: Program) -> Any:
    parts = [lr_scheduler.ConstantLR(p.optimizer), lr_scheduler.ExponentialLR(p.optimizer, 0.5)]
    schedule = lr_scheduler.ChainedScheduler(parts)
    for at in range(3):
        p.train(first=at)
        schedule.step()
    return schedule.get_last_lr()


@row("lr_scheduler.ReduceLROnPlateau")
def schedule_by_the_loss(p: Program) -> Any:
    schedule = lr_scheduler.ReduceLROnPlateau(p.optimizer, patience=0)
    for at in range(3):
        loss = p.loss(at)
        loss.backward()
        p.step()
        schedule.step(round(p.mean(loss).item(), 6))
    return p.optimizer.param_groups[0]["lr"]


@row("LRScheduler.state_dict LRScheduler.load_state_dict LRScheduler.get_lr")
def schedule_goes_into_another(p: Program) -> Any:
    schedule = lr_scheduler.StepLR(p.optimizer, 1, gamma=0.5)
    p.train()
    schedule.step()
    other = lr_scheduler.StepLR(p.optimizer, 1, gamma=0.9)
    other.load_state_dict(schedule.state_dict())
    p.train()
    other.step()
    p.train()
    return other.get_last_lr(), other.state_dict()["last_epoch"], other.get_lr()


@row("swa_utils.SWALR")
def schedule_of_averaging(p: Program) -> Any:
    schedule = swa_utils.SWALR(p.optimizer, swa_lr=0.05, anneal_epochs=2)
    for at in range(3):
        p.train(first=at)
        schedule.step()
    return schedule.get_last_lr()
