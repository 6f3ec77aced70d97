"""A model cut by a plan computes what one process computes: forward, loss and every gradient in fp64."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.tensor_models import BLOCKS, PLANS, VOCABULARY, loss_of, tiny_gpt, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint
from zeroshard_testing import on_ranks

from zeroshard.errors import RankMismatch, UsageError
from zeroshard.parallel.tensor_plan import apply_plan, tensor_parallel
from zeroshard.parallel.tensor_sums import vocab_parallel_cross_entropy

EXACT = 1e-12


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(cut: nn.Module, plain: nn.Module) -> None:
    own = dict(cut.named_parameters())
    expected = dict(plain.named_parameters())
    assert own.keys() == expected.keys()
    for name, param in expected.items():
        if param.requires_grad:
            error = (whole(own[name].grad) - param.grad).abs().max() / param.grad.abs().max()
            assert error <= EXACT, f"{name}: {error}"
        else:
            assert own[name].grad is None, name


def check_step(cut: nn.Module, plain: nn.Module, seed: int = 1) -> None:
    ids, labels = tokens(seed)
    losses = []
    for model in (plain, cut):
        logits = model(ids)
        losses.append((logits, loss_of(logits, labels)))
        losses[-1][1].backward()
    (expected, loss), (found, own) = losses
    assert torch.allclose(found, expected, rtol=0, atol=EXACT)
    assert abs(own.item() - loss.item()) <= EXACT
    check_gradients(cut, plain)


@pytest.mark.parametrize(
    ("plan", "tied"),
    [
        ("blocks", False),
        *((plan, tied) for plan in ("vocabulary", "sequence") for tied in (False, True)),
    ],
)
@on_ranks(2)
def test_forward_loss_and_gradients_are_those_of_one_process(plan, tied):
    cut = tensor_parallel(tiny_gpt(tied=tied), mesh(), PLANS[plan])
    assert (cut.head.weight is cut.embed.weight) is tied
    check_step(cut, tiny_gpt(tied=tied))


@pytest.mark.parametrize("plan", ["vocabulary", "sequence"])
@on_ranks(4)
def test_four_ranks_and_a_vocabulary_that_does_not_divide(plan):
    check_step(tensor_parallel(tiny_gpt(tied=True), mesh(), PLANS[plan]), tiny_gpt(tied=True))


@pytest.mark.parametrize("index", [3, 20])
@on_ranks(2)
def test_a_padding_index_gets_no_gradient(index):
    cut = tensor_parallel(tiny_gpt(padding_idx=index), mesh(), PLANS["vocabulary"])
    plain = tiny_gpt(padding_idx=index)
    check_step(cut, plain)
    assert not whole(cut.embed.weight.grad)[index].any()
    assert cut.embed.padding_idx == index


@on_ranks(2)
def test_the_gradient_of_an_embedding_is_that_of_the_rows_of_the_rank():
    cut = tensor_parallel(tiny_gpt(), mesh(), PLANS["vocabulary"])
    ids, labels = tokens(1)
    loss_of(cut(ids), labels).backward()
    for name, param in cut.named_parameters():
        if isinstance(param, DTensor):
            assert param.grad.to_local().shape == param.to_local().shape, name
    with pytest.raises(TypeError):
        cut.embed.forward(ids.tolist())
    assert isinstance(cut.embed.weight, DTensor)  # an error in forward leaves the layer whole


@on_ranks(2)
def test_each_rank_has_its_part_and_nothing_else():
    plain = tiny_gpt()
    model = tiny_gpt()
    made = apply_plan(model, mesh(), PLANS["vocabulary"]).plan
    rank = dist.get_rank()
    up = model.blocks[0].mlp.up.weight.to_local()
    assert torch.equal(up, plain.blocks[0].mlp.up.weight[12 * rank : 12 * (rank + 1)])
    down = model.blocks[0].mlp.down.weight.to_local()
    assert torch.equal(down, plain.blocks[0].mlp.down.weight[:, 12 * rank : 12 * (rank + 1)])
    assert model.embed.weight.to_local().shape[0] == (17, 16)[rank]
    for cut in made.cuts:
        local = model.get_parameter(cut.name).to_local()
        assert local.untyped_storage().nbytes() == local.numel() * 8, cut.name
    assert model.blocks[0].attn.n_head == 2
    assert not isinstance(model.blocks[0].norm1.weight, DTensor)


@on_ranks(2)
def test_frozen_parameters_stay_frozen_and_marks_stay():
    models = tiny_gpt(), tiny_gpt()
    for model in models:
        model.blocks[0].norm1.requires_grad_(False)
        model.blocks[1].mlp.up.weight.requires_grad_(False)
        model.embed.weight.mark = "kept"
    cut = tensor_parallel(models[0], mesh(), PLANS["sequence"])
    assert cut.embed.weight.mark == "kept"
    check_step(cut, models[1])


@on_ranks(2)
def test_optimizers_and_lists_made_before_get_the_new_parameters():
    model = tiny_gpt(tied=True)
    named = list(model.named_parameters())
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "lr": 0.5}, {"params": vectors[0]}, {"params": vectors[1:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    applied = apply_plan(model, mesh(), PLANS["vocabulary"])
    now = list(model.named_parameters())
    assert applied.renewed(named) == now
    applied.renew_optimizer(optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for _, p in now}
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(isinstance(group["params"], list) for group in applied.renewed(groups))
    trained = tiny_gpt()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    loss_of(trained(tokens(1)[0]), tokens(1)[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    applied = apply_plan(trained, mesh(), BLOCKS)
    with pytest.raises(UsageError, match=r"the optimizer \(SGD\) has state of whole parameters"):
        applied.renew_optimizer(optimizer)


@on_ranks(2)
def test_a_structure_that_is_recognised_needs_no_plan():
    cut = tiny_gpt()
    made = apply_plan(cut, mesh(), "auto").plan
    assert made.source == "structure"
    assert sum(style == "colwise" for style in made.styles.values()) == 8
    check_step(cut, tiny_gpt())


@on_ranks(4)
def test_the_tensor_dimension_of_a_larger_mesh_and_a_group_are_taken():
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check_step(tensor_parallel(tiny_gpt(), grid, BLOCKS), tiny_gpt())
    check_step(tensor_parallel(tiny_gpt(), grid["tp"].get_group(), BLOCKS), tiny_gpt())
    if dist.get_rank() < 2:
        tensor_parallel(tiny_gpt(), grid, BLOCKS)
    else:  # messages name ranks of the run
        with pytest.raises(RankMismatch, match="other values on rank 3 than on rank 2"):
            tensor_parallel(tiny_gpt(seed=dist.get_rank()), grid, BLOCKS)
        with pytest.raises(RankMismatch, match="rank 3 has another plan than rank 2"):
            tensor_parallel(
                tiny_gpt(), grid, BLOCKS if dist.get_rank() == 2 else BLOCKS | VOCABULARY
            )
    with pytest.raises(UsageError, match=r"2 dimensions \('a', 'b'\), and none is named 'tensor'"):
        tensor_parallel(
            tiny_gpt(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), BLOCKS
        )


@pytest.mark.parametrize(
    ("plan", "forward", "backward"),
    [
        ("blocks", {"allreduce_": 4}, {"allreduce_": 4}),
        (
            "sequence",
            {"reduce_scatter_tensor": 5, "all_gather_into_tensor": 6},
            {"reduce_scatter_tensor": 5, "all_gather_into_tensor": 6},
        ),
    ],
)
@on_ranks(2)
def test_each_half_of_a_block_needs_one_collective_in_forward_and_one_in_backward(
    plan, forward, backward
):
    cut = tensor_parallel(tiny_gpt(), mesh(), PLANS[plan])
    ids, labels = tokens(1)

    def counts(watch: CommDebugMode) -> dict[str, int]:
        return {op.__name__: n for op, n in watch.get_comm_counts().items()}

    with CommDebugMode() as watch:
        loss = loss_of(cut(ids), labels)
    assert counts(watch) == forward
    with CommDebugMode() as watch:
        loss.backward()
    assert counts(watch) == backward


@pytest.mark.parametrize("plan", ["vocabulary", "sequence"])
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_blocks_that_are_recomputed_in_backward(plan, reentrant):
    cut = tensor_parallel(tiny_gpt(), mesh(), PLANS[plan])
    for block in cut.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    for seed in (1, 2):
        plain = tiny_gpt()
        cut.zero_grad()
        check_step(cut, plain, seed)


@on_ranks(2)
def test_no_graph_outlives_its_loss():
    ids, _ = tokens(1)
    cut = tensor_parallel(tiny_gpt(), mesh(), PLANS["vocabulary"])
    cut(ids)
    cut = tensor_parallel(tiny_gpt(), mesh(), BLOCKS)
    cut.blocks[0].mlp.up(torch.ones(1, 2, 16, dtype=torch.float64, requires_grad=True))
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) in (Tensor, DTensor) and not x.is_leaf]


@on_ranks(2)
def test_the_loss_of_cut_logits_is_the_loss_of_the_whole():
    plan = BLOCKS | {"embed": "vocab", "head": "colwise"}
    plain, tp = tiny_gpt(), mesh()
    plain.head = nn.Linear(16, 34, bias=False).double()
    torch.manual_seed(5)
    nn.init.normal_(plain.head.weight)
    cut = tiny_gpt()
    cut.head = nn.Linear(16, 34, bias=False).double()
    cut.load_state_dict(plain.state_dict())
    tensor_parallel(cut, tp, plan)
    ids, labels = tokens(2)
    loss = loss_of(plain(ids), labels)
    own = vocab_parallel_cross_entropy(cut(ids), labels, tp, vocab_size=34)
    assert abs(loss.item() - own.item()) <= EXACT
    loss.backward()
    own.backward()
    check_gradients(cut, plain)


# ---------------------------------------------------------------------- the meta device


def meta_gpt() -> nn.Module:
    with torch.device("meta"):
        return tiny_gpt(tied=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_on_the_meta_device_starts_as_in_one_process(ranks):
    from zeroshard_testing.ranks import run_ranks

    run_ranks(_starts_as_one_process, ranks)


def _starts_as_one_process() -> None:
    from zeroshard.parallel.initial_values import draw_values

    one = meta_gpt()
    before = torch.get_rng_state()
    draw_values(one, 7, "cpu")
    cut = tensor_parallel(meta_gpt(), mesh(), PLANS["sequence"], seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert cut.head.weight is cut.embed.weight
    for (name, param), (_, expected) in zip(
        cut.named_parameters(), one.named_parameters(), strict=True
    ):
        assert torch.equal(whole(param), expected), name
    assert one.blocks[0].mlp.up.weight.std() > 0.01
    assert not torch.equal(one.blocks[0].mlp.up.weight, one.blocks[1].mlp.up.weight)
    check_step(cut, one)


@on_ranks(2)
def test_the_seed_of_the_first_rank_is_used_unless_one_is_given():
    torch.manual_seed(dist.get_rank())
    cut = tensor_parallel(meta_gpt(), mesh(), PLANS["vocabulary"])
    torch.manual_seed(0)
    expected = tensor_parallel(meta_gpt(), mesh(), PLANS["vocabulary"], seed=0)
    assert torch.equal(cut.embed.weight.to_local(), expected.embed.weight.to_local())
    with pytest.raises(RankMismatch, match=r"given the seeds \[0, 1\]"):
        tensor_parallel(meta_gpt(), mesh(), PLANS["vocabulary"], seed=dist.get_rank())


# ---------------------------------------------------------------------- ranks that differ


@on_ranks(2)
def test_other_values_plans_or_generators_on_a_rank_are_errors_on_all():
    tp, rank = mesh(), dist.get_rank()
    with pytest.raises(
        RankMismatch, match=r"'embed.weight' has other values on rank 1 than on rank 0"
    ):
        tensor_parallel(tiny_gpt(seed=rank), tp, BLOCKS)
    model = tiny_gpt()
    with torch.no_grad():
        model.blocks[1].mlp.down.bias[3] += 1e-15 * rank
    with pytest.raises(RankMismatch, match=r"'blocks.1.mlp.down.bias' has other values on rank 1"):
        tensor_parallel(model, tp, BLOCKS)
    with pytest.raises(RankMismatch, match="First difference: style of embed = vocab"):
        tensor_parallel(tiny_gpt(), tp, BLOCKS if rank else BLOCKS | VOCABULARY)
    with pytest.raises(RankMismatch, match=r"parameter blocks.1.norm1.weight"):
        tensor_parallel(tiny_gpt(depth=2 - rank), tp, BLOCKS)
    expected = (UsageError, "matches no module") if rank else (RankMismatch, "matches no module")
    with pytest.raises(expected[0], match=expected[1]):
        tensor_parallel(tiny_gpt(), tp, BLOCKS | ({"nothing": "colwise"} if rank else {}))
    for name, value in (("drop", nn.Dropout(0.1)), ("attention_dropout", 0.1)):
        model = tiny_gpt()
        setattr(model.blocks[0], name, value)
        torch.manual_seed(rank)
        with pytest.raises(RankMismatch, match="the model has dropout"):
            tensor_parallel(model, tp, BLOCKS)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@on_ranks(2)
def test_wrong_inputs_of_cut_layers_are_errors():
    cut = tensor_parallel(tiny_gpt(), mesh(), BLOCKS)
    with pytest.raises(UsageError, match=r"'blocks.0.mlp.down'.*got 24 features.*12 columns from"):
        cut.blocks[0].mlp.down(torch.zeros(1, 8, 24, dtype=torch.float64))
    with pytest.raises(UsageError, match="without a tensor as its first positional argument"):
        cut.blocks[0].mlp.up(input=torch.zeros(1, 8, 16, dtype=torch.float64))
    cut = tensor_parallel(tiny_gpt(), mesh(), PLANS["sequence"])
    with pytest.raises(UsageError, match="a sequence of length 7, which 2 tensor ranks cannot cut"):
        cut(torch.zeros(2, 7, dtype=torch.long))
    with pytest.raises(UsageError, match=r"'embed'.*got the index 33"):
        cut(torch.full((2, 8), 33))
    with pytest.raises(UsageError, match=r"'norm'.*got 2 dimension"):
        cut.norm(torch.zeros(4, 16, dtype=torch.float64))
    with pytest.raises(UsageError, match=r"'blocks.0.mlp.up'.*got a plain tensor"):
        cut.blocks[0].mlp.up(torch.zeros(1, 8, 16, dtype=torch.float64))


@on_ranks(1)
def test_one_tensor_rank_changes_nothing():
    model = tiny_gpt()
    params = list(model.parameters())
    made = apply_plan(model, mesh(), PLANS["sequence"]).plan
    assert made.size == 1
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert model.blocks[0].attn.n_head == 4
    with pytest.raises(UsageError, match="matches no module"):
        tensor_parallel(model, mesh(), {"nothing": "colwise"})
