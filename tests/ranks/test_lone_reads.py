"""Lone reads: one rank alone reads sharded values. It gets NaN and a log message, and continues."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard import deepspeed
from zeroshard.errors import ShardedAccess
from zeroshard.zero.sharded_parameter import ShardedParameter


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1))


def open_engine(**keys):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "unit_min_numel": 1,
        **keys,
    }
    with mock.patch.dict(os.environ, {"ZEROSHARD_STALL_S": "0.6"}):  # frequent looks
        engine, _, _, _ = deepspeed.initialize(model=model(), config=config)
    return engine


def train_step(engine, number: int = 0) -> float:
    generator = torch.Generator().manual_seed(10 * number + engine.global_rank)
    x = torch.randn(2, 6, generator=generator)
    loss = (engine(x).float() - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


class Log(logging.Handler):
    """Collects messages of level ERROR while it is in use."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self):
        deepspeed.logs.logger.addHandler(self)
        return self

    def __exit__(self, *_):
        deepspeed.logs.logger.removeHandler(self)


def loaded(write):
    """What is read from a file that ``write(file)`` makes, and the size of the file in bytes."""
    file = io.BytesIO()
    write(file)
    size = file.tell()
    file.seek(0)
    return torch.load(file, weights_only=True), size


def saved(module):
    state, size = loaded(lambda file: torch.save(module.state_dict(), file))
    assert size < 4000
    return state.values()


LONELY = {
    "torch.save": saved,
    "cpu": lambda m: [v.cpu() for v in m.state_dict().values()],
    "clone": lambda m: [v.clone() for v in m.state_dict().values()],
    "detach": lambda m: [p.detach().cpu() for p in m.parameters()],
    "data": lambda m: [p.data.view(-1) for p in m.parameters()],
    "row": lambda m: [p.detach()[0] * 1 for p in m.parameters()],
    "like": lambda m: [torch.zeros_like(p.detach()[0]) + p.detach()[0] for p in m.parameters()],
    "numpy": lambda m: [torch.from_numpy(p.detach().numpy().copy()) for p in m.parameters()],
    "norm": lambda m: [p.norm() for p in m.parameters()],
    "pickle": lambda m: [pickle.loads(pickle.dumps(p)) for p in m.parameters()],
    "deepcopy": lambda m: list(copy.deepcopy(m).parameters()),
    "load": lambda m: list(filled(m).parameters()),
}


def filled(module):
    other = model()
    other.load_state_dict(module.state_dict())
    return other


@on_ranks(2)
def test_training_and_its_proper_save_go_on_as_if_nobody_had_read(tmp_path):
    with open_engine() as plain:
        losses = [train_step(plain, number) for number in range(len(LONELY) + 1)]
        truth = {name: full.clone() for name, full in plain.iter_full_params()}
    with open_engine() as engine, Log() as log:
        assert train_step(engine, 0) == losses[0]
        for number, (way, read) in enumerate(LONELY.items(), 1):
            if engine.global_rank == 0:
                for value in read(engine.module):
                    assert value.isnan().all(), way
                    assert type(value) is not ShardedParameter, way
                assert len(log.lines) == number, (way, log.lines)
                told = log.lines.pop()
                log.lines.append("")
                for part in ("rank 0 alone", "test_lone_reads.py:", "rank 1 is in gather", "NaN",
                             "save_16bit_model", "GatheredParameters"):  # fmt: skip
                    assert part in told, (way, told)
            assert train_step(engine, number) == losses[number], way
        assert not engine.global_rank or not log.lines
        for name, full in engine.iter_full_params():
            assert torch.equal(full, truth[name])
        engine.save_16bit_model(tmp_path, "pytorch_model.bin")
        if engine.global_rank == 0:
            state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
            assert all(torch.equal(state[name], full) for name, full in truth.items())


@on_ranks(2)
def test_what_all_ranks_read_has_its_values(tmp_path):
    with open_engine() as engine, Log() as log:
        truth = {name: full.clone() for name, full in engine.iter_full_params()}
        for _ in range(3):
            state, _ = loaded(lambda file: torch.save(engine.module.state_dict(), file))
            assert all(torch.equal(state[name], full) for name, full in truth.items())
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            if engine.global_rank == 0:
                state, _ = loaded(lambda file: torch.save(engine.module.state_dict(), file))
                assert all(torch.equal(state[name], full) for name, full in truth.items())
        assert not log.lines
        session_watch = engine._watch.session_watch
        store, label = session_watch._watchdog.messages.call, session_watch.label
        keys = store(lambda s: [k for k in s.list_keys() if "/reads/" in k and label in k])
        assert len(keys) <= 4  # no key for each of them


def asked(engine) -> int:
    """How often waiting ranks have asked for the position of the others."""
    session_watch = engine._watch.session_watch
    return session_watch._watchdog.messages.call(
        lambda store: store.add(f"reads/{session_watch.label}/asked", 0)
    )


@on_ranks(2)
def test_a_slow_rank_is_waited_for():
    with open_engine() as engine, Log() as log:
        train_step(engine)
        weight = engine.module[0].weight
        while (
            engine.global_rank == 1 and asked(engine) < 1
        ):  # until rank 0 has waited, and looked for it
            pass
        assert weight.detach().cpu().isfinite().all()
        train_step(engine)
        assert not log.lines


@pytest.mark.parametrize("where", ["barrier", "save", "gone"])
@on_ranks(2)
def test_a_rank_that_is_elsewhere_is_not_waited_for(where, tmp_path):
    engine = open_engine()
    train_step(engine)
    if engine.global_rank == 0:
        with Log() as log:
            for param in engine.module.parameters():
                assert param.detach().cpu().isnan().all()
        (told,) = log.lines
        words = {"barrier": "barrier()", "save": "in broadcast from 0", "gone": "has left"}
        assert words[where] in told
    if where == "barrier":
        dist.barrier()
    if where == "save":
        engine.save_checkpoint(str(tmp_path))
    if where != "gone":
        train_step(engine)
        assert all(full.isfinite().all() for _, full in engine.iter_full_params())
    engine.destroy()


@on_ranks(2)
def test_of_two_reads_the_one_of_fewer_ranks_is_alone():
    with open_engine() as engine, Log() as log:
        train_step(engine)
        first, last = engine.module[0].weight, engine.module[2].weight
        if engine.global_rank == 0:
            assert first.detach().cpu().isnan().all()
            assert "other ranks read" in log.lines[0]
        assert last.detach().cpu().isfinite().all()
        train_step(engine)


@on_ranks(2)
def test_nan_of_a_lonely_read_reaches_no_gradient():
    with open_engine() as engine:
        if engine.global_rank == 0:
            penalty = engine.module[0].weight.square().sum()
            assert penalty.isnan()
            with pytest.raises(ShardedAccess, match="Only this rank read it"):
                penalty.backward()
            with pytest.raises(ShardedAccess, match="given other values"):
                engine.module[0].weight.data = torch.zeros(10, 6)
        before = [full.clone() for _, full in engine.iter_full_params()]
        train_step(engine)
        after = [full.clone() for _, full in engine.iter_full_params()]
        assert all(value.isfinite().all() for value in after)
        assert not torch.equal(before[0], after[0])
