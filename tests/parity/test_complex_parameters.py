"""Complex parameters: what an optimizer computes on them, files, and access to their values.

The case "complex" of the edge-case models runs through the other tests of this folder too.
"""

from __future__ import annotations

from functools import partial

import kit
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.edge_case_models import CASES
from support.parity import (
    assert_bit_equal,
    assert_close_trajectory,
    cast_parameters,
    engine_run,
    make_batches,
    reference_run,
    sgd,
)
from torch import nn
from zeroshard_testing import on_ranks
from zeroshard_testing.ranks import run_ranks

from zeroshard.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.optim.fragment_norms import in_order_of_clipping, norm_of
from zeroshard.zero import (
    GatheredParameters,
    Init,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

CASE = CASES["complex"]
STAGES = (0, 1, 2, 3)
DTYPES = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@pytest.mark.parametrize("stage", STAGES)
def test_sgd_on_one_rank_has_the_bits_of_plain_pytorch(stage):
    """Torch's SGD rounds complex numbers otherwise than pairs of real ones, so it must get them."""
    batches = make_batches(CASE, steps=3, world=1, accumulation=2)
    run = engine_run(CASE, sgd(1e-3), batches, stage=stage, clip=0.3)
    assert_bit_equal(run, reference_run(CASE, sgd(1e-3), batches, clip=0.3))


@pytest.mark.parametrize("other", [torch.complex64, torch.float64, torch.complex128], ids=str)
def test_norms_of_two_dtypes_are_added_in_the_order_of_clipping(other):
    torch.manual_seed(0)
    differ = 0
    for _ in range(20):
        dtypes = {at: other if at % 3 else torch.float32 for at in range(40)}
        grads = [torch.randn(5, dtype=dtype) for dtype in dtypes.values()]
        norms = [*enumerate(map(norm_of, grads))][::-1]
        ordered = [norm for _, norm in in_order_of_clipping(norms, dtypes)]
        expected = torch.nn.utils.get_total_norm(grads)
        assert torch.equal(torch.linalg.vector_norm(torch.stack(ordered)), expected)
        by_place = torch.stack([norm for _, norm in sorted(norms, key=lambda pair: pair[0])])
        differ += not torch.equal(torch.linalg.vector_norm(by_place), expected)
    assert differ  # the order matters


def sgd_is_that_of_one_process(world: int, transport: str) -> None:
    batches = make_batches(CASE, steps=3, world=world, accumulation=2)
    keys = {"transport": transport, "prescale_gradients": True}
    keys["zero_optimization"] = {"reduce_bucket_size": 100}
    expected = reference_run(CASE, sgd(1e-3), batches, clip=0.3, precision="fp64")
    for stage in STAGES:
        run = engine_run(
            CASE, sgd(1e-3), batches, stage=stage, clip=0.3, precision="fp64", config=keys
        )
        assert_close_trajectory(run, expected, rtol=1e-12)


@pytest.mark.parametrize("transport", ["shm", "p2p", "stock"])
@on_ranks(2)
def test_every_transport_adds_complex_gradients(transport):
    sgd_is_that_of_one_process(2, transport)


@on_ranks(3)
def test_three_ranks_equal_one_process():
    sgd_is_that_of_one_process(3, "stock")


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))  # a unit, no padding

    def forward(self, x):
        return (x @ self.weight.conj()).abs()


def test_a_gradient_that_is_a_conjugated_view_has_its_values():
    weight = torch.randn(8, 8, dtype=torch.complex64)
    models = [Conjugated(), Conjugated()]
    for model in models:
        model.weight.data.copy_(weight)
        model.weight.register_hook(lambda grad: grad.resolve_conj().conj())
    x = torch.randn(2, 8, dtype=torch.complex64)
    optimizer = torch.optim.SGD(
        models[0].parameters(), lr=0.1
    )  # torch's Adam refuses this gradient
    models[0](x).sum().backward()
    assert models[0].weight.grad.is_conj()
    optimizer.step()
    with kit.engine(models[1], 2, optimizer=partial(torch.optim.SGD, lr=0.1)) as engine:
        engine.backward(engine(x).sum())
        engine.step()
    assert torch.equal(models[0].weight, models[1].weight)


# ---------------------------------------------------------------------- files


def opened(stage: int, dtype: torch.dtype, **keys):
    return kit.engine(cast_parameters(CASE.build(), dtype), stage, **keys)


def train(engine, dtype: torch.dtype) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    batch = CASE.make_batch(rank, 0, torch.Generator().manual_seed(rank))
    engine.backward(CASE.loss(engine, [tensor.to(dtype) for tensor in batch]))
    engine.step()


def state(engine) -> dict:
    """Masters and moments by name, also of frozen parameters."""
    keys = ("exp_avg", "exp_avg_sq")
    return {
        name: [full.clone()]
        if not param.requires_grad
        else [full.clone(), *(safe_get_full_optimizer_state(param, key) for key in keys)]
        for (name, full), param in zip(
            engine.iter_full_params(), engine.module.parameters(), strict=True
        )
    }


def saved(path: str, dtype: torch.dtype) -> dict:
    disk = {"device": "nvme", "nvme_path": path}
    with opened(3, dtype, zero_optimization={"offload_optimizer": disk}) as engine:
        train(engine, dtype)
        engine.save_checkpoint(path)
        engine.save_16bit_model(path, "weights.bin")
        if dtype == torch.float32:
            engine.save_16bit_model(path, "weights.safetensors")
        else:
            with pytest.raises(CheckpointError, match=r"is complex128, .* torch.save instead"):
                engine.save_16bit_model(path, "weights.safetensors")
        return state(engine)


def loaded(path: str, dtype: torch.dtype, stage: int) -> dict:
    host = {"offload_optimizer": {"device": "cpu"}} if stage else {}
    with opened(stage, dtype, zero_optimization=host) as engine:
        with torch.no_grad():
            for param in engine.module.parameters():
                safe_set_full_fp32_param(param, param * 0) if param.requires_grad else None
        engine.load_checkpoint(path)
        found = state(engine)
        train(engine, dtype)
        return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_number_of_ranks_loads_every_bit(dtype, tmp_path):
    path = str(tmp_path)
    expected = run_ranks(saved, 2, path, dtype)[0]
    assert {tensors[0].dtype for tensors in expected.values()} == {dtype, DTYPES[dtype]}
    for world, stage in ((3, 1), (1, 0)):
        found = run_ranks(loaded, world, path, dtype, stage)[0]
        for name, tensors in expected.items():
            for a, b in zip(tensors, found[name], strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), name
    files = [torch.load(tmp_path / "weights.bin"), get_fp32_state_dict_from_zero_checkpoint(path)]
    if dtype == torch.float32:
        files.append(load_file(tmp_path / "weights.safetensors"))
    for weights in files:
        for name, tensors in expected.items():
            assert torch.equal(weights[name], tensors[0].to(weights[name].dtype)), name
            assert weights[name].is_complex() == tensors[0].is_complex()


# ---------------------------------------------------------------------- access


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_full_values_are_read_and_written(stage):
    with opened(stage, torch.float64) as engine:
        train(engine, torch.float64)
        param, real = engine.module.blocks[1].weight, engine.module.project.weight
        rank = dist.get_rank()
        batch = CASE.make_batch(rank, 0, torch.Generator().manual_seed(rank))
        engine.backward(CASE.loss(engine, [tensor.double() for tensor in batch]))
        grad = safe_get_full_grad(param)
        assert grad.dtype == torch.complex128
        assert grad.shape == param.shape
        safe_set_full_grad(param, grad.conj())
        assert torch.equal(safe_get_full_grad(param), grad.conj())
        with pytest.raises(UsageError, match="the parameter is real, so the imaginary part"):
            safe_set_full_grad(real, torch.full(real.shape, 1j))
        moment = safe_get_full_optimizer_state(param, "exp_avg")
        safe_set_full_optimizer_state(param, moment * 1j, "exp_avg")
        assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), moment * 1j)
        safe_set_full_fp32_param(param, grad)
        assert torch.equal(safe_get_full_fp32_param(param), grad)
        with GatheredParameters(param, modifier_rank=0):
            if rank == 0:
                param.data.mul_(1j)
        with GatheredParameters(param):
            assert torch.equal(param, grad * 1j)
        engine.step()
        assert not torch.equal(safe_get_full_fp32_param(param), grad * 1j)


@on_ranks(2)
def test_init_shards_complex_parameters_and_casts_only_real_ones():
    expected = dict(CASE.build().named_parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        with Init(dtype=torch.bfloat16):
            model = type(CASE.build())()
    for name, param in model.named_parameters():
        is_complex = expected[name].is_complex()
        assert param.dtype == (torch.complex64 if is_complex else torch.bfloat16)
        with GatheredParameters(param):
            assert not is_complex or torch.equal(param, expected[name])
    with kit.engine(model, 3, "bf16") as engine:
        train(engine, torch.bfloat16)
