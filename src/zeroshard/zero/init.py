"""How is a model built that no rank could ever hold?

Inside :class:`Init` a parameter is spread over the ranks as soon as the next module is under
construction. Whoever touches it again (an ``apply(init_weights)`` at the end of a constructor) gets it
whole, and it is spread again when attention moves on. No constructor is patched.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zeroshard.comm.collectives import Comm
from zeroshard.comm.connect import make_comm
from zeroshard.comm.env import current_place, init_distributed, local_device
from zeroshard.config import Config, load_config
from zeroshard.core.layout import ALIGNMENT, round_up
from zeroshard.precision.policy import policy_from
from zeroshard.store.storage import empty_flat
from zeroshard.zero import guard

OPEN_MODULES = 2
"""Modules whose parameters stay whole: the one under construction and one that is being initialised."""


class SpreadParameter:
    """Owner of one parameter before it belongs to a unit: 1/W of it rests here, in ``shard_S``."""

    def __init__(
        self, param: nn.Parameter, holder: nn.Module, name: str, context: Init
    ) -> None:
        self.name = name
        self.holder = weakref.ref(holder)
        self.context = context
        self.shape = param.shape
        self.shard_S: Tensor | None = None
        guard.owners[param] = self

    def spread(self, param: nn.Parameter) -> None:
        """Keep the own 1/W of rank 0's values, in the training dtype, and free the rest."""
        comm, dtype = self.context.comm, self.context.dtype
        values = param.data
        if dtype is not None and values.is_floating_point():
            values = values.to(dtype)
        values = values.contiguous()
        comm.broadcast(values, 0, name=self.name).wait()
        shard_numel = round_up(-(-values.numel() // comm.world_size), ALIGNMENT)
        self.shard_S = values.new_zeros(shard_numel)
        own = values.view(-1)[comm.rank * shard_numel : (comm.rank + 1) * shard_numel]
        self.shard_S[: own.numel()].copy_(own)
        # Not a resize: an initialiser may still hold an alias of the old storage.
        param.data = empty_flat(values.numel(), values.dtype, values.device).view(self.shape)
        guard.hide([param])

    def gather(self) -> Tensor:
        """The full values ``[*shape]``, private. Collective."""
        assert self.shard_S is not None
        comm = self.context.comm
        full_N = self.shard_S.new_empty(self.shard_S.numel() * comm.world_size)
        comm.all_gather(full_N, self.shard_S, name=self.name).wait()
        return full_N[: self.shape.numel()].view(self.shape)

    def read(self, param: nn.Parameter) -> Tensor:
        """See :class:`zeroshard.zero.guard.Owner`."""
        return self.gather()

    def admit(self, param: nn.Parameter) -> bool:
        """Inside the context a touched parameter becomes whole, and may be written."""
        if self.context.active:
            self.open(param)
        return self.context.active

    def open(self, param: nn.Parameter) -> None:
        """Make the parameter whole in place."""
        values = self.gather()
        guard.show([param])
        param.data = values
        self.shard_S = None
        self.context.touched(param, self)


class Init:
    """Build a model sharded (DeepSpeed's ``deepspeed.zero.Init``, same arguments).

    ``config_dict_or_path`` (or ``config``): its stage decides whether anything happens (only stage 3
    shards parameters), its precision the dtype; ``dtype`` overrides. ``module``: shard this model now.
    Parameters are initialised in their own dtype, then cast, and rank 0's values win. Buffers are left
    alone. Re-entrant; an exception inside leaves parameters as they are.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        source = config_dict_or_path if config_dict_or_path is not None else config
        parsed = _config_of(source)
        self.enabled = enabled and (parsed is None or parsed.zero_optimization.stage == 3)
        self.active = False
        self._open: dict[int, tuple[weakref.ref[nn.Parameter], SpreadParameter]] = {}
        self._handle: Any = None
        if not self.enabled:
            return
        init_distributed()
        self.comm: Comm = make_comm(
            transport=parsed.transport if parsed else "auto",
            group=data_parallel_group,
            purpose="init",
            device_type=local_device().type,
        )
        self.dtype = dtype if dtype is not None else _param_dtype(parsed)
        if module is not None:
            self._spread_module(module)

    def _spread_module(self, module: nn.Module) -> None:
        for holder in module.modules():
            for leaf, param in holder._parameters.items():
                if param is not None:
                    self._registered(holder, leaf, param)
        self._spread(list(self._open))

    def __enter__(self) -> Init:
        if self.enabled:
            self.active = True
            self._handle = register_module_parameter_registration_hook(self._registered)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.enabled:
            return
        self._handle.remove()
        self.active = False
        if kind is None:
            self._spread(list(self._open))
        self._open.clear()

    # ------------------------------------------------------------------ which parameters are whole

    def _registered(self, holder: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or param.is_meta or type(param) is not nn.Parameter:
            return
        if guard.owner_of(param) is None:
            self.touched(param, SpreadParameter(param, holder, f"{type(holder).__name__}.{name}", self))

    def touched(self, param: nn.Parameter, owner: SpreadParameter) -> None:
        """The parameter is whole and in use; others have to go."""
        self._open.pop(id(param), None)
        self._open[id(param)] = (weakref.ref(param), owner)
        recent = list(dict.fromkeys(id(o.holder()) for _, o in reversed(self._open.values())))
        keep = set(recent[:OPEN_MODULES])
        self._spread([key for key, (_, o) in self._open.items() if id(o.holder()) not in keep])

    def _spread(self, keys: Iterable[int]) -> None:
        for key in keys:
            reference, owner = self._open.pop(key)
            param = reference()
            if param is not None:
                owner.spread(param)


def _config_of(source: Any) -> Config | None:
    if source is None:
        return None
    if isinstance(source, Config):
        return source
    return load_config(source, world_size=current_place().world_size).config


def _param_dtype(config: Config | None) -> torch.dtype | None:
    """The dtype all parameters get; None while patterns keep some of them in fp32."""
    if config is None or config.keep_fp32:
        return None
    dtype = policy_from(config).row_for("", torch.float32).param
    return None if dtype == torch.float32 else dtype
