"""The states of an engine, and the calls that are allowed in each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zeroshard.errors import UsageError
from zeroshard.zero.life import KINDS, EngineState, Life

pytestmark = pytest.mark.smoke


def in_state(state: EngineState) -> Life:
    life = Life()
    ways: dict[EngineState, Callable[[], None]] = {
        EngineState.OPEN: lambda: None,
        EngineState.OFFLOADED: lambda: life.offload(["lp_params", "optim_states"]),
        EngineState.HALF_LOADED: life.begin_load,
        EngineState.FAILED: lambda: life.fail("an update ended in the middle"),
        EngineState.CLOSED: life.close,
    }
    ways[state]()
    assert life.state is state
    return life


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (EngineState.HALF_LOADED, "belong to different runs"),
        (EngineState.FAILED, "an update ended in the middle"),
        (EngineState.CLOSED, "this engine was closed"),
    ],
)
def test_a_state_in_which_nothing_works_says_why(state, said):
    with pytest.raises(UsageError, match=said):
        in_state(state).check("engine.step()")


def test_a_half_loaded_engine_may_load_again():
    life = in_state(EngineState.HALF_LOADED)
    life.check("engine.load_checkpoint()", may_load=True)
    life.begin_load()
    life.end_load()
    life.check("engine.step()")


@pytest.mark.parametrize("state", [EngineState.FAILED, EngineState.CLOSED])
def test_neither_a_failed_nor_a_closed_engine_loads(state):
    with pytest.raises(UsageError):
        in_state(state).check("engine.load_checkpoint()", may_load=True)


def test_a_call_is_refused_only_while_what_it_needs_is_offloaded():
    life = in_state(EngineState.OFFLOADED)
    life.check()
    life.check("engine.backward()", "lp_grads")
    with pytest.raises(
        UsageError, match=r"engine.forward\(\) while lp_params are stored in host memory"
    ):
        life.check("engine.forward()", "lp_params")
    with pytest.raises(UsageError, match="while optim_states, lp_params are stored"):
        life.check("engine.step()")
    life.reload()
    life.check("engine.step()")
    assert life.offloaded == frozenset()


def test_more_can_be_offloaded_until_everything_is():
    life = in_state(EngineState.OFFLOADED)
    life.offload(KINDS)
    assert life.offloaded == frozenset(KINDS)


@pytest.mark.parametrize("state", [s for s in EngineState if s is not EngineState.OPEN])
def test_only_an_open_engine_can_fail(state):
    with pytest.raises(AssertionError, match="cannot go from"):
        in_state(state).fail("again")


def test_a_failed_engine_stays_failed_until_it_is_closed():
    life = in_state(EngineState.FAILED)
    for edge in (life.begin_load, lambda: life.offload(KINDS)):
        with pytest.raises(AssertionError):
            edge()
    life.reload()
    assert life.state is EngineState.FAILED
    life.close()
    assert life.state is EngineState.CLOSED
