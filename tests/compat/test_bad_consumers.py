"""Errors and warnings for programs with unsupported libraries, packages or values.

Each case runs on two ranks, and both must end: with the same text, or the second rank with the reason of
the first. Text that does not raise is printed once, on rank 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import warm_python
from programs import EXAMPLES, forget, with_deepspeed
from support.covering import some_stages
from torch import nn
from torch.utils.data import DataLoader
from zeroshard_testing.ranks import run_ranks

from zeroshard.deepspeed.logs import logger

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def config(stage: int = 2, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage},
        **keys,
    }


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


class Lines(logging.Handler):
    """The messages of DeepSpeed's logger, except its greeting."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "DeepSpeed info: version" not in text:
            self.lines.append(text)


@with_deepspeed
def answer(body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, list[str]]:
    """How ``body`` ended on this rank ("fine" or ``Type: text``), and the messages that were logged."""
    heard, level = Lines(), logger.level
    logger.addHandler(heard)
    try:
        body(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}", heard.lines
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)  # the Trainer has its own idea
    return "fine", heard.lines


@contextlib.contextmanager
def absent(*names: str) -> Iterator[None]:
    """Make modules impossible to import. Other modules that are imported meanwhile stay imported."""
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def answers(
    body: Callable[..., Any], *args: Any, ranks: int = 2, group: bool = True
) -> tuple[list[str], list[list[str]]]:
    found = run_ranks(answer, ranks, body, args, group=group, timeout=100)
    return [end for end, _ in found], [lines for _, lines in found]


# ---------------------------------------------------------------------- versions


def with_transformers(version: str, ranks: tuple[int, ...], call: str) -> None:
    import deepspeed
    from accelerate.state import AcceleratorState
    from transformers import Trainer

    assert Trainer is not None
    transformers = sys.modules["transformers"]  # it replaces itself while it is imported
    mine = version if torch.distributed.get_rank() in ranks else transformers.__version__
    accelerator = {"distributed_type": "DEEPSPEED"}  # a Trainer makes one
    with (
        mock.patch.object(transformers, "__version__", mine),
        mock.patch.object(AcceleratorState, "_shared_state", accelerator),
    ):
        if call == "initialize":
            engine, *_ = deepspeed.initialize(model=net(), config=config())
            engine.destroy()
        else:
            deepspeed.init_distributed()


TOO_OLD = (
    "transformers 4.46.3 is too old for ZeroShard, which needs 4.47.1 or newer: its Trainer cannot "
    "resume with torch 2.6 or newer. Run: pip install --upgrade 'transformers>=4.47.1'"
)


@pytest.mark.parametrize("call", ["initialize", "init_distributed"])
def test_a_library_that_is_too_old_is_refused_on_every_rank(call):
    ends, _ = answers(with_transformers, "4.46.3", (0, 1), call)
    assert ends == [f"UsageError: {TOO_OLD}"] * 2


def test_a_library_that_is_too_old_on_one_host_ends_the_others_too():
    ends, _ = answers(with_transformers, "4.46.3", (1,), "initialize")
    assert ends[1] == f"UsageError: {TOO_OLD}"
    assert ends[0].startswith("RankMismatch: RankMismatch: rank 1 (host ")
    assert ends[0].endswith(
        f") failed before all ranks had joined, so no rank can continue: UsageError: {TOO_OLD}"
    )


def test_a_library_that_is_newer_than_tested_is_one_line_and_no_error():
    ends, lines = answers(with_transformers, "999.1.0", (0, 1), "initialize")
    assert ends == ["fine", "fine"]
    (line,) = lines[0]
    assert line.startswith("[Rank 0] transformers 999.1.0 is newer than ")
    assert line.endswith(", the newest version that ZeroShard was tested with")
    assert lines[1] == []


def with_models_alone() -> None:
    import deepspeed
    from transformers.trainer import get_parameter_names  # as programs with loops of their own do

    assert get_parameter_names is not None
    transformers = sys.modules["transformers"]
    with mock.patch.object(transformers, "__version__", "4.37.0"):
        engine, *_ = deepspeed.initialize(model=net(), config=config())
        engine.destroy()


def test_transformers_may_have_any_version_if_no_trainer_runs():
    assert answers(with_models_alone)[0] == ["fine", "fine"]


def with_accelerate(version: str) -> None:
    import accelerate

    with mock.patch.object(accelerate, "__version__", version):
        prepared({"zero_optimization": {"stage": 2}})


def test_accelerate_is_judged_when_an_accelerator_prepares():
    text = (
        "UsageError: accelerate 1.7.0 is too old for ZeroShard, which needs 1.8.0 or newer: it "
        "calls step() inside no_sync() while it accumulates gradients, and its clip_grad_norm_() "
        "returns no norm. Run: pip install --upgrade 'accelerate>=1.8.0'"
    )
    assert answers(with_accelerate, "1.7.0", group=False)[0] == [text, text]


# ---------------------------------------------------------------------- packages


def with_monitor(section: str, module: str) -> None:
    import deepspeed

    with absent(module):
        deepspeed.initialize(model=net(), config=config(**{section: {"enabled": True}}))


@pytest.mark.parametrize(
    ("section", "module", "package", "wanted"),
    [
        ("wandb", "wandb", "wandb", "'zeroshard[monitor]'"),
        ("tensorboard", "tensorboard", "tensorboard", "'zeroshard[monitor]'"),
        ("comet", "comet_ml", "comet_ml", "comet_ml"),
    ],
)
def test_a_monitor_without_its_package_ends_all_ranks(section, module, package, wanted):
    ends, _ = answers(with_monitor, section, module)
    text = (
        f"ConfigError: {section}.enabled is true, but the package {package} cannot be imported; "
        f"install it (pip install {wanted}) or set {section}.enabled to false"
    )
    assert ends == [text, text]


def lightning_is_missing() -> None:
    with absent("lightning"):
        sys.modules.pop("zeroshard.integrations.lightning", None)
        import zeroshard.integrations.lightning  # noqa: F401


def test_our_lightning_module_without_lightning():
    ((end,), _) = answers(lightning_is_missing, ranks=1)
    assert end.startswith(
        "ImportError: zeroshard.integrations.lightning needs Lightning, which cannot be imported ("
    )
    assert end.endswith("): pip install 'zeroshard[lightning]'")


def starts(program: str, hidden: str) -> None:
    path = str(EXAMPLES / program)
    beside = [str(Path(path).parent), *sys.path]
    with (
        absent(hidden),
        mock.patch.object(sys, "argv", [path]),
        mock.patch.object(sys, "path", beside),
    ):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as error:
            raise RuntimeError(error.code) from None


@pytest.mark.parametrize(
    ("program", "hidden", "extra"),
    [
        ("chatbot/train.py", "accelerate", "hf"),
        ("gpt2_accelerate/train.py", "transformers", "hf"),
        ("llava_lora/train.py", "peft", "hf"),
        ("mrpc/train.py", "accelerate", "hf"),
        ("plain_loop/train.py", "transformers", "hf"),
        ("trainer/train.py", "transformers", "hf"),
        ("train_gpt/train.py", "tokenizers", "examples"),
        ("train_gpt/report.py", "matplotlib.figure", "examples"),
    ],
)
def test_an_example_says_which_packages_it_needs(program, hidden, extra):
    ends, _ = answers(starts, program, hidden, ranks=1)
    assert ends == [
        f"RuntimeError: import of {hidden} halted; None in sys.modules; this program needs: pip install "
        f"'zeroshard[{extra}]'"
    ]


# ---------------------------------------------------------------------- values that libraries write


def prepared(
    file: dict[str, Any],
    *,
    dummies: tuple[str, ...] = (),
    loops: bool = False,
    batch: int = 2,
    **options: Any,
) -> None:
    """A program of Accelerate around ``file``; ``loops``: it trains without ``accumulate()``."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    forget()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    file = {"train_micro_batch_size_per_gpu": "auto", **file}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=file), **options)
    model = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.5)
    if "optimizer" in dummies:
        optimizer = DummyOptim(model.parameters(), lr=0.5)
    parts = [model, optimizer, DataLoader(torch.ones(16, 3), batch)]
    if "scheduler" in dummies:
        parts.append(DummyScheduler(optimizer))
    model, optimizer, loader, *_ = accelerator.prepare(*parts)
    if loops:
        for rows in loader:
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    model.destroy()


def from_file(**file: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, **file}


AUTO_ADAMW = {"type": "AdamW", "params": {"lr": "auto"}}
DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}


@pytest.mark.parametrize(
    ("file", "options", "text"),
    [
        (
            from_file(train_batch_size=256),
            {},
            "ConfigError: 1 problem in the configuration:\n"
            "  train_batch_size 256 is not train_micro_batch_size_per_gpu 2 x "
            "gradient_accumulation_steps 1 x world size 2 = 4; leave one of the three out, and it "
            "is computed from the others\n"
            '  (where the file says "auto", Accelerate filled in train_micro_batch_size_per_gpu '
            "from the DataLoader's batch_size, gradient_accumulation_steps from "
            "Accelerator(gradient_accumulation_steps=))",
        ),
        (
            from_file(fp16={"enabled": True}, bf16={"enabled": True}),
            {},
            "ConfigError: 1 problem in the configuration:\n"
            "  fp16.enabled, bf16.enabled: both are true, but parameters have one dtype; keep one "
            "of them\n"
            '  (where the file says "auto", Accelerate filled in fp16.enabled from mixed_precision, '
            "bf16.enabled from mixed_precision)",
        ),
        (
            from_file(
                zero_optimization={
                    "stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": "auto"},
                }
            ),
            {},
            "ConfigError: 1 problem in the configuration:\n"
            '  zero_optimization.offload_param.nvme_path: missing, and device "nvme" needs it; '
            'write a directory on a fast local disk, such as "/local_nvme"',
        ),
    ],
    ids=["batch sizes", "two precisions", "disk without a path"],
)
def test_values_that_cannot_hold_together_name_who_wrote_them(file, options, text):
    assert answers(in_accelerate, file, options, group=False)[0] == [text, text]


def in_accelerate(file: dict[str, Any], options: dict[str, Any]) -> None:
    prepared(file, **options)


@pytest.mark.parametrize(
    ("file", "options", "text"),
    [
        (
            from_file(optimizer=AUTO_ADAMW),
            {},
            "You cannot specify an optimizer in the config file and in the code at the same time.",
        ),
        (
            from_file(),
            {"dummies": ("optimizer",)},
            "You cannot create a `DummyOptim` without specifying an optimizer in the config file.",
        ),
        (
            from_file(fp16={"enabled": True}),
            {"mixed_precision": "bf16"},
            "`--mixed_precision` arg cannot be set to `bf16` when `fp16` is set in the DeepSpeed config",
        ),
        (
            from_file(),
            {"mixed_precision": "float16"},
            "Unknown mixed_precision mode: float16.",
        ),
        (
            from_file(optimizer=AUTO_ADAMW, scheduler=DECAY),
            {"dummies": ("optimizer", "scheduler")},
            "`scheduler.params.total_num_steps` not found in kwargs.",
        ),
    ],
    ids=["two optimizers", "no optimizer", "other precision", "no precision", "no total"],
)
def test_errors_of_accelerate_reach_the_program_as_they_are(file, options, text):
    for end in answers(in_accelerate, file, options, group=False)[0]:
        assert end.startswith(f"ValueError: {text}")


def in_trainer(
    file: dict[str, Any], output: str, options: dict[str, Any], method: str = "train"
) -> None:
    import transformers
    from transformers import Trainer, TrainingArguments

    forget()
    args = TrainingArguments(output, deepspeed=file, use_cpu=True, report_to=[], **options)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8)
    )
    data = [{"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.ones(4).long()}] * 8
    getattr(Trainer(model, args, train_dataset=data, eval_dataset=data), method)()


TRAINER = {"per_device_train_batch_size": 2, "max_steps": 1, "save_strategy": "no"}


def test_the_trainer_s_comparison_of_its_arguments_with_the_file_reaches_the_program(tmp_path):
    file = from_file(
        train_micro_batch_size_per_gpu=4,
        gradient_clipping=0.25,
        gradient_accumulation_steps="auto",
    )
    ends, _ = answers(in_trainer, file, str(tmp_path), TRAINER, group=False)
    assert ends[0] == ends[1]
    assert ends[0].startswith(
        "ValueError: Please correct the following DeepSpeed config values that mismatch TrainingArguments"
    )
    assert "ds train_micro_batch_size_per_gpu=4 vs hf per_device_train_batch_size=2" in ends[0]
    assert "ds gradient_clipping=0.25 vs hf max_grad_norm=1.0" in ends[0]


def test_what_the_trainer_filled_in_is_told_with_our_error(tmp_path):
    file = from_file(
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        unit_min_numel=10**9,
        unit_max_numel=10,
        zero_optimization={"stage": 2, "compute_grad_norm": False},
    )
    text = (
        "ConfigError: 2 problems in the configuration:\n"
        "  gradient_clipping: 1 needs the gradient norm, which "
        "zero_optimization.compute_grad_norm: false switches off; write gradient_clipping: 0, or "
        "compute_grad_norm: true\n"
        "  unit_min_numel: 1000000000 is above unit_max_numel 10; merged units would be split "
        "again\n"
        '  (where the file says "auto", the Trainer filled in gradient_clipping from '
        "max_grad_norm)"
    )
    ends, _ = answers(in_trainer, file, str(tmp_path), TRAINER, group=False)
    assert ends == [text, text]


def test_the_trainer_evaluates_with_a_schedule_in_the_file_for_which_there_are_no_steps(tmp_path):
    """Transformers drops the optimizer from the file then, and fills 0 steps into the schedule."""
    file = from_file(
        train_micro_batch_size_per_gpu="auto",
        optimizer=AUTO_ADAMW,
        scheduler=DECAY,
        zero_optimization={"stage": 3},
    )
    ends, _ = answers(in_trainer, file, str(tmp_path), TRAINER, "evaluate", group=False)
    assert ends == ["fine", "fine"]


def schedule_alone() -> None:
    import deepspeed

    file = {key: value for key, value in config().items() if key != "optimizer"}
    deepspeed.initialize(model=net(), config={**file, "scheduler": {"type": "WarmupLR"}})


def test_a_schedule_without_an_optimizer_in_a_program_s_own_configuration_is_an_error():
    text = (
        "UsageError: a learning-rate schedule needs an optimizer, and there is none. Pass one to "
        "initialize(), or name one in the config."
    )
    assert answers(schedule_alone)[0] == [text, text]


# ---------------------------------------------------------------------- the program and the configuration


def with_strange_parameters() -> None:
    import deepspeed

    deepspeed.initialize(model=net(), model_parameters=list(net().parameters()), config=config())


def test_parameters_of_another_model():
    text = (
        "UsageError: the optimizer (or model_parameters) holds 4 parameters that are not in the "
        "model (the first has shape (4, 3)). They would never be reduced or updated. Build the "
        "optimizer from the parameters of the model that you pass, after the last change that "
        "replaces parameters."
    )
    assert answers(with_strange_parameters)[0] == [text, text]


def wraps_in_ddp() -> None:
    import deepspeed

    deepspeed.initialize(model=nn.parallel.DistributedDataParallel(net()), config=config())


def test_a_model_in_ddp():
    text = (
        "UsageError: model is wrapped in DistributedDataParallel, which also distributes it over "
        "ranks or devices. Pass the model itself: model.module."
    )
    assert answers(wraps_in_ddp)[0] == [text, text]


def built(init: dict[str, Any], then: dict[str, Any]) -> None:
    """A model built under ``zero.Init`` with one configuration, trained with another."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=init):
        model = net()
    engine, *_ = deepspeed.initialize(model=model, config=then)
    wanted, *_ = deepspeed.initialize(model=net(), config=then)
    for each in (engine, wanted):
        dtype = next(each.parameters()).dtype
        each.backward(each(torch.ones(2, 3, dtype=dtype)).float().square().mean())
        each.step()
    for (_, found), (_, value) in zip(
        engine.iter_full_params(), wanted.iter_full_params(), strict=True
    ):
        torch.testing.assert_close(found.float(), value.float(), rtol=2e-2, atol=1e-2)
    engine.destroy()
    wanted.destroy()


def test_a_model_built_sharded_may_be_trained_at_another_stage():
    for stage in some_stages((0, 1, 2)):
        assert answers(built, config(3), config(stage)) == (["fine"] * 2, [[], []])


def test_a_model_built_in_bfloat16_and_trained_in_no_mode_is_one_line():
    ends, lines = answers(built, config(3, bf16={"enabled": True}), config(3))
    assert ends == ["fine", "fine"]
    assert lines == [
        [
            "[Rank 0] 21 trained elements of the model are bfloat16, and the configuration "
            "enables neither bf16 nor fp16. They are updated in bfloat16, so small updates are "
            'lost to rounding. Write "bf16": {"enabled": true} for float32 masters, or load the '
            "model in float32."
        ],
        [],
    ]


def test_an_engine_that_only_runs_a_bfloat16_model_says_nothing():
    assert answers(runs_only) == (["fine", "fine"], [[], []])


def runs_only() -> None:
    import deepspeed

    file = {key: value for key, value in config(3).items() if key != "optimizer"}
    engine, *_ = deepspeed.initialize(model=net().bfloat16(), config=file)
    engine(torch.ones(2, 3).bfloat16())
    engine.destroy()


def test_steps_shorter_than_the_configured_accumulation_are_one_line():
    file = from_file(gradient_accumulation_steps=4)
    options = {"gradient_accumulation_steps": 4, "loops": True}
    ends, lines = answers(in_accelerate, file, options, group=False)
    assert ends == ["fine", "fine"]
    assert lines == [
        [
            "[Rank 0] 3 steps in a row had 1 backward(s), and each loss was divided by "
            "gradient_accumulation_steps=4: gradients are too small. Accumulate gradients (with "
            "Accelerate: inside accelerator.accumulate(model)), or set "
            "gradient_accumulation_steps to the number of backwards in a step."
        ],
        [],
    ]


def left_auto() -> None:
    import deepspeed

    deepspeed.initialize(model=net(), config=config(optimizer=AUTO_ADAMW))


def test_an_auto_that_nobody_filled_in_is_an_error():
    text = (
        'ConfigError: 1 problem in the configuration:\n  optimizer.params.lr: "auto" is left: '
        "libraries such as Transformers and Accelerate replace it, here nothing did, and a default would "
        "decide what is trained; write a number"
    )
    assert answers(left_auto)[0] == [text, text]


# ---------------------------------------------------------------------- Lightning

PROGRAM = """
import json
import lightning
import transformers.integrations.deepspeed  # which does not find deepspeed and does not need it here
import torch
from torch.utils.data import DataLoader

from zeroshard.integrations.lightning import ZeroShardStrategy


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(strategy, **options):
    trainer = lightning.Trainer(
        strategy=ZeroShardStrategy(**strategy), accelerator="cpu", devices=1, max_steps=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, **options,
    )
    trainer.fit(Net(), DataLoader(torch.ones(4, 3), 2))


def answer(*args, **options):
    try:
        fit(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def stage_2(**keys):  # Lightning writes into it
    return {"zero_optimization": {"stage": 2}, **keys}


print("ANSWERS", json.dumps({
    "stage": answer({"stage": 3, "config": stage_2()}),
    "same stage": answer({"stage": 2, "config": stage_2()}),
    "offload": answer({"offload_optimizer": True, "config": stage_2()}),
    "clip": answer({"config": stage_2(gradient_clipping=0.25)}, gradient_clip_val=1.0),
    "same clip": answer({"config": stage_2(gradient_clipping=1.0)}, gradient_clip_val=1),
    "precision": answer({"config": stage_2(fp16={"enabled": True})}, precision="bf16-mixed"),
    "accumulation": answer({"config": stage_2(gradient_accumulation_steps=2)}),
}), flush=True)
"""

LIGHTNING = {
    "stage": (
        "UsageError: ZeroShardStrategy(stage=3) and zero_optimization.stage: 2 in config: with "
        "config=, the stage is read only from config. Remove the argument, or change the config."
    ),
    "same stage": "fine",
    "offload": (
        "UsageError: ZeroShardStrategy(offload_optimizer=True), and config has no "
        "zero_optimization.offload_optimizer.device: with config=, offloading is read only from "
        "config. Write it into the config."
    ),
    "clip": (
        "UsageError: Trainer(gradient_clip_val=1.0) and gradient_clipping: 0.25 in the "
        "configuration: only the second would have an effect. Use only one of them."
    ),
    "same clip": "fine",
    "precision": (
        'UsageError: Trainer(precision="bf16-mixed") and fp16.enabled: true in the configuration: '
        "parameters have one dtype. Use the same precision in both."
    ),
    "accumulation": "MisconfigurationException: Do not set `gradient_accumulation_steps` in the "
    "DeepSpeed config as this will be set with the `accumulate_grad_batches` argument passed via the "
    "Lightning Trainer.",
}


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_s_arguments_that_contradict_the_configuration(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "program.py"]
    done = warm_python.run(command, cwd=tmp_path, env=environ, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ANSWERS"))
    assert json.loads(line.removeprefix("ANSWERS")) == LIGHTNING
