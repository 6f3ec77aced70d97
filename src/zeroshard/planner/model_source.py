"""Finds the model of a plan, and makes its batch: from a configuration of Transformers or a function."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.parallel.cut import pipeline
from zeroshard.parallel.split import PipelineModel
from zeroshard.parallel.trial_parts import repeated_blocks
from zeroshard.planner.fakes import fake_tensors
from zeroshard.planner.positions import Positions, most_positions
from zeroshard.planner.script import ENTRY, script_module
from zeroshard.zero import Init

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""``organization/model``."""

LENGTH = 1024
"""Tokens of a sample if nothing says how many, and the model has positions for so many."""
BATCH = "a batch of input_ids and labels of"
"""How the line of the assumptions begins that tells the batch."""


@dataclass(frozen=True)
class ModelSource:
    """How to make a model, one micro-batch (inputs, labels) and the loss. ``assumed``: in sentences.

    ``own_batch``: the batch comes with the model, so its size cannot be chosen. ``schedule``: of a
    pipeline. ``cut_into``: the pipeline stages of a model that is cut already; 0: it is not.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: tuple[Any, Any]
    loss: Callable[[Any, Any], Tensor]
    assumed: tuple[str, ...] = ()
    own_batch: bool = False
    schedule: str = "1F1B"
    cut_into: int = 0


def model_source(
    name: str,
    micro_batch: int,
    length: int | None,
    *,
    sharded: bool,
    checkpointing: bool = False,
    stages: int = 1,
    sequence: int = 1,
) -> ModelSource:
    """The model called ``name``.

    A folder or file with a ``config.json`` of Transformers; the name of a type of its models, with
    default sizes; ``module:factory`` or ``script.py:factory``, a function without arguments that returns
    a model, or a model and a batch; or ``script.py``, whose function is called ``plan_entry``. A script
    is imported, not run. ``sharded``: build it under ``zero.Init``. ``checkpointing``: call its
    ``gradient_checkpointing_enable()``. ``stages``: cut it into so many pipeline stages with equal
    numbers of blocks, unless it is cut already. ``sequence``: ranks that share the ``length`` tokens.

    Raises:
        UsageError: there is none of that name, it returns something else, or it has no positions for a
            sample of ``length`` tokens.
    """
    is_function = ":" in name or name.endswith(".py")
    parts = _of_function(name) if is_function else _of_transformers(name)
    assumed = parts.assumed
    batch = parts.batch
    own_batch = batch is not None
    if not own_batch:
        batch, said = _token_batch(name, parts, micro_batch, length, sequence)
        assumed += (said,)
    pair = batch if isinstance(batch, tuple) else (batch, None)
    first = parts.first
    whole = (lambda: recomputing(first())) if checkpointing else first
    if stages > 1:
        assumed += ("a model that is not cut already has equal numbers of blocks on each stage",)
    how = parts.how or ("under zero.Init (stage 3)" if sharded else "whole on each rank")
    return ModelSource(
        name, _in_its_form(whole, sharded=sharded, stages=stages), pair, loss_of,
        (*assumed, f"the model is built {how}"), own_batch, parts.schedule, parts.cut_into,
    )  # fmt: skip


@dataclass(frozen=True)
class _Parts:
    """What a name stands for. ``first`` builds the model; ``batch``: that comes with it, or None.

    ``config`` and ``tables``, the rows of its embeddings, may say how many positions it has. ``how``: it
    is built, if that does not depend on the stage. ``schedule``, ``cut_into``: see :class:`ModelSource`.
    """

    first: Callable[[], nn.Module]
    batch: Any
    config: Any
    assumed: tuple[str, ...] = ()
    tables: Sequence[int] = ()
    how: str = ""
    schedule: str = "1F1B"
    cut_into: int = 0


def _of_function(name: str) -> _Parts:
    """What a function of the program returns.

    Raises:
        UsageError: it is not a model, or a model and a batch.
    """
    build = _factory(name)
    with fake_tensors():
        made = build()
    batch, model = _batch(name, made), _first(made)
    first = (lambda: _first(build())) if isinstance(made, tuple) else build
    if isinstance(model, PipelineModel):
        # A PipelineModule keeps the layers of its stage.
        how = "" if model.kept is None else "with its own layers only on each rank"
        return _Parts(
            first, batch, None, how=how, schedule=model.schedule, cut_into=len(model.stages)
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{name} returned {type(made).__name__}. It must return a model, or a model and a batch."
        )
    tables = [own.num_embeddings for own in model.modules() if isinstance(own, nn.Embedding)]
    return _Parts(first, batch, getattr(model, "config", None), tables=tables)


def _of_transformers(name: str) -> _Parts:
    """A model of Transformers, without a batch.

    Raises:
        UsageError: there is none of that name.
    """
    config = _configuration(name)
    named = getattr(config, "dtype", None)
    dtype = named or torch.get_default_dtype()
    why = ", as its configuration says" if named else ": its configuration names no dtype"
    said = f"the model is built in {dtype}{why}"
    return _Parts(_transformers(name, config, dtype), None, config, (said,))


def _token_batch(
    name: str, parts: _Parts, micro_batch: int, length: int | None, sequence: int
) -> tuple[dict[str, Tensor], str]:
    """A batch of tokens for a model that has none, and a sentence about it.

    ``sequence`` ranks share a sample; the batch has the tokens of one of them.

    Raises:
        UsageError: the model has no positions for a sample of ``length`` tokens.
    """
    positions = most_positions(parts.first, parts.config, length or LENGTH, parts.tables)
    if positions is not None and length is not None:
        raise UsageError(_too_long(name, length, positions))
    own = (length or (LENGTH if positions is None else positions.most)) // sequence
    ids = torch.empty(micro_batch, own, dtype=torch.long, device="meta")
    why = "" if positions is None else f"; the model takes no longer samples: {positions.text}"
    said = f"{BATCH} {micro_batch} x {own} tokens, without attention mask"
    return {"input_ids": ids, "labels": ids}, said + why


def _too_long(name: str, length: int, positions: Positions) -> str:
    return (
        f"--seq is {length}, and {name} takes at most {positions.most} tokens of a sample: "
        f"{positions.text}. Training with longer ones would end with an error in its forward. Give --seq "
        f"{positions.most} or less"
        + (f", or a larger {positions.key} if the model is trained from scratch." if positions.key
           else ", or a model with more positions.")
    )  # fmt: skip


def _batch(name: str, made: Any) -> Any:
    """The batch of what a function returned; None: it has none.

    Raises:
        UsageError: it is not a model, or a model and a batch.
    """
    if not isinstance(made, tuple):
        return None
    if len(made) != 2:
        raise UsageError(
            f"{name} returned {len(made)} things. It must return a model, or a model and a batch; inputs "
            "and labels together are one batch: return model, (inputs, labels)."
        )
    batch = made[1]
    if isinstance(batch, tuple) and len(batch) != 2:
        raise UsageError(
            f"{name} returned a batch of {len(batch)} parts. It must be a mapping of inputs by name, or "
            "a pair (inputs, labels)."
        )
    return batch


def _first(made: Any) -> Any:
    return made[0] if isinstance(made, tuple) else made


def refuse_own_batch(option: str, source: ModelSource) -> None:
    """Refuse an option that tries batches of several sizes.

    Raises:
        UsageError: the batch comes with the model.
    """
    if source.own_batch:
        raise UsageError(
            f"{option} cannot change the batch of {source.name}, which returns one. Let the function "
            "return the model only; the batch is then of input_ids and labels."
        )


def can_checkpoint(source: ModelSource) -> bool:
    """Whether a model has ``gradient_checkpointing_enable()``."""
    with fake_tensors():
        model = source.build()
    supports = getattr(model, "supports_gradient_checkpointing", True)
    return bool(supports) and hasattr(model, "gradient_checkpointing_enable")


def recomputing(model: nn.Module) -> nn.Module:
    """The model, after its ``gradient_checkpointing_enable()``."""
    newer = getattr(model, "activation_checkpointing_enable", None)  # of Transformers 5
    enable: Any = newer or model.gradient_checkpointing_enable
    enable()
    return model.train()


def _in_its_form(
    build: Callable[[], nn.Module], *, sharded: bool, stages: int
) -> Callable[[], nn.Module]:
    if stages > 1:
        return lambda: cut_evenly(build(), stages)
    return (lambda: _sharded(build)) if sharded else build


def cut_evenly(model: nn.Module, stages: int) -> nn.Module:
    """The model as a pipeline whose stages have equal numbers of blocks, unless it is one already.

    Raises:
        UsageError: it does not have one list of so many blocks.
    """
    if isinstance(model, PipelineModel):
        return model
    return pipeline(model, split=even_split(model, stages))


def even_split(model: nn.Module, stages: int) -> list[str]:
    """The first block of each stage but the first, if stages have equal numbers of blocks.

    Raises:
        UsageError: the model does not have one list of so many blocks.
    """
    blocks = [name for name, _ in repeated_blocks(model)]
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(blocks) < stages or len(lists) > 1:
        raise UsageError(
            f"{type(model).__name__} has {len(blocks)} blocks that repeat, in {len(lists)} lists, and "
            f"{stages} pipeline stages are wanted: a plan cuts one list. Give module:function, which "
            "returns what zeroshard.parallel.pipeline() makes of the model."
        )
    return [blocks[len(blocks) * s // stages] for s in range(1, stages)]


def _sharded(build: Callable[[], nn.Module]) -> nn.Module:
    with Init():
        return build()


def loss_of(output: Any, labels: Any) -> Tensor:
    """The loss: ``output.loss``, ``output["loss"]``, or the output if it is one number.

    Raises:
        UsageError: the output has no loss.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    raise UsageError(
        f"the model returned {type(output).__name__} without a loss"
        + ("" if labels is None else ", and labels that are apart")
        + ". Return a model whose output is the loss, or has it as .loss."
    )


def _factory(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    try:
        if module.endswith(".py"):
            function = function or ENTRY
            found = getattr(script_module(module, function), function)
        else:
            found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"{name}: there is no module {module!r}. Give module:function, with the module on PYTHONPATH."
        ) from error
    except AttributeError as error:
        raise UsageError(f"{name}: the module {module!r} has no {function!r}.") from error
    if not callable(found):
        raise UsageError(f"{name} is {type(found).__name__}, not a function that returns a model.")
    factory: Callable[[], Any] = found
    return factory


def _configuration(name: str) -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the model {name!r} is one of Transformers, which is not installed. Install transformers, "
            "or give module:function."
        ) from error
    if not Path(name).exists():
        known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
        if name not in known and HUB_NAME.fullmatch(name):
            return _downloaded(name)
        if name not in known:
            raise UsageError(
                f"the model {name!r} is not known: it is neither a folder or file with a config.json, "
                'nor a type of models of Transformers such as "gpt2" or "llama", nor module:function, '
                "nor a script.py with a function plan_entry(). "
                "Weights and configurations are not downloaded."
            )
        return known[name]()
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"Transformers cannot read a configuration from {name!r}: {first} Give a folder with a "
            "config.json that this version of Transformers knows, or module:function."
        ) from error


def _downloaded(name: str) -> Any:
    """The configuration of a model of the hub that a program has downloaded before."""
    import transformers

    if name.startswith((".", "/", "~")):
        raise UsageError(f"there is no folder {name!r} with a config.json, and no such file.")
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        folder = name.rpartition("/")[2]
        raise UsageError(
            f"the model {name!r} is not in the cache of the hub, and a plan downloads nothing. Get its "
            f"configuration, which is small, and plan the folder {folder}:\n"
            f'  python -c "from transformers import AutoConfig as C; '
            f"C.from_pretrained('{name}').save_pretrained('{folder}')\""
        ) from None


def _transformers(name: str, config: Any, dtype: torch.dtype) -> Callable[[], nn.Module]:
    import transformers

    config.use_cache = False
    kinds = getattr(config, "architectures", None) or []
    kind: Any = getattr(transformers, kinds[0], None) if kinds else None
    kind = kind or transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None:
        raise UsageError(
            f"the configuration {name!r} names no architecture that computes a loss, and its type has no "
            'causal language model. Add "architectures" to it, or give module:function.'
        )

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model: nn.Module = kind(config)
        finally:
            torch.set_default_dtype(before)
        return model

    return build
