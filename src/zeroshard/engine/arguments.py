"""Checks the objects that a caller passes to an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeroshard.errors import UsageError
from zeroshard.zero.sharded_parameter import owner_of
from zeroshard.zero.unit import Unit

_INSTEAD = "Pass model.parameters(), a list of them, or a list of param-group dicts."


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
                f"model is wrapped in {kind.__name__}, which spreads it over the ranks or devices too. "
                "Pass the model itself: model.module."
            )
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad] or params
    if trained and all(isinstance(owner_of(param), Unit) for param in trained):
        raise UsageError(
            "model belongs to an engine already, and two would write its parameters. Call close() (or "
            "destroy()) of that engine before you build another, and pass engine.module."
        )


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
                    '"params". Name its parameters there.'
                )
            continue
        named = isinstance(member, tuple) and len(member) == 2
        if not isinstance(member[1] if named else member, Tensor):
            raise UsageError(
                f"model_parameters holds a {type(member).__name__}, which is no parameter. "
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
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def schedule_over(given: Any, optimizer: torch.optim.Optimizer) -> Any:
    """The schedule: ``given``, or what the function or class ``given`` makes from the optimizer.

    Raises:
        UsageError: it is not a schedule, or belongs to another optimizer.
    """
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
            f"lr_scheduler follows another optimizer ({type(follows).__name__}) than the engine's "
            f"({type(optimizer).__name__}), so it would change nothing. Pass a function that "
            "makes it from the engine's optimizer."
        )
    return made


def check_loss(loss: Any) -> None:
    """Check that a loss can be backpropagated.

    Raises:
        UsageError: it is not a scalar tensor, or has no graph.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(
            f"engine.backward needs a scalar loss, got {shape}. Reduce it first, for instance "
            "with .mean()."
        )
    if not loss.requires_grad:
        raise UsageError(
            "engine.backward(loss): the loss has no graph. It was computed under torch.no_grad(), "
            "detached, or depends on no trainable parameter."
        )


def check_dataset(dataset: Any) -> None:
    """Check that a loader can be made of a dataset.

    Raises:
        UsageError: it is a loader, or not a dataset.
    """
    is_data = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    if isinstance(dataset, DataLoader) or not is_data:
        raise UsageError(
            f"training_data is a {type(dataset).__name__}, not a dataset. Pass the dataset itself; "
            "the engine makes the loader that splits it over the ranks."
        )


def refused_graph(error: RuntimeError) -> UsageError | None:
    """A clearer error if autograd refuses a graph because a saved parameter has changed; else None."""
    if "modified by an inplace operation" not in str(error):
        return None
    return UsageError(
        "backward needs a tensor that was changed after forward. If the program changed it in place, "
        "that is the place to mend, with or without ZeRO. If it is a parameter, either an update came "
        "in between (a graph kept by retain_graph=True is of no use after engine.step()), or a module "
        "that is gathered as one unit left a tensor elsewhere than in its output (self.aux_loss = ...), "
        "so that backward entered it unnoticed: return that tensor from its forward, in a tuple, dict or "
        "dataclass. torch's own words: " + str(error).split(". Hint")[0]
    )
