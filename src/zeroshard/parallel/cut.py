"""Cuts a model into the stages of a pipeline, also one with a forward of its own: every stage runs it.

The model must run one list of blocks, one after the other. A stage runs the model's whole forward on the
inputs of the micro-batch, with other modules at the places of blocks that it does not have. Those before
its first block return what the stage before has sent; the first one after its last block ends the
forward with what the stage's last block returned. So masks and positions are computed on every stage by
the model's own code, and nothing here knows its class. Between stages travel the hidden states and the
inputs of the micro-batch, which are small.

Which stage needs which parameter is found by running every stage once on the meta device, where tensors
have no memory. The graph of a stage's output contains exactly the parameters that it depends on. A
parameter that several stages need is tied over them. Modules whose parameters a stage does not need, such
as the embedding, run all the same before its first block, and their results are not used. They are
replaced by modules that return zeros of the right shapes (:class:`Absent`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from zeroshard.comm.mesh_objects import text_config
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.forward_trace import (
    NOT_FOLLOWED,
    Absent,
    ForwardLeft,
    ForwardTrace,
    Shell,
    leaves_of,
)
from zeroshard.parallel.initial_values import own_tensors
from zeroshard.parallel.schedules import SCHEDULES, SPLIT_BACKWARD
from zeroshard.parallel.split import (
    OwnLoss,
    PipelineModel,
    add_tied_children,
    check_choice,
    check_traffic,
    cut_sequence,
)
from zeroshard.parallel.whole_copy import check_can_copy
from zeroshard.precision.policy import Policy


def pipeline(
    model: nn.Module,
    *,
    split: Sequence[str],
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    order: Sequence[str] | None = None,
    example: Mapping[str, Any] | None = None,
    schedule: str = "1F1B",
    gather: str = "micro_batch",
    reduce: str = "micro_batch",
    auto_limit_nbytes: int | None = None,
) -> PipelineModel:
    """Cut ``model`` into ``len(split) + 1`` stages. Pass the result to ``zeroshard.initialize``.

    ``split``: the name of the first piece of each stage but the first, for example ``["layers.8"]``.
    ``order``: the names of the submodules in the order in which they run, each on the output of the one
    before. A ``ModuleList`` in it stands for its entries.
    ``example``: without ``order``, inputs of a micro-batch by name. The model is run with their shapes on
    the meta device, and every stage runs the model's own forward around its blocks. A Transformers model
    needs neither ``order`` nor ``example``.
    ``loss_fn(output, labels)``: the mean loss of one micro-batch, called on the last stage. A
    Transformers model has one.
    ``schedule``: GPipe, 1F1B, Interleaved1F1B or LoopedBFS. Stage ``s`` is on pipeline rank ``s`` modulo
    their number; with several stages per rank, the schedule is one of the last two.
    ``gather``: at ZeRO stage 3 parameters are gathered for each forward and backward (``micro_batch``),
    or once per step and held through it (``step``).
    ``reduce``: at stages 2 and 3 gradients are reduced after each backward, or once per step. Then each
    rank holds whole gradients, as at stage 1. For both, ``auto`` takes what moves least among what fits.
    ``auto_limit_nbytes``: the most bytes that ``auto`` may hold more on each rank than ``micro_batch``
    holds. None: with the states that are to be allocated, at most half of the free memory.

    The model is taken apart and cannot be used by itself afterwards.

    Raises:
        UsageError: a name is not in the model, or the model cannot be cut there.
        UnsupportedError: without ``order``, the model does not run its blocks one after the other.
    """
    if schedule in SPLIT_BACKWARD:
        raise UsageError(
            f"pipeline(schedule={schedule!r}) is not implemented yet: it runs the two halves of a "
            "backward at different times, and ZeRO reduces a gradient when it arrives. Choose one of "
            f"{', '.join(SCHEDULES)}."
        )
    check_choice("pipeline(schedule", schedule, tuple(SCHEDULES))
    check_traffic("pipeline", gather, reduce, auto_limit_nbytes)
    if isinstance(split, str):
        raise UsageError(f"split={split!r} is one name. Give a list of names: [{split!r}].")
    keys: dict[str, Any] = {"schedule": schedule, "gather": gather, "reduce": reduce}
    keys["auto_limit_nbytes"] = auto_limit_nbytes
    if order is not None or type(model).forward is nn.Sequential.forward:
        return cut_sequence(model, list(split), order, loss_fn=loss_fn, **keys)
    if example is None and not isinstance(getattr(model, "dummy_inputs", None), Mapping):
        raise _needs_order(model)
    return cut_own_forward(model, split, example, loss_fn=loss_fn or own_loss(model), **keys)


def _needs_order(model: nn.Module) -> UsageError:
    children = ", ".join(name for name, _ in model.named_children())
    return UsageError(
        f"{type(model).__name__} has a forward of its own, and a pipeline needs the order in which "
        "its submodules run. If each takes the output of the one before, give their names, for "
        'example order=["embed", "layers", "head"]. If it runs a list of blocks in a forward that '
        "does more, give inputs of a micro-batch by name, example={...}: only their shapes and "
        f"dtypes are used. The children of {type(model).__name__} are {children}."
    )


_LISTS = (nn.ModuleList, nn.Sequential)


class OwnForwardStage(nn.Module):
    """Runs the model's forward with the blocks of one stage. See the module's text."""

    def __init__(self, owner: OwnForwardModel, stage: int) -> None:
        super().__init__()
        self.__dict__["_owner"] = owner
        self._stage = stage

    def forward(self, *inputs: Any) -> Any:
        """The first stage gets the inputs of the micro-batch, others the hidden states before them."""
        owner: OwnForwardModel = self.__dict__["_owner"]
        return owner.run_stage(self._stage, inputs)


class OwnForwardModel(PipelineModel):
    """A model with a forward of its own that is cut into stages. Made by :func:`cut_own_forward`."""

    input_names: Sequence[str]
    _model: nn.Module
    _parent: str
    _trace: ForwardTrace | None
    _bounds: list[int]
    _users: dict[str, tuple[int, ...]]

    def __init__(
        self, model: nn.Module, parent: str, starts: Sequence[int], trace: ForwardTrace, **keys: Any
    ) -> None:
        pieces = {f"{parent}.{leaf}": m for leaf, m in model.get_submodule(parent).named_children()}
        bounds = [0, *starts, len(pieces)]
        # Before the constructor, which asks for ties. Not registered: this module has its own tables.
        self.__dict__ |= {"_model": model, "_parent": parent, "_trace": trace, "_bounds": bounds}
        self.__dict__["_users"] = _users(model, trace, bounds)
        names = list(pieces)
        super().__init__(pieces, [names[at] for at in starts], tree={}, **keys)
        for key in ("config", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            if hasattr(model, key):
                self.__dict__[key] = getattr(model, key)
        self.input_names = _names_of_inputs(model)
        self._tables: dict[int, dict[str, nn.Module]] = {}  # by stage: the entries of the list
        self._received: list[Tensor] = []
        _use_own_initialisation(model)

    def _take(self, tree: Mapping[str, nn.Module]) -> None:
        """Have the model's own tables: what is replaced here is replaced in the model."""
        super()._take({name: m for name, m in self._model._modules.items() if m is not None})
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = self._model.__dict__[table]

    @property
    def inner(self) -> nn.Module:
        """The model whose forward every stage runs."""
        return self._model

    def train(self, mode: bool = True) -> OwnForwardModel:
        """As in any module; the model itself is no child of this one."""
        self._model.training = mode
        super().train(mode)
        return self

    def _find_ties(self) -> dict[str, tuple[int, ...]]:
        return {name: stages for name, stages in self._users.items() if len(stages) > 1}

    def _leave(self, own: Sequence[int], tied: Collection[str]) -> dict[int, nn.Module]:
        users = {id(param): self._users[name] for name, param in self.named_parameters()}
        if len(self.stages) > 1:
            self._leave_blocks(own, tied)
            held = {key for key, stages in users.items() if not set(stages).isdisjoint(own)}
            self._leave_out(self._model, "", held)
        for name, param in self.named_parameters():
            stages = users[id(param)] if len(self.stages) > 1 else (0,)
            self._stage_of[name] = next(stage for stage in stages if stage in own)
        self.__dict__["_trace"] = None
        return {stage: OwnForwardStage(self, stage) for stage in own}

    def _leave_blocks(self, own: Sequence[int], tied: Collection[str]) -> None:
        """Replace the blocks of other stages by shells."""
        blocks = self._model.get_submodule(self._parent)
        entries = dict(blocks.named_children())
        self._tables = {stage: self._table(entries, stage) for stage in own}
        here = [slice(*self._bounds[stage : stage + 2]) for stage in own]
        kept = {leaf for part in here for leaf in list(entries)[part]}
        for leaf, block in entries.items():
            if leaf not in kept:
                blocks._modules[leaf] = shell = Shell(block)
                add_tied_children(shell, block, f"{self._parent}.{leaf}", tied)

    def _table(self, entries: Mapping[str, nn.Module], stage: int) -> dict[str, nn.Module]:
        """The modules at the places of all blocks while a stage runs."""
        assert self._trace is not None
        low, high = self._bounds[stage : stage + 2]
        blocks = list(entries.values())
        return dict(
            zip(entries, self._trace.around(blocks, low, high, self._received), strict=True)
        )

    def _leave_out(self, module: nn.Module, name: str, held: set[int]) -> None:
        """Replace what has only parameters of other stages, from ``module`` downwards."""
        for leaf, child in list(module._modules.items()):
            fqn = f"{name}.{leaf}".lstrip(".")
            if child is None or fqn == self._parent or isinstance(child, Shell):
                continue
            there = [id(param) in held for param in child.parameters()]
            if there and not any(there) and not self._parent.startswith(f"{fqn}."):
                module._modules[leaf] = Absent(child, fqn)
            elif not all(there):
                self._leave_out(child, fqn, held)

    def cast_stand_ins(self, policy: Policy) -> None:
        """See :meth:`PipelineModel.cast_stand_ins`."""
        for module in list(self.modules()):
            if isinstance(module, Absent):
                module.cast(policy)

    def forward(self, *inputs: Any, stage: int | None = None, **named: Any) -> Any:
        """Run one stage, or the whole model if this rank has all of it.

        Raises:
            UsageError: the whole model, on a rank that has a part of it.
        """
        if stage is None and (self.kept is None or len(self.stages) == 1):
            return self._model(*inputs, **named, **self.options)
        return super().forward(*inputs, stage=stage)

    def run_stage(self, stage: int, inputs: tuple[Any, ...]) -> Any:
        """Run the model's forward with the blocks of a stage. Others pass on what they are given."""
        if stage:
            self._received[:], inputs = inputs[:1], inputs[1:]
        given = dict(zip(self.given_names, inputs, strict=True)) | self.options
        blocks = self._model.get_submodule(self._parent)
        before = dict(blocks._modules)
        blocks._modules.update(self._tables[stage])
        try:
            return self._model(**given)
        except ForwardLeft as left:
            return (left.hidden, *inputs)
        finally:
            blocks._modules.update(before)
            self._received.clear()

    @property
    def options(self) -> dict[str, Any]:
        """What is passed to forward beside the inputs: training needs no cache of keys and values."""
        return {"use_cache": False} if "use_cache" in self.input_names else {}


def _names_of_inputs(model: nn.Module) -> list[str]:
    """What the model's forward may be given by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = inspect.signature(model.forward).parameters
    return [name for name, parameter in given.items() if parameter.kind in kinds]


def _users(
    model: nn.Module, trace: ForwardTrace, bounds: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """The stages that need each parameter, by its name.

    What no stage needs is on the stage of its block, or on the first one.
    """
    entries = list(trace.blocks.children())
    users: dict[int, set[int]] = {id(param): set() for param in model.parameters()}
    for stage, (low, high) in enumerate(itertools.pairwise(bounds)):
        received: list[Tensor] = []
        if stage:
            hidden = tree_flatten(trace.calls[low - 1][1])[0][trace.index]
            received.append(torch.empty_like(hidden, requires_grad=True))
        leaves = leaves_of(trace.run(trace.around(entries, low, high, received)))
        if received and id(received[0]) not in leaves:
            raise UnsupportedError(
                f"the output of pipeline stage {stage} of {type(model).__name__} does not depend on that "
                f"of the stage before, {NOT_FOLLOWED}."
            )
        for key, stand_in in trace.stand_ins.items():
            if id(stand_in) in leaves:
                users[key].add(stage)
        for block in list(model.get_submodule(trace.parent).children())[low:high]:
            for param in block.parameters():
                users[id(param)] = users[id(param)] or {stage}
    _keep_whole(model, users)
    return {
        name: tuple(sorted(users[id(param)])) or (0,) for name, param in model.named_parameters()
    }


def _keep_whole(model: nn.Module, users: Mapping[int, set[int]]) -> None:
    """Give the own parameters of each module the stages of all in it: it is never cut in two."""
    for module in model.modules():
        below = set().union(*(users[id(param)] for param in module.parameters()))
        for param in module.parameters(recurse=False):
            users[id(param)] |= below


def cut_own_forward(
    model: nn.Module, split: Sequence[str], example: Mapping[str, Any] | None, **keys: Any
) -> OwnForwardModel:
    """Cut a model by the names of blocks. ``example``: inputs by name, of which only shapes are used.

    Raises:
        UsageError: the names are not entries of one ``ModuleList`` or ``Sequential``, in order.
        UnsupportedError: the model's forward does not run the blocks one after the other.
    """
    parents = {name.rpartition(".")[0] for name in split}
    known = dict(model.named_modules())
    parent = next(iter(parents), "")
    lists = [name for name, module in known.items() if name and isinstance(module, _LISTS)]
    if len(parents) != 1 or parent not in lists:
        raise UsageError(
            f"split={list(split)} does not name entries of one ModuleList or Sequential. "
            f"{type(model).__name__} has a forward of its own, so it is cut between blocks. "
            + (
                f"Its lists are {', '.join(lists[:8])}; name for example {lists[0]}.1."
                if lists
                else "It has no list of modules, so it cannot be cut without order=."
            )
        )
    leaves = list(known[parent]._modules)
    places = []
    for name in split:
        leaf = name.rpartition(".")[2]
        if leaf not in leaves or leaf == leaves[0]:
            raise UsageError(
                f"split= names {name!r}. Give names from {parent}.{leaves[min(1, len(leaves) - 1)]} to "
                f"{parent}.{leaves[-1]}: the first block that is on the next stage."
            )
        places.append(leaves.index(leaf))
    if places != sorted(set(places)):
        raise UsageError(
            f"split={list(split)} is not in the order of the model, or has a name twice. Give each "
            "stage's first block once, in order."
        )
    check_can_copy(model)
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise UnsupportedError(
            "config.output_router_logits adds a loss over the routers of all blocks, and a stage has "
            "some of them. Set it to False."
        )
    inputs = dict(example if example is not None else model.dummy_inputs)  # type: ignore[arg-type]
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return OwnForwardModel(model, parent, places, ForwardTrace(model, parent, inputs), **keys)


def own_loss(model: nn.Module) -> OwnLoss | None:
    """The loss that a Transformers model computes from its logits and labels; None for other models."""
    loss, config = getattr(model, "loss_function", None), getattr(model, "config", None)
    if loss is None or config is None:
        return None
    return OwnLoss(loss, text_config(config))


def _use_own_initialisation(model: nn.Module) -> None:
    """Let a Transformers model on the meta device fill its modules as its constructor would."""
    initialise = getattr(model, "_init_weights", None)
    if initialise is None:
        return
    for module in model.modules():
        own = own_tensors(module)
        if any(tensor.is_meta for tensor in own):
            for tensor in own:
                if hasattr(tensor, "_is_hf_initialized"):
                    del tensor._is_hf_initialized
            module.__dict__["reset_parameters"] = partial(initialise, module)
