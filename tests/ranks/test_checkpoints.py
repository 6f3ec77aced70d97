"""Saving and loading follow their arguments and the configuration."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import kit
import pytest
import torch
import torch.distributed as dist
from checkpoint_model import Small, differences, everything, groups, open_engine, train
from torch import nn
from zeroshard_testing import on_ranks, run_ranks

from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint import restore
from zeroshard.checkpoint.directory import tags
from zeroshard.errors import CheckpointError, UnsupportedError, UsageError


def files(root: Path) -> set[str]:
    """All regular files below a directory."""
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


# -- the directory ---------------------------------------------------------------------------------


@pytest.mark.smoke
@on_ranks(2)
def test_a_save_leaves_exactly_its_files(tmp_path):
    with open_engine(3) as engine:
        train(engine, 1)
        assert engine.save_checkpoint(tmp_path) is True
        frozen = next(p.name for p in tmp_path.iterdir() if p.name.startswith("frozen-"))
        shards = [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
        assert files(tmp_path) == {
            "latest",
            "zero_to_fp32.py",
            "global_step1/shared.safetensors",
            "global_step1/manifest.json",
            *(f"global_step1/{name}" for name in shards),
            *(f"{frozen}/{name}" for name in shards),
        }
        assert (tmp_path / "latest").read_text() == "global_step1"


@on_ranks(2)
def test_tags_latest_and_client_state(tmp_path):
    with open_engine(1) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path, "first", {"epoch": 3, "best": torch.tensor([0.5])})
        engine.save_checkpoint(tmp_path, tag=7, save_latest=False)
        assert (tmp_path / "latest").read_text() == "first"
        path, client = engine.load_checkpoint(str(tmp_path))
        assert path == str(tmp_path / "first")
        assert client["epoch"] == 3
        assert torch.equal(client["best"], torch.tensor([0.5]))
        assert engine.load_checkpoint(tmp_path, tag=7) == (str(tmp_path / "7"), {})
        for bad in ("a/b", "..", ".hidden", "latest", "", "frozen-1"):
            with pytest.raises(UsageError, match="cannot be the name"):
                engine.save_checkpoint(tmp_path, bad)


@on_ranks(2)
def test_a_tag_that_is_saved_again_is_replaced(tmp_path):
    with open_engine(2) as engine:
        for _ in range(2):
            train(engine, 1)
            engine.save_checkpoint(tmp_path, "same")
        expected = everything(engine)
        train(engine, 1)
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2
        assert differences(everything(engine), expected) == []
        dist.barrier()
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@on_ranks(2)
def test_keep_last_removes_older_ones_and_frozen_weights_that_nobody_needs(tmp_path):
    with open_engine(3, checkpoint={"keep_last": 2}) as engine:
        for step in range(1, 5):
            if step == 3:  # other frozen weights from here on
                with torch.no_grad():
                    from zeroshard.zero import GatheredParameters

                    with GatheredParameters(engine.module.base.weight, modifier_rank=0):
                        engine.module.base.weight.mul_(2)
            train(engine, 1)
            engine.save_checkpoint(tmp_path)
        dist.barrier()
        assert tags(tmp_path) == ["global_step3", "global_step4"]
        assert len([p for p in tmp_path.iterdir() if p.name.startswith("frozen-")]) == 1


@on_ranks(2)
def test_older_ones_that_cannot_be_removed_do_not_undo_a_save(tmp_path):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    with (
        open_engine(1, checkpoint={"keep_last": 1}) as engine,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(places, "prune", refuse)
        for _ in range(2):
            train(engine, 1)
            assert engine.save_checkpoint(tmp_path)
        assert tags(tmp_path) == ["global_step1", "global_step2"]
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step2")


# -- frozen weights --------------------------------------------------------------------------------


def frozen_files(root: Path) -> list[str]:
    return sorted(name for name in files(root) if name.startswith("frozen-"))


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_frozen_weights_are_written_once(tmp_path, stage):
    with open_engine(stage) as engine:
        for _ in range(3):
            train(engine, 1)
            engine.save_checkpoint(tmp_path)
            dist.barrier()
            written = {n: (tmp_path / n).stat().st_mtime_ns for n in frozen_files(tmp_path)}
            assert len(written) == 2
        first = {n: (tmp_path / n).stat().st_mtime_ns for n in frozen_files(tmp_path)}
        assert first == written
        expected = everything(engine)
    model = Small(base_seed=77)  # other frozen weights: those of the checkpoint win
    with open_engine(stage, model=model) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(everything(engine), expected) == []


@on_ranks(2)
def test_damaged_frozen_weights_are_not_replaced_under_those_who_need_them(tmp_path):
    with open_engine(3) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
        expected = everything(engine)
        dist.barrier()
        shard = tmp_path / next(n for n in frozen_files(tmp_path) if "00001-of" in n)
        whole = shard.read_bytes()
        dist.barrier()
        if engine.global_rank == 0:
            shard.write_bytes(whole[:-1])
        dist.barrier()
        train(engine, 1)
        engine.save_checkpoint(tmp_path)  # has its own
        dist.barrier()
        if engine.global_rank == 0:
            shard.write_bytes(whole)
        dist.barrier()
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2
        engine.load_checkpoint(tmp_path, "global_step1")
        assert differences(everything(engine), expected) == []


@on_ranks(2)
def test_frozen_always_and_reference(tmp_path):
    with open_engine(3, checkpoint={"frozen": "always"}) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "always")
        assert not frozen_files(tmp_path / "always")
        expected = everything(engine)
    with open_engine(3, checkpoint={"frozen": "reference"}) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "reference")
        manifest = json.loads((tmp_path / "reference/global_step1/manifest.json").read_text())
        assert "tensors" not in manifest["body"]["parameters"]["base.weight"]
    for name in ("always", "reference"):
        with open_engine(2) as engine:
            engine.load_checkpoint(tmp_path / name)
            assert differences(everything(engine), expected) == []
    with open_engine(2, model=Small(base_seed=77)) as engine:
        engine.load_checkpoint(tmp_path / "always")
        assert differences(everything(engine), expected) == []
        before = everything(engine)
    with open_engine(2, model=Small(base_seed=77)) as engine:
        before = everything(engine)
        with pytest.raises(CheckpointError, match=r"this model has other ones: 'base\.weight'"):
            engine.load_checkpoint(tmp_path / "reference")
        assert differences(everything(engine), before) == []
        engine.load_checkpoint(tmp_path / "reference", load_module_strict=False)


@on_ranks(2)
def test_excluded_frozen_parameters_must_be_the_same_ones(tmp_path):
    with open_engine(3) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        assert not frozen_files(tmp_path)
        expected = everything(engine)
    with open_engine(1) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(everything(engine), expected) == []


# -- what fits and what does not -------------------------------------------------------------------


@pytest.mark.smoke
@on_ranks(2)
def test_another_model_is_refused_before_anything_changes(tmp_path):
    with open_engine(2) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
    wider = Small()
    wider.blocks[1][0] = nn.Linear(19, 54)
    wider.blocks[1][3] = nn.Linear(54, 19)
    with open_engine(2, model=wider) as engine:
        before = everything(engine)
        with pytest.raises(
            CheckpointError,
            match=r"'blocks\.1\.0\.weight' has shape \[54, 19\], but was saved with \[53, 19\]",
        ):
            engine.load_checkpoint(tmp_path)
        assert differences(everything(engine), before) == []
        assert engine.global_steps == 0
    longer = Small()
    longer.blocks.append(nn.Sequential(nn.Linear(19, 19)))
    with open_engine(2, model=longer) as engine:
        with pytest.raises(CheckpointError, match=r"does not have 'blocks\.3\.0\.weight'"):
            engine.load_checkpoint(tmp_path)
        own = dict(engine.iter_full_params())["blocks.3.0.weight"].clone()
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        got = dict(engine.iter_full_params())
        assert torch.equal(got["blocks.3.0.weight"], own)
    shorter = Small()
    del shorter.blocks[2]
    with (
        open_engine(2, model=shorter) as engine,
        pytest.raises(CheckpointError, match=r"the model does not have 'blocks\.2\.0\.weight'"),
    ):
        engine.load_checkpoint(tmp_path)


@on_ranks(2)
def test_another_optimizer_is_refused_and_weights_alone_are_not(tmp_path):
    with open_engine(2) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        expected = everything(engine)
    model = Small()
    trained = [p for p in model.parameters() if p.requires_grad]
    with open_engine(2, model=model, optimizer=torch.optim.SGD(trained, lr=0.1)) as engine:
        with pytest.raises(CheckpointError, match="was saved with AdamW, and this engine has SGD"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        got = dict(engine.iter_full_params())
        assert all(torch.equal(got[name], expected[name]) for name in got)
        assert engine.global_steps == 2
    model = Small()
    trained = [p for p in model.parameters() if p.requires_grad]
    with (
        open_engine(2, model=model, optimizer=torch.optim.AdamW(trained)) as engine,
        pytest.raises(CheckpointError, match="has 2 param groups, and this optimizer has 1"),
    ):
        engine.load_checkpoint(tmp_path)
    model = Small()
    swapped = torch.optim.AdamW(groups(model)[::-1])
    with (
        open_engine(2, model=model, optimizer=swapped) as engine,
        pytest.raises(CheckpointError, match="was in param group 0, and is in group 1"),
    ):
        engine.load_checkpoint(tmp_path)


@on_ranks(2)
def test_module_only_leaves_everything_else(tmp_path):
    with open_engine(3) as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
        saved = everything(engine)
    with open_engine(3) as engine:
        train(engine, 1)
        before, state = everything(engine), torch.get_rng_state()
        engine.load_checkpoint(tmp_path, load_module_only=True)
        after = everything(engine)
        assert engine.global_steps == 1
        assert torch.equal(torch.get_rng_state(), state)
        for name in after:
            source = before if name.endswith((" exp_avg", " exp_avg_sq", " step", "lr")) else saved
            assert torch.equal(after[name], source[name]), name


class Counting(torch.optim.AdamW):
    """Has state that belongs to no parameter, and a learning rate that is a tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=torch.tensor(lr), foreach=False)

    def step(self, closure: Any = None) -> None:
        count = self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            group["lr"].fill_(1e-2 / count)
        super().step(closure)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_state_of_no_parameter_and_tensors_of_groups_are_replaced(tmp_path, stage):
    with kit.engine(Small(), stage, optimizer=Counting) as engine:
        lr = engine.basic_optimizer.param_groups[0]["lr"]
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        saved = everything(engine)
        train(engine, 3)
        assert engine.basic_optimizer.state["steps"] == 5
        engine.load_checkpoint(tmp_path)
        assert engine.basic_optimizer.state["steps"] == 2
        assert engine.basic_optimizer.param_groups[0]["lr"] is lr  # a compiled update refers to it
        assert lr.item() == pytest.approx(5e-3)
        assert not differences(everything(engine), saved)


@pytest.mark.parametrize("save_precision", ["fp32", "bf16", "fp16"])
@on_ranks(2)
def test_another_precision_loads_the_masters(tmp_path, save_precision):
    with open_engine(2, save_precision) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        expected = everything(engine)
    for precision in ("fp32", "bf16", "fp16"):
        with open_engine(3, precision) as engine:
            with mock.patch.object(restore, "_STAGING_NBYTES", 64):  # converted in small pieces
                engine.load_checkpoint(tmp_path)
            got = everything(engine)
            own = {n for n in got if n.startswith("base") or n + " master" in got}
            assert set(differences(got, expected)) <= own  # rounded to the precision of here
            for name in (n for n in got if n.startswith("base")):
                assert torch.equal(got[name], expected[name].to(got[name].dtype)), name


def test_a_fresh_engine_saves_and_loads_without_state(tmp_path):
    with open_engine(1) as engine:
        engine.save_checkpoint(tmp_path)
        expected = everything(engine)
    with open_engine(1) as engine:
        train(engine, 2)
        engine.load_checkpoint(tmp_path)
        assert differences(everything(engine), expected) == []
        assert engine.global_steps == 0
        first = train(engine, 2)
    with open_engine(1) as engine:
        assert train(engine, 2) == first


@on_ranks(2)
def test_an_edit_before_the_save_is_saved(tmp_path):
    from zeroshard.zero import GatheredParameters

    with open_engine(3) as engine:
        train(engine, 1)
        with GatheredParameters(engine.module.embed.weight, modifier_rank=0):
            engine.module.embed.weight.data.fill_(0.25)
        engine.save_checkpoint(tmp_path)
    with open_engine(1) as engine:
        engine.load_checkpoint(tmp_path)
        got = everything(engine)
        assert bool((got["embed.weight"] == 0.25).all())
        assert bool((got["embed.weight master"] == 0.25).all())


# -- directories that ranks do not share -----------------------------------------------------------


def saves_apart(root: str, steps: int) -> dict:
    own = Path(root) / f"node{dist.get_rank()}"
    with open_engine(3) as engine:
        train(engine, steps)
        engine.save_checkpoint(own)
        expected = everything(engine)
        train(engine, 1)
        engine.load_checkpoint(own)
        assert differences(everything(engine), expected) == []
    return expected


def loads_apart(root: str, expected: dict) -> None:
    own = Path(root) / f"node{dist.get_rank()}"
    with open_engine(2) as engine:
        engine.load_checkpoint(own)
        assert differences(everything(engine), expected) == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nodes_without_a_shared_directory_save_apart_and_send_what_is_missing(tmp_path, world_size):
    expected = run_ranks(saves_apart, 2, str(tmp_path), 2)[0]
    shards = "global_step2/rank-0000{}-of-00002.safetensors"
    for rank in range(2):
        node = tmp_path / f"node{rank}"
        assert (node / "global_step2/manifest.json").exists()
        assert (node / "latest").exists()
        assert (node / shards.format(rank)).exists()
        assert not (node / shards.format(1 - rank)).exists()
    if world_size == 1:
        with pytest.raises(Exception, match=r"rank-00001-of-00002\.safetensors cannot be opened"):
            run_ranks(loads_apart, 1, str(tmp_path), expected)
        return
    run_ranks(loads_apart, world_size, str(tmp_path), expected)
    was_sent = (tmp_path / "node0" / shards.format(1)).exists()
    assert was_sent is (world_size == 3)  # the same ranks need nothing else


# -- rounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(2)
def test_a_save_takes_four_rounds(tmp_path, asynchronous):
    """And a last gather, after which the rank that serves the store may end."""
    with open_engine(3, checkpoint={"asynchronous": asynchronous}) as engine:
        train(engine, 1)
        group, gathered, broadcast = engine._watch.control_group, [], []
        gather, tell = group.gather, group.broadcast
        group.gather = lambda text, *, topic: (gathered.append(topic), gather(text, topic=topic))[1]
        group.broadcast = lambda text, *, topic: (
            broadcast.append(topic),
            tell(text, topic=topic),
        )[1]
        engine.save_checkpoint(tmp_path)
        engine.wait_for_checkpoint()
    assert broadcast == ["planning it", "reserving space", "writing", "completing it"]
    assert gathered == [*broadcast, "finishing the save"]


# -- in the background -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, stage):
    with open_engine(stage, checkpoint={"asynchronous": True}) as engine:
        train(engine, 2)
        expected = everything(engine)
        held = threading.Event()
        engine._saver.watch_point = lambda point: held.wait(20) if point == "made" else None
        begun = time.monotonic()
        engine.save_checkpoint(tmp_path)
        assert time.monotonic() - begun < 10
        losses = train(engine, 3)
        assert not (tmp_path / "latest").exists()
        held.set()
        engine.wait_for_checkpoint()
        dist.barrier()
        assert (tmp_path / "latest").exists()
    with open_engine(stage) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(everything(engine), expected) == []
        assert train(engine, 3) == losses


@on_ranks(2)
def test_a_second_save_waits_for_the_first_and_closing_for_the_last(tmp_path):
    expected = {}
    with open_engine(2, checkpoint={"asynchronous": True}) as engine:
        for step in (1, 2, 3):
            train(engine, 1)
            engine.save_checkpoint(tmp_path)
            expected[step] = everything(engine)
    with open_engine(2) as engine:
        for step, states in expected.items():
            engine.load_checkpoint(tmp_path, f"global_step{step}")
            assert differences(everything(engine), states) == []


@on_ranks(2)
def test_state_on_disk_is_not_copied_to_memory(tmp_path):
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "swap")}}
    with open_engine(2, zero=zero, checkpoint={"asynchronous": True}) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "out")
        assert engine._saver._thread is None
        assert not engine._saver._images
        dist.barrier()
        assert (tmp_path / "out/latest").exists()


# -- wrong moments ---------------------------------------------------------------------------------


@on_ranks(2)
def test_saving_in_the_middle_of_a_step_says_what_is_lost(tmp_path):
    keys = {"gradient_accumulation_steps": 2, "train_batch_size": 24}
    with open_engine(2, **keys) as engine:
        logger = logging.getLogger("zeroshard")
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logger.addHandler(handler)
        train(engine, 0)
        from checkpoint_model import global_batch, loss_of

        engine.backward(loss_of(engine, global_batch(0)))
        engine.save_checkpoint(tmp_path)
        logger.removeHandler(handler)
        if engine.global_rank == 0:
            assert any("in the middle of a step" in text for text in records)


@on_ranks(2)
def test_calls_that_cannot_work(tmp_path):
    from zeroshard.zero import GatheredParameters

    with open_engine(3) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
        with (
            GatheredParameters(engine.module.embed.weight),
            pytest.raises(UsageError, match="GatheredParameters"),
        ):
            engine.load_checkpoint(tmp_path)
        engine.offload_states()
        with pytest.raises(UsageError, match="reload_states"):
            engine.save_checkpoint(tmp_path)
        engine.reload_states()
        with pytest.raises(CheckpointError, match=r"does not exist\. Check the path"):
            engine.load_checkpoint(tmp_path / "frozen")
        train(engine, 1)
    with pytest.raises(UsageError, match="closed"):
        engine.save_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="closed"):
        engine.load_checkpoint(tmp_path)


@on_ranks(2)
def test_nothing_to_load_is_an_error_unless_the_program_says_otherwise(tmp_path):
    with open_engine(2) as engine:
        before = everything(engine)
        with pytest.raises(CheckpointError, match="contains no checkpoint"):
            engine.load_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path, missing_ok=True) == (None, {})
        assert differences(everything(engine), before) == []
        engine.save_checkpoint(tmp_path, "other", save_latest=False)
        with pytest.raises(CheckpointError, match="It contains other: pass one of them as tag="):
            engine.load_checkpoint(tmp_path)
        with pytest.raises(UnsupportedError, match="custom_load_fn"):
            engine.load_checkpoint(tmp_path, "other", custom_load_fn=print)


def test_allow_pickle_is_asked_for(tmp_path):
    with open_engine(1) as engine:
        with pytest.raises(CheckpointError, match=r"client_state\['when'\]"):
            engine.save_checkpoint(tmp_path, client_state={"when": os.stat_result(range(10))})
        assert not (tmp_path / "latest").exists()
    with open_engine(1, checkpoint={"allow_pickle": True}) as engine:
        engine.save_checkpoint(tmp_path, client_state={"when": os.stat_result(range(10))})
        assert engine.load_checkpoint(tmp_path)[1]["when"].st_mode == 0
    with open_engine(1) as engine, pytest.raises(CheckpointError, match="allow_pickle"):
        engine.load_checkpoint(tmp_path)
