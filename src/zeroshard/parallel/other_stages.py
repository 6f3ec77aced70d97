"""What stands on a pipeline stage for the blocks and modules of other stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

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
