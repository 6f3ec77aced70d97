"""Which checkpoint of a Trainer or an Accelerator a restarted run continues from."""

from __future__ import annotations

import logging
from pathlib import Path

import kit
import pytest
import torch
import torch.distributed as dist
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard.errors import CheckpointError
from zeroshard.integrations import resuming
from zeroshard.integrations.resuming import newest_checkpoint


def save(folder: Path, name: str, *, engine_in: str = "") -> Path:
    """A checkpoint as these programs write it."""
    place = folder / name
    model = nn.Linear(4, 4)
    with kit.engine(model, 1) as engine:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        engine.save_checkpoint(place / engine_in, tag="global_step1")
    if "-" in name:
        (place / "trainer_state.json").write_text('{"global_step": 1}')
    return place


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@on_ranks(1)
def test_the_newest_complete_and_undamaged_one_is_found(tmp_path):
    assert newest_checkpoint(tmp_path / "absent") is None
    assert newest_checkpoint(tmp_path) is None
    places = {step: save(tmp_path, f"checkpoint-{step}") for step in (2, 9, 10, 11, 12)}
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path) == str(places[12])
    (places[12] / "trainer_state.json").write_text(
        '{"global_st'
    )  # the run ended while it was written
    assert newest_checkpoint(tmp_path) == str(places[11])
    (places[11] / "latest").unlink()
    assert newest_checkpoint(tmp_path) == str(places[10])
    damage(max(places[10].rglob("*.safetensors"), key=lambda file: file.stat().st_size))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    resuming.logger.addHandler(handler)
    assert newest_checkpoint(tmp_path) == str(places[9])
    resuming.logger.removeHandler(handler)
    assert len(told) == 3
    assert "checkpoint-12 is passed over: trainer_state.json, which is written last" in told[0]
    assert "checkpoint-11 is passed over: it has no file 'latest'" in told[1]
    assert "checksum" in told[2]
    assert newest_checkpoint(tmp_path, read_all=False) == str(places[10])


@on_ranks(1)
def test_checkpoints_of_an_accelerator_have_a_folder_for_each_engine(tmp_path):
    older = save(tmp_path, "checkpoint_3", engine_in="pytorch_model")
    newer = save(tmp_path, "checkpoint_4", engine_in="pytorch_model")
    assert newest_checkpoint(tmp_path) == str(newer)
    for file in newer.rglob("*.safetensors"):
        file.unlink()
    assert newest_checkpoint(tmp_path) == str(older)


@on_ranks(3)
def test_rank_0_decides_for_all(tmp_path):
    """The other ranks do not read: what they would find differs."""
    seen = resuming._newest
    resuming._newest = lambda *_: f"of rank {dist.get_rank()}"
    try:
        assert newest_checkpoint(tmp_path) == newest_checkpoint(tmp_path) == "of rank 0"
        resuming._newest = lambda *_: 1 / 0 if dist.get_rank() == 0 else ""
        with pytest.raises(CheckpointError, match=r"was not searched .*division by zero"):
            newest_checkpoint(tmp_path)
    finally:
        resuming._newest = seen
