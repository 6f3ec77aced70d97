"""Transformers' Trainer with ``ParallelismConfig(sp_size=...)`` trains as on one process, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import losses_and_norms, with_deepspeed
from zeroshard_testing.ranks import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")

SIZES = {
    "vocab_size": 51, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BATCH, STEPS, TOKENS = 2, 4, 8


def trainer(folder: Path, micro: int, accumulation: int, **more: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **SIZES),
        dtype=torch.float32,
        attn_implementation="sdpa",
    )
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 51, (BATCH * accumulation * STEPS * 2, TOKENS), generator=draw)
    labels = rows.clone()
    labels[::3, : TOKENS // 2 + 1] = -100  # the first rank has no label of some samples
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=micro, learning_rate=1e-2,
        max_steps=STEPS, gradient_accumulation_steps=accumulation, logging_steps=1, save_strategy="no",
        report_to=[], max_grad_norm=0.5, adam_epsilon=1e-3, disable_tqdm=True, seed=3,
        dataloader_pin_memory=False, per_device_eval_batch_size=2, **more,
    )  # fmt: skip
    data = [
        {"input_ids": row, "labels": own, "position_ids": torch.arange(TOKENS)}
        for row, own in zip(rows, labels, strict=True)
    ]
    return transformers.Trainer(model, args, train_dataset=data, eval_dataset=data[:8])


@with_deepspeed
def plain(root: Path, accumulation: int) -> None:
    """One process."""
    reference = trainer(root / "plain", BATCH, accumulation)
    # With sequence ranks the Trainer takes the mean of the means of micro-batches, not over all tokens.
    reference.model_accepts_loss_kwargs = False
    reference.train()
    weights = {name: param.detach() for name, param in reference.model.named_parameters()}
    torch.save(
        (losses_and_norms(reference), weights, reference.evaluate()["eval_loss"]), root / "plain.pt"
    )


@with_deepspeed
def shared(root: Path, stage: int, accumulation: int) -> None:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig

    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }
    asked = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=2,
        sp_handler=DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        ),
    )
    ours = trainer(root / "shared", BATCH, accumulation, deepspeed=config, parallelism_config=asked)
    ours.train()
    expected, weights, eval_loss = torch.load(root / "plain.pt")
    for (loss, norm), (own_loss, own_norm) in zip(expected, losses_and_norms(ours), strict=True):
        assert own_loss == pytest.approx(loss, rel=1e-5)
        assert own_norm == pytest.approx(norm, rel=1e-4)
    engine = ours.model_wrapped
    assert engine.mesh.text == "sequence 2"
    for name, full in engine.iter_full_params():
        error = (full - weights[name]).abs().max() / weights[name].abs().max()
        assert error <= 1e-4, f"{name}: {error}"
    assert ours.evaluate()["eval_loss"] == pytest.approx(eval_loss, rel=1e-5)
    engine.close()


@pytest.mark.parametrize(("stage", "accumulation"), [(3, 1), (1, 2)])
def test_the_trainer_with_sequence_ranks_is_that_of_one_process(tmp_path, stage, accumulation):
    run_ranks(plain, 1, tmp_path, accumulation, group=False, timeout=100)
    run_ranks(shared, 2, tmp_path, stage, accumulation, group=False, timeout=150)
