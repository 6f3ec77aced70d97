"""The flight recorder can be read afterwards, and the diagnosis names the right rank."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.comm.recorder import Recorder
from zeroshard.core.texts import rank_ranges
from zeroshard.run.recordings import (
    FlightRecorder,
    FlightRecording,
    Record,
    fold,
    read_recording,
    read_recording_file,
    sweep_recordings,
    word_of,
)
from zeroshard.watchdog.diagnosis import diagnose, first_difference
from zeroshard.watchdog.rank_status import READ, RankStatus, Wait, call_text
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.stacks import TORCH, StackFile
from zeroshard.watchdog.tracked_calls import StallClock

CONTROL = "engine, control group"

CALLS = st.tuples(
    st.sampled_from(["all_gather", "reduce_scatter"]),
    st.sampled_from(["embed", "layers.0", "layers.1", "head"]),
    st.sampled_from([256, 512]),
    st.sampled_from(["float32", "bfloat16"]),
)


def history(calls, *, ring=256) -> tuple[Record, ...]:
    records, folded = [], word_of("group", "data")
    for seq, (op, name, nbytes, dtype) in enumerate(calls, 1):
        record = Record(seq, op, name, nbytes, dtype, 0.0)
        folded = fold(folded, record)
        records.append(record._replace(history=folded))
    return tuple(records[-ring:])


def status(rank, calls, *, waits=True, ring=256, **known) -> RankStatus:
    records = history(calls, ring=ring)
    seq = records[-1].seq if records else 0
    flight = FlightRecording(100 + rank, rank, 2, seq, 7, seq if waits else 0, "", records)
    return RankStatus(rank=rank, flight=flight, **known)


def gathers(*names) -> list[tuple[str, str, int, str]]:
    return [("all_gather", name, 256, "float32") for name in names]


def judged(*statuses, blocked_s=31.0, limits=None):
    return diagnose(statuses, limits or WatchdogSettings(), blocked_s=blocked_s)


# -- the log ---------------------------------------------------------------------------------------


def record_some(recorder, names, numel=10):
    table = recorder.entries("all_gather")
    for name in names:
        recorder.enter(table[name], torch.zeros(numel), numel, numel // 2)


def test_a_log_gives_back_what_was_called():
    recorder = Recorder(ring=8)
    record_some(recorder, ["embed", "layers.0"])
    assert [(r.seq, r.op, r.name, r.nbytes, r.dtype) for r in recorder.records()] == [
        (1, "all_gather", "embed", 40, "float32"),
        (2, "all_gather", "layers.0", 40, "float32"),
    ]


def test_a_ring_keeps_the_newest_records():
    recorder = Recorder(ring=8)
    record_some(recorder, [str(i) for i in range(20)])
    # The slot that would be written next may be half written: one less than the ring is kept.
    assert [r.name for r in recorder.records()] == [str(i) for i in range(13, 20)]


def test_the_inlined_hash_is_the_fold_of_the_records():
    recorder = Recorder(ring=64)
    record_some(recorder, ["a", "b", "a"])
    record_some(recorder, ["a"], numel=12)
    folded = word_of("group", "data")
    for record in recorder.records():
        folded = fold(folded, record)
        assert record.history == folded
    assert recorder.hash64 == folded


@pytest.mark.parametrize(
    "other",
    [
        ("reduce_scatter", "embed", 256, "float32"),
        ("all_gather", "head", 256, "float32"),
        ("all_gather", "embed", 512, "float32"),
        ("all_gather", "embed", 256, "bfloat16"),
    ],
    ids=["operation", "name", "bytes", "dtype"],
)
def test_each_part_of_a_call_changes_the_hash(other):
    assert history([other])[0].history != history(gathers("embed"))[0].history


def test_order_changes_the_hash():
    assert history(gathers("a", "b"))[-1].history != history(gathers("b", "a"))[-1].history


def test_two_groups_never_share_a_tag():
    tensor = torch.zeros(4)
    tags = set()
    for group in ("dp", "tp"):
        recorder = Recorder(group)
        tags.add(recorder.enter(recorder.entries("all_gather")["embed"], tensor, 4, 2)[2])
    assert len(tags) == 2


def test_the_hash_for_the_exchange_is_exact_in_float64():
    recorder = Recorder()
    record_some(recorder, ["embed"] * 50)
    assert recorder.hash32 == recorder.hash64 >> 32
    assert float(torch.tensor(recorder.hash32, dtype=torch.float64)) == recorder.hash64 >> 32


def test_a_log_in_a_file_is_read_from_outside(tmp_path):
    recorder = Recorder(recording=tmp_path / "run" / "3", rank=3, group_size=4)
    record_some(recorder, ["embed", "layers.17"])
    recorder.mark_step(5)
    recorder.mark_section("save")
    flight = read_recording_file(tmp_path / "run" / "3")
    assert (flight.rank, flight.group_size, flight.seq, flight.step) == (3, 4, 2, 5)
    assert (flight.section, flight.records[-1].name) == ("save", "layers.17")
    assert flight.records[-1].history == recorder.hash64
    recorder.close()


def test_closing_removes_the_file_and_keeps_the_history(tmp_path):
    recorder = Recorder(recording=tmp_path / "run" / "0")
    record_some(recorder, ["embed"])
    recorder.close()
    assert not (tmp_path / "run").exists()
    assert [r.name for r in recorder.records()] == ["embed"]
    record_some(recorder, ["head"])
    assert [r.name for r in recorder.records()] == ["embed", "head"]


def test_a_forgotten_recorder_removes_its_file(tmp_path):
    recorder = Recorder(recording=tmp_path / "run" / "0")
    del recorder
    assert not (tmp_path / "run").exists()


def test_sweeping_removes_old_logs_of_dead_processes_only(tmp_path):
    living = Recorder(recording=tmp_path / "zeroshard-a" / "0")
    dead = tmp_path / "zeroshard-b" / "0"
    dead.parent.mkdir()
    buffer = bytearray(FlightRecorder.nbytes_for(8))
    FlightRecorder(buffer, ring=8, pid=2**22 + 1, rank=0, group_size=1)
    dead.write_bytes(buffer)
    sweep_recordings(tmp_path, older_than_s=3600)
    assert dead.exists()  # not old yet
    sweep_recordings(tmp_path, older_than_s=-10)
    assert not dead.parent.exists()
    assert (tmp_path / "zeroshard-a" / "0").exists()
    living.close()


def recording_of(pid: int, space: int | None = None) -> bytes:
    buffer = bytearray(FlightRecorder.nbytes_for(8))
    recorder = FlightRecorder(buffer, ring=8, pid=pid, rank=0, group_size=1)
    if space is not None:
        recorder.words[9] = space
    return bytes(buffer)


ENDED = 2**22 + 1


@pytest.mark.parametrize(
    ("files", "stays"),
    [
        ({"0": recording_of(ENDED), "process.stack": b"File ..."}, False),
        ({}, True),
        ({"data.bin": b"weights"}, True),
        ({"process.stack": b"mine"}, True),
        ({"0": recording_of(ENDED), "data.bin": b"weights"}, True),
        ({"0": recording_of(ENDED), "1": recording_of(os.getpid())}, True),
        ({"0": recording_of(ENDED, space=7)}, True),
    ],
    ids=["ours", "empty", "other files", "a stack alone", "with other files", "a writer lives",
         "of another container"],
)  # fmt: skip
def test_sweeping_removes_nothing_but_recordings_of_processes_that_have_ended(
    tmp_path, files, stays
):
    folder = tmp_path / "zeroshard-mydata"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sweep_recordings(tmp_path, older_than_s=-10)
    left = {file.name: file.read_bytes() for file in folder.iterdir()} if folder.exists() else None
    assert left == (files if stays else None)


def test_sweeping_follows_no_link_and_enters_no_folder(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "0").write_bytes(recording_of(ENDED))
    (tmp_path / "zeroshard-a").symlink_to(mine)
    (tmp_path / "zeroshard-b" / "folder").mkdir(parents=True)
    (tmp_path / "zeroshard-c").mkdir()
    (tmp_path / "zeroshard-c" / "0").symlink_to(mine / "0")
    sweep_recordings(tmp_path, older_than_s=-10)
    assert (mine / "0").exists()
    assert (tmp_path / "zeroshard-b" / "folder").exists()
    assert (tmp_path / "zeroshard-c" / "0").is_symlink()


def test_sweeping_removes_nothing_of_another_user(tmp_path, monkeypatch):
    file = tmp_path / "zeroshard-a" / "0"
    file.parent.mkdir()
    file.write_bytes(recording_of(ENDED))
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    sweep_recordings(tmp_path, older_than_s=-10)
    assert file.exists()


@pytest.mark.parametrize("raw", [b"", b"x" * 100, b"x" * 100_000])
def test_bytes_that_are_no_log_are_not_read_as_one(raw):
    assert read_recording(raw) is None


def test_more_names_than_rows_are_still_counted_and_hashed():
    recorder = Recorder(ring=8)
    record_some(recorder, [f"unit {i}" for i in range(600)])
    assert recorder.seq == 600
    assert recorder.records()[-1].op == "?"
    assert recorder.calls["all_gather"] == 600


def test_of_a_long_name_the_end_is_kept():
    recorder = Recorder()
    record_some(recorder, ["model." * 30 + "mlp.down"])
    assert recorder.records()[0].name.endswith("model.mlp.down")
    assert len(recorder.records()[0].name) == 80


def test_traffic_is_counted_per_operation_and_name():
    recorder = Recorder()
    record_some(recorder, ["a", "b", "a"], numel=10)
    record_some(recorder, ["a"], numel=4)
    assert recorder.calls == {"all_gather": 4}
    assert recorder.payload_numel == {"all_gather": 34}
    assert recorder.sent_numel == {"all_gather": 17}
    assert {e.name: e.payload_numel for e in recorder.traffic()} == {"a": 24, "b": 10}


def test_resetting_the_traffic_keeps_the_order():
    recorder = Recorder()
    record_some(recorder, ["a"])
    before = recorder.hash64
    recorder.reset_traffic()
    assert recorder.payload_numel == {"all_gather": 0}
    assert (recorder.seq, recorder.hash64) == (1, before)


# -- differences -----------------------------------------------------------------------------------


@given(st.lists(CALLS, max_size=30), st.data())
@settings(deadline=None, max_examples=60)
def test_the_first_difference_found_is_the_true_one(calls, data):
    at = data.draw(st.integers(0, len(calls)))
    other = calls[:at] + data.draw(st.lists(CALLS, min_size=1, max_size=30))
    found = first_difference([status(0, calls), status(1, other), status(2, calls)])
    truth = next((i for i, (a, b) in enumerate(zip(calls, other, strict=False), 1) if a != b), None)
    if truth is None:  # one is the beginning of the other: late, not different
        assert found is None
    else:
        assert found is not None
        assert found.seq == truth
        assert found.exact
        assert [(r.call, ranks) for r, ranks in found.calls] == [
            (calls[truth - 1], [0, 2]),
            (other[truth - 1], [1]),
        ]


def test_a_difference_older_than_the_ring_is_admitted():
    long = gathers(*["x"] * 40)
    found = first_difference(
        [status(0, [*gathers("a"), *long], ring=8), status(1, [*gathers("b"), *long], ring=8)]
    )
    assert found is not None
    assert not found.exact


def test_ranks_with_rings_of_other_ages_are_compared_where_they_overlap():
    calls = gathers(*map(str, range(300)))
    assert first_difference([status(0, calls, ring=64), status(1, calls[:250], ring=64)]) is None


# -- verdicts --------------------------------------------------------------------------------------


def test_a_skipped_unit_is_named_with_the_way_out():
    steps = gathers("embed", "visual", "layers.0")
    diagnosis = judged(
        *(status(r, [*steps, *gathers("embed", "visual")]) for r in range(6)),
        *(
            status(r, [*steps, *gathers("embed", "layers.0")], stack="train.py:88 forward")
            for r in (6, 7)
        ),
    )
    assert diagnosis.text.splitlines() == [
        "RankDivergence at step 7 after 31 s (8 of 8 ranks answered)",
        "  ranks 0-5: waiting in gather 'visual' (#5)",
        "  ranks 6,7: waiting in gather 'layers.0' (#5)",
        "  last agreed: gather 'embed' (#4). Ranks 6,7 skipped 'visual' (train.py:88 forward).",
        '  Fix: "conditional_modules": ["visual"], or let every rank run it.',
    ]
    assert (diagnosis.kind, diagnosis.fatal, diagnosis.ranks) == ("RankDivergence", True, (6, 7))
    assert (diagnosis.cause, diagnosis.did) == ((6, 7), "skipped 'visual' (train.py:88 forward)")


def test_a_layer_of_a_tensor_group_has_no_key_that_lets_ranks_skip_it():
    forward, backward = (
        ("all_reduce", f"{what} of a layer", 64, "float32") for what in ("out", "in")
    )
    whole = [forward, forward, backward]
    diagnosis = judged(status(0, whole), status(1, [forward, backward]))
    assert "Rank 1 skipped 'out of a layer'." in diagnosis.text
    assert diagnosis.text.endswith("  Fix: let every rank run it.")


def test_of_two_ranks_neither_is_accused():
    diagnosis = judged(status(0, gathers("a")), status(1, gathers("b")))
    assert diagnosis.ranks == (0, 1)


def test_another_size_of_the_same_unit_shows_both_sizes():
    diagnosis = judged(
        status(0, [("all_gather", "a", 256, "float32")]),
        status(1, [("all_gather", "a", 128, "bfloat16")]),
    )
    assert "of 256 bytes float32" in diagnosis.text
    assert "of 128 bytes bfloat16" in diagnosis.text


def test_a_dead_rank_comes_before_a_late_one():
    diagnosis = judged(
        status(0, gathers("a", "b")),
        status(1, gathers("a"), waits=False),
        status(2, gathers("a"), fate="gone", detail="process 7 ended", answered=False, host="n1"),
    )
    assert diagnosis.text.splitlines() == [
        "RankLost at step 7 after 31 s (2 of 3 ranks answered)",
        "  rank 2 (n1): process 7 ended; its last call was gather 'a' (#1)",
        "  rank 0: waiting in gather 'b' (#2)",
        "  The cause is in the output of rank 2; the others only lost their connection to it.",
    ]


def test_a_stopped_rank_comes_before_those_that_left_because_of_it():
    diagnosis = judged(
        status(0, gathers("a"), fate="left", waits=False),
        status(1, gathers("a"), fate="stopped", waits=False, answered=False),
        status(2, gathers("a", "b")),
    )
    assert (diagnosis.kind, diagnosis.ranks) == ("RankFrozen", (1,))


def test_of_unequal_groups_the_smaller_one_is_named_whatever_its_ranks_are():
    diagnosis = judged(status(0, gathers("b")), *(status(r, gathers("a")) for r in (1, 2)))
    assert (diagnosis.kind, diagnosis.ranks) == ("RankDivergence", (0,))


def test_a_rank_with_another_hash_than_most_is_odd_whatever_its_number_is():
    assert Recorder().diverging(torch.tensor([5.0, 7.0, 7.0])) == [0]
    assert Recorder().diverging(torch.tensor([7.0, 5.0, 7.0])) == [1]


def test_a_divergence_comes_before_the_death_that_follows_it():
    diagnosis = judged(status(0, gathers("a")), status(1, gathers("b"), fate="gone"))
    assert diagnosis.kind == "RankDivergence"


def test_a_rank_that_reads_alone_is_named_with_its_line():
    alone = status(0, gathers("embed", "head" + READ), stack="train.py:12 log < train.py:40 main")
    diagnosis = judged(alone, status(1, gathers("embed", "layers.0")))
    assert (diagnosis.kind, diagnosis.fatal) == ("RankDivergence", True)
    assert diagnosis.text.splitlines()[-2:] == [
        "  last agreed: gather 'embed' (#1). Rank 0 read values of 'head' alone "
        "(train.py:12 log < train.py:40 main).",
        "  Fix: read them on every rank; every rank must send its part.",
    ]
    did = "read values of 'head' alone (train.py:12 log < train.py:40 main)"
    assert (diagnosis.cause, diagnosis.did) == ((0,), did)


def meets(seen: RankStatus, label: str, seq: int, what: str, **known) -> RankStatus:
    """A rank that is blocked in a call of another sequence than the one that is asked for."""
    return replace(seen, wait=Wait(label, seq, what), **known)


def test_ranks_that_wait_for_each_other_in_two_sequences_end_the_run():
    saves = meets(status(0, gathers("embed"), waits=False), CONTROL, 3, "exchange 'planning it'")
    diagnosis = judged(saves, status(1, gathers("embed", "layers.0"), phase="forward"))
    assert (diagnosis.kind, diagnosis.fatal, diagnosis.ranks) == ("RankDivergence", True, (0, 1))
    assert diagnosis.text.splitlines()[1:] == [
        "  rank 0: waiting in exchange 'planning it'",
        "  rank 1: waiting in gather 'layers.0' (#2) in forward",
        "  Neither can continue: rank 1 did not make that call.",
        "  Fix: make that call on every rank, not on one alone; every rank must send its part.",
    ]


@pytest.mark.parametrize("odd", [0, 2])
def test_of_three_ranks_the_one_that_is_elsewhere_is_named(odd):
    """It may be the only one that saves, or the only one that does not."""

    def seen(rank: int) -> RankStatus:
        if (rank == odd) == (odd == 0):
            saver = status(rank, gathers("embed"), waits=False)
            return meets(saver, CONTROL, 3, "exchange 'planning it'")
        return status(rank, gathers("embed", "layers.0"), phase="forward")

    assert judged(*map(seen, range(3))).ranks == (odd,)


def test_a_rank_that_waits_in_a_call_that_is_over_here_may_still_come():
    """The ranks do not wait for each other: rank 0 has done its part of the call that rank 1 waits in."""
    saves = meets(status(0, gathers("embed"), waits=False), CONTROL, 3, "exchange 'planning it'")
    diagnosis = judged(saves, status(1, gathers("embed")))
    assert not diagnosis.fatal


def test_who_waits_for_a_late_rank_is_not_late_and_ends_nothing():
    """Rank 0 waits for rank 1, which waits for rank 2, which works."""
    diagnosis = judged(
        status(0, gathers("a", "b"), reached={"forum": 1}),
        meets(status(1, gathers("a"), waits=False), "forum", 1, "exchange 'finishing the save'"),
        status(2, gathers("a"), waits=False, reached={"forum": 0}, stack="train.py:7 main"),
    )
    assert (diagnosis.kind, diagnosis.fatal, diagnosis.ranks) == ("RankLate", False, (2,))


def test_a_rank_that_went_on_after_an_error_of_its_own_is_named_with_it():
    error = "ValueError: a bad sample in forward"
    late = judged(
        status(0, gathers("a", "b")),
        status(1, gathers("a"), waits=False, failed=error, stack="train.py:7 main"),
    )
    assert (late.kind, late.fatal, late.ranks) == ("RankLate", False, (1,))
    assert f"  rank 1: outside collectives, train.py:7 main, after {error}\n" in late.text
    assert "Rank 1 went on after an error that the others did not have. Not ended" in late.text
    assert (late.cause, late.did) == ((), "")  # it does not end the run
    parted = judged(status(0, gathers("a", "b")), status(1, gathers("a", "a"), failed=error))
    assert (parted.cause, parted.did) == ((1,), f"went on after {error}")
    assert parted.kind == "RankDivergence"
    assert f"Rank 1 went on after {error}.\n  Fix: let such an error end" in parted.text


def test_a_broadcast_waits_for_its_source_alone():
    told = Wait("forum", 2, "meeting", source=0)
    diagnosis = diagnose(
        [
            RankStatus(rank=0, flight=None, stack="train.py:9 main"),
            RankStatus(rank=1, flight=None, wait=told, reached={"forum": 2}),
            RankStatus(rank=2, flight=None, wait=Wait("other", 1, "meeting"), reached={"forum": 1}),
        ],
        WatchdogSettings(),
        blocked_s=31.0,
        label="forum",
    )
    assert (diagnosis.kind, diagnosis.ranks) == ("RankLate", (0,))


@pytest.mark.parametrize(
    ("blocked_s", "fatal", "words"),
    [
        (31.0, False, "Not ended: rank 1 may still make that call; limit 120 s."),
        (119.0, True, "Neither can continue: rank 1 did not make that call."),
    ],
)
def test_a_call_of_the_programs_own_gets_more_time(blocked_s, fatal, words):
    barrier = meets(
        status(0, gathers("a"), waits=False), TORCH, 0, "torch.distributed.barrier",
        blocked_s=blocked_s, phase="save", stack="accelerator.py:9 save_state < train.py:8 main",
    )  # fmt: skip
    diagnosis = judged(barrier, status(1, gathers("a", "b"), blocked_s=blocked_s))
    assert (diagnosis.kind, diagnosis.fatal, diagnosis.ranks) == ("RankDivergence", fatal, (0, 1))
    assert (
        "  rank 0: waiting in torch.distributed.barrier in save "
        "(accelerator.py:9 save_state < train.py:8 main)"
    ) in diagnosis.text
    assert f"\n  {words}\n" in diagnosis.text


def test_a_rank_that_has_not_come_yet_is_named_as_such():
    here = Wait("set-up", 1, "initialize")
    diagnosis = diagnose(
        [
            RankStatus(rank=0, flight=None, wait=here, phase="initialize", stack="train.py:3 main"),
            RankStatus(
                rank=1, flight=None, fate="absent", detail="has not come yet", answered=False
            ),
        ],
        WatchdogSettings(sections={"setup": 20.0}),
        blocked_s=31.0,
        label="set-up",
    )
    assert (diagnosis.kind, diagnosis.fatal, diagnosis.ranks) == ("RankLate", True, (1,))
    assert diagnosis.text.splitlines() == [
        "RankLate after 31 s (1 of 2 ranks answered)",
        "  rank 0: waiting in initialize (train.py:3 main)",
        "  rank 1: has not come yet",
        "  No other call so far: rank 1 is slow, or will not make this call. Fix: make this call "
        "on every rank, or allow more than 20 s (trust.sections.setup).",
    ]
    did = "was late, and the others gave up: has not come yet"
    assert (diagnosis.cause, diagnosis.did) == ((1,), did)


def test_a_rank_outside_collectives_is_late_and_the_run_goes_on():
    diagnosis = judged(
        status(0, gathers("a", "b")),
        status(1, gathers("a"), waits=False, stack="loader.py:41 __next__ < queue.py:171 get"),
        blocked_s=40,
    )
    assert (diagnosis.kind, diagnosis.fatal, diagnosis.ranks) == ("RankLate", False, (1,))
    assert "  rank 1: outside collectives, loader.py:41 __next__" in diagnosis.text
    assert "Not ended; limit 1800 s (trust.collective_timeout_s)." in diagnosis.text


@pytest.mark.parametrize(("blocked_s", "fatal"), [(99.0, False), (101.0, True)])
def test_a_section_has_its_own_limit(blocked_s, fatal):
    saving = status(1, gathers("a"), waits=False)
    saving = replace(saving, flight=saving.flight._replace(section="save"))
    limits = WatchdogSettings(sections={"save": 100.0})
    diagnosis = judged(status(0, gathers("a", "b")), saving, blocked_s=blocked_s, limits=limits)
    assert (diagnosis.kind, diagnosis.fatal) == ("RankLate", fatal)


@pytest.mark.parametrize(("blocked_s", "fatal"), [(50.0, False), (55.0, True)])
def test_a_frozen_rank_ends_the_run_within_its_limit(blocked_s, fatal):
    diagnosis = judged(
        status(0, gathers("a", "b")),
        status(1, gathers("a"), fate="stopped", detail="process 7 is stopped", answered=False),
        blocked_s=blocked_s,
    )
    assert (diagnosis.kind, diagnosis.fatal) == ("RankFrozen", fatal)


def test_when_all_wait_in_one_collective_the_transport_is_named():
    diagnosis = judged(*(status(r, gathers("a", "b")) for r in range(3)), blocked_s=130)
    assert (diagnosis.kind, diagnosis.fatal) == ("TransportStuck", True)
    assert "  ranks 0-2: waiting in gather 'b' (#2)" in diagnosis.text


RANKS = st.tuples(
    st.lists(CALLS, max_size=8),
    st.booleans(),
    st.sampled_from(["runs", "gone", "left", "stopped", "silent"]),
    st.text(st.characters(exclude_categories=["C", "Z"]), max_size=300),
)


@given(st.lists(RANKS, min_size=2, max_size=9))
@settings(deadline=None, max_examples=100)
def test_every_verdict_has_at_most_five_lines_of_200_columns(ranks):
    statuses = [
        status(rank, calls, waits=waits, fate=fate, stack=stack)
        for rank, (calls, waits, fate, stack) in enumerate(ranks)
    ]
    lines = judged(*statuses).text.split("\n")
    assert len(lines) <= 5
    assert max(map(len, lines)) <= 200


def test_4096_ranks_are_judged_in_a_second():
    calls = gathers(*[f"layers.{i}" for i in range(32)])
    statuses = [status(0, calls), status(1, [*calls[:-2], *calls[-1:], *calls[-2:-1]])]
    many = [replace(statuses[r in (17, 2000)], rank=r) for r in range(4096)]
    begun_s = time.process_time()
    diagnosis = judged(*many)
    assert time.process_time() - begun_s < 1.0
    assert diagnosis.ranks == (17, 2000)
    assert "ranks 17,2000: called gather 'layers.31' (#31)" in diagnosis.text


def test_many_scattered_ranks_are_counted_instead_of_listed():
    assert rank_ranges(range(0, 4096, 2)).endswith("... (2048 in all)")
    assert len(rank_ranges(range(0, 4096, 2))) < 100


def test_a_broadcast_names_its_source():
    assert call_text(Record(3, "broadcast from 2", "embed", 4, "int8")) == (
        "broadcast from 2 'embed' (#3)"
    )


# -- the clock -------------------------------------------------------------------------------------


def test_the_stall_clock_runs_only_inside_one_wait():
    clock = StallClock(first_s=5.0)
    assert not clock.observe(0.0, 1)
    assert not clock.observe(4.0, 1)
    assert not clock.observe(8.0, 2)  # another collective: the ranks do get on
    assert not clock.observe(9.0, None)
    assert not clock.observe(20.0, None)
    assert clock.blocked_s == 0.0


def test_rounds_come_early_and_grow_rarer():
    clock = StallClock(first_s=5.0)
    due = [t for t in range(300) if clock.observe(float(t), "wait")]
    assert due[:4] == [5, 10, 15, 20]
    assert max(b - a for a, b in pairwise(due)) <= 16
    assert len(due) < 40


@pytest.mark.parametrize("size", [2, 64, 4096])
@pytest.mark.parametrize(("first_s", "stopped"), [(5.0, False), (5.0, True), (3.0, True)])
def test_a_frozen_rank_is_judged_within_its_limit(size, first_s, stopped):
    """A round begins at a tick. It lasts ``answer_s`` if the rank is silent, not if it is seen to be
    stopped."""
    limits = WatchdogSettings()
    for late in range(20):  # the look at which the wait began
        clock = StallClock(first_s, limits.judge_frozen_s(size), limits.answer_s(size))
        now_s = judged_s = late / 20
        while judged_s < limits.frozen_verdict_s:
            if clock.observe(now_s, "wait"):
                now_s += 0.1 if stopped else limits.answer_s(size)
                judged_s = now_s - late / 20
            now_s += limits.tick_s
            assert now_s < 200
        assert judged_s <= limits.frozen_verdict_s + 3


def test_no_other_user_reads_a_recording(tmp_path):
    recorder = Recorder(recording=tmp_path / "zeroshard-a" / "0")
    stack = StackFile(tmp_path / "zeroshard-a")
    files = [*(tmp_path / "zeroshard-a").iterdir()]
    assert len(files) == 2
    for path in (tmp_path / "zeroshard-a", *files):
        assert not path.stat().st_mode & 0o077, path
    stack.close()
    recorder.close()
