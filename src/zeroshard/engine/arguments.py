"""Checks losses and graphs that a caller passes to an engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeroshard.errors import UsageError


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
