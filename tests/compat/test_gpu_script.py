"""The benchmark script for one GPU, tested without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_rehearsal import FOLDER, ROOT, Load, rehearse, script
from zeroshard_testing.ranks import run_ranks
from zeroshard_testing.streams import pretend_cuda

import zeroshard

# ---------------------------------------------------------------- the command line


def test_without_gpu_one_line_says_so_and_nothing_is_measured(tmp_path: Path) -> None:
    done = script("--out", str(tmp_path / "found.json"), "--folder", str(tmp_path / "folder"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "CUDA" in done.stderr
    assert not done.stdout
    assert not list(tmp_path.glob("*.json"))


def test_list_names_each_step_and_parts_that_fit_into_nine_minutes(load: Load) -> None:
    steps = load("steps")
    lines = script("--list").stdout.splitlines()
    listed = [line.split() for line in lines if not line.startswith("--part")]
    assert [words[0] for words in listed] == list(steps.STEPS)
    parts = [re.findall(r"[\w-]+", line)[2:] for line in lines if line.startswith("--part")]
    assert [name for part in parts for name in part if name != "import"] == [
        name for name, step in steps.STEPS.items() if step.by_default and name != "import"
    ]
    for part in parts:
        assert part[0] == "import"
        assert sum(steps.STEPS[name].seconds for name in part) <= 540
    assert parts[0] == ["import", "checks", "nccl", "two-ranks", "update", "waits"]


def test_a_part_that_does_not_exist_is_refused() -> None:
    done = script("--part", "9")
    assert done.returncode == 2
    assert "parts 1 to 6" in done.stderr


def test_steps_share_the_time_that_is_left_over(load: Load) -> None:
    steps = load("steps")
    assert dict(steps.limits(["import", "checks"], 60)) == {"import": 30, "checks": 110}
    assert dict(steps.limits(["import", "checks"], 280)) == {"import": 60, "checks": 220}


# ---------------------------------------------------------------- rehearsals


@pytest.mark.full
def test_a_rehearsal_goes_through_every_step(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All checks hold, all lines train alike, and no result is written."""
    code, rows = rehearse(
        load, monkeypatch, tmp_path / "folder", "--rehearse", "--minutes", "90",
        *("--only", *load("steps").STEPS, "--out", str(tmp_path / "found.json")),
        *("--systems", "plain", "FSDP2", "DeepSpeed", "ZeroShard stage 2", "ZeroShard stage 3"),
    )  # fmt: skip
    wrong = [row for found in rows.values() for row in load("steps").failed(found)]
    assert code == 0, (wrong, capsys.readouterr().out[-2000:])
    assert list(rows) == list(load("steps").STEPS)
    errors = [row for found in rows.values() for row in found if "error" in row]
    assert {row["error"] for row in errors} <= {"not installed"}, errors
    assert all(rows.values())
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.full
def test_on_the_pretended_device_all_checks_hold_and_nothing_is_found(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroShard's turns train on ``device="cuda"``, with a model of NCCL."""
    steps = load("steps")
    chosen = [name for name in steps.STEPS if name not in (*ON_CPU, *LEFT_TO_STREAM_TESTS)]
    code, rows = rehearse(
        load, monkeypatch, tmp_path / "folder", "--rehearse", "pretended", "--minutes", "90",
        *("--only", *chosen, "--systems", "ZeroShard stage 2", "ZeroShard stage 3"),
    )  # fmt: skip
    assert not [row for found in rows.values() for row in found if "error" in row]
    assert not [row for found in rows.values() for row in steps.failed(found)]
    assert code == 0
    assert {"check": "joins", "result": "yes"} in rows["nccl"]


ON_CPU = ("two-ranks", "prebuild", "largest")
LEFT_TO_STREAM_TESTS = ("sanitizer",)
"""``tests/streams`` has these programs, with all settings."""


@pytest.mark.full
def test_a_step_without_time_left_says_so() -> None:
    done = script("--rehearse", "--only", "waits", "--minutes", "0.1")
    assert "--only waits runs it" in done.stdout


# ---------------------------------------------------------------- turns


SLEEPS = (
    "import subprocess, sys, time; sys.path.append({folder!r}); import turns; turns.begin_turn();"
)


def test_at_its_limit_a_turn_is_killed_with_its_children(load: Load, tmp_path: Path) -> None:
    turns = load("turns")
    pid = tmp_path / "pid"
    code = SLEEPS.format(folder=str(FOLDER)) + (
        f"child = subprocess.Popen(['sleep', '60']); open({str(pid)!r}, 'w').write(str(child.pid));"
        "time.sleep(60)"
    )
    begin_s = time.monotonic()
    ended = turns.run_process([sys.executable, "-c", code], dict(os.environ), 3.0)
    assert ended.code is None
    assert turns.answer_of(ended) == {"error": turns.OUT_OF_TIME}
    assert time.monotonic() - begin_s < 30
    while runs(int(pid.read_text())):  # a killed process of a busy machine ends a moment later
        assert time.monotonic() - begin_s < 30
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_turn_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    turn = SLEEPS.format(folder=str(FOLDER)) + (
        f"import os; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    parent = subprocess.Popen([
        sys.executable, "-c",
        f"import sys; sys.path.append({str(FOLDER)!r}); import os, turns;"
        f"turns.run_process([sys.executable, '-c', {turn!r}], dict(os.environ), 60)",
    ])  # fmt: skip
    until_s = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while runs(int(pid.read_text())):
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_locks_of_killed_builds_are_deleted(load: Load, tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    (lock.parent / "cpu_adam.so").touch()
    load("turns").remove_locks(tmp_path)
    assert [file.name for file in lock.parent.iterdir()] == ["cpu_adam.so"]


def test_all_systems_get_the_same_allocator_and_no_turn_a_launchers_rank(load: Load) -> None:
    environment = load("turns").environment
    env = environment({"RANK": "3", "PYTHONPATH": "/x"}, Path("/e"))
    assert env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert env["TORCH_EXTENSIONS_DIR"] == "/e"
    assert env["PYTHONPATH"] == f"{ROOT}/src:{ROOT}/testing/src:/x"
    assert "RANK" not in env
    assert "TORCH_CUDA_SANITIZER" not in env
    assert environment({}, Path("/e"), sanitized=True)["TORCH_CUDA_SANITIZER"] == "1"
    own = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert environment(own, Path("/e"))["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"


def test_a_turn_that_dies_gives_its_last_words(load: Load) -> None:
    turns = load("turns")
    good = turns.Ended("noise\nRESULT " + json.dumps({"a": 1}), "", 0)
    assert turns.answer_of(good) == {"a": 1}
    assert "no kernel" in turns.answer_of(turns.Ended("", "x\nError: no kernel", 1))["error"]
    assert "host memory ran out" in turns.answer_of(turns.Ended("", "", -9))["error"]


def test_two_ranks_on_one_gpu_look_like_two_hosts_to_nccl(load: Load) -> None:
    environment = load("ranks").environment
    one, two = environment(0, 2), environment(1, 2)
    assert one["NCCL_HOSTID"] != two["NCCL_HOSTID"]
    assert one["LOCAL_RANK"] == two["LOCAL_RANK"] == "0"
    assert one["NCCL_P2P_DISABLE"] == one["NCCL_SHM_DISABLE"] == "1"
    assert "NCCL_HOSTID" not in environment(0, 1)


# ---------------------------------------------------------------- results


def test_results_are_kept_after_each_turn_and_over_runs(load: Load, tmp_path: Path) -> None:
    Results = load("results").Results
    file = tmp_path / "found.json"
    first = Results(file)
    first.turn("speed", "train plain", {"step_ms": [1.0]})
    assert json.loads(file.read_text())["unfinished"]["speed"][0]["turn"] == "train plain"
    first.finish("speed", [{"system": "plain"}], {"gpu": "one"})
    second = Results(file)
    second.finish("waits", [], {"gpu": "two"})
    found = json.loads(file.read_text())
    assert found["steps"]["speed"]["rows"] == [{"system": "plain"}]
    assert found["steps"]["waits"]["machine"] == {"gpu": "two"}
    assert not found["unfinished"]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_who_trains_differently_is_not_compared(load: Load) -> None:
    rows = [{"losses": [4.0]}, {"losses": [4.01]}, {"losses": [4.5]}, {"losses": [float("nan")]}]
    marked = load("steps").with_distance(rows)
    assert ["error" in row for row in marked] == [False, False, True, True]


def test_a_plan_that_is_off_or_does_not_fit_is_no_yes(load: Load) -> None:
    planned = load("planned")
    assert len({case.text for case in planned.CASES}) == 20
    plan = {"peak_nbytes": 1000, "step_ms": 10.0}
    live = {"allocated_nbytes": 1000, "reserved_nbytes": 1030, "step_ms": [1.0, 9.0, 99.0]}

    def results(**changed: object) -> list[object]:
        return [row["result"] for row in planned.rows_of("case", plan, {**live, **changed})]

    assert results() == ["yes", "yes", "yes"]
    assert results(allocated_nbytes=1025) == ["yes", "the plan is off by -2.4%", "yes"]
    assert results(step_ms=[8.0]) == ["yes", "yes", "the plan is off by +25.0%"]
    assert results(error="out of GPU memory") == ["out of GPU memory"]


def test_the_first_difference_to_the_plain_loop_is_named(load: Load) -> None:
    checks = load("checks")
    one, two = torch.ones(()), torch.full((), 2.0)
    same = ([one, one], {"weight": one})
    assert checks.difference(same, same) == ""
    assert "loss of step 2" in checks.difference(same, ([one, two], {"weight": one}))
    assert "'weight'" in checks.difference(same, ([one, one], {"weight": two}))
    assert "bias" in checks.difference(same, ([one, one], {"bias": one}))


# ---------------------------------------------------------------- sizes


def test_sizes_are_those_of_the_models(load: Load) -> None:
    trainers, shapes = load("trainers"), load("shapes")
    for name, shape in shapes.SHAPES.items():
        built = trainers.build(shape, "meta", dtype=torch.bfloat16)
        assert sum(p.numel() for p in built.parameters()) == shape.numel
        if name.endswith("B"):
            assert shape.numel / 1e9 == pytest.approx(float(name[:-1]), rel=0.25)
        assert torch.get_default_dtype() == torch.float32


def test_three_billion_fit_into_80_gb_and_seven_do_not(load: Load) -> None:
    shapes = load("shapes").SHAPES
    assert shapes["3B"].fits(80 * 10**9, 2048)
    assert not shapes["7B"].fits(80 * 10**9, 2048)
    assert not shapes["7B"].fits(141 * 10**9, 2048)


def test_full_use_is_all_of_the_promised_arithmetic(load: Load) -> None:
    shapes = load("shapes")
    shape = shapes.SHAPES["1.5B"]
    matrices = sum(
        p.numel()
        for name, p in load("trainers")
        .build(shape, "meta", dtype=torch.bfloat16)
        .named_parameters()
        if p.dim() == 2 and not name.startswith("position")
    )
    attention = 6 * shape.layers * shape.width * shape.context
    assert shape.flops_per_token == pytest.approx(6 * matrices + attention, rel=1e-3)
    rate = 989e12 / shape.flops_per_token
    assert shapes.mfu(shape, rate, shapes.peak_tflops("NVIDIA H200")) == pytest.approx(1.0)
    assert shapes.peak_tflops("an unknown GPU") is None


def test_a_model_that_cannot_fit_is_refused_with_the_bytes(load: Load) -> None:
    room, shapes = load("room"), load("shapes").SHAPES
    free = {"gpu_free": 80 * 2**30, "host_free": 120 * 2**30}
    assert "GiB of host memory" in room.refusal("FSDP2", shapes["10B"], 8, 1.0, **free)
    assert "GiB of GPU memory" in room.refusal("ZeroShard", shapes["14B"], 8, 0.3, **free)
    assert room.refusal("FSDP2", shapes["7B"], 8, 1.0, **free) == ""
    small = room.ratio_for("ZeroShard", 2, shapes["10B"], free["host_free"])
    assert 0.5 < small < 0.7
    assert room.ratio_for("DeepSpeed", 2, shapes["10B"], free["host_free"]) == 1.0
    assert room.ratio_for("ZeroShard", 2, shapes["1.5B"], free["host_free"]) == 1.0


def host_bytes_per_element(stage: int, offloads_params: bool) -> float:
    """What ZeroShard holds in the memory of a GPU host, for each parameter."""
    host = {"device": "cpu"}
    zero = {"stage": stage, "offload_optimizer": host}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {**zero, "offload_param": host} if offloads_params else zero,
    }
    with pretend_cuda():
        model = torch.nn.Linear(256, 256, bias=False)
        engine = zeroshard.Engine(model, config=config, device="cuda")
        rows = [row for row in engine.memory_report().rows if row.tier == "host"]
        engine.close()
    return sum(max(row.planned or 0, row.measured) for row in rows) / 256**2


@pytest.mark.parametrize("params", [False, True])
def test_a_refusal_counts_what_zeroshard_really_holds(load: Load, params: bool) -> None:
    name = "ZeroShard with parameters" if params else "ZeroShard"
    (held,) = run_ranks(host_bytes_per_element, 1, 3 if params else 2, params, group=False)
    assert load("room").HELD[name].host == pytest.approx(held, rel=0.01)


# ---------------------------------------------------------------- waits and traces


def test_a_wait_is_noted_with_its_phase_and_the_librarys_frames(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = load("audit")
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def waiting(*_: object) -> torch.Tensor:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return torch.zeros(())

    trainer = SimpleNamespace(forward=waiting, backward=lambda loss: None, step=waiting)
    found = audit._named_waits(trainer, (torch.zeros(()), torch.zeros(())))
    assert [wait["phase"] for wait in found] == ["forward", "step"]
    assert "in waiting" in found[0]["frames"][0]
    assert modes == ["warn", "default"]


def test_the_librarys_frames_are_known_by_its_folder_and_not_by_a_name(load: Load) -> None:
    audit = load("audit")
    package = Path(zeroshard.__file__).parent
    program = ("/home/me/zeroshard/train.py", 3, "main", "step()")
    library = (str(package / "engine" / "engine.py"), 9, "step", "a()")
    torchs = ("/x/torch/b.py", 7, "c", "d")
    frames = audit.frames_of(traceback.StackSummary.from_list([program, library, torchs]))
    assert frames == ["zeroshard/engine/engine.py:9 in step: a()"]
    alone = audit.frames_of(traceback.StackSummary.from_list([program]))
    assert alone == ["/home/me/zeroshard/train.py:3 in main: step()"]


def test_a_trace_tells_how_long_data_moves_behind_kernels(load: Load) -> None:
    def work(kind: str, begin: float, length: float, name: str = "") -> dict[str, object]:
        return {"cat": kind, "ts": begin, "dur": length, "name": name}

    found = load("timeline").busy([
        work("kernel", 0, 4000), work("kernel", 3000, 2000), work("cpu_op", 0, 9e6),
        work("gpu_memcpy", 4000, 3000), work("kernel", 9000, 1000, "ncclDevKernel_AllGather"),
    ])  # fmt: skip
    assert found == {"step_of_gpu_ms": 10.0, "computes_ms": 5.0, "moves_ms": 4.0, "both_ms": 1.0}


# ---------------------------------------------------------------- wheels


def test_wheels_cover_what_the_package_requires(load: Load) -> None:
    wheels = load("wheels")
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    required = {wheels.plain_name(name) for name in re.findall(r'"(.+?)"', listed)}
    assert required == {*wheels.NEEDED, *wheels.PRESENT}


def wheel(folder: Path, name: str, *requires: str) -> Path:
    """An installable wheel with one module."""
    file = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "here = True\n")
        archive.writestr(
            f"{info}/METADATA", metadata + "".join(f"Requires-Dist: {text}\n" for text in requires)
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


def test_collecting_follows_requirements_of_the_other_python(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = load("wheels")
    needs = {
        "first": ("second>=1", "torch", 'old; python_version < "3.12"', 'docs; extra == "docs"'),
        "second": ("first", "third[more]==2"), "third": (),
    }  # fmt: skip
    asked: list[str] = []

    def fetch(folder: Path, request: str, python: str, machine: str) -> Path:
        asked.append(request)
        name = wheels.plain_name(request)
        return wheel(folder, name, *needs[name])

    monkeypatch.setattr(wheels, "_fetch", fetch)
    found = wheels.collect(tmp_path, ["first"], "3.12", "x86_64")
    assert asked == ["first", "second>=1", "third==2"]
    assert "3 wheels" in wheels.listing(found)
    command = wheels.download_command(tmp_path, ["x"], "3.12", "aarch64")
    assert "--only-binary=:all:" in command
    assert "manylinux_2_28_aarch64" in command


def test_collected_wheels_are_installed_without_network_access(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = load("wheels")
    wheel(tmp_path, "carried_package")
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.setattr(sys, "path", list(sys.path))
    wheels.activate(tmp_path, tmp_path / "site")
    assert importlib.import_module("carried_package").here
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'site'}{os.pathsep}/before"
    with pytest.raises(FileNotFoundError, match="no wheels"):
        wheels.install(tmp_path / "empty", tmp_path / "site")
