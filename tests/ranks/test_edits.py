"""Edits survive the next step as in plain PyTorch, or raise the same error on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dots import Plain, assert_same, build, open_engine, train
from kit import DTYPES
from zeroshard_testing import on_ranks

from zeroshard.errors import ShardedAccess, UsageError
from zeroshard.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

STAGES = [0, 1, 2, 3]
PRECISIONS = ["fp32", "bf16", "fp16"]
NAME = "dots.1.weight"
VALUES = torch.linspace(-2, 2, 91).view(13, 7)


def rounded(p):
    return VALUES.to(p.dtype)


def gathered_copy(p):
    with GatheredParameters(p, modifier_rank=0):
        if dist.get_rank() == 0:
            with torch.no_grad():
                p.copy_(VALUES)


def gathered_by_another_rank(p):
    with GatheredParameters([p], modifier_rank=1):
        p.data.fill_(float(dist.get_rank()))
        if dist.get_rank() == 1:
            p.data.copy_(VALUES)


def gathered_assignment(p):
    with GatheredParameters(iter([p]), modifier_rank=0):
        p.data = rounded(p) if dist.get_rank() == 0 else torch.zeros_like(p)


def gathered_init(p):
    with GatheredParameters({p, torch.ones(3)}, modifier_rank=0):
        torch.nn.init.zeros_(p)
        p.data.add_(rounded(p))


def set_local(p):
    safe_set_local_fp32_param(p, VALUES.reshape(-1)[local_range(p)].to(p.dtype).float())


def local_range(p):
    """The range of this rank's fragment in the flat parameter, found by marking the master."""
    from zeroshard.zero import safe_get_local_fp32_param

    kept = safe_get_full_fp32_param(p)
    safe_set_full_fp32_param(p, torch.arange(91.0).view(13, 7))
    piece = safe_get_local_fp32_param(p)
    found = slice(0, 0) if piece is None else slice(int(piece[0]), int(piece[-1]) + 1)
    safe_set_full_fp32_param(p, kept)
    return found


KEPT_AT_EVERY_STAGE = {
    "gathered copy": gathered_copy,
    "gathered by another rank": gathered_by_another_rank,
    "gathered assignment": gathered_assignment,
    "gathered init": gathered_init,
    "safe_set of rounded values": lambda p: safe_set_full_fp32_param(p, rounded(p).float()),
    "safe_set_local": set_local,
}


def in_place(p):
    with torch.no_grad():
        p.copy_(VALUES)


def through_detach(p):
    p.detach().copy_(VALUES)


def through_data(p):
    p.data.copy_(VALUES)


def assigned(p):
    p.data = rounded(p)


def by_view(p):
    p.data.view(-1)[:].copy_(VALUES.view(-1))


KEPT_WHERE_WHOLE = {
    "no_grad": in_place,
    "detach": through_detach,
    "data": through_data,
    "assigned": assigned,
    "view": by_view,
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_edits_survive_the_next_step_as_in_plain_pytorch(stage, precision):
    ways = KEPT_AT_EVERY_STAGE if stage == 3 else {**KEPT_AT_EVERY_STAGE, **KEPT_WHERE_WHOLE}
    plain = Plain(precision, 2)
    with open_engine(stage, precision) as engine:
        for step, (way, edit) in enumerate(ways.items()):
            train(engine, range(step, step + 1))
            plain.train(range(step, step + 1))
            edit(engine.module.get_parameter(NAME))
            if way.startswith("safe_set"):  # names the master itself
                plain.master(NAME).copy_(rounded(plain.low(NAME)))
            else:
                plain.edit(NAME, lambda p: VALUES.to(p.dtype))
            if way in KEPT_AT_EVERY_STAGE:
                assert_same(engine, plain, way)
            train(engine, range(9, 10))
            plain.train(range(9, 10))
            assert_same(engine, plain, way)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_one_element_edited_and_all_others_keep_their_master_bits(stage, precision):
    plain = Plain(precision, 3)

    def change(p):
        p[5, 3] = 0.75
        return p

    with open_engine(stage, precision) as engine:
        train(engine, range(2))
        plain.train(range(2))
        p = engine.module.get_parameter(NAME)
        if stage == 3:
            with GatheredParameters(p, modifier_rank=2):
                if dist.get_rank() == 2:
                    change(p.data)
        else:
            change(p.data)
        plain.edit(NAME, change)
        train(engine, range(2, 3))
        plain.train(range(2, 3))
        assert_same(engine, plain)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_safe_set_gives_the_master_all_bits(stage, precision):
    values = VALUES + 1e-4
    with open_engine(stage, precision) as engine:
        p = engine.module.get_parameter(NAME)
        safe_set_full_fp32_param(p, values)
        assert torch.equal(safe_get_full_fp32_param(p), values)
        assert torch.equal(p.detach().clone(), values.to(DTYPES[precision]))
        engine(1.0)
        assert torch.equal(safe_get_full_fp32_param(p), values)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_edits_inside_forward_are_kept(stage, precision):
    """Max-norm layers and the like write their weight in forward, where it is full at every stage."""
    plain = Plain(precision, 2)
    pending = []

    def hook(module, args):
        if pending:
            pending.pop()(module.weight)

    with open_engine(stage, precision) as engine:
        train(engine, range(1))
        plain.train(range(1))
        engine.module.dots[1].register_forward_pre_hook(hook)
        for way, edit in KEPT_WHERE_WHOLE.items():
            pending.append(edit)
            train(engine, range(1, 2))
            plain.edit(NAME, lambda p: VALUES.to(p.dtype))
            plain.train(range(1, 2))
            assert_same(engine, plain, way)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(2)
def test_plain_edits_of_a_sharded_parameter_raise_and_change_nothing(precision):
    plain = Plain(precision, 2)
    with open_engine(3, precision) as engine:
        train(engine, range(2))
        plain.train(range(2))
        for edit in KEPT_WHERE_WHOLE.values():
            with pytest.raises(ShardedAccess, match="would be lost"):
                edit(engine.module.get_parameter(NAME))
        train(engine, range(2, 3))
        plain.train(range(2, 3))
        assert_same(engine, plain)


@pytest.mark.parametrize("who", ["rank 1", "all ranks, differently"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_edit_without_modifier_raises_on_every_rank_and_ranks_stay_equal(stage, who):
    with open_engine(stage) as engine:
        p = engine.module.get_parameter(NAME)
        with pytest.raises(ShardedAccess) as caught, GatheredParameters(engine.module.parameters()):
            if who != "rank 1" or dist.get_rank() == 1:
                with torch.no_grad():
                    p[0].mul_(2 + dist.get_rank())
        texts = [None, None]
        dist.all_gather_object(texts, str(caught.value))
        assert texts[0] == texts[1]
        assert texts[0].startswith(
            f"{NAME!r} changed inside GatheredParameters without modifier_rank"
        )
        values = [torch.empty(13, 7) for _ in range(2)]
        dist.all_gather(values, p.detach().clone())
        assert torch.equal(*values)
        train(engine, range(1))


@on_ranks(2)
def test_refused_edit_of_a_sharded_parameter_is_undone():
    with open_engine(3) as engine:
        p = engine.module.get_parameter(NAME)
        before = p.clone()
        with pytest.raises(ShardedAccess), GatheredParameters(p):
            p.data.zero_()
        assert torch.equal(p, before)
        with GatheredParameters(p):
            with pytest.raises(ShardedAccess), GatheredParameters(p):
                p.data.zero_()
            assert torch.equal(p, before)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_the_same_edit_on_all_ranks_needs_no_modifier_where_parameters_are_whole(stage):
    plain = Plain("bf16", 2)
    with open_engine(stage, "bf16") as engine:
        train(engine, range(1))
        plain.train(range(1))
        with GatheredParameters(engine.module.parameters()):
            engine.module.get_parameter(NAME).data.copy_(VALUES)
        plain.edit(NAME, lambda p: VALUES.to(p.dtype))
        train(engine, range(1, 2))
        plain.train(range(1, 2))
        assert_same(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_moving_elements_counts_as_an_edit(stage):
    with open_engine(stage) as engine:
        p = engine.module.get_parameter(NAME)
        with pytest.raises(ShardedAccess, match=NAME), GatheredParameters(p):
            if dist.get_rank() == 0:
                p.data[0, :6] = p.data[0, :6].roll(2)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_load_state_dict_inside_gathered_parameters(stage):
    plain = Plain("bf16", 2)
    with open_engine(stage, "bf16") as engine:
        train(engine, range(1))
        plain.train(range(1))
        state = {k: v + 1 for k, v in build("bf16").state_dict().items()}
        with GatheredParameters(engine.module.parameters(), modifier_rank=0):
            if dist.get_rank() == 0:
                engine.module.load_state_dict(state)
        for name in plain.names:
            plain.edit(name, lambda _, name=name: state[name])
        train(engine, range(1, 2))
        plain.train(range(1, 2))
        assert_same(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_parameters_replaced_after_the_engine_was_built_are_refused(stage):
    with open_engine(stage) as engine:
        state = {k: v.clone() for k, v in engine.module.state_dict().items()}
        engine.module.load_state_dict(state, assign=True)
        with pytest.raises(UsageError, match=r"'gain' \(and 6 more\) was added to the model after"):
            engine(1.0)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_converting_whole_parameters_to_another_dtype_is_refused_at_the_step(stage):
    with open_engine(stage) as engine:
        engine.module.dots[0].double()
        with pytest.raises(UsageError, match=r"'dots.0.weight' was given other memory.*float64"):
            train(engine, range(1))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_conversions_without_effect_are_harmless(stage):
    plain = Plain("fp32", 2)
    with open_engine(stage) as engine:
        engine.module.to("cpu").float()
        train(engine, range(2))
        plain.train(range(2))
        assert_same(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradient_assigned_by_hand_is_refused(stage):
    with open_engine(stage) as engine:
        engine.backward(engine(1.0))
        engine.module.gain.grad = torch.tensor(1.0)
        with pytest.raises(UsageError, match=r"'gain'.grad was assigned.*safe_set_full_grad"):
            engine.step()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_exception_inside_the_context_keeps_what_was_written_everywhere(stage):
    plain = Plain("fp32", 2)
    with open_engine(stage) as engine:
        p = engine.module.get_parameter(NAME)
        with pytest.raises(KeyError), GatheredParameters(p, modifier_rank=0):
            if dist.get_rank() == 0:
                p.data.copy_(VALUES)
            raise KeyError
        with pytest.raises(KeyError), GatheredParameters(engine.module.parameters()):
            raise KeyError
        plain.edit(NAME, lambda p: VALUES)
        train(engine, range(2))
        plain.train(range(2))
        assert_same(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_contexts_nest(stage):
    plain = Plain("fp32", 2)
    with open_engine(stage) as engine:
        p, gain = engine.module.get_parameter(NAME), engine.module.gain
        with GatheredParameters(engine.module.parameters()):
            with GatheredParameters([p, gain], modifier_rank=0):
                if dist.get_rank() == 0:
                    p.data.copy_(VALUES)
                with GatheredParameters(gain):
                    assert gain.item() == 1.5
            assert torch.equal(p.detach(), VALUES)
        with GatheredParameters(p, modifier_rank=1):
            with GatheredParameters(p, modifier_rank=0):
                p.data.zero_()
            if dist.get_rank() == 1:
                p.data.copy_(VALUES)
        plain.edit(NAME, lambda p: VALUES)
        train(engine, range(2))
        plain.train(range(2))
        assert_same(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_step_inside_the_context_refreshes_what_is_read(stage):
    plain = Plain("bf16", 2)
    with open_engine(stage, "bf16") as engine:
        p = engine.module.get_parameter(NAME)
        with GatheredParameters(engine.module.parameters()):
            train(engine, range(2))
            plain.train(range(2))
            assert torch.equal(p.detach(), plain.low(NAME))
            train(engine, range(2, 3))
            plain.train(range(2, 3))
        assert_same(engine, plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modifier_rank": 2}, "modifier_rank=2 is not one of the 2 ranks"),
        ({"modifier_rank": -1}, "modifier_rank=-1 is not one of the"),
        ({"params": "module"}, "got a Dots. Pass a parameter or an iterable"),
        ({"params": 3}, "got a int"),
    ],
    ids=str,
)
@on_ranks(2)
def test_wrong_arguments_of_gathered_parameters(arguments, message):
    with open_engine(3) as engine:
        params = arguments.pop("params", engine.module.gain)
        params = engine.module if params == "module" else params
        with pytest.raises(UsageError, match=message):
            GatheredParameters(params, **arguments)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_things_that_are_no_sharded_parameters_pass_through(stage):
    with open_engine(stage) as engine:
        buffer, plain = torch.ones(3), torch.nn.Parameter(torch.ones(2))
        for params in ([], (), set(), iter([]), buffer, [buffer, plain, None], {plain, buffer}):
            with GatheredParameters(params, modifier_rank=0):
                plain.data.add_(1)
        assert plain[0] == 8
        with GatheredParameters(engine.module.gain, enabled=False):
            pass
        with GatheredParameters({engine.module.gain, buffer}):
            assert engine.module.gain.item() == 1.5
