"""Where the tokens of a rank go: what a gate decides, also in the form that DeepSpeed's gates return.

``S``: tokens of a rank. ``E``: experts of the layer. ``K``: experts per token. ``C``: the capacity, the
places that a rank has at each expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroshard.errors import UsageError


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """Where the tokens of a rank go.

    ``expert_SK``: int64, -1 where the token was dropped. ``place_SK``: int64, its place at the expert,
    below ``capacity``; 0 where it was dropped. ``weight_SK``: the factor of the expert's result, 0 where
    it was dropped. ``capacity``: None: nothing is dropped. ``l_aux``: the load-balancing loss, 0-dim.
    ``counts_E``: int64, tokens that chose each expert, before any was dropped.

    A gate that a program derives finds DeepSpeed's tuple in it: see :func:`as_tuple`.
    """

    expert_SK: Tensor
    place_SK: Tensor
    weight_SK: Tensor
    capacity: int | None
    l_aux: Tensor
    counts_E: Tensor

    def __getitem__(self, key: Any) -> Any:
        return as_tuple(self)[key]


def as_tuple(routes: Routes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(l_aux, combine_SEC, dispatch_SEC, counts_E)``, as DeepSpeed's gates return it.

    ``combine_SEC`` has the weights, with their graph, and ``dispatch_SEC`` is true where a token goes.
    Without a capacity, C is the largest number of tokens of an expert, for which the host waits.
    """
    experts, is_there = len(routes.counts_E), routes.expert_SK >= 0
    place_SK, places = routes.place_SK, routes.capacity
    if places is None:
        chosen = F.one_hot(routes.expert_SK.clamp(min=0).flatten(), experts)
        chosen = chosen * is_there.flatten().unsqueeze(1)
        place_SK = ((chosen.cumsum(0) - 1) * chosen).sum(1).view_as(is_there)
        places = max(1, int(chosen.sum(0).max()))
    end = experts * places
    slot_SK = torch.where(is_there, routes.expert_SK * places + place_SK, end)
    empty = routes.weight_SK.new_zeros(len(slot_SK), end + 1)
    combine = empty.scatter(1, slot_SK, routes.weight_SK)[:, :end].view(-1, experts, places)
    dispatch = empty.bool().scatter(1, slot_SK, is_there)[:, :end].view(-1, experts, places)
    return routes.l_aux, combine, dispatch, routes.counts_E


def from_tuple(output: Any, *, drops: bool) -> Routes:
    """The routes in what a program's gate returned. ``drops``: all ranks have as many places C.

    The host waits for the largest number of experts of a token.

    Raises:
        UsageError: it is no tuple of DeepSpeed's form.
    """
    is_tuple = isinstance(output, tuple) and len(output) == 4
    shapes = {tuple(x.shape) for x in output[1:3] if isinstance(x, Tensor)} if is_tuple else ()
    if len(shapes) != 1 or len(next(iter(shapes))) != 3:
        found = type(output).__name__ if not is_tuple else f"tuple with tensors of {[*shapes]}"
        raise UsageError(
            f"MoE: the gate returned a {found}. It should return what TopKGate's forward returns, or "
            "DeepSpeed's tuple (l_aux, combine_weights, dispatch_mask, exp_counts), in which both "
            "combine_weights and dispatch_mask have the shape [tokens, experts, places]."
        )
    l_aux, combine, dispatch, counts_E = output
    places = combine.shape[2]
    goes = dispatch.flatten(1).bool()
    per_token = max(1, int(goes.sum(1).max())) if len(goes) else 1
    index_SK = goes.to(torch.float32).topk(per_token, dim=1).indices
    is_there = goes.gather(1, index_SK)
    return Routes(
        torch.where(is_there, index_SK // places, -1),
        torch.where(is_there, index_SK % places, 0),
        combine.flatten(1).gather(1, index_SK) * is_there,
        places if drops else None,
        l_aux,
        counts_E.detach().to(goes.device),
    )
