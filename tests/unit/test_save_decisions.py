"""What rank 0 decides in a save, from reports alone: no file, no rank, no tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroshard.checkpoint.save_decisions import (
    Options,
    RankFacts,
    Reservation,
    check_room,
    decide,
    leaders,
)
from zeroshard.errors import CheckpointError

FACTS = RankFacts(root="/run", tag="a", nonce="00000000", digests={}, buffers={})
FROZEN = {"w": "F32"}
LARGEST = 2**64 - 1


def frozen(part: int, *, here: str = "", state: str = "") -> RankFacts:
    """A rank with a part of the digest of ``w``. ``here``: a directory of frozen weights it sees."""
    names = [here] if here else []
    return replace(
        FACTS,
        digests={"w": part},
        frozen_dtypes=FROZEN,
        frozen_here=names,
        frozen_state={here: state} if state else {},
    )


NAME = decide([frozen(1), frozen(2)], Options()).frozen_name  # of weights with digest 3


# -- tag, directory, nonce -------------------------------------------------------------------------


def test_the_tag_and_the_nonce_are_rank_0s():
    facts = [replace(FACTS, nonce="0123abcd"), replace(FACTS, nonce="ffffffff")]
    decision = decide(facts, Options())
    assert (decision.tag, decision.nonce, decision.warnings) == ("a", "0123abcd", [])


@pytest.mark.parametrize("validation", ["warn", "ignore"])
def test_other_tags_are_a_warning_or_nothing(validation):
    facts = [FACTS, replace(FACTS, tag="b"), FACTS]
    decision = decide(facts, Options(tag_validation=validation))
    assert decision.tag == "a"
    warned = ["ranks save under different tags (a, b): rank 0's is used"]
    assert decision.warnings == (warned if validation == "warn" else [])


def test_other_tags_are_refused_if_the_options_say_so():
    facts = [FACTS, replace(FACTS, tag="b")]
    with pytest.raises(CheckpointError, match="'a' on rank 0, 'b' on rank 1"):
        decide(facts, Options(tag_validation="fail"))


def test_other_directories_are_a_warning_that_lists_three():
    facts = [replace(FACTS, root=f"/disk{at}") for at in range(5)]
    (warning,) = decide(facts, Options()).warnings
    assert "(/disk0, /disk1, /disk2, ...)" in warning


# -- buffers ---------------------------------------------------------------------------------------


def test_a_buffer_is_saved_by_each_rank_only_if_one_differs():
    first = replace(FACTS, buffers={"same": 1, "other": 2, "lacking": 3})
    second = replace(FACTS, buffers={"same": 1, "other": 5})
    assert decide([first, first, second], Options()).own_buffers == ["other"]
    assert decide([first, first], Options()).own_buffers == []


def test_a_buffer_that_rank_0_lacks_is_written_by_the_first_rank_that_has_it():
    stages = [{"first": 1}, {"first": 1}, {"last": 2, "odd": 3}, {"last": 2, "odd": 4}]
    decision = decide([replace(FACTS, buffers=buffers) for buffers in stages], Options())
    assert (decision.own_buffers, decision.buffer_writers) == (["odd"], {"last": 2})


# -- frozen weights --------------------------------------------------------------------------------


def test_digests_are_sums_over_the_ranks():
    empty = replace(frozen(2), frozen_dtypes={"empty": "BF16"})
    decision = decide([frozen(LARGEST), empty], Options())
    assert decision.digests["w"].sum == f"{1:016x}"  # modulo 2**64
    assert (decision.digests["empty"].sum, decision.digests["empty"].dtype) == ("0" * 16, "BF16")


def test_the_name_of_frozen_weights_is_that_of_their_values_and_dtypes():
    one = decide([frozen(1), frozen(2)], Options()).frozen_name
    other_cut = decide([frozen(3)], Options()).frozen_name
    other_values = decide([frozen(4)], Options()).frozen_name
    bf16 = replace(frozen(3), frozen_dtypes={"w": "BF16"})
    other_dtype = decide([bf16], Options()).frozen_name
    assert one == other_cut
    assert len({one, other_values, other_dtype}) == 3


@pytest.mark.parametrize(
    ("option", "plan"), [("always", "here"), ("once", "write"), ("reference", "none")]
)
def test_frozen_weights_that_are_in_no_directory(option, plan):
    assert decide([frozen(3)], Options(frozen=option)).frozen == plan


@pytest.mark.parametrize("option", ["always", "once", "reference"])
def test_a_model_without_frozen_weights_stores_none(option):
    assert decide([FACTS], Options(frozen=option)).frozen == "none"


@pytest.mark.parametrize(
    ("state", "plan"), [("complete", "reuse"), ("needed", "here"), ("unused", "write")]
)
def test_frozen_weights_that_every_rank_sees(state, plan):
    facts = [frozen(1, here=NAME, state=state), frozen(2, here=NAME)]
    assert decide(facts, Options()).frozen == plan


def test_frozen_weights_that_one_node_lacks_are_written_into_the_checkpoint():
    facts = [frozen(1, here=NAME, state="complete"), frozen(2)]
    assert decide(facts, Options()).frozen == "here"
    assert decide(facts[::-1], Options()).frozen == "here"


def test_frozen_weights_with_other_values_do_not_matter():
    facts = [frozen(1, here="frozen-0123456789abcdef", state="complete")]
    assert decide(facts, Options()).frozen == "write"


@pytest.mark.parametrize("option", ["always", "reference"])
def test_frozen_weights_are_not_looked_for_if_the_options_say_what_to_do(option):
    facts = [frozen(3, here=NAME, state="complete")]
    assert decide(facts, Options(frozen=option)).frozen in ("here", "none")


# -- who leads, and whether there is room ----------------------------------------------------------


@pytest.mark.parametrize(
    ("sees", "expected"),
    [
        ([[0]], [0]),
        ([[0, 1], [0, 1]], [0, 0]),
        ([[0], [0, 1]], [0, 0]),  # rank 1 came later: it alone sees the other
        ([[0, 1], [1]], [0, 0]),  # rank 0 came later
        ([[0], [1]], [0, 1]),
        ([[0], [1], [0, 2], [1, 3]], [0, 1, 0, 1]),
        ([[0], [1, 2], [2, 3], [3]], [0, 1, 1, 1]),
        ([[0, 3], [1, 2], [2], [2, 3]], [0, 0, 0, 0]),
        ([[0], [1], [2], [3, 2, 1, 0]], [0, 0, 0, 0]),
    ],
)
def test_the_leader_is_the_lowest_rank_that_shares_the_directory(sees, expected):
    assert leaders(sees) == expected


def reservation(nbytes: int, free: int, *sees: int, failed: str = "", root: str = "/run"):
    return Reservation(root, nbytes, free, sees, failed)


def test_ranks_of_one_directory_need_room_together():
    parts = [reservation(60, 100, 0), reservation(50, 40, 0, 1)]
    with pytest.raises(CheckpointError, match=r"rank 0: /run has 100 bytes free, .* needs 110"):
        check_room(parts)
    assert check_room([parts[0], reservation(40, 40, 0, 1)]) == [0, 0]


def test_what_others_have_reserved_is_not_taken_for_missing_room():
    """Rank 1 was first: rank 0 sees the space without rank 1's part."""
    assert check_room([reservation(50, 50, 0, 1), reservation(50, 100, 1)]) == [0, 0]


def test_ranks_on_separate_disks_need_room_apart():
    parts = [reservation(60, 100, 0), reservation(60, 100, 1)]
    assert check_room(parts) == [0, 1]
    with pytest.raises(CheckpointError, match=r"^rank 1: /b has 5 bytes free"):
        check_room([parts[0], reservation(60, 5, 1, root="/b")])


def test_a_reservation_that_failed_is_told_as_it_was_unless_the_numbers_explain_it():
    failed = reservation(50, 100, 0, 1, failed="x.safetensors: Disk quota exceeded.")
    with pytest.raises(CheckpointError, match=r"^rank 1: x\.safetensors: Disk quota exceeded"):
        check_room([reservation(50, 100, 0), failed])
    with pytest.raises(CheckpointError, match="has 90 bytes free, and this checkpoint needs 100"):
        check_room([reservation(50, 90, 0), replace(failed, free_nbytes=40)])
