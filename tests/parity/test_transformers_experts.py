"""Ranks that share the experts of Transformers models, by the models' own plans, train as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import config
from support.covering import each_value
from torch.nn import functional as F
from zeroshard_testing import on_ranks, run_ranks

import zeroshard
from zeroshard.errors import UsageError
from zeroshard.experts.stacked import SharedStack

transformers = pytest.importorskip("transformers")

VOCAB, SAMPLES, TOKENS, DATA, STEPS, CLIP, LR = 32, 2, 7, 4, 3, 0.3, 1e-2
SIZES: dict[str, Any] = dict(  # noqa: C408
    vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    num_experts_per_tok=2, max_position_embeddings=32, tie_word_embeddings=False, use_cache=False,
    attn_implementation="eager", pad_token_id=0,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 12, "num_local_experts": 4},
    "Qwen3Moe": {"intermediate_size": 12, "moe_intermediate_size": 8, "num_experts": 4, "head_dim": 4},
    "DeepseekV3": {
        "intermediate_size": 12, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4,
    },
    "GptOss": {
        "intermediate_size": 12, "num_local_experts": 4, "head_dim": 4, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Olmoe": {"intermediate_size": 12, "num_experts": 4},
}  # fmt: skip


def model(family: str) -> Any:
    made = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    made._experts_implementation = "eager"  # the others have no fp64
    torch.manual_seed(1)
    return getattr(transformers, f"{family}ForCausalLM")(made).double()


def words() -> torch.Tensor:
    draw = torch.Generator().manual_seed(7)
    return torch.randint(1, VOCAB, (STEPS, DATA, SAMPLES, TOKENS), generator=draw)


def loss_of(net: Any, own: torch.Tensor) -> torch.Tensor:
    logits = net(input_ids=own).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), own[:, 1:].flatten())


def in_one_process(family: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    net, norms = model(family), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    for step in words():
        optimizer.zero_grad()
        for own in step:
            (loss_of(net, own) / DATA).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}, norms


def opened(family: str, stage: int, size: int, world: int, **keys: Any) -> zeroshard.Engine:
    asked = config(
        stage,
        train_micro_batch_size_per_gpu=SAMPLES,
        gradient_accumulation_steps=DATA // world,
        gradient_clipping=CLIP,
        optimizer={"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        expert_parallel={"enabled": True, "autoep_size": size},
        **keys,
    )
    return zeroshard.initialize(model=model(family), config=asked)[0]


def train(engine: zeroshard.Engine, steps: slice) -> list[float]:
    norms = []
    for step in words()[steps]:
        for own in step[engine.dp_rank :: engine.dp_size]:
            engine.backward(loss_of(engine, own))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def check(engine: zeroshard.Engine, family: str, norms: list[float]) -> None:
    expected, plain = in_one_process(family)
    assert norms == pytest.approx(plain[-len(norms) :], rel=1e-12)
    assert min(plain) > CLIP
    found = dict(engine.iter_full_params())
    assert found.keys() == expected.keys()
    for name, param in found.items():
        torch.testing.assert_close(param.detach(), expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "size", "stage"),
    each_value([(f, size, stage) for f in FAMILIES for size in (2, 4) for stage in (3, 1, 2, 0)]),
)
@on_ranks(4)
def test_families_equal_one_process(family, size, stage):
    engine = opened(family, stage, size, 4)
    try:
        check(engine, family, train(engine, slice(0, STEPS)))
    finally:
        engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(4)
def test_replicas_share_stacked_experts(stage):
    engine = opened("Qwen3Moe", stage, 2, 4, parallel={"data_replicate": 2})
    try:
        check(engine, "Qwen3Moe", train(engine, slice(0, STEPS)))
    finally:
        engine.close()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_a_rank_whose_experts_get_no_token_takes_part(stage):
    """Its backward must send, too."""

    def starving(family: str, first: Any = model) -> Any:
        net = first(family)
        with torch.no_grad():
            net.model.embed_tokens.weight[:, 0] += 10
            for layer in net.model.layers:
                layer.mlp.gate.weight.mul_(0.1)[2:, 0] -= 100
        return net

    calls = []
    run_experts = SharedStack._run

    def counted(self: SharedStack, rows: Any) -> Any:
        calls.append(sum(each.shape[-2] for each in rows))
        return run_experts(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedStack, "_run", counted)
        patch.setitem(globals(), "model", starving)
        engine = opened("Mixtral", stage, 2, 4)
        try:
            check(engine, "Mixtral", train(engine, slice(0, STEPS)))
            assert any(calls) is (engine.global_rank % 2 == 0)
        finally:
            engine.close()


def run(steps: slice, size: int, world: int, stage: int, root: Path) -> None:
    engine = opened("Mixtral", stage, size, world)
    try:
        if steps.start:
            engine.load_checkpoint(root)
        norms = train(engine, steps)
        if steps.stop == STEPS:
            check(engine, "Mixtral", norms)
        else:
            engine.save_checkpoint(root)
    finally:
        engine.close()


@pytest.mark.parametrize(("saved", "loaded"), [((4, 2), (2, 1)), ((2, 1), (4, 4))])
def test_other_ranks_continue(saved, loaded, tmp_path):
    run_ranks(run, saved[0], slice(0, 2), saved[1], saved[0], 3, tmp_path)
    run_ranks(run, loaded[0], slice(2, 3), loaded[1], loaded[0], 1, tmp_path)


@pytest.mark.parametrize(
    ("family", "size", "stage"), [("Mixtral", 2, 3), ("GptOss", 4, 1), ("DeepseekV3", 2, 1)]
)
@on_ranks(4)
def test_all_experts_are_exported(family, size, stage, tmp_path):
    engine = opened(family, stage, size, 4)
    try:
        train(engine, slice(0, STEPS))
        engine.save_pretrained(tmp_path)
        state = engine._consolidated_16bit_state_dict()
        if engine.is_main_rank:
            import tqdm  # with Transformers

            tqdm.tqdm.monitor_interval = 0  # else a thread of it stays
            expected, _ = in_one_process(family)
            whole = getattr(transformers, f"{family}ForCausalLM").from_pretrained(tmp_path)
            assert list(state) == list(model(family).state_dict())
            for found in (dict(whole.named_parameters()), state):
                for name, param in expected.items():
                    torch.testing.assert_close(found[name].detach(), param, rtol=0, atol=1e-12)
    finally:
        engine.close()


@on_ranks(2)
def test_a_model_without_experts_and_a_wrong_number_are_refused():
    sizes = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"}
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=8))
    asked = {"train_micro_batch_size_per_gpu": 1, "parallel": {"expert": 2}}
    with pytest.raises(UsageError, match="no layer of the model has experts"):
        zeroshard.initialize(model=dense, config=asked)
    odd = transformers.MixtralConfig(**SIZES, intermediate_size=8, num_local_experts=3)
    with pytest.raises(UsageError, match="has 3 experts, which 2 ranks"):
        zeroshard.initialize(model=transformers.MixtralForCausalLM(odd), config=asked)
