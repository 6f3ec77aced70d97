"""The Trainer with ``tensor_parallel.autotp_size`` trains as on one process, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import losses_and_norms, with_deepspeed
from support.covering import sampled
from zeroshard_testing.ranks import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")

SIZES = {
    "vocab_size": 51, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"vocab_size": 51, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
BATCH, STEPS = 4, 4


def trainer(family: str, folder: str, micro: int, config: dict[str, Any] | None) -> Any:
    import transformers

    shape = GPT2 if family == "gpt2" else SIZES
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **shape), dtype=torch.float32
    )
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 51, (BATCH * STEPS, 9), generator=draw)
    args = transformers.TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=micro, learning_rate=1e-2, max_steps=STEPS,
        logging_steps=1, save_strategy="no", report_to=[], max_grad_norm=0.5, adam_epsilon=1e-3,
        disable_tqdm=True, seed=3, dataloader_pin_memory=False, deepspeed=config,
        per_device_eval_batch_size=micro,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(model, args, train_dataset=data, eval_dataset=data[:8])


@with_deepspeed
def plain(family: str, root: Path) -> None:
    """One process."""
    reference = trainer(family, str(root / "plain"), BATCH, None)
    reference.train()
    weights = {name: param.detach() for name, param in reference.model.named_parameters()}
    torch.save(
        (losses_and_norms(reference), weights, reference.evaluate()["eval_loss"]), root / "plain.pt"
    )


@with_deepspeed
def cut(family: str, tensor: int, stage: int, root: Path) -> None:
    import os

    from safetensors.torch import load_file

    ranks = int(os.environ["WORLD_SIZE"])
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "tensor_parallel": {"autotp_size": tensor},
    }
    ours = trainer(family, str(root / "cut"), BATCH * tensor // ranks, config)
    ours.train()
    expected, weights, eval_loss = torch.load(root / "plain.pt")
    for (loss, norm), (own_loss, own_norm) in zip(expected, losses_and_norms(ours), strict=True):
        assert own_loss == pytest.approx(loss, rel=1e-5)
        assert own_norm == pytest.approx(norm, rel=1e-4)
    engine = ours.model_wrapped
    assert engine.mesh.tensor == tensor
    for name, full in engine.iter_full_params():
        error = (full - weights[name]).abs().max() / weights[name].abs().max()
        assert error <= 1e-4, f"{name}: {error}"
    assert ours.evaluate()["eval_loss"] == pytest.approx(eval_loss, rel=1e-5)
    ours.save_model()
    if int(os.environ["RANK"]) == 0:
        saved = load_file(str(root / "cut" / "model.safetensors"))
        for name, value in saved.items():
            assert torch.allclose(value, weights[name], rtol=1e-3, atol=1e-5), name
        assert "lm_head.weight" not in saved
    engine.close()


@pytest.mark.parametrize(
    ("family", "ranks", "tensor", "stage"),
    sampled(
        [("llama", 4, 2, 3), ("qwen3", 4, 4, 2), ("gemma", 2, 2, 0), ("gpt2", 4, 2, 1)], every=2
    ),
)
def test_the_trainer_with_autotp_size_is_that_of_one_process(
    tmp_path, family, ranks, tensor, stage
):
    run_ranks(plain, 1, family, tmp_path, group=False, timeout=100)
    run_ranks(cut, ranks, family, tensor, stage, tmp_path, group=False, timeout=150)
