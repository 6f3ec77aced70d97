"""Every public name of DeepSpeed works, or gives the reason that the table has."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path

import compat_page
import pytest
import torch

from zeroshard import deepspeed
from zeroshard.deepspeed import api_table, import_hook
from zeroshard.deepspeed.install import DIRECTORY
from zeroshard.errors import UnsupportedError

ROOT = Path(__file__).parents[2]


def reached(path: str) -> object:
    return functools.reduce(getattr, path.split("."), deepspeed)


def in_new_process(code: str, *, path: str = str(DIRECTORY), cwd: Path | None = None) -> str:
    """The output of a program with the compatibility directory on its path."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path, "PATH": "", "HOME": "/tmp"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


# ---------------------------------------------------------------------- the table


@pytest.mark.smoke
def test_every_name_that_works_is_there():
    missing = {}
    for row in api_table.NAMES:
        if row.verdict in ("works", "accepted"):
            try:
                reached(row.path)
            except Exception as error:
                missing[row.path] = error
    assert not missing


def test_no_name_has_two_rows_or_lacks_a_reason():
    paths = [row.path for row in (*api_table.NAMES, *api_table.MEMBERS)]
    assert len(paths) == len(set(paths))
    assert not [row.path for row in api_table.NAMES if row.verdict != "works" and not row.why]
    assert not [row.path for row in api_table.MEMBERS if row.verdict != "works" and not row.why]


def test_every_difference_is_of_a_name_that_exists():
    paths = {row.path for row in api_table.NAMES}
    assert set(api_table._DIFFERENCES) | set(api_table._NO_EFFECT) <= paths


@pytest.mark.parametrize(
    "row", [r for r in api_table.NAMES if r.home and r.verdict in ("refused", "later")], ids=str
)
def test_names_that_programs_import_can_be_imported_and_raise_when_they_are_used(row):
    found = reached(row.path)
    assert not isinstance(3, found)
    with pytest.raises(UnsupportedError, match=row.path.rpartition(".")[2]) as raised:
        found(1, two=2)
    assert row.why in str(raised.value)
    with pytest.raises(UnsupportedError):
        found.some_class_method()


@pytest.mark.parametrize("row", [r for r in api_table.NAMES if not r.home], ids=lambda r: r.path)
def test_names_that_are_absent_say_why(row):
    with pytest.raises(AttributeError, match=r"deepspeed\." + row.path) as raised:
        reached(row.path)
    assert row.why in str(raised.value)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("initialise", "there is deepspeed.initialize"),
        ("zero.init", "there is deepspeed.runtime.zero.Init"),
        ("utils.nothing_like_it", "docs/compat.md lists every name"),
        ("runtime.zenflow.engine_stage3", "updates with stale gradients"),
        ("linear.quantization.QuantizedLinear", "docs/compat.md lists every name"),
    ],
)
def test_an_unknown_name_says_what_is_near(path, says):
    with pytest.raises(AttributeError, match=says):
        reached(path)


def test_the_page_is_what_the_table_says():
    assert (ROOT / "docs" / "compat.md").read_text() == compat_page.page()


def test_dir_shows_what_there_is():
    assert {"initialize", "zero", "comm", "runtime", "DeepSpeedEngine"} <= set(dir(deepspeed))
    assert {"Init", "GatheredParameters", "stage3"} <= set(dir(deepspeed.zero))
    assert "autotuning" not in dir(deepspeed)


# ---------------------------------------------------------------------- one object per name


@pytest.mark.parametrize(
    "paths",
    [
        ("zero", "runtime.zero"),
        ("dist", "comm"),
        ("checkpointing", "runtime.activation_checkpointing.checkpointing"),
        ("zero.ZeroParamStatus", "runtime.zero.partition_parameters.ZeroParamStatus"),
        ("zero.Init", "runtime.zero.partition_parameters.Init"),
        ("DeepSpeedEngine", "runtime.engine.DeepSpeedEngine"),
        ("DeepSpeedOptimizer", "runtime.base_optimizer.DeepSpeedOptimizer"),
        ("DeepSpeedConfigError", "runtime.config.DeepSpeedConfigError"),
        ("utils.logger", "utils.logging.logger"),
        ("utils.logger", "logger"),
        ("ops.adam.DeepSpeedCPUAdam", "ops.adam.cpu_adam.DeepSpeedCPUAdam"),
        ("get_accelerator", "accelerator.get_accelerator"),
    ],
    ids=lambda paths: paths[0],
)
def test_a_name_is_the_same_object_by_every_path(paths):
    assert reached(paths[0]) is reached(paths[1])


def test_a_replaced_name_is_seen_by_everybody_who_looks_it_up_in_the_module():
    module = import_hook.module("runtime.zero.partition_parameters")
    original = module.zero_wrapper_for_fp_tensor_constructor
    try:
        module.zero_wrapper_for_fp_tensor_constructor = replaced = object()
        assert deepspeed.runtime.zero.partition_parameters is module
        assert module.zero_wrapper_for_fp_tensor_constructor is replaced
    finally:
        module.zero_wrapper_for_fp_tensor_constructor = original
    assert module._orig_torch_arange is torch.arange
    made = original(torch.arange, target_fp_dtype=torch.float16, target_device=None)
    assert made(4).dtype == torch.int64


def test_schedules_are_found_by_attribute():
    assert "WarmupDecayLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    assert deepspeed.runtime.lr_schedules.WARMUP_NUM_STEPS == "warmup_num_steps"


def test_offload_enums_are_words():
    states = deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum
    assert states.optim_states == "optim_states"
    assert deepspeed.runtime.zero.offload_config.OffloadDeviceEnum("nvme").value == "nvme"


# ---------------------------------------------------------------------- import deepspeed


def test_every_module_can_be_imported():
    listed = json.dumps(sorted(api_table.MODULES))
    code = f"""
import importlib, sys, deepspeed
for name in {listed}:
    module = importlib.import_module("deepspeed." + name)
    assert sys.modules["deepspeed." + name] is module
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero import partition_parameters as pp
assert pp.ZeroParamStatus is ZeroParamStatus is deepspeed.zero.ZeroParamStatus
assert sys.modules["deepspeed.runtime.zero"] is deepspeed.zero
import zeroshard.deepspeed as ours
assert ours.zero is deepspeed.zero and ours.initialize is deepspeed.initialize
print("all")
"""
    assert in_new_process(code) == "all"


@pytest.mark.smoke
def test_the_package_and_its_metadata_are_found_first():
    code = """
import importlib.metadata, importlib.util, deepspeed
assert importlib.util.find_spec("deepspeed").origin == deepspeed.__file__
print(importlib.metadata.version("deepspeed"), deepspeed.__version__, deepspeed.__version_minor__)
print(importlib.metadata.metadata("deepspeed")["Name"], importlib.util.find_spec("deepspeed.ops.adam"))
"""
    first, second = in_new_process(code).splitlines()
    assert first == f"{api_table.VERSION} {api_table.VERSION} 19"
    assert second.startswith("deepspeed ModuleSpec(name='deepspeed.ops.adam'")


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("from deepspeed import autotuning", "nothing needs tuning"),
        ("from deepspeed import initialise", "there is deepspeed.initialize"),
        ("import deepspeed.inference.engine", "has no inference engine"),
        (
            "from deepspeed.runtime.zero import TiledLinearX",
            "there is deepspeed.runtime.zero.TiledL",
        ),
        ("import deepspeed.zero", "the module is deepspeed.runtime.zero"),
    ],
)
def test_an_import_that_fails_says_why(statement, says):
    code = f"""
try:
    {statement}
except ImportError as error:
    print(error)
"""
    assert says in in_new_process(code)


def test_importing_costs_next_to_nothing_and_starts_nothing():
    code = """
import sys, time
began = time.perf_counter()
import deepspeed
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
spent = time.perf_counter() - began
assert DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
assert "torch" not in sys.modules
modules = len(sys.modules)
import torch
with_torch = set(sys.modules)
deepspeed.DeepSpeedEngine, deepspeed.zero.Init, deepspeed.comm.get_rank
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
print(spent, len(set(sys.modules) - with_torch))
"""
    spent, more = in_new_process(code).split()
    assert float(spent) < 1.0
    assert int(more) < 400  # pydantic and the modules of the engine


def test_the_version_passes_every_comparison_that_libraries_make():
    version = pytest.importorskip("packaging.version")
    own = version.parse(api_table.VERSION)
    assert all(own >= version.parse(least) for least in ("0.3.1", "0.9.3", "0.16.0", "0.19.8"))


# ---------------------------------------------------------------------- what is on disk


def test_the_metadata_says_the_version_of_the_table():
    (folder,) = DIRECTORY.glob("*.dist-info")
    assert folder.name == f"deepspeed-{api_table.VERSION}.dist-info"
    assert f"Version: {api_table.VERSION}\n" in (folder / "METADATA").read_text()


@pytest.mark.parametrize("command", ["deepspeed", "ds", "ds_report"])
def test_commands_can_be_executed(command):
    assert (DIRECTORY / "bin" / command).stat().st_mode & 0o111


def test_homes_are_modules_of_ours():
    for home in {row.home.partition(":")[0] for row in api_table.NAMES if ":" in row.home}:
        assert home.startswith("zeroshard.")
        importlib.import_module(home)
