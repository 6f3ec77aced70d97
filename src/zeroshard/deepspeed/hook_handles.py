"""How does a program take an engine's hooks off, and put them back?

Programs that generate at stage 3 make all parameters whole first (``GatheredParameters``) and take the
hooks off the model, so that ranks need not keep step. They reach them as
``engine.optimizer.parameter_offload``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from zeroshard.errors import UsageError

if TYPE_CHECKING:
    from zeroshard.deepspeed.engine import DeepSpeedEngine


class DeepSpeedZeRoOffload:
    """The hooks of an engine at stage 3. ``module``: the model. ``forward_hooks`` and ``backward_hooks``:
    handles of those on modules and on parameters; their ``remove()`` takes them off.

    Without its hooks an engine gathers and reduces nothing by itself: who runs a sharded module is told
    so, and ``step()`` finds no gradient.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self.module: nn.Module = engine.module
        self.module.ds_external_parameters = _no_parameters  # type: ignore[assignment]
        self.param_coordinator = _Order()
        self.forward_hooks, self.backward_hooks = engine.hook_handles()

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Put the hooks of the engine's model back.

        Raises :class:`UsageError` for another module: the engine knows nothing of its parameters.
        """
        if module is not self.module:
            raise UsageError(
                f"_register_deepspeed_module got a {type(module).__name__} that is not the engine's "
                "model. Pass parameter_offload.module."
            )
        self._engine.attach_hooks()
        self.forward_hooks, self.backward_hooks = self._engine.hook_handles()


def _no_parameters() -> tuple[()]:
    """Parameters that a module uses and another one owns: none need to be known."""
    return ()


class _Order:
    """The order in which modules ran. A forward in another order is only slower: nothing gets invalid."""

    def is_invalid_trace(self) -> bool:
        """Is there nothing left to invalidate?"""
        return True
