"""What an error does that leaves a forward, a backward or a step of the engine.

It is noted: a program may catch it and go on, while other ranks wait for the calls that were not made.
Their report then says why. A failed allocation is explained as well.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch
from torch import Tensor

from zeroshard.comm.collectives import first_line
from zeroshard.engine import out_of_memory
from zeroshard.errors import UsageError

_UNLIKE_DTYPES = ("same dtype", "should be the same", "expected scalar type", "same scalar type")
"""Of torch's messages: products of matrices, convolutions, others."""


def tell(engine: Any, error: Exception, phase: str) -> None:
    """Note ``error``, and add to its message what the rank holds if memory is missing."""
    engine._watch.note_failure(f"{named(error)} in {phase}")
    out_of_memory.explain(engine, error, phase)
    if phase == "forward" and isinstance(error, RuntimeError):
        _explain_dtypes(engine, error)


def _explain_dtypes(engine: Any, error: RuntimeError) -> None:
    """Add to the message of an operation on unlike dtypes that parameters were converted, inputs not."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    mode = next((mode for mode in half if getattr(engine.settings, mode).enabled), None)
    if mode is None or not any(words in str(error).lower() for words in _UNLIKE_DTYPES):
        return
    hint = '"fp16": {"auto_cast": true} does it' if mode == "fp16" else "token ids need no cast"
    error.args = (
        f"{error}\nzeroshard: parameters are in {half[mode]}, since the configuration has {mode}; inputs "
        f"are as the program passes them. Cast inputs of floating point: x.to({half[mode]}); {hint}.",
        *error.args[1:],
    )


def refuse_copy(engine: Any, _protocol: SupportsIndex, /) -> Any:
    """The ``__reduce_ex__`` of an engine, by which ``copy.deepcopy`` and ``pickle`` would copy it.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"a {type(engine).__name__} cannot be copied or pickled: it has open connections, threads and "
        "shards of all ranks. Save with engine.save_checkpoint(); copy a model before initialize(), or "
        "load a new one from engine.state_dict()."
    )


def named(error: Exception) -> str:
    """An error in words that no program takes for an error of memory of its own.

    Programs that look for a batch size that fits catch any error whose message has torch's words, so
    these must not be in the reports of other ranks.

    >>> named(RuntimeError("CUDA out of memory. Tried to allocate 2 MiB."))
    'RuntimeError (an allocation failed)'
    >>> named(ValueError("a bad sample"))
    'ValueError: a bad sample'
    """
    name = type(error).__name__
    if "memory" in str(error).lower() or isinstance(error, MemoryError):
        return f"{name} (an allocation failed)"
    return f"{name}: {first_line(error)}"


def backward_error(loss: Any, error: Exception) -> UsageError | None:
    """A clearer error for one that ``loss.backward()`` raised; None if there is none.

    The loss is not a scalar tensor, has no graph, or its graph saved a parameter that has changed.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        return UsageError(
            f"engine.backward needs a scalar loss, got {shape}. Reduce it first, for instance "
            "with .mean()."
        )
    if not loss.requires_grad:
        return UsageError(
            "engine.backward(loss): the loss has no graph. It was computed under torch.no_grad(), "
            "detached, or depends on no trainable parameter."
        )
    if "modified by an inplace operation" not in str(error):
        return None
    return UsageError(
        "backward needs a tensor that was changed after forward. If the program changed it in "
        "place, correct the program: the error would be the same without ZeRO. If the tensor is a "
        "parameter, there are two possible causes. Either the parameters were updated between "
        "forward and backward: a graph kept by retain_graph=True cannot be used after "
        "engine.step(). Or a module that is gathered as one unit stored a tensor outside of its "
        "output (self.aux_loss = ...), so the engine did not detect that backward entered the "
        "module: return that tensor from its forward, in a tuple, dict or dataclass. Error of "
        "torch: " + str(error).split(". Hint")[0]
    )


def check_sharing(mine: Any, other: Any) -> None:
    """Check that the backward of engine ``other`` is right for engine ``mine``.

    Raises:
        UsageError: the engines divide the loss differently, or one of them alone scales it.
    """
    own, theirs = mine.accumulation.steps, other.accumulation.steps
    if own != theirs:
        raise UsageError(
            "one loss was computed with two engines, with "
            f"gradient_accumulation_steps={theirs} and {own}. backward() of one engine "
            "divides the loss wrongly for the other. Use the same number."
        )
    if mine.scales_loss != other.scales_loss:
        raise UsageError(
            "one loss was computed with two engines, and only one of them scales it (fp16). What "
            "overflows there would be an error of the other one, or be lost. Train both in fp16, or "
            "give each engine its own loss."
        )
