"""Old names of the previous release still work and warn with the new name."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from torch import nn

from zeroshard import Engine, moved

OLD_NAMES = Path(__file__).parent / "fixtures" / "old_names.txt"
"""One line for each module of the previous release and of the first rename after it: its public names."""

GONE = (  # what stays out, and why: modules, or names of a module
    (
        "our own test models, now in tests/support",
        "comm.faulty testing.edge_case_models testing.edge_case_networks testing.faulty_comm "
        "testing.models testing.networks testing.parity testing:CASES testing:Case",
    ),
    ("wrote pages of docs/, now in docs/", "config.docs integrations.deepspeed.docs"),
    (
        "has no equivalent: deleted with the code that used it",
        "comm.agree:agree_value comm.agreement:agree_value config.offload:notices "
        "core.verdict:MEETINGS watchdog.diagnosis:MEETINGS "
        "engine.monitors:LOSS_SCALE engine.monitors:LR engine.monitors:TRAIN_LOSS "
        "engine.monitors:train_events "
        "config:not_yet config.keys:not_yet "
        "config.resolve:SECRET "
        "offload.grad_store:DiscardedGradStore store.grads:GradUnwritten",
    ),
    (
        "is a method or another function now",
        "comm.sentinel:error_of watchdog.watchdog:error_of "
        "comm.side:read_verdict comm.side:write_verdict "
        "watchdog.store_client:read_verdict watchdog.store_client:write_verdict "
        "engine.build:build_runtime engine.compose:checks_overflow engine.optimizers:WHOLE "
        "memory.storage:flat_nbytes store.storage:flat_nbytes",  # Tensor.nbytes
    ),
    (
        "takes other arguments or has other fields now",
        "config.params:PARAMS config.params:TYPED config.params:declared_arguments "
        "core.verdict:Limits watchdog.diagnosis:Limits engine.arguments:check_loss "
        "engine.arguments:refused_graph engine.compose:Events engine.compose:compose "
        "engine.optimizer_step:Measures engine.setup:assemble engine.update:Measures",
    ),
)


@pytest.mark.parametrize("old", sorted(moved.MODULES))
def test_an_old_module_gives_the_new_one_with_one_warning(old, monkeypatch):
    name, new = f"zeroshard.{old}", importlib.import_module(f"zeroshard.{moved.MODULES[old]}")
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(FutureWarning, match=moved.MODULES[old]) as said:
        found = importlib.import_module(name)
    assert len([w for w in said if name in str(w.message)]) == 1
    public = next((n for n in vars(new) if not n.startswith("_")), None)
    assert public is None or getattr(found, public) is getattr(new, public)


@pytest.mark.parametrize("module", sorted(moved.CLASSES))
def test_old_classes_are_the_new_ones(module):
    asked = importlib.import_module(f"zeroshard.{module}")
    for old in moved.CLASSES[module]:
        home, new = moved.current_name(module, old)
        wanted = getattr(importlib.import_module(f"zeroshard.{home}"), new)
        with pytest.warns(FutureWarning, match=rf"zeroshard\.{home}\.{new} now"):
            assert moved.old_names(module)(old) is wanted
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            assert old in vars(asked) or getattr(asked, old) is wanted


def test_a_name_that_went_to_another_module_is_found_with_one_warning(monkeypatch):
    from zeroshard.engine import arguments, draft

    with pytest.warns(FutureWarning, match=r"zeroshard\.engine\.draft\.check_model now") as said:
        assert arguments.check_model is draft.check_model
    assert [w.filename for w in said] == [__file__]
    monkeypatch.delitem(sys.modules, "zeroshard.engine.setup", raising=False)
    with pytest.warns(FutureWarning, match=r"zeroshard\.engine\.build now") as said:
        setup = importlib.import_module("zeroshard.engine.setup")
        assert setup.make_optimizer is draft.make_optimizer
    assert len(said) == 1
    with pytest.raises(AttributeError, match=r"engine\.arguments' has no attribute 'check_modell'"):
        _ = arguments.check_modell


def _lost(line: str) -> list[str]:
    """The module of a line, or those of its names that are not found."""
    module, _, names = line.partition(":")
    short = module.removeprefix("zeroshard.")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        ours = (error.name or "").startswith(
            "zeroshard"
        )  # else an optional package is not installed
        return [short] if ours else []
    return [f"{short}:{name}" for name in names.split() if not hasattr(found, name)]


def test_every_public_name_is_found_or_is_listed_as_gone(monkeypatch):
    monkeypatch.setenv(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # Lightning sets it when it is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost = {name for line in OLD_NAMES.read_text().splitlines() for name in _lost(line)}
    gone = {name for _, names in GONE for name in names.split()}
    assert lost - gone == set(), "are lost: add them to zeroshard/moved.py"
    assert gone - lost == set(), "are found: take them out of GONE"


def test_an_unknown_name_is_an_attribute_error_as_ever(monkeypatch):
    with pytest.warns(FutureWarning):
        watch = moved._OldNames().create_module(moved._OldNames().find_spec("zeroshard.comm.watch"))
    with pytest.raises(AttributeError, match="no attribute 'Wotch'"):
        _ = watch.Wotch


def test_programs_of_the_release_before_run():
    program = (
        "import zeroshard.integrations.deepspeed as deepspeed\n"
        "from zeroshard.comm.watch import Watch\n"
        "from zeroshard.store.shards import InMemory\n"
        "from zeroshard.checkpoint.deepspeed import DeepSpeedSaved\n"
        "from zeroshard.zero import guard\n"
        "guard.hide, deepspeed.initialize\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("FutureWarning") == 5, ran.stderr


class _Talker(nn.Linear):
    def generate(self) -> str:
        return "words"


def test_an_engine_warns_where_it_answers_for_its_model_or_as_deepspeeds():
    with Engine(_Talker(2, 1), config={"train_batch_size": 1}) as engine:
        with pytest.warns(FutureWarning, match=r"Engine\.module\.generate") as said:
            assert engine.generate() == "words"
        assert said[0].filename == __file__  # the program's line, not ours
        with pytest.warns(FutureWarning, match="DeepSpeedEngine.zero_optimization_stage"):
            assert engine.zero_optimization_stage() == 0
        with pytest.raises(AttributeError, match="genarate"):
            _ = engine.genarate
