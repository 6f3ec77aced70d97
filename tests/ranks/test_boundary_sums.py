"""Gradients that pass between nodes once per step (``hierarchy.outer_reduce: "boundary"``)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.nodes import bits_of, opened, step
from zeroshard_testing import on_ranks

from zeroshard.zero import safe_get_full_grad, safe_set_full_grad

PAIRS = {
    "boundary": "two hops",
    "hybrid boundary": "hybrid",
    "replicas boundary": "replicas",
}
"""Keys with sums at the boundary, and the same nodes with sums in each micro-batch."""

kinds = pytest.mark.parametrize("keys", PAIRS)


def backward(engine, seed):
    generator = torch.Generator().manual_seed(10 * seed + engine.dp_rank)
    dtype = next(engine.module.parameters()).dtype
    inputs = torch.randn(5, 16, generator=generator).to(dtype)
    engine.backward(engine(inputs).float().square().mean())


def trained(stage, keys, *, micro_batches=3, steps=3, **more):
    more = {"gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.01, **more}
    with opened(stage, keys, **more) as engine:
        seen = [step(engine, at, micro_batches) for at in range(steps)]
        return [*seen, *bits_of(engine)]


def flat(found):
    return [float(value) for row in found for value in (row if isinstance(row, list) else [row])]


def assert_close(found, expected):
    assert flat(found) == pytest.approx(flat(expected), rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@kinds
@on_ranks(4)
def test_stages_2_and_3_have_equal_bits(precision, keys):
    more = {precision: {"enabled": True}}
    if precision == "fp16":
        more[precision] |= {"initial_scale_power": 8}
    runs = [trained(stage, keys, **more) for stage in (2, 3)]
    assert runs[0] == runs[1]
    assert len(set(runs[0][:3])) == 3
    everyone: list = [None] * 4
    dist.all_gather_object(everyone, runs[0])
    assert all(other == everyone[0] for other in everyone)


@kinds
@on_ranks(4)
def test_one_micro_batch_has_the_bits_of_sums_in_each(keys):
    more = {"bf16": {"enabled": True}, "micro_batches": 1}
    assert trained(3, keys, **more) == trained(3, PAIRS[keys], **more)


def hops(engine):
    """The recorders inside and between nodes, their counters at zero."""
    recorders = {recorder.group.split()[0]: recorder for recorder in engine._watch.recorders}
    for recorder in recorders.values():
        recorder.reset_traffic()
    names = ("holders", "replicas") if "replicas" in recorders else ("node", "nodes")
    return [recorders[name] for name in names]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", [2, 3])
@kinds
@on_ranks(4)
def test_sums_pass_between_nodes_once_per_step(micro_batches, stage, keys):
    with opened(stage, keys, gradient_accumulation_steps=micro_batches) as engine:
        step(engine, 0, micro_batches)
        inside, between = hops(engine)
        step(engine, 1, micro_batches)
        N = sum(unit.layout.full_numel for unit in engine.runtime.units)
        assert inside.sent_numel["reduce_scatter"] == micro_batches * N / 2
        assert between.sent_numel["reduce_scatter"] == N / 4


@kinds
@on_ranks(4)
def test_sums_pass_in_the_dtype_of_reductions(keys):
    more = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    with opened(3, keys, data_types={"grad_accum_dtype": "fp32"}, **more) as engine:
        step(engine, 0, 2)
        _, between = hops(engine)
        found = {r.nbytes for r in between.records() if r.op == "reduce_scatter"}
        parts = {unit.layout.full_numel // 2 for unit in engine.runtime.units}
        assert found == {2 * part for part in parts}


@pytest.mark.parametrize("where", ["cpu", "nvme"])
@kinds
@on_ranks(4)
def test_offloaded_optimizer_state_has_equal_bits(where, keys, tmp_path):
    place = {"device": where} if where == "cpu" else {"device": where, "nvme_path": str(tmp_path)}
    zero = {"zero_optimization": {"offload_optimizer": place}}
    more = {"bf16": {"enabled": True}}
    assert trained(3, keys, **more, **zero) == trained(3, keys, **more)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@kinds
@on_ranks(4)
def test_the_plan_counts_the_sums_of_the_node(stage, offload, keys):
    more = {"gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "fp32"}}
    if offload:
        more["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
    with opened(stage, keys, bf16={"enabled": True}, **more) as engine:
        step(engine, 0, 2)
        backward(engine, 1)
        rows = engine.memory_report().ranks[engine.global_rank]
        (row,) = [r for r in rows if (r.category, r.tier) == ("gradients", "device")]
        N = sum(unit.layout.full_numel for unit in engine.runtime.units)
        assert row.measured == row.planned == 4 * N // 2


# -- what programs do between micro-batches ----------------------------------------------------------


def read(engine, at):
    grads = [safe_get_full_grad(p) for p in engine.module.parameters()]
    assert all(grad is not None for grad in grads)
    return [value for grad in grads for value in grad.flatten().tolist()]


def scale(engine, at):
    for param in engine.module.parameters():
        param.grad.mul_(0.5 + at)
    engine.module[0].bias.grad.zero_()


def drop(engine, at):
    if at == 1:
        engine.module[0].weight.grad = None


def clear(engine, at):
    if at == 1:
        engine.module.zero_grad()


def leave(engine, at):
    engine.offload_states()
    engine.reload_states()


def replace(engine, at):
    if at == 2:
        weight = engine.module[2].weight
        safe_set_full_grad(weight, torch.full(weight.shape, 0.25))


def too_many(engine, at):
    if at == 2:
        backward(engine, 7)


def fail(engine, at):
    """A backward that ends with an exception drops the gradients of the step."""
    if at != 1:
        return
    out = engine(torch.ones(5, 16))
    out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(out.sum())


def treated(stage, keys, treat, **more):
    seen = []
    with opened(stage, keys, gradient_accumulation_steps=3, **more) as engine:
        for number in range(2):
            for at in range(3):
                backward(engine, 10 * number + at)
                seen.append(treat(engine, at) or [])
                engine.step()
        return [*seen, *bits_of(engine)]


@pytest.mark.parametrize(
    "treat", [read, scale, drop, clear, leave, replace, too_many, fail], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(4)
def test_programs_see_and_change_the_same_gradients(stage, treat):
    for keys, other in PAIRS.items():
        found = treated(stage, keys, treat)
        assert_close(found, treated(stage, other, treat))
        everyone: list = [None] * 4
        dist.all_gather_object(everyone, found)
        assert all(other == everyone[0] for other in everyone)


@kinds
@on_ranks(4)
def test_a_step_whose_last_micro_batch_is_not_known_completes_the_sums(keys):
    def run(keys):
        own = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 3}
        with opened(3, keys, **own) as engine:
            inside, between = hops(engine)
            for number, count in enumerate((3, 2, 1)):
                for at in range(count):
                    backward(engine, 10 * number + at)
                engine.step()
            sent = [hop.sent_numel["reduce_scatter"] for hop in (inside, between)]
            return bits_of(engine), sent

    (bits, sent), (expected, sent_in_each) = run(keys), run(PAIRS[keys])
    assert_close(bits, expected)
    assert sent == [sent_in_each[0], sent_in_each[1] / 2]  # 3 of 6 sums


@kinds
@on_ranks(4)
def test_a_boundary_that_comes_early_completes_the_sums(keys):
    def run(keys):
        with opened(3, keys, gradient_accumulation_steps=3) as engine:
            for at, is_last in enumerate((False, True, False, False, False, True)):
                engine.set_gradient_accumulation_boundary(is_last)
                backward(engine, at)
                engine.step()
            assert engine.global_steps == 2
            return bits_of(engine)

    assert_close(run(keys), run(PAIRS[keys]))


@kinds
@on_ranks(4)
def test_an_overflow_in_one_micro_batch_skips_the_step(keys):
    more = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    with opened(3, keys, gradient_accumulation_steps=3, **more) as engine:
        step(engine, 0, 3)
        before = bits_of(engine)
        for at in range(3):
            inputs = torch.ones(5, 16, dtype=torch.float16)
            loss = engine(inputs).float().square().mean()
            engine.backward(loss * (1e9 if (at, engine.dp_rank) == (1, 2) else 1.0))
            engine.step()
        assert engine.skipped_steps == 1
        assert bits_of(engine) == before
        step(engine, 2, 3)
        assert bits_of(engine) != before
