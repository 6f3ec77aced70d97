"""Says what in a model cannot be planned, at which line, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from zeroshard.errors import UnsupportedError, ZeroShardError
from zeroshard.planner.places import LIBRARIES

BATCH_HINT = (
    "If the batch is not of the kind that this model takes, give module:function, which returns the "
    "model and a batch."
)


FACTORY_HINT = "Correct the function that returns the model; it has no arguments."


@contextmanager
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
