"""If one rank cannot take part in a save, all ranks raise the same error in time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_model import open_engine, train
from saved_runs import STAGE, check_goes_on, check_refused, contents, everywhere, failure, saved_run
from zeroshard_testing import run_ranks

from zeroshard.checkpoint import save_layout

RANKS = 2


# ---------------------------------------------------------------- state that cannot be stored


class Refusing:
    """A scheduler whose ``state_dict`` fails."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def state_dict(self) -> dict:
        raise KeyError("last_epoch")

    def load_state_dict(self, state: dict) -> None:
        raise KeyError("last_epoch")

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def keeps_its_state(root: Path, who: int) -> None:
    with saved_run(root) as engine:
        scheduler = engine.lr_scheduler
        if engine.global_rank == who:
            engine.lr_scheduler = Refusing(scheduler)
        check_refused(engine, root, f"rank {who}: KeyError: 'last_epoch'")
        engine.lr_scheduler = scheduler
        check_goes_on(engine, root)


@pytest.mark.parametrize("who", [0, 1])
def test_a_scheduler_that_raises_on_one_rank_ends_the_save_on_all(tmp_path, who):
    run_ranks(keeps_its_state, RANKS, tmp_path / "run", who)


def takes_no_state(root: Path) -> None:
    with saved_run(root) as engine:
        scheduler = engine.lr_scheduler
        if engine.global_rank == 1:
            engine.lr_scheduler = Refusing(scheduler)
        kind, text = failure(lambda: engine.load_checkpoint(root))
        assert kind == "CheckpointError"
        assert len(set(everywhere(text))) == 1
        assert f"{root}/first was not loaded" in text
        assert "rank 1: KeyError: 'last_epoch'" in text
        assert failure(lambda: train(engine, 1))[0] == "UsageError"
        engine.lr_scheduler = scheduler
        engine.load_checkpoint(root)
        check_goes_on(engine, root)


def test_a_scheduler_that_takes_no_state_on_one_rank_ends_loading_on_all(tmp_path):
    run_ranks(takes_no_state, RANKS, tmp_path / "run")


def cannot_lay_out(root: Path, asynchronous: bool) -> None:
    """An error between two rounds: the next round tells the others."""
    with saved_run(root, checkpoint={"asynchronous": asynchronous}) as engine:
        engine.wait_for_checkpoint()
        real, kept = save_layout.lay_out, contents(root)
        if engine.global_rank == 1:
            save_layout.lay_out = lambda _entries: real(["no entry"])
        everywhere(0)

        def save_and_wait() -> None:
            engine.save_checkpoint(root, "second")
            engine.wait_for_checkpoint()

        kind, text = failure(save_and_wait)
        save_layout.lay_out = real
        assert kind == "CheckpointError"
        assert len(set(everywhere(text))) == 1
        assert "(while reserving space). rank 1: AttributeError: 'str' object has no" in text
        assert contents(root) == kept
        train(engine, 1)
        engine.save_checkpoint(root, "third")
        engine.wait_for_checkpoint()
        assert engine.load_checkpoint(root)[0] == str(root / "third")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_between_two_rounds_ends_the_save_on_all(tmp_path, asynchronous):
    run_ranks(cannot_lay_out, RANKS, tmp_path / "run", asynchronous)


def stores_what_cannot_be(root: Path) -> None:
    with saved_run(root) as engine:
        for who in (0, 1):
            values = {"model": object()} if engine.global_rank == who else {}
            kind, text = failure(lambda: engine.save_checkpoint(root, "second", values))
            assert kind == "CheckpointError"
            assert len(set(everywhere(text))) == 1
            assert f"rank {who}: client_state['model'] is an object" in text
        engine.save_checkpoint(root, "second", {"rank": engine.global_rank})
        assert engine.load_checkpoint(root, "second")[1] == {"rank": 0}
        check_goes_on(engine, root)


def test_client_state_that_cannot_be_stored_is_named_on_all_ranks(tmp_path):
    run_ranks(stores_what_cannot_be, RANKS, tmp_path / "run")


def stores_a_parameter(root: Path) -> None:
    with saved_run(root) as engine:
        weight = engine.module.embed.weight
        engine.save_checkpoint(root, "second", {"best": weight})
        expected = weight.detach().clone()
        train(engine, 1)
        found = engine.load_checkpoint(root, "second")[1]["best"]
        assert torch.equal(found, expected)


def test_a_sharded_parameter_in_client_state_is_stored_whole(tmp_path):
    run_ranks(stores_a_parameter, RANKS, tmp_path / "run", timeout=20)


# ---------------------------------------------------------------- ranks that disagree


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """The warnings of ``zeroshard`` inside the block."""
    messages, logger = Messages(), logging.getLogger("zeroshard")
    logger.addHandler(messages)
    try:
        yield messages.texts
    finally:
        logger.removeHandler(messages)


def saves_under_two_tags(root: Path, validation: str) -> None:
    with saved_run(root, checkpoint={"tag_validation": validation}) as engine, warnings() as texts:
        tag = f"of-rank-{engine.global_rank}"
        if validation == "fail":
            kind, text = failure(lambda: engine.save_checkpoint(root, tag))
            assert kind == "CheckpointError"
            assert len(set(everywhere(text))) == 1
            assert "'of-rank-0' on rank 0, 'of-rank-1' on rank 1" in text
        else:
            engine.save_checkpoint(root, tag)
            warned = [text for text in texts if "of-rank-0, of-rank-1" in text]
            assert len(warned) == (validation == "warn" and engine.global_rank == 0)
        there = {"first"} if validation == "fail" else {"first", "of-rank-0"}
        assert {path.name for path in root.iterdir() if (path / "manifest.json").exists()} == there
        check_goes_on(engine, root)


@pytest.mark.parametrize("validation", ["ignore", "warn", "fail"])
def test_ranks_that_save_under_different_tags(tmp_path, validation):
    run_ranks(saves_under_two_tags, RANKS, tmp_path / "run", validation)


def saves_to_two_places(base: Path) -> list[str]:
    with open_engine(STAGE) as engine, warnings() as texts:
        train(engine, 1)
        engine.save_checkpoint(base / f"at-{engine.global_rank}")
    return texts


def test_ranks_that_save_to_different_directories_are_warned(tmp_path):
    texts, others = run_ranks(saves_to_two_places, RANKS, tmp_path)
    assert any(f"{tmp_path}/at-0" in text and f"{tmp_path}/at-1" in text for text in texts)
    assert others == []


def stays_away(root: Path) -> tuple[str, str]:
    trust = {"sections": {"save": 60.0}, "collective_timeout_s": 60.0, "first_report_s": 1.0}
    with saved_run(root, trust=trust) as engine:
        kept = contents(root)
        if engine.global_rank == 1:
            kind, text = failure(lambda: train(engine, 1))
        else:
            kind, text = failure(lambda: engine.save_checkpoint(root, "second"))
            assert contents(root) == kept
        engine.close(text)
    return kind, text


def test_a_rank_that_trains_while_another_saves_is_named(tmp_path):
    """The ranks wait for each other. This is detected before the limit of 60 s."""
    (kind, text), (other, _) = run_ranks(stays_away, RANKS, tmp_path / "run", timeout=40)
    assert kind == other == "RankDivergence"
    assert "rank 0: waiting in exchange 'planning it'" in text
    assert "rank 1: waiting in gather" in text


def closes_instead(root: Path, reason: str) -> tuple[str, str]:
    with saved_run(root, trust={"sections": {"save": 15.0}}) as engine:
        if engine.global_rank == 1:
            engine.close(reason)
            return "", ""
        kind, text = failure(lambda: engine.save_checkpoint(root, "second"))
        engine.close(text)
    return kind, text


@pytest.mark.parametrize("reason", ["", "KeyError: 'loss'"], ids=["in peace", "with an error"])
def test_a_rank_that_closed_its_engine_is_not_waited_for(tmp_path, reason):
    kind, text = run_ranks(closes_instead, RANKS, tmp_path / "run", reason, timeout=40)[0]
    assert kind == "RankLost"
    assert f"rank 1: {reason or 'closed its engine'}" in text
