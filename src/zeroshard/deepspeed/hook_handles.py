"""Lets a program remove an engine's hooks and attach them again.

Programs that generate at stage 3 first make all parameters whole (``GatheredParameters``), and then
remove the hooks from the model, so that each rank can call it independently. They use
``engine.optimizer.parameter_offload`` for that.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from zeroshard.errors import UsageError


class HasHooks(Protocol):
    """An engine whose hooks can be removed and attached again."""

    module: nn.Module

    def hook_handles(self) -> tuple[list[Any], list[Any]]:
        """Handles of the hooks on modules, and of those on parameters."""

    def attach_hooks(self) -> None:
        """Attach all hooks again."""


class DeepSpeedZeRoOffload:
    """The hooks of an engine at stage 3.

    ``module``: the model. ``forward_hooks`` and ``backward_hooks``: handles of the hooks on modules and
    on parameters; ``remove()`` of a handle removes the hook.

    Without its hooks an engine gathers and reduces nothing by itself: running a sharded module raises an
    error that says so, and ``step()`` finds no gradient.
    """

    def __init__(self, engine: HasHooks) -> None:
        self._engine = engine
        self.module: nn.Module = engine.module
        self.module.ds_external_parameters = _no_parameters  # type: ignore[assignment]
        self.param_coordinator = _Order()
        self.forward_hooks, self.backward_hooks = engine.hook_handles()

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Attach the hooks of the engine's model again.

        Raises:
            UsageError: ``module`` is not the engine's model.
        """
        if module is not self.module:
            raise UsageError(
                f"_register_deepspeed_module got a {type(module).__name__} that is not the engine's "
                "model. Pass parameter_offload.module."
            )
        self._engine.attach_hooks()
        self.forward_hooks, self.backward_hooks = self._engine.hook_handles()


def _no_parameters() -> tuple[()]:
    """Parameters that a module uses and another module owns: none need to be declared."""
    return ()


class _Order:
    """Stands for DeepSpeed's trace of modules. Here a forward in another order is slower, not invalid."""

    def is_invalid_trace(self) -> bool:
        """True: there is no trace to invalidate."""
        return True
