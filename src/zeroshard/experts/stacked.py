"""Experts of Transformers models, of which ranks get parts by the models' own plans.

Transformers keeps the experts of a layer as one module with tensors ``[E, ...]``, called with the tokens,
the numbers of their experts and the weights. Its configuration says which modules these are
(``base_model_ep_plan``). A rank keeps ``E / P`` of each tensor, and the module's own forward
computes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.comm.dtensors import JOIN
from zeroshard.comm.layer_calls import announce
from zeroshard.comm.mesh_objects import text_config
from zeroshard.core.layout import SlotBlock
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.experts.dispatch import TokenLink, dispatch_all, exchange_rows
from zeroshard.experts.gate import Routes
from zeroshard.experts.marks import mark

_STYLE = "ep_dispatch_experts"
_BLOCK = "_expert_block"


class SharedStack(nn.Module):
    """What a module of experts of Transformers becomes when ranks share them, beside its own class.

    ``first_class``: that class. ``all_experts``: their number in the layer. ``ep_size``: the ranks.
    """

    first_class: type[nn.Module]
    all_experts: int
    ep_size: int
    num_experts: int
    link: TokenLink

    def connect(self, group: dist.ProcessGroup | None) -> None:
        """Send tokens in ``group`` from now on."""
        self.link.group = group
        if group is not None:
            announce(group)

    def disconnect(self) -> None:
        """Send no tokens any more."""
        self.link.group = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[S, M]``, numbers in the layer ``[S, K]``, weights ``[S, K]`` -> ``[S, M]``."""
        if self.link.group is None:
            raise UsageError(
                f"the experts of a {self.first_class.__name__} are shared by {self.ep_size} ranks, "
                "which are not connected: their engine was closed, or never finished. Build the "
                "model again."
            )
        counts_E = torch.zeros(self.all_experts, dtype=torch.int64, device=hidden_states.device)
        routes = Routes(
            top_k_index, torch.zeros_like(top_k_index), top_k_weights, None, counts_E, counts_E
        )
        return dispatch_all(hidden_states, routes, self._run, self.link.group)

    def _run(self, rows: Sequence[Tensor]) -> list[Tensor]:
        sizes = [each.shape[-2] for each in rows]
        joined = torch.cat([each.reshape(-1, each.shape[-1]) for each in rows])
        if not len(joined):
            # Without a gradient here, backward would not exchange, while other ranks wait for it.
            touched = sum(param.reshape(-1)[:0].sum() for param in self.parameters())
            return list((joined + touched).split(sizes))
        numbers = torch.arange(len(sizes)).repeat_interleave(
            torch.tensor(sizes), output_size=sum(sizes)
        )
        index = numbers.to(joined.device, non_blocking=True).unsqueeze(1)
        done: Tensor = self.first_class.forward(
            self, joined, index, joined.new_ones(len(joined), 1)
        )
        return list(done.split(sizes))


@cache
def _shared_class(first: type[nn.Module]) -> type[nn.Module]:
    return type(first.__name__, (SharedStack, first), {"first_class": first})


def expert_block(param: Any) -> SlotBlock | None:
    """The part of a whole ``[E, ...]`` tensor that ``param`` is; None: it is no part of one."""
    found: SlotBlock | None = getattr(param, _BLOCK, None)
    return found


WholeValues = Callable[[nn.Parameter], Tensor]
"""Gives the values of a parameter that may be sharded; it is plain afterwards. Collective then."""


def share_stacks(
    model: nn.Module, mesh: Mesh, rank: int, origin: str, whole: WholeValues = lambda p: p.data
) -> None:
    """Keep this rank's part of all experts that the model's plan names. Parameters stay the same objects.

    ``origin``: who gave ``mesh.expert``, for messages. One whole parameter is in memory at a time.

    Raises:
        UsageError: the numbers do not divide.
        UnsupportedError: a parameter has no memory yet, or is not stacked.
    """
    size = mesh.expert
    place = mesh.expert_place(rank, size)
    for name, module in planned_stacks(model).items():
        if isinstance(module, SharedStack):  # by an engine before
            if module.ep_size != size:
                raise UsageError(
                    f"{name} has the part of experts that one of {module.ep_size} ranks gets, and now "
                    f"{size} ranks shall share them. Build the model again."
                )
            continue
        experts = int(module.num_experts)  # type: ignore[arg-type]
        if experts % size:
            raise UsageError(
                f"{name} has {experts} experts, which {size} ranks ({origin}) cannot share: each has "
                f"equally many. Use a size that divides {experts}."
            )
        _check_memory(name, module, experts)
        own = experts // size
        link = TokenLink()
        for param in module.parameters():
            shape = tuple(param.shape)
            with torch.no_grad():
                param.data = whole(param)[place * own : (place + 1) * own].clone()
            start = (place * own, *(0 for _ in shape[1:]))
            block = SlotBlock(shape, start, frozenset({"expert"}), param.numel())
            setattr(param, _BLOCK, block)
            setattr(param, JOIN, partial(_joined, link=link))
            mark(param, size)
        shared: Any = module
        shared.__class__ = _shared_class(shared.__class__)
        shared.all_experts, shared.num_experts, shared.ep_size = experts, own, size
        shared.link = link


def _joined(local: Tensor, *, link: TokenLink) -> Tensor:
    """The parts of all ranks that share the experts, along the first axis. Collective."""
    assert link.group is not None
    size = link.group.size()
    rows = local.reshape(len(local), -1).repeat(size, 1)
    sent = [len(local)] * size
    return exchange_rows(rows, sent, sent, link.group).view(-1, *local.shape[1:])


def planned_stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of experts that the model's own plan names."""
    config: Any = getattr(model, "config", None)
    text = text_config(config)
    plan: Any = getattr(text, "base_model_ep_plan", None) or {}
    patterns = [
        re.compile(r"(?:.*\.)?" + re.escape(name).replace(r"\*", r"\d+"))
        for name, style in plan.items()
        if style == _STYLE
    ]
    return {
        name: module
        for name, module in model.named_modules()
        if any(pattern.fullmatch(name) for pattern in patterns)
        and isinstance(getattr(module, "num_experts", None), int)
    }


def _check_memory(name: str, module: nn.Module, experts: int) -> None:
    for leaf, param in module.named_parameters():
        if param.is_meta:
            raise UnsupportedError(
                f"{name}.{leaf} is on the meta device: experts that ranks share need values before "
                "initialize(). Load the model with memory, or use zeroshard.parallel.MoE, whose "
                "experts may be there."
            )
        if not param.dim() or param.shape[0] != experts:
            raise UnsupportedError(
                f"{name}.{leaf} has the shape {tuple(param.shape)}, and the layer {experts} experts: "
                "it is unknown which part of it belongs to which expert."
            )
