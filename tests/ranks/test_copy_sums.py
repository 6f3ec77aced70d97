"""Gradients of parameters that several tensor ranks hold are added once per optimizer step."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tensor_networks
from support.covering import covering, sampled
from support.tensor_models import PLANS, loss_of, tiny_gpt, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard import Engine
from zeroshard.core.mesh import Mesh
from zeroshard.parallel.tensor_plan import tensor_parallel
from zeroshard.zero import safe_get_full_grad, safe_set_full_grad
from zeroshard.zero.addends import AddendSlots

NAME = "gradients of copies"
LR = 1e-2


def open_engine(
    model: nn.Module, stage: int, *, plan: str | None = "sequence", tensor: int = 2, **keys
) -> Engine:
    """An engine on data ranks x ``tensor`` tensor ranks. Every block is a unit."""
    data = dist.get_world_size() // tensor
    if plan is not None:
        grid = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
        tensor_parallel(model, grid, PLANS[plan])
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.05,
        "unit_min_numel": 1,
        **keys,
        "zero_optimization": {"stage": stage, **keys.get("zero_optimization", {})},
    }
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LR)
    mesh = Mesh(data_shard=data, tensor=tensor)
    return zeroshard.Engine(model, config=config, optimizer=optimizer, mesh=mesh)


def backward(engine: Engine, seed: int = 0) -> None:
    ids, labels = tokens(10 * seed + engine.dp_rank)
    engine.backward(loss_of(engine(ids), labels))


def calls(engine: Engine) -> Counter[str]:
    """By name, the collectives that this rank has called in its tensor group and in parts of it."""
    found: Counter[str] = Counter()
    for comm in engine._watch.copies:
        for op in ("all_gather", "reduce_scatter", "gather_small", "broadcast"):
            found.update({entry.name: entry.calls for entry in comm.recorder.entries(op).values()})
    return found


def addend_slots(engine: Engine) -> list[AddendSlots]:
    return [slots for sums in engine.runtime.reducer.copy_sums for slots in sums._slots()]


class AllReduces(TorchDispatchMode):
    """Counts all-reduces of torch. Its ``CommDebugMode`` counts them too, and takes half of the time of a
    test for what it notes about modules."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operation on the local tensors comes here next
        self.count += func.name().replace("_", "").partition("::")[2].startswith("allreduce")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(4)
def test_a_step_has_one_message_in_each_tensor_group(stage):
    for micro_batches in (1, 3):
        with open_engine(tiny_gpt(), stage, gradient_accumulation_steps=micro_batches) as engine:
            for step in range(2):
                before = calls(engine)
                for micro in range(micro_batches):
                    with AllReduces() as found:
                        backward(engine, step + micro)
                    assert found.count == 0
                    assert calls(engine) == before
                    engine.step()
                assert calls(engine) - before == Counter({NAME: 1})


@pytest.mark.parametrize(("tensor", "kv_heads"), sampled([(4, 2), (4, 1), (2, 1)], every=3))
@on_ranks(4)
def test_key_value_heads_on_several_ranks_have_one_message_per_step(tensor, kv_heads):
    """The first two steps are those of one process; backward itself adds no such gradients."""
    messages = 1 if kv_heads == 1 else 2  # two heads on four ranks: a message in each half as well
    for stage in (0, 2, 3):
        plain, model = tiny_gpt(kv_heads=kv_heads), tiny_gpt(kv_heads=kv_heads)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
        with open_engine(model, stage, tensor=tensor, gradient_accumulation_steps=3) as engine:
            params = dict(engine.module.named_parameters())
            for step in range(2):
                before = calls(engine)
                for micro in range(3):
                    with AllReduces() as found:
                        backward(engine, 3 * step + micro)
                    assert found.count == 0
                    assert calls(engine) == before
                    for rank in range(engine.dp_size):
                        ids, labels = tokens(10 * (3 * step + micro) + rank)
                        (loss_of(plain(ids), labels) / engine.dp_size / 3).backward()
                    if micro == 2:
                        key = "blocks.0.attn.k.weight"
                        own = safe_get_full_grad(params[key])
                        expected = plain.get_parameter(key).grad
                        assert torch.allclose(own, expected, rtol=0, atol=1e-14)
                        before = calls(engine)
                    engine.step()
                assert calls(engine) - before == Counter({NAME: messages})
                norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
                assert float(engine.last_step.grad_norm) == pytest.approx(float(norm), rel=1e-13)
                optimizer.step()
                optimizer.zero_grad()
            for name, values in engine.iter_full_params():
                own = plain.get_parameter(name)
                assert torch.allclose(values, own, rtol=0, atol=1e-13), name


@on_ranks(4)
def test_messages_end_at_the_bucket_size():
    keys = {"zero_optimization": {"reduce_bucket_size": 64}}
    with open_engine(tiny_gpt(kv_heads=1), 2, tensor=4, **keys) as engine:
        before = calls(engine)
        backward(engine)
        engine.step()
        units = sum(slots.numel > 0 for slots in addend_slots(engine))
        assert (calls(engine) - before)[NAME] == units > 2


@on_ranks(2)
def test_a_plan_without_such_parameters_sends_nothing():
    with open_engine(tiny_gpt(), 2, plan="vocabulary") as engine:
        before = calls(engine)
        backward(engine)
        engine.step()
        assert calls(engine) == before


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_kinds_of_gradients_are_learned_from_a_model_that_torch_has_cut(stage):
    """The first step adds them one by one, as torch does; later steps have one message."""
    expected, norms = tensor_networks.plain_training(32, torch.float64, 3)
    model = tensor_networks.cut(tensor_networks.network(32, torch.float64), 2, sequence=True)
    keys = {"gradient_accumulation_steps": 2, "gradient_clipping": tensor_networks.CLIP}
    with open_engine(model, stage, plan=None, **keys) as engine:
        sent, found, per_step = [], [], []
        for step in range(3):
            before = calls(engine)
            count = 0
            for words in tensor_networks.samples(step).chunk(2):
                own = words.chunk(2)[engine.dp_rank]
                with AllReduces() as messages:
                    engine.backward(tensor_networks.loss_of(engine(own), own))
                count += messages.count
                engine.step()
            found.append(float(engine.last_step.grad_norm))
            sent.append((calls(engine) - before)[NAME])
            per_step.append(count)
        has_some = any(slots.numel for slots in addend_slots(engine))
        assert has_some or engine.dp_rank > 0  # the last shard has no such fragments
        assert sent == ([0, 1, 1] if has_some else [0, 0, 0])
        assert per_step[0] > per_step[1] == per_step[2] == 0
        assert found == pytest.approx(norms, rel=1e-14)
        for name, values in engine.iter_full_params():
            assert torch.allclose(values, expected[name], rtol=0, atol=1e-13), name


@pytest.mark.parametrize(
    ("stage", "device", "kv_heads"),
    covering([*itertools.product((1, 3), ("cpu", "nvme"), (4, 2))]),
)
@on_ranks(4)
def test_offload_changes_no_bit(stage, device, kv_heads, tmp_path):
    """Two key/value heads on four tensor ranks: a unit has two groups of ranks that add gradients."""
    tensor = 2 if kv_heads == 4 else 4
    where = {"device": device} | ({"nvme_path": str(tmp_path)} if device == "nvme" else {})
    zero = {"offload_optimizer": where} | ({"offload_param": where} if stage == 3 else {})
    kept = []
    for keys in ({}, {"zero_optimization": zero}):
        model = tiny_gpt(kv_heads=kv_heads).float()
        keys = {"gradient_accumulation_steps": 2, **keys}
        with open_engine(model, stage, tensor=tensor, **keys) as engine:
            for step in range(4):
                backward(engine, step)
                engine.step()
            norm = float(engine.last_step.grad_norm)
            kept.append(dict(engine.iter_full_params()) | {"norm": torch.tensor(norm)})
    assert all(torch.equal(values, kept[1][name]) for name, values in kept[0].items())


@pytest.mark.parametrize(("stage", "disk"), [(0, False), (2, False), (3, False), (3, True)])
@on_ranks(4)
def test_gradients_can_be_read_and_set_and_more_may_come(stage, disk, tmp_path):
    """A norm that is asked for before the step completes sums; later addends are added to them."""
    plain = tiny_gpt()
    where = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}} if disk else {}
    keys = {"gradient_clipping": 0.0, "zero_optimization": where}
    with open_engine(tiny_gpt(), stage, **keys) as engine:
        engine.accumulation.managed = False  # the program decides when a step ends
        norms = dict(engine.module.named_parameters())
        for seed in (0, 1):
            for rank in range(engine.dp_size):
                ids, labels = tokens(10 * seed + rank)
                (loss_of(plain(ids), labels) / engine.dp_size).backward()
            backward(engine, seed)
            for _ in range(2):
                for name, param in plain.named_parameters():
                    own = safe_get_full_grad(norms[name])
                    assert torch.allclose(own, param.grad, rtol=0, atol=1e-13), name
                engine._update.norm_before_step()
        expected = torch.full((16,), 3.0, dtype=torch.float64)
        safe_set_full_grad(norms["norm.weight"], expected)
        assert torch.equal(safe_get_full_grad(norms["norm.weight"]), expected)
        engine.step()


@on_ranks(4)
def test_a_gradient_set_before_the_sum_is_not_added_up():
    with open_engine(tiny_gpt(), 2, gradient_clipping=0.0) as engine:
        backward(engine)
        param = dict(engine.module.named_parameters())["norm.weight"]
        expected = torch.full((16,), 3.0, dtype=torch.float64)
        safe_set_full_grad(param, expected)
        assert torch.equal(safe_get_full_grad(param), expected)
        engine._update.norm_before_step()
        assert torch.equal(safe_get_full_grad(param), expected)


@on_ranks(4)
def test_frozen_parameters_take_no_part_and_an_overflow_skips_the_step_on_all_ranks():
    model = tiny_gpt().float().requires_grad_(False)
    for block in model.blocks:
        block.norm1.requires_grad_(True)
        block.mlp.requires_grad_(True)
    fp16 = {"enabled": True, "initial_scale_power": 8}
    with open_engine(model, 3, fp16=fp16) as engine:
        before = {name: values.clone() for name, values in engine.iter_full_params()}
        sizes = [slots.numel for slots in addend_slots(engine)]
        assert sum(sizes) <= sum(
            p.numel() for b in model.blocks for p in (*b.norm1.parameters(), b.mlp.down.bias)
        )
        ids, labels = tokens(engine.dp_rank)
        loss = loss_of(engine(ids), labels)
        engine.backward(loss * (float("inf") if engine.dp_rank == 1 else 1.0))
        engine.step()
        assert engine.skipped_steps == 1
        for name, values in engine.iter_full_params():
            assert torch.equal(values, before[name])
        backward(engine)
        engine.step()
        assert engine.skipped_steps == 1
        assert any(not torch.equal(v, before[n]) for n, v in engine.iter_full_params())
