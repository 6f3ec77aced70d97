"""The layer with experts: ``zeroshard.parallel.MoE``, which is also DeepSpeed's ``MoE``."""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.comm.dtensors import clear_part_marks, copy_part_marks
from zeroshard.comm.env import current_rank_info
from zeroshard.comm.layer_calls import announce
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UsageError
from zeroshard.experts.dispatch import TokenLink, dispatch_all, dispatch_to_places
from zeroshard.experts.gate import Routes, TopKGate, check_whole, from_tuple
from zeroshard.experts.marks import making_others, making_own, mark


class ExpertList(nn.Module):
    """The experts of this rank. Their names are their numbers in the whole layer, on every rank.

    Indices count from this rank's first expert, as those of a list.
    """

    keep_numbers = False  # they were loaded or trained under them, so they are copies no more

    def __init__(self, experts: Sequence[nn.Module], first: int) -> None:
        super().__init__()
        for at, expert in enumerate(experts):
            self.add_module(str(first + at), expert)

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        self.keep_numbers = True
        super()._load_from_state_dict(*args, **kwargs)

    def renumber(self, first: int) -> None:
        """Let the first expert be number ``first`` of the layer."""
        experts = list(self)
        self._modules.clear()
        for at, expert in enumerate(experts):
            self.add_module(str(first + at), expert)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __getitem__(self, at: int) -> nn.Module:
        return list(self)[at]


class Experts(nn.Module):
    """The experts of this rank: see :class:`ExpertList`. ``ep_size``: ranks that share those of the
    layer."""

    def __init__(self, experts: Sequence[nn.Module], first: int, ep_size: int) -> None:
        super().__init__()
        self.deepspeed_experts = ExpertList(experts, first)
        self.num_local_experts, self.ep_size = len(experts), ep_size
        for param in self.parameters():
            mark(param, ep_size)

    def run(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Each expert on its rows. Of results that are tuples the first item counts (the rest are
        biases)."""
        results = [expert(own) for expert, own in zip(self.deepspeed_experts, rows, strict=True)]
        found = [result[0] if isinstance(result, tuple) else result for result in results]
        for number, own, result in zip(self.deepspeed_experts._modules, rows, found, strict=True):
            _check_result(number, own, result)
        return found

    def forward(self, inputs_PLCM: Tensor) -> Tensor:
        """``[P, L, C, M]`` through L experts, along dimension 1."""
        return torch.cat(self.run(inputs_PLCM.split(1, dim=1)), dim=1)


def _check_result(number: str, rows: Tensor, result: object) -> None:
    """Check the result of an expert: ranks send each other results of the shape of the tokens."""
    if not isinstance(result, Tensor) or result.shape != rows.shape:
        is_tensor = isinstance(result, Tensor)
        what = f"the shape {[*result.shape]}" if is_tensor else f"a {type(result).__name__}"  # type: ignore[attr-defined]
        raise UsageError(
            f"MoE: expert {number} returned {what} for tokens of the shape {[*rows.shape]}. The result "
            "of an expert must have the shape of its input, so that it can be added to those of others."
        )


class MOELayer(nn.Module):
    """A gate and experts, without a residual branch. ``l_aux`` and ``exp_counts`` are those of the last
    call."""

    def __init__(self, gate: TopKGate, experts: Experts, ep_size: int, num_experts: int) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.ep_size, self.num_experts = ep_size, num_experts
        self.num_local_experts = experts.num_local_experts
        self._link = TokenLink()
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the experts; None before ``initialize``, or if there is one."""
        return self._link.group

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        """The experts' weighted results, of the shape of ``hidden_states``."""
        if self.ep_size > 1 and self.ep_group is None:
            raise UsageError(
                f"a MoE layer with ep_size {self.ep_size} ran before its ranks were connected. Pass "
                "the model to initialize() first: the other experts are on other ranks."
            )
        x_SM = hidden_states.reshape(-1, hidden_states.shape[-1])
        routes = self.gate(x_SM, used_token)
        if not isinstance(routes, Routes):  # of a gate that a program has derived
            routes = from_tuple(routes, drops=self.gate.drop_tokens)
        self.l_aux, self.exp_counts = routes.l_aux, routes.counts_E
        dispatch = dispatch_all if routes.capacity is None else dispatch_to_places
        done = dispatch(x_SM, routes, self.experts.run, self.ep_group)
        return done.reshape(hidden_states.shape)


class MoE(nn.Module):
    """A layer with experts, of which each token gets ``k``. The arguments are DeepSpeed's.

    ``hidden_size``: elements of a token. ``expert``: a module, of which each expert is a copy with the
    same first values; or a function that makes one, which is called for each expert of the layer in
    order, so that their values differ and do not depend on ``ep_size``. ``num_experts``: of the layer.
    ``ep_size``: ranks that share them; each has ``num_experts / ep_size``. With ``drop_tokens`` a rank
    may send ``max(ceil(tokens / num_experts * capacity_factor * k), min_capacity)`` tokens to an
    expert, in eval mode with ``eval_capacity_factor``; further ones are dropped: the first tokens keep
    their places for ``k=2``, the most probable ones for more; for ``k=1`` it is random with
    ``use_rts``. Without ``drop_tokens`` none is dropped, and results do not depend on ``ep_size``.
    ``use_residual``: adds a dense expert (arXiv 2201.05596). ``noisy_gate_policy``: None, ``"Jitter"``
    or ``"RSample"``. ``top2_2nd_expert_sampling``: draw the second expert for ``k=2``. ``use_tutel``
    has no effect. ``enable_expert_tensor_parallelism``: says that a plan cuts the layers of the experts
    over tensor ranks; if none does, they hold whole experts, and a warning says so. ``mesh``: the mesh of
    the run, if it has tensor ranks and ``expert`` is a function.

    Raises:
        UsageError: numbers do not divide, or there are too few ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module | Callable[[], nn.Module],
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__()
        del use_tutel
        check_sizes(num_experts, ep_size)
        check_whole("hidden_size", hidden_size, at_least=1)
        _check_flags(
            drop_tokens=drop_tokens, use_rts=use_rts, use_residual=use_residual,
            enable_expert_tensor_parallelism=enable_expert_tensor_parallelism,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )  # fmt: skip
        self.hidden_size, self.num_experts, self.ep_size = hidden_size, num_experts, ep_size
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.makes_experts = not isinstance(expert, nn.Module)
        mesh = _mesh_of_run(ep_size, mesh)
        place = mesh.expert_place(current_rank_info().rank, ep_size) if ep_size > 1 else 0
        first = place * self.num_local_experts
        with making_own(mesh, ep_size) if ep_size > 1 else contextlib.nullcontext():
            own = _own_experts(expert, num_experts, first, self.num_local_experts)
            if isinstance(expert, nn.Module):
                _mark_copies(expert, own, are_parts=enable_expert_tensor_parallelism)
            experts = Experts(own, first, ep_size)
        gate = TopKGate(
            hidden_size, num_experts, k, capacity_factor, eval_capacity_factor, min_capacity,
            noisy_gate_policy, drop_tokens, use_rts, None, top2_2nd_expert_sampling,
        )  # fmt: skip
        self.deepspeed_moe = MOELayer(gate, experts, ep_size, num_experts)
        if use_residual:
            self.mlp = expert if isinstance(expert, nn.Module) else expert()
            self.coefficient = nn.Linear(hidden_size, 2)

    @property
    def l_aux(self) -> Tensor | None:
        """The load-balancing loss of the last call, 0-dim; it has a gradient. None before."""
        return self.deepspeed_moe.l_aux

    @property
    def exp_counts(self) -> Tensor | None:
        """How many of this rank's tokens chose each expert in the last call, ``[E]``. None before."""
        return self.deepspeed_moe.exp_counts

    @property
    def settings(self) -> str:
        """The arguments that all ranks must share, in words; flags only if they are not the default."""
        gate = self.deepspeed_moe.gate
        places = f"{gate.capacity_factor}, {gate.eval_capacity_factor}, {gate.min_capacity}"
        rare = {
            f"noisy_gate_policy {gate.noisy_gate_policy}": gate.noisy_gate_policy
            not in (None, "None"),
            "use_residual": self.use_residual,
            "no use_rts": not gate.use_rts,
            "no top2_2nd_expert_sampling": not gate.top2_2nd_expert_sampling,
        }
        return ", ".join(
            [
                f"{self.num_experts} experts, ep_size {self.ep_size}, k {gate.k}",
                f"capacity {places}" if gate.drop_tokens else "no drop_tokens",
                f"hidden_size {self.hidden_size}",
                *(text for text, is_so in rare.items() if is_so),
            ]
        )

    @property
    def place(self) -> int:
        """Which part of the experts this rank has: a number below ``ep_size``."""
        names = self.deepspeed_moe.experts.deepspeed_experts._modules
        return int(next(iter(names))) // self.num_local_experts

    def move_to(self, place: int, *, may_rename: bool = True) -> None:
        """Let this rank have part ``place`` of the experts. Only while all experts are copies of one.

        ``may_rename``: nobody noted their names.

        Raises:
            UsageError: a function made them, or they were loaded or trained, so others belong there; or
                their names were noted.
        """
        experts = self.deepspeed_moe.experts.deepspeed_experts
        if place == self.place:
            return
        if self.makes_experts or experts.keep_numbers or not may_rename:
            raise UsageError(
                f"a MoE layer with ep_size {self.ep_size} made, loaded or trained part {self.place} of "
                f"its experts on this rank, but the mesh has part {place} here, since it has tensor "
                "ranks or another order. Pass mesh= to MoE."
            )
        experts.renumber(place * self.num_local_experts)

    @property
    def link(self) -> TokenLink:
        """What connects the ranks that share the experts."""
        return self.deepspeed_moe._link

    def connect(self, group: dist.ProcessGroup | None) -> None:
        """Send tokens in ``group`` from now on: the ranks that share the experts, in order."""
        self.link.group = group
        self.deepspeed_moe.experts.deepspeed_experts.keep_numbers = True
        if group is not None:
            announce(group)

    def disconnect(self) -> None:
        """Send no tokens any more, and forget the last call: its loss holds the graph of the model."""
        self.link.group = None
        self.deepspeed_moe.l_aux = self.deepspeed_moe.exp_counts = None

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``[..., hidden_size]`` -> the same shape, ``l_aux`` and ``exp_counts``.

        ``used_token``: one number per token, 0 for tokens that no expert shall get, for ``k=1``.
        """
        if hidden_states.shape[-1:] != (self.hidden_size,):
            raise UsageError(
                f"MoE: the input has the shape {[*hidden_states.shape]}, but hidden_size is "
                f"{self.hidden_size}, which must be the last number: the elements of a token."
            )
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            share = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + dense * share[..., 1:]
        assert self.l_aux is not None
        assert self.exp_counts is not None
        return output, self.l_aux, self.exp_counts


def check_sizes(num_experts: int, ep_size: int) -> None:
    """Check that ``ep_size`` ranks can share ``num_experts``."""
    for name, value in (("num_experts", num_experts), ("ep_size", ep_size)):
        check_whole(name, value, at_least=1)
    if num_experts % ep_size:
        fits = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        raise UsageError(
            f"MoE: num_experts is {num_experts}, which ep_size {ep_size} ranks cannot share: each has "
            f"equally many experts. Use an ep_size of {', '.join(map(str, fits))}, or other "
            "num_experts."
        )


def _check_flags(**flags: object) -> None:
    """Check arguments that are true or false. A text such as ``"false"`` would count as true."""
    for name, value in flags.items():
        if value not in (None, False, True):
            raise UsageError(f"MoE: {name} is {value!r}, but must be True or False.")


def _mesh_of_run(ep_size: int, mesh: Mesh | None) -> Mesh:
    """The mesh, as far as it is known before ``initialize``."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise UsageError(
            f"MoE: mesh is a {type(mesh).__name__}, but must be a zeroshard.core.mesh.Mesh."
        )
    if ep_size == 1:
        return mesh or Mesh()
    world_size = current_rank_info().world_size
    mesh = mesh or Mesh(data_shard=world_size)
    if mesh.world_size != world_size:
        raise UsageError(
            f"MoE: mesh is {mesh.text}, which is {mesh.world_size} ranks, but there are {world_size}."
        )
    mesh.check_experts(ep_size)
    return mesh


def _mark_copies(expert: nn.Module, copies: Sequence[nn.Module], *, are_parts: bool) -> None:
    """Let copies be parts of tensors where ``expert`` is, as Megatron marks them.

    It marks the layers of experts also where they are whole, so without ``are_parts`` nothing is a part.
    """
    for param in () if are_parts else expert.parameters():
        clear_part_marks(param)
    for made in copies:
        for source, target in zip(expert.parameters(), made.parameters(), strict=True):
            copy_part_marks(source, target)


def _own_experts(
    expert: nn.Module | Callable[[], nn.Module], num_experts: int, first: int, count: int
) -> list[nn.Module]:
    if isinstance(expert, nn.Module):
        return [copy.deepcopy(expert) for _ in range(count)]
    _check_maker(expert)
    own, first_of = [], _FirstUser()
    for number in range(num_experts):
        is_own = first <= number < first + count
        # Also the experts of other ranks: so the random numbers are the same.
        with contextlib.nullcontext() if is_own or count == num_experts else making_others():
            made = expert()
        if not isinstance(made, nn.Module):
            raise UsageError(
                f"MoE: expert() returned a {type(made).__name__}. It must make a new module on each call."
            )
        if count < num_experts:
            first_of.check(number, made)
        if is_own:
            own.append(made)
        del made  # before the next one is made
    if len({id(one) for one in own}) < len(own):
        raise UsageError(
            "MoE: expert() returned the same module twice. It must make a new one on each call; to "
            "copy one module, pass the module itself."
        )
    return own


def _check_maker(expert: object) -> None:
    try:
        signature = inspect.signature(expert) if callable(expert) else None
        if signature is not None:
            signature.bind()
            return
    except ValueError:  # of what is written in C the arguments are unknown
        return
    except TypeError:
        pass
    raise UsageError(
        f"MoE: expert is {expert!r}. It must be a module, of which each expert is a copy, or a function "
        "without arguments that makes one, such as lambda: nn.Linear(8, 8)."
    )


class _FirstUser:
    """Which expert has a parameter first. Keeps no parameter in memory."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, weakref.ref[nn.Parameter]]] = {}

    def check(self, number: int, expert: nn.Module) -> None:
        """Check that no expert before has a parameter of ``expert``, which would differ on each rank."""
        for name, param in expert.named_parameters():
            first, alive = self._found.get(id(param), (number, None))
            if alive is not None and alive() is param:
                raise UsageError(
                    f"MoE: the experts {first} and {number} that expert() made have the same parameter "
                    f"{name!r}. Ranks that share experts would each train their own copy of it. Let "
                    "expert() make new parameters, put what is common before the layer, or use "
                    "ep_size=1."
                )
            self._found[id(param)] = number, weakref.ref(param)


def layers_of(model: nn.Module) -> dict[str, MoE]:
    """The layers with experts in ``model``, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, MoE)}
