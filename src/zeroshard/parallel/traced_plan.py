"""A tensor plan for a Transformers model, guessed from the order in which a small copy runs its layers.

The copy has the model's class and widths, two layers, a short vocabulary and random weights, in fp32 on
the CPU. In each block the linear layers that run between one that reads the residual stream and one that
writes it are a pair: column-parallel layers and a row-parallel one. Names tell only q, k and v. A table
of position biases, an embedding inside a block, is cut over heads.

The guess is checked by running the copy once more for each tensor rank, with this rank's weights and
numbers of heads. Each row-parallel layer notes its result and goes on with the one of the whole model.
For each call of each such layer, the sum over ranks must equal the whole model's result, and so must the
model's output on every rank. So a guess is safe although attention and MLP are spread over modules, get
masks and positions from the model, or have residuals and norms in between."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.parallel.heads import (
    FUSED,
    KEY_VALUE,
    QUERY,
    HeadCount,
    head_counts,
    key_value_copies,
)
from zeroshard.parallel.tensor_styles import (
    MATRICES,
    features,
    generic,
    kind_of,
    multiply,
    part_of,
    row_of,
)


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The members of the outermost lists of modules that repeat one class."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        if any(name.startswith(f"{other}.") for other in outer):
            continue
        members = list(module.named_children())
        if len({type(m) for _, m in members}) == 1 and any(m.children() for _, m in members):
            if not all(list(member.children()) for _, member in members):
                continue
            outer.append(name)
            yield from ((f"{name}.{leaf}".lstrip("."), member) for leaf, member in members)


LAYERS, VOCABULARY = 2, 128

_LAYER_COUNTS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers",
)  # fmt: skip
"""Keys of configurations for the number of layers."""


class _NoPlanError(Exception):
    """Why no plan could be made or checked by a trial run."""


def can_copy_small(model: nn.Module) -> bool:
    """Whether it is a model of Transformers, of whose class a small one can be made."""
    return hasattr(model, "config") and hasattr(model, "dummy_inputs")


def traced_plan(model: nn.Module, size: int) -> dict[str, str]:
    """Globs with styles for the blocks of a model of Transformers on ``size`` tensor ranks.

    Costs the memory of two layers in fp32, and a run of them for each rank, on the CPU.

    Raises:
        UsageError: no guess is right, or the number of heads does not fit ``size``.
    """
    try:
        return _traced_plan(model, size)
    except _NoPlanError as error:
        raise UsageError(
            f'plan "auto": {type(model).__name__} has no plan of Transformers, and none was found with a '
            f"copy of {LAYERS} layers: {error}. Pass a plan: a dict of globs and styles such as "
            '{"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}.'
        ) from error


def _traced_plan(model: nn.Module, size: int) -> dict[str, str]:
    small, inputs = _small_copy(model)
    tracer = _Tracer(small, inputs)
    inside = tuple(f"{name}." for name, _ in repeated_blocks(small))
    layers = {n: layer for n, layer in small.named_modules() if n.startswith(inside)}
    linears, tables = _of_kinds(layers, MATRICES), _of_kinds(layers, ("Embedding",))
    if not linears:
        raise _NoPlanError("it has no repeated blocks with linear layers")
    calls = tracer.order_of(linears)
    choices: dict[str, tuple[str, ...]] = {generic(name): ("head_bias",) for name in tables}
    for block in inside:
        choices |= _choices([name for name in calls if name.startswith(block)], linears)
    reason: Exception = _NoPlanError("the parts of its layers did not add up to their whole result")
    for picked in itertools.product(*choices.values()):
        plan = dict(zip(choices, picked, strict=True))
        try:
            guess = PlanGuess.of(small, {**linears, **tables}, plan, size)
            if guess.is_even() and not tracer.sums_up(guess):
                continue
        except (_NoPlanError, UsageError) as error:
            reason = error
            continue
        _check_complete(model, plan)
        return plan | _head_norms(small, tracer.inner_modules(guess, inside))
    raise reason


def _of_kinds(layers: Mapping[str, nn.Module], kinds: Collection[str]) -> dict[str, nn.Module]:
    return {name: layer for name, layer in layers.items() if kind_of(layer) in kinds}


def _choices(names: Sequence[str], linears: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """The styles that the linear layers of a block may have, in the order of their calls."""
    choices: dict[str, tuple[str, ...]] = {}
    for ups, down in _pairs(names, linears):
        choices[generic(down)] = ("rowwise",)
        for up in ups:
            choices[generic(up)] = _styles(linears[up], linears[down], alone=len(ups) == 1)
    return choices


# ---------------------------------------------------------------------- the small copy


def _small_copy(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """A small model of the same class with random weights, and arguments for it."""
    try:
        config = _short_config(model)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            small: Any = type(model)(config)
        small = small.float().eval()
        inputs = {name: value.cpu() for name, value in small.dummy_inputs.items()}
    except Exception as error:  # whatever the program's class raises: it cannot be built small
        raise _NoPlanError(
            f"a small copy could not be built: {type(error).__name__}: {error}"
        ) from error
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in small.parameters():
            values = torch.randn(param.shape, generator=generator)
            param.copy_(values / max(1, param[:1].numel()) ** 0.5)
    for layer in small.modules():
        if kind_of(layer) == "Conv1D":  # its own forward does not work with a part of the weight
            layer.forward = partial(multiply, layer)
    return small, inputs


def _short_config(model: nn.Module) -> Any:
    """The model's configuration with :data:`LAYERS` layers and a vocabulary of :data:`VOCABULARY`."""
    config: Any = copy.deepcopy(model.config)
    for key in _LAYER_COUNTS:
        count = getattr(config, key, None)
        if type(count) is not int or count <= LAYERS:
            continue
        for name, value in vars(config).items():
            if isinstance(value, list) and len(value) == count:  # a kind for each layer
                setattr(config, name, value[:LAYERS])
        setattr(config, key, LAYERS)
    if type(getattr(config, "vocab_size", None)) is int:
        config.vocab_size = min(config.vocab_size, VOCABULARY)
        for name, value in list(vars(config).items()):
            if name.endswith("token_id") and type(value) is int and value >= config.vocab_size:
                setattr(config, name, 0)
    config.use_cache = False
    if "flash" in str(getattr(config, "_attn_implementation", "")):
        config._attn_implementation = "eager"
    return config


# ---------------------------------------------------------------------- the guess


def _pairs(
    calls: Sequence[str], linears: Mapping[str, nn.Module]
) -> Iterator[tuple[list[str], str]]:
    """Column-parallel layers and the row-parallel one after them, in the order of calls of one block."""
    ups: list[str] = []
    for name in calls:
        leaf = name.rpartition(".")[2].lower()
        reads_stream = QUERY.search(leaf) or KEY_VALUE.search(leaf) or FUSED.search(leaf)
        width, _ = features(linears[name])
        if ups and not reads_stream and width in _hidden(linears[ups[0]], alone=len(ups) == 1):
            yield ups, name
            ups = []
        else:
            ups.append(name)
    if ups:
        raise _NoPlanError(f"no layer follows {ups[0]!r} that could add its parts up")


def _hidden(up: nn.Module, *, alone: bool) -> list[int]:
    """The widths of activations that may follow a layer: of its output, or of a matrix that it joins."""
    _, rows = features(up)
    return [rows, *(rows // parts for parts in (2, 3) if alone and rows % parts == 0)]


def _styles(up: nn.Module, down: nn.Module, *, alone: bool) -> tuple[str, ...]:
    (_, rows), (width, _) = features(up), features(down)
    if not alone or rows == width:
        return ("colwise",)
    fused = f"colwise_fused:{','.join([str(width)] * (rows // width))}"
    return (fused, "colwise_by_head") if rows == 3 * width else (fused,)


def _check_complete(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Check that the plan has every linear layer in the blocks of the whole model."""
    for block, module in repeated_blocks(model):
        for inner, layer in module.named_modules():
            name = f"{block}.{inner}"
            if kind_of(layer) in MATRICES and generic(name) not in plan:
                raise _NoPlanError(f"a copy with {LAYERS} layers has no layer like {name!r}")


def _head_norms(small: nn.Module, inner: Sequence[str]) -> dict[str, str]:
    """The style of modules inside a pair. ``inner``: those that have parameters."""
    for name in inner:
        if kind_of(small.get_submodule(name)) != "norm":
            raise _NoPlanError(
                f"{name!r} has parameters that act on what one tensor rank computes; only norms can"
            )
    return {generic(name): "head_norm" for name in inner}


# ---------------------------------------------------------------------- trial runs


@dataclass(frozen=True)
class PlanGuess:
    """Styles by name of a layer, and what follows from them on ``size`` ranks.

    ``fused``: sizes of the matrices that a layer joins. ``shared``: how many ranks share each part of a
    layer; 1 if it is not there. ``counts``: numbers of heads that are divided.
    """

    styles: Mapping[str, str]
    layers: Mapping[str, nn.Module]
    fused: Mapping[str, Sequence[int]]
    shared: Mapping[str, int]
    counts: Sequence[HeadCount]
    size: int

    @classmethod
    def of(
        cls, small: nn.Module, layers: Mapping[str, nn.Module], plan: Mapping[str, str], size: int
    ) -> PlanGuess:
        given = {name: plan[generic(name)].partition(":") for name in layers}
        styles = {name: style for name, (style, _, _) in given.items()}
        fused = {
            name: tuple(map(int, sizes.split(","))) if sizes else ()
            for name, (_, _, sizes) in given.items()
        }
        colwise = {n: fused[n] for n, style in styles.items() if style.startswith("colwise")}
        copies = key_value_copies(small, [n for n, s in styles.items() if s == "colwise"], size)
        counts = head_counts(small, colwise, size, copies) if size > 1 else []
        return cls(styles, layers, fused, copies, counts, size)

    def is_even(self) -> bool:
        """Whether each layer can be cut into equal parts. If not, the checks of the plan refuse it."""
        for name, style in self.styles.items():
            axis = row_of(style, self.layers[name]).weight_axis
            weight: Any = self.layers[name].weight
            extents = self.fused.get(name) or (weight.shape[axis],)
            if any(extent % (self.size // self.shared.get(name, 1)) for extent in extents):
                return False
        return True

    def weights(self, rank: int) -> dict[str, Tensor]:
        """The weights of one rank, by name. The bias of a row-parallel layer counts once."""
        found: dict[str, Tensor] = {}
        for name, style in self.styles.items():
            layer, sizes = self.layers[name], self.fused.get(name, ())
            row = row_of(style, layer)
            weight, bias = layer.weight, getattr(layer, "bias", None)
            assert isinstance(weight, Tensor)
            assert row.weight_axis is not None
            shared = self.shared.get(name, 1)
            parts, at = self.size // shared, rank // shared
            found[f"{name}.weight"] = part_of(weight, row.weight_axis, parts, at, sizes)
            if isinstance(bias, Tensor):
                rowwise = bias if rank == 0 else torch.zeros_like(bias)
                cut = row.bias_axis is not None
                found[f"{name}.bias"] = part_of(bias, 0, parts, at, sizes) if cut else rowwise
        return found


class _Tracer:
    """Runs the small model and sees the calls of its layers."""

    def __init__(self, small: Any, inputs: dict[str, Any]) -> None:
        self._small, self._inputs = small, inputs

    def _run(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """The floating-point tensors in the output. Has a graph if one of ``weights`` requires it."""
        try:
            with torch.set_grad_enabled(any(w.requires_grad for w in weights.values())):
                made = torch.func.functional_call(self._small, dict(weights), (), self._inputs)
        except Exception as error:  # whatever the model's forward raises
            raise _NoPlanError(f"a trial run failed: {type(error).__name__}: {error}") from error
        found = made.values() if isinstance(made, Mapping) else made
        tensors = [t for t in found if isinstance(t, Tensor) and t.is_floating_point()]
        if not tensors:
            raise _NoPlanError("a trial run gave no tensor")
        return tensors

    def order_of(self, linears: Mapping[str, nn.Module]) -> list[str]:
        """The names of the layers in the order of their first calls. Each must have one."""
        seen: dict[str, None] = {}

        def note(name: str, y: Tensor) -> Tensor:
            seen.setdefault(name)
            return y

        with _results(linears, note):
            self._run({})
        if missed := [name for name in linears if name not in seen]:
            raise _NoPlanError(f"the trial run did not reach {missed[0]!r}")
        return list(seen)

    def sums_up(self, guess: PlanGuess) -> bool:
        """Whether the results of row-parallel layers are the sums of those of all ranks."""
        rowwise = {n: guess.layers[n] for n, s in guess.styles.items() if s == "rowwise"}
        whole: list[Tensor] = []
        addends: list[list[Tensor]] = []

        def note(_name: str, y: Tensor) -> Tensor:
            whole.append(y)
            return y

        def replace(_name: str, y: Tensor) -> Tensor:
            addends[-1].append(y)
            return whole[len(addends[-1]) - 1]

        with _results(rowwise, note):
            expected = self._run({})
        with _results(rowwise, replace), _own_heads(self._small, guess.counts):
            for rank in range(guess.size):
                addends.append([])
                outputs = self._run(guess.weights(rank))
                if len(addends[-1]) != len(whole) or not all(map(_equal, outputs, expected)):
                    return False
        sums = (sum(parts[1:], parts[0]) for parts in zip(*addends, strict=True))
        return all(map(_equal, sums, whole))

    def inner_modules(self, guess: PlanGuess, inside: tuple[str, ...]) -> list[str]:
        """Modules between column-parallel and row-parallel layers that have parameters.

        A rank computes the gradients of these from its own heads only, so they must be added. They are
        found by a backward from the row-parallel results to the inputs of column-parallel layers.
        ``inside``: the prefixes of the blocks.
        """
        params = {  # of a block, and of no layer that is cut
            name: param.detach().requires_grad_()
            for name, param in self._small.named_parameters()
            if name.startswith(inside) and name.rpartition(".")[0] not in guess.layers
        }
        if not params:
            return []
        parts: list[Tensor] = []

        def replace(_name: str, y: Tensor) -> Tensor:
            parts.append(y)
            return y.detach()

        ups = {n: guess.layers[n] for n, style in guess.styles.items() if style.startswith("col")}
        downs = {n: guess.layers[n] for n, style in guess.styles.items() if style == "rowwise"}
        with _calls(ups, lambda _, own, x: own(x.detach())), _results(downs, replace):
            self._run(params)
        total = sum((y @ y.new_ones(y.shape[-1])).square().sum() for y in parts if y.requires_grad)
        if not isinstance(total, Tensor):
            return []
        grads = torch.autograd.grad(total, [*params.values()], materialize_grads=True)
        names = itertools.compress(params, (bool(grad.any()) for grad in grads))
        return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


@contextmanager
def _results(
    layers: Mapping[str, nn.Module], seen: Callable[[str, Tensor], Tensor]
) -> Iterator[None]:
    """Pass the result of each forward of the layers through ``seen(name, result)``."""
    with _calls(layers, lambda name, own, x: seen(name, own(x))):
        yield


@contextmanager
def _calls(
    layers: Mapping[str, nn.Module],
    call: Callable[[str, Callable[[Tensor], Tensor], Tensor], Tensor],
) -> Iterator[None]:
    """Let ``call(name, forward, x)`` do each forward of the layers."""
    before = {name: layer.forward for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.forward = partial(call, name, before[name])  # type: ignore[method-assign]
        yield
    finally:
        for name, layer in layers.items():
            layer.forward = before[name]  # type: ignore[method-assign]


@contextmanager
def _own_heads(small: nn.Module, counts: Sequence[HeadCount]) -> Iterator[None]:
    """Set the numbers of heads to those of one rank."""
    try:
        for count in counts:
            setattr(small.get_submodule(count.module), count.attribute, count.own)
        yield
    finally:
        for count in counts:
            setattr(small.get_submodule(count.module), count.attribute, count.whole)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)
