"""An engine whose ranks are on two nodes: memory, precisions, offloading, checkpoints and edits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.nodes import bits_of, opened, step, values_of
from zeroshard_testing import on_ranks

from zeroshard.core.ledger import RESTING
from zeroshard.errors import ConfigError
from zeroshard.zero import GatheredParameters


def trained(stage, keys, *, steps=3, clip=0.01, **more):
    """Bits of losses, norms and parameters after some steps of two micro-batches."""
    with opened(
        stage, keys, gradient_accumulation_steps=2, gradient_clipping=clip, **more
    ) as engine:
        seen = [step(engine, at, micro_batches=2) for at in range(steps)]
        return [*seen, *bits_of(engine)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@on_ranks(4)
def test_all_stages_have_equal_bits(precision):
    more = {precision: {"enabled": True}}
    if precision == "fp16":
        more[precision] |= {"initial_scale_power": 8}
    runs = [trained(*kind, **more) for kind in ((2, "two hops"), (3, "hpz"), (3, "two hops"))]
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0][:3])) == 3


@pytest.mark.parametrize("where", ["cpu", "nvme"])
@on_ranks(4)
def test_offloaded_optimizer_state_has_equal_bits(where, tmp_path):
    place = {"device": where} if where == "cpu" else {"device": where, "nvme_path": str(tmp_path)}
    zero = {"zero_optimization": {"offload_optimizer": place}}
    more = {"bf16": {"enabled": True}}
    assert trained(3, "hpz", **more, **zero) == trained(3, "hpz", **more)


@pytest.mark.parametrize("keys", ["hpz", "two hops"])
@on_ranks(4)
def test_memory_is_that_of_the_plan(keys):
    with opened(3, keys, bf16={"enabled": True}) as engine:
        for at in range(2):
            step(engine, at)
        for unit in engine.runtime.units:
            unit.reshard()
        numel = sum(unit.layout.full_numel for unit in engine.runtime.units)
        rows = engine.memory_report().ranks[engine.global_rank]
        rows = {
            row.category: row for row in rows if row.category in RESTING and row.tier == "device"
        }
        assert all(row.planned == row.measured for row in rows.values())
        # hpZ: 2 Psi / inner bytes, of which the shard is a part.
        assert rows["parameters"].measured == 2 * numel // (2 if keys == "hpz" else 4)
        held = [m.untyped_storage() for u in engine.runtime.units for m in u.store.memories]
        assert sum(storage.nbytes() for storage in held) == rows["parameters"].measured


@pytest.mark.parametrize("keys", ["hpz", "two hops"])
@on_ranks(4)
def test_checkpoints_of_all_layouts_load_into_each_other(keys, tmp_path):
    saved: dict = {}
    layouts = [(3, keys), (2, "two hops"), (3, None), (1, "replicas")]
    for at, (stage, name) in enumerate(layouts):
        with opened(stage, name) as engine:
            if at:
                engine.load_checkpoint(tmp_path)
                found = values_of(engine)
                assert found.keys() == saved.keys()
                assert all(torch.equal(found[name], saved[name]) for name in saved)
            step(engine, at)
            saved = values_of(engine)
            engine.save_checkpoint(tmp_path)
    with opened(3, keys) as engine:
        engine.load_checkpoint(tmp_path)
        found = values_of(engine)
        assert all(torch.equal(found[name], saved[name]) for name in saved)


@on_ranks(4)
def test_a_loaded_checkpoint_replaces_the_shards_of_other_nodes(tmp_path):
    with opened(3, "hpz") as engine:
        step(engine, 0)
        engine.save_checkpoint(tmp_path)
        before = step(engine, 1)
        step(engine, 2)
        engine.load_checkpoint(tmp_path)
        assert step(engine, 1) == before


@pytest.mark.parametrize("keys", ["hpz", "two hops"])
@on_ranks(4)
def test_an_edit_of_one_rank_reaches_all_nodes(keys):
    with opened(3, keys) as engine:
        step(engine)
        params = list(engine.module.parameters())
        for source in (0, 1, 3):
            with GatheredParameters(params, modifier_rank=source), torch.no_grad():
                if dist.get_rank() == source:
                    params[0].fill_(source + 0.5)
            with GatheredParameters(params):
                assert params[0].eq(source + 0.5).all()
        step(engine, 1)
        everyone: list = [None] * 4
        dist.all_gather_object(everyone, bits_of(engine))
        assert everyone.count(everyone[0]) == 4


@on_ranks(4)
def test_parameters_that_left_the_device_come_back():
    runs = []
    for leaves in (False, True):
        with opened(3, "hpz") as engine:
            step(engine)
            if leaves:
                engine.offload_states()
                held = [m.untyped_storage() for u in engine.runtime.units for m in u.store.memories]
                assert not any(storage.nbytes() for storage in held)
                engine.reload_states()
            step(engine, 1)
            runs.append(bits_of(engine))
    assert runs[0] == runs[1]


@on_ranks(4)
def test_sizes_that_do_not_fit_are_refused_on_every_rank():
    cases = [
        (
            {"zero_hpz_partition_size": 3},
            {},
            "3 does not divide the 4 ranks .* use 2, or leave it out",
        ),
        ({"zero_hpz_partition_size": 16}, {}, "16 does not divide the 4 ranks"),
        (
            {"hierarchy": {"inner": 2}},
            {"parallel": {"data_replicate": 2}},
            "replicas have two hops already",
        ),
    ]
    for zero, more, text in cases:
        with pytest.raises(ConfigError, match=text):
            opened(3, None, zero_optimization=zero, **more)


@on_ranks(4)
def test_a_node_of_all_ranks_is_one_hop():
    with opened(3, None, zero_optimization={"zero_hpz_partition_size": 4}) as engine:
        step(engine)
        assert engine._watch.gathers is engine._watch.world
