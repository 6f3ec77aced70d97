"""The parameters of one unit, or of several, as they become full and sharded again. See [Note: units].

All lists are made when the engine is built. Each change goes through them once, with a few calls into
torch for each parameter and three for all: units of a block pass through their states together, and
calls into Python would be most of what each of them costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.dtensors import KINDS, distributed, local_of
from zeroshard.zero.sharded_parameter import (
    ShardedParameter,
    mark_sharded,
    mark_unsharded,
    nan_placeholder,
)

_set_versions = torch._C._autograd._unsafe_set_version_counter
_increment_version: Callable[[Iterable[Tensor]], None] = torch._C._increment_version  # type: ignore[attr-defined]
_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
_version_of = attrgetter("_version")
_address_of, _strides_of = Tensor.data_ptr, Tensor.stride


class FullParams:
    """Parameters, the ``views`` that are their values while they are full, and what stands there else.

    ``views`` of DTensors are their local tensors. They stay the same objects, also when they get another
    storage.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        views: Sequence[Tensor],
        placeholders: Sequence[Tensor] | None = None,
        kinds: Sequence[type[nn.Parameter]] | None = None,
    ) -> None:
        self.params = tuple(params)
        self.views = tuple(views)
        self._placeholders = tuple(placeholders or map(nan_placeholder, params))
        self._kinds = tuple(kinds or map(type, params))
        self._is_plain = not any(kind in KINDS or kind is FakeTensor for kind in self._kinds)
        self._sharded = tuple(zip(self.params, self._placeholders, strict=True))
        self._full = tuple(zip(self.params, self.views, self._kinds, strict=True))
        # A write into a DTensor is counted by it or, through to_local(), by its local tensor.
        self.versioned = (*self.params, *(self.views[at] for at in distributed(self.params)))
        # A parameter is in its place if it has these in the unit's storage.
        self._offsets = [view.storage_offset() for view in self.views]
        self._strides = [view.stride() for view in self.views]

    @classmethod
    def of_all(cls, parts: Iterable[FullParams]) -> FullParams:
        """The parameters of all ``parts``, in their order."""
        found = [*parts]
        if len(found) == 1:
            return found[0]
        joined = cls(
            [param for part in found for param in part.params],
            [view for part in found for view in part.views],
            [nothing for part in found for nothing in part._placeholders],
            [kind for part in found for kind in part._kinds],
        )
        joined.versioned = tuple(tensor for part in found for tensor in part.versioned)
        return joined

    def hide(self) -> None:
        """Put placeholders into the parameters and raise their versions.

        Backward reads the memory of saved tensors directly, without consulting the class of a parameter.
        Because the version differs, autograd raises an error instead.
        """
        if self._is_plain:
            for param, nothing in self._sharded:
                param.data = nothing
                param.__class__ = ShardedParameter
        else:
            mark_sharded(self.params, self._placeholders)
        _increment_version(self.versioned)

    def show(self) -> tuple[int, ...]:
        """Make the parameters plain ones with the values in their views. Returns their versions."""
        if self._is_plain:
            for param, view, kind in self._full:
                param.__class__ = kind
                param.data = view
        else:
            mark_unsharded(self.params, self.views, self._kinds)
        versions = tuple([version - 1 for version in map(_version_of, self.versioned)])
        _set_versions(self.versioned, versions)
        return versions

    def versions(self) -> tuple[int, ...]:
        """Numbers that PyTorch raises with each write that it counts."""
        return tuple(map(_version_of, self.versioned))

    def increment_versions(self) -> None:
        """Make autograd refuse graphs that saved the parameters."""
        _increment_version(self.versioned)

    def moved(self) -> list[int]:
        """The indices of full parameters that do not have the memory of their views any more."""
        if self._is_plain and (
            # Of tensors with memory: two that are alive have one address if one is in the other.
            [*map(_address_of, self.params)] == [*map(_address_of, self.views)]
            and [*map(_strides_of, self.params)] == self._strides
        ):
            return []
        places = zip(
            map(local_of, self.params), self.views, self._offsets, self._strides, strict=True
        )
        return [
            index
            for index, (local, view, offset, strides) in enumerate(places)
            if not _is_alias_of(local, view)
            or local.storage_offset() != offset
            or _strides_of(local) != strides
        ]
