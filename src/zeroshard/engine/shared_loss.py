"""Losses that several engines have computed together, and the loss scales of their backward.

``engine.backward(loss)`` multiplies the loss by one number, so all gradients of that backward carry it,
also those of other engines that the loss was computed with. In the step, an engine divides its gradients
by its own loss scale. So gradients that carry another number are multiplied by the quotient of the two
when they arrive (:attr:`~zeroshard.zero.gradients.GradBuffer.rescale`). Then every gradient that an
engine holds carries its own scale, whatever this rank or another one computed it with; each engine finds
its own overflows, skips its own steps and adapts its own scale. Loss scales are powers of two unless the
configuration has others, so the product is exact as long as it is in the range of fp16.

The number is the smallest loss scale of the engines that have shared a loss. With a larger one, an
engine whose gradients overflow would lower its own scale in vain. Which engines share losses is known
after their first backward. Only what fp16 cannot represent depends on the number, so ranks need not agree
on it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import UsageError


class LossSharing:
    """The engines that have shared a loss with one engine, and what the running backward carries."""

    def __init__(self, own_scale: Tensor) -> None:
        self._own_scale = own_scale  # updated in place
        self._partners: weakref.WeakSet[LossSharing] = weakref.WeakSet()
        self._carried = own_scale

    def begin(self) -> Tensor:
        """The number by which :meth:`Engine.backward` multiplies the loss, 0-dim."""
        scales = [self._own_scale, *(other._own_scale for other in self._partners)]
        self._carried = torch.stack(scales).amin() if len(scales) > 1 else self._own_scale
        return self._carried

    def close(self) -> None:
        """The engine trains no more: its scale, which stays, limits no other."""
        for other in self._partners:
            other._partners.discard(self)

    def rescale(self, running: LossSharing) -> Tensor | None:
        """What gradients of ``running``'s backward are multiplied by, 0-dim; None: by nothing."""
        if running is not self:
            self._partners.add(running)
            running._partners.add(self)
        if running._carried is self._own_scale:
            return None
        return self._own_scale / running._carried


def check(mine: Any, other: Any) -> None:
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
