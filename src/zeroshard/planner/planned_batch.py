"""The batch of a plan: that which comes with the model, or the most tokens that the model takes.

Models with learned positions, such as GPT-2, look up each position in a table. A longer sample ends in an
index error of a run. Fake tensors have no values, so a plan would not notice. Rotary and relative
positions have no such limit, and configurations do not say which of them a model has. So the model's
forward is run with fake parameters, but with values where they come from the tokens alone: then each
index can be compared with its table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zeroshard.config.fields import is_auto
from zeroshard.errors import UsageError
from zeroshard.planner.fakes import fake_tensors

MICRO_BATCH = "train_micro_batch_size_per_gpu"

LENGTH = 1024
"""Tokens of a sample if nothing says how many, and the model has positions for so many."""

BATCH = "a batch of input_ids and labels of"
"""How the line of the assumptions begins that tells the batch."""


def names_a_batch(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says how many samples a micro-batch has."""
    given = (config.get(key) for key in (MICRO_BATCH, "train_batch_size"))
    return any(value is not None and not is_auto(value) for value in given)


def shared_size(batch: tuple[Any, Any], dim: int) -> int | None:
    """The size of a dimension, if all tensors of a batch share it. Numbers have no dimensions."""
    parts = [dict(part) if isinstance(part, Mapping) else part for part in batch]
    shapes = [leaf.shape for leaf in tree_leaves(parts) if isinstance(leaf, Tensor) and leaf.dim()]
    sizes = {shape[dim] if dim < len(shape) else None for shape in shapes}
    return sizes.pop() if len(sizes) == 1 else None


def refuse_options(model: str, micro_batch: int | None, length: int | None) -> None:
    """Refuse what a batch that comes with the model does not allow to choose."""
    for option, value in (("--batch", micro_batch), ("--seq", length)):
        if value is not None:
            raise UsageError(
                f"{option} is {value}, and {model} returns a batch of its own, which the option cannot "
                f"change. Leave {option} out and change the batch in the function, or let the function "
                "return the model only; the batch is then of input_ids and labels."
            )


def check_rows(model: str, batch: tuple[Any, Any], size: int) -> None:
    """Compare the samples of a batch that comes with the model with those of the configuration, ``size``.

    Samples are in the first dimension of all tensors, or in the second one. Where neither is shared,
    nothing is known.
    """
    rows = shared_size(batch, 0)
    if rows in (None, size) or shared_size(batch, 1) == size:
        return
    raise UsageError(
        f"the batch that {model} returns has {rows} rows (the first dimension of all its tensors), and a "
        f"micro-batch of the configuration has {size} samples ({MICRO_BATCH}, or what the other batch "
        f"sizes give), so samples per second would be wrong. Write {rows} into the configuration, or "
        f"return a batch of {size} rows. Without batch sizes in the configuration, the rows are taken."
    )


def token_batch(
    name: str,
    build: Callable[[], nn.Module],
    config: Any,
    tables: Sequence[int],
    micro_batch: int,
    length: int | None,
    sequence: int,
) -> tuple[dict[str, Tensor], str]:
    """A batch of tokens for a model that has none, and a sentence about it.

    ``build``, ``config``, ``tables``: see :func:`most_positions`. ``sequence`` ranks share a sample; the
    batch has the tokens of one of them.
    """
    positions = most_positions(build, config, length or LENGTH, tables)
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


MOST_VALUES = 2**22
"""Elements of the largest tensor that has values. Masks of tokens x tokens may be larger."""

MOST_GUESSES = 8
"""Lengths that are tried to find the longest one."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Positions:
    """The most tokens of a sample. ``key`` of the configuration is the number that limits them, and
    ``value`` that number; "": there is none. ``table``: of the model, with ``rows`` rows; "": not known.
    """

    most: int
    key: str
    value: int
    table: str
    rows: int

    @property
    def text(self) -> str:
        """Where the limit comes from, in words."""
        parts = [f"{self.key} is {self.value:,} in its configuration"] if self.key else []
        if self.table:
            parts.append(f"its table {self.table!r} has {self.rows:,} rows")
        left = max(self.value, self.rows) - self.most
        kept = f", of which {left} are not for tokens" if parts and left else ""
        return " and ".join(parts) + kept or "with one more its forward fails"


class _BeyondTable(Exception):
    """An index is beyond its table."""

    def __init__(self, table: Tensor, rows: int, index: int) -> None:
        super().__init__()
        self.table = table
        self.rows = rows
        self.index = index


def most_positions(
    build: Callable[[], nn.Module], config: Any, length: int, tables: Sequence[int] = ()
) -> Positions | None:
    """The most tokens of a sample, if a sample of ``length`` tokens is beyond it; otherwise None.

    With so many tokens the model's forward runs, and with one more it does not. None also if it cannot be
    run with ``input_ids`` and ``labels``: the plan says why. ``config``: of Transformers, or None.
    ``tables``: the rows of the model's tables; they count if the configuration names no number of
    positions. Only if one of these numbers could be too small, the model is built and run with fake
    tensors: once, or a few times if there is a limit. Asked for the same again, it remembers.
    """
    named = dict(_named_positions(config))
    sizes = tuple(named.values() or tables)
    padding = getattr(config, "pad_token_id", None)
    # The tables of some models begin with rows that are not for tokens, up to that of the padding token.
    first = padding + 1 if type(padding) is int and padding >= 0 else 0
    if all(size - first >= length for size in sizes):
        return None
    guesses = tuple(size - left for size in sizes for left in (0, first))
    text = config.to_json_string() if hasattr(config, "to_json_string") else repr(id(build))
    found = _tried(_Question(text, length, guesses, build))
    if found is None:
        return None
    most, table, rows = found
    key = next((key for key, value in named.items() if value - first <= most <= value), "")
    return Positions(most, key, named.get(key, 0), table, rows)


def _named_positions(config: Any) -> Iterator[tuple[str, int]]:
    """Numbers of positions in a configuration and in those inside of it, such as ``text_config``."""
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    for mapping in (*(each for each in values.values() if isinstance(each, dict)), values):
        for key, value in mapping.items():
            if (
                ("position" in str(key) or key == "max_seq_len")
                and type(value) is int
                and value > 0
            ):
                yield key, value


@dataclass(frozen=True)
class _Question:
    """Whether the model of a configuration (``text``) runs with so many tokens, or which ``guesses``."""

    text: str
    length: int
    guesses: tuple[int, ...]
    build: Callable[[], nn.Module] = field(compare=False)


@lru_cache(maxsize=16)
def _tried(asked: _Question) -> tuple[int, str, int] | None:
    """The most tokens, and the table that an index is beyond with one more; None: no limit is found."""
    with fake_tensors() as fake, _Values(fake) as values, _without_torch_log():
        model = asked.build()
        values.also_floats = True
        error = _error(model, asked.length)
        if error is None:
            return None
        guesses = set(asked.guesses)
        if isinstance(error, _BeyondTable):
            guesses.add(asked.length - (error.index - error.rows + 1))
        possible = sorted((each for each in guesses if 0 < each < asked.length), reverse=True)
        for most in possible[:MOST_GUESSES]:
            if _error(model, most) is None and (over := _error(model, most + 1)) is not None:
                return most, *_table(over, model)
        return None


def _error(model: nn.Module, length: int) -> Exception | None:
    """Why a forward of one sample fails; None: it does not."""
    known = getattr(getattr(model, "config", None), "__dict__", {})
    special = {value for key, value in known.items() if "token" in key and type(value) is int}
    ids = torch.full((1, length), min(set(range(len(special) + 1)) - special))
    try:
        with torch.no_grad():
            model(input_ids=ids, labels=ids)
    except Exception as error:
        return error
    return None


def _table(error: Exception, model: nn.Module) -> tuple[str, int]:
    """The name and the rows of the table that an index is beyond."""
    if not isinstance(error, _BeyondTable):
        return "", 0
    tensors = (*model.named_parameters(), *model.named_buffers())
    name = next((name for name, own in tensors if own is error.table), "")
    return name.removesuffix(".weight"), error.rows if name else 0


@contextmanager
def _without_torch_log() -> Iterator[None]:
    """Keep torch from printing the traceback of an operation whose shapes do not fit."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Values(TorchDispatchMode):
    """Runs operations all of whose operands have values; all others are left to the fake mode.

    ``also_floats``: results of floating point have values too, such as a mask of ones that is counted.
    They have none while a model is built, so parameters have none and neither has what comes from them.
    """

    also_floats = False

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        _compare(func, args)
        leaves, spec = tree_flatten((args, kwargs or {}))
        has_values = not any(isinstance(each, FakeTensor) for each in leaves)
        shapes, named = tree_unflatten([self._shape(each) for each in leaves], spec)
        try:
            with self._fake:
                result = func(*shapes, **named)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not has_values:
                raise
        else:
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            if not has_values or not all(map(self._may_have_values, made)):
                return result
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
            return func(*args, **(kwargs or {}))

    def _shape(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        return self._fake.from_tensor(value)

    def _may_have_values(self, made: Tensor) -> bool:
        is_exact = not made.dtype.is_floating_point and not made.dtype.is_complex
        small = made.numel() <= MOST_VALUES and made.device.type == "cpu"
        return small and (is_exact or self.also_floats)


def _compare(func: Any, args: tuple[Any, ...]) -> None:
    """Compare indices that have values with the size of what they select from."""
    if func is aten.embedding.default:
        pairs = [(0, args[1])]
    elif func in (aten.gather.default, aten.index_select.default):
        pairs = [(args[1], args[2])]
    elif func is aten.index.Tensor:
        pairs = list(enumerate(args[1]))
    else:
        return
    for dim, index in pairs:
        if not isinstance(index, Tensor) or isinstance(index, FakeTensor):
            continue
        if index.dtype in (torch.bool, torch.uint8) or not index.numel():
            continue
        with unset_fake_temporarily():
            largest = int(index.max())
        rows = args[0].shape[dim]
        if largest >= rows:
            raise _BeyondTable(args[0], rows, largest)
