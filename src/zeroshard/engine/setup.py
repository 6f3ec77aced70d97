"""In which order is an engine put together? Configuration, ranks, plan, agreement, memory, helpers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.collectives import Comm
from zeroshard.comm.env import Place, current_place, init_distributed, local_device
from zeroshard.comm.watch import Watch, open_watch
from zeroshard.config import Config, LoadedConfig, load_config
from zeroshard.config.resolve import leaves
from zeroshard.engine import build
from zeroshard.engine.accumulate import Accumulation
from zeroshard.engine.monitors import Monitors, build_monitors
from zeroshard.engine.optimizers import build_optimizer
from zeroshard.engine.schedulers import build_scheduler
from zeroshard.errors import UsageError
from zeroshard.precision.policy import Policy, policy_from
from zeroshard.precision.scaler import LossScaler, scaler_from
from zeroshard.zero.unit import Unit


@dataclass(eq=False)
class Parts:
    """Everything an engine is made of."""

    loaded: LoadedConfig
    place: Place
    device: torch.device
    policy: Policy
    comm: Comm
    watch: Watch
    runtime: build.Runtime
    scaler: LossScaler
    scheduler: Any
    accumulation: Accumulation
    monitors: Monitors | None


def assemble(
    model: nn.Module,
    *,
    config: Any,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    lr_scheduler: Any,
    device: torch.device | str | None,
) -> Parts:
    """Build all parts. Collective; ranks compare their plans before the first bytes move."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is a {type(model).__name__}, not a torch.nn.Module. Pass the model itself."
        )
    init_distributed()
    place = current_place()
    loaded = load_config(config, world_size=place.world_size, hidden_size=hidden_size(model))
    settings = loaded.config
    target = torch.device(device) if device is not None else local_device(place)
    policy = policy_from(settings)

    inner = make_optimizer(model, optimizer, model_parameters, settings, target)
    found = build.probed(inner) if inner is not None else None
    specs = build.plan_units(model, settings, policy, inner, world_size=place.world_size)

    watch = open_watch(
        transport=settings.transport,
        device_type=target.type,
        trust=settings.trust,
        plan={"units": build.layout_digest(specs), **dict(_flat(settings))},
    )
    accumulation = Accumulation(
        settings.gradient_accumulation_steps or 1, managed=settings.managed_gradient_accumulation
    )
    runtime = build.build_runtime(
        model,
        specs,
        settings,
        optimizer=inner,
        found=found,
        gather_comm=watch.gathers,
        reduce_comm=watch.reductions,
        device=target,
        expects_accumulation=accumulation.expects_more,
    )
    for at, buffer in enumerate(build.place_buffers(model, policy.buffer, target)):
        watch.gathers.broadcast(buffer, 0, name=f"buffer {at}").wait()
    scheduler = make_scheduler(lr_scheduler, inner, settings)
    monitors = build_monitors(settings) if place.rank == 0 else None
    return Parts(
        loaded, place, target, policy, watch.gathers, watch, runtime,
        scaler_from(settings, target), scheduler, accumulation, monitors,
    )  # fmt: skip


def _flat(config: Config) -> Iterable[tuple[str, str]]:
    return ((key, repr(value)) for key, value in leaves(config))


def hidden_size(model: nn.Module) -> int | None:
    """The model's width, if its config says so: DeepSpeed's ``"auto"`` sizes depend on it."""
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        size = getattr(holder, "hidden_size", None)
        sizes = getattr(holder, "hidden_sizes", None)
        if isinstance(size, int):
            return size
        if sizes:
            return int(max(sizes))
    return None


def make_optimizer(
    model: nn.Module,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    config: Config,
    device: torch.device,
) -> torch.optim.Optimizer | None:
    """The optimizer over the model's own parameters: the object given, or the one in the config.

    ``model_parameters``: parameters or param-group dicts, default all that require a gradient.
    Raises :class:`UsageError` for an object that is no optimizer, or one in both places.
    """
    given = list(model_parameters) if model_parameters is not None else []
    params = given or [p for p in model.parameters() if p.requires_grad]
    if optimizer is not None:
        if config.optimizer is not None:
            raise UsageError(
                f'an optimizer object was passed and the config names "{config.optimizer.type}". Only '
                'one can act: drop the argument or the "optimizer" section.'
            )
        made = optimizer(params) if callable(optimizer) else optimizer
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer is a {type(made).__name__}, not a torch.optim.Optimizer. Pass an optimizer "
                "object, or a function that makes one from parameters."
            )
        return made
    if config.optimizer is None:
        return None
    if not params:
        raise UsageError(
            f'the config names the optimizer "{config.optimizer.type}", but no parameter of the model '
            "requires a gradient."
        )
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    return build_optimizer(config.optimizer.type, config.optimizer.params, groups, fused=True)


def make_scheduler(
    given: Any, optimizer: torch.optim.Optimizer | None, config: Config
) -> Any:
    """The schedule object: the one given, made by a callable, or named in the config."""
    if given is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise UsageError("a learning-rate schedule needs an optimizer; none was given or named.")
    if given is None:
        assert config.scheduler is not None
        return build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
    if config.scheduler is not None:
        raise UsageError(
            f'a scheduler was passed and the config names "{config.scheduler.type}". Only one can act: '
            'drop the argument or the "scheduler" section.'
        )
    made = given if hasattr(given, "step") else given(optimizer) if callable(given) else given
    if not hasattr(made, "step"):
        raise UsageError(f"lr_scheduler is a {type(given).__name__} without a step() method.")
    return made


# ---------------------------------------------------------------------- small pure helpers


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a nested structure in ``dtype``; everything else as it is."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: cast_floats(value, dtype) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(cast_floats(item, dtype) for item in tree)
    return tree


def is_fake(tensor: Tensor | None) -> bool:
    """A tensor without values: planning, not training."""
    return isinstance(tensor, FakeTensor)


def read_flag(flag: Tensor) -> bool | None:
    """The value of a 0-dim flag if the host can know it without waiting, else None."""
    if is_fake(flag) or flag.device.type != "cpu":
        return None
    return bool(flag)


def widest(units: Sequence[Unit]) -> torch.dtype:
    """fp64 if anything trains in fp64, else fp32."""
    masters = {unit.row.master for unit in units if unit.trainable}
    return torch.float64 if torch.float64 in masters else torch.float32


def schedule_snapshot(scheduler: Any, groups: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """What has to be restored if the update turns out to have been skipped."""
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return scheduler.state_dict(), options


def schedule_restore(scheduler: Any, groups: list[dict[str, Any]], snapshot: Any) -> None:
    """Undo one advance of the schedule."""
    state, options = snapshot
    scheduler.load_state_dict(state)
    for group, saved in zip(groups, options, strict=True):
        group.update(saved)

