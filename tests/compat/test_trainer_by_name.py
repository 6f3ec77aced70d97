"""Transformers' Trainer that selects ZeroShard by name trains as under plain data parallelism."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from by_name import by_name, no_deepspeed_on_ranks, rows, tiny  # noqa: F401
from torch import nn
from zeroshard_testing import on_ranks
from zeroshard_testing.ranks import run_ranks

from zeroshard.errors import UsageError
from zeroshard.integrations.resuming import newest_checkpoint

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_deepspeed_on_ranks")

STAGES = [0, 1, 2, 3]
rank_test = on_ranks(2, group=False, timeout=100)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def data(count: int = 24) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in rows(count)]


def arguments(folder: str, **options: Any) -> dict[str, Any]:
    """Options of TrainingArguments."""
    return {
        "output_dir": folder, "use_cpu": True, "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "max_grad_norm": 0.5, "lr_scheduler_type": "linear", "disable_tqdm": True, "seed": 3,
        "dataloader_pin_memory": False,
        **options,
    }  # fmt: skip


def plain_trainer(folder: str, model: Any = None, **options: Any) -> Any:
    import transformers
    from by_name import forget

    forget()
    args = transformers.TrainingArguments(**arguments(folder, **options))
    return transformers.Trainer(model or tiny(), args, train_dataset=data(), eval_dataset=data(8))


def sharded_trainer(
    folder: str, stage: int, model: Any = None, config: Any = None, **options: Any
) -> Any:
    import transformers
    from by_name import forget

    from zeroshard.integrations.transformers import Trainer

    forget()
    args = transformers.TrainingArguments(**arguments(folder, **options))
    zero = {"zero_optimization": {"stage": stage}, "unit_min_numel": 1}
    return Trainer(
        model or tiny(), args, zeroshard_config={**zero, **(config or {})},
        train_dataset=data(), eval_dataset=data(8),
    )  # fmt: skip


def logged(trainer: Any, what: str) -> list[float]:
    return [row[what] for row in trainer.state.log_history if what in row]


def assert_same(found: Any, wanted: Any) -> None:
    assert logged(wanted, "loss")
    for what, relative in (("loss", 1e-5), ("grad_norm", 2e-5), ("learning_rate", 0)):
        assert logged(found, what) == pytest.approx(logged(wanted, what), rel=relative), what


@pytest.mark.parametrize("stage", STAGES)
@rank_test
@by_name
def test_losses_norms_rates_and_evaluation_are_those_of_ddp(stage, folder):
    """Twelve rows a rank in steps of four: three steps; and five batches in steps of two."""
    for rest in ({}, {"max_steps": 5, "gradient_accumulation_steps": 4})[: 2 if stage else 1]:
        wanted = plain_trainer(folder, **rest)
        wanted.train()
        trainer = sharded_trainer(folder, stage, **rest)
        trainer.train()
        assert trainer.model_wrapped.global_steps == wanted.state.global_step
        assert_same(trainer, wanted)
        found = trainer.evaluate()["eval_loss"]
        assert found == pytest.approx(wanted.evaluate()["eval_loss"], rel=1e-5)
        trainer.model_wrapped.close()


@by_name
def trained_and_saved(folder: str, stage: int) -> list[float]:
    trainer = sharded_trainer(folder, stage, save_strategy="steps", save_steps=2, max_steps=6)
    trainer.train()
    seen = logged(trainer, "loss") + logged(trainer, "learning_rate")
    trainer.model_wrapped.close()
    return seen


@by_name
def resumed(folder: str, stage: int, options: dict[str, Any]) -> list[float]:
    """A program with other initial weights. All state comes from the checkpoint."""
    trainer = sharded_trainer(folder, stage, tiny(seed=8), max_steps=6, **options)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    seen = logged(trainer, "loss") + logged(trainer, "learning_rate")
    trainer.model_wrapped.close()
    return seen


@pytest.mark.parametrize("in_evaluation", [False, True])
@rank_test
@by_name
def test_a_signal_to_one_rank_saves_a_checkpoint_from_which_all_resume(in_evaluation, folder):
    from transformers import TrainerCallback

    class Signal(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_evaluate = in_evaluation and state.global_step == 2
            if state.global_step == 2 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            time.sleep(2)  # four batches, and a look of the watchdog each second

    asked = {"preemption": {"enabled": True}}
    trainer = sharded_trainer(folder, 3, config=asked, max_steps=60)
    trainer.add_callback(Signal())
    if in_evaluation:
        with pytest.raises(SystemExit):
            trainer.train()
    else:
        trainer.train()
    stopped = trainer.state.global_step
    trainer.model_wrapped.close()
    assert stopped == 2 if in_evaluation else 2 < stopped < 60
    again = sharded_trainer(folder, 3, tiny(seed=8), config=asked, max_steps=stopped + 1)
    newest = newest_checkpoint(folder)
    assert newest == f"{folder}/checkpoint-{stopped}"
    again.train(resume_from_checkpoint=newest)
    assert len(logged(again, "loss")) == stopped + 1
    again.model_wrapped.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_training_goes_on_from_a_checkpoint_bit_for_bit_and_with_one_rank(stage, folder):
    wanted = run_ranks(trained_and_saved, 2, folder, stage, group=False, timeout=100)[0]
    inside = {path.name for path in Path(folder, "checkpoint-4").iterdir()}
    assert {"model.safetensors", "config.json", "global_step4", "latest", "scheduler.pt"} <= inside
    assert "optimizer.pt" not in inside
    again = run_ranks(resumed, 2, folder, stage, {}, group=False, timeout=100)[0]
    assert again == wanted
    one = {"per_device_train_batch_size": 4}
    alone = run_ranks(resumed, 1, folder, 5 - stage, one, group=False, timeout=100)[0]
    assert alone == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("stage", [1, 3])
@rank_test
@by_name
def test_the_best_model_is_loaded_and_saved_for_from_pretrained(stage, folder):
    from transformers import AutoModelForCausalLM

    trainer = sharded_trainer(
        folder, stage, learning_rate=0.3, lr_scheduler_type="constant", max_steps=4,
        eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1,
        load_best_model_at_end=True, max_grad_norm=0, gradient_accumulation_steps=1,
    )  # fmt: skip
    trainer.train()
    losses = logged(trainer, "eval_loss")
    best = min(losses)
    assert trainer.state.best_metric == best
    assert losses[-1] > best  # so that there was something to load
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)

    trainer.save_model(f"{folder}/final")
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    trainer.accelerator.wait_for_everyone()
    found, report = AutoModelForCausalLM.from_pretrained(
        f"{folder}/final", output_loading_info=True
    )
    assert not report["missing_keys"]
    if state is not None:
        for name, value in found.state_dict().items():
            assert torch.equal(value, state[name]), name
    assert Path(folder, "final", "training_args.bin").is_file()
    trainer.model_wrapped.close()


def with_adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny()
    torch.manual_seed(6)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


@rank_test
@by_name
def test_lora_at_stage_3_saves_adapters_alone_and_resumes(folder):
    from peft import PeftModel
    from safetensors.torch import load_file

    from zeroshard.integrations.transformers import _weights

    options = {"max_steps": 4, "learning_rate": 5e-2, "gradient_accumulation_steps": 1}
    wanted = plain_trainer(f"{folder}/ddp", with_adapters(), **options)
    wanted.train()
    saves = {"save_strategy": "steps", "save_steps": 2, **options}
    trainer = sharded_trainer(folder, 3, with_adapters(), **saves)
    trainer.train()
    assert_same(trainer, wanted)
    trainer.save_model(f"{folder}/adapters")
    gathered = _weights(trainer.model_wrapped)
    assert len(gathered) == (4 if trainer.accelerator.is_main_process else 0)
    trainer.accelerator.wait_for_everyone()

    saved = load_file(f"{folder}/adapters/adapter_model.safetensors")
    reference = {name: param for name, param in wanted.model.named_parameters() if "lora" in name}
    assert len(saved) == len(reference) == 4
    loaded = PeftModel.from_pretrained(tiny(), f"{folder}/adapters")
    for name, param in loaded.named_parameters():
        if "lora" in name:
            torch.testing.assert_close(param, reference[name], rtol=1e-3, atol=1e-5, msg=name)
    assert not Path(folder, "adapters", "model.safetensors").exists()
    losses = logged(trainer, "loss")
    trainer.model_wrapped.close()

    again = sharded_trainer(folder, 3, with_adapters(), **saves)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert logged(again, "loss") == losses
    again.model_wrapped.close()


def small_t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    return T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                 dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    )  # fmt: skip


def generated(folder: str, config: dict[str, Any] | None) -> tuple[Any, Any]:
    """A Trainer and its predictions after two steps; rank 1 ends each answer earlier than rank 0."""
    import transformers
    from by_name import forget

    from zeroshard.integrations.transformers import Seq2SeqTrainer

    forget()
    args = transformers.Seq2SeqTrainingArguments(
        **arguments(folder, max_steps=2, predict_with_generate=True, generation_max_length=12)
    )
    kind = transformers.Seq2SeqTrainer if config is None else Seq2SeqTrainer
    rest = {} if config is None else {"zeroshard_config": config}
    trainer = kind(small_t5(), args, train_dataset=data(8), eval_dataset=data(8), **rest)
    trainer.train()
    max_length = 5 if args.process_index else 12
    return trainer, trainer.predict(trainer.eval_dataset, max_length=max_length).predictions


@rank_test
@by_name
def test_generating_at_stage_3_gives_the_answers_of_ddp_when_ranks_stop_at_other_lengths(folder):
    _, wanted = generated(folder, None)
    config = {"zero_optimization": {"stage": 3}, "unit_min_numel": 1}
    trainer, found = generated(folder, config)
    assert found.shape == wanted.shape
    assert (found == wanted).all()
    trainer.model_wrapped.close()


@pytest.mark.parametrize("stage", [1, 3])
@rank_test
@by_name
def test_evaluating_before_training_and_training_twice(stage, folder):
    options = {"max_steps": 2, "gradient_accumulation_steps": 1}
    reference = plain_trainer(folder, **options)
    reference.train()  # without the look before: DDP would not be wrapped around the model any more
    reference.train()
    trainer = sharded_trainer(folder, stage, **options)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.train()
    assert_same(trainer, reference)
    found = trainer.evaluate()["eval_loss"]
    assert found == pytest.approx(reference.evaluate()["eval_loss"], rel=1e-5)
    assert found < before
    assert trainer.model_wrapped.global_steps == 4
    trainer.model_wrapped.close()


def built_sharded(seed: int) -> Any:
    import zeroshard

    zeroshard.init_distributed()
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    with zeroshard.zero.Init(config=config):
        return tiny(seed)


@rank_test
@by_name
def test_a_model_built_in_shards_is_evaluated_trained_and_resumed(folder):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = sharded_trainer(folder, 3, built_sharded(0), **options)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    wanted = trainer.evaluate()["eval_loss"]
    assert wanted < before
    losses = logged(trainer, "loss")
    trainer.model_wrapped.close()
    again = sharded_trainer(folder, 3, built_sharded(1), **options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    assert logged(again, "loss") == losses
    assert again.evaluate()["eval_loss"] == wanted
    again.model_wrapped.close()


class Fit(nn.Module):
    """A model that is not from Transformers, with float inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        said = self.net(x)
        return {"loss": nn.functional.mse_loss(said.squeeze(-1).float(), labels), "logits": said}


@rank_test
@by_name
def test_bf16_of_the_arguments_is_the_engines_in_training_and_evaluation(folder):
    from safetensors.torch import load_file

    def run(trainer: Any) -> Any:
        floats = rows(24).float() / 50
        trainer.train_dataset = [{"x": row, "labels": row.sum()} for row in floats]
        trainer.eval_dataset = trainer.train_dataset[:8]
        trainer.train()
        return trainer

    wanted = run(plain_trainer(folder, Fit(), bf16=True))
    trainer = run(sharded_trainer(folder, 2, Fit(), bf16=True))
    assert next(trainer.model.parameters()).dtype == torch.bfloat16
    assert logged(trainer, "loss") == pytest.approx(logged(wanted, "loss"), rel=2e-2)
    found = trainer.evaluate()["eval_loss"]
    assert found == pytest.approx(wanted.evaluate()["eval_loss"], rel=5e-2)
    trainer.save_model(f"{folder}/saved")
    trainer.accelerator.wait_for_everyone()
    saved = load_file(f"{folder}/saved/model.safetensors")
    assert all(torch.equal(saved[name], param) for name, param in trainer.model.named_parameters())
    trainer.model_wrapped.close()


@by_name
def refusal(options: dict[str, Any], config: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        sharded_trainer("unused", 2, nn.Linear(2, 2), config, **options).train()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "config", "says"),
    [
        ({}, {"optimizer": {"type": "Adam"}}, 'zeroshard_config has "optimizer"'),
        ({}, {"scheduler": {"type": "WarmupLR"}}, "lr_scheduler_type"),
        ({}, {"bf16": {"enabled": True}}, 'mixed_precision="no", but the configuration says bf16'),
        ({}, {"gradient_clipping": 2.0}, "TrainingArguments.max_grad_norm is 0.5"),
        ({}, {"gradient_accumulation_steps": 3},
         '"gradient_accumulation_steps": 3, but TrainingArguments.gradient_accumulation_steps is 2'),
        ({}, {"preemption": {"save_dir": "x"}}, '"preemption": {"enabled": true}'),
        ({}, {"train_micro_batch_size_per_gpu": 3}, "per_device_train_batch_size is 2"),
        ({"bf16_full_eval": True}, {}, "TrainingArguments(bf16_full_eval=...)"),
        ({"save_on_each_node": True}, {}, "into one directory"),
        ({"load_best_model_at_end": True, "save_only_model": True, "save_strategy": "steps",
          "eval_strategy": "steps"}, {}, "Remove one"),
    ],
)  # fmt: skip
def test_arguments_and_configuration_that_disagree_are_refused(options, config, says):
    assert says in run_ranks(refusal, 1, options, config, group=False)[0]


@rank_test
@by_name
def test_a_checkpoint_of_ddp_is_refused_with_what_to_do(folder):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    plain_trainer(folder, **options).train()
    trainer = sharded_trainer(folder, 2, max_steps=2)
    trainer.accelerator.wait_for_everyone()
    with pytest.raises(UsageError, match="full state cannot be loaded"):
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    trainer.model_wrapped.close()


@rank_test
@by_name
def test_the_private_methods_that_are_replaced_exist_and_no_others_are_replaced():
    import transformers

    from zeroshard.integrations.transformers import REPLACED, ZeroShardMixin

    public = ["create_accelerator_and_postprocess"]
    for name, why in [*REPLACED.items(), *dict.fromkeys(public, "ours is made there").items()]:
        assert hasattr(transformers.Trainer, name), (
            f"transformers {transformers.__version__} has no Trainer.{name} any more, which "
            f"zeroshard.integrations.transformers replaces ({why}): what it did then happens "
            "elsewhere, without an engine."
        )
    replaced = {name for name in vars(ZeroShardMixin) if hasattr(transformers.Trainer, name)}
    assert {name for name in replaced if name[:2] != "__"} == {*REPLACED, *public}
