"""Do names of the release before still work, and say the new ones?"""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from torch import nn

from zeroshard import Engine, moved


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
    home = "checkpoint.deepspeed.reader" if module == "checkpoint.deepspeed" else module
    for old, new in moved.CLASSES[module].items():
        wanted = getattr(importlib.import_module(f"zeroshard.{home}"), new)
        with pytest.warns(FutureWarning, match=new):
            assert moved.old_names(module)(old) is wanted


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
