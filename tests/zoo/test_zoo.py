"""Public architectures train as in plain PyTorch, bit for bit, at each stage and precision.

Every model runs at stage 3 in fp32 on one rank; the settings of two ranks are distributed over the
models. ``make test-full`` runs stage 3 in fp32 on two ranks too. ``ZEROSHARD_ZOO=full make test
ARGS=tests/zoo`` runs all combinations and every exception.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import product

import pytest
from support import covering
from zeroshard_testing import on_ranks
from zoo_models import MODELS, NO_BF16, NO_CHECKPOINTING
from zoo_training import (
    Setting,
    assert_same_bits,
    checkpoint,
    engine_run,
    plain_run,
)

FULL = os.environ.get("ZEROSHARD_ZOO") == "full"
BASE = Setting(stage=3)
TURNS = (
    Setting(stage=3, bf16=True, init=True, checkpointed=True),
    Setting(stage=1),
    Setting(stage=3, init=True),
    Setting(stage=2, bf16=True),
    Setting(stage=3, checkpointed=True),
    Setting(stage=2),
    Setting(stage=3, bf16=True),
    Setting(stage=1, bf16=True),
)
"""What takes turns beside :data:`BASE`."""
EVERYTHING = tuple(
    Setting(stage, *switches)
    for stage, *switches in product((1, 2, 3), (False, True), (False, True), (False, True))
    if stage == 3 or not switches[1]  # zero.Init shards at stage 3 only
)


def possible(name: str, wanted: tuple[Setting, ...]) -> list[Setting]:
    return [
        setting
        for setting in wanted
        if not (setting.bf16 and name in NO_BF16)
        and not (setting.checkpointed and name in NO_CHECKPOINTING)
    ]


def plan() -> dict[str, list[Setting]]:
    """The settings of each model on two ranks: those that its family needs most. A family of one or two
    models takes more. Evidence for all models at once is in the whole tables."""
    if FULL:
        return {name: possible(name, EVERYTHING) for name in MODELS}
    had = Counter()
    chosen = {}
    members = Counter(model.family for model in MODELS.values())
    for name, model in MODELS.items():
        chosen[name] = [BASE] if covering.FULL else []
        for _ in range(-(-3 // members[model.family])):  # three settings have all axes
            turn = min(
                possible(name, TURNS),
                key=lambda turn: (
                    min(had[model.family, axis] for axis in axes(turn)),
                    had[model.family, turn],
                ),
            )
            chosen[name].append(turn)
            had.update((model.family, each) for each in (turn, *axes(turn)))
    return chosen


def check(name: str, chosen: list[Setting]) -> None:
    """Train with each setting, and with plain PyTorch once for all settings that are equal for it."""
    model, expected = MODELS[name], {}
    for setting in chosen:
        if setting.plain not in expected:
            expected[setting.plain] = plain_run(model, setting.plain)
        try:
            assert_same_bits(engine_run(model, setting), expected[setting.plain])
        except Exception as error:
            raise AssertionError(f"{name} at {setting}: {error}") from error


def members(most: int) -> list[object]:
    """All models as parameters; those after the first ``most`` of a family only in ``make test-full``."""
    had: Counter[str] = Counter()
    rows = []
    for name, model in MODELS.items():
        had[model.family] += 1
        rows.append(pytest.param(name, marks=pytest.mark.full if had[model.family] > most else ()))
    return rows


@pytest.mark.parametrize("name", members(3))
@on_ranks(2, timeout=120)
def test_two_ranks_are_plain_pytorch_bit_for_bit(name):
    check(name, plan()[name])


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_is_plain_pytorch_bit_for_bit(name):
    check(name, plan()[name] if FULL else [BASE])


@pytest.mark.parametrize(
    "name", NO_BF16 if FULL else ["ResNetForImageClassification", "DetrForObjectDetection"]
)
def test_what_is_not_trained_in_bf16_plain_pytorch_refuses(name):
    with pytest.raises(RuntimeError, match=r"BFloat16|dtype"):
        plain_run(MODELS[name], Setting(stage=0, bf16=True))


@pytest.mark.parametrize("name", NO_CHECKPOINTING if FULL else ["FunnelForMaskedLM"])
def test_what_is_not_checkpointed_offers_no_checkpointing(name):
    with pytest.raises((ValueError, AttributeError), match="checkpointing"):
        checkpoint(MODELS[name].build())


def test_every_family_meets_every_axis():
    met = {
        (MODELS[name].family, axis)
        for name, found in plan().items()
        for s in found
        for axis in axes(s)
    }
    families = {model.family for model in MODELS.values()}
    assert {(f, axis) for f in families for axis in AXES} - met == {("torchvision", "checkpointed")}


AXES = ("stage 1", "stage 2", "stage 3", "bf16", "init", "checkpointed")


def axes(setting: Setting) -> list[str]:
    switches = [axis for axis in ("bf16", "init", "checkpointed") if getattr(setting, axis)]
    return [f"stage {setting.stage}", *switches]
