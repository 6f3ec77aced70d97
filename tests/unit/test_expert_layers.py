"""The gate, the dispatchers and the layer with experts, in one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from zeroshard.core.mesh import Mesh
from zeroshard.deepspeed.experts import load_moe_state_dict
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.experts import gate
from zeroshard.experts.gate import Routes, Selection, TopKGate
from zeroshard.parallel import MoE
from zeroshard.zero.clip import Exchanged, global_norm

NO_CHANCE = {"random_tokens": False, "samples_second": False}


def logits(tokens: int = 20, experts: int = 4) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(tokens, experts, generator=draw, dtype=torch.float64)


def routes_of(k: int, x_SE: Tensor, how: Selection) -> Routes:
    if k == 1:
        return gate.choose_one(x_SE, how)
    return gate.choose_two(x_SE, how) if k == 2 else gate.choose_several(x_SE, k, how)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("factor", [None, 0.5, 2.0])
def test_weights_are_probabilities_and_places_are_taken_once(k, factor):
    x_SE = logits()
    found = routes_of(k, x_SE, Selection(factor, min_capacity=1, **NO_CHANCE))
    best_SK = x_SE.topk(k, dim=1).indices
    kept_SK = found.expert_SK >= 0
    assert torch.equal(found.expert_SK[kept_SK], best_SK[kept_SK])
    weight_SK = x_SE.softmax(1).gather(1, best_SK) * kept_SK
    if k > 1:
        weight_SK = weight_SK / weight_SK.sum(1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(found.weight_SK, weight_SK)
    assert found.counts_E.tolist() == torch.bincount(best_SK.flatten(), minlength=4).tolist()
    taken = list(
        zip(found.expert_SK[kept_SK].tolist(), found.place_SK[kept_SK].tolist(), strict=True)
    )
    assert len(set(taken)) == len(taken)
    if factor is None:
        assert bool(kept_SK.all())
    else:
        most = max(1, -(-int(20 * k * factor) // 4))
        assert found.capacity == most
        assert max(place for _, place in taken) < most
        kept_E = torch.bincount(found.expert_SK[kept_SK], minlength=4)
        assert kept_E.tolist() == found.counts_E.clamp(max=most).tolist()


def test_places_go_to_first_choices_first():
    # Expert 0 is the first choice of tokens 2 and 3, and the second one of 0 and 1.
    x_SE = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    found = gate.choose_two(x_SE, Selection(1.0, min_capacity=3, **NO_CHANCE))
    assert found.capacity == 3
    assert found.expert_SK.tolist() == [[1, 0], [1, -1], [0, 1], [0, -1]]
    assert found.place_SK.tolist() == [[0, 2], [1, 0], [0, 2], [1, 0]]


def test_of_three_choices_the_most_probable_tokens_are_kept():
    x_SE = logits(12)
    found = gate.choose_several(x_SE, 3, Selection(0.5, min_capacity=1, **NO_CHANCE))
    gates_SE = x_SE.softmax(1)
    chosen_SE = torch.zeros_like(gates_SE).scatter(1, gates_SE.topk(3).indices, 1) * gates_SE
    for expert in range(4):
        expected = set(chosen_SE[:, expert].topk(found.capacity).indices.tolist())
        assert set((found.expert_SK == expert).any(1).nonzero().flatten().tolist()) == expected


def test_random_token_selection_drops_other_tokens_each_time():
    x_SE = torch.zeros(16, 4) + torch.tensor([1.0, 0.0, 0.0, 0.0])
    torch.manual_seed(0)
    kept = {
        tuple((gate.choose_one(x_SE, Selection(1.0)).expert_SK[:, 0] >= 0).tolist())
        for _ in range(5)
    }
    assert len(kept) == 5
    assert {sum(one) for one in kept} == {4}


def test_padding_goes_nowhere_and_is_not_counted():
    layer = moe(k=1, drop_tokens=False)
    x_BTM = torch.randn(2, 5, 8)
    used_S = torch.tensor([1, 1, 1, 0, 0] * 2)
    out, _, counts_E = layer(x_BTM, used_S)
    assert int(counts_E.sum()) == 6
    assert bool((out.view(10, 8)[used_S == 0] == 0).all())


def moe(experts: int = 4, k: int = 2, **options) -> MoE:
    torch.manual_seed(5)

    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    chance = {"use_rts": False, "top2_2nd_expert_sampling": False}
    return MoE(8, expert, experts, k=k, **{**chance, **options})


def naive(layer: MoE, x_SM: Tensor, routes: Routes) -> Tensor:
    """Each token alone through its experts."""
    out = torch.zeros_like(x_SM)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    for token, choice in itertools.product(range(len(x_SM)), range(routes.expert_SK.shape[1])):
        number = int(routes.expert_SK[token, choice])
        if number >= 0:
            out[token] += experts[number](x_SM[token]) * routes.weight_SK[token, choice]
    return out


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drops", [False, True])
def test_both_dispatchers_equal_tokens_one_by_one(k, drops):
    layer = moe(k=k, drop_tokens=drops, capacity_factor=0.7, min_capacity=1).double()
    x_SM = torch.randn(14, 8, dtype=torch.float64)
    out, aux, _ = layer(x_SM)
    expected = naive(layer, x_SM, layer.deepspeed_moe.gate(x_SM))
    torch.testing.assert_close(out, expected)
    (out.sum() + aux).backward()
    assert all(param.grad is not None for param in layer.parameters())


class Balanced(TopKGate):
    """Reads and returns DeepSpeed's tuple, with another loss, as derived gates of programs do."""

    def forward(self, x_SM, used_token=None, use_tutel=False):
        found = super().forward(x_SM, used_token, use_tutel)
        return (found[0] * 3, *found[1:])


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drops", [False, True])
def test_a_derived_gate_may_return_deepspeeds_tuple(k, drops):
    layer = moe(k=k, drop_tokens=drops, capacity_factor=0.7, min_capacity=1).double()
    x_SM = torch.randn(14, 8, dtype=torch.float64)
    out, aux, counts = layer(x_SM)
    grads = torch.autograd.grad(out.square().sum() + 3 * aux, [*layer.parameters()])
    inner = layer.deepspeed_moe
    l_aux, combine, dispatch, counts_E = inner.gate(x_SM)[:]
    rows = torch.einsum("sec,sm->ecm", dispatch.double(), x_SM)
    done = torch.stack([e(r) for e, r in zip(inner.experts.deepspeed_experts, rows, strict=True)])
    torch.testing.assert_close(torch.einsum("sec,ecm->sm", combine, done), out)
    assert torch.equal(l_aux, aux)
    assert torch.equal(counts_E, counts)
    inner.gate.__class__ = Balanced
    again, aux, _ = layer(x_SM)
    torch.testing.assert_close(again, out)
    other = torch.autograd.grad(again.square().sum() + aux, [*layer.parameters()])
    for mine, plain in zip(other, grads, strict=True):
        torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize("returned", [None, (1, 2), (0, torch.ones(2, 2), torch.ones(2, 2), 0)])
def test_what_no_gate_returns_is_refused(returned):
    layer = moe()
    layer.deepspeed_moe.gate.forward = lambda *_: returned
    with pytest.raises(UsageError, match=r"MoE: the gate returned a .*DeepSpeed's tuple"):
        layer(torch.randn(3, 8))


def test_in_eval_mode_another_capacity_holds():
    layer = moe(k=1, capacity_factor=0.1, eval_capacity_factor=4.0, min_capacity=1)
    x_SM = torch.randn(16, 8)
    assert int((layer(x_SM)[0] == 0).all(1).sum()) > 0
    assert int((layer.eval()(x_SM)[0] == 0).all(1).sum()) == 0


def test_the_residual_expert_is_mixed_in():
    layer = moe(use_residual=True, drop_tokens=False)
    x_SM = torch.randn(6, 8)
    share = layer.coefficient(x_SM).softmax(-1)
    expected = layer.deepspeed_moe(x_SM) * share[:, :1] + layer.mlp(x_SM) * share[:, 1:]
    torch.testing.assert_close(layer(x_SM)[0], expected)


def test_experts_from_a_module_are_copies_of_it():
    one = nn.Linear(8, 8)
    layer = MoE(8, one, 3)
    weights = [each.weight for each in layer.deepspeed_moe.experts.deepspeed_experts]
    assert len({id(weight) for weight in weights}) == 3
    assert all(torch.equal(weight, one.weight) for weight in weights)
    assert [name for name, _ in layer.named_parameters()][1] == (
        "deepspeed_moe.experts.deepspeed_experts.0.weight"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_experts": 3, "ep_size": 2}, "num_experts is 3, which ep_size 2 ranks cannot share"),
        ({"num_experts": 4, "ep_size": 2}, "ep_size 2: the mesh is data_shard 1"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 4, "ep_size": True}, "ep_size is True"),
        ({"num_experts": 4, "k": 5}, "k is 5, and the layer has num_experts 4"),
        ({"num_experts": 4, "k": 0}, "k is 0, but must be a whole number of at least 1"),
        ({"num_experts": 4, "k": 1.5}, "k is 1.5"),
        ({"num_experts": 4, "k": "2"}, "k is '2'"),
        ({"num_experts": 4, "k": True}, "k is True"),
        ({"capacity_factor": -1}, "capacity_factor is -1, but must be a number above 0"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan"),
        ({"capacity_factor": float("inf")}, "capacity_factor is inf.*drop_tokens=False"),
        ({"capacity_factor": "1"}, "capacity_factor is '1'"),
        ({"eval_capacity_factor": None}, "eval_capacity_factor is None"),
        ({"min_capacity": -1}, "min_capacity is -1"),
        ({"min_capacity": 1.5}, "min_capacity is 1.5"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"drop_tokens": "false"}, "drop_tokens is 'false', but must be True or False"),
        ({"use_rts": "no"}, "use_rts is 'no'"),
        ({"use_residual": 2}, "use_residual is 2"),
        ({"enable_expert_tensor_parallelism": "no"}, "enable_expert_tensor_parallelism is 'no'"),
        ({"mesh": "x"}, "mesh is a str"),
        ({"expert": None}, "expert is None. It must be a module"),
        ({"expert": nn.Linear}, "expert is <class .*a function without arguments"),
        ({"expert": lambda n: nn.Linear(n, n)}, "a function without arguments"),
        ({"num_experts": 4, "noisy_gate_policy": "Loud"}, "noisy_gate_policy is 'Loud'"),
        ({"num_experts": 2, "expert": lambda: None}, r"expert\(\) returned a NoneType"),
        ({"num_experts": 2, "mesh": Mesh(tensor=2)}, ""),
    ],
)
def test_a_wrong_argument_is_named(arguments, says):
    given = {"hidden_size": 8, "expert": nn.Linear(8, 8), **arguments}
    if not says:
        MoE(**given)  # with ep_size 1 nothing depends on the mesh
        return
    with pytest.raises(UsageError, match=says):
        MoE(**given)


@pytest.mark.parametrize(
    ("expert", "shape", "used", "says"),
    [
        (lambda: nn.Linear(8, 12), (6, 8), None, r"expert 0 returned the shape \[1, 1, 4, 12\]"),
        (lambda: nn.Flatten(0), (6, 8), None, "expert 0 returned the shape"),
        (
            lambda: nn.LSTM(8, 8),
            (6, 9),
            None,
            r"the input has the shape \[6, 9\], but hidden_size is 8",
        ),
        (
            lambda: nn.Linear(8, 8),
            (6, 8),
            1,
            r"used_token has the shape \(1,\), and there are 6 tokens",
        ),
        (lambda: nn.Linear(8, 8), (6, 8), 7, r"used_token has the shape \(7,\)"),
    ],
)
def test_what_a_layer_cannot_compute_is_an_error(expert, shape, used, says):
    layer = MoE(8, expert, 2)
    with pytest.raises(UsageError, match=says):
        layer(torch.randn(shape), None if used is None else torch.ones(used))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drops", [False, True])
def test_a_rank_without_tokens_computes_nothing_and_its_losses_are_0(k, drops):
    layer = moe(k=k, drop_tokens=drops)
    out, aux, counts_E = layer(torch.zeros(2, 0, 8, requires_grad=True))
    assert out.shape == (2, 0, 8)
    assert aux.item() == 0 and counts_E.tolist() == [0] * 4
    (out.sum() + aux).backward()
    assert all(param.grad.eq(0).all() for param in layer.parameters())


def test_the_same_module_twice_is_refused():
    one = nn.Linear(8, 8)
    with pytest.raises(UsageError, match="the same module twice"):
        MoE(8, lambda: one, 2)


def test_used_token_with_several_choices_is_refused():
    with pytest.raises(UsageError, match="k=2"):
        moe(k=2)(torch.randn(3, 8), torch.ones(3))


def test_experts_are_shared_by_neighbours_or_by_ranks_far_apart():
    near, far = Mesh(data_shard=4, tensor=2), Mesh(data_shard=4, data_before_expert=True)
    assert near.expert_group(5, 2) == (5, 7)
    assert near.expert_holders(5, 2) == (1, 5)
    assert far.expert_groups(2) == [(0, 2), (1, 3)]
    assert far.expert_holder_groups(2) == [(0, 1), (2, 3)]
    with pytest.raises(UsageError, match="divides 4"):
        far.check_experts(3)


def files_of_deepspeed(net: nn.Module, folder: Path) -> None:
    """The files of experts, as DeepSpeed names them and their contents."""
    state = net.state_dict()
    for number, layer in ((n, at) for n in range(4) for at in range(2)):
        part = f"{layer}.deepspeed_moe.experts.deepspeed_experts.{number}."
        saved = {key: value for key, value in state.items() if key.startswith(part)}
        torch.save(saved, folder / f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt")


def test_the_files_of_deepspeeds_experts_are_read(tmp_path):
    saved, net = nn.Sequential(moe(), moe()), nn.Sequential(moe(), moe())
    for at, param in enumerate(saved.parameters()):
        nn.init.constant_(param, at)
    (tmp_path / "step1").mkdir()
    files_of_deepspeed(saved, tmp_path / "step1")
    state: dict[str, Tensor] = {}
    load_moe_state_dict(tmp_path, "step1", state, False, model=net)
    net.load_state_dict(state, strict=False)
    for (name, param), expected in zip(net.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(param, expected) == ("experts" in name), name
    with pytest.raises(UsageError, match="got no model"):
        load_moe_state_dict(tmp_path, "step1", state, False)
    with pytest.raises(CheckpointError, match="expert_0_mp_rank_00"):
        load_moe_state_dict(tmp_path, "step1", state, True, model=net)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        load_moe_state_dict(tmp_path, "step1", state, False, model=nn.ModuleDict({"x": moe()}))


def test_a_gradient_of_an_expert_counts_if_its_own_holders_have_one():
    buffer = SimpleNamespace(has_grad=[False, False], unit=object())

    def exchange(norms, words, device, lost_edit, loss) -> Exchanged:
        everybody, same_experts = torch.tensor([[0.0], [3.0]]), torch.tensor([[0.0], [1.0]])
        zero = torch.zeros((), dtype=torch.float64)
        return Exchanged(zero, everybody, None, zero, [(same_experts, [False, True])])

    found = global_norm([], [buffer], exchange, device=torch.device("cpu"), dtype=torch.float64)
    # Parameter 0 is dense, and rank 1 has a gradient of it; parameter 1 is that of another expert there.
    assert found.untouched == {id(buffer.unit): frozenset({1})}
