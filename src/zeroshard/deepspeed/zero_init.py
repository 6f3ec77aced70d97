"""``zero.Init``, ``GatheredParameters`` and related names of ``deepspeed.zero``, and marks on modules.

*Parameters.* ``ds_id`` marks a parameter that ZeRO shards. ``ds_numel`` and ``ds_shape`` are its full
sizes. They are plain values on the parameter. ``ds_status`` and ``ds_tensor`` depend on its current
state: while it is sharded, properties of its class
:class:`~zeroshard.zero.sharded_parameter.ShardedParameter` return them. While it is whole, the plain
``ds_status`` on the parameter is visible. ``all_gather`` and ``partition`` are the two ends of a
:class:`GatheredParameters` block. The methods refer to their parameter by ``ds_id``, because they are
pickled with it.

*Modules* that are marked are gathered as one. The marks are read when the engine is built. The
configuration has the same in ``leaf_module``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from zeroshard.deepspeed.collectives import get_world_size
from zeroshard.deepspeed.config_model import model_config
from zeroshard.deepspeed.symbols import ZeroParamStatus
from zeroshard.engine.unit_plan import GATHERED_AS_ONE
from zeroshard.errors import UsageError
from zeroshard.zero import init, sharded_parameter
from zeroshard.zero.gathered import GatheredParameters
from zeroshard.zero.param_bucket import BucketedParameter, ParamBucket
from zeroshard.zero.unit import Unit, UnitState


class Init(init.Init):
    """:class:`zeroshard.zero.Init` that also sets DeepSpeed's attributes on parameters."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
        mesh: Any = None,
    ) -> None:
        super().__init__(
            module,
            data_parallel_group,
            mem_efficient_linear,
            remote_device,
            pin_memory,
            model_config(config if config_dict_or_path is None else config_dict_or_path),
            None,
            enabled,
            dtype,
            mpu,
            mesh,
        )

    def _check_group(self, group: Any) -> None:
        if group is not None and get_world_size(group) == 1 < get_world_size():
            raise UsageError(
                f"zero.Init got a data_parallel_group of one rank, and there are {get_world_size()}: "
                "nothing would be sharded. Leave it out, or pass the group of all ranks."
            )

    def _take(self, holder: nn.Module, leaf: str, param: nn.Parameter) -> None:
        super()._take(holder, leaf, param)
        if not is_zero_param(param):
            mark_parameters([param])


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing but a check of the types: a read of a sharded parameter gathers it in any module.

    Raises:
        RuntimeError: an argument is of another type.
    """
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"module is a {type(module).__name__}, not a torch.nn.Module")
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"parameter is a {type(parameter).__name__}, not a torch.nn.Parameter")


unregister_external_parameter = register_external_parameter


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """A context with the engine's module, all parameters whole, for many forward passes.

    Entering and leaving are collective. Ranks may make different calls inside.
    """
    module = model.module if hasattr(model, "module") else model
    with GatheredParameters(list(module.parameters())):
        yield module


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor],
    target_fp_dtype: torch.dtype,
    target_device: torch.device | None = None,
) -> Callable[..., Tensor]:
    """``fn`` itself: :class:`Init` casts parameters, and leaves what a program computes as it is."""
    return fn


_orig_torch_arange = torch.arange


class TiledLinear(nn.Linear):
    """``torch.nn.Linear``. The arguments about splitting have no effect.

    Units already limit what is gathered, so tiles would save nothing.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Linear] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        if init_linear is not None:
            with torch.no_grad():
                self.weight.copy_(init_linear.weight)
                if init_linear.bias is not None:
                    self.bias.copy_(init_linear.bias)


# ---------------------------------------------------------------------- sharded parameters


_ids = itertools.count()
_by_id: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
_OPENED = "_ds_opened"
"""Attribute between ``all_gather`` and ``partition``: whether ``all_gather`` made the unit whole."""


def is_zero_param(parameter: Any) -> bool:
    """Whether ZeRO shards this parameter."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


def mark_parameters(params: Iterable[nn.Parameter]) -> None:
    """Set the attributes on parameters that have an owner. Others are left alone."""
    _answer_while_away()
    for param in params:
        if sharded_parameter.owner_of(param) is None:
            continue
        own = param.__dict__
        ds_id = own.setdefault("ds_id", next(_ids))
        _by_id[ds_id] = param
        own |= {
            "ds_numel": param.numel(),
            "ds_shape": param.shape,
            "ds_persist": False,
            "ds_status": ZeroParamStatus.AVAILABLE,
            "partition_numel": partial(_own_numel, ds_id),
            "all_gather": partial(_all_gather, ds_id),
            "partition": partial(_partition, ds_id),
            "ds_summary": partial(_summary, ds_id),
            "ds_process_group": None,
            "ds_active_sub_modules": set(),
        }
        sharded_parameter.list_on_request([param])


def _own_numel(ds_id: int) -> int:
    """``param.partition_numel()``: the number of its elements on this rank."""
    low, high = _own_range(_find(ds_id))
    return high - low


def _all_gather(
    ds_id: int,
    param_list: Sequence[nn.Parameter] | None = None,
    async_op: bool = False,
    hierarchy: int = 0,
) -> _Arrived | None:
    """``param.all_gather(...)``: make parameters whole until their :func:`partition <_partition>`.

    Collective. Other code that runs in between does not change that. Parameters that are whole stay so.
    ``async_op``: return an object with ``wait()``; the values are complete in any case.
    """
    for param in _named_or(ds_id, param_list):
        if _OPENED in param.__dict__ or sharded_parameter.owner_of(param) is None:
            continue
        owner = sharded_parameter.owner_of(param)
        opens = not isinstance(owner, Unit) or owner.is_sharded
        GatheredParameters([param]).__enter__()
        param.__dict__[_OPENED] = opens or any(
            sibling.__dict__.get(_OPENED) for sibling in _siblings(param)
        )
    return _Arrived() if async_op else None


def _partition(
    ds_id: int,
    param_list: Sequence[nn.Parameter] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """``param.partition(...)``: end ``all_gather``. A parameter that it did not gather is left as it is.

    ``has_been_updated``: values that rank 0 wrote are sent to all ranks. Without it an edit raises
    :class:`ShardedAccess`. Collective.

    Raises:
        UsageError: ``free_data`` is False.
    """
    if not free_data:
        raise UsageError(
            "param.partition(free_data=False): a parameter that is not gathered has no memory for "
            "all its values. Leave the argument out, and copy the values before."
        )
    for param in _named_or(ds_id, param_list):
        opened = param.__dict__.pop(_OPENED, None)
        owner = sharded_parameter.owner_of(param)
        if opened is None or owner is None or (isinstance(owner, Unit) and not owner.pin_count):
            continue  # not gathered by ``all_gather``, or an engine has adopted or released it since
        context = GatheredParameters([param], 0 if has_been_updated else None)
        try:
            context.__exit__(None, None, None)
        finally:
            for unit in context.units if opened else ():
                if not unit.pin_count:
                    unit.discard_unsharded(for_keeping=True)  # the shards have edits


def _summary(ds_id: int, slice_shape: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
    """``param.ds_summary()``: what DeepSpeed prints about a parameter, under the same keys."""
    param: Any = _find(ds_id)
    return {
        "id": param.ds_id,
        "status": param.ds_status.name,
        "numel": param.numel(),
        "ds_numel": param.ds_numel,
        "shape": tuple(param.shape),
        "ds_shape": tuple(param.ds_shape),
        "requires_grad": param.requires_grad,
        "grad_shape": None if param.grad is None else tuple(param.grad.shape),
        "persist": param.ds_persist,
        "active_sub_modules": param.ds_active_sub_modules,
        "ds_tensor.shape": (param.partition_numel(),),
    }


class _Arrived:
    """What ``all_gather(async_op=True)`` returns."""

    def wait(self) -> None:
        """Nothing: the values are complete."""


def _named_or(ds_id: int, param_list: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
    return [_find(ds_id)] if param_list is None else sharded_parameter.in_order(param_list)


def _find(ds_id: int) -> nn.Parameter:
    param = _by_id.get(ds_id)
    if param is None:
        raise UsageError(
            f"the parameter with ds_id {ds_id} does not exist any more. This is a copy of it, "
            "which has all values and belongs to no engine. Call the method of a parameter of the "
            "engine's model."
        )
    return param


def _siblings(param: nn.Parameter) -> Sequence[nn.Parameter]:
    """The parameters that are unsharded and resharded together with this one."""
    owner = sharded_parameter.owner_of(param)
    return owner.params if isinstance(owner, Unit) else ()


def _answer_while_away() -> None:
    cls: Any = sharded_parameter.ShardedParameter
    if hasattr(cls, "ds_status"):
        return
    cls.ds_status = property(_status)
    cls.ds_tensor = property(_shard)


def _status(param: nn.Parameter) -> ZeroParamStatus:
    owner = sharded_parameter.owner_of(param)
    in_flight = (UnitState.GATHERING, UnitState.UPDATING)
    if isinstance(owner, Unit) and owner.state in in_flight and not owner.is_sharded:
        return ZeroParamStatus.INFLIGHT
    return ZeroParamStatus.NOT_AVAILABLE


def _shard(param: nn.Parameter) -> Tensor:
    """This rank's part of the parameter, flat ``[n]``; empty if this rank owns none of it."""
    owner = sharded_parameter.owner_of(param)
    holder = owner.bucket if isinstance(owner, BucketedParameter) else owner
    shard_S = holder.shard_S if isinstance(holder, (Unit, ParamBucket)) else None
    if shard_S is None:
        return torch.empty(0, dtype=param.dtype, device=param.device)
    low, high = _own_range(param)
    return shard_S[low:high]


def _own_range(param: nn.Parameter) -> tuple[int, int]:
    """The range of the parameter in this rank's shard."""
    owner = sharded_parameter.owner_of(param)
    if isinstance(owner, Unit):
        layout, rank, slot = owner.layout, owner.comm.rank, owner.layout.slots[owner.index(param)]
    elif isinstance(owner, BucketedParameter):
        return owner.own_part()
    else:
        return 0, 0
    begin, end = layout.shard_range(rank)
    low, high = max(begin, slot.start), min(end, slot.stop)
    return (low - begin, high - begin) if low < high else (0, 0)


# ---------------------------------------------------------------------- modules that are gathered as one


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module itself is marked."""
    return bool(getattr(model, GATHERED_AS_ONE, False))


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """False: modules are marked, not parameters."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark."""
    model._z3_leaf = flag  # type: ignore[assignment]
    setattr(model, GATHERED_AS_ONE, flag)


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Mark every module of these classes, given as types or names. Returns the modules."""
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Remove the marks of every module of these classes. Returns the modules."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names. Returns the modules, and the names that do not exist."""
    return _by(model, module_names, raise_if_not_found, lambda name, asked: name == asked)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their names. Returns the modules, and the suffixes without a match."""
    return _by(
        model,
        module_name_suffixes,
        raise_if_not_found,
        lambda name, asked: name == asked or name.endswith(f".{asked}"),
    )


def _set(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, required: bool
) -> list[nn.Module]:
    if isinstance(classes, (str, type)):
        raise UsageError(f"leaf_module_classes is {classes!r}: give a list of classes or names.")
    found = [module for module in model.modules() if any(_is(module, c) for c in classes)]
    if required and not found:
        raise UsageError(f"no module of the classes {list(classes)} in a {type(model).__name__}.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    kind = type(module)
    if isinstance(wanted, str):
        return wanted in (
            kind.__name__,
            kind.__qualname__,
            f"{kind.__module__}.{kind.__qualname__}",
        )
    return kind is wanted or isinstance(module, wanted)


def _by(
    model: nn.Module, asked: Sequence[str], required: bool, fits: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    if isinstance(asked, str):
        raise UsageError(f"{asked!r}: give a list of names.")
    found: dict[int, Any] = {}
    missing = []
    for wanted in asked:
        modules = [module for name, module in model.named_modules() if fits(name, wanted)]
        found.update((id(module), module) for module in modules)
        if not modules:
            missing.append(wanted)
    if required and missing:
        raise UsageError(f"no modules called {missing} in a {type(model).__name__}.")
    for module in found.values():
        set_z3_leaf_module(module, True)
    return list(found.values()), missing
