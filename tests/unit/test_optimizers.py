"""Optimizers by name, user-defined classes, and the probe that decides how parameters may be cut."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from zeroshard.errors import ConfigError, UnsupportedError, UsageError
from zeroshard.optim.factory import build_optimizer
from zeroshard.optim.inner_optimizer import rebind
from zeroshard.optim.optimizers import FlexibleAdam, Lamb, Lion, Muon
from zeroshard.optim.probe import needs_whole_parameters, probe


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def train(optimizer: Optimizer, *params: Tensor, steps: int = 4) -> list[Tensor]:
    for step in range(steps):
        for p in params:
            place = torch.arange(p.numel(), dtype=torch.float64).view_as(p)
            p.grad = torch.cos(place * (0.3 + 0.1 * step)).to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in params]


def build(type_: str, *params: Tensor, fused: bool = False, **options: object) -> Optimizer:
    return build_optimizer(type_, options, [{"params": list(params)}], fused=fused)


# names and defaults


@pytest.mark.parametrize(
    ("type_", "options", "cls", "expected"),
    [
        ("Adam", {}, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999)}),
        ("adamw", {}, torch.optim.AdamW, {"weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}),
        ("ADAM", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, {}),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {}),
        ("Adam", {"amsgrad": True}, torch.optim.AdamW, {"amsgrad": True}),
        ("Adam", {"bias_correction": False}, FlexibleAdam, {"weight_decay": 0.0}),
        ("AdamW", {"betas": [0.8, 0.9]}, torch.optim.AdamW, {"betas": (0.8, 0.9)}),
        ("AdamW", {"foreach": True, "set_grad_none": True}, torch.optim.AdamW, {"foreach": None}),
        ("adagrad", {}, torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0}),
        ("lion", {}, Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("sgd", {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
        ("RMSprop", {"alpha": 0.5}, torch.optim.RMSprop, {"alpha": 0.5}),
    ],
)
def test_a_type_gives_the_class_and_defaults_of_deepspeed(type_, options, cls, expected):
    optimizer = build(type_, leaf(3), **options)
    assert type(optimizer) is cls
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected


def test_adam_by_default_decouples_its_weight_decay():
    p = leaf(5)
    (got,) = train(build("Adam", p, weight_decay=0.1), p)
    q = leaf(5)
    (expected,) = train(torch.optim.AdamW([q], lr=1e-3, weight_decay=0.1), q)
    assert torch.equal(got, expected)


def test_options_of_a_group_win_over_the_params():
    groups = [{"params": [leaf(2)], "lr": 0.5}, {"params": [leaf(2)]}]
    optimizer = build_optimizer("AdamW", {"lr": 0.25}, groups, fused=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_the_callers_groups_are_not_written_to():
    groups = [{"params": [leaf(2)]}]
    build_optimizer("AdamW", {}, groups, fused=False)
    assert groups[0].keys() == {"params"}


@pytest.mark.parametrize(
    "options",
    [{"lr": "1e-4"}, {"eps": "1e-8"}, {"amsgrad": "false"}],
    ids=lambda each: next(iter(each)),
)
def test_text_in_the_place_of_a_number_is_named(options):
    """YAML reads 1e-8 so."""
    ((name, text),) = options.items()
    with pytest.raises(ConfigError, match=rf"optimizer\.params\.{name} is the text '{text}'"):
        build_optimizer("AdamW", options, [{"params": [leaf(2)]}], fused=False)


@pytest.mark.parametrize(
    ("type_", "options", "words"),
    [
        ("Adamm", {}, 'optimizer.type "Adamm" does not exist; did you mean "Adam"?'),
        ("rmsprop", {}, 'did you mean "RMSprop"?'),
        ("AdamW", {"learning_rate": 1}, "optimizer.params.learning_rate: AdamW has no such"),
        ("AdamW", {"weigth_decay": 1}, 'did you mean "weight_decay"?'),
        ("AdamW", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("AdamW", {"lr": -1.0}, "optimizer AdamW: Invalid learning rate"),
        ("Lion", {"eps": 1e-8}, "it takes lr, betas, weight_decay"),
    ],
)
def test_a_wrong_name_or_argument_says_what_would_be_right(type_, options, words):
    with pytest.raises(ConfigError) as caught:
        build(type_, leaf(3), **options)
    assert words in str(caught.value)


def test_moments_of_another_dtype_are_for_adam_only():
    with pytest.raises(UnsupportedError, match="Adam and AdamW only"):
        build_optimizer("SGD", {}, [{"params": [leaf(2)]}], fused=False, state_dtype=torch.float32)


# fused kernels


@pytest.mark.parametrize("type_", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_kernels_are_asked_for_where_they_exist(type_):
    assert build(type_, leaf(3), fused=True).param_groups[0]["fused"] is True


def test_an_explicit_fused_false_is_respected():
    optimizer = build_optimizer("AdamW", {"fused": False}, [{"params": [leaf(2)]}], fused=True)
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("type_", ["Lion", "RMSprop", "NAdam"])
def test_classes_without_a_fused_kernel_are_built_all_the_same(type_):
    p = leaf(3)
    train(build(type_, p, fused=True), p)


CUTTABLE = [
    ("AdamW", {"weight_decay": 0.1}),
    ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"bias_correction": False}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("Lion", {"weight_decay": 0.1}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("type_", "options"), CUTTABLE)
def test_a_parameter_cut_at_a_multiple_of_64_gives_the_same_bits(type_, options, fused, dtype):
    """Fused kernels round the last elements of a tensor differently, hence the multiple of 64."""
    start = leaf(1003, dtype=dtype).detach()
    gradients = [leaf(1003, dtype=dtype, seed=seed).detach() for seed in (1, 2, 3)]

    def run(*sizes: int) -> Tensor:
        params = [piece.clone().requires_grad_() for piece in start.split(sizes)]
        optimizer = build(type_, *params, fused=fused, **options)
        for gradient in gradients:
            for p, piece in zip(params, gradient.split(sizes)):
                p.grad = piece.clone()
            optimizer.step()
        return torch.cat([p.detach() for p in params])

    whole = run(1003)
    assert all(torch.equal(run(cut, 1003 - cut), whole) for cut in (64, 448, 960))


# classes of our own


def test_lion_follows_its_paper():
    p = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    optimizer = Lion([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    value, momentum = p.detach().clone(), torch.zeros(3, dtype=torch.float64)
    for gradient in ([0.5, -0.25, 0.0], [-4.0, 0.1, 1.0]):
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        direction = torch.sign(0.9 * momentum + 0.1 * p.grad)
        value = value - 0.1 * (direction + 0.5 * value)
        momentum = 0.99 * momentum + 0.01 * p.grad
    torch.testing.assert_close(p.detach(), value, rtol=1e-14, atol=0)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], momentum, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("cls", [Lion, FlexibleAdam])
def test_a_learning_rate_may_be_a_tensor(cls):
    p, q = leaf(7), leaf(7)
    (got,) = train(cls([p], lr=torch.tensor(0.01), weight_decay=0.1), p)
    (expected,) = train(cls([q], lr=0.01, weight_decay=0.1), q)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("cls", [Lion, FlexibleAdam, Lamb])
def test_strides_closures_and_groups_without_gradients_change_no_number(cls):
    value, grad = leaf(4, 6).detach(), leaf(4, 6).detach()
    found = []
    for strided, strided_grad in ((False, False), (True, True), (False, True)):
        p = (value.t().clone().t() if strided else value.clone()).requires_grad_()
        optimizer = cls([{"params": [leaf(3)]}, {"params": [p]}], lr=0.1, weight_decay=0.1)

        def closure(p=p, optimizer=optimizer, strided=strided_grad):
            optimizer.zero_grad()
            p.grad = grad.t().clone().t() if strided else grad.clone()
            assert torch.is_grad_enabled()
            return 3.0

        assert [optimizer.step(closure) for _ in range(3)] == [3.0] * 3
        found.append(p.detach())
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flexible_adam_with_ordinary_options_is_adam(decoupled, dtype):
    p, q = leaf(6, 5, dtype=dtype), leaf(6, 5, dtype=dtype)
    (got,) = train(FlexibleAdam([p], weight_decay=0.1, decoupled=decoupled), p)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    (expected,) = train(cls([q], lr=1e-3, weight_decay=0.1), q)
    torch.testing.assert_close(
        got, expected, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=0
    )


def test_without_bias_correction_the_first_moments_are_used_as_they_are():
    p = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    p.grad = torch.tensor([2.0], dtype=torch.float64)
    build("AdamW", p, lr=0.1, bias_correction=False).step()
    expected = 1.0 - 0.1 * (0.1 * 2.0) / ((0.001 * 4.0) ** 0.5 + 1e-8)
    assert p.item() == pytest.approx(expected, rel=1e-12)


def test_fp32_moments_beside_a_16_bit_master_follow_fp32_adam():
    p, q = leaf(40, dtype=torch.bfloat16), leaf(40, dtype=torch.bfloat16)
    groups = [{"params": [p]}]
    optimizer = build_optimizer("AdamW", {}, groups, fused=False, state_dtype=torch.float32)
    train(optimizer, p, steps=1)
    wide = q.detach().float().requires_grad_()
    (expected,) = train(torch.optim.AdamW([wide], lr=1e-3, weight_decay=0.0), wide, steps=1)
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(p.detach(), expected.bfloat16(), rtol=8e-3, atol=1e-3)


def test_fp32_optimizer_states_false_keeps_moments_in_the_masters_dtype():
    p = leaf(4, dtype=torch.bfloat16)
    optimizer = build_optimizer(
        "AdamW",
        {"fp32_optimizer_states": False},
        [{"params": [p]}],
        fused=False,
        state_dtype=torch.float32,
    )
    train(optimizer, p, steps=1)
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16


def named_model() -> list[tuple[str, Tensor]]:
    return [
        ("embed.weight", leaf(8, 4)),
        ("block.0.weight", leaf(6, 4)),
        ("block.0.bias", leaf(6)),
        ("lm_head.weight", leaf(8, 4)),
    ]


@pytest.mark.parametrize(
    ("options", "corrects", "inside"),
    [
        ({"weight_decay": 0.1}, True, False),
        ({"bias_correction": False, "eps_inside_sqrt": True, "eps": 1e-3}, False, True),
        ({"max_coeff": 0.3, "min_coeff": 0.2}, True, False),
    ],
)
def test_lamb_gives_the_numbers_of_its_formula(options, corrects, inside):
    p = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    optimizer = build_optimizer("lamb", {"lr": 0.1, **options}, [{"params": [p]}], fused=True)
    w, m, v = p.detach().numpy().copy(), 0.0, 0.0
    eps, decay = options.get("eps", 1e-8), options.get("weight_decay", 0.0)
    for step in range(1, 4):
        p.grad = torch.cos(torch.arange(12, dtype=torch.float64) * step).view(3, 4)
        g = p.grad.numpy()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        update = m / (np.sqrt(v + eps) if inside else np.sqrt(v) + eps) + decay * w
        ratio = np.sqrt((w * w).sum()) / np.sqrt((update * update).sum())
        ratio = min(max(ratio, options.get("min_coeff", 0.01)), options.get("max_coeff", 10.0))
        size = 0.1 * (math.sqrt(1 - 0.999**step) / (1 - 0.9**step) if corrects else 1.0)
        w = w - size * ratio * update
        optimizer.step()
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-12)


def test_lamb_moves_a_parameter_of_zeros():
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.ones(3)
    Lamb([p], lr=0.5, bias_correction=False).step()
    assert torch.isfinite(p).all() and (p < 0).all()


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw():
    model = named_model()
    optimizer = build_optimizer(
        "muon", {"muon_lr": 0.02, "lr": 0.01}, [{"params": model}], fused=False
    )
    matrices, others = optimizer.param_groups
    assert [p.shape for p in matrices["params"]] == [(6, 4)]
    assert [p.shape for p in others["params"]] == [(8, 4), (6,), (8, 4)]
    assert (matrices["lr"], others["lr"]) == (0.02, 0.01)


def test_muon_gives_the_numbers_of_torchs_muon_and_adamw():
    model, twin = dict(named_model()), dict(named_model())
    optimizer = Muon(model.items(), lr=0.02, weight_decay=0.1)
    train(optimizer, *model.values())
    matrix = twin.pop("block.0.weight")
    train(torch.optim.Muon([matrix], lr=0.02, weight_decay=0.1), matrix)
    train(torch.optim.AdamW(twin.values(), lr=0.02, weight_decay=0.1), *twin.values())
    assert all(
        torch.equal(model[name], p) for name, p in {**twin, "block.0.weight": matrix}.items()
    )


def test_muon_without_names_asks_for_them():
    with pytest.raises(UsageError, match="Muon needs names"):
        build("Muon", leaf(4, 4))


def test_muon_takes_groups_that_say_what_they_are():
    groups = [{"params": [leaf(4, 4)], "use_muon": True}, {"params": [leaf(4)], "use_muon": False}]
    optimizer = build_optimizer("Muon", {}, groups, fused=True)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]


def test_muon_refuses_a_piece_of_a_matrix():
    optimizer = Muon([{"params": [leaf(16)], "use_muon": True}])
    with pytest.raises(UsageError, match="orthogonalizes whole matrices"):
        train(optimizer, optimizer.param_groups[0]["params"][0])


def test_muon_continues_from_a_saved_state():
    model, resumed = dict(named_model()), dict(named_model())
    first = Muon(model.items(), lr=0.02)
    train(first, *model.values(), steps=2)
    second = Muon(resumed.items(), lr=0.02)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        for name, p in resumed.items():
            p.copy_(model[name])
    train(first, *model.values(), steps=2)
    train(second, *resumed.values(), steps=2)
    assert all(torch.equal(model[name], p) for name, p in resumed.items())


@pytest.mark.parametrize("type_", ["AdamW", "SGD", "Lion", "Muon"])
def test_a_step_runs_on_fake_tensors(type_):
    with FakeTensorMode():
        p = torch.zeros(4, 4, requires_grad=True)
        groups = [{"params": [("a.weight", p)]}]
        train(build_optimizer(type_, {}, groups, fused=True), p, steps=2)


# the probe


@pytest.mark.parametrize(
    "cls",
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split(),
)
def test_element_wise_classes_of_torch_are_recognised(cls):
    found = probe(getattr(torch.optim, cls)([leaf(3)]))
    assert (found.elementwise, found.works, found.reason) == (True, True, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("type_", "options"), CUTTABLE)
def test_fused_kernels_pass_the_probe(type_, options, dtype):
    assert not needs_whole_parameters(build(type_, leaf(3), fused=True, **options))
    assert probe(build(type_, leaf(3), fused=True, **options), dtype=dtype).elementwise


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: torch.optim.Adafactor([leaf(4, 4)]),
        lambda: torch.optim.Muon([leaf(4, 4)]),
        lambda: Muon(named_model()),
    ],
)
def test_classes_that_need_whole_matrices_are_recognised(optimizer):
    found = probe(optimizer())
    assert (found.elementwise, found.works) == (False, True)
    assert found.reason


class NormScaledSGD(Optimizer):
    """Divides by the norm over *all* its parameters: right on one rank, wrong on two."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params]))
        for p in params:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


def test_a_class_that_sums_over_its_parameters_needs_them_whole():
    found = probe(NormScaledSGD([leaf(3)]))
    assert not found.elementwise
    assert "NormScaledSGD gives other results" in found.reason


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: torch.optim.LBFGS([leaf(3)]), "closure"),
        (lambda: torch.optim.SparseAdam([leaf(3)]), "dense gradients"),
    ],
)
def test_classes_that_cannot_be_used_at_all_say_why(optimizer, words):
    found = probe(optimizer())
    assert (found.elementwise, found.works) == (False, False)
    assert words in found.reason


def test_the_probe_does_not_need_a_learning_rate_above_zero():
    assert not probe(NormScaledSGD([leaf(3)], lr=0.0)).elementwise


def test_the_probe_lists_state_by_name_dtype_and_group():
    groups = [{"params": [leaf(3)]}, {"params": [leaf(3)], "momentum": 0.9}]
    sgd = probe(torch.optim.SGD(groups), dtype=torch.float64)
    adam = probe(torch.optim.AdamW([leaf(3)]))
    assert sgd.state_by_group == ({}, {"momentum_buffer": torch.float64})
    assert adam.state == {"step": None, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def test_the_probe_sees_moments_wider_than_the_parameters():
    optimizer = build_optimizer(
        "AdamW", {}, [{"params": [leaf(3)]}], fused=False, state_dtype=torch.float32
    )
    found = probe(optimizer, dtype=torch.bfloat16)
    assert found.elementwise
    assert found.state["exp_avg"] == torch.float32


def test_the_probe_leaves_the_optimizer_and_the_random_numbers_alone():
    p = leaf(5)
    optimizer = torch.optim.AdamW([p], lr=0.0)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    groups, value = copy.deepcopy(optimizer.param_groups), p.detach().clone()
    torch.rand(1), random.random()  # away from the state that a test starts with
    before = torch.get_rng_state(), random.getstate()
    probe(optimizer)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (steps, dict(optimizer.state)) == ([], {})
    assert str(optimizer.param_groups) == str(groups)
    assert torch.equal(p, value)


def test_the_probe_works_while_the_model_is_fake():
    with FakeTensorMode():
        optimizer = torch.optim.AdamW([torch.zeros(3, requires_grad=True)], fused=True)
        assert probe(optimizer).elementwise


def test_the_probe_works_for_parameters_without_storage():
    p = torch.empty(3, device="meta", requires_grad=True)
    assert probe(build("AdamW", p, fused=True)).elementwise


# other tensors for the same optimizer


@pytest.mark.parametrize("cls", "Adagrad AdamW SGD Rprop ASGD".split())
def test_a_rebound_optimizer_gives_the_numbers_of_one_built_for_the_new_tensors(cls):
    optimizer = getattr(torch.optim, cls)([leaf(4, 4)], lr=0.1)
    group = optimizer.param_groups[0]
    p, q = leaf(7), leaf(7)
    rebind(optimizer, [[p]])
    train(optimizer, p)
    train(getattr(torch.optim, cls)([q], lr=0.1), q)
    assert torch.equal(p, q)
    assert optimizer.param_groups[0] is group


class EagerState(Optimizer):
    """Makes its state in the constructor, as older classes do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["sum"].add_(p.grad), alpha=self.param_groups[0]["lr"])


def test_state_made_in_a_constructor_is_made_anew_for_the_new_tensors():
    optimizer, p = EagerState([leaf(4, 4)]), leaf(7)
    rebind(optimizer, [[p]])
    train(optimizer, p)
    assert [(key is p, state["sum"].shape) for key, state in optimizer.state.items()] == [
        (True, (7,))
    ]


def test_adagrad_by_name_makes_no_state_for_the_whole_parameters():
    p, q = leaf(5), leaf(5)
    optimizer = build("Adagrad", p, fused=True)
    assert not optimizer.state
    (got,) = train(optimizer, p)
    (expected,) = train(torch.optim.Adagrad([q], fused=True), q)
    assert torch.equal(got, expected)


def test_a_copied_muon_steps_like_the_original():
    model = dict(named_model())
    first = Muon(model.items(), lr=0.02)
    second = copy.deepcopy(first)
    copies = [p for group in second.param_groups for p in group["params"]]
    originals = [p for group in first.param_groups for p in group["params"]]
    for optimizer, params in ((first, originals), (second, copies)):
        train(optimizer, *params)
    assert all(torch.equal(p, q) for p, q in zip(originals, copies))


def test_a_rank_may_own_nothing_of_a_group():
    optimizer = torch.optim.Adagrad([{"params": [leaf(3)]}, {"params": [leaf(2)]}])
    p = leaf(4)
    rebind(optimizer, [[], [p]])
    train(optimizer, p)
    assert set(optimizer.state) == {p}
