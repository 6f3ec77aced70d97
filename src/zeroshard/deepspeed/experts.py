"""DeepSpeed's helpers for models with expert layers (``deepspeed.moe.utils``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zeroshard.checkpoint.deepspeed.unpickle import load_plain
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.experts.layer import layers_of
from zeroshard.experts.marks import is_expert

ParamGroups = dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]]


def is_moe_param(param: Tensor) -> bool:
    """Whether it belongs to an expert of a ``MoE`` layer."""
    return is_expert(param)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there are such layers, and the number of experts of the first one, 0 without."""
    first = next(iter(layers_of(m).values()), None)
    return first is not None, 0 if first is None else first.num_experts


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a param group was made for experts by the functions below."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that are of no expert, and those of experts."""
    found = list(params)
    return [p for p in found if not is_expert(p)], [p for p in found if is_expert(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of parameters that are of no expert, and of those of experts. None is left out."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [
        p.grad for p in experts if p.grad is not None
    ]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: ParamGroups, max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The groups without experts, and after them, with the same options, groups of the experts.

    Those have ``"moe": True`` and the name ``ep_size_N`` of DeepSpeed. The engine needs no such groups:
    it knows experts by their marks. ``max_group_size``: has no effect, since memory does not depend on
    groups. A model without experts gets its groups back.

    Raises:
        UsageError: ``param_groups`` is not a dict or a list of dicts.
    """
    del max_group_size
    given: Sequence[Any] = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if bad := [each for each in given if not isinstance(each, dict) or "params" not in each]:
        raise UsageError(
            f"param_groups has a {type(bad[0]).__name__}; it must be a param group of an optimizer, a "
            "dict with 'params', or a list of such dicts."
        )
    of_experts: list[dict[str, Any]] = []
    for group in given:
        shared, experts = split_params_into_shared_and_expert_params(_listed(group["params"]))
        group["params"] = shared
        names = dict.fromkeys(str(getattr(param, "group_name", "")) for param in experts)
        of_experts += [
            {
                **group,
                "name": name,
                "moe": True,
                "params": [p for p in experts if str(getattr(p, "group_name", "")) == name],
            }
            for name in names
        ]
    return [*given, *of_experts]


def _listed(params: Any) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Groups for an optimizer from parameters or from param groups, with groups of experts apart."""
    if model_parameters and isinstance(model_parameters[0], Tensor):
        whole = {"params": model_parameters, "name": "dense-params"}
        return split_params_into_different_moe_groups_for_optimizer(whole)
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


def load_moe_state_dict(
    checkpoint_path: str | Path,
    tag: str | None,
    state_dict: dict[str, Any],
    old_moe_load: bool,
    model: nn.Module | None = None,
    mpu: Any = None,
    num_experts: Any = 1,
    checkpoint_engine: Any = None,
) -> None:
    """Add the weights of this rank's experts to ``state_dict``, from a checkpoint of DeepSpeed.

    DeepSpeed has a file for each expert of each layer (``old_moe_load``: for each expert of all layers),
    and the rest of the model in others. Names are those of ``model`` here, with the number of the expert
    in the whole layer, so ``model.load_state_dict`` takes them before ``initialize``. The last three
    arguments have no effect.

    Raises:
        UsageError: there is no ``model``.
        CheckpointError: a file is missing or damaged, or has other experts.
    """
    del mpu, num_experts, checkpoint_engine
    if model is None:
        raise UsageError(
            "load_moe_state_dict() got no model, so it is unknown which experts this rank has. Pass "
            "model=..., the model whose weights are loaded."
        )
    folder = Path(checkpoint_path) / ("" if tag is None else str(tag))
    for layer_id, (name, layer) in enumerate(layers_of(model).items()):
        inner = f"{name}.deepspeed_moe.experts.deepspeed_experts."
        names = [key for key in layer.state_dict(prefix=f"{name}.") if key.startswith(inner)]
        for number in dict.fromkeys(key[len(inner) :].split(".")[0] for key in names):
            file = f"expert_{number}_mp_rank_00_model_states.pt"
            path = folder / (file if old_moe_load else f"layer_{layer_id}_{file}")
            found = load_plain(path, {})
            own = [key for key in names if key.startswith(f"{inner}{number}.")]
            if missing := [key for key in own if key not in found]:
                raise CheckpointError(
                    f"{path} has no {missing[0]!r}, which the model has: it belongs to another model, or "
                    f"the layers come in another order. It has {', '.join(map(str, list(found)[:3]))}..."
                )
            state_dict.update({key: found[key] for key in own})
