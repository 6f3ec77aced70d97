"""Hostfiles and the filters on them."""

from __future__ import annotations

import pytest

from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import Host, parse_filter, parse_hostfile, select
from zeroshard.launch.rank_env import devices_of

HOSTS = (Host("a", (0, 1, 2, 3)), Host("b", (0, 1, 2, 3)), Host("c", (0, 1)))


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(LaunchError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_hostfile_keeps_order_and_skips_comments():
    text = "# cluster\n\nb slots=4   # fast\na  slots=2\n"
    assert parse_hostfile(text, "f") == (Host("b", (0, 1, 2, 3)), Host("a", (0, 1)))


def test_every_bad_line_of_a_hostfile_is_named_at_once():
    text = "a slots=4\nb 4\na slots=2\nc slots=0\n-oProxyCommand=x slots=1\n"
    assert refusal(parse_hostfile, text, "hosts.txt").splitlines() == [
        "hosts.txt:2: 'b 4' is not of the form 'host slots=N'.",
        "hosts.txt:3: host 'a' is already on line 1; write it once, with all its slots.",
        "hosts.txt:4: host 'c' has no slots; remove the line.",
        "hosts.txt:5: '-oProxyCommand=x slots=1' is not of the form 'host slots=N'.",
    ]


def test_empty_hostfile_is_refused():
    assert refusal(parse_hostfile, "# nothing\n", "f") == (
        "f contains no host; expected lines of the form 'host slots=N'."
    )


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("b", (Host("b", (0, 1, 2, 3)),)),
        ("b@a", (Host("a", (0, 1, 2, 3)), Host("b", (0, 1, 2, 3)))),
        ("a:2,0@c:1", (Host("a", (0, 2)), Host("c", (1,)))),
    ],
)
def test_include_keeps_what_it_names_in_the_order_of_the_hostfile(include, expected):
    assert select(HOSTS, include=include) == expected


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("b@c", (Host("a", (0, 1, 2, 3)),)),
        ("a:0,1@c:0,1", (Host("a", (2, 3)), Host("b", (0, 1, 2, 3)))),
    ],
)
def test_exclude_drops_what_it_names_and_hosts_without_slots(exclude, expected):
    assert select(HOSTS, exclude=exclude) == expected


def test_numbers_keep_the_first_hosts_and_slots():
    assert select(HOSTS, num_nodes=2, num_slots=3) == (Host("a", (0, 1, 2)), Host("b", (0, 1, 2)))


def test_devices_are_named_only_where_they_are_not_the_first_ones():
    assert [Host("a", slots).devices for slots in ((0, 1), (1, 2), (3,))] == [None, "1,2", "3"]


def test_slots_count_the_devices_that_are_visible_already():
    assert devices_of((0, 2), {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == "4,6"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"include": "a", "exclude": "b"},
            "--include and --exclude cannot be given together; keep one of them.",
        ),
        (
            {"include": "a", "num_slots": 2},
            "--include already says which slots are used; "
            "it cannot be given with --nproc/--num_gpus.",
        ),
        (
            {"exclude": "a", "num_nodes": 2},
            "--exclude already says which slots are used; it cannot be given with --num_nodes.",
        ),
        (
            {"include": "d"},
            "--include names host 'd', which is not among the hosts (a, b, c).",
        ),
        (
            {"exclude": "c:0,5"},
            "--exclude names slot 5 of host 'c', which has slots 0, 1.",
        ),
        ({"exclude": "a@b@c"}, "--exclude 'a@b@c' leaves no slot to run on."),
        ({"num_nodes": 4}, "--num_nodes 4: there are only 3 hosts (a, b, c)."),
        ({"num_nodes": 0}, "--num_nodes is 0; it must be at least 1."),
        ({"num_slots": 3}, "--nproc 3: host 'c' has only 2 slots."),
    ],
)
def test_wrong_selection_says_what_is_wrong(options, message):
    assert refusal(select, HOSTS, **options) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a:x",
            "--include 'a:x': 'a:x' is not of the form 'host' or 'host:0,1'; "
            "hosts are separated by '@'.",
        ),
        (
            "a@",
            "--include 'a@': '' is not of the form 'host' or 'host:0,1'; "
            "hosts are separated by '@'.",
        ),
        ("a:0@a:1", "--include 'a:0@a:1': host 'a' is named twice."),
        ("a:1,1", "--include 'a:1,1': a slot of host 'a' is named twice."),
    ],
)
def test_wrong_filter_says_what_is_wrong(text, message):
    assert refusal(parse_filter, text, "--include") == message
