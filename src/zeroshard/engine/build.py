"""Builds the parts of an engine, in the same order on every rank.

First the ranks join. Then each rank makes its draft, and the ranks open their connections. Then memory is
allocated. Everything is decided here, so that the step does not test whether a feature is on.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from zeroshard.checkpoint.local_state import LocalState
from zeroshard.comm.dtensors import groups_over
from zeroshard.comm.env import current_rank_info
from zeroshard.comm.layer_calls import announced
from zeroshard.comm.process_group import register
from zeroshard.config import Config
from zeroshard.core.layout import Slot, is_counted, is_split
from zeroshard.core.mesh import HOLDERS
from zeroshard.core.stages import STAGES
from zeroshard.device.choice import choose_device, read
from zeroshard.engine.build_observer import is_simulated, make_observer
from zeroshard.engine.build_runtime import FirstValues, ZeroRuntime, build_runtime
from zeroshard.engine.checkpoint_loader import CheckpointLoader
from zeroshard.engine.checkpoint_saver import CheckpointSaver
from zeroshard.engine.draft import Draft, EngineArguments, check_model, make_draft
from zeroshard.engine.non_finite import NanPolicy, nan_policy
from zeroshard.engine.offload_states import StateOffloader
from zeroshard.engine.optimizer_step import Accumulation, OptimizerStep
from zeroshard.engine.pipeline_batches import share_sequences
from zeroshard.engine.restarts import tell_launcher
from zeroshard.engine.shared_units import (
    agreed_layers,
    check_options,
    connect_experts,
    groups_in_words,
    names_over_replicas,
    other_holders,
    tied_ranks,
)
from zeroshard.engine.unit_plan import layout_digest, layout_lines
from zeroshard.errors import in_short
from zeroshard.experts.placement import sizes_of_buffers
from zeroshard.memory.host_memory import return_large_blocks
from zeroshard.metrics.observe import Observer
from zeroshard.parallel.initial_values import ValuesByName
from zeroshard.parallel.program_parts import connect_parts
from zeroshard.parallel.split import PipelineModel
from zeroshard.precision.hardware import hardware_of, tell_if_slow
from zeroshard.precision.loss_scaler import LossScaler, scaler_from
from zeroshard.precision.policy import Policy
from zeroshard.run.batch_note import told_by_launcher
from zeroshard.session.comm_session import CommSession
from zeroshard.session.groups import groups_of
from zeroshard.session.join import join_ranks
from zeroshard.session.session import decline, open_session
from zeroshard.watchdog.uncaught import shorten_uncaught
from zeroshard.zero.access import UnitOptimState
from zeroshard.zero.clip import DataExchange, NormExchange, num_words
from zeroshard.zero.hooks import StepHooks
from zeroshard.zero.mesh_norm import MeshExchange, ModuleOrder
from zeroshard.zero.mode_switch import publish_modes
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.reduce import GradReducer

logger = logging.getLogger("zeroshard")


@dataclass(frozen=True, eq=False)
class EngineParts:
    """Everything that an engine is made of."""

    draft: Draft
    watch: CommSession
    runtime: ZeroRuntime
    scaler: LossScaler
    scales_loss: bool  # gradients are computed in fp16
    accumulation: Accumulation
    update: OptimizerStep
    hooks: StepHooks
    offloader: StateOffloader
    observer: Observer
    make_savers: Callable[[], tuple[CheckpointSaver, CheckpointLoader]]
    nan_policy: NanPolicy | None


def build_engine(given: EngineArguments, make_hooks: Callable[..., StepHooks]) -> EngineParts:
    """Build all parts. Collective. Ranks compare their plans before they allocate memory.

    ``make_hooks`` makes :class:`StepHooks` that call functions of the engine. After an error the model
    has no hooks, and resident parameters are plain again.
    """
    shorten_uncaught()
    check_model(given.model)
    join_ranks()
    try:
        draft = make_draft(given, current_rank_info())
    except Exception as error:
        if not getattr(error, "on_all_ranks", False):  # else the other ranks would wait
            decline(f"{type(error).__name__}: {_first_fact(error)}")
        raise
    settings = draft.loaded.config
    choose_device(draft.device)  # events are recorded, and kernels queued, on the current device
    plan, details = _plan(draft)
    watch = open_session(
        transport=settings.transport,
        device=draft.device,
        trust=settings.trust,
        plan=plan,
        details=details,
        separate_reductions=gathers_while_reducing(settings),
        mesh=draft.mesh,
        kinds=list(
            groups_of(draft.mesh, tied_ranks(draft.model), draft.head_copies, draft.expert_sizes)
        ),
    )
    told = told_by_launcher()
    if told.full_ranks is not None and draft.rank_info.is_main_rank:
        tell_launcher(told, draft.loaded)
    try:
        if settings.registered_memory:
            watch.memory_line = register(watch.comms_of_units, draft.device)
        return _assemble(draft, watch, make_hooks)
    except BaseException as error:
        watch.close(in_short(error))
        shorten_uncaught()  # the session had its hook
        raise


def _plan(draft: Draft) -> tuple[dict[str, str], dict[str, list[str]]]:
    """What all ranks must share, and the lines that digests in it are of. The units of stages differ."""
    model, groups = draft.model, {}
    if isinstance(model, PipelineModel):
        first = ", ".join(pieces[0] for pieces in model.stages if pieces)
        details = {}
        shared = {
            "pipeline schedule": f"{model.schedule}, gather {model.gather}, reduce {model.reduce}, "
            f"auto_limit_nbytes {model.auto_limit_nbytes}",
            "first pieces of the pipeline stages": first,
            "whole model": model.digest,
        }
    else:
        details = {"parameter": layout_lines(draft.specs)}
        shared = {"parameter": layout_digest(draft.specs)}
    if draft.mesh.pipeline > 1 and draft.optimizer is not None:
        groups = groups_in_words(draft.optimizer)
    ranks = {
        "ranks that share key/value heads": str(list(draft.head_copies)),
        "ranks that share experts": str(list(draft.expert_sizes)),
    }
    # What differs in the configuration may be why the rest does.
    parts = [draft.loaded.agreed(), ranks, agreed_layers(draft), shared, groups]
    plan = {key: value for part in parts for key, value in part.items()}
    assert len(plan) == sum(map(len, parts)), "a key of two parts would be compared for one only"
    return plan, details


def gathers_while_reducing(settings: Config) -> bool:
    """Whether the backward of one layer gathers the next one while it reduces the one before."""
    zero = settings.zero_optimization
    return bool(zero.overlap_comm) and STAGES[zero.stage].shards_params


def _assemble(
    draft: Draft, watch: CommSession, make_hooks: Callable[..., StepHooks]
) -> EngineParts:
    """Build the parts that need memory. All ranks have the same plan by now."""
    model, settings = draft.model, draft.loaded.config
    device, policy = draft.device, draft.policy
    trains_on_host = device.type == "cpu" and watch.gathers.transport != "fake"
    if draft.rank_info.is_main_rank and trains_on_host:
        tell_if_slow(policy, hardware_of(device))
    accumulation = Accumulation(
        settings.gradient_accumulation_steps or 1, managed=settings.managed_gradient_accumulation
    )
    check_options(draft, watch)
    _connect_layers(draft, watch)
    after_bad_step = nan_policy(settings, scales_loss=scales_loss(settings, policy))
    if watch.gathers.transport == "fake":  # without other ranks gradients have no meaning
        after_bad_step = None
    with contextlib.ExitStack() as undo:
        draw = _first_values(draft, watch)
        runtime = build_runtime(draft, watch, draw, many=accumulation.expects_more())
        undo.callback(runtime.close, wait=False)
        _share_buffers(draft, watch, draw)
        scaler = scaler_from(settings, device)
        order = None if draft.mesh.is_flat and not draft.expert_sizes else ModuleOrder()
        update = OptimizerStep(
            runtime,
            settings,
            watch=watch,
            exchange=_exchange(draft, watch, runtime, order),
            scaler=scaler,
            accumulation=accumulation,
            num_terms=draft.num_terms,
            terms_per_batch=draft.num_terms // draft.mesh.dp_size,
            device=device,
            checks_overflow=scales_loss(settings, policy) or after_bad_step is not None,
        )
        if runtime.optimizer is not None:
            _connect(runtime.optimizer, runtime.reducer, update)
        hooks = make_hooks(
            runtime.prefetcher, runtime.reducer, kind_of_backward=accumulation.kind_of_backward,
            compiles=settings.compile_blocks,
        )  # fmt: skip
        undo.callback(hooks.remove)
        if order is not None and draft.mesh.tensor > 1:
            hooks.note_forwards(order.note)
            tensor_ranks = draft.mesh.group(draft.rank_info.rank, {"tensor"})
            watch.watch_layers(groups_over(model.parameters(), tensor_ranks))
        if draft.mesh.sequence > 1:
            _watch_sequences(draft, watch)
        parts = EngineParts(
            draft, watch, runtime, scaler, scales_loss(settings, policy), accumulation, update, hooks,
            StateOffloader(runtime, hooks, device), make_observer(draft, runtime, watch),
            partial(_make_savers, draft, runtime, watch), after_bad_step,
        )  # fmt: skip
        undo.pop_all()
    if trains_on_host:
        return_large_blocks(offloaded=False)
    return parts


def _connect_layers(draft: Draft, watch: CommSession) -> None:
    """Let layers that ranks share find each other, until the session ends. Collective."""
    connect_experts(draft, watch)
    if watch.tensor is not None:
        watch.leave.append(connect_parts(draft.model.parameters(), watch.tensor))
    if isinstance(draft.model, PipelineModel):
        share_sequences(draft.model, draft.mesh, draft.rank_info.rank)


def _watch_sequences(draft: Draft, watch: CommSession) -> None:
    """Record the collectives of attention over sequence ranks. Warns if there is no such attention."""
    groups = announced(draft.mesh.group(draft.rank_info.rank, {"sequence"}))
    watch.watch_layers(groups)
    if not groups and draft.rank_info.is_main_rank and not is_simulated():
        logger.warning(
            "the mesh is %s, but no attention is spread over sequence ranks so far: with a part of the "
            "tokens, each rank would attend to these only. Call zeroshard.sequence.register(), or "
            "DeepSpeed's UlyssesSPAttentionHF.register_with_transformers(), before initialize(), or use "
            "DistributedAttention.",
            draft.mesh.text,
        )


def _share_buffers(draft: Draft, watch: CommSession, draw: FirstValues) -> None:
    """Move the model's buffers to the device, with the values of rank 0. Collective.

    Those of shared experts get the values of the first rank that has the same experts.
    """
    keep = kept_buffers(draft.model, draft.loaded.config)
    buffers = place_buffers(draft.model, draft.policy.buffer, draft.device, keep=keep, draw=draw)
    sizes = sizes_of_buffers(draft.model)
    numbers: dict[int, int] = Counter()  # experts of other ranks may have other buffers
    for buffer in buffers:
        size = sizes.get(id(buffer), 1)
        for comm in (watch.tensor, watch.experts.get(size, watch.gathers)):
            if comm is not None:
                comm.broadcast(buffer, 0, name=f"buffer {numbers[size]}").wait()
        numbers[size] += 1


def _connect(optimizer: ShardedOptimizer, reducer: GradReducer, update: OptimizerStep) -> None:
    """Let what a program calls between steps find the optimizer's state and the gradients."""
    for shard in optimizer.shards:
        shard.unit.optim_state = UnitOptimState(
            optimizer, shard, reducer.summed, update.unscaled_factor, update.all_gather_late
        )
    publish_modes(optimizer, update.all_gather_late)
    measure = weakref.WeakMethod(update.norm_before_step)  # parameters hold the reducer
    reducer.measure = lambda: None if (found := measure()) is None else found()
    reducer.fragments = optimizer.stand_ins


def _first_values(draft: Draft, watch: CommSession) -> FirstValues:
    """How modules on the meta device get their first values. Collective if there are such modules.

    Each module draws from the seed of rank 0 and its name. So the values do not depend on the mesh, nor
    on where a pipeline is cut.
    """
    if not any(held.is_meta for held in (*draft.model.parameters(), *draft.model.buffers())):
        return lambda _name, _module: None
    own = torch.initial_seed()
    words = torch.tensor([own >> 32, own % 2**32], dtype=torch.int64, device=draft.device)
    watch.world.broadcast(words, 0, name="seed of the first values").wait()
    high, low = (own >> 32, own % 2**32) if is_fake(words) else read(words)
    return ValuesByName(draft.model, (high << 32) + low, draft.device).draw


def _exchange(
    draft: Draft, watch: CommSession, runtime: ZeroRuntime, order: ModuleOrder | None
) -> NormExchange:
    """How norm, overflow and flags are exchanged. Collective on a mesh, where ``order`` is given."""
    if order is None:
        return DataExchange(watch.world, watch.divergence)
    trained = [unit for unit in runtime.units if unit.trainable]
    slots = [
        (position, slot)
        for unit in trained
        for position, slot in zip(unit.positions, unit.layout.slots, strict=True)
    ]
    is_cut = draft.mesh.tensor > 1
    place = draft.mesh.coordinate(draft.rank_info.rank)["tensor"]
    return MeshExchange(
        watch.world,
        watch.gathers,
        draft.mesh,
        rank=draft.rank_info.rank,
        copied={at: slot.fqn for at, slot in slots if is_cut and not is_split(slot)},
        uncounted={at for at, slot in slots if not is_counted(slot, place)},
        num_words=num_words(len(slots)),
        precision=max((torch.finfo(unit.row.reduce).eps for unit in trained), default=0.0),
        device=draft.device,
        divergence=watch.divergence,
        order=order,
        others=other_holders(draft, watch, runtime.units, runtime.reducer.buffers),
    )


def _make_savers(
    draft: Draft, runtime: ZeroRuntime, watch: CommSession
) -> tuple[CheckpointSaver, CheckpointLoader]:
    settings = draft.loaded.config
    both: dict[str, Any] = {
        "section": settings.checkpoint,
        "local": LocalState(runtime.units, runtime.optimizer, _counts(draft, watch)),
        "control_group": watch.control_group,
        "rank_info": draft.rank_info,
        "device": draft.device,
        "mesh": draft.mesh,
    }
    stage, uses_disk = int(settings.zero_optimization.stage), runtime.stores.uses_disk
    return (
        CheckpointSaver(**both, stage=stage, ledger=runtime.ledger, uses_disk=uses_disk),
        CheckpointLoader(**both, comm=watch.world, life=runtime.life),
    )


def _counts(draft: Draft, watch: CommSession) -> Callable[[Slot], bool]:
    """Which parameters this rank saves its part of.

    Of the shard groups that hold the same part the first one saves it: that of the first replica, and of
    the first tensor coordinate with this part. What is tied over pipeline ranks is sharded over replicas
    as well, and so are some experts.
    """
    mesh, rank = draft.mesh, draft.rank_info.rank
    at = mesh.coordinate(rank)
    has_replicas = watch.gathers.size < len(mesh.group(rank, HOLDERS))
    is_later, place = has_replicas and at["data_replicate"] > 0, at["tensor"]
    apart = {slot.fqn for spec in draft.specs if spec.tie for slot in spec.layout.slots}
    apart |= names_over_replicas(draft)
    return lambda slot: (not is_later or slot.fqn in apart) and is_counted(slot, place)


def scales_loss(settings: Config, policy: Policy) -> bool:
    """Whether gradients are computed in fp16, so that the loss is scaled."""
    return settings.fp16.enabled or policy.autocast == torch.float16


def _first_fact(error: Exception) -> str:
    """The first line of an error that is not a heading."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith(":")), "")


def kept_buffers(model: nn.Module, config: Config) -> list[str]:
    """Globs on buffers that ``data_types.buffer_dtype`` does not change. "auto": those of the model.

    Transformers models name parts of modules in ``_keep_in_fp32_modules`` and ``..._strict``.
    """
    patterns = config.data_types.keep_in_fp32_modules
    if patterns != "auto":
        return list(patterns)
    parts = [getattr(model, f"_keep_in_fp32_modules{end}", None) or () for end in ("", "_strict")]
    return [f"*{part}*" for some in parts for part in some]


def place_buffers(
    model: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    keep: Sequence[str] = (),
    draw: FirstValues,
) -> list[Tensor]:
    """Move buffers to the device; floating ones change dtype only if asked. Returns them in order.

    ``keep``: globs on names of buffers that keep their dtype. ``draw``: gives those on the meta device
    their values.
    """
    moved: list[Tensor] = []
    for prefix, module in model.named_modules():
        draw(prefix, module)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            kept = dtype is None or any(fnmatchcase(fqn, pattern) for pattern in keep)
            cast = buffer.dtype if kept or not buffer.is_floating_point() else dtype
            module._buffers[name] = buffer.to(device=device, dtype=cast).contiguous()
            moved.append(module._buffers[name])  # type: ignore[arg-type]
    return moved
