"""Programs that packages ship train under ZeRO-1, 2 and 3 as under plain DDP, and resume.

Each program runs as its package ships it, on two CPU ranks, with tiny random models. Its configuration
has the form in which its project ships configurations. ``make test-programs`` installs the packages. A
program whose package is not installed is skipped, and the end of the run says so.
"""

from __future__ import annotations

import json
import random
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from programs import assert_losses, logged, on_warm_ranks, with_deepspeed
from tiny_models import save_model, sentence, write_rows
from zeroshard_testing.ranks import pool, run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")


class Program(NamedTuple):
    """A program of a package."""

    package: str
    script: str  # in the package
    rows: str  # the file of data
    options: str
    draws: bool = False  # the tokens that it trains on


DRAWS = "--num_generations 4 --max_completion_length 6 --beta 0.1 --reward_funcs tiny_models.reward"
PROGRAMS = {
    "trl-sft": Program("trl", "scripts/sft.py", "text", ""),
    "trl-sft-lora": Program("trl", "scripts/sft.py", "text", "--use_peft --lora_r 4 --lora_dropout 0"),
    "trl-dpo": Program("trl", "scripts/dpo.py", "pairs", ""),
    "trl-kto": Program("trl", "scripts/kto.py", "judged", ""),
    "trl-reward": Program("trl", "scripts/reward.py", "pairs", ""),
    "trl-grpo": Program("trl", "scripts/grpo.py", "prompts", DRAWS, draws=True),
    "trl-rloo": Program("trl", "scripts/rloo.py", "prompts", DRAWS, draws=True),
    "llamafactory-sft": Program("llamafactory", "launcher.py", "alpaca", "--stage sft"),
    "llamafactory-lora": Program("llamafactory", "launcher.py", "alpaca",
                                 "--stage sft --finetuning_type lora"),
    "llamafactory-pt": Program("llamafactory", "launcher.py", "plain", "--stage pt"),
    "llamafactory-dpo": Program("llamafactory", "launcher.py", "ranked", "--stage dpo"),
    "swift-sft": Program("swift", "cli/sft.py", "chat", ""),
    "swift-lora": Program("swift", "cli/sft.py", "chat", "--tuner_type lora --lora_dropout 0"),
}  # fmt: skip


def missing(package: str) -> bool:
    """Scripts of TRL before 1.0 have other arguments."""
    return find_spec(package) is None or (package == "trl" and version("trl").startswith("0."))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, deepspeed_on_ranks: None) -> Path:
    """The model, data of every form, and LLaMA-Factory's configurations."""
    folder = tmp_path_factory.mktemp("packages")
    run_ranks(save_model, 1, "llama", str(folder / "model"), group=False)
    for name, rows in all_rows().items():
        write_rows(folder / name / "train.jsonl", rows)
    columns = {"prompt": "prompt", "response": "completion"}
    (folder / "dataset_info.json").write_text(json.dumps({
        "alpaca": {"file_name": "alpaca/train.jsonl", "columns": columns},
        "plain": {"file_name": "text/train.jsonl", "columns": {"prompt": "text"}},
        "ranked": {"file_name": "pairs/train.jsonl", "ranking": True,
                   "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}},
    }))  # fmt: skip
    for stage in (1, 2, 3):
        config = factory_config(stage)
        (folder / f"ds_z{stage}_config.json").write_text(json.dumps(config))
        config["tensor_parallel"] = {"autotp_size": 2}
        (folder / f"ds_z{stage}_tensor.json").write_text(json.dumps(config))
    return folder


def all_rows(count: int = 48) -> dict[str, list[dict[str, Any]]]:
    chance = random.Random(2)
    texts = [[sentence(chance) for _ in range(3)] for _ in range(count)]
    return {
        "text": [{"text": one} for one, _, _ in texts],
        "pairs": [{"prompt": one + " ", "chosen": two, "rejected": three} for one, two, three in texts],
        # KTO pairs each prompt with the completion before it in batches of one rank: with two completions
        # in turn those are the same pairs in batches of four and of six.
        "judged": [{"prompt": one + " ", "completion": texts[number % 2][1], "label": number % 4 < 2}
                   for number, (one, _, _) in enumerate(texts)],
        "prompts": [{"prompt": one} for one, _, _ in texts],
        "alpaca": [{"prompt": one, "completion": two} for one, two, _ in texts],
        "chat": [{"messages": [{"role": "user", "content": one},
                               {"role": "assistant", "content": two}]} for one, two, _ in texts],
    }  # fmt: skip


def factory_config(stage: int) -> dict[str, Any]:
    """A file of LLaMA-Factory's examples."""
    zero: dict[str, Any] = {
        "stage": stage, "allgather_partitions": True, "allgather_bucket_size": 5e8,
        "overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": 5e8,
        "contiguous_gradients": True, "round_robin_gradients": True,
    }  # fmt: skip
    if stage == 3:
        zero = {
            "stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
        }  # fmt: skip
    scaler = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
              "min_loss_scale": 1}  # fmt: skip
    return {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True, "fp16": {"enabled": "auto", **scaler},
        "bf16": {"enabled": "auto"}, "zero_optimization": zero,
    }  # fmt: skip


@with_deepspeed
def launch_switches(config: str) -> dict[str, str]:
    """The variables that ``accelerate launch --config_file`` sets for a program."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    options = ["--config_file", config, "--num_processes", "2", "--mixed_precision", "no", "it.py"]
    with mock.patch.object(launch, "deepspeed_launcher") as launcher:
        launch.launch_command(launch.launch_command_parser().parse_args(options))
    _, environ = prepare_deepspeed_cmd_env(launcher.call_args.args[0])
    return {name: value for name, value in environ.items() if name.startswith("ACCELERATE_")}


def prepare_rank() -> None:
    """LLaMA-Factory imports torchaudio, to read sound: none is read here."""
    if "torchaudio" not in sys.modules and find_spec("torchaudio") is None:
        empty = types.ModuleType("torchaudio")
        empty.__spec__ = ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = empty


def has_imported_swift() -> bool:
    """Whether this rank ran a program of ms-swift, which changes the Trainer of its process for good."""
    return "swift" in sys.modules


def arguments(program: Program, root: Path, stage: int) -> tuple[list[str], dict[str, str]]:
    """The arguments and environment variables of the package's program."""
    folder = Path(str(find_spec(program.package).origin)).parent  # type: ignore[union-attr]
    model, data, environ = str(root / "model"), str(root / program.rows), {}
    if program.package == "trl":
        options = [*program.options.split(), "--dataset_name", data, "--model_name_or_path", model,
                   "--dtype", "float32", "--bf16", "false"]  # fmt: skip
        if stage:
            config = str(folder / "accelerate_configs" / f"zero{stage}.yaml")
            environ = run_ranks(launch_switches, 1, config, group=False)[0]
    elif program.package == "llamafactory":
        options = ["--finetuning_type", "full", *program.options.split(), "--do_train", "true",
                   "--dataset", program.rows, "--dataset_dir", str(root), "--template", "default",
                   "--model_name_or_path", model, "--cutoff_len", "48",
                   "--preprocessing_num_workers", "1"]  # fmt: skip
        options += ["--disable_gradient_checkpointing", "true"] if not stage else []
        options += ["--deepspeed", str(root / f"ds_z{stage}_config.json")] if stage else []
        environ = {"DISABLE_VERSION_CHECK": "1"}
    else:
        options = ["--tuner_type", "full", *program.options.split(), "--model", model,
                   "--model_type", "llama", "--template", "default", "--dataset", f"{data}/train.jsonl",
                   "--torch_dtype", "float32", "--fp16", "false",  # the default is fp16
                   "--split_dataset_ratio", "0", "--max_length", "48", "--dataset_num_proc", "1",
                   "--dataloader_num_workers", "0", "--save_only_model", "false",
                   "--add_version", "false",
                   "--check_model", "false"]  # it asks a hub for a newer model  # fmt: skip
        options += ["--deepspeed", f"zero{stage}"] if stage else []
        environ = {"MODELSCOPE_CACHE": str(root / "cache")}
    return options, {"HF_HOME": str(root / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1", **environ}


def run(
    name: str, root: Path, out: str, *rest: str, ranks: int = 2, batch: int = 4, stage: int = 0,
    draws_alike: bool = False,
) -> Path:  # fmt: skip
    """The folder of a run of four steps that saves after two; stage 0 is plain data parallelism.
    With ``same_draws.py`` runs sample the same tokens on any number of ranks."""
    program = PROGRAMS[name]
    options, environ = arguments(program, root, stage)
    folder = Path(str(find_spec(program.package).origin)).parent  # type: ignore[union-attr]
    if program.package != "swift" and len(pool()):
        if any(run_ranks(has_imported_swift, len(pool()), group=False)):
            pool().kill()
    if program.package == "llamafactory":
        run_ranks(prepare_rank, ranks, group=False)
    script = [str(folder / program.script)]
    if program.draws and draws_alike:
        script.insert(0, str(Path(__file__).with_name("same_draws.py")))
    on_warm_ranks(
        ranks, Path(script[0]), *script[1:], *options, "--output_dir", str(root / out),
        "--max_steps", "4", "--logging_steps", "1", "--learning_rate", "1e-3",
        "--per_device_train_batch_size", str(batch), "--save_strategy", "steps", "--save_steps", "2",
        "--report_to", "none", "--use_cpu", "true", *rest, **environ,
    )  # fmt: skip
    return root / out


def logged_of(folder: Path, what: str) -> list[float]:
    return logged(folder / "checkpoint-4" / "trainer_state.json", what)


def assert_same_steps(found: Path, wanted: Path) -> None:
    """Compares losses and norms of gradients. RLOO's loss is 0 except for rounding."""
    losses = (logged_of(folder, "loss") for folder in (found, wanted))
    assert next(losses) == pytest.approx(next(losses), rel=1e-5, abs=2e-7)
    assert_losses(*(logged_of(folder, "grad_norm") for folder in (found, wanted)), relative=2e-5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                missing(program.package), reason=f"no {program.package}: make test-programs"
            ),
        )
        for name, program in PROGRAMS.items()
    ],
)
def test_a_public_program_trains_as_under_ddp_and_resumes_on_as_many_ranks_and_on_fewer(
    name: str, root: Path
) -> None:
    plain = run(name, root, f"{name}-ddp")
    assert len(logged_of(plain, "loss")) == 4
    for stage in (1, 2, 3):
        found = run(name, root, f"{name}-{stage}", stage=stage)
        assert_same_steps(found, plain)
    resume = ("--resume_from_checkpoint", str(found / "checkpoint-2"))
    again = run(name, root, f"{name}-again", *resume, stage=3)
    assert logged_of(again, "loss") == logged_of(found, "loss")

    three = run(name, root, f"{name}-three", ranks=3, stage=3, draws_alike=True)
    resume = ("--resume_from_checkpoint", str(three / "checkpoint-2"))
    two = run(name, root, f"{name}-two", *resume, batch=6, stage=3, draws_alike=True)
    assert_same_steps(two, three)


@pytest.mark.timeout(600)
@pytest.mark.skipif(missing("llamafactory"), reason="no llamafactory: make test-programs")
@pytest.mark.parametrize("name", ["llamafactory-sft", "llamafactory-lora", "llamafactory-dpo"])
def test_a_public_program_trains_over_tensor_ranks_as_in_one_process(name: str, root: Path) -> None:
    plain = run(name, root, f"{name}-one", ranks=1)
    for stage in (1, 2):
        tensor = ("--deepspeed", str(root / f"ds_z{stage}_tensor.json"))
        found = run(name, root, f"{name}-tensor-{stage}", *tensor, stage=stage)
        assert_same_steps(found, plain)
