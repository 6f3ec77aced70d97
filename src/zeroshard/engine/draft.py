"""What one rank decides alone, before it meets the others: configuration, dtypes, optimizer, units.

Also checks the objects that a caller passes to an engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.dtensors import block_of, head_copies, note_kinds
from zeroshard.comm.env import RankInfo
from zeroshard.config import Config, LoadedConfig, load_config
from zeroshard.config.batch import RunBatch
from zeroshard.core.layout import SlotBlock
from zeroshard.core.mesh import HOLDERS, SHARDS, Mesh
from zeroshard.core.mesh_sources import MeshSource
from zeroshard.device.choice import memory_nbytes, own_device
from zeroshard.engine.restarts import check_can_save_in
from zeroshard.engine.unit_plan import UnitSpec, plan_units, probed
from zeroshard.engine.wrapping import cut_block
from zeroshard.errors import UsageError
from zeroshard.experts.placement import number_experts, place_experts
from zeroshard.experts.stacked import expert_block, planned_stacks
from zeroshard.metrics.monitors import Monitors, build_monitors
from zeroshard.metrics.sinks import check_packages
from zeroshard.optim.factory import build_optimizer
from zeroshard.optim.probe import Probe
from zeroshard.optim.schedulers import build_scheduler
from zeroshard.parallel.program_parts import note_sums, part_block
from zeroshard.parallel.schedules import SCHEDULES
from zeroshard.parallel.split import PipelineModel
from zeroshard.precision.hardware import hardware_of
from zeroshard.precision.policy import Policy, policy_from
from zeroshard.run.batch_note import told_by_launcher
from zeroshard.session.session import set_up_together
from zeroshard.zero.init_mesh import check_built_for, check_whole
from zeroshard.zero.param_bucket import whole_values
from zeroshard.zero.sharded_parameter import owner_of
from zeroshard.zero.unit import Unit

logger = logging.getLogger("zeroshard")


@dataclass(frozen=True, eq=False)
class EngineArguments:
    """What a program passes to an engine, as it came.

    ``as_deepspeed`` and ``mesh_sources``: see :func:`load_config`.
    """

    model: nn.Module
    config: Any
    optimizer: Any
    model_parameters: Iterable[Any] | None
    lr_scheduler: Any
    device: torch.device | str | None
    as_deepspeed: bool
    mesh_sources: tuple[MeshSource, ...] = ()
    tensor_plan: Mapping[str, str] | str | None = None


@dataclass(frozen=True, eq=False)
class Draft:
    """What a rank decides alone, before it meets the others."""

    model: nn.Module
    rank_info: RankInfo
    mesh: Mesh
    loaded: LoadedConfig
    device: torch.device
    policy: Policy
    optimizer: torch.optim.Optimizer | None
    probes: Mapping[torch.dtype, Probe]
    specs: list[UnitSpec]
    scheduler: Any
    monitors: Monitors
    head_copies: tuple[int, ...]  # how many tensor ranks share key/value heads, each number once
    expert_sizes: tuple[int, ...]  # how many ranks share the experts of a layer, likewise

    @property
    def num_terms(self) -> int:
        """By how many the sum of the ranks' gradients is divided.

        Sequence ranks have parts of a sequence, and losses of which each is a mean.
        """
        averages = self.loaded.config.sequence_parallel_gradient == "mean"
        return self.mesh.dp_size * (self.mesh.sequence if averages else 1)


def make_draft(given: EngineArguments, rank_info: RankInfo) -> Draft:
    """Check what the caller passed, read the configuration, and plan the units. Moves no memory.

    Raises:
        ConfigError: the configuration has mistakes; it lists all of them.
        UsageError: the objects do not fit together.
    """
    model = given.model
    told = told_by_launcher()
    objects = {"optimizer": given.optimizer, "scheduler": given.lr_scheduler}
    device = own_device(given.device, rank_info.local_rank)
    loaded = load_config(
        given.config,
        world_size=rank_info.world_size,
        mesh_sources=given.mesh_sources,
        hidden_size=hidden_size(model),
        as_deepspeed=given.as_deepspeed,
        replaced=[section for section, passed in objects.items() if passed is not None],
        hardware=partial(hardware_of, device),
        run_batch=None if told.full_ranks is None else RunBatch(told.full_ranks, told.batches),
    )
    assert loaded.mesh is not None  # the configuration is read for training
    settings = loaded.config
    mesh = replace(loaded.mesh.mesh, data_before_expert=settings.use_data_before_expert_parallelism)
    check_packages(settings)
    if settings.preemption.save_dir is not None:
        check_can_save_in(settings.preemption.save_dir)
    check_model_on(mesh, model, settings)
    # Before pipeline stages are taken, because plans name layers of all stages.
    given = _share_layers(given, mesh, loaded, rank_info.rank)
    copies = head_copies(model.parameters())  # of all stages: every rank opens the same groups
    experts = _place_experts(model, mesh, loaded, rank_info.rank)
    mesh = replace(mesh, expert=max(experts, default=1))
    policy = policy_from(settings)
    if isinstance(model, PipelineModel):
        model.keep(mesh.coordinate(rank_info.rank)["pipeline"], mesh.pipeline)
        model.cast_stand_ins(policy)
    inner = make_optimizer(model, given.optimizer, given.model_parameters, settings, policy)
    probes = probed(inner, policy) if inner is not None else {}
    blocks = find_blocks(model, mesh, rank_info.rank)
    check_is_cut(model, blocks.values(), mesh, loaded.origins["parallel.tensor"])
    device_nbytes = memory_nbytes(device)
    if rank_info.is_main_rank and (said := cut_block(model, settings, device_nbytes)):
        logger.info("%s", said)
    specs = plan_units(
        model, settings, policy, inner,
        num_shards=len(mesh.group(rank_info.rank, SHARDS)),
        num_holders=len(mesh.group(rank_info.rank, HOLDERS)),
        whole=not all(probe.elementwise for probe in probes.values()),
        blocks=blocks,
        device_nbytes=device_nbytes,
    )  # fmt: skip
    return Draft(
        model, rank_info, mesh, loaded, device, policy, inner, probes, specs,
        make_scheduler(given.lr_scheduler, inner, settings),
        build_monitors(settings) if rank_info.is_main_rank else Monitors(),
        copies, experts,
    )  # fmt: skip


def check_model_on(mesh: Mesh, model: nn.Module, settings: Config) -> None:
    """Check the model against the mesh, before it is cut."""
    # Attention is that of Transformers, in which only its module registers it.
    is_registered = "zeroshard.sequence.attention" in sys.modules
    if "transformers.modeling_utils" in sys.modules and (mesh.sequence > 1 or is_registered):
        from zeroshard.sequence.attention import check_attention

        check_attention(model, mesh.sequence)
    check_built_for(model, mesh)
    check_pipeline(model, mesh, settings)


def check_pipeline(model: nn.Module, mesh: Mesh, settings: Config) -> None:
    """Check a pipeline against its sizes, and tell it how to checkpoint activations.

    Raises:
        UsageError: a pipeline mesh without a model that is cut, the schedule cannot run with these sizes,
            or the model checkpoints nothing by itself.
    """
    if not isinstance(model, PipelineModel):
        if mesh.pipeline > 1:
            raise UsageError(
                f"the mesh is {mesh.text}, but the model is a {type(model).__name__}, which is not cut "
                "into stages, so every pipeline rank would train all of it. Pass "
                f"zeroshard.parallel.pipeline(model, split=[...]) with {mesh.pipeline - 1} or more names."
            )
        return
    section = settings.pipeline
    if section.activation_checkpoint_interval:
        model.set_checkpointing(
            section.activation_checkpoint_interval, reentrant=section.use_reentrant
        )
    if mesh.pipeline == 1:
        return
    per_rank = max(1, len(model.stages) // mesh.pipeline)
    count = settings.gradient_accumulation_steps or 1
    schedule = SCHEDULES[model.schedule_for(mesh.pipeline, count)]
    if refusal := schedule.refusal(mesh.pipeline, per_rank, count):
        raise UsageError(f"zeroshard.parallel.pipeline: {refusal}.")


def find_blocks(model: nn.Module, mesh: Mesh, rank: int) -> dict[str, SlotBlock]:
    """The places of parameters that are parts of global tensors, by name."""
    found = {}
    for name, param in model.named_parameters():
        block = expert_block(param) or block_of(name, param, mesh, rank)
        if block is None and mesh.tensor > 1:
            block = part_block(name, param, mesh, rank)
        if block is not None:
            found[name] = block
    return found


def _share_layers(
    given: EngineArguments, mesh: Mesh, loaded: LoadedConfig, rank: int
) -> EngineArguments:
    """Number the experts, cut the model over tensor ranks, and note how its gradients are added.

    In this order, since tensor ranks compare the names of their parameters. Raises what
    :func:`~zeroshard.experts.placement.number_experts` and :func:`cut_tensor` raise.
    """
    origin, is_pipeline = loaded.origins["parallel.expert"], isinstance(given.model, PipelineModel)
    number_experts(given.model, mesh, rank, origin, may_rename=not is_pipeline)
    given = cut_tensor(given, mesh, loaded)
    note_kinds(given.model.parameters())
    if mesh.tensor > 1:
        note_sums(given.model.parameters(), mesh, rank)
    return given


def _place_experts(
    model: nn.Module, mesh: Mesh, loaded: LoadedConfig, rank: int
) -> tuple[int, ...]:
    """See :func:`~zeroshard.experts.placement.place_experts`. Collective if ranks will share stacked
    experts that ``zero.Init`` has sharded: then the ranks agree before."""
    stacks = planned_stacks(model) if mesh.expert > 1 else {}
    params = [param for module in stacks.values() for param in module.parameters()]
    is_sharded = any(owner_of(param) is not None for param in params)
    ties = model.ties if isinstance(model, PipelineModel) else None
    origin = loaded.origins["parallel.expert"]
    if not is_sharded:
        return place_experts(model, mesh, rank, origin, ties, lambda param: param.data)
    with set_up_together("initialize", trust=loaded.config.trust, plan=loaded.agreed()):
        return place_experts(model, mesh, rank, origin, ties, whole_values)


def cut_tensor(given: EngineArguments, mesh: Mesh, loaded: LoadedConfig) -> EngineArguments:
    """Cut the model over tensor ranks if the program asked for it. Collective then.

    It asks with ``plan=``, or with a key of DeepSpeed that means "cut the model by yourself". Returns the
    arguments with the cut parameters, which are new objects. An optimizer object gets them too.

    Raises:
        UsageError: there is a plan for a model that is cut already, or it does not fit the model.
        DistributedError: another rank has another plan or configuration, or failed before.
    """
    plan = given.tensor_plan
    if plan is None and "tensor_parallel." in loaded.origins["parallel.tensor"]:
        plan = "auto"
    if mesh.tensor == 1 or plan is None:
        return given
    # Not imported at the top: torch's DTensor takes half a second, and most runs have none.
    from zeroshard.parallel.tensor_plan import apply_plan, is_cut, neighbours

    model = given.model.inner if isinstance(given.model, PipelineModel) else given.model
    if is_cut(model):
        if given.tensor_plan is None:
            return given
        raise UsageError(
            "initialize(plan=...) got a model that is cut over tensor ranks already. Leave plan out, or "
            "pass the whole model."
        )
    check_whole(model)
    listed = parameter_list(given.model_parameters)
    agreed = {"tensor plan": repr(plan), **loaded.agreed()}
    # A rank that failed before is named here. torch would wait for it when it connects the tensor ranks.
    with set_up_together("initialize(plan=...)", trust=loaded.config.trust, plan=agreed) as check:
        applied = apply_plan(model, neighbours(mesh.tensor), plan, check=check)
    if isinstance(given.optimizer, torch.optim.Optimizer):
        applied.renew_optimizer(given.optimizer)
    return replace(given, model_parameters=applied.renewed(listed) or None)


def check_is_cut(model: nn.Module, blocks: Iterable[SlotBlock], mesh: Mesh, origin: str) -> None:
    """Check that tensor ranks hold parts of the model. ``origin``: who gave the size of ``tensor``.

    Raises:
        UsageError: there are tensor ranks, and each of them has the whole model; or adapters of PEFT were
            made for one tensor rank's part of a layer.
    """
    if mesh.tensor == 1:
        return
    if not any(block.split for block in blocks):
        raise UsageError(
            f"the mesh is {mesh.text} (tensor: {origin}), but no parameter of the model is cut over "
            "tensor ranks: they would all compute the same, and hold the whole model. Write "
            f'"tensor_parallel": {{"autotp_size": {mesh.tensor}}} in the configuration, with which the '
            "engine cuts the model by itself (also in a plan), or let the program do it: call "
            "zeroshard.parallel.tensor_parallel(model, mesh) (or deepspeed.tp_model_init) before "
            'initialize(), or pass plan="auto" to it. Or leave the size out.'
        )
    # Imported here for the reason in cut_tensor.
    from zeroshard.parallel.adapters import check_made_before_the_cut

    check_made_before_the_cut(model)


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


WRAPPERS = frozenset(("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"))
"""Classes of torch that distribute a model, as the engine does."""


def check_model(model: Any) -> None:
    """Check the model of a new engine.

    Raises:
        UsageError: it is not a module, a wrapper of torch distributes it, or it belongs to an engine.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is a {type(model).__name__}, not a torch.nn.Module. Pass the model itself."
        )
    for kind in type(model).__mro__:
        if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
            raise UsageError(
                f"model is wrapped in {kind.__name__}, which also distributes it over ranks or "
                "devices. Pass the model itself: model.module."
            )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"model is a {type(model).__name__} of torch.jit, which takes no hooks, so nothing of it can "
            "be gathered. Pass the module itself, or one that has the scripted module as a part."
        )
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad] or params
    owned = sum(isinstance(owner_of(param), Unit) for param in trained)
    if owned:
        is_part = owned < len(trained)
        what = f"a part of model ({owned} parameters)" if is_part else "model"
        how = " Models that share a trunk are trained as parts of one module." if is_part else ""
        raise UsageError(
            f"{what} already belongs to an engine, and two engines would write its parameters. Call "
            "close() (or destroy()) of that engine before you build another, and pass "
            f"engine.module.{how}"
        )


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
    params = _updated(model, parameter_list(model_parameters))
    if optimizer is not None:
        return _checked(optimizer(params) if callable(optimizer) else optimizer)
    if config.optimizer is None:
        return None
    if not params:
        raise UsageError(
            f'the config names the optimizer "{config.optimizer.type}", but no parameter of the model '
            "requires a gradient."
        )
    groups = params if isinstance(params[0], dict) else [{"params": _named(model, params)}]
    rows = [policy.row_for("", p.dtype) for p in model.parameters() if not p.is_complex()]
    masters, moments = {row.master for row in rows}, {row.moments for row in rows}
    return build_optimizer(
        config.optimizer.type,
        config.optimizer.params,
        groups,
        fused=masters <= {torch.float32, torch.float64},
        state_dtype=None if moments == masters else moments.pop(),
    )


def _updated(model: nn.Module, given: list[Any]) -> list[Any]:
    """What the optimizer updates: what is given, or all that is trained."""
    params = given or [p for p in model.parameters() if p.requires_grad]
    if not params and isinstance(model, PipelineModel) and model.kept is not None:
        return [{"params": []}]  # the stages of this rank are frozen, those of others may train
    return params


def _checked(given: Any) -> torch.optim.Optimizer:
    """An optimizer of the program, if the engine can give it other parameters."""
    if not isinstance(given, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer is a {type(given).__name__}, not a torch.optim.Optimizer. Pass an optimizer "
            "object, or a function that makes one from parameters."
        )
    if not hasattr(given, "param_groups"):
        raise UsageError(
            f"optimizer is a {type(given).__name__} without param_groups, so the engine cannot give "
            "it its parameters. If it wraps another optimizer, pass that one."
        )
    return given


def _named(model: nn.Module, params: Sequence[Any]) -> list[Any]:
    """Pairs of name and parameter, which an optimizer that treats layers differently needs (Muon)."""
    names = {id(param): name for name, param in model.named_parameters()}
    if all(isinstance(p, nn.Parameter) and id(p) in names for p in params):
        return [(names[id(p)], p) for p in params]
    return list(params)


_INSTEAD = "Pass model.parameters(), a list of them, or a list of param-group dicts."


def parameter_list(model_parameters: Any) -> list[Any]:
    """``model_parameters`` as a list, with lists in its groups. A generator is read here, once.

    Raises:
        UsageError: it is not a collection of parameters or of param-group dicts.
    """
    if model_parameters is None:
        return []
    single = isinstance(model_parameters, (str, Tensor, nn.Module, Mapping))
    if single or not isinstance(model_parameters, Iterable):
        kind = type(model_parameters).__name__
        raise UsageError(f"model_parameters is a {kind}, not an iterable of parameters. {_INSTEAD}")
    members = list(model_parameters)
    for member in members:
        if isinstance(member, dict):
            if "params" not in member:
                raise UsageError(
                    f"model_parameters holds a group with the keys {sorted(member)}, but without "
                    '"params". Add its parameters as "params".'
                )
            continue
        named = isinstance(member, tuple) and len(member) == 2
        if not isinstance(member[1] if named else member, Tensor):
            raise UsageError(
                f"model_parameters holds a {type(member).__name__}, which is not a parameter. "
                f"{_INSTEAD}"
            )
    if len({isinstance(member, dict) for member in members}) > 1:
        raise UsageError(
            "model_parameters mixes parameters and param-group dicts. Put the parameters into a "
            "group."
        )
    return [_listed(member) if isinstance(member, dict) else member for member in members]


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    params = group["params"]
    if not isinstance(params, (Tensor, Iterable)):
        raise UsageError(
            f'a parameter group has "params": {params!r}, which is {type(params).__name__}. Give a '
            "parameter, or a list of parameters."
        )
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def make_scheduler(given: Any, optimizer: torch.optim.Optimizer | None, config: Config) -> Any:
    """The schedule: ``given``, what a function or class makes from the optimizer, or that of the config.

    Raises:
        UsageError: it is not a schedule, belongs to another optimizer, or there is no optimizer.
    """
    if given is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise UsageError(
            "a learning-rate schedule needs an optimizer, and there is none. Pass one to "
            "initialize(), or name one in the config."
        )
    if given is None:
        assert config.scheduler is not None
        return build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
    makes = isinstance(given, type) or (callable(given) and not hasattr(given, "step"))
    made = given(optimizer) if makes else given
    if not hasattr(made, "step"):
        raise UsageError(
            f"lr_scheduler is a {type(made).__name__} without a step() method. Pass a schedule, or "
            "a function that makes one from the optimizer."
        )
    follows = getattr(made, "optimizer", optimizer)
    if isinstance(follows, torch.optim.Optimizer) and follows is not optimizer:
        raise UsageError(
            f"lr_scheduler belongs to another optimizer ({type(follows).__name__}) than the "
            f"engine's ({type(optimizer).__name__}), so it would have no effect. Pass a function "
            "that makes it from the engine's optimizer."
        )
    return made
