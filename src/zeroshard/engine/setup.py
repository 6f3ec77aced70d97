"""In which order is an engine put together? Configuration, ranks, plan, agreement, memory, helpers."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.collectives import Comm
from zeroshard.comm.env import RankInfo, current_rank_info, own_device, rank_info_of
from zeroshard.config import Config, LoadedConfig, load_config
from zeroshard.engine import build
from zeroshard.engine.accumulate import Accumulation
from zeroshard.engine.arguments import check_model, parameter_list, schedule_over
from zeroshard.engine.monitors import Monitors, build_monitors
from zeroshard.errors import UsageError, in_short
from zeroshard.offload.copy_streams import choose_device
from zeroshard.optim.factory import Probe, build_optimizer
from zeroshard.optim.schedulers import build_scheduler
from zeroshard.precision.hardware import hardware_of
from zeroshard.precision.loss_scaler import LossScaler, scaler_from
from zeroshard.precision.policy import Policy, policy_from
from zeroshard.precision.slow_dtype import tell_if_slow
from zeroshard.watchdog.join import init_distributed
from zeroshard.watchdog.session import CommSession, decline, open_session
from zeroshard.zero.unit import Unit


@dataclass(eq=False)
class EngineParts:
    """Everything an engine is made of."""

    loaded: LoadedConfig
    place: RankInfo
    device: torch.device
    policy: Policy
    comm: Comm
    watch: CommSession
    runtime: build.ZeroRuntime
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
    as_deepspeed: bool = False,
) -> EngineParts:
    """Build all parts. Collective; ranks compare their plans before the first bytes move.

    ``as_deepspeed``: see :func:`load_config`.
    """
    check_model(model)
    if rank_info_of().world_size > 1:  # one process needs no group, no port and no other backend
        init_distributed()
    place = current_rank_info()
    try:
        draft = _draft(
            model, place, config=config, optimizer=optimizer, model_parameters=model_parameters,
            lr_scheduler=lr_scheduler, device=device, as_deepspeed=as_deepspeed,
        )  # fmt: skip
    except Exception as error:
        decline(f"{type(error).__name__}: {_first_fact(error)}")  # others would wait for this rank
        raise
    settings, target = draft.loaded.config, draft.device
    choose_device(target)  # events are recorded, and kernels queued, on the current device
    watch = open_session(
        transport=settings.transport,
        device_type=target.type,
        trust=settings.trust,
        plan={"units": build.layout_digest(draft.specs), **draft.loaded.agreed()},
    )
    if place.rank == 0 and target.type == "cpu" and watch.gathers.transport != "fake":
        tell_if_slow(draft.policy, hardware_of(target))
    accumulation = Accumulation(
        settings.gradient_accumulation_steps or 1, managed=settings.managed_gradient_accumulation
    )
    try:
        runtime = build.build_runtime(
            model,
            draft.specs,
            settings,
            optimizer=draft.optimizer,
            found=draft.probes,
            gather_comm=watch.gathers,
            reduce_comm=watch.reductions,
            place=place,
            device=target,
            expects_accumulation=accumulation.expects_more,
        )
        buffers = build.place_buffers(
            model, draft.policy.buffer, target, keep=kept_buffers(model, settings)
        )
        for at, buffer in enumerate(buffers):
            watch.gathers.broadcast(buffer, 0, name=f"buffer {at}").wait()
    except BaseException as error:
        watch.close(in_short(error))
        raise
    return EngineParts(
        draft.loaded, place, target, draft.policy, watch.gathers, watch, runtime,
        scaler_from(settings, target), draft.scheduler, accumulation, draft.monitors,
    )  # fmt: skip


def _first_fact(error: Exception) -> str:
    """The first line of an error that is not a heading."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith(":")), "")


@dataclass(frozen=True, eq=False)
class _Draft:
    """What a rank decides by itself, before it meets the others."""

    loaded: LoadedConfig
    device: torch.device
    policy: Policy
    optimizer: torch.optim.Optimizer | None
    probes: Mapping[torch.dtype, Probe]
    specs: list[build.UnitSpec]
    scheduler: Any
    monitors: Monitors | None


def _draft(
    model: nn.Module,
    place: RankInfo,
    *,
    config: Any,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    lr_scheduler: Any,
    device: torch.device | str | None,
    as_deepspeed: bool,
) -> _Draft:
    objects = {"optimizer": optimizer, "scheduler": lr_scheduler}
    target = own_device(device, place)
    loaded = load_config(
        config,
        world_size=place.world_size,
        hidden_size=hidden_size(model),
        as_deepspeed=as_deepspeed,
        replaced=[section for section, given in objects.items() if given is not None],
        hardware=partial(hardware_of, target),
    )
    settings = loaded.config
    policy = policy_from(settings)
    inner = make_optimizer(model, optimizer, model_parameters, settings, policy)
    probes = build.probed(inner, policy) if inner is not None else {}
    specs = build.plan_units(
        model, settings, policy, inner, world_size=place.world_size,
        whole=not all(probe.elementwise for probe in probes.values()),
    )  # fmt: skip
    return _Draft(
        loaded,
        target,
        policy,
        inner,
        probes,
        specs,
        make_scheduler(lr_scheduler, inner, settings),
        build_monitors(settings) if place.rank == 0 else None,
    )


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


def kept_buffers(model: nn.Module, config: Config) -> list[str]:
    """Globs on buffers that ``data_types.buffer_dtype`` leaves alone; "auto" asks the model.

    Transformers models name parts of modules in ``_keep_in_fp32_modules`` and ``..._strict``.
    """
    patterns = config.data_types.keep_in_fp32_modules
    if patterns != "auto":
        return list(patterns)
    parts = [getattr(model, f"_keep_in_fp32_modules{end}", None) or () for end in ("", "_strict")]
    return [f"*{part}*" for some in parts for part in some]


def make_optimizer(
    model: nn.Module,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    config: Config,
    policy: Policy,
) -> torch.optim.Optimizer | None:
    """The optimizer over the model's own parameters: the object given, or the one in the config.

    ``model_parameters``: parameters or param-group dicts, default all that require a gradient.
    Raises :class:`UsageError` for an object that is no optimizer.
    """
    given = parameter_list(model_parameters)
    params = given or [p for p in model.parameters() if p.requires_grad]
    if optimizer is not None:
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
    groups = params if isinstance(params[0], dict) else [{"params": _named(model, params)}]
    masters = {policy.row_for("", p.dtype).master for p in model.parameters()}
    moments = {policy.row_for("", p.dtype).moments for p in model.parameters()}
    return build_optimizer(
        config.optimizer.type,
        config.optimizer.params,
        groups,
        fused=masters <= {torch.float32, torch.float64},
        state_dtype=None if moments == masters else moments.pop(),
    )


def _named(model: nn.Module, params: Sequence[Any]) -> list[Any]:
    """Pairs of name and parameter, which an optimizer that treats layers differently needs (Muon)."""
    names = {id(param): name for name, param in model.named_parameters()}
    if all(isinstance(p, nn.Parameter) and id(p) in names for p in params):
        return [(names[id(p)], p) for p in params]
    return list(params)


def make_scheduler(given: Any, optimizer: torch.optim.Optimizer | None, config: Config) -> Any:
    """The schedule object: the one given, made by a callable, or named in the config."""
    if given is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise UsageError("a learning-rate schedule needs an optimizer; none was given or named.")
    if given is None:
        assert config.scheduler is not None
        return build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
    return schedule_over(given, optimizer)


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
    """The value of a 0-dim flag if the host can know it without waiting, else None. Fakes are False."""
    if is_fake(flag):
        return False
    return bool(flag) if flag.device.type == "cpu" else None


def widest(units: Sequence[Unit]) -> torch.dtype:
    """fp64 if anything trains in fp64, else fp32."""
    masters = {unit.row.master for unit in units if unit.trainable}
    return torch.float64 if torch.float64 in masters else torch.float32


def schedule_snapshot(
    scheduler: Any, groups: list[dict[str, Any]]
) -> tuple[Any, list[dict[str, Any]]]:
    """What has to be restored if the update turns out to have been skipped."""
    if scheduler is None:
        return None, []
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return scheduler.state_dict(), options


def schedule_restore(scheduler: Any, groups: list[dict[str, Any]], snapshot: Any) -> None:
    """Undo one advance of the schedule."""
    state, options = snapshot
    if scheduler is None or state is None:
        return
    scheduler.load_state_dict(state)
    for group, saved in zip(groups, options, strict=True):
        group.update(saved)


class ManualGC:
    """No cyclic garbage collection but at step boundaries (key ``disable_python_gc``)."""

    def __init__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def collect(self) -> None:
        """Collect what recent steps left; what has survived several collections is not looked at."""
        gc.collect(1)

    def close(self) -> None:
        """Give the interpreter its collector back."""
        if self._was_on:
            gc.enable()
