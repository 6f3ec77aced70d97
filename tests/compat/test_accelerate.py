"""Accelerate with ZeroShard and without: training loop, saved files, several models."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import forget, tiny, with_deepspeed
from torch.utils.data import DataLoader
from zeroshard_testing import on_ranks
from zeroshard_testing.ranks import run_ranks

from zeroshard.errors import DistributedError

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")

STAGES = [1, 2, 3]
CLIP = 0.5
rank_test = on_ranks(2, group=False, timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def plain(**options: Any) -> Any:
    """An Accelerator of plain data parallelism."""
    from accelerate import Accelerator

    forget()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return Accelerator(**options)


def sharded(stage: int, steps: int = 1, init: bool = False, **options: Any) -> Any:
    """An Accelerator that shards; ``init``: models are built sharded (stage 3)."""
    from accelerate import Accelerator, DeepSpeedPlugin

    forget()
    os.environ.pop("ACCELERATE_USE_CPU", None)
    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_clipping=CLIP,
        gradient_accumulation_steps=steps,
        zero3_init_flag=init,
        zero3_save_16bit_model=True,
    )
    return Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=steps, **options)


def tiny_loaded(accelerator: Any, folder: str) -> Any:
    """The same model from a file, built as the accelerator's plugin requires."""
    from transformers import AutoModelForCausalLM

    if accelerator.is_main_process:
        tiny().save_pretrained(folder)
    accelerator.wait_for_everyone()
    return AutoModelForCausalLM.from_pretrained(folder)


def rows(count: int = 40) -> torch.Tensor:
    return torch.randint(3, 50, (count, 8), generator=torch.Generator().manual_seed(1))


def train(
    accelerator: Any, model: Any, *, steps: int, batch: int = 2, count: int = 40
) -> tuple[Any, Any, list[float], list[float]]:
    """Prepared model and optimizer; per micro-batch the mean loss of all ranks, per step the norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows(count), batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = go_on(accelerator, model, optimizer, loader, steps=steps)
    return model, optimizer, losses, norms


def go_on(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, *, steps: int
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for tokens in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, norms


def near(wanted: Any) -> Any:
    return pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("stage", STAGES)
@rank_test
@with_deepspeed
def test_losses_and_the_norms_that_clip_grad_norm_returns_are_those_of_ddp(stage):
    *_, wanted, wanted_norms = train(plain(), tiny(), steps=6)
    model, _, losses, norms = train(sharded(stage), tiny(), steps=6)
    assert losses == near(wanted)
    assert norms == near(wanted_norms)
    assert min(norms) > CLIP  # so that clipping had something to do
    model.destroy()


@pytest.mark.parametrize("stage", STAGES)
@rank_test
@with_deepspeed
def test_accumulate_ends_a_step_with_the_loader_as_under_ddp(stage):
    """Ten micro-batches of the loader in steps of four: the last step has two."""
    *_, wanted, wanted_norms = train(plain(gradient_accumulation_steps=4), tiny(), steps=20)
    model, _, losses, norms = train(sharded(stage, 4), tiny(), steps=20)
    assert len(norms) == 6
    assert losses == near(wanted)
    assert norms == near(wanted_norms)
    model.destroy()


@pytest.mark.parametrize("stage", STAGES)
@rank_test
@with_deepspeed
def test_a_saved_state_goes_on_where_it_was(stage, folder):
    accelerator = sharded(stage)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), 2))
    go_on(accelerator, model, optimizer, loader, steps=3)
    accelerator.save_state(f"{folder}/state")
    wanted = go_on(accelerator, model, optimizer, loader, steps=3)
    accelerator.load_state(f"{folder}/state")
    assert go_on(accelerator, model, optimizer, loader, steps=3) == wanted
    model.destroy()

    accelerator = sharded(stage)  # another program, with other weights
    model = tiny(seed=9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), 2))
    accelerator.load_state(f"{folder}/state")
    assert go_on(accelerator, model, optimizer, loader, steps=3) == wanted
    model.destroy()


@pytest.mark.parametrize("stage", STAGES)
@rank_test
@with_deepspeed
def test_the_trained_model_is_saved_whole(stage, folder):
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    reference, *_ = train(plain(), tiny(), steps=3)
    wanted = reference.module.state_dict()
    accelerator = sharded(stage)
    original = tiny()
    model, *_ = train(accelerator, original, steps=3)
    assert accelerator.unwrap_model(model) is original
    state = accelerator.get_state_dict(model)
    if stage == 3:
        assert (state is None) == (not accelerator.is_main_process)
    accelerator.unwrap_model(model).save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    accelerator.wait_for_everyone()
    unset_hf_deepspeed_config()  # it would be loaded sharded again
    found, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
    model.destroy()


@rank_test
@with_deepspeed
def test_tied_embeddings_stay_one_parameter_at_stage_3(folder):
    *_, wanted, _ = train(plain(), tiny(), steps=4)
    accelerator = sharded(3, init=True)
    original = tiny_loaded(accelerator, folder)
    assert hasattr(original.lm_head.weight, "ds_id")
    assert original.lm_head.weight is original.transformer.wte.weight
    model, _, losses, _ = train(accelerator, original, steps=4)
    assert original.lm_head.weight is original.transformer.wte.weight
    assert losses == near(wanted)
    model.destroy()


@pytest.mark.parametrize("prepared", [True, False])
@rank_test
@with_deepspeed
def test_generate_at_stage_3_when_ranks_stop_at_different_lengths(prepared, folder):
    """Rank 0 has a shorter prompt and may generate more tokens. Every rank takes part until all have
    ended."""
    rank = plain().process_index
    prompt = rows()[rank : rank + 1, : 3 + 2 * rank]
    options = {
        "do_sample": False,
        "max_new_tokens": 9 - 5 * rank,
        "attention_mask": torch.ones_like(prompt),
    }
    wanted = tiny().eval().generate(prompt, **options)
    accelerator = sharded(3, init=True)
    model = tiny_loaded(accelerator, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows(), 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.eval()
    generator = model if prepared else accelerator.unwrap_model(model)
    found = generator.generate(prompt, synced_gpus=True, **options)
    assert torch.equal(found, wanted)
    accelerator.wait_for_everyone()
    model.destroy()


@rank_test
@with_deepspeed
def test_two_models_with_plugins_of_their_own():
    """A student at stage 2 learns from a teacher that is sharded and never trained."""
    from accelerate import Accelerator, DeepSpeedPlugin

    def distil(accelerator, student, teacher, optimizer, loader):
        losses = []
        for tokens in itertools.islice(loader, 4):
            with torch.no_grad():
                taught = teacher(input_ids=tokens).logits.softmax(-1)
            said = student(input_ids=tokens).logits.log_softmax(-1)
            loss = -(taught * said).sum(-1).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses

    accelerator = plain()
    student, teacher = tiny(1), tiny(2).eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-1)
    student, optimizer, loader = accelerator.prepare(student, optimizer, DataLoader(rows(), 2))
    wanted = distil(accelerator, student, teacher, optimizer, loader)

    forget()
    os.environ.pop("ACCELERATE_USE_CPU", None)
    train_config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0,
                    "train_micro_batch_size_per_gpu": 2}  # fmt: skip
    infer_config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=train_config),
        "teacher": DeepSpeedPlugin(hf_ds_config=infer_config),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    student = tiny(1)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-1)
    student, optimizer, loader = accelerator.prepare(student, optimizer, DataLoader(rows(), 2))
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(tiny(2).eval())
    assert teacher.zero_optimization_stage() == 3
    assert student.zero_optimization_stage() == 2
    assert distil(accelerator, student, teacher, optimizer, loader) == near(wanted)
    teacher.destroy()
    student.destroy()


@rank_test
@with_deepspeed
def test_two_trained_models_in_one_accelerator_need_an_accelerator_each():
    """As documented by Accelerate: one plugin each, and a second Accelerator for the second loop."""
    from accelerate import Accelerator, DeepSpeedPlugin

    def both(first, second):
        losses = []
        models = []
        for accelerator, seed in ((first, 1), (second, 2)):
            model = tiny(seed)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            models.append(
                (accelerator, *accelerator.prepare(model, optimizer, DataLoader(rows(), 2)))
            )
        for batches in zip(*(model[3] for model in models), strict=True):
            for (accelerator, model, optimizer, _), tokens in zip(models, batches, strict=True):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses, [model[1] for model in models]

    forget()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    wanted, _ = both(Accelerator(), Accelerator())
    forget()
    os.environ.pop("ACCELERATE_USE_CPU", None)
    configs = {
        name: {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0,
               "train_micro_batch_size_per_gpu": 2}
        for name, stage in (("one", 2), ("two", 3))
    }  # fmt: skip
    plugins = {name: DeepSpeedPlugin(hf_ds_config=config) for name, config in configs.items()}
    first = Accelerator(deepspeed_plugins=plugins)
    second = Accelerator()

    class Switching:
        """Prepares with the second plugin."""

        def __getattr__(self, name):
            return getattr(second, name)

        def prepare(self, *parts):
            second.state.select_deepspeed_plugin("two")
            return second.prepare(*parts)

    found, engines = both(first, Switching())
    assert found == near(wanted)
    for engine in engines:
        engine.destroy()


@rank_test
@with_deepspeed
def test_an_overflow_is_seen_and_the_schedule_waits():
    accelerator = sharded(2, mixed_precision="fp16")
    config = accelerator.deepspeed_plugin.deepspeed_config
    config["fp16"].update(initial_scale_power=15, hysteresis=1)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(rows(), 2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for tokens, factor in zip(loader, (1.0, 1e6, 1.0), strict=False):
        rates = schedule.get_last_lr()
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss * factor)
        optimizer.step()
        schedule.step()
        assert accelerator.optimizer_step_was_skipped == (factor > 1)
        assert (schedule.get_last_lr() == rates) == (factor > 1)
        optimizer.zero_grad()
    model.destroy()


@with_deepspeed
def saves_alone(folder: str) -> str:
    """Only rank 0 saves the state, as under ``if accelerator.is_main_process``. Rank 1 continues
    training."""
    os.environ["ZEROSHARD_STALL_S"] = "0.4"
    accelerator = sharded(3)
    model, *_ = train(accelerator, tiny(), steps=1)
    try:
        if accelerator.is_main_process:
            accelerator.save_state(folder)
        model(input_ids=rows()[:2])
    except DistributedError as error:
        model.close(type(error).__name__)
        return str(error)
    raise AssertionError("nothing failed")


def test_a_state_that_one_rank_saves_alone_is_named_on_all(folder):
    for text in run_ranks(saves_alone, 2, folder, group=False):
        assert "RankDivergence at step " in text
        assert "in save (accelerator.py:" in text
        assert "test_accelerate.py:" in text
        assert "Fix: " in text
