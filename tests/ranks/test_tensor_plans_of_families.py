"""Models of Transformers, cut by their own plans, compute what one process computes, in fp64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fused_models import whole_gradient
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from zeroshard_testing import on_ranks, run_ranks

from zeroshard import deepspeed, initialize
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.tensor_plan import apply_plan, is_cut

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NEOX = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
GPT2 = {
    "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50, "n_positions": 16,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXACT = 1e-12


def exact_norm(module: nn.Module, x: Tensor) -> Tensor:
    """The models' own forward computes in fp32, where a last bit that differs becomes 1e-8."""
    return module.weight * (x * torch.rsqrt(x.square().mean(-1, True) + module.variance_epsilon))


def build(family: str, **sizes: Any) -> nn.Module:
    """An untrained model in float64, the same in every process."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model(family, **sizes)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for module in model.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "Qwen3RMSNorm"):
            module.forward = partial(exact_norm, module)
    with torch.no_grad():  # norms begin with ones, which would hide a mistake
        for name, param in model.named_parameters():
            if "norm" in name:
                param.normal_(1.0, 0.1)
    return model.train()


@pytest.mark.parametrize(
    ("family", "keys", "cut_embedding"),
    [
        ("llama", {}, True),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, True),
        ("mistral", {}, True),
        ("qwen3", {"tie_word_embeddings": True}, True),
        ("gemma", {}, True),
        ("gemma2", {"query_pre_attn_scalar": 8}, True),
        ("phi3", {}, True),
        ("gpt_neox", {"tie_word_embeddings": True}, True),
        ("gpt2", {"vocab_size": 51}, True),
    ],
)
@on_ranks(2)
def test_a_family_by_its_own_plan(family, keys, cut_embedding):
    sizes = {"gpt_neox": NEOX, "gpt2": GPT2}.get(family, SIZES) | keys
    plain, cut = build(family, **sizes), build(family, **sizes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = apply_plan(cut, mesh, "auto").plan
    assert made.source == ("structure" if family == "gpt2" else "transformers")
    assert isinstance(cut.get_input_embeddings().weight, DTensor) is cut_embedding
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert (cut.get_output_embeddings().weight is cut.get_input_embeddings().weight) is tied
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[0, :2] = 0  # the padding token
    expected, found = (model(input_ids=ids, labels=ids) for model in (plain, cut))
    assert torch.allclose(found.logits, expected.logits, rtol=0, atol=EXACT)
    assert abs(found.loss.item() - expected.loss.item()) <= EXACT
    expected.loss.backward()
    found.loss.backward()
    own = dict(cut.named_parameters())
    for name, param in plain.named_parameters():
        scale = max(param.grad.abs().max(), 1e-3)
        error = (whole_gradient(own[name]) - param.grad).abs().max() / scale
        assert error <= EXACT, f"{name}: {error}"


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_a_family_trains_on_tensor_and_data_ranks_as_in_one_process(stage):
    sizes = SIZES | {"tie_word_embeddings": True}
    plain, cut = build("qwen3", **sizes), build("qwen3", **sizes)
    settings = {"lr": 1e-2, "eps": 1e-3}
    optimizer = torch.optim.AdamW(plain.parameters(), **settings)
    norms = []
    for step in range(3):
        for rank in range(2):
            ids = batch(step, rank)
            (plain(input_ids=ids, labels=ids).loss / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    assert deepspeed.tp_model_init(cut, tp_size=2, dtype=torch.float64) is cut
    engine, *_ = initialize(
        model=cut,
        optimizer=torch.optim.AdamW(cut.parameters(), **settings),
        mesh=Mesh(data_shard=2, tensor=2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.05,
            "unit_min_numel": 1,
            "zero_optimization": {"stage": stage},
        },
    )
    with engine:
        for step in range(3):
            ids = batch(step, engine.mesh.dp_rank(dist.get_rank()))
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            assert engine.last_step.grad_norm == pytest.approx(norms[step], rel=1e-14)
        own = {name: full.detach().clone() for name, full in engine.iter_full_params()}
    for name, param in plain.named_parameters():
        error = (own[name] - param).abs().max() / param.abs().max()
        assert error <= EXACT, f"{name}: {error}"


@pytest.mark.parametrize("asks", ["plan", "autotp_size", "optimizer", "model_parameters"])
@on_ranks(2)
def test_the_engine_cuts_a_model_that_is_asked_to_be_cut(asks):
    plain, model = build("llama", **SIZES), build("llama", **SIZES)
    settings = {"lr": 1e-2, "eps": 1e-3}
    adamw = torch.optim.AdamW(plain.parameters(), **settings)
    for step in range(2):
        plain(input_ids=batch(step, 0), labels=batch(step, 0)).loss.backward()
        adamw.step()
        adamw.zero_grad()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3},
    }
    by_name = {"optimizer": {"type": "AdamW", "params": {**settings, "weight_decay": 1e-2}}}
    options = {
        "plan": {"config": {**config, **by_name, "parallel": {"tensor": 2}}, "plan": "auto"},
        "autotp_size": {"config": {**config, **by_name, "tensor_parallel": {"autotp_size": 2}}},
        "optimizer": {
            "config": {**config, "tensor_parallel": {"autotp_size": 2}},
            "optimizer": torch.optim.AdamW(model.parameters(), **settings),
        },
        "model_parameters": {
            "config": {**config, **by_name, "tensor_parallel": {"autotp_size": 2}},
            "model_parameters": model.parameters(),
        },
    }[asks]
    engine, *_ = initialize(model=model, **options)
    with engine:
        assert is_cut(model)
        assert engine.mesh == Mesh(tensor=2)
        for step in range(2):
            ids = batch(step, 0)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        own = {name: full.detach().clone() for name, full in engine.iter_full_params()}
    for name, param in plain.named_parameters():
        assert (own[name] - param).abs().max() <= EXACT * param.abs().max(), name


@on_ranks(2)
def test_a_plan_for_a_model_that_is_cut_is_refused():
    model = build("llama", **SIZES)
    deepspeed.tp_model_init(model, 2, None)
    config = {"train_micro_batch_size_per_gpu": 2, "parallel": {"tensor": 2}}
    with pytest.raises(UsageError, match=r"plan=\.\.\..*is cut over tensor ranks already"):
        initialize(model=model, config=config, plan="auto")


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


@on_ranks(2)
def test_tp_model_init_says_what_does_not_fit():
    model = build("llama", **SIZES)
    with pytest.raises(UsageError, match=r"tp_size = 3, but 2 rank\(s\) were started"):
        deepspeed.tp_model_init(model, 3, torch.float64)
    with pytest.raises(UnsupportedError, match=r"has the keys \['partition_config'\]"):
        deepspeed.tp_model_init(model, 2, torch.float64, {"partition_config": {}})
    with pytest.raises(UsageError, match="tp_size = 4, but tp_group has 2 ranks"):
        deepspeed.tp_model_init(model, 4, torch.float64, tp_group=dist.group.WORLD)
    assert deepspeed.tp_model_init(model, 1, torch.float32) is model
    assert not is_cut(model)
    assert next(model.parameters()).dtype == torch.float32
    deepspeed.tp_model_init(model, 2, torch.float64, tp_group=dist.group.WORLD)
    assert is_cut(model)
    with pytest.raises(UsageError, match=r"is a DTensor with placements .* been cut already"):
        deepspeed.tp_model_init(model, 2, None)


@pytest.mark.parametrize(
    ("family", "keys"),
    [("llama", {}), ("qwen3", {"attention_bias": True}), ("gemma", {"num_key_value_heads": 1})],
)
@on_ranks(4)
def test_ranks_share_key_value_heads(family, keys):
    """Two heads on four ranks, or one on all of them."""
    sizes = SIZES | keys
    plain, cut = build(family, **sizes), build(family, **sizes)
    apply_plan(cut, init_device_mesh("cpu", (4,)), "auto")
    heads = 2 if family != "gemma" else 1
    weight = cut.model.layers[0].self_attn.k_proj.weight
    assert weight.to_local().shape == (8, 32)
    assert torch.equal(weight.full_tensor(), plain.model.layers[0].self_attn.k_proj.weight)
    assert weight.shape == (8 * heads, 32)
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    for model in (plain, cut):
        model(input_ids=ids, labels=ids).loss.backward()
    own = dict(cut.named_parameters())
    for name, param in plain.named_parameters():
        scale = max(param.grad.abs().max(), 1e-3)
        error = (whole_gradient(own[name]) - param.grad).abs().max() / scale
        assert error <= EXACT, f"{name}: {error}"


def trained(engine: Any, begin: int, end: int) -> list[float]:
    norms = []
    for step in range(begin, end):
        ids = batch(step, engine.dp_rank)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        norms.append(engine.last_step.grad_norm)
    return norms


def plainly_trained(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), **LIKE)
    norms = []
    for step in range(steps):
        ids = batch(step, 0)
        model(input_ids=ids, labels=ids).loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


LIKE = {"lr": 1e-2, "eps": 1e-3}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.05,
    "unit_min_numel": 1,
    "optimizer": {"type": "AdamW", "params": {**LIKE, "weight_decay": 1e-2}},
}


@pytest.mark.parametrize("heads", [1, 2])
def test_shared_heads_train_and_are_saved_once(tmp_path, heads):
    run_ranks(trains_shared, 4, heads, tmp_path)
    run_ranks(continues_shared, 1, heads, tmp_path)


def trains_shared(heads: int, root: Path) -> None:
    sizes = SIZES | {"num_key_value_heads": heads}
    for stage in (0, 1, 2, 3):
        plain, model = build("qwen3", **sizes), build("qwen3", **sizes)
        norms = plainly_trained(plain, 3)
        config = {**CONFIG, "zero_optimization": {"stage": stage}, "parallel": {"tensor": 4}}
        engine, *_ = initialize(model=model, config=config, plan="auto")
        with engine:
            assert trained(engine, 0, 3) == pytest.approx(norms, rel=1e-14)
            own = {name: full.detach().clone() for name, full in engine.iter_full_params()}
            for name, param in plain.named_parameters():
                assert own[name].shape == param.shape
                error = (own[name] - param).abs().max() / param.abs().max()
                assert error <= EXACT, f"{name}: {error}"
            for name, param in model.named_parameters():
                if "k_proj" in name and stage < 3:  # copies are equal bit for bit
                    row = param.to_local().detach().contiguous()
                    rows = [torch.empty_like(row) for _ in range(4)]
                    dist.all_gather(rows, row)
                    for rank in range(4):
                        assert torch.equal(rows[rank], rows[rank - rank % (4 // heads)])
            if stage == 3:
                engine.save_checkpoint(root / "run", "third")
                if dist.get_rank() == 0:
                    torch.save(own, root / "third.pt")


def continues_shared(heads: int, root: Path) -> None:
    sizes = SIZES | {"num_key_value_heads": heads}
    plain, model = build("qwen3", **sizes), build("qwen3", **sizes)
    norms = plainly_trained(plain, 5)
    engine, *_ = initialize(model=model, config=CONFIG)
    with engine:
        engine.load_checkpoint(root / "run", "third")
        saved = torch.load(root / "third.pt")
        for name, full in engine.iter_full_params():
            assert torch.equal(full, saved[name]), name
        assert trained(engine, 3, 5) == pytest.approx(norms[3:], rel=1e-12)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_gpt2_trains_by_autotp_size_as_in_one_process(stage):
    plain, model = build("gpt2", **GPT2), build("gpt2", **GPT2)
    optimizer = torch.optim.AdamW(plain.parameters(), **LIKE)
    norms = []
    for step in range(3):
        for rank in range(2):
            ids = batch(step, rank)
            (plain(input_ids=ids, labels=ids).loss / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    tensor = {"tensor_parallel": {"autotp_size": 2}}
    engine, *_ = deepspeed.initialize(model=model, config={**config, **tensor})
    with engine:
        assert model.lm_head.weight is model.transformer.wte.weight
        found = trained(engine, 0, 3)
        assert found == pytest.approx(norms, rel=1e-14)
        for name, full in engine.iter_full_params():
            param = plain.get_parameter(name)
            assert (full - param).abs().max() <= EXACT * param.abs().max(), name


@on_ranks(2)
def test_families_without_a_plan_that_fits_are_refused_by_name():
    mesh = init_device_mesh("cpu", (2,))
    experts = build("mixtral", num_local_experts=2, **SIZES)
    with pytest.raises(
        UnsupportedError,
        match=r"by the style 'packed_colwise'.*Mixtures of experts are not cut over tensor ranks",
    ):
        apply_plan(experts, mesh, "auto")
    llama = build("llama", **SIZES)
    with pytest.raises(
        UsageError, match="LlamaForCausalLM is a model of Transformers, and the style"
    ):
        apply_plan(llama, mesh, {"model.norm": "sequence"})
