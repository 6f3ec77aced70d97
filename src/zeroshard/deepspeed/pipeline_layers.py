"""Layers of a pipeline: their specs, how they are built, and how they are cut into stages."""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.deepspeed.activations import get_cuda_rng_tracker
from zeroshard.deepspeed.device import get_accelerator
from zeroshard.deepspeed.helpers import partition_balanced, partition_uniform, set_random_seed
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.split import PipelineModel


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


# ---------------------------------------------------------------------- layers from specs


class FunctionPiece(nn.Module):
    """A layer that is a function, or a tied module that runs through one. It has no parameters.

    ``module``: the tied module. It is registered in the model, under ``tied_modules``.
    """

    def __init__(self, call: Callable[..., Any] | None, module: nn.Module | None = None) -> None:
        super().__init__()
        self.call = call
        # A tuple of modules registers none of them.
        self.held: tuple[nn.Module, ...] = () if module is None else (module,)

    def forward(self, value: Any) -> Any:
        """The output of the layer."""
        if self.call is None:
            return self.held[0](value)
        return self.call(*self.held, value)


def check_layers(specs: Sequence[Any], checkpointable_layers: Any) -> None:
    if not specs:
        raise UsageError(
            "PipelineModule(layers=[]): there is no layer. Give modules or LayerSpecs."
        )
    for at, layer in enumerate(specs):
        if isinstance(layer, PipelineModel):
            raise UsageError(
                f"layer {at} of PipelineModule is a {type(layer).__name__}. A pipeline cannot be inside "
                "another one: put its layers into the list."
            )
        if not isinstance(layer, (nn.Module, LayerSpec)) and (
            isinstance(layer, type) or not callable(layer)
        ):
            raise UsageError(
                f"layer {at} of PipelineModule is {layer!r}. A layer is a module, a function, or a "
                "LayerSpec. Write LayerSpec(Class, ...) for a class."
            )
    if checkpointable_layers is not None and not isinstance(checkpointable_layers, list):
        raise UsageError(
            f"checkpointable_layers is {checkpointable_layers!r}. Give a list of names of classes."
        )


def tied_weights(specs: Sequence[Any]) -> dict[str, Any]:
    """The names of the weights that layers share, by key."""
    return {spec.key: spec.tied_weight_attr for spec in specs if isinstance(spec, TiedLayerSpec)}


def seeding(seed_fn: Callable[[int], Any] | None, base_seed: int) -> Callable[[int], Any]:
    """A function that seeds the generators for the layer with this number."""
    seed = set_random_seed if seed_fn is None else seed_fn
    return lambda at: seed(base_seed + at)


def unseeded(_at: int) -> None:
    """The generators go on as they are."""


def outlines_of(specs: Sequence[Any]) -> list[nn.Module | None]:
    """The layers as modules, without memory for those that specs build; None for functions."""
    tied: dict[str, nn.Module] = {}
    found: list[nn.Module | None] = []
    for at, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            module = tied.setdefault(spec.key, tied.get(spec.key) or outline(spec))
            _check_tied(at, spec, module)
            found.append(module)
        elif isinstance(spec, LayerSpec):
            found.append(outline(spec))
        else:
            found.append(spec if isinstance(spec, nn.Module) else None)
    return found


def _check_tied(at: int, spec: TiedLayerSpec, module: nn.Module) -> None:
    """Refuse names of tied parameters that the module does not have."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name in map(str, spec.tied_weight_attr):
        if name not in names and not _is_parameter(module, name):
            raise UsageError(
                f"layer {at} of PipelineModule: tied_weight_attr names {name!r}, which is not a "
                f"parameter of the module tied as {spec.key!r}, a {type(module).__name__}. It has "
                f"{', '.join(sorted(names)) or 'none'}."
            )


def _is_parameter(module: nn.Module, name: str) -> bool:
    """Whether a name that is no name of a parameter stands for one, as a property does."""
    try:
        found: Any = reduce(getattr, name.split("."), module)
    except AttributeError:
        return False
    return any(found is param for param in module.parameters())


def built_layers(
    specs: Sequence[Any],
    outlines: Sequence[nn.Module | None],
    own: range,
    seeded: Callable[[int], Any],
) -> list[nn.Module | None]:
    """As ``outlines``, with the layers of this rank built."""
    found = list(outlines)
    first: dict[str, int] = {}
    for at, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            first.setdefault(spec.key, at)
    tied: dict[str, nn.Module] = {}
    for at in own:
        spec = specs[at]
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in tied:
                seeded(first[spec.key])  # all stages that have the module draw the same values
                tied[spec.key] = spec.build()
        else:
            seeded(at)
            if isinstance(spec, LayerSpec):
                found[at] = spec.build()
    for at, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec) and spec.key in tied:
            found[at] = tied[spec.key]
    return found


def pieces_of_layers(
    specs: Sequence[Any], built: Sequence[nn.Module | None]
) -> tuple[nn.ModuleDict, dict[str, nn.Module]]:
    """The tied modules by key, and the pieces by number of their layer."""
    tied = nn.ModuleDict()
    pieces: dict[str, nn.Module] = {}
    for at, (spec, module) in enumerate(zip(specs, built, strict=True)):
        if isinstance(spec, TiedLayerSpec):
            assert module is not None
            if spec.key not in tied:
                tied[spec.key] = module
            pieces[str(at)] = FunctionPiece(spec.forward_fn, module)
        else:
            pieces[str(at)] = FunctionPiece(spec) if module is None else module
    return tied, pieces


def held(piece: nn.Module) -> tuple[nn.Module, ...]:
    return piece.held if isinstance(piece, FunctionPiece) else ()


def class_of(piece: nn.Module) -> str:
    """The name of a layer's class; of a function's, ``function``."""
    if isinstance(piece, FunctionPiece):
        return type(piece.held[0] if piece.held and piece.call is None else piece.call).__name__
    return type(piece).__name__


def partition(
    specs: Sequence[Any], count_params: Callable[[], list[int]], stages: int, method: str
) -> list[int]:
    """The first layer of each stage, and the number of layers. ``count_params``: by layer.

    ``method``: see ``partition_method`` of :class:`~.pipeline_module.PipelineModule`.

    Raises:
        UnsupportedError: an unknown method.
        UsageError: no layer matches, or there are fewer layers than stages.
    """
    if stages > len(specs):
        raise UsageError(
            f"PipelineModule has {len(specs)} layers for {stages} stages: some would be empty. Give "
            "fewer stages."
        )
    kind, _, pattern = method.partition(":")
    if kind.lower() == "uniform" and not pattern:
        return partition_uniform(len(specs), stages)
    if kind.lower() == "parameters" and not pattern:
        return partition_balanced(count_params(), stages)
    if kind.lower() == "type" and pattern:
        return partition_balanced(matching(specs, pattern), stages)
    raise UnsupportedError(
        f"PipelineModule(partition_method={method!r}): there is no such method. Choose parameters, "
        "uniform or type:REGEX, for example type:Block. None of them measures times (best, profile)."
    )


def checked_parts(parts: Any, stages: int, layers: int) -> list[int]:
    """What ``PipelineModule._partition_layers`` has set, which a derived class may override.

    Raises:
        UsageError: it is not the first layer of each stage and the number of layers, in order.
    """
    found = list(parts) if isinstance(parts, (list, tuple)) else []
    rises = all(isinstance(at, int) for at in found) and found == sorted(set(found))
    if len(found) == stages + 1 and rises and (found[0], found[-1]) == (0, layers):
        return found
    raise UsageError(
        f"_partition_layers() of the program has set parts to {parts!r}. For {stages} stages of {layers} "
        f"layers give {stages + 1} whole numbers that rise from 0 to {layers}: the first layer of each "
        "stage, and the number of layers. No stage may be empty."
    )


def trained_numel(layer: nn.Module | None) -> int:
    params = () if layer is None else layer.parameters()
    return sum(param.numel() for param in params if param.requires_grad)


def matching(specs: Sequence[Any], pattern: str) -> list[int]:
    """1 for each layer whose class or function has a name that matches, else 0."""
    expression = re.compile(pattern, re.IGNORECASE)
    found = [int(expression.search(name_of(layer)) is not None) for layer in specs]
    if not any(found):
        names = ", ".join(dict.fromkeys(filter(None, map(name_of, specs))))
        raise UsageError(
            f"PipelineModule(partition_method='type:{pattern}'): no layer has a name that matches. The "
            f"layers are {names}."
        )
    return found


def name_of(layer: Any) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", ""))
