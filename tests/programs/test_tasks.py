"""Common tasks, written for Transformers, Accelerate or DeepSpeed, train as under plain DDP.

The programs in this folder run unedited on two ranks in fp32 with ZeRO-1, 2 and 3. Each saves and
resumes; a checkpoint of three ranks also resumes on two. In bf16 they are compared with the real
DeepSpeed, if it is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import (
    PLAIN,
    assert_losses,
    logged,
    needs_deepspeed_itself,
    on_warm_ranks,
    under_deepspeed_itself,
)
from support.covering import sampled
from tiny_models import save_model, task_rows, write_rows
from zeroshard_testing.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")

HERE = Path(__file__).parent
TASKS = {  # a task, and the model that it starts from; heads that this one lacks are fresh
    "causal": "llama",
    "masked": "bert",
    "classify": "bert",
    "answer": "bert",
    "tag": "bert",
    "translate": "marian",
}
AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "steps_per_print": 2000, "wall_clock_breakdown": False,
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
                 "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"}}  # fmt: skip
ZERO: dict[int, dict[str, Any]] = {  # in the form in which examples of the Trainer have them
    1: {"stage": 1, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 2e8},
    2: {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
        "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True},
    3: {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, deepspeed_on_ranks: None) -> Path:
    """Models, data and configurations."""
    folder = tmp_path_factory.mktemp("tasks")
    for name in {*TASKS.values()}:
        run_ranks(save_model, 1, name, str(folder / name), group=False)
    write_rows(folder / "rows.jsonl", task_rows())
    for stage, zero in ZERO.items():
        file = folder / f"ds_zero{stage}.json"
        file.write_text(json.dumps({**AUTO, "zero_optimization": zero}))
    return folder


# ---------------------------------------------------------------- through the Trainer


def arguments(
    root: Path, task: str, out: str, *options: str, batch: int = 2, stage: int = 0
) -> tuple[str, ...]:
    """Stage 0 is plain data parallelism."""
    deepspeed = ("--deepspeed", str(root / f"ds_zero{stage}.json")) if stage else ()
    return (
        "--task", task, "--model_name_or_path", str(root / TASKS[task]),
        "--data", str(root / "rows.jsonl"), "--output_dir", str(root / out), "--max_steps", "4",
        "--logging_steps", "1", "--learning_rate", "1e-2", "--per_device_train_batch_size", str(batch),
        "--per_device_eval_batch_size", "2", "--save_steps", "2", "--report_to", "none",
        "--use_cpu", "true", "--disable_tqdm", "true", *deepspeed, *options,
    )  # fmt: skip


def finetune(
    root: Path, task: str, out: str, *options: str, ranks: int = 2, batch: int = 2, stage: int = 0
) -> Path:
    """The folder of a run."""
    words = arguments(root, task, out, *options, batch=batch, stage=stage)
    on_warm_ranks(ranks, HERE / "finetune.py", *words)
    return root / out


def assert_same_run(found: Path, wanted: Path) -> None:
    """Compares losses, norms of gradients, learning rates and the predictions of the trained model."""
    for what, relative in (("loss", 3e-6), ("grad_norm", 2e-5), ("learning_rate", 0)):
        runs = (logged(folder / "trainer_state.json", what) for folder in (found, wanted))
        assert_losses(*runs, relative=relative)
    said, reference = (json.loads((run / "answers.json").read_text()) for run in (found, wanted))
    assert said["loss"] == pytest.approx(reference["loss"], rel=3e-5)
    assert_close(said["said"], reference["said"])


def assert_close(found: Any, wanted: Any) -> None:
    """Equal up to a constant for each row. A softmax loss does not depend on this constant, so its
    gradient is only rounding, and Adam makes steps of normal size of it."""
    import torch

    if isinstance(wanted[0][0], list) and len({len(part[0]) for part in wanted}) > 1:
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
        return
    one, other = (torch.tensor(rows, dtype=torch.float64) for rows in (found, wanted))
    one, other = (rows - rows.mean(-1, keepdim=True) for rows in (one, other))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("task", sampled([*TASKS], every=3))
def test_a_task_trains_as_under_ddp_and_its_checkpoint_resumes_on_as_many_ranks_and_on_fewer(
    task: str, root: Path
) -> None:
    plain = finetune(root, task, f"{task}-ddp", "--save_strategy", "no")
    for stage in (1 + list(TASKS).index(task) % 2, 3):  # stages 1 and 2 take turns
        saves = "steps" if stage == 3 else "no"
        run = finetune(root, task, f"{task}-{stage}", "--save_strategy", saves, stage=stage)
        assert_same_run(run, plain)
    again = ("--resume_from_checkpoint", str(run / "checkpoint-2"), "--save_strategy", "no")
    resumed = finetune(root, task, f"{task}-again", *again, stage=3)
    assert losses_of(resumed) == losses_of(run)

    # Otherwise the Trainer multiplies some models' losses by the number of ranks, under DDP as well.
    mean = ("--average_tokens_across_devices", "false")
    three = finetune(root, task, f"{task}-three", *mean, ranks=3, batch=2, stage=3)
    again = ("--resume_from_checkpoint", str(three / "checkpoint-2"), "--save_strategy", "no")
    two = finetune(root, task, f"{task}-two", *mean, *again, ranks=2, batch=3, stage=3)
    assert_losses(losses_of(two), losses_of(three), relative=1e-5)


def losses_of(run: Path) -> list[float]:
    return logged(run / "trainer_state.json", "loss")


# ---------------------------------------------------------------- compared with the real DeepSpeed

IN_BF16 = ("--bf16", "true", "--save_strategy", "no")


@pytest.fixture(scope="module")
def deepspeed_itself(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs of DeepSpeed, in the folders ``theirs-TASK-STAGE``; stage 3 last, since it replaces
    ``torch.nn.functional.linear`` for good."""
    under_deepspeed_itself(
        HERE / "finetune.py",
        *(
            arguments(root, task, f"theirs-{task}-{stage}", *IN_BF16, stage=stage)
            for stage in (1, 2, 3)
            for task in ("causal", "classify")
        ),
        cwd=tmp_path_factory.mktemp("theirs"),
    )


@needs_deepspeed_itself
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("deepspeed_itself")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("task", ["causal", "classify"])
def test_a_task_in_bf16_trains_as_under_deepspeed_itself(task: str, stage: int, root: Path) -> None:
    """At stage 3 DeepSpeed replaces linear layers by a class that rounds differently if there is a bias.
    Losses of this classifier are bf16 numbers and differ by at most one unit in the last place."""
    ours = finetune(root, task, f"bf16-{task}-{stage}", *IN_BF16, stage=stage)
    other_order = stage == 3 and task == "classify"
    relative = (
        {"loss": 2**-8, "grad_norm": 2e-3} if other_order else {"loss": 3e-6, "grad_norm": 3e-6}
    )
    for what, close in relative.items():
        runs = (ours, root / f"theirs-{task}-{stage}")
        assert_losses(*(logged(run / "trainer_state.json", what) for run in runs), relative=close)


# ---------------------------------------------------------------- loops of one's own


def loop(root: Path, out: str, *options: str, ranks: int = 2, stage: int = 0) -> dict[str, Any]:
    """A run of the loop, with the variables that ``accelerate launch`` sets for a configuration file."""
    environ = PLAIN
    if stage:
        environ = {
            "ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2", "ACCELERATE_GRADIENT_CLIPPING": "1.0",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true" if stage == 3 else "false",
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        }  # fmt: skip
    on_warm_ranks(
        ranks, HERE / "loop.py", "--model", str(root / "bert"), "--data", str(root / "rows.jsonl"),
        "--output_dir", str(root / out), *options, **environ,
    )  # fmt: skip
    found: dict[str, Any] = json.loads((root / out / "losses.json").read_text())
    return found


def test_a_loop_with_accelerate_trains_as_under_ddp_and_resumes_on_fewer_ranks(root: Path) -> None:
    plain = loop(root, "loop-ddp")
    for stage in (1, 2, 3):
        run = loop(root, f"loop-{stage}", stage=stage)
        assert_losses(run["losses"], plain["losses"])
        assert run["right"] == plain["right"]
    again = ("--resume_from_checkpoint", str(root / "loop-3" / "step_2"))
    assert loop(root, "loop-again", *again, stage=3)["losses"] == run["losses"][4:]

    three = loop(root, "loop-three", ranks=3, stage=3)["losses"]
    again = ("--resume_from_checkpoint", str(root / "loop-three" / "step_2"), "--batch", "3")
    assert_losses(loop(root, "loop-two", *again, stage=3)["losses"], three[4:], relative=1e-5)


def rlhf(root: Path, out: str, *options: str, ranks: int = 2) -> list[list[float]]:
    """Losses of actor and critic, and the reward, of each step."""
    on_warm_ranks(
        ranks, HERE / "rlhf.py", "--model", str(root / "llama"), "--output_dir", str(root / out),
        *options,
    )  # fmt: skip
    found: list[list[float]] = json.loads((root / out / "losses.json").read_text())["losses"]
    return found


def test_ppo_with_three_engines_trains_as_under_ddp_and_resumes_on_fewer_ranks(root: Path) -> None:
    plain = rlhf(root, "rlhf-ddp")
    for stage in (1, 2, 3):
        run = rlhf(root, f"rlhf-{stage}", "--stage", str(stage))
        for found, wanted in zip(run, plain, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert rlhf(root, "rlhf-3", "--stage", "3", "--resume") == run[2:]

    three = rlhf(root, "rlhf-three", "--stage", "3", ranks=3)
    two = rlhf(root, "rlhf-three", "--stage", "3", "--batch", "3", "--resume")
    for found, wanted in zip(two, three[2:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
