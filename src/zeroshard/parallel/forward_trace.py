"""What a model's own forward does with its blocks, and what stands for those of other stages.

The model is run on the meta device to find out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from zeroshard.comm.env import local_device
from zeroshard.errors import UnsupportedError
from zeroshard.parallel.whole_copy import cast_parameters, whole_copy
from zeroshard.precision.policy import Policy
from zeroshard.zero.sharded_parameter import mark_sharded, nan_placeholder, owners


class ForwardLeft(BaseException):
    """Ends a forward at the end of a stage. Not an ``Exception``, which a model may catch."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Shell(nn.Module):
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


class Before(Shell):
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


class After(Shell):
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


NOT_FOLLOWED = "so this model cannot be cut without order="


_settings: Any = _config  # torch adds the functions of this module at run time


class _Probe(Shell):
    """Runs a block. ``note`` gets what it was given and what it returned, and may replace the latter."""

    def __init__(self, block: nn.Module, note: Callable[[Any, Any], Any]) -> None:
        super().__init__(block)
        self.block, self._note = block, note

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._note((args, kwargs), self.block(*args, **kwargs))


class _WithoutValues(TorchFunctionMode):
    """Answers questions of the host about the values of a tensor that has none.

    Models ask whether a mask masks anything: it does. The meta device of torch multiplies groups of
    matrices in bf16 only.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor) or not args[0].is_meta:
            return func(*args, **kwargs)
        if func in (Tensor.__bool__, Tensor.__contains__):
            return True
        if getattr(func, "__name__", "") in ("_grouped_mm", "grouped_mm"):
            dtype = args[0].dtype
            args, kwargs = tree_map(_in_bf16, (args, kwargs))
            return func(*args, **kwargs).to(dtype)
        return func(*args, **kwargs)


def _in_bf16(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if is_float else value


class ForwardTrace:
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
            # Masks choose all elements, and routers give all tokens to each expert.
            with (
                torch.enable_grad(),
                _WithoutValues(),
                _settings.patch(meta_nonzero_assume_all_nonzero=True),
            ):
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
        used |= leaves_of(output) | leaves_of(trained)
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


def leaves_of(output: Any) -> set[int]:
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
