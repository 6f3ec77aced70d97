"""LoRA through PEFT trains while the frozen model is sharded. A save contains only the adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import with_deepspeed
from zeroshard_testing import on_ranks
from zeroshard_testing.ranks import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")

STAGES = [0, 1, 2, 3]
rank_test = on_ranks(2, group=False, timeout=120)


@with_deepspeed
def save_llama(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    shape = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, deepspeed_on_ranks: None) -> str:
    """A folder with a randomly initialized Llama."""
    folder = str(tmp_path_factory.mktemp("llama"))
    run_ranks(save_llama, 1, folder, group=False)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }


def with_adapters(base: str, stage: int, checkpointing: bool = False, **lora: Any) -> Any:
    """A PEFT model; at stage 3 its frozen part is loaded sharded."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(config(stage))  # from_pretrained looks for it
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(7)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **lora}
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    model.alive = alive
    return model


def trained(model: Any, stage: int, steps: int = 4) -> tuple[Any, list[float]]:
    import deepspeed

    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=config(stage)
    )
    return engine, go_on(engine, steps)


def go_on(engine: Any, steps: int) -> list[float]:
    losses = []
    dice = torch.Generator().manual_seed(engine.global_rank + 10 * engine.global_steps)
    for _ in range(steps):
        tokens = torch.randint(3, 50, (2, 8), generator=dice)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
    return losses


@rank_test
@with_deepspeed
def test_losses_are_the_same_at_every_stage_with_and_without_checkpointing(base):
    import deepspeed

    deepspeed.init_distributed()
    found = {}
    for stage in STAGES:
        for checkpointing in (False, True):
            engine, losses = trained(with_adapters(base, stage, checkpointing), stage)
            found[stage, checkpointing] = losses
            engine.destroy()
    for case, losses in found.items():
        assert losses == pytest.approx(found[0, False], rel=1e-5), case
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("stage", [2, 3])
@rank_test
@with_deepspeed
def test_adapters_are_saved_alone_and_loaded_onto_a_whole_model(stage, base, folder):
    import deepspeed
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    deepspeed.init_distributed()
    model = with_adapters(base, stage, modules_to_save=["lm_head"])
    frozen = sum(not p.requires_grad for p in model.parameters())
    engine, _ = trained(model, stage)
    state = (
        engine._zero3_consolidated_16bit_state_dict() if stage == 3 else engine.module.state_dict()
    )
    if engine.global_rank == 0:
        engine.module.save_pretrained(folder, state_dict=state)
        names = {path.name for path in Path(folder).iterdir()}
        assert "adapter_model.safetensors" in names
        assert not names & {"model.safetensors", "pytorch_model.bin"}
    torch.distributed.barrier()
    tokens = torch.arange(3, 11)[None]
    engine.eval()
    with torch.no_grad():
        wanted = engine(input_ids=tokens).logits
    assert frozen > 10
    unset_hf_deepspeed_config()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, wanted, rtol=1e-4, atol=1e-5)
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
@rank_test
@with_deepspeed
def test_a_checkpoint_without_the_frozen_part_goes_on(stage, base, folder):
    import deepspeed

    deepspeed.init_distributed()
    engine, _ = trained(with_adapters(base, stage), stage)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    wanted = go_on(engine, 3)
    engine.destroy()
    other, _ = trained(with_adapters(base, stage), stage, steps=1)
    other.load_checkpoint(folder, load_module_strict=False)
    assert go_on(other, 3) == wanted
    other.destroy()


@rank_test
@with_deepspeed
def test_an_adapter_is_merged_into_a_whole_model_after_training(base, folder):
    """``merge_and_unload`` needs whole weights: they are there inside ``GatheredParameters``."""
    import deepspeed

    deepspeed.init_distributed()
    model = with_adapters(base, 3)
    engine, _ = trained(model, 3)
    engine.eval()
    tokens = torch.arange(3, 11)[None]
    with torch.no_grad():
        wanted = engine(input_ids=tokens).logits
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        merged = {
            name: module.weight + module.get_delta_weight("default")
            for name, module in model.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert len(merged) == 6
    assert all(
        value.shape == whole[f"{name}.base_layer.weight"].shape for name, value in merged.items()
    )
    assert wanted.shape == (1, 8, 50)
    engine.destroy()
