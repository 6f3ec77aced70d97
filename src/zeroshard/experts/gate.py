"""The gate of a layer with experts: which experts a token goes to, and with which weight.

The rules, also those for dropping tokens, are those of DeepSpeed's ``MoE`` layer: Switch Transformer
(arXiv 2101.03961) for one expert per token, GShard (arXiv 2006.16668) for two, and the most probable
tokens of each expert for more. Pure functions of the logits, apart from the random numbers that noise and
random token selection draw from torch's default generator of the device.

``S``: tokens of a rank. ``E``: experts of the layer. ``K``: experts per token. ``C``: the capacity, the
places that a rank has at each expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
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


NOISE = (None, "None", "Jitter", "RSample")
"""DeepSpeed's values of ``noisy_gate_policy``."""

_JITTER = 1e-2


@dataclass(frozen=True, slots=True)
class Selection:
    """How tokens are selected. ``capacity_factor``: None: no token is dropped."""

    capacity_factor: float | None = 1.0
    min_capacity: int = 4
    noise: str | None = None
    random_tokens: bool = True
    samples_second: bool = True


def capacity_of(tokens: int, experts: int, per_token: int, how: Selection) -> int | None:
    """The places of a rank at each expert.

    >>> capacity_of(10, 4, 1, Selection(1.0, min_capacity=2)), capacity_of(4, 4, 1, Selection())
    (3, 4)
    """
    if how.capacity_factor is None:
        return None
    # In fp32, as DeepSpeed computes it: in fp64 a product may round up elsewhere.
    share = torch.tensor(tokens / experts) * torch.tensor(how.capacity_factor * per_token)
    return max(ceil(float(share)), how.min_capacity)


def _gumbel_like(x: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    drawn: Tensor = torch.distributions.Gumbel(zero, zero + 1, validate_args=False).rsample(x.shape)
    return drawn


def _mean(x_SE: Tensor) -> Tensor:
    """Over the tokens; 0 without any, where a mean is NaN."""
    return x_SE.mean(0) if len(x_SE) else x_SE.sum(0)


def choose_one(logits_SE: Tensor, how: Selection, used_S: Tensor | None = None) -> Routes:
    """Each token goes to its most probable expert, with its probability as weight.

    ``used_S``: 0 for tokens that go nowhere, such as padding.
    """
    tokens, experts = logits_SE.shape
    noisy_SE = logits_SE + _gumbel_like(logits_SE) if how.noise == "RSample" else None
    gates_SE = logits_SE.softmax(1)
    index_S = (gates_SE if noisy_SE is None else noisy_SE).argmax(1)
    mask_SE = F.one_hot(index_S, experts)
    if used_S is not None:
        mask_SE = mask_SE * used_S.reshape(-1, 1).to(mask_SE.dtype)
    counts_E = mask_SE.sum(0)
    l_aux = (_mean(gates_SE) * _mean(mask_SE.to(gates_SE.dtype))).sum() * experts
    capacity = capacity_of(tokens, experts, 1, how)
    # Drawn also where nothing is dropped, as DeepSpeed does: later draws are then the same.
    rank_SE = mask_SE * torch.rand_like(logits_SE) if how.random_tokens else mask_SE
    if capacity is not None:
        kept_CE = rank_SE.topk(min(capacity, tokens), dim=0).indices
        mask_SE = mask_SE * torch.zeros_like(mask_SE).scatter_(0, kept_CE, 1)
    place_SE = mask_SE.cumsum(0) - 1
    return _routes(gates_SE, [(index_S, mask_SE, place_SE)], capacity, l_aux, counts_E)


def choose_two(logits_SE: Tensor, how: Selection) -> Routes:
    """Each token goes to two experts, with their probabilities as weights, scaled to the sum 1.

    First choices have the first places at an expert. The second expert is drawn with the probabilities of
    the rest if ``how.samples_second``, else it is the second most probable.
    """
    _, experts = logits_SE.shape
    gates_SE = logits_SE.softmax(1)
    first_S = gates_SE.argmax(1)
    mask_SE = F.one_hot(first_S, experts)
    if how.samples_second:
        logits_SE = logits_SE + _gumbel_like(logits_SE)
    second_S = logits_SE.masked_fill(mask_SE.bool(), float("-inf")).argmax(1)
    second_SE = F.one_hot(second_S, experts)
    place_SE = mask_SE.cumsum(0) - 1
    place2_SE = second_SE.cumsum(0) - 1 + mask_SE.sum(0)
    l_aux = (_mean(gates_SE) * _mean(mask_SE.to(gates_SE.dtype))).mean() * experts**2
    counts_E = (mask_SE + second_SE).sum(0)
    capacity = capacity_of(len(logits_SE), experts, 2, how)
    if capacity is not None:
        mask_SE = mask_SE * (place_SE < capacity)
        second_SE = second_SE * (place2_SE < capacity)
    chosen = [(first_S, mask_SE, place_SE), (second_S, second_SE, place2_SE)]
    return _scaled(_routes(gates_SE, chosen, capacity, l_aux, counts_E))


def choose_several(logits_SE: Tensor, per_token: int, how: Selection) -> Routes:
    """Each token goes to its ``per_token`` most probable experts; weights are scaled to the sum 1.

    Of the tokens that chose an expert, the most probable ones are kept.
    """
    tokens, experts = logits_SE.shape
    gates_SE = logits_SE.softmax(1)
    top_SK, index_SK = gates_SE.topk(per_token, dim=1)
    mask_SE = torch.zeros_like(gates_SE, dtype=torch.int64).scatter_(1, index_SK, 1)
    counts_E = mask_SE.sum(0)
    balance = (_mean(gates_SE) * _mean(mask_SE.to(gates_SE.dtype))).mean()
    l_aux = balance * experts**2 / per_token
    capacity = capacity_of(tokens, experts, per_token, how)
    if capacity is not None:
        chosen_SE = torch.zeros_like(gates_SE).scatter(1, index_SK, top_SK)
        kept_CE = chosen_SE.topk(min(capacity, tokens), dim=0, sorted=False).indices
        mask_SE = mask_SE * torch.zeros_like(mask_SE).scatter_(0, kept_CE, 1)
    place_SE = mask_SE.cumsum(0) - 1
    chosen = [(index_S, mask_SE, place_SE) for index_S in index_SK.unbind(1)]
    return _scaled(_routes(gates_SE, chosen, capacity, l_aux, counts_E))


def _routes(
    gates_SE: Tensor,
    chosen: list[tuple[Tensor, Tensor, Tensor]],
    capacity: int | None,
    l_aux: Tensor,
    counts_E: Tensor,
) -> Routes:
    """``chosen``: for each choice the expert ``[S]``, and what is kept and its place ``[S, E]``."""
    index_SK = torch.stack([index_S for index_S, _, _ in chosen], 1)

    def picked(x_SE: Tensor, at: int) -> Tensor:
        return x_SE.gather(1, index_SK[:, at : at + 1])

    kept_SK = torch.cat([picked(mask, at) for at, (_, mask, _) in enumerate(chosen)], 1)
    place_SK = torch.cat([picked(place, at) for at, (_, _, place) in enumerate(chosen)], 1)
    weight_SK = gates_SE.gather(1, index_SK) * kept_SK
    index_SK = torch.where(kept_SK.bool(), index_SK, -1)
    return Routes(index_SK, place_SK * kept_SK, weight_SK, capacity, l_aux, counts_E.detach())


def _scaled(routes: Routes) -> Routes:
    """The same routes with weights whose sum is 1 for each token that is not dropped everywhere."""
    weight_SK = routes.weight_SK
    total_S1 = weight_SK.sum(1, keepdim=True).clamp(min=torch.finfo(weight_SK.dtype).eps)
    return replace(routes, weight_SK=weight_SK / total_S1)


def check_whole(name: str, value: object, *, at_least: int) -> int:
    """Check an argument of ``MoE`` that counts something."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise UsageError(
            f"MoE: {name} is {value!r}, but must be a whole number of at least {at_least}."
        )
    return int(value)


def _check_factor(name: str, value: object) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) < inf:  # type: ignore[arg-type]
        raise UsageError(
            f"MoE: {name} is {value!r}, but must be a number above 0: a rank has {name} * k * tokens / "
            "num_experts places at each expert. To drop no token, pass drop_tokens=False."
        )


class TopKGate(nn.Module):
    """A linear gate over ``num_experts`` experts, of which each token gets ``k``. Arguments of ``MoE``.

    It computes in fp32, or in fp64 for fp64 tokens. ``wg``: the linear layer, ``[E, M]`` without bias.

    Raises:
        UsageError: an argument has another type, or a value that is not possible.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        del ep_group  # the layer has it
        if not check_whole("k", k, at_least=1) <= num_experts:
            raise UsageError(
                f"MoE: k is {k}, and the layer has num_experts {num_experts}: a token goes to at "
                "least one expert, and to each at most once."
            )
        check_whole("min_capacity", min_capacity, at_least=0)
        for name, factor in (
            ("capacity_factor", capacity_factor),
            ("eval_capacity_factor", eval_capacity_factor),
        ):
            _check_factor(name, factor)
        if noisy_gate_policy not in NOISE:
            raise UsageError(
                f"MoE: noisy_gate_policy is {noisy_gate_policy!r}. It is None, 'Jitter' (noise on the "
                "gate's input) or 'RSample' (noise on its logits, for k=1)."
            )
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def logits(self, x_SM: Tensor) -> Tensor:
        """The gate's opinion of each token about each expert, ``[S, E]`` in fp32, or fp64 for fp64."""
        dtype = torch.promote_types(x_SM.dtype, torch.float32)
        x_SM = x_SM.to(dtype)
        if self.noisy_gate_policy == "Jitter" and self.training:
            x_SM = x_SM * (torch.rand_like(x_SM) * (2 * _JITTER) + (1 - _JITTER))
        with torch.autocast(x_SM.device.type, enabled=False):
            return F.linear(x_SM, self.wg.weight.to(dtype))

    def forward(
        self,
        x_SM: Tensor,
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> Routes:
        """The routes of the tokens ``[S, M]``. ``used_token``: ``[S]``, 0 for padding; for ``k=1``.

        A class that is derived may return DeepSpeed's tuple instead, and finds it in the routes, too
        (:func:`~zeroshard.experts.gate.as_tuple`). The other arguments have no effect.

        Raises:
            UsageError: ``used_token`` with another ``k``, or not one number for each token.
        """
        del sparse_routes, use_tutel
        if used_token is not None:
            self._check_used(used_token, len(x_SM))
        logits_SE = self.logits(x_SM)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        how = Selection(
            float(factor) if self.drop_tokens else None,
            int(self.min_capacity),
            self.noisy_gate_policy if self.training else None,
            self.use_rts,
            self.top2_2nd_expert_sampling,
        )
        if self.k == 1:
            return choose_one(logits_SE, how, used_token)
        if self.k == 2:
            return choose_two(logits_SE, how)
        return choose_several(logits_SE, self.k, how)

    def _check_used(self, used_token: Tensor, tokens: int) -> None:
        if self.k > 1:
            raise UsageError(
                f"MoE: used_token was given, but the layer has k={self.k}, and only k=1 can leave "
                "tokens out."
            )
        if used_token.numel() != tokens:
            raise UsageError(
                f"MoE: used_token has the shape {tuple(used_token.shape)}, and there are {tokens} "
                "tokens: it must have one number for each, 0 for those that no expert shall get."
            )
