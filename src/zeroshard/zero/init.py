"""How is a model built that no rank could ever hold?

Inside :class:`Init` a parameter is spread over the ranks as soon as another module is under
construction. Whoever touches it again (an ``apply(init_weights)`` at the end of a constructor) gets it
whole, and it is spread again when attention moves on. No constructor is patched.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zeroshard.comm.collectives import Comm
from zeroshard.comm.env import current_place, discover, init_distributed, local_device
from zeroshard.comm.trust import TrustSettings
from zeroshard.comm.watch import open_watch
from zeroshard.config import Config, load_config
from zeroshard.core.layout import pack
from zeroshard.precision.policy import policy_from
from zeroshard.store.storage import is_aliased
from zeroshard.zero import guard
from zeroshard.zero.deal import Dealer


class SpreadParameter:
    """Owner of one parameter before it belongs to a unit: 1/W of it rests here, in ``shard_S``."""

    def __init__(self, param: nn.Parameter, holder: nn.Module, leaf: str, context: Init) -> None:
        self.name = f"{type(holder).__name__}.{leaf}"
        self.holder = weakref.ref(holder)
        self.context = context
        self.layout = pack([(self.name, param.shape)], world_size=context.comm.world_size)
        self.built_as = param.dtype, param.device  # what its constructor and initialisers work in
        self.shard_S: Tensor | None = None
        self.order = guard.count_owner()
        self.pins = 0  # readers inside GatheredParameters: not to be spread under them
        guard.owners[param] = lambda: self

    def spread(self, param: nn.Parameter, source: int = 0) -> None:
        """Keep the own 1/W of rank ``source``'s values, in the training dtype, and free the rest."""
        context, (dtype, device) = self.context, self.built_as
        if context.dtype is not None and dtype.is_floating_point:
            dtype = context.dtype
        shard_S = torch.zeros(self.layout.shard_numel, dtype=dtype, device=context.device)
        begin, _ = self.layout.shard_range(context.comm.rank)
        dealer = Dealer(
            self.layout, shard_S, begin, comm=context.comm, name=self.name, source=source
        )
        (slot,) = self.layout.slots
        dealer.put(slot, param.data)
        dealer.finish()
        self.shard_S = shard_S
        like = torch.empty((), dtype=dtype, device=device).expand(slot.shape)
        guard.hide([param], [guard.blank(like)])

    def gather(self, dtype: torch.dtype | None = None) -> Tensor:
        """The full values ``[*shape]``, private. Collective."""
        assert self.shard_S is not None
        comm = self.context.comm
        full_N = self.shard_S.new_empty(self.layout.full_numel, dtype=dtype)
        own_S = full_N[slice(*self.layout.shard_range(comm.rank))].copy_(self.shard_S)
        comm.all_gather(full_N, own_S, name=self.name).wait()
        (slot,) = self.layout.slots
        return full_N[: slot.stop].view(slot.shape)

    def index(self, param: Tensor) -> int:
        """See :class:`zeroshard.zero.guard.Owner`."""
        return 0

    def read(self, param: nn.Parameter) -> Tensor:
        """See :class:`zeroshard.zero.guard.Owner`."""
        return self.gather()

    def agrees(self, fact: bool) -> bool:
        """See :class:`zeroshard.zero.guard.Owner`."""
        vote = torch.tensor([float(fact)], device=self.context.device)
        return bool(self.context.comm.gather_small(vote, name=self.name).all())

    def admit(self, param: nn.Parameter, beside: Collection[Tensor]) -> bool:
        """Inside the context a touched parameter becomes whole, and may be written."""
        if self.context.active:
            self.context.reopen(param, self, beside)
        return self.context.active

    def send(self, param: nn.Parameter, source: int) -> None:
        """The whole values of rank ``source`` become everybody's. Collective."""
        values = param.data.contiguous().to(self.context.device)
        self.context.comm.broadcast(values, source, name=self.name).wait()
        param.data.copy_(values)

    def open(self, param: nn.Parameter) -> None:
        """Make the parameter whole in place, in the dtype that it was built in."""
        dtype, device = self.built_as
        values = self.gather(dtype).to(device)
        guard.show([param], [values], [nn.Parameter])
        self.shard_S = None


class Init:
    """Build a model sharded (DeepSpeed's ``deepspeed.zero.Init``, same arguments).

    ``config_dict_or_path`` (or ``config``): its stage decides whether anything happens (only stage 3
    shards parameters), its precision the dtype ("auto": the parameter's own, until there is an engine);
    ``dtype`` overrides. ``module``: shard this model now.
    Parameters are initialised in their own dtype, then cast, and rank 0's values win. Buffers are left
    alone. Re-entrant; an exception inside leaves parameters as they are.

    Beside its shards a rank holds the module under construction and one piece of
    :data:`zeroshard.zero.deal.PIECE_NUMEL` elements. With ``keep_fp32`` patterns everything stays fp32
    until the engine is built: names are not known earlier. A value that is scaled in place after its
    module was left (``weight.mul_(0.3)``) is rounded to the training dtype before and after.
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
        self.depth = 0
        self._open: dict[int, tuple[nn.Module, nn.Parameter, SpreadParameter]] = {}
        self._hooks = contextlib.ExitStack()
        if not self.enabled:
            return
        if discover().world_size > 1:
            init_distributed()
        self.device = local_device()
        watch = open_watch(
            transport=parsed.transport if parsed else "auto",
            group=data_parallel_group,
            device_type=self.device.type,
            trust=parsed.trust if parsed else TrustSettings(),
            plan={},
            call="zero.Init",
        )
        self.comm: Comm = watch.gathers
        weakref.finalize(self, watch.close)  # with the last parameter that no engine took
        self.dtype = dtype if dtype is not None else _param_dtype(parsed)
        if module is not None:
            self._take(module)
            self._spread()

    @property
    def active(self) -> bool:
        """Is the program inside the block?"""
        return self.depth > 0

    def __enter__(self) -> Init:
        self.depth += 1
        if self.enabled and self.depth == 1:
            for hook in (
                register_module_parameter_registration_hook(self._param_registered),
                register_module_module_registration_hook(self._module_registered),
            ):
                self._hooks.callback(hook.remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.depth -= 1
        if self.depth:
            return
        self._hooks.close()
        if kind is None:
            self._spread()
        self._open.clear()

    # ------------------------------------------------------------------ which parameters are whole

    def _param_registered(self, holder: nn.Module, leaf: str, param: nn.Parameter | None) -> None:
        if param is None or param.is_meta or type(param) is not nn.Parameter:
            return
        if guard.owner_of(param) is None:
            self._spread(but=(holder,))
            owner = SpreadParameter(param, holder, leaf, self)
            self._open[id(param)] = (holder, param, owner)

    def _module_registered(self, parent: nn.Module, _leaf: str, child: nn.Module | None) -> None:
        """The child is complete; if it is a copy, nobody has seen its parameters yet."""
        if child is not None:
            self._take(child)
            self._spread(but=(parent,))

    def _take(self, module: nn.Module) -> None:
        for holder in module.modules():
            for leaf, param in holder._parameters.items():
                self._param_registered(holder, leaf, param)

    def reopen(
        self, param: nn.Parameter, owner: SpreadParameter, beside: Collection[Tensor]
    ) -> None:
        """Make a parameter whole that is used again; what is used in the same operation stays so."""
        holder = owner.holder()
        used = [h for h, p, _ in self._open.values() if any(p is tensor for tensor in beside)]
        self._spread(but=(holder, *used))
        owner.open(param)
        self._open[id(param)] = (holder or nn.Module(), param, owner)

    def _spread(self, but: Collection[nn.Module | None] = ()) -> None:
        """Spread what is whole, in order; inside the block not what an initialiser still holds."""
        for key, (holder, param, owner) in list(self._open.items()):
            if guard.owner_of(param) is not owner or owner.shard_S is not None:
                del self._open[key]  # an engine took it meanwhile
                continue
            if owner.pins or any(holder is kept for kept in but):
                continue
            if self.active and is_aliased(param):
                continue
            del self._open[key]
            owner.spread(param)


def _config_of(source: Any) -> Config | None:
    if source is None:
        return None
    if isinstance(source, Config):
        return source
    world_size = current_place().world_size
    return load_config(source, world_size=world_size, for_training=False).config


def _param_dtype(config: Config | None) -> torch.dtype | None:
    """The dtype all parameters get; None while patterns keep some of them in fp32."""
    if config is None or config.keep_fp32:
        return None
    dtype = policy_from(config).row_for("", torch.float32).param
    return None if dtype == torch.float32 else dtype
