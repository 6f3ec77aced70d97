"""Which ranks the next attempt has, and how train_batch_size stays the same with them."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest

from zeroshard.config import load_config
from zeroshard.config.batch import RunBatch, fitting_sizes, keep_batch
from zeroshard.core.mesh import Mesh
from zeroshard.errors import ConfigError, LaunchError
from zeroshard.launch.agent import remove_recordings
from zeroshard.launch.hosts import Host
from zeroshard.launch.launch_plan import check_min_ranks
from zeroshard.launch.meeting import NodeEnd, joined
from zeroshard.launch.restart import next_ranks
from zeroshard.launch.usable import usable_slots
from zeroshard.run.batch_note import BatchNote, read_note, told_by_launcher, write_note
from zeroshard.run.exit_report import EXIT_SURVIVOR, ExitReport
from zeroshard.run.recordings import FlightRecorder

A, B = Host("a", (0, 1)), Host("b", (0, 1, 2))
ALL = {"a": (0, 1), "b": (0, 1, 2)}
NOTE = BatchNote("run", 5, 20, 4, False, (1, 2, 4, 5))


def slots(found) -> dict[str, tuple[int, ...]]:
    return {host.name: host.slots for host in found.hosts}


def test_all_ranks_take_part_if_all_can_be_used():
    found = next_ranks([A, B], ALL, 1, NOTE)
    assert (slots(found), found.lines) == (ALL, ())


def test_a_host_that_does_not_answer_is_left_out_and_comes_back():
    found = next_ranks([A, B], {"a": None, "b": (0, 1, 2)}, 1, None)
    assert slots(found) == {"b": (0, 1, 2)}
    assert found.lines == ("host a does not answer, and is left out.",)
    assert slots(next_ranks([A, B], ALL, 1, None)) == ALL


def test_the_largest_number_of_ranks_that_keeps_the_batch_is_taken():
    found = next_ranks([A, B], {"a": (1,), "b": (0, 2)}, 1, NOTE)
    assert slots(found) == {"a": (1,), "b": (0,)}
    assert found.lines[-1] == "1 rank stays idle: train_batch_size 20 fits 2 ranks, and not 3."
    assert found.lines[:2] == (
        "slot 0 of host a cannot be used, and it is left out.",
        "slot 1 of host b cannot be used, and it is left out.",
    )


def test_too_few_ranks_end_the_run():
    found = next_ranks([A, B], {"a": (0,)}, 2, None)
    assert not found.hosts
    assert found.reason == "1 rank of 5 can be used, and --min-ranks is 2."


def test_a_batch_that_no_smaller_number_of_ranks_divides_ends_the_run_with_the_numbers():
    note = BatchNote("run", 5, 5, 1, True, (1, 5))
    found = next_ranks([A, B], {"a": (0, 1), "b": (0,)}, 2, note)
    assert not found.hosts
    assert found.reason == (
        "3 ranks of 5 can be used. train_batch_size 5 in micro batches of 1 does not fit 2 to 3 ranks, "
        "only 1, 5. Give a train_batch_size that more numbers of ranks divide, or a smaller micro batch."
    )


def test_under_slurm_a_host_takes_part_with_all_its_slots():
    hosts = [Host(name, (0, 1)) for name in "abc"]
    answers = {"a": (0,), "b": (0, 1), "c": (0, 1)}
    assert slots(next_ranks(hosts, answers, 1, None, whole_hosts=True)) == {
        "b": (0, 1),
        "c": (0, 1),
    }
    note = BatchNote("run", 6, 6, 1, True, (1, 2, 3, 6))
    assert slots(next_ranks(hosts, answers, 1, note, whole_hosts=True)) == {"b": (0, 1)}


@pytest.mark.parametrize(
    ("sizes", "before", "now", "kept"),
    [
        ((12, None, None), 3, 2, (12, 3, 2)),
        ((12, None, None), 3, 1, (12, 4, 3)),
        ((12, 4, None), 3, 1, (12, 4, 3)),
        ((None, 4, None), 3, 1, (12, 4, 3)),
        ((12, 2, 2), 3, 1, (12, 2, 6)),
        ((24, None, 2), 3, 2, (24, 4, 3)),
        ((64, None, None), 8, 4, (64, 8, 2)),
    ],
)
def test_a_step_keeps_its_samples(sizes, before, now, kept):
    found = keep_batch(*sizes, dp_before=before, dp_now=now)
    assert found == kept
    assert kept[0] == kept[1] * kept[2] * now


@pytest.mark.parametrize(
    ("sizes", "before", "now", "text"),
    [
        ((12, 4, None), 3, 2, "12 is not divisible by train_micro_batch_size_per_gpu 4 x 2"),
        (
            (7, None, None),
            7,
            3,
            "7 is not divisible by 3 data-parallel ranks; the run began with 7",
        ),
        ((8, 4, 1), 3, 2, "for these train_batch_size 8 is not .* 4 x .* 1 x 3 = 12"),
        ((8, 4, None), 3, 2, "for these train_batch_size 8 is not"),
        (
            (8, None, None),
            3,
            2,
            "8 is not divisible by world size 3: make it 6 or 9; the run began with 3",
        ),
    ],
)
def test_a_batch_that_cannot_be_kept_is_refused_with_the_numbers(sizes, before, now, text):
    found = keep_batch(*sizes, dp_before=before, dp_now=now)
    assert isinstance(found, str)
    assert re.search(text, found)


def test_the_numbers_of_ranks_that_fit_are_those_that_keep_the_batch():
    for train, micro, ranks in ((12, None, 3), (12, 4, 3), (64, None, 8), (60, 5, 6)):
        fits = fitting_sizes(train, micro, mesh=Mesh(data_shard=ranks), is_shard_given=False)
        each = range(1, ranks + 1)
        kept = [keep_batch(train, micro, None, dp_before=ranks, dp_now=now) for now in each]
        assert fits == tuple(now for now, one in zip(each, kept) if not isinstance(one, str))
    cut = Mesh(tensor=2, data_shard=4)
    assert fitting_sizes(8, None, mesh=cut, is_shard_given=False) == (2, 4, 8)
    assert fitting_sizes(8, None, mesh=cut, is_shard_given=True) == (8,)


def test_a_configuration_keeps_its_batch_with_fewer_ranks():
    given = {"train_batch_size": 12, "gradient_accumulation_steps": 1}
    loaded = load_config(given, world_size=2, run_batch=RunBatch(3, (12,)))
    config = loaded.config
    sizes = (config.train_batch_size, config.train_micro_batch_size_per_gpu)
    assert (*sizes, config.gradient_accumulation_steps) == (12, 3, 2)
    assert any("train_batch_size stays 12" in line for line in loaded.notices)
    with pytest.raises(ConfigError, match="is 8 with the ranks that are left, and was 16"):
        load_config({"train_batch_size": 8}, world_size=2, run_batch=RunBatch(4, (16,)))
    assert (
        load_config(given, world_size=3, run_batch=RunBatch(3)).notices
        == load_config(given, world_size=3).notices
    )


def test_a_note_belongs_to_one_run_and_joins_the_engines_of_it(tmp_path):
    write_note(tmp_path, NOTE)
    assert read_note(tmp_path, "run") == replace(NOTE, batches=(20,))
    assert read_note(tmp_path, "another") is None
    write_note(tmp_path, replace(NOTE, train_batch_size=10, fits=(1, 2, 5)))
    found = read_note(tmp_path, "run")
    assert found is not None
    assert (found.fits, found.batches) == ((1, 2, 5), (10, 20))
    (tmp_path / ".batch.json").write_text("{")
    assert read_note(tmp_path, "run") is None


def test_what_the_launcher_tells_is_read_from_the_environment():
    env = {
        "ZEROSHARD_CHECKPOINT_DIR": "/x",
        "ZEROSHARD_FULL_RANKS": "3",
        "ZEROSHARD_TRAIN_BATCH": "12,64",
    }
    told = told_by_launcher(env)
    assert (str(told.directory), told.full_ranks, told.batches) == ("/x", 3, (12, 64))
    assert told_by_launcher({}).directory is None


def test_min_ranks_above_the_ranks_is_refused():
    check_min_ranks(3, 3)
    with pytest.raises(LaunchError, match="--min-ranks 4 is more than the 3 ranks of this run"):
        check_min_ranks(4, 3)


def test_a_slot_is_usable_if_the_users_check_says_so(tmp_path):
    (tmp_path / "bad-1").touch()
    check = f"test ! -e {tmp_path}/bad-$ZEROSHARD_SLOT"
    assert usable_slots((0, 1, 2), check) == (0, 2)
    assert usable_slots((0, 1), "sleep 30", limit_s=0.2) == ()


def test_recordings_of_ended_ranks_are_removed_and_those_of_others_stay(tmp_path):
    for name, pid in (("run-00000001", 11), ("run-00000002", 12), ("other-00000001", 11)):
        folder = tmp_path / f"zeroshard-{name}"
        folder.mkdir()
        buffer = bytearray(FlightRecorder.nbytes_for(4))
        FlightRecorder(buffer, pid=pid, rank=0, group_size=2, ring=4)
        (folder / "process").write_bytes(bytes(buffer))
        (folder / "process.stack").touch()
    remove_recordings("run", {11, 13}, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["zeroshard-other-00000001", "zeroshard-run-00000002"]


def test_the_cause_of_several_nodes_is_the_one_that_is_no_consequence():
    own = ExitReport(("rank 0 lost its peers.",), 0, "", EXIT_SURVIVOR, consequence=True)
    lost = NodeEnd(EXIT_SURVIVOR, ("rank 1 lost its peers.",), consequence=True)
    raised = NodeEnd(1, ("rank 2 raised ValueError.",))
    names = ["node 0", "node 1", "node 2"]
    found = joined(own, {0: lost, 1: lost, 2: raised}, names)
    assert (found.lines, found.exitcode) == (("rank 2 raised ValueError.",), 1)
    found = joined(own, {0: lost, 1: None, 2: lost}, names)
    assert found.lines == ("node 1 does not answer.",)
    done = ExitReport((), None, "", 0)
    assert joined(done, {0: NodeEnd(0), 1: NodeEnd(0), 2: None}, names[:2]).exitcode == 0
    assert joined(done, {0: NodeEnd(0), 1: None, 2: NodeEnd(0)}, names).exitcode == EXIT_SURVIVOR
    assert joined(own, {0: lost, 1: NodeEnd(130, interrupted=True), 2: lost}, names).interrupted
