"""The plan ``"auto"``: how to cut a model for tensor parallelism when the program does not say it.

The plan comes from the model, if it is a model of Transformers that has one. Else it is guessed from the
structure of repeated blocks: q, k and v before an output projection, and the layers of an MLP. A guess
is checked by a run: a copy of the MLP or attention with random weights must give the same result as the
sum of its parts. If that finds nothing in a model of Transformers, the guess comes from a run of a small
copy of the whole model. What cannot be checked, or is not recognised, is an error that lists it.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.adapters import base_of, check_no_adapters, with_adapters
from zeroshard.parallel.heads import (
    FUSED,
    KEY_VALUE,
    QUERY,
    head_counts,
    head_size,
    key_value_copies,
    known_sizes,
)
from zeroshard.parallel.tensor_styles import (
    MATRICES,
    features,
    generic,
    kind_of,
    multiply,
    part,
)
from zeroshard.parallel.traced_plan import (
    PlanGuess,
    can_copy_small,
    repeated_blocks,
    traced_plan,
)

TRANSFORMERS_STYLES: Mapping[str, str] = {
    "colwise": "colwise",
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "rowwise": "rowwise",
    "rowwise_split_input": "rowwise_split",
    "rowwise_rep": "rowwise_split",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "head_norm",
    "replicate": "replicate",
}
"""Styles of Transformers, releases 4.50 to 5.x, and ours. Those that are missing are refused by name."""

OUTPUT = re.compile(r"^(?:o|out|output|dense|wo|proj|c_proj|o_proj|out_proj|out_lin|wproj)$")


def derive_plan(model: nn.Module, size: int) -> tuple[dict[str, str], str]:
    """Globs or names with styles, and where they come from: ``transformers`` or ``structure``.

    Raises:
        UnsupportedError: the model's own plan has a style that ZeroShard does not have, or the model has
            adapters in layers that it would cut and ZeroShard cannot cut these. Or it has no plan, and
            its parameters are fakes.
        UsageError: the model has no plan, and its structure is not recognised; it lists the layers.
    """
    prefix, adapted = base_of(model)
    own = getattr(adapted, "_tp_plan", None) or _base_plan(adapted)
    if own:
        plan = _from_transformers(adapted, own)
        return with_adapters(model, prefix, plan, size), "transformers"
    check_no_adapters(model)
    if any(isinstance(param, FakeTensor) for param in model.parameters()):
        raise UnsupportedError(
            f"{type(model).__name__} has no tensor plan of its own. A plan is found by running its "
            "layers with values, and a simulation has only shapes. Plan it without tensor ranks, or "
            "simulate it with Engine(plan={...}), which names the layers to cut."
        )
    try:
        guess = _from_structure(model, size)
    except UsageError:
        if not can_copy_small(model):
            raise
        guess = traced_plan(model, size)
    return guess | _vocabulary(model, size), "structure"


def _base_plan(model: nn.Module) -> dict[str, str]:
    """The plan in the config of a model of Transformers without its head."""
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    inner = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {f"{inner}{glob}": style for glob, style in plan.items()}


# ---------------------------------------------------------------------- the plan of Transformers


def _refuse_styles(model: nn.Module, own: Mapping[str, str]) -> None:
    """Refuse a plan of Transformers with styles that ZeroShard does not have."""
    refused = {style: glob for glob, style in own.items() if style not in TRANSFORMERS_STYLES}
    if refused:
        style, glob = next(iter(refused.items()))
        experts = any("expert" in name for name in own)
        raise UnsupportedError(
            f"the plan of {type(model).__name__} cuts {glob!r} by the style {style!r}, which ZeroShard "
            f"does not have. It has {', '.join(TRANSFORMERS_STYLES)}. "
            + ("Mixtures of experts are not cut over tensor ranks. " if experts else "")
            + "Train without tensor parallelism, where ZeRO shards these layers as any other, or pass a "
            "plan of your own that leaves them whole."
        )


def _from_transformers(model: nn.Module, own: Mapping[str, str]) -> dict[str, str]:
    _refuse_styles(model, own)
    modules = dict(model.named_modules())
    generic_names = set(map(generic, modules))
    plan = {
        glob: TRANSFORMERS_STYLES[style] for glob, style in own.items() if glob in generic_names
    }
    if not plan:
        raise UsageError(
            f'plan "auto": the plan of {type(model).__name__} names no module that it has, such as '
            f"{next(iter(own))!r}. If another library wraps the model, cut the model before it is "
            "wrapped, or pass a plan."
        )
    blocks = [name for name, _ in repeated_blocks(model)]
    inside = set(map(generic, blocks))
    if blocks and not any(glob.startswith(f"{block}.") for glob in plan for block in inside):
        raise UsageError(
            f'plan "auto": the plan of {type(model).__name__} cuts {", ".join(plan)}, and no layer of '
            f"its {len(blocks)} blocks such as {blocks[0]!r}, so each tensor rank would hold and compute "
            "all of them. Train without tensor parallelism, where ZeRO shards these layers as any other, "
            "or pass a plan of your own."
        )
    for glob, style in plan.items():
        if style == "colwise" and FUSED.search(glob.rpartition(".")[2].lower()):
            plan[glob] = "colwise_by_head"  # the authors say that it may be cut
    return plan | _tied_embeddings(modules, plan)


def _tied_embeddings(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> dict[str, str]:
    """The style ``vocab`` for embeddings that share the weight of a head that is cut."""
    heads = [
        getattr(modules[name], "weight", None)
        for name, style in plan.items()
        if style == "colwise_gather" and name in modules
    ]
    return {
        name: "vocab"
        for name, module in modules.items()
        if isinstance(module, nn.Embedding)
        and name not in plan
        and any(module.weight is weight for weight in heads)
    }


# ---------------------------------------------------------------------- a guess from the structure


def _vocabulary(model: nn.Module, size: int) -> dict[str, str]:
    """Styles for the embedding and the head that a model of Transformers names, if all can be cut."""
    layers = list(model.named_modules())
    wanted = [
        (_got(model, "get_input_embeddings", nn.Embedding), "vocab"),
        (_got(model, "get_output_embeddings", nn.Linear), "colwise_gather"),
    ]
    found = {name: style for layer, style in wanted for name, module in layers if module is layer}
    found |= _tied_embeddings(dict(layers), found)
    for name in found:
        own = model.get_submodule(name)._parameters
        weight = own["weight"]
        assert weight is not None
        begin, end = part(weight.shape[0], size, size - 1)
        params = {id(param) for param in own.values() if param is not None}
        users = [n for n, m in layers if any(id(p) in params for p in m._parameters.values())]
        if begin == end or any(user not in found for user in users):
            return {}
    return found


def _got(model: nn.Module, getter: str, kind: type[nn.Module]) -> nn.Module | None:
    """The layer that a model of Transformers names, if it has one of this kind."""
    try:
        layer = getattr(model, getter, lambda: None)()
    except (NotImplementedError, AttributeError):  # a model without such a layer
        return None
    return layer if isinstance(layer, kind) else None


def _from_structure(model: nn.Module, size: int) -> dict[str, str]:
    plan: dict[str, str] = {}
    missed: list[str] = []
    checked: dict[tuple[Any, ...], dict[str, str]] = {}
    for name, block in repeated_blocks(model):
        for inner, module in block.named_modules():
            linears = _own_linears(module)
            if not linears:
                continue
            full = ".".join(filter(None, (name, inner)))
            key = (type(module), *((leaf, *features(layer)) for leaf, layer in linears.items()))
            if key not in checked:
                checked[key] = _pair(full, model, module, linears, size)
            plan |= {f"{full}.{leaf}": style for leaf, style in checked[key].items()}
            missed += [f"{full}.{leaf}" for leaf in linears if leaf not in checked[key]]
    if not plan or missed:
        what = (
            f"these layers were not recognised: {', '.join(missed[:8])}"
            if missed
            else (
                "it has no repeated blocks (nn.ModuleList or nn.Sequential) with pairs of nn.Linear"
            )
        )
        raise UsageError(
            f'plan "auto": {type(model).__name__} has no plan of Transformers, and {what}. Recognised '
            "are q, k and v, also in one layer, before an output projection in one module, and an MLP "
            "whose modules are linear layers and activations. Pass a plan: a dict of globs and styles "
            'such as {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}.'
        )
    return plan


def _own_linears(module: nn.Module) -> dict[str, nn.Module]:
    return {leaf: m for leaf, m in module.named_children() if kind_of(m) in MATRICES}


def _pair(
    name: str, model: nn.Module, module: nn.Module, linears: Mapping[str, nn.Module], size: int
) -> dict[str, str]:
    """Styles for the linear layers of one module, checked by a run; empty if they are not recognised."""
    for guess in (*_attention(linears), *_mlp(module, linears)):
        names = {leaf: f"{name}.{leaf}".lstrip(".") for leaf in guess}
        fused = {
            leaf: known_sizes(model, names[leaf], features(linears[leaf])[1])
            for leaf, style in guess.items()
            if style == "colwise_fused"
        }
        if not all(fused.values()):
            continue
        if _indivisible(linears, guess, fused, size):
            return guess
        colwise = {
            names[leaf]: fused.get(leaf, ())
            for leaf, style in guess.items()
            if style.startswith("colwise")
        }
        copies = key_value_copies(model, colwise, size)
        counts = head_counts(model, colwise, size, copies) if size > 1 else []
        shared = {leaf: copies.get(names[leaf], 1) for leaf in guess}
        if _sums_up(module, PlanGuess(guess, linears, fused, shared, counts, size)):
            return guess | _head_norms(module, colwise)
    return {}


def _head_norms(module: nn.Module, colwise: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Norms over the features of one head: each tensor rank sees those of its own heads only."""
    leaves = {name.rpartition(".")[2]: sizes for name, sizes in colwise.items()}
    layers = {leaf: module.get_submodule(leaf) for leaf in leaves}
    head = head_size(module, layers, leaves)
    inputs = {features(layer)[0] for layer in layers.values()}
    return {
        leaf: "head_norm"
        for leaf, norm in module.named_children()
        if kind_of(norm) == "norm"
        and head not in inputs
        and any(param.numel() == head for param in norm.parameters())
    }


def _attention(linears: Mapping[str, nn.Module]) -> Iterator[dict[str, str]]:
    """q, k and v, or all three in one layer, and an output projection."""
    outputs = [leaf for leaf in linears if OUTPUT.match(leaf)]
    if len(outputs) != 1:
        return
    others = [leaf for leaf in linears if leaf not in outputs]
    width, _ = features(linears[outputs[0]])
    if len(others) == 1 and FUSED.search(others[0].lower()):
        for style in ("colwise_fused", "colwise_by_head"):
            yield {others[0]: style, outputs[0]: "rowwise"}
        return
    queries = [leaf for leaf in others if QUERY.search(leaf)]
    keys = [leaf for leaf in others if KEY_VALUE.search(leaf)]
    if (len(queries), len(keys), len(others)) != (1, 2, 3):
        return
    if width == features(linears[queries[0]])[1]:
        yield {**dict.fromkeys((*queries, *keys), "colwise"), outputs[0]: "rowwise"}


def _mlp(module: nn.Module, linears: Mapping[str, nn.Module]) -> Iterator[dict[str, str]]:
    """One or two layers d -> h and one layer h -> d, with modules without parameters around them.

    Or one layer d -> 2h that joins gate and up.
    """
    if any([*m.parameters()] for leaf, m in module.named_children() if leaf not in linears):
        return
    shapes = {leaf: features(layer) for leaf, layer in linears.items()}
    last = list(shapes)[-1]
    for down in (last, *shapes):
        ups = [leaf for leaf in shapes if leaf != down]
        hidden, width = shapes[down]
        if 1 <= len(ups) <= 2 and all(shapes[leaf] == (width, hidden) for leaf in ups):
            yield {**dict.fromkeys(ups, "colwise"), down: "rowwise"}
            return
        if len(ups) == 1 and shapes[ups[0]] == (width, 2 * hidden) and FUSED.search(ups[0]):
            yield {ups[0]: "colwise_fused", down: "rowwise"}


def _indivisible(
    linears: Mapping[str, nn.Module],
    guess: Mapping[str, str],
    fused: Mapping[str, Sequence[int]],
    size: int,
) -> bool:
    """Whether ``decide`` will refuse a layer, with a message of its own."""
    sizes = (
        fused.get(leaf) or [features(linears[leaf])[0 if style == "rowwise" else 1]]
        for leaf, style in guess.items()
    )
    return any(one % size for several in sizes for one in several)


def _sums_up(module: nn.Module, guess: PlanGuess) -> bool:
    """Whether the module's result is the sum of the results of its parts.

    Runs a copy with random weights on the CPU. Costs the module's memory twice, in fp32, for a moment.
    """
    trial = copy.deepcopy(module).to_empty(device="cpu").float().eval()
    guess = replace(guess, layers=_own_linears(trial))
    for layer in guess.layers.values():
        if kind_of(layer) == "Conv1D":  # its own forward does not work with a part of the weight
            layer.forward = partial(multiply, layer)  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in itertools.chain(trial.parameters(), trial.buffers()):
            tensor.copy_(
                torch.randn(tensor.shape, generator=generator) / max(1, tensor[:1].numel()) ** 0.5
            )
        styles, layers = guess.styles, guess.layers
        width = max(features(layers[leaf])[0] for leaf, s in styles.items() if s != "rowwise")
        x_BTD = torch.randn(2, 4, width, generator=generator)
        try:
            whole = _first(trial(x_BTD))
            for count in guess.counts:
                setattr(trial, count.attribute, count.own)
            addends = [
                _first(torch.func.functional_call(trial, guess.weights(rank), (x_BTD,)))
                for rank in range(guess.size)
            ]
        except Exception as error:  # whatever the program's forward raises: it cannot be checked
            raise _uncheckable(module, error) from error
    tensors = [whole, *addends]
    if not all(isinstance(t, Tensor) for t in tensors):
        raise _uncheckable(module, TypeError("its result is not a tensor"))
    return torch.allclose(whole, sum(addends[1:], addends[0]), rtol=1e-3, atol=1e-4)


def _first(result: Any) -> Any:
    """The activations in the result of an attention or MLP, which may have attention weights too."""
    return result[0] if isinstance(result, tuple) and result else result


def _uncheckable(module: nn.Module, error: Exception) -> UsageError:
    return UsageError(
        f'plan "auto": {type(module).__name__} looks like layers that can be cut, but a trial run with '
        f"one tensor [batch, sequence, features] failed: {type(error).__name__}: {error}. So the guess "
        "cannot be checked. Pass a plan: a dict of globs and styles such as "
        '{"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}.'
    )
