"""Puts an engine together, in one order on every rank: configuration, ranks, plan, memory, helpers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroshard.comm.env import RankInfo, current_rank_info, own_device, rank_info_of
from zeroshard.config import Config, LoadedConfig, load_config
from zeroshard.engine.accumulate import Accumulation
from zeroshard.engine.arguments import check_model, parameter_list, schedule_over
from zeroshard.engine.build import ZeroRuntime, build_runtime, place_buffers
from zeroshard.engine.monitors import Monitors, build_monitors
from zeroshard.engine.observe import Observer
from zeroshard.engine.offload_states import StateOffloader
from zeroshard.engine.optimizer_step import OptimizerStep
from zeroshard.engine.unit_plan import UnitSpec, layout_digest, plan_units, probed
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
from zeroshard.zero.access import UnitOptimState
from zeroshard.zero.hooks import StepHooks


@dataclass(frozen=True, eq=False)
class EngineParts:
    """Everything that an engine is made of."""

    loaded: LoadedConfig
    place: RankInfo
    device: torch.device
    policy: Policy
    watch: CommSession
    runtime: ZeroRuntime
    scaler: LossScaler
    scales_loss: bool  # gradients pass through fp16
    scheduler: Any
    accumulation: Accumulation
    update: OptimizerStep
    hooks: StepHooks
    offloader: StateOffloader
    observer: Observer


@dataclass(frozen=True, eq=False)
class Events:
    """What the hooks ask and tell the engine: see :class:`~zeroshard.zero.hooks.StepHooks`."""

    on_forward_begin: Callable[[], None]
    on_backward_begin: Callable[[bool], bool]
    on_abandon: Callable[[], None]


def compose(
    model: nn.Module,
    events: Events,
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
        plan={"units": layout_digest(draft.specs), **draft.loaded.agreed()},
    )
    try:
        return _assemble(model, events, draft, watch, place)
    except BaseException as error:
        watch.close(in_short(error))
        raise


def _assemble(
    model: nn.Module, events: Events, draft: _Draft, watch: CommSession, place: RankInfo
) -> EngineParts:
    """All ranks have the same plan: memory moves."""
    settings, device, policy = draft.loaded.config, draft.device, draft.policy
    if place.rank == 0 and device.type == "cpu" and watch.gathers.transport != "fake":
        tell_if_slow(policy, hardware_of(device))
    accumulation = Accumulation(
        settings.gradient_accumulation_steps or 1, managed=settings.managed_gradient_accumulation
    )
    runtime = build_runtime(
        model,
        draft.specs,
        settings,
        optimizer=draft.optimizer,
        found=draft.probes,
        gather_comm=watch.gathers,
        reduce_comm=watch.reductions,
        place=place,
        device=device,
        expects_accumulation=accumulation.expects_more,
    )
    buffers = place_buffers(model, policy.buffer, device, keep=kept_buffers(model, settings))
    for at, buffer in enumerate(buffers):
        watch.gathers.broadcast(buffer, 0, name=f"buffer {at}").wait()
    scaler = scaler_from(settings, device)
    update = OptimizerStep(
        runtime,
        settings,
        watch=watch,
        scaler=scaler,
        accumulation=accumulation,
        device=device,
        checks_overflow=checks_overflow(settings, policy),
    )
    for shard in runtime.optimizer.shards if runtime.optimizer else ():
        assert runtime.optimizer is not None
        shard.unit.optim_state = UnitOptimState(
            runtime.optimizer, shard, runtime.reducer.summed, update.unscaled_factor
        )
    hooks = StepHooks(
        runtime.prefetcher,
        runtime.reducer,
        at_boundary=accumulation.reduces_now,
        on_forward_begin=events.on_forward_begin,
        on_backward_begin=events.on_backward_begin,
        on_abandon=events.on_abandon,
    )
    observer = Observer(
        settings,
        recorder=watch.recorder,
        ledger=runtime.ledger,
        monitors=draft.monitors,
        speaks=place.rank == 0,
        disk=partial(getattr, runtime.stores, "timeline"),
    )
    return EngineParts(
        draft.loaded, place, device, policy, watch, runtime, scaler,
        scales_loss(settings, policy), draft.scheduler, accumulation, update, hooks,
        StateOffloader(runtime, hooks, device), observer,
    )  # fmt: skip


def scales_loss(settings: Config, policy: Policy) -> bool:
    """Do gradients pass through fp16, so that the loss is scaled?"""
    return settings.fp16.enabled or policy.autocast == torch.float16


def checks_overflow(settings: Config, policy: Policy) -> bool:
    """Does a gradient that is not finite leave the parameters as they are?"""
    bf16 = settings.bf16
    return scales_loss(settings, policy) or (bf16.enabled and bf16.check_grad_overflow)


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
    specs: list[UnitSpec]
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
    probes = probed(inner, policy) if inner is not None else {}
    specs = plan_units(
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
