"""Gathers in 8 bits and sums of 4 bits: what a rank computes with, sends, keeps and saves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.nodes import bits_of, opened, step, values_of
from zeroshard_testing import on_ranks

from zeroshard.comm.quantized import QuantizedSums, from_wire, to_wire, wire_nbytes
from zeroshard.core.ledger import RESTING
from zeroshard.zero import GatheredParameters

WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
BOTH = WEIGHTS | GRADIENTS
LAYOUTS = [None, "hpz", "two hops"]


def rounded(values, bits=8):
    return from_wire(to_wire(values, bits), torch.empty_like(values), bits)


@pytest.mark.parametrize("keys", LAYOUTS)
@on_ranks(4)
def test_every_rank_computes_with_the_rounded_shards_and_updates_the_exact_ones(keys):
    with opened(3, keys, zero_optimization=WEIGHTS) as engine:
        for at in range(2):
            exact = {u.name: u.gathered_copy() for u in engine.runtime.units}
            for unit in engine.runtime.units:
                for _ in range(2):  # the second time inside the node
                    unit.unshard()
                    unit.wait_for_unshard()
                    expected = rounded(exact[unit.name])
                    assert torch.equal(unit.full_N, expected)
                    assert not torch.equal(expected, exact[unit.name])
                    unit.reshard()
                assert torch.equal(unit.gathered_copy(), exact[unit.name])
            step(engine, at)


@pytest.mark.parametrize("keys", LAYOUTS)
@pytest.mark.parametrize("transport", ["shm", "p2p", "stock"])
@on_ranks(4)
def test_gradients_are_sums_of_what_ranks_rounded(keys, transport):
    with opened(3, keys, zero_optimization=GRADIENTS, transport=transport) as engine:
        comm = QuantizedSums(engine._watch.gathers)
        full_N = torch.randn(4 * 64 * 3, generator=torch.Generator().manual_seed(dist.get_rank()))
        everyone: list = [None] * 4
        dist.all_gather_object(everyone, full_N)
        found_S = torch.empty(64 * 3)
        comm.reduce_scatter(found_S, full_N.clone(), name="sum").wait()
        if keys is None:
            total = sum(rounded(each, 4) for each in everyone)
        else:
            first, second = (
                rounded(sum(rounded(each, 4) for each in node), 4)
                for node in (everyone[:2], everyone[2:])
            )
            total = first + second
        low = comm.rank * 64 * 3
        assert torch.allclose(found_S, total[low : low + 64 * 3], rtol=1e-6, atol=1e-6)
        assert not torch.allclose(found_S, sum(everyone)[low : low + 64 * 3], rtol=1e-3)


@on_ranks(2)
def test_padding_is_not_rounded_with_gradients():
    """Its contents are undefined, and a block of 64 elements can have both."""
    with opened(3, None, zero_optimization=GRADIENTS) as engine:
        buffer = engine.runtime.reducer.buffers[0]
        layout, comm = buffer.unit.layout, buffer.comm
        assert isinstance(comm, QuantizedSums)
        assert any(begin % 64 for begin, _ in layout.gaps)
        found = []
        for garbage in (0.0, float("nan")):
            full_N = torch.ones(layout.full_numel)
            for begin, end in layout.gaps:
                full_N[begin:end] = garbage
            found.append(torch.empty(layout.shard_numel))
            comm.reduce_scatter(found[-1], full_N, name="sum").wait()
        assert torch.equal(*found)


PUBLIC = [
    # of LLaVA-NeXT (scripts/zero3pp.json) and VILA (scripts/zero3pp.json), with nodes of two ranks
    {
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 2,
        "zero_quantized_gradients": True,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 1e6,
        "stage3_prefetch_bucket_size": 1e6,
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "zero_hpz_partition_size": 2,
    },
]


@pytest.mark.parametrize("zero", PUBLIC, ids=["LLaVA-NeXT", "VILA"])
@on_ranks(4)
def test_public_configurations_of_zero_plus_plus_train(zero):
    with opened(3, None, zero_optimization=zero, bf16={"enabled": True}) as engine:
        assert engine.mesh.node == 2
        norms = [step(engine) for _ in range(8)]
        assert norms[-1] < norms[0]


@pytest.mark.parametrize("keys", LAYOUTS)
@on_ranks(4)
def test_training_is_near_that_without_rounding_and_equal_on_all_ranks(keys):
    runs = []
    for zero in ({}, WEIGHTS, GRADIENTS, BOTH):
        with opened(3, keys, zero_optimization=zero, gradient_clipping=0.05) as engine:
            norms = [step(engine, at) for at in range(3)]
            runs.append((norms, torch.cat([p.flatten() for _, p in engine.iter_full_params()])))
            everyone: list = [None] * 4
            dist.all_gather_object(everyone, bits_of(engine))
            assert everyone.count(everyone[0]) == 4
    for (norms, params), limit in zip(runs[1:], (0.02, 0.1, 0.1), strict=True):
        assert norms != runs[0][0]
        assert norms == pytest.approx(runs[0][0], rel=limit)
        off = (params - runs[0][1]).norm() / runs[0][1].norm()
        assert 0 < off < limit


@on_ranks(4)
def test_a_step_sends_the_bytes_of_the_wires():
    with opened(3, "hpz", zero_optimization=BOTH) as engine:
        step(engine)
        units = engine.runtime.units
        recorders = {r.group.split()[0]: r for r in engine._watch.recorders}
        for recorder in recorders.values():
            recorder.reset_traffic()
        step(engine, 1)
        for unit in units:
            unit.wait_for_unshard()
        sizes = [unit.layout.full_numel for unit in units]
        node, nodes = (recorders[hop].sent_numel for hop in ("node", "nodes"))
        assert nodes["all_gather"] == sum(wire_nbytes(N // 4, 8) for N in sizes)
        assert nodes["all_to_all"] == sum(wire_nbytes(N // 4, 4) for N in sizes)
        assert node["all_to_all"] == sum(wire_nbytes(N // 2, 4) for N in sizes)
        gathers = [2, *[1] * (len(sizes) - 1)]  # the last unit of forward stays for backward
        assert node["all_gather"] == sum(
            k * wire_nbytes(N // 2, 8) for k, N in zip(gathers, sizes, strict=True)
        )


@pytest.mark.parametrize("keys", LAYOUTS)
@on_ranks(4)
def test_memory_is_that_of_the_plan(keys):
    with opened(3, keys, bf16={"enabled": True}, zero_optimization=BOTH) as engine:
        for at in range(2):
            step(engine, at)
        for unit in engine.runtime.units:
            unit.reshard()
        rows = engine.memory_report().ranks[engine.global_rank]
        rows = [row for row in rows if row.category in RESTING]
        assert all(row.planned == row.measured for row in rows)
        found = {row.category: row.measured for row in rows if row.tier == "device"}
        shards = [unit.layout.shard_numel for unit in engine.runtime.units]
        second = sum(wire_nbytes(S, 8) for S in shards) * (2 if keys == "hpz" else 1)
        assert found["parameters"] == 2 * sum(shards) + second


@pytest.mark.parametrize("keys", LAYOUTS)
@on_ranks(4)
def test_an_edit_reaches_all_ranks_and_leaves_other_elements_exact(keys):
    with opened(3, keys, zero_optimization=WEIGHTS) as engine:
        step(engine)
        param = engine.module[0].weight
        unit = engine.runtime.units[0]
        for source in (1, 3):
            before = unit.gathered_copy()
            with GatheredParameters([param], modifier_rank=source), torch.no_grad():
                if dist.get_rank() == source:
                    param[3, 5] = source + 0.25
            after = unit.view(unit.gathered_copy(), param)
            expected = unit.view(before, param).clone()
            expected[3, 5] = source + 0.25
            assert torch.equal(after, expected)
            with GatheredParameters([param]):
                assert float(param[3, 5]) == pytest.approx(source + 0.25, rel=1e-2)
            assert torch.equal(unit.view(unit.gathered_copy(), param), expected)


@pytest.mark.parametrize("keys", LAYOUTS)
@on_ranks(4)
def test_a_checkpoint_has_the_exact_parameters(keys, tmp_path):
    with opened(3, keys, zero_optimization=BOTH) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path)
        saved = values_of(engine)
        after = step(engine, 1)
    with opened(2, None) as engine:
        engine.load_checkpoint(tmp_path)
        found = values_of(engine)
        assert all(torch.equal(found[name], saved[name]) for name in saved)
    with opened(3, keys, zero_optimization=BOTH) as engine:
        step(engine, 5)
        engine.load_checkpoint(tmp_path)
        assert step(engine, 1) == after


@on_ranks(2)
def test_only_frozen_parameters_are_rounded_if_only_they_are_asked_for():
    keys = {"zero_quantized_nontrainable_weights": True}
    with opened(3, None, zero_optimization=keys, frozen="0") as engine:
        step(engine)
        for unit in engine.runtime.units:
            exact = unit.gathered_copy()
            unit.unshard()
            unit.wait_for_unshard()
            assert torch.equal(unit.full_N, exact) == unit.trainable
            unit.reshard()
        assert {unit.trainable for unit in engine.runtime.units} == {True, False}


@on_ranks(4)
def test_an_overflow_is_seen_through_the_rounding():
    fp16 = {"enabled": True, "initial_scale_power": 16}
    with opened(3, "hpz", zero_optimization=BOTH, fp16=fp16) as engine:
        before = bits_of(engine)
        inputs = torch.full((5, 16), 60000.0 if dist.get_rank() == 2 else 1.0, dtype=torch.float16)
        engine.backward(engine(inputs).float().square().mean() * 1e4)
        engine.step()
        assert engine.last_step.skipped
        assert bits_of(engine) == before
