"""Finds the model of a plan: from a configuration of Transformers, or a function of the program."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from zeroshard.errors import UnsupportedError, UsageError, ZeroShardError
from zeroshard.parallel.cut import pipeline
from zeroshard.parallel.split import PipelineModel
from zeroshard.parallel.traced_plan import repeated_blocks
from zeroshard.planner.allocations import LIBRARIES
from zeroshard.planner.fakes import fake_tensors
from zeroshard.planner.planned_batch import token_batch
from zeroshard.zero import Init

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""``organization/model``."""


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
        own = parts.first, parts.config, parts.tables
        batch, said = token_batch(name, *own, micro_batch, length, sequence)
        assumed += (said,)
    pair = batch if isinstance(batch, tuple) else (batch, None)

    def build() -> nn.Module:
        with Init() if sharded and stages == 1 else contextlib.nullcontext():
            model = parts.first()
            if checkpointing:
                recomputing(model)
        return cut_evenly(model, stages) if stages > 1 else model

    if stages > 1:
        assumed += ("a model that is not cut already has equal numbers of blocks on each stage",)
    how = parts.how or ("under zero.Init (stage 3)" if sharded else "whole on each rank")
    return ModelSource(
        name, build, pair, loss_of,
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
    """What a function of the program returns."""
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
    """A model of Transformers, without a batch."""
    config = _configuration(name)
    named = getattr(config, "dtype", None)
    dtype = named or torch.get_default_dtype()
    why = ", as its configuration says" if named else ": its configuration names no dtype"
    said = f"the model is built in {dtype}{why}"
    return _Parts(_transformers(name, config, dtype), None, config, (said,))


def _batch(name: str, made: Any) -> Any:
    """The batch of what a function returned; None: it has none."""
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
    """Refuse an option that tries batches of several sizes."""
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


def cut_evenly(model: nn.Module, stages: int) -> nn.Module:
    """The model as a pipeline whose stages have equal numbers of blocks, unless it is one already."""
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


def loss_of(output: Any, labels: Any) -> Tensor:
    """The loss: ``output.loss``, ``output["loss"]``, or the output if it is one number."""
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


# ---------------------------------------------------------------------- scripts

ENTRY = "plan_entry"
"""The function of a script if none is named."""


def script_module(script: str, function: str) -> ModuleType:
    """The script as a module. Its ``__name__`` is not ``"__main__"``; its arguments are empty.

    Raises:
        UsageError: it cannot be read, defines no such function at its top level (then nothing of it
            runs), or raises an error.
    """
    path = Path(script)
    try:
        text, changed = path.read_text(), path.stat().st_mtime_ns
        tree = ast.parse(text, script)
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"the script {script} cannot be read: {error}") from error
    if not any(_defines(node, function) for node in tree.body):
        raise UsageError(
            f"the script {script} defines no function {function!r}. A plan does not run a script: it "
            f"calls {function}(), which takes no arguments and returns the model, or the model and a "
            "batch. Add it, or name another function as script.py:function."
        )
    return _imported(path.resolve(), changed)


def _defines(node: ast.stmt, function: str) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name == function
    targets = node.targets if isinstance(node, ast.Assign) else []
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [alias.asname or alias.name for alias in node.names]
    return function in names


@cache
def _imported(path: Path, _changed: int) -> ModuleType:
    """``_changed``: when the file was changed, so that it is imported anew after an edit."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder, arguments = str(path.parent), sys.argv
    if folder not in sys.path:  # as python does for a script, for what it imports now and later
        sys.path.insert(0, folder)
    sys.modules.setdefault(path.stem, module)
    sys.argv = [str(path)]
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        where = f"line {frames[-1].lineno} ({frames[-1].line})" if frames else "its import"
        raise UsageError(
            f"the script {path.name} cannot be imported: {type(error).__name__} at {where}: {error} "
            "A plan imports a script. Put what trains, and what reads arguments, under "
            'if __name__ == "__main__".'
        ) from error
    finally:
        sys.argv = arguments
    return module


# ---------------------------------------------------------------------- what cannot be planned

BATCH_HINT = (
    "If the batch is not of the kind that this model takes, give module:function, which returns the "
    "model and a batch."
)


FACTORY_HINT = "Correct the function that returns the model; it has no arguments."


@contextlib.contextmanager
def explained(model: str, hint: str = BATCH_HINT) -> Iterator[None]:
    """Say what in a model cannot be planned, at which line, and what to do (``hint``).

    Raises:
        UnsupportedError: an operation needs values or has no fake kernel, or the model raises an error.
    """
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(
            f"{model} cannot be planned: {_line(error)} calls {error.func}, which "
            "depends on the values of a tensor, and a plan has only shapes. Common causes: "
            ".item(), .tolist(), bool(tensor), nonzero(), and a boolean mask as an index. Use an "
            "operation whose result has a fixed shape, such as torch.where, or give module:function, "
            "which leaves such values out."
        ) from error
    except UnsupportedOperatorException as error:
        raise UnsupportedError(
            f"{model} cannot be planned: {_line(error)} calls {error.func}, which "
            "has no fake kernel, so the shape of its result is unknown. "
            "Register one with torch.library.register_fake."
        ) from error
    except ZeroShardError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, ZeroShardError):  # torch's Module.to wraps every error
            raise UnsupportedError(
                f"{model} cannot be planned: {_line(error)}: {error.__cause__}"
            ) from error
        raise UnsupportedError(
            f"{model} cannot be planned: {type(error).__name__} at {_line(error)}: "
            f"{str(error).rstrip('.')}. {hint}"
        ) from error


def _line(error: BaseException) -> str:
    """The innermost line outside of torch and of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(LIBRARIES):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "a line of torch"
