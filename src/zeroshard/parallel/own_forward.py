"""Cuts a model with a forward of its own, such as one of Transformers: every stage runs that forward.

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

import copy
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from zeroshard.comm.env import local_device
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.split import PipelineModel, add_tied_children
from zeroshard.parallel.whole_copy import cast_parameters, check_can_copy, whole_copy
from zeroshard.precision.policy import Policy
from zeroshard.zero.sharded_parameter import mark_sharded, nan_placeholder, owners

_LISTS = (nn.ModuleList, nn.Sequential)
NOT_FOLLOWED = "so this model cannot be cut without order="


class ForwardLeft(BaseException):
    """Ends a forward at the end of a stage. Not an ``Exception``, which a model may catch."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Shell(nn.Module):
    """Stands at the place of a block. Has the block's attributes, which the model may read."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        plain = copy.copy(block)
        plain.__dict__ |= {"_parameters": {}, "_modules": {}, "_buffers": {}}
        self.__dict__["_plain"] = plain

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_plain"], name)


class Before(_Shell):
    """Stands for a block of an earlier stage: returns what that stage has sent.

    ``shape_of``: puts hidden states into what the block returns. ``received``: a list with the hidden
    states of the running micro-batch.
    """

    def __init__(
        self, block: nn.Module, shape_of: Callable[[Tensor], Any], received: list[Tensor]
    ) -> None:
        super().__init__(block)
        self._shape_of, self._received = shape_of, received

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._shape_of(self._received[0])


class After(_Shell):
    """Stands for a block of a later stage: ends the forward with the hidden states that it is given."""

    def __init__(self, block: nn.Module, hidden_of: Callable[[Any, Any], Tensor]) -> None:
        super().__init__(block)
        self._hidden_of = hidden_of

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ForwardLeft(self._hidden_of(args, kwargs))


class Absent(nn.Module):
    """Stands for a module whose parameters are on other stages: returns zeros, in the right shapes.

    The shapes are those that the module returns on the meta device. The zeros have memory, since a model
    may change them in place; they are freed soon, because nothing depends on them. Attributes are the
    module's, but its tensors have no values: a model may ask for their device and dtype, and a read is an
    error. ``fqn``: the module's name, for that error.
    """

    def __init__(self, module: nn.Module, fqn: str) -> None:
        super().__init__()
        self.__dict__["_shapes"], _ = whole_copy(module)
        self.__dict__["_fqn"] = fqn
        self.__dict__["_seen"] = {}  # by name: what stands for tensors and modules of the module

    def cast(self, policy: Policy) -> None:
        """Return zeros in the dtypes that the module has where its parameters are."""
        cast_parameters(self.__dict__["_shapes"], policy, self.__dict__["_fqn"])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value, seen = getattr(self.__dict__["_shapes"], name), self.__dict__["_seen"]
        if name not in seen and isinstance(value, nn.Module):
            seen[name] = Absent(value, f"{self._fqn}.{name}")
        elif name not in seen and isinstance(value, Tensor):
            seen[name] = _elsewhere(value, f"{self._fqn}.{name}")
        return seen.get(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        device = given[0].device if given else local_device()
        args, kwargs = tree_map(
            lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs)
        )
        with torch.no_grad():
            returned = self.__dict__["_shapes"](*args, **kwargs)

        return tree_map(
            lambda x: torch.zeros_like(x, device=device) if isinstance(x, Tensor) else x, returned
        )


class _OtherStage:
    """The owner of a tensor of another stage: a read of its values raises."""

    order = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def index(self, _param: Tensor) -> int:
        return 0

    def read(self, _param: nn.Parameter) -> Tensor | None:
        raise UnsupportedError(
            f"the model's forward reads the values of {self.name!r} on a pipeline stage that does not "
            "have them, and its output has no gradient for them, so they were not found when the model "
            "was cut. Cut elsewhere, or pass order= to pipeline()."
        )

    def is_collective_read(self, fact: bool) -> bool:
        return fact

    def ensure_writable(self, _param: nn.Parameter, _beside: Collection[Tensor]) -> bool:
        return False

    def values_version(self, _param: nn.Parameter) -> int | None:
        return None


def _elsewhere(like: Tensor, name: str) -> nn.Parameter:
    """A tensor without values and memory that answers for the shape, dtype and device of another one."""
    param = nn.Parameter(nan_placeholder(like, local_device()), requires_grad=False)
    mark_sharded([param])
    owner = _OtherStage(name)
    owners[param] = lambda: owner
    return param


# ---------------------------------------------------------------- what the model does with its blocks


class _Probe(_Shell):
    """Runs a block. ``note`` gets what it was given and what it returned, and may replace the latter."""

    def __init__(self, block: nn.Module, note: Callable[[Any, Any], Any]) -> None:
        super().__init__(block)
        self.block, self._note = block, note

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._note((args, kwargs), self.block(*args, **kwargs))


class _WithoutValues(TorchFunctionMode):
    """Answers questions of the host about the values of a tensor that has none.

    Models ask whether a mask masks anything: it does. Routers ask which tokens an expert gets: all. The
    meta device of torch multiplies groups of matrices in bf16 only.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor) or not args[0].is_meta:
            return func(*args, **kwargs)
        if func in (Tensor.__bool__, Tensor.__contains__):
            return True
        if func in (torch.nonzero, Tensor.nonzero):
            found = _all_places(args[0])
            return found.unbind(1) if kwargs.get("as_tuple") else found
        if func is torch.where and len(args) == 1 and not kwargs:
            return _all_places(args[0]).unbind(1)
        if getattr(func, "__name__", "") in ("_grouped_mm", "grouped_mm"):
            dtype = args[0].dtype
            args, kwargs = tree_map(_in_bf16, (args, kwargs))
            return func(*args, **kwargs).to(dtype)
        return func(*args, **kwargs)


def _all_places(x: Tensor) -> Tensor:
    """What ``torch.nonzero`` returns if nothing is zero: shape ``(numel, dim)``."""
    return torch.empty((x.numel(), x.dim()), dtype=torch.int64, device=x.device)


def _in_bf16(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if is_float else value


class _Trace:
    """Runs a copy of a model on the meta device, as a whole or one stage of it.

    ``parent``: the name of the list of blocks. ``example``: inputs by name; only their shapes and dtypes
    are used. ``stand_ins``: the parameters of the copy, by the ids of the model's own.
    """

    def __init__(self, model: nn.Module, parent: str, example: Mapping[str, Any]) -> None:
        copied, tensors = whole_copy(model, requires_grad=True)
        self.stand_ins: dict[int, Tensor] = {
            id(param): tensors[id(param)] for param in model.parameters()
        }
        self.model = copied.eval()  # without activation checkpointing
        self.blocks = self.model.get_submodule(parent)
        self.parent = parent
        self.example = {
            name: value.to("meta") if isinstance(value, Tensor) else value
            for name, value in example.items()
        }
        self.calls: list[tuple[Any, Any]] = []  # what each block was given and returned, in order
        self._follow()

    def run(self, modules: Sequence[nn.Module]) -> Any:
        """The output with these modules as blocks."""
        before = dict(self.blocks._modules)
        self.blocks._modules.update(zip(before, modules, strict=True))
        try:
            with torch.enable_grad(), _WithoutValues():
                return self.model(**self.example)
        except ForwardLeft as left:
            return left.hidden
        finally:
            self.blocks._modules.update(before)

    def _follow(self) -> None:
        """Run the whole model, and check that each block takes what the one before it returned."""
        marks, output = self._run_marked()
        self._check_chain()
        if not marks:
            return
        calls = self.calls
        self.model.train()  # may use more than in evaluation, such as logits of routers
        more, trained = self._run_marked()
        self.model.eval()
        self.calls = calls
        used = {id(leaf) for given, _ in calls for leaf in tree_flatten(given)[0]}
        used |= _leaves_of(output) | _leaves_of(trained)
        marks += more
        if not used.isdisjoint(map(id, marks)) or not all(mark.requires_grad for mark in marks):
            raise UnsupportedError(
                f"the blocks of {self.parent!r} return several tensors that the model may use later. "
                f"Only hidden states are sent to the next stage, {NOT_FOLLOWED}."
            )

    def _run_marked(self) -> tuple[list[Tensor], Any]:
        """Run the whole model, and note ``calls``. Returns marks, and the output.

        A mark replaces each tensor that a block returns beside the hidden states, such as attention
        weights. What depends on one has it in its graph.
        """
        self.calls = []
        order: list[int] = []
        marks: list[Tensor] = []

        def note(at: int, given: Any, returned: Any) -> Any:
            leaves, spec = tree_flatten(returned)
            tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            for index in tensors[1:]:
                mark = torch.empty_like(leaves[index])
                marks.append(mark.requires_grad_(mark.is_floating_point()))
                leaves[index] = mark
            returned = tree_unflatten(leaves, spec)
            order.append(at)
            self.calls.append((given, returned))
            return returned

        entries = list(self.blocks.children())
        try:
            output = self.run(
                [_Probe(block, partial(note, at)) for at, block in enumerate(entries)]
            )
        except Exception as error:
            raise UnsupportedError(
                f"{type(self.model).__name__} could not be followed: its forward raised "
                f"{type(error).__name__}: {error}. It was run on the meta device, without values, with "
                f"inputs {sorted(self.example)}. Pass other inputs in example=, or the order of its "
                "submodules in order=."
            ) from error
        if order != list(range(len(entries))):
            raise UnsupportedError(
                f"the forward of {type(self.model).__name__} runs the entries of {self.parent!r} in the "
                f"order {order}, and not each once, {NOT_FOLLOWED}."
            )
        return marks, output

    def _check_chain(self) -> None:
        shapes = []
        for at, (_, returned) in enumerate(self.calls):
            leaves, spec = tree_flatten(returned)
            tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            if not tensors:
                raise UnsupportedError(
                    f"block {self.parent}.{at} returned no hidden states, {NOT_FOLLOWED}."
                )
            shapes.append(
                (spec, tensors[0], [None if i in tensors else x for i, x in enumerate(leaves)])
            )
        self.spec, self.index, self.others = shapes[0]
        if any(shape != shapes[0] for shape in shapes):
            raise UnsupportedError(
                f"the blocks of {self.parent!r} do not all return the same structure, {NOT_FOLLOWED}."
            )

    def place_of_input(self, at: int) -> int:
        """Where block ``at`` takes what the block before it returned: an index into all its arguments.

        Raises:
            UnsupportedError: the model changes it on the way.
        """
        hidden = tree_flatten(self.calls[at - 1][1])[0][self.index]
        leaves = tree_flatten(self.calls[at][0])[0]
        found = [index for index, leaf in enumerate(leaves) if leaf is hidden]
        if len(found) != 1:
            raise UnsupportedError(
                f"{type(self.model).__name__} cannot be cut before {self.parent}.{at}: the block does "
                "not take exactly what the block before it returned, since the model computes "
                "something between them. Cut elsewhere."
            )
        return found[0]

    def around(
        self, blocks: Sequence[nn.Module], low: int, high: int, received: list[Tensor]
    ) -> list[nn.Module]:
        """``blocks`` with others than those from ``low`` to ``high`` replaced."""
        if low:
            self.place_of_input(low)
        after = partial(_taken_at, self.place_of_input(high) if high < len(blocks) else 0)
        return [
            *(Before(block, self.returned, received) for block in blocks[:low]),
            *blocks[low:high],
            *(After(block, after) for block in blocks[high:]),
        ]

    def returned(self, hidden: Tensor) -> Any:
        """What a block returns, with these hidden states."""
        leaves = list(self.others)
        leaves[self.index] = hidden
        return tree_unflatten(leaves, self.spec)


def _taken_at(place: int, args: Any, kwargs: Any) -> Tensor:
    hidden: Tensor = tree_flatten((args, kwargs))[0][place]
    return hidden


def _leaves_of(output: Any) -> set[int]:
    """The ids of the tensors without ``grad_fn`` that the graph of an output begins with."""
    found: set[int] = set()
    flat = tree_flatten(output)[0] if not isinstance(output, Mapping) else list(output.values())
    stack = [t.grad_fn for t in flat if isinstance(t, Tensor) and t.grad_fn is not None]
    found |= {id(t) for t in flat if isinstance(t, Tensor) and t.is_leaf}
    seen = set(stack)
    while stack:
        node = stack.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


# ---------------------------------------------------------------- the stages


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
    _trace: _Trace | None
    _bounds: list[int]
    _users: dict[str, tuple[int, ...]]

    def __init__(
        self, model: nn.Module, parent: str, starts: Sequence[int], trace: _Trace, **keys: Any
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
                blocks._modules[leaf] = shell = _Shell(block)
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
        for leaf, param in module._parameters.items():
            if param is not None and id(param) not in held:
                module._parameters[leaf] = None  # of other stages
        for leaf, child in list(module._modules.items()):
            fqn = f"{name}.{leaf}".lstrip(".")
            if child is None or fqn == self._parent or isinstance(child, _Shell):
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


def _users(model: nn.Module, trace: _Trace, bounds: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The stages that need each parameter, by its name.

    What no stage needs is on the stage of its block, or on the first one.

    Raises:
        UnsupportedError: a stage does not depend on the one before it.
    """
    entries = list(trace.blocks.children())
    users: dict[int, set[int]] = {id(param): set() for param in model.parameters()}
    for stage, (low, high) in enumerate(itertools.pairwise(bounds)):
        received: list[Tensor] = []
        if stage:
            hidden = tree_flatten(trace.calls[low - 1][1])[0][trace.index]
            received.append(torch.empty_like(hidden, requires_grad=True))
        leaves = _leaves_of(trace.run(trace.around(entries, low, high, received)))
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
    """Give the own parameters of a module with children the stages of all: it is never cut in two."""
    for module in model.modules():
        below = set().union(*(users[id(param)] for param in module.parameters()))
        if next(module.children(), None) is not None:
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
    return OwnForwardModel(model, parent, places, _Trace(model, parent, inputs), **keys)


def own_loss(model: nn.Module) -> Callable[[Any, Any], Tensor] | None:
    """The loss that a Transformers model computes from its logits and labels; None for other models."""
    loss, config = getattr(model, "loss_function", None), getattr(model, "config", None)
    if loss is None or config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def of(output: Any, labels: Any) -> Tensor:
        found: Tensor = loss(logits=output.logits, labels=labels, vocab_size=text.vocab_size)
        return found

    return of


def _use_own_initialisation(model: nn.Module) -> None:
    """Let a Transformers model on the meta device fill its modules as its constructor would."""
    initialise = getattr(model, "_init_weights", None)
    if initialise is None:
        return
    for module in model.modules():
        own = list(_own_tensors(module))
        if any(tensor.is_meta for tensor in own):
            for tensor in own:
                if hasattr(tensor, "_is_hf_initialized"):
                    del tensor._is_hf_initialized
            module.__dict__["reset_parameters"] = partial(initialise, module)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor
