"""Layers that are built later, under DeepSpeed's names: ``LayerSpec`` and ``TiedLayerSpec``."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.deepspeed.activations import get_cuda_rng_tracker
from zeroshard.deepspeed.device import get_accelerator
from zeroshard.errors import UsageError


class LayerSpec:
    """A class of layers and the arguments to build one. A rank builds the layers of its own stage only.

    Raises:
        UsageError: ``typename`` is not a class of modules.

    >>> LayerSpec(nn.Linear, 4, 2, bias=False)
    LayerSpec(Linear, 4, 2, bias=False)
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"{type(self).__name__}({typename!r}): give a class of modules and its arguments, such "
                "as LayerSpec(nn.Linear, 4, 2). A function can be in the list of layers as it is."
            )
        self.typename = typename
        self.module_args, self.module_kwargs = module_args, module_kwargs

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        parts = [self.typename.__name__, *map(repr, self.module_args), *named]
        return f"{type(self).__name__}({', '.join(parts)})"

    def build(self, log: bool = False) -> nn.Module:
        """A new layer. ``log`` has no effect."""
        del log
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with all other specs of the same ``key``.

    ``forward_fn(module, input)``: what the layer computes; None: the module's forward.
    ``tied_weight_attr``: names of the parameters that are tied. Here all parameters of the module are.

    Raises:
        UsageError: see :class:`LayerSpec`.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        one = isinstance(tied_weight_attr, str)
        self.tied_weight_attr = [tied_weight_attr] if one else list(tied_weight_attr)


class _Meta(TorchDispatchMode):
    """Inside, each device that is named is the meta device."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("device") is not None:
            given["device"] = torch.device("meta")
        return func(*args, **given)


def outline(spec: LayerSpec) -> nn.Module:
    """The layer on the meta device: names, shapes and dtypes. Leaves random generators as they were.

    A constructor that names a device gets the meta device all the same: so it draws nothing from a
    generator of the program's own either, whose state nobody here could restore.
    """
    with _generators_kept():
        try:
            with torch.device("meta"), _Meta():
                return spec.build()
        except Exception:
            # Some constructors read values, which the meta device does not have. A constructor that
            # cannot run at all raises its own error here.
            return spec.build().to("meta")


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the generators of Python, numpy and torch, and the tracker's streams, afterwards."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    tracker, of_device = get_cuda_rng_tracker(), get_accelerator().get_rng_state()
    streams = dict(tracker.states_)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        get_accelerator().set_rng_state(of_device)
        tracker.states_ = streams
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(drawn)
