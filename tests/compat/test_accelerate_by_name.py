"""An Accelerate script that selects ZeroShard by name trains as under plain data parallelism."""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from by_name import by_name, no_deepspeed_on_ranks, plain, rows, sharded, tiny  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader
from zeroshard_testing import on_ranks

from zeroshard.errors import UsageError

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_deepspeed_on_ranks")

STAGES = [0, 1, 2, 3]
CLIP = 0.5
rank_test = on_ranks(2, group=False, timeout=100)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def prepared(accelerator: Any, model: Any, *, lr: float = 1e-2) -> tuple[Any, Any, Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return accelerator.prepare(model, optimizer, DataLoader(rows(), 2), schedule)


def go_on(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any, *, steps: int
) -> dict[str, list[float]]:
    """The loop of a script: mean losses per micro-batch, norms and rates per step."""
    seen: dict[str, list[float]] = {"losses": [], "norms": [], "rates": []}
    for tokens in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                seen["norms"].append(norm.item())
                seen["rates"].append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
    return seen


def train(accelerator: Any, steps: int) -> tuple[Any, dict[str, list[float]]]:
    model, *rest = prepared(accelerator, tiny())
    return model, go_on(accelerator, model, *rest, steps=steps)


def assert_same(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    assert found["rates"] == wanted["rates"]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=2e-5)


@pytest.mark.parametrize("stage", STAGES)
@rank_test
@by_name
def test_losses_norms_and_rates_are_those_of_ddp(stage):
    _, wanted = train(plain(), 6)
    accelerator = sharded(stage)
    assert accelerator.distributed_type == "MULTI_CPU"
    model, found = train(accelerator, 6)
    assert_same(found, wanted)
    assert min(found["norms"]) > CLIP  # so that clipping had something to do
    assert isinstance(model, nn.Module)
    model.close()


@pytest.mark.parametrize("stage", STAGES)
@rank_test
@by_name
def test_accumulate_ends_a_step_with_the_loader_as_under_ddp(stage):
    """Ten micro-batches of the loader in steps of four: the last step has two."""
    _, wanted = train(plain(gradient_accumulation_steps=4), 20)
    model, found = train(sharded(stage, gradient_accumulation_steps=4), 20)
    assert len(found["norms"]) == 6
    assert_same(found, wanted)
    assert model.global_steps == 6
    assert model.gradient_accumulation_steps() == 4
    model.close()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("defers", [True, False])
@rank_test
@by_name
def test_a_script_that_counts_micro_batches_itself_accumulates_too(stage, defers):
    def by_hand(accelerator: Any) -> tuple[Any, list[float]]:
        model, optimizer, loader, _ = prepared(accelerator, tiny())
        losses = []
        for at, tokens in enumerate(itertools.islice(loader, 9)):
            is_last = at % 3 == 2
            with accelerator.no_sync(model) if defers and not is_last else nullcontext():
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss / 3)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return model, losses

    _, wanted = by_hand(plain())
    model, losses = by_hand(sharded(stage))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert model.global_steps == 3
    assert model.micro_steps == (9 if defers else 3)  # it is not told about the others
    model.close()


@pytest.mark.parametrize("stage", STAGES)
@rank_test
@by_name
def test_a_norm_is_clipped_in_the_step_that_asked_and_in_no_other(stage):
    """Without a call nothing is clipped, although the configuration's default is 1."""

    def some_clipped(accelerator: Any, zeroes: bool) -> tuple[Any, list[float]]:
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), 2))
        losses = []
        for at, tokens in enumerate(itertools.islice(loader, 6)):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if at == 2:
                assert accelerator.clip_grad_norm_(model.parameters(), 1e-3) > 1
            optimizer.step()
            if zeroes:  # an engine's step did so
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return model, losses

    _, wanted = some_clipped(plain(), True)
    model, losses = some_clipped(sharded(stage), stage == 0)
    assert losses == pytest.approx(wanted, rel=1e-5)
    model.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@rank_test
@by_name
def test_a_saved_state_goes_on_bit_for_bit(stage, folder):
    accelerator = sharded(stage)
    model, *rest = prepared(accelerator, tiny())
    go_on(accelerator, model, *rest, steps=3)
    accelerator.save_state(f"{folder}/state")
    wanted = go_on(accelerator, model, *rest, steps=3)
    accelerator.load_state(f"{folder}/state")
    assert go_on(accelerator, model, *rest, steps=3) == wanted
    model.close()

    accelerator = sharded(stage)  # another program, with other weights
    model, *rest = prepared(accelerator, tiny(seed=9))
    accelerator.load_state(f"{folder}/state")
    assert go_on(accelerator, model, *rest, steps=3) == wanted
    model.close()


@by_name
def saved(folder: str) -> dict[str, list[float]]:
    accelerator = sharded(3)
    model, *rest = prepared(accelerator, tiny())
    go_on(accelerator, model, *rest, steps=4)
    accelerator.save_state(folder)
    seen = go_on(accelerator, model, *rest, steps=2)
    model.close()
    return seen


@by_name
def resumed(folder: str) -> dict[str, list[float]]:
    """One rank, stage 1: the batches of both ranks in one."""
    accelerator = sharded(1)
    model = tiny(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(rows(), 4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.load_state(folder)
    seen = go_on(accelerator, model, optimizer, loader, schedule, steps=1)
    model.close()
    return seen


def test_a_state_of_two_ranks_is_loaded_by_one_at_another_stage(folder):
    from zeroshard_testing.ranks import run_ranks

    wanted = run_ranks(saved, 2, folder, group=False)[0]
    found = run_ranks(resumed, 1, folder, group=False)[0]
    assert found["losses"][0] == pytest.approx(wanted["losses"][0], rel=1e-5)
    assert found["norms"][0] == pytest.approx(wanted["norms"][0], rel=2e-5)
    assert found["rates"][0] == wanted["rates"][0]


@rank_test
@by_name
def test_hooks_of_the_script_see_the_models_and_no_state_dict_of_an_engine(folder):
    accelerator = sharded(3)
    model, _, beside, _, _ = accelerator.prepare(
        tiny_and := tiny(),
        torch.optim.SGD(tiny_and.parameters(), lr=0.1),
        nn.Identity(),
        DataLoader(rows(), 2),
        None,
    )
    seen = []
    accelerator.register_save_state_pre_hook(
        lambda models, weights, _dir: seen.append(
            (len(models), len(weights), accelerator.get_state_dict(model) is None)
        )
    )
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # rank 0 alone writes objects that are not engines
    assert seen == [(2, 1, not accelerator.is_main_process)]
    assert {"pytorch_model", "model.safetensors"} <= {path.name for path in Path(folder).iterdir()}
    assert not [path for path in Path(folder).iterdir() if path.name.startswith("optimizer")]
    accelerator.load_state(folder)
    assert type(beside) is nn.Identity
    model.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@rank_test
@by_name
def test_the_trained_model_is_unwrapped_and_saved_whole(stage, folder):
    from transformers import AutoModelForCausalLM

    reference, _ = train(plain(), 3)
    wanted = reference.module.state_dict()
    accelerator = sharded(stage)
    original = tiny()
    model, *rest = prepared(accelerator, original)
    go_on(accelerator, model, *rest, steps=3)
    assert accelerator.unwrap_model(model) is original
    accelerator.save_model(model, f"{folder}/weights")
    state = accelerator.get_state_dict(model)
    assert (state is None) == (not accelerator.is_main_process)
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    accelerator.wait_for_everyone()
    from safetensors.torch import load_file

    weights = load_file(f"{folder}/weights/model.safetensors")
    found, report = AutoModelForCausalLM.from_pretrained(
        f"{folder}/model", output_loading_info=True
    )
    assert not report["missing_keys"]
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
        if name in weights:
            assert torch.equal(weights[name], value), name
    assert len(weights) >= len(wanted) - 1  # tied weights are saved once
    model.close()


def adversaries(accelerator: Any) -> tuple[list[Any], list[float]]:
    """Two models and two optimizers in one prepare(): losses through one model, and through both."""
    torch.manual_seed(4)
    maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for_maker = torch.optim.AdamW(maker.parameters(), lr=1e-2)
    for_judge = torch.optim.AdamW(judge.parameters(), lr=1e-2)
    maker, judge, for_judge, for_maker = accelerator.prepare(maker, judge, for_judge, for_maker)
    noise = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(4):
        seed, real = torch.randn(4, 4, generator=noise), torch.randn(4, 8, generator=noise)
        loss = judge(maker(seed).detach()).mean() - judge(real).tanh().mean()
        accelerator.backward(loss)
        for_judge.step()
        for_judge.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        loss = judge(maker(seed)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(maker.parameters(), 0.05)
        for_maker.step()
        for_maker.zero_grad()
        for_judge.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return [maker, judge], losses


@pytest.mark.parametrize("stage", [1, 2, 3])
@rank_test
@by_name
def test_two_engines_in_one_process_train_through_each_other(stage):
    _, wanted = adversaries(plain())
    engines, losses = adversaries(sharded(stage))
    assert losses == pytest.approx(wanted, rel=1e-5)
    for engine in engines:
        engine.close()


@rank_test
@by_name
def test_each_of_two_engines_in_fp16_scales_its_own_loss():
    accelerator = sharded(1, {"fp16": {"initial_scale_power": 4}}, mixed_precision="fp16")
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    for model, optimizer in zip(models, (first, second), strict=True):
        before = model.module.weight.clone()
        accelerator.backward(model(torch.ones(2, 4)).square().mean() + 1)
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(model.module.weight, before)
        model.close()


@rank_test
@by_name
def test_a_teacher_beside_the_student_is_sharded_and_never_trained():
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
              "fp16": {"initial_scale_power": 4}}  # fmt: skip
    accelerator = sharded(3, config, mixed_precision="fp16")
    teacher = tiny(2).requires_grad_(False)
    student, teacher, loader = accelerator.prepare(tiny(1), teacher, DataLoader(rows(), 2))
    assert teacher.optimizer is None
    assert teacher.runtime.stage.shards_params
    for tokens in itertools.islice(loader, 2):
        said = student(input_ids=tokens).logits.log_softmax(-1)
        taught = teacher(input_ids=tokens).logits.softmax(-1)  # last, but the loss is not its own
        loss = -(taught * said).sum(-1).mean()
        accelerator.backward(loss)
        student.optimizer.step()
        student.optimizer.zero_grad()
    assert student.global_steps == 2
    accelerator.free_memory()
    with pytest.raises(UsageError, match="closed"):
        student(input_ids=tokens)


@rank_test
@by_name
def test_optimizer_and_schedule_of_the_configuration():
    accelerator = sharded(
        2,
        {"optimizer": {"type": "SGD", "params": {"lr": 1e-1}},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear",
                                                      "warmup_max_lr": 1e-1}}},
    )  # fmt: skip
    original = tiny()
    model, loader = accelerator.prepare(original, DataLoader(rows(), 2))
    assert accelerator.prepare(original) is model
    rates = []
    for tokens in itertools.islice(loader, 4):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        model.optimizer.step()
        model.optimizer.zero_grad()
        rates.append(model.last_step.lr)
    assert rates[1] < rates[2] < rates[3]
    assert not accelerator.optimizer_step_was_skipped
    model.close()
    again = accelerator.prepare(original)
    assert again.global_steps == 0
    again.close()


@rank_test
@by_name
def test_an_overflow_is_seen_and_the_schedule_waits():
    accelerator = sharded(
        2, {"fp16": {"initial_scale_power": 15, "hysteresis": 1}}, mixed_precision="fp16"
    )
    model, optimizer, loader, schedule = prepared(accelerator, tiny())
    assert accelerator.scaler is None
    assert model.module.lm_head.weight.dtype == torch.float16
    for tokens, factor in zip(loader, (1.0, 1e6, 1.0), strict=False):
        rates = schedule.get_last_lr()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss * factor)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        assert norm.isfinite() == (factor == 1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped == (factor > 1)
        assert (schedule.get_last_lr() == rates) == (factor > 1)
    assert model.global_steps == 3
    model.close()


@pytest.mark.parametrize("way", ["bf16", "torch_autocast"])
@rank_test
@by_name
def test_mixed_precision_takes_and_gives_fp32(way):
    """Images are floats. The script casts nothing and computes its loss in fp32."""

    def fitted(accelerator: Any) -> tuple[Any, list[float]]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for _ in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(7))
            said = model(x)
            assert said.dtype == torch.float32
            loss = nn.functional.mse_loss(said, x.sum(1, keepdim=True))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return model, losses

    _, wanted = fitted(plain(mixed_precision="bf16"))
    config = {} if way == "bf16" else {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    accelerator = sharded(2, config, mixed_precision="bf16")
    with accelerator.autocast():  # for computations of the script outside the model
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    looked_at = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    assert "forward" not in vars(looked_at)  # an engine that is made of it would autocast too
    model, losses = fitted(accelerator)
    kept = torch.bfloat16 if way == "bf16" else torch.float32
    assert next(model.parameters()).dtype == kept
    assert losses == pytest.approx(wanted, rel=2e-2 if way == "bf16" else 1e-5)
    model.close()


@rank_test
@by_name
def test_the_precision_of_the_configuration_is_accelerates_too():
    assert sharded(2, {"bf16": {"enabled": True}}).mixed_precision == "bf16"
    with pytest.raises(UsageError, match='mixed_precision="fp16", but the configuration says bf16'):
        sharded(2, {"bf16": {"enabled": True}}, mixed_precision="fp16")


def misuse(call: str, accelerator: Any, model: Any, optimizer: Any, whole: Any) -> None:
    """``model`` and ``optimizer`` are prepared, ``whole`` is not."""
    torch_optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    params = list(model.parameters())
    match call:
        case "late optimizer":
            accelerator.prepare(torch.optim.SGD(params, lr=0.1))
        case "lone optimizer":
            accelerator.prepare_optimizer(torch_optimizer)
        case "one for two":
            both = [*whole.parameters(), *(other := nn.Linear(2, 2)).parameters()]
            accelerator.prepare(whole, other, torch.optim.SGD(both, lr=0.1))
        case "two for one":
            accelerator.prepare(whole, torch_optimizer, torch.optim.SGD(whole.parameters(), lr=0.1))
        case "accumulation":
            accelerator.config["gradient_accumulation_steps"] = 8
            accelerator.prepare(whole, torch_optimizer)
        case "batch":
            accelerator.config["train_micro_batch_size_per_gpu"] = 7
            accelerator.prepare(whole, torch_optimizer, DataLoader(rows(), 2))
        case "some parameters":
            accelerator.clip_grad_norm_(params[:2], 1.0)
        case "another norm":
            accelerator.clip_grad_norm_(params, 1.0, norm_type=1)
        case "no gradient":
            accelerator.clip_grad_norm_(params, 1.0)
        case "values":
            accelerator.clip_grad_value_(params, 1.0)
        case "accumulating":
            accelerator.gradient_state._set_sync_gradients(False)
            accelerator.clip_grad_norm_(params, 1.0)
        case "closure":
            optimizer.step(lambda: None)
        case "state":
            optimizer.state_dict()
        case "load":
            optimizer.load_state_dict({})
        case "group":
            optimizer.add_param_group({})
        case "join":
            accelerator.join_uneven_inputs([model])
        case "plug-in":
            from accelerate import FullyShardedDataParallelPlugin

            type(accelerator)(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        case "tensor ranks":
            type(accelerator)(cpu=True, config={"tensor_parallel": {"autotp_size": 2}})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("late optimizer", "SGD, but its model was prepared before"),
        ("lone optimizer", "model, optimizer = accelerator.prepare"),
        ("one for two", "has parameters of 2 models"),
        ("two for one", "was given SGD and SGD for one model"),
        ("accumulation",
         'the configuration says "gradient_accumulation_steps": 8, but the Accelerator\'s '
         "gradient_accumulation_steps is 1. Both must agree"),
        ("batch", 'says "train_micro_batch_size_per_gpu": 7, but the loader\'s batch size is 2'),
        ("some parameters", "can only be clipped together"),
        ("another norm", "norm_type=1"),
        ("no gradient", "before any backward"),
        ("values", "Use clip_grad_norm_"),
        ("accumulating", "if accelerator.sync_gradients"),
        ("closure", "without a closure"),
        ("state", "save_state"),
        ("load", "load_state"),
        ("group", "before accelerator.prepare"),
        ("join", "even_batches=True"),
        ("plug-in", "fsdp_plugin=...): ZeroShard shards the model itself"),
        ("tensor ranks", "tensor_parallel.autotp_size: 2, so these ranks must train on the same"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_with_what_to_do(call, says):
    from zeroshard_testing.ranks import run_ranks

    assert says in run_ranks(refusal, 1, call, group=False)[0]


@by_name
def refusal(call: str) -> str:
    accelerator = sharded(2)
    model, optimizer, _, _ = prepared(accelerator, tiny())
    with pytest.raises(UsageError) as caught:
        misuse(call, accelerator, model, optimizer, nn.Linear(2, 2))
    model.close()
    return str(caught.value)


@rank_test
@by_name
def test_ranks_that_accelerate_does_not_see_are_an_error():
    from by_name import forget

    from zeroshard.integrations.accelerate import Accelerator

    forget()
    with pytest.raises(UsageError, match="2 processes, but Accelerate sees 1"):
        Accelerator(config={})


@rank_test
@by_name
def test_what_is_replaced_of_accelerate_exists():
    import accelerate

    from zeroshard.integrations.accelerate import Accelerator

    added = {"engines", "engine_of", "keeps", "wishes", "native_amp", "tensor_size"}
    for name in vars(Accelerator).keys() - added:
        assert name[0] == "_" or hasattr(accelerate.Accelerator, name), (
            f"accelerate {accelerate.__version__} has no Accelerator.{name} any more: what it did "
            "happens elsewhere, without an engine."
        )
    assert isinstance(sharded(1)._optimizers, list)
    assert hasattr(accelerate.Accelerator, "_prepare_tp")


WITHOUT = """
import sys
sys.modules["NAME"] = None
try:
    import zeroshard.integrations.NAME
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("module", ["accelerate", "transformers"])
def test_without_the_package_the_import_says_what_to_install(module):
    command = [sys.executable, "-c", WITHOUT.replace("NAME", module)]
    done = warm_python.run(command, cwd=Path.cwd(), env=os.environ, timeout=60)
    assert "pip install 'zeroshard[hf]'" in done.stdout
