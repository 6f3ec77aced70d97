"""Cuts a model into the stages of a pipeline. Each rank keeps its own; names of parameters stay global.

A pipeline runs submodules one after the other, so the model must be such a sequence: a
``torch.nn.Sequential``, or a model whose order the caller gives. A *piece* is one submodule of the
sequence. A stage is a run of pieces.

[Note: ties over stages]
A parameter that pieces of several stages share is *tied* over these stages. The pieces simply have the
same ``nn.Parameter`` object (``head.weight = embed.weight``, or one module in two places); there is
nothing to declare. Its name is its first one in the whole model, on every rank. A rank whose own stages
use the parameter under another name keeps it at the first name as well, in a module that runs nothing
(:class:`TiedWeights`). So all holders list, build, save and load the parameter under one name.
"""

from __future__ import annotations

import copy
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.core.mesh_sources import MeshSource
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.experts.marks import ranks_of_layer
from zeroshard.parallel.schedules import stages_of
from zeroshard.precision.policy import Policy

STAGE = "pipeline_stage_"
"""Begin of the name of the module that runs one stage. It holds no parameters by itself."""

GATHER = REDUCE = ("step", "micro_batch")
AUTO = "auto"
"""The engine chooses one of :data:`GATHER` or :data:`REDUCE`."""


class StageModule(nn.Module):
    """Runs the pieces of one stage. The pieces are registered in the model, under their own names."""

    def __init__(self, pieces: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.pieces = dict(pieces)  # a dict of modules registers none of them

    def forward(self, *inputs: Any) -> Any:
        """The output of the last piece. Several inputs go to the first piece as a tuple."""
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        for piece in self.pieces.values():
            value = piece(value)
        return value


class TiedWeights(nn.Module):
    """Has parameters at the place of a deleted module. It runs nothing.

    ``stands_for``: the class and the options of that module. It computes the first values of parameters
    that are on the meta device.
    """

    stands_for: nn.Module

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        for leaf in names:
            self.register_parameter(leaf, module._parameters[leaf])
        shell = copy.copy(module)
        shell.__dict__ |= {"_parameters": dict(module._parameters), "_modules": {}, "_buffers": {}}
        for leaf, param in module._parameters.items():
            if param is not None and leaf not in self._parameters:
                shape, dtype = param.shape, param.dtype
                there = torch.empty(shape, dtype=dtype, device="meta")
                shell._parameters[leaf] = nn.Parameter(there, requires_grad=False)
        self.__dict__["stands_for"] = shell  # not registered: it has no parameters of the model
        if hasattr(module, "reset_parameters"):
            self.__dict__["reset_parameters"] = partial(_reset, shell, self._parameters)


def _reset(module: nn.Module, own: Mapping[str, nn.Parameter | None]) -> None:
    """Fill ``own`` as the module would. Its other parameters get memory while it does."""
    others = dict(module._parameters)
    device = next(param.device for param in own.values() if param is not None)
    for leaf, param in others.items():
        if leaf not in own and param is not None:
            values = torch.empty_like(param, device=device)
            module._parameters[leaf] = nn.Parameter(values, requires_grad=False)
    module._parameters.update(own)
    try:
        module.reset_parameters()  # type: ignore[operator]  # the caller has looked
    finally:
        module._parameters.update(others)


def _clash(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"the model has a module named {name!r}, and a pipeline has an attribute of that name, so the "
        "engine could not tell them apart. Rename the module, or put the model into another module."
    )


class OwnLoss:
    """The loss of a Transformers model with the configuration ``text``, of its output and labels.

    ``over_ranks(loss, labels)``: the mean over ranks that share a sequence. Labels are shifted then.
    """

    def __init__(self, loss: Callable[..., Tensor], text: Any) -> None:
        self._loss, self._text = loss, text
        self.over_ranks: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        size = self._text.vocab_size
        if self.over_ranks is None:
            return self._loss(logits=output.logits, labels=labels, vocab_size=size)
        own = self._loss(logits=output.logits, labels=None, shift_labels=labels, vocab_size=size)
        return self.over_ranks(own, labels)


class PipelineModel(nn.Module):
    """A model that is cut into stages. Made by ``pipeline()``; the engine calls :meth:`keep`.

    ``stages``: the names of the pieces of each stage. ``ties``: the stages that share a parameter, by the
    parameter's first name ([Note: ties over stages]). ``digest``: a hash of the whole model's parameters,
    its stages and the schedule. Before :meth:`keep`, forward runs the whole model. ``mesh_source``: what
    the model itself says about the mesh.
    """

    mesh_source: MeshSource | None = None
    returns_loss = False
    """Whether the last piece returns the loss, so that no ``loss_fn`` is needed."""
    input_names: Sequence[str] | None = None
    """Names of the inputs of forward, if every stage gets all inputs of a micro-batch; else None."""
    given_names: tuple[str, ...] = ()
    """Those of :attr:`input_names` that the micro-batches of the running step have."""
    batch_cut: Any = None
    """Cuts micro-batches over sequence ranks (``engine.pipeline_batches``); None: there are none."""

    def __init__(
        self,
        pieces: Mapping[str, nn.Module],
        starts: Sequence[str],
        *,
        tree: Mapping[str, nn.Module],
        loss_fn: Callable[[Any, Any], Tensor] | None,
        schedule: str,
        gather: str,
        reduce: str,
        auto_limit_nbytes: int | None = None,
    ) -> None:
        super().__init__()
        self._take(tree)
        self.loss_fn, self.schedule, self.gather, self.reduce = loss_fn, schedule, gather, reduce
        self.auto_limit_nbytes = auto_limit_nbytes
        self.stages: list[list[str]] = [[]]
        for name in pieces:
            if name in starts:
                self.stages.append([])
            self.stages[-1].append(name)
        self._pieces = dict(pieces)
        self.ties = self._find_ties()
        shapes = [
            (name if ranks_of_layer(p, name) == 1 else "expert", tuple(p.shape), str(p.dtype))
            for name, p in self.named_parameters()
        ]
        plan = (shapes, self.stages, self.ties, schedule, gather, reduce, auto_limit_nbytes)
        self.digest = hashlib.sha256(repr(plan).encode()).hexdigest()  # equal on every rank
        # Names and classes of modules, also of those that keep() deletes: patterns may name them.
        self.every_module: list[tuple[str, str]] = [
            (name, type(m).__name__) for name, m in self.named_modules() if name
        ]
        self.every_parameter = [name for name, _ in self.named_parameters()]
        names: dict[int, list[str]] = defaultdict(list)
        for name, param in self.named_parameters(remove_duplicate=False):
            names[id(param)].append(name)
        self.other_names = {first: others for first, *others in names.values() if others}
        self.kept: dict[int, Any] | None = None  # the modules of this rank's stages, by number
        self._placed: tuple[int, int] | None = None  # pipeline rank and size of keep()
        self._stage_of: dict[str, int] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = "_stage_of" not in self.__dict__  # the constructor's last field
        if (
            is_own
            and name in self.__dict__.get("_modules", ())
            and not isinstance(value, nn.Module)
        ):
            raise _clash(name)
        super().__setattr__(name, value)

    def _take(self, tree: Mapping[str, nn.Module]) -> None:
        """Register the modules of the model under their names.

        Raises:
            UnsupportedError: a module has the name of an attribute of this class.
        """
        for name, child in tree.items():
            if hasattr(type(self), name):
                raise _clash(name)
            self.add_module(name, child)

    def cast_stand_ins(self, policy: Policy) -> None:
        """Let what stands for modules of other stages return tensors of the dtypes that those have."""

    def keep(self, rank: int, ranks: int) -> None:
        """Keep the stages of one of ``ranks`` pipeline ranks, and delete all other modules.

        One rank keeps all of them as one stage.

        Raises:
            UsageError: the number of stages is not a multiple of ``ranks``, or other stages were kept
                before.
        """
        if self._placed is not None:
            if self._placed != (rank, ranks):
                raise UsageError(
                    f"the model was cut for pipeline rank {self._placed[0]} of {self._placed[1]}, and "
                    f"now for rank {rank} of {ranks}. The other stages are deleted. Build the model "
                    "again."
                )
            return
        if len(self.stages) % ranks:
            near = max(1, round(len(self.stages) / ranks)) * ranks
            raise UsageError(
                f"the model is cut into {len(self.stages)} stages, which is not a multiple of "
                f"{ranks} pipeline ranks. Give {near - 1} names in split=, for {near} stages."
            )
        if ranks == 1:
            self.stages = [[name for stage in self.stages for name in stage]]
            self.ties = {}
        own = stages_of(rank, ranks, len(self.stages) // ranks)
        self._placed = rank, ranks
        tied = {name for name, stages in self.ties.items() if not set(stages).isdisjoint(own)}
        self.kept = self._leave(own, tied)
        self._pieces = {}
        for stage, module in self.kept.items():
            self.add_module(f"{STAGE}{stage}", module)

    def _leave(self, own: Sequence[int], tied: Collection[str]) -> dict[int, nn.Module]:
        """Delete the pieces of other stages, but not their ``tied`` parameters. Returns own stages."""
        kept = {stage: {name: self._pieces[name] for name in self.stages[stage]} for stage in own}
        names = {name for pieces in kept.values() for name in pieces}
        for name, piece in self._pieces.items():
            if name not in names:
                parent, _, leaf = name.rpartition(".")
                modules = self.get_submodule(parent)._modules
                # In the same place, because a parameter's first name depends on the order of modules.
                modules[leaf] = _tied_part(piece, name, tied)
                if modules[leaf] is None:
                    del modules[leaf]
        for stage, pieces in kept.items():
            for name, piece in pieces.items():
                for fqn, _ in self._parameters_of(name, piece):
                    self._stage_of.setdefault(fqn, stage)
        return {stage: self._stage_module(pieces) for stage, pieces in kept.items()}

    @property
    def inner(self) -> nn.Module:
        """The model as the caller built it, for a tensor plan. Before :meth:`keep`, it is whole."""
        return self

    def whole(self) -> PipelineModel:
        """The pipeline with the pieces of all stages. To be called before :meth:`keep`."""
        return self

    def pieces_of_stages(self) -> list[dict[str, nn.Module]]:
        """The pieces of all stages, by name. To be called before :meth:`keep`."""
        return [{name: self._pieces[name] for name in names} for names in self.stages]

    def set_checkpointing(self, interval: int, *, reentrant: bool) -> None:
        """Recompute activations of ``interval`` layers at a time.

        Raises:
            UsageError: always: only a ``PipelineModule`` does this by itself.
        """
        del reentrant
        raise UsageError(
            f"pipeline.activation_checkpoint_interval is {interval}, but the model was made by "
            "zeroshard.parallel.pipeline(), which does not change what its modules compute. Call "
            "torch.utils.checkpoint in the modules, or use deepspeed.pipe.PipelineModule."
        )

    def loss_of(self, output: Any, labels: Any) -> Tensor:
        """The loss of one micro-batch."""
        if self.loss_fn is not None:
            return self.loss_fn(output, labels)
        assert self.returns_loss
        return output  # type: ignore[no-any-return]

    def call_whole(self, run: Callable[..., Any], inputs: Any) -> Any:
        """``run``, which calls this model's forward, on the inputs of a micro-batch. All stages are here.

        ``inputs``: in the order of :attr:`given_names`, if they have names.
        """
        if self.input_names is not None:
            return run(**dict(zip(self.given_names, inputs, strict=True)))
        return run(*inputs) if isinstance(inputs, tuple) else run(inputs)

    @property
    def loss_source(self) -> str:
        """What computes the loss, for messages."""
        return "loss_fn" if self.loss_fn is not None else "the last layer"

    def schedule_for(self, ranks: int, micro_batches: int) -> str:
        """The name of the schedule of a step with so many micro-batches."""
        del ranks, micro_batches
        return self.schedule

    def _stage_module(self, pieces: Mapping[str, nn.Module]) -> StageModule:
        """The module that runs the pieces of a stage."""
        return StageModule(pieces)

    def _parameters_of(self, name: str, piece: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that a piece uses, under their names in the model."""
        for leaf, param in piece.named_parameters():
            yield f"{name}.{leaf}", param

    def stage_of(self, parameter: str) -> int | None:
        """The stage that has the parameter of this name; None: it is tied over several stages."""
        return None if parameter in self.ties else self._stage_of[parameter]

    def holders_of(self, tied: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a parameter of :attr:`ties`, after :meth:`keep`."""
        assert self._placed is not None
        ranks = self._placed[1]
        return tuple(sorted({stage % ranks for stage in self.ties[tied]}))

    @property
    def tied_ranks(self) -> list[tuple[int, ...]]:
        """Each set of several pipeline ranks that hold a tied parameter, once."""
        held = dict.fromkeys(map(self.holders_of, self.ties))
        return [ranks for ranks in held if len(ranks) > 1]

    def forward(self, *inputs: Any, stage: int | None = None) -> Any:
        """Run one stage, or the whole model if this rank has all of it.

        Raises:
            UsageError: the whole model, on a rank that has a part of it.
        """
        if self.kept is None:
            return StageModule(self._pieces)(*inputs)
        if stage is None:
            if len(self.stages) > 1:
                raise UsageError(
                    f"this rank has {len(self.kept)} of {len(self.stages)} pipeline stages, so it cannot "
                    "run the model alone. Call engine.train_batch() or engine.eval_batch()."
                )
            stage = 0
        module = self._modules[f"{STAGE}{stage}"]
        assert module is not None
        return module(*inputs)

    def _find_ties(self) -> dict[str, tuple[int, ...]]:
        """The stages of each parameter that several stages use, by its first name."""
        users: dict[int, set[int]] = defaultdict(set)
        for stage, names in enumerate(self.stages):
            for name in names:
                for _, param in self._parameters_of(name, self._pieces[name]):
                    users[id(param)].add(stage)
        named = [(name, tuple(sorted(users[id(p)]))) for name, p in self.named_parameters()]
        return {name: stages for name, stages in named if len(stages) > 1}


def _tied_part(module: nn.Module, name: str, tied: Collection[str]) -> nn.Module | None:
    """The tree of a deleted module with its parameters of ``tied`` only; None: it has none of them."""
    leaves = [leaf for leaf in module._parameters if f"{name}.{leaf}" in tied]
    found = TiedWeights(module, leaves) if leaves else nn.Module()
    add_tied_children(found, module, name, tied)
    return found if leaves or found._modules else None


def add_tied_children(
    found: nn.Module, module: nn.Module, name: str, tied: Collection[str]
) -> None:
    """Give ``found`` what the children of a deleted module have of ``tied``, under the same names."""
    for leaf, child in module.named_children():
        if (part := _tied_part(child, f"{name}.{leaf}", tied)) is not None:
            found.add_module(leaf, part)


def check_choice(key: str, value: object, choices: Sequence[str]) -> None:
    """Raise :class:`UsageError` for another value than the choices. ``key``: ``call(argument``."""
    if value not in choices:
        raise UsageError(f"{key}={value!r}): choose one of {', '.join(choices)}.")


def check_traffic(call: str, gather: str, reduce: str, auto_limit_nbytes: int | None) -> None:
    """Check how often ``call`` is to gather and reduce."""
    check_choice(f"{call}(gather", gather, (*GATHER, AUTO))
    check_choice(f"{call}(reduce", reduce, (*REDUCE, AUTO))
    if auto_limit_nbytes is None:
        return
    if type(auto_limit_nbytes) is not int or auto_limit_nbytes < 0:
        raise UsageError(
            f"{call}(auto_limit_nbytes={auto_limit_nbytes!r}): give the most bytes that auto may hold on "
            "each rank, a whole number from 0, or None for a part of the free memory."
        )
    if AUTO not in (gather, reduce):
        raise UsageError(
            f"{call}(auto_limit_nbytes={auto_limit_nbytes}) limits what auto chooses, but gather="
            f"{gather!r} and reduce={reduce!r} leave no choice. Pass 'auto' for one of them, or no limit."
        )


def cut_sequence(
    model: nn.Module, split: Sequence[str], order: Sequence[str] | None, **keys: Any
) -> PipelineModel:
    """Cut a model that runs its submodules one after the other. See ``pipeline()``."""
    names = _order_of(model, order)
    pieces = dict(_expanded(model, names, split, required=order is not None))
    _check_cuts(pieces, split)
    _check_complete(model, pieces)
    return PipelineModel(pieces, split, tree=dict(model.named_children()), **keys)


def _order_of(model: nn.Module, order: Sequence[str] | None) -> list[str]:
    if order is None:
        return [name for name, _ in model.named_children()]
    known = dict(model.named_modules())
    for name in order:
        if name not in known or not name:
            raise UsageError(
                f"order= names {name!r}, which is not a submodule of {type(model).__name__}. Its "
                f"children are {', '.join(known_name for known_name, _ in model.named_children())}."
            )
    return list(order)


def _expanded(
    model: nn.Module, names: Iterable[str], split: Sequence[str], *, required: bool
) -> Iterator[tuple[str, nn.Module]]:
    """The pieces: the named modules, with containers replaced by their entries where needed."""
    for name in names:
        module = model.get_submodule(name)
        inside = any(cut.startswith(f"{name}.") for cut in split)
        if isinstance(module, nn.ModuleList) or (inside and type(module) is nn.Sequential):
            entries = [f"{name}.{leaf}" for leaf, _ in module.named_children()]
            yield from _expanded(model, entries, split, required=required)
        elif inside:
            cut = next(cut for cut in split if cut.startswith(f"{name}."))
            raise UsageError(
                f"split= names {cut!r}, which is inside {name!r}, a {type(module).__name__} with a "
                "forward of its own. A model can be cut between pieces: entries of a Sequential or "
                "ModuleList, or names in order=."
            )
        else:
            yield name, module


def _check_cuts(pieces: Mapping[str, nn.Module], split: Sequence[str]) -> None:
    place = {name: at for at, name in enumerate(pieces)}
    for cut in split:
        if cut not in place:
            raise UsageError(
                f"split= names {cut!r}, which is not a piece of the model. Pieces are: "
                f"{', '.join(list(pieces)[:12])}{'...' if len(pieces) > 12 else ''}."
            )
        if not place[cut]:
            raise UsageError(
                f"split= names {cut!r}, the first piece: the stage before it is empty."
            )
    places = [place[cut] for cut in split]
    if places != sorted(set(places)):
        raise UsageError(
            f"split={list(split)} is not in the order of the model, or has a name twice. Give each "
            "stage's first piece once, in order."
        )


def _check_complete(model: nn.Module, pieces: Mapping[str, nn.Module]) -> None:
    """Refuse parameters and buffers that no piece has: no stage would use them."""
    held = {id(t) for piece in pieces.values() for t in (*piece.parameters(), *piece.buffers())}
    named = [*model.named_parameters(), *model.named_buffers()]
    lost = [name for name, tensor in named if id(tensor) not in held]
    if lost:
        raise UsageError(
            f"{lost[0]!r} (and {len(lost) - 1} more parameters or buffers) belongs to no piece of the "
            "pipeline, so no stage would use it. Name its module in order=, or move it into a module "
            "that is one of the pieces."
        )
