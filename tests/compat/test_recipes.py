"""The recipes of ``examples/`` run unedited, with the losses of plain data parallelism.

Every program runs once on two ranks, under the launcher that its first lines name. It is compared with
the same program without DeepSpeed: PyTorch's DistributedDataParallel, in fp32.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import sys
from itertools import chain, islice, repeat
from pathlib import Path

import pytest
from programs import (
    EXAMPLES,
    PLAIN,
    ROOT,
    accelerate_launch,
    assert_losses,
    launched,
    logged,
    needs_deepspeed_itself,
    on_warm_ranks,
    printed,
    torchrun,
    under_deepspeed_itself,
    with_deepspeed,
)
from zeroshard_testing.ranks import RanksFailed, run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")
pytest.importorskip("accelerate")


@with_deepspeed
def save_tiny_model(recipe: str, folder: str) -> None:
    program = runpy.run_path(str(Path(recipe, "train.py")))
    program["build"](argparse.Namespace(smoke=True, model="none"))[0].save_pretrained(folder)


def tiny_model(recipe: Path, folder: Path) -> str:
    """The recipe's own tiny model, saved: DDP and ZeRO-3 draw random weights in another order."""
    run_ranks(save_tiny_model, 1, str(recipe), str(folder), group=False)
    return str(folder)


@with_deepspeed
def lacks(auto_class: str, folder: str) -> tuple[list[str], bool]:
    """What ``from_pretrained`` misses in a folder, and whether the embedding is the output."""
    import transformers

    loader = getattr(transformers, auto_class)
    model, report = loader.from_pretrained(folder, output_loading_info=True)
    outputs = model.get_output_embeddings()
    tied = outputs is not None and outputs.weight is model.get_input_embeddings().weight
    return sorted(report["missing_keys"]), tied


IMPORTS = ("transformers.trainer", "accelerate")
"""What the launcher imports for its ranks, with ``deepspeed`` on its path as they have it."""
ROUNDED = 2e-2  # what fp16 and bf16 may change in a loss, of 1
ON_CPU = ("--use_cpu", "true", "--ddp_backend", "gloo")  # the Trainer without DeepSpeed


# ---------------------------------------------------------------- a plain loop, ZeRO-1, fp16

PLAIN_LOOP = EXAMPLES / "plain_loop"
STEPS = 8


@with_deepspeed
def plain_loop_under_ddp(steps: int) -> list[float]:
    """The program's model, data and schedule in a loop of plain PyTorch."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    program = runpy.run_path(str(PLAIN_LOOP / "train.py"))
    config = json.loads((PLAIN_LOOP / "ds_config.json").read_text())
    torch.manual_seed(0)
    model, dataset = program["build"](argparse.Namespace(smoke=True))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset))
    batches = chain.from_iterable(repeat(loader))
    warm = config["scheduler"]["params"]["warmup_num_steps"]
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-4 * math.log(max(1, step)) / math.log(warm)
        both = []
        for (tokens,) in islice(batches, 2):
            both.append(ddp(input_ids=tokens, labels=tokens).loss)
            (both[-1] / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(both).detach().mean()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


@pytest.fixture(scope="module")
def ddp_plain_loop() -> list[float]:
    return run_ranks(plain_loop_under_ddp, 2, STEPS)[0]


def plain_loop_options(config: Path) -> tuple[str, ...]:
    return ("--smoke", "--steps", str(STEPS), "--deepspeed_config", str(config))


@pytest.mark.full
def test_plain_loop_in_fp16_under_our_launcher(tmp_path: Path, ddp_plain_loop: list[float]) -> None:
    text = launched(
        *(sys.executable, "-m", "zeroshard.cli.main", "launch", "--as-deepspeed", "--nproc", "2"),
        *(str(PLAIN_LOOP / "train.py"), *plain_loop_options(PLAIN_LOOP / "ds_config.json")),
        cwd=tmp_path, warm_ranks=False, PYTHONPATH="",
    )  # fmt: skip
    assert_losses(printed(text), ddp_plain_loop, relative=ROUNDED)
    assert printed(text, "scale") == STEPS * [2.0**12]


def test_plain_loop_in_fp32_has_the_losses_of_ddp(
    tmp_path: Path, ddp_plain_loop: list[float]
) -> None:
    config = json.loads((PLAIN_LOOP / "ds_config.json").read_text())
    config["fp16"]["enabled"] = False
    file = tmp_path / "fp32.json"
    file.write_text(json.dumps(config))
    text = on_warm_ranks(2, PLAIN_LOOP / "train.py", *plain_loop_options(file))
    assert_losses(printed(text), ddp_plain_loop)


# ---------------------------------------------------------------- sentence pairs, ZeRO-2

MRPC = EXAMPLES / "mrpc"
MRPC_OPTIONS = ("--smoke", "--max_steps", "8", "--lr", "1e-3", "--output")


@with_deepspeed
def read_pairs(file: str) -> list[tuple[int, str, str]]:
    return runpy.run_path(str(MRPC / "train.py"))["_read"](Path(file))


@pytest.fixture(scope="module")
def ddp_mrpc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mrpc-ddp")
    on_warm_ranks(2, MRPC / "train.py", *MRPC_OPTIONS, str(folder), **PLAIN)
    return folder / "metrics.jsonl"


@pytest.fixture(scope="module")
def mrpc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in fp32, everything else as in the YAML."""
    folder = tmp_path_factory.mktemp("mrpc")
    launched(
        *accelerate_launch(MRPC / "zero2.yaml", "--mixed_precision", "no"),
        *(str(MRPC / "train.py"), *MRPC_OPTIONS, str(folder)),
        cwd=folder, imports=IMPORTS,
    )  # fmt: skip
    return folder


def test_mrpc_has_the_losses_rates_and_scores_of_ddp(mrpc: Path, ddp_mrpc: Path) -> None:
    found = mrpc / "metrics.jsonl"
    for what in ("loss", "lr", "accuracy", "f1"):
        assert_losses(logged(found, what), logged(ddp_mrpc, what))


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mrpc_in_16_bit_stays_near(precision: str, tmp_path: Path, ddp_mrpc: Path) -> None:
    on_warm_ranks(
        2, MRPC / "train.py", *MRPC_OPTIONS, str(tmp_path),
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_ZERO_STAGE="2",
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS="2",
        ACCELERATE_MIXED_PRECISION=precision,
    )  # fmt: skip
    assert_losses(logged(tmp_path / "metrics.jsonl"), logged(ddp_mrpc), relative=ROUNDED)


def test_mrpc_saves_a_model_that_transformers_loads(mrpc: Path) -> None:
    auto_class = "AutoModelForSequenceClassification"
    assert run_ranks(lacks, 1, auto_class, str(mrpc / "model"), group=False) == [([], False)]


def test_mrpc_keeps_a_state_to_go_on_from(mrpc: Path) -> None:
    assert (mrpc / "state" / "pytorch_model" / "latest").exists() or any(
        (mrpc / "state").rglob("latest")
    )


@pytest.mark.parametrize(
    "row",
    ['1\t7\t8\tHe said , " no .\tNo', '1\t7\t8\t"He said \t "" no ."\tNo'],
    ids=["published", "spreadsheet"],
)
def test_mrpc_reads_both_ways_of_writing_quotation_marks(row: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.txt"
    file.write_text(f"\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n{row}\n{row}\n")
    (read,) = run_ranks(read_pairs, 1, str(file), group=False)
    assert read == 2 * [(1, 'He said , " no .', "No")]


def test_mrpc_refuses_a_file_of_another_shape(tmp_path: Path) -> None:
    file = tmp_path / "pairs.txt"
    file.write_text("label\tfirst\tsecond\n1\ta\tb\n")
    with pytest.raises(RanksFailed, match="lines of five columns"):
        run_ranks(read_pairs, 1, str(file), group=False)


# ---------------------------------------------------------------- seq2seq, a file full of "auto"

CHATBOT = EXAMPLES / "chatbot"
CHATBOT_OPTIONS = ("--smoke", "--steps", "8", "--warmup_steps", "3")


def test_chatbot_has_the_losses_and_norms_of_ddp(tmp_path: Path) -> None:
    ddp = on_warm_ranks(2, CHATBOT / "train.py", *CHATBOT_OPTIONS, **PLAIN)
    text = launched(  # from the root of the repository: the YAML names the JSON from there
        *accelerate_launch(CHATBOT / "deepspeed.yaml"),
        *(str(CHATBOT / "train.py"), *CHATBOT_OPTIONS),
        cwd=ROOT, imports=IMPORTS,
    )  # fmt: skip
    assert_losses(printed(text), printed(ddp))
    assert_losses(printed(text, "norm"), printed(ddp, "norm"), relative=1e-5)


def test_chatbot_config_leaves_everything_to_auto() -> None:
    text = (CHATBOT / "ds_config.json").read_text()
    assert text.count('"auto"') >= 18


# ---------------------------------------------------------------- GPT-2, ZeRO-3, host memory

GPT2 = EXAMPLES / "gpt2_accelerate"
GPT2_OPTIONS = ("--smoke", "--steps", "6")


@pytest.fixture(scope="module")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(GPT2, tmp_path_factory.mktemp("tiny-gpt2"))


@pytest.fixture(scope="module")
def ddp_gpt2(tiny_gpt2: str) -> str:
    options = (*GPT2_OPTIONS, "--model", tiny_gpt2)
    return on_warm_ranks(2, GPT2 / "train.py", *options, **PLAIN)


def test_gpt2_offloaded_has_the_losses_norms_and_text_of_ddp(
    tmp_path: Path, ddp_gpt2: str, tiny_gpt2: str
) -> None:
    text = launched(
        *accelerate_launch(GPT2 / "zero3_offload.yaml", "--mixed_precision", "no"),
        *(str(GPT2 / "train.py"), *GPT2_OPTIONS, "--model", tiny_gpt2),
        *("--output", str(tmp_path)),
        cwd=tmp_path, imports=IMPORTS,
    )  # fmt: skip
    assert_losses(printed(text), printed(ddp_gpt2))
    assert_losses(printed(text, "norm"), printed(ddp_gpt2, "norm"), relative=1e-5)
    assert repr_of_text(text) == repr_of_text(ddp_gpt2)
    saved = run_ranks(lacks, 1, "AutoModelForCausalLM", str(tmp_path), group=False)
    assert saved == [([], True)]


@pytest.mark.full
def test_gpt2_in_bf16_stays_near(ddp_gpt2: str, tiny_gpt2: str) -> None:
    text = on_warm_ranks(
        2, GPT2 / "train.py", *GPT2_OPTIONS, "--model", tiny_gpt2,
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_ZERO_STAGE="3",
        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu",
        ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE="cpu",
        ACCELERATE_MIXED_PRECISION="bf16",
    )  # fmt: skip
    assert_losses(printed(text), printed(ddp_gpt2), relative=ROUNDED)


def repr_of_text(output: str) -> str:
    (line,) = (line for line in output.splitlines() if line.startswith("'import "))
    return line


# ---------------------------------------------------------------- Trainer: save, resume, best model

TRAINER = EXAMPLES / "trainer"
TRAINER_OPTIONS = (
    *("--smoke", "--max_steps", "8", "--save_steps", "4", "--eval_steps", "4", "--output_dir"),
)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return "--model", tiny_model(TRAINER, tmp_path_factory.mktemp("tiny-llama"))


def trainer_losses(folder: Path) -> list[float]:
    return logged(folder / "trainer_state.json")


@pytest.fixture(scope="module")
def ddp_trainer(tmp_path_factory: pytest.TempPathFactory, tiny_llama: tuple[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("trainer-ddp")
    on_warm_ranks(2, TRAINER / "train.py", *TRAINER_OPTIONS, str(folder), *tiny_llama, *ON_CPU)
    return folder


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, tiny_llama: tuple[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    launched(
        *(*torchrun(2), str(TRAINER / "train.py"), *TRAINER_OPTIONS, str(folder)),
        *(*tiny_llama, "--deepspeed", str(TRAINER / "ds_zero3.json")),
        cwd=folder, imports=IMPORTS,
    )  # fmt: skip
    return folder


def test_trainer_at_stage_3_has_the_losses_of_ddp(trainer: Path, ddp_trainer: Path) -> None:
    assert_losses(trainer_losses(trainer), trainer_losses(ddp_trainer))
    held_out = logged(trainer / "trainer_state.json", "eval_loss")
    assert_losses(held_out, logged(ddp_trainer / "trainer_state.json", "eval_loss"))
    assert_losses(held_out[-1:], [min(held_out)])  # of the best model, loaded again


@pytest.mark.full
def test_trainer_at_stage_2_with_its_own_optimizer_has_the_losses_of_ddp(
    tmp_path: Path, ddp_trainer: Path, tiny_llama: tuple[str, str]
) -> None:
    config = (*tiny_llama, "--deepspeed", str(TRAINER / "ds_zero2.json"))
    on_warm_ranks(2, TRAINER / "train.py", *TRAINER_OPTIONS, str(tmp_path), *config)
    assert_losses(trainer_losses(tmp_path), trainer_losses(ddp_trainer))


def test_trainer_resumes_on_one_rank_at_another_stage(trainer: Path, tmp_path: Path) -> None:
    """Saved by two ranks at stage 3; one rank sees the same batches in two halves."""
    config = json.loads((TRAINER / "ds_zero3.json").read_text())
    config["zero_optimization"]["stage"] = 2
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    on_warm_ranks(
        1, TRAINER / "train.py", *TRAINER_OPTIONS, str(tmp_path), "--deepspeed", str(file),
        *("--gradient_accumulation_steps", "2"),
        *("--resume_from_checkpoint", str(trainer / "checkpoint-4")),
    )  # fmt: skip
    assert_losses(trainer_losses(tmp_path), trainer_losses(trainer))


def test_trainer_leaves_a_model_that_transformers_loads(trainer: Path) -> None:
    saved = run_ranks(lacks, 1, "AutoModelForCausalLM", str(trainer), group=False)
    assert saved == [([], True)]


# ---------------------------------------------------------------- LLaVA with LoRA

LLAVA = EXAMPLES / "llava_lora"
LLAVA_OPTIONS = ("--smoke", "--max_steps", "6", "--learning_rate", "1e-2", "--output_dir")


@pytest.fixture(scope="module")
def tiny_llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    pytest.importorskip("peft")
    return "--model", tiny_model(LLAVA, tmp_path_factory.mktemp("tiny-llava"))


@pytest.fixture(scope="module")
def ddp_llava(tmp_path_factory: pytest.TempPathFactory, tiny_llava: tuple[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("llava-ddp")
    on_warm_ranks(2, LLAVA / "train.py", *LLAVA_OPTIONS, str(folder), *tiny_llava, *ON_CPU)
    return folder


def assert_adapters_alone(folder: Path, like: Path) -> None:
    """The saved tensors are those that PEFT trains, with the values of the other run."""
    from safetensors.torch import load_file

    found = load_file(folder / "adapter_model.safetensors")
    wanted = load_file(like / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    assert all("lora_" in name or "multi_modal_projector" in name for name in found)
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert (found[name] - value).abs().max() < 2e-4, name
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("stage", [2, 3])
def test_llava_has_the_losses_and_adapters_of_ddp(
    stage: int, tmp_path: Path, ddp_llava: Path, tiny_llava: tuple[str, str]
) -> None:
    config = LLAVA / f"ds_zero{stage}.json"
    options = (*LLAVA_OPTIONS, str(tmp_path), *tiny_llava, "--deepspeed", str(config))
    if stage == 3:
        launched(*torchrun(2), str(LLAVA / "train.py"), *options, cwd=tmp_path, imports=IMPORTS)
    else:
        on_warm_ranks(2, LLAVA / "train.py", *options)
    assert_losses(trainer_losses(tmp_path), trainer_losses(ddp_llava))
    assert_adapters_alone(tmp_path, ddp_llava)


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_llava_on_one_rank_has_the_losses_of_two(
    stage: int, tmp_path: Path, ddp_llava: Path, tiny_llava: tuple[str, str]
) -> None:
    on_warm_ranks(
        1, LLAVA / "train.py", *LLAVA_OPTIONS, str(tmp_path), *tiny_llava,
        *("--deepspeed", str(LLAVA / f"ds_zero{stage}.json")),
        *("--gradient_accumulation_steps", "2"),
    )  # fmt: skip
    assert_losses(trainer_losses(tmp_path), trainer_losses(ddp_llava))


def test_llava_resumes_on_fewer_ranks(tmp_path: Path, tiny_llava: tuple[str, str]) -> None:
    three, two = tmp_path / "three", tmp_path / "two"
    options = (
        *tiny_llava, "--deepspeed", str(LLAVA / "ds_zero3.json"), *LLAVA_OPTIONS[:-1],
        *("--max_steps", "4", "--save_steps", "2", "--average_tokens_across_devices", "false"),
    )  # fmt: skip
    for ranks, batch, rest in (
        (3, "2", ("--save_strategy", "steps", "--output_dir", str(three))),
        (
            2,
            "3",
            ("--resume_from_checkpoint", str(three / "checkpoint-2"), "--output_dir", str(two)),
        ),
    ):
        on_warm_ranks(
            ranks, LLAVA / "train.py", *options, "--per_device_train_batch_size", batch, *rest
        )
    for what in ("loss", "grad_norm"):
        runs = (logged(folder / "trainer_state.json", what) for folder in (two, three))
        assert_losses(*runs, relative=1e-5)
    assert_adapters_alone(two, three)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [TRAINER, LLAVA], ids=lambda folder: folder.name)
def test_smoke_without_a_model_builds_one_sharded(recipe: Path, tmp_path: Path) -> None:
    on_warm_ranks(
        2, recipe / "train.py", "--smoke", "--max_steps", "6", "--eval_strategy", "no",
        *("--save_strategy", "no", "--load_best_model_at_end", "False"),
        *("--learning_rate", "3e-3", "--output_dir", str(tmp_path)),
        *("--deepspeed", str(recipe / "ds_zero3.json")),
    )  # fmt: skip
    losses = trainer_losses(tmp_path)
    assert len(losses) == 6
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------- DeepSpeed itself


@pytest.mark.slow
@needs_deepspeed_itself
@pytest.mark.timeout(400)  # the first run compiles
@pytest.mark.parametrize("case", ["chatbot", "mrpc", "trainer", "llava"])
def test_deepspeed_itself_has_the_same_losses(case: str, tmp_path: Path) -> None:
    stage_2 = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
    }
    found, wanted = tmp_path / "ours", tmp_path / "theirs"
    program, options, environ = {
        "chatbot": (
            CHATBOT,
            CHATBOT_OPTIONS,
            {**stage_2, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(CHATBOT / "ds_config.json")},
        ),
        "mrpc": (MRPC, MRPC_OPTIONS, stage_2),
        "trainer": (
            TRAINER,
            ("--deepspeed", str(TRAINER / "ds_zero2.json"), *TRAINER_OPTIONS),
            {},
        ),
        "llava": (LLAVA, ("--deepspeed", str(LLAVA / "ds_zero2.json"), *LLAVA_OPTIONS), {}),
    }[case]
    where = case != "chatbot"
    ours = on_warm_ranks(2, program / "train.py", *options, *(where * (str(found),)), **environ)
    theirs = under_deepspeed_itself(
        program / "train.py", (*options, *(where * (str(wanted),))), cwd=tmp_path, **environ
    )
    if not where:
        assert_losses(printed(ours), printed(theirs))
        return
    file = "metrics.jsonl" if case == "mrpc" else "trainer_state.json"
    assert_losses(logged(found / file), logged(wanted / file))
