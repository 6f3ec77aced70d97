"""Exit reports of ranks: which exit was the cause, and what it means."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict

import pytest

from zeroshard.errors import RankLate
from zeroshard.memory.host_limits import OomCounters
from zeroshard.run.exit_report import (
    BLAME_VARIABLE,
    Blame,
    KernelCounters,
    RankExit,
    build_report,
    explain_exit,
    last_trace,
    read_blame,
    starts_trace,
    tell_launcher,
    trace_of_error_file,
)
from zeroshard.watchdog.diagnosis import Diagnosis, diagnosis_of_values

GIB = 1 << 30
NOTHING = KernelCounters(OomCounters(0, 0))
BOOM = """\
step 1
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     main()
[rank1]: ValueError: boom
[rank1]: second line
"""
LOST = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 9, in <module>
[rank0]: RuntimeError: [pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer.
"""
GLOO = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 4000 vs 2000. \n"
    "Fatal Python error: Aborted\n\n"
    'Thread 0x00007f (most recent call first):\n  File "train.py", line 5 in <module>\n\n'
    "Extension modules: numpy (total: 1)\n"
)


def words(exitcode, stderr="", *, kernel=NOTHING, **fields) -> str:
    return explain_exit(RankExit(0, exitcode, 0.0, stderr=stderr, **fields), kernel).what


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (
            KernelCounters(OomCounters(1, 1), 240 * GIB),
            "was killed by the kernel OOM killer "
            "(in this cgroup: oom_kill +1, limit 240.0 GiB, RSS 251.0 GiB when last seen)",
        ),
        (
            KernelCounters(OomCounters(0, 2), 240 * GIB),
            "was killed by the kernel OOM killer (host out of memory, no cgroup limit hit: "
            "oom_kill +2, RSS 251.0 GiB when last seen)",
        ),
        (
            NOTHING,
            "got SIGKILL from outside (scheduler or user); no OOM kill was counted, "
            "RSS 251.0 GiB when last seen",
        ),
        (
            KernelCounters(OomCounters(None, None)),
            "got SIGKILL; this system does not count OOM kills, so the sender is unknown, "
            "RSS 251.0 GiB when last seen",
        ),
    ],
)
def test_a_kill_is_blamed_on_what_was_counted(kernel, text):
    assert words(-9, kernel=kernel, peak_rss_nbytes=251 * GIB) == text


@pytest.mark.parametrize(
    ("exitcode", "stderr", "text"),
    [
        (
            -6,
            GLOO,
            "aborted in gloo: it received 4000 bytes where 2000 were expected. "
            "The ranks called different collectives",
        ),
        (-6, "", "aborted (SIGABRT): a C++ check failed; its text is below"),
        (
            -7,
            "",
            "got SIGBUS: most likely /dev/shm (64 MiB) is full; "
            "docker run --shm-size=8g makes it larger",
        ),
        (-11, "", "died of a segmentation fault (SIGSEGV)"),
        (-15, "", "was ended by SIGTERM, sent from outside"),
        (-64, "", "was ended by SIGRTMAX, sent from outside"),
        (1, BOOM, "raised ValueError: boom (exit code 1)"),
        (1, LOST, "lost its peers: Connection reset by peer (exit code 1)"),
        (1, "usage: x\n", "exited with code 1 and left no traceback"),
        (3, BOOM, "exited with code 3; its last traceback was ValueError: boom"),
        (75, "", "was stopped by ZeroShard's watchdog (exit code 75)"),
        (76, BOOM, "lost its peers (exit code 76): ValueError: boom"),
    ],
)
def test_exit_codes_are_decoded(exitcode, stderr, text):
    assert words(exitcode, stderr, kernel=KernelCounters(OomCounters(0, 0), None, 64 << 20)) == text


def test_a_program_that_counts_on_a_gpu_is_told_which_flag_it_needs():
    text = "ValueError: Your setup doesn't support bf16/gpu. You need to assign use_cpu ..."
    assert words(1, BOOM.replace("ValueError: boom", text)).endswith(
        "start it with `--use_cpu true`"
    )


def test_a_rank_that_the_launcher_stopped_is_not_decoded():
    assert words(-15, stopped=True) == "was stopped by the launcher"


def trace_from(file: str, error: str, source: str = "call()") -> str:
    return (
        "Traceback (most recent call last):\n"
        f'  File "train.py", line 3, in <module>\n    main()\n'
        f'  File "{file}", line 7, in call\n    {source}\n{error}\n'
    )


SITE = "/venv/lib/python3.12/site-packages"
LINK = "\nThe above exception was the direct cause of the following exception:\n\n"
REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.1]:1"


@pytest.mark.parametrize(
    ("trace", "lost"),
    [
        (trace_from("train.py", REFUSED), False),
        (trace_from("/usr/lib/python3.12/socket.py", REFUSED), False),
        (trace_from("train.py", "ValueError: bad", "raise ConnectionResetError('Broken pipe')"), False),
        (trace_from(f"{SITE}/zeroshard/comm/p2p.py", REFUSED), True),
        (trace_from(f"{SITE}/torch/distributed/rendezvous.py", REFUSED), True),
        (trace_from(f"{SITE}/torch/autograd/graph.py", PEER), True),
        (trace_from("train.py", PEER) + LINK + trace_from("train.py", "MyError: step failed"), True),
        (trace_from("train.py", REFUSED) + LINK + trace_from("train.py", "MyError: no data"), False),
    ],
    ids=["the program's", "its library's", "in the source", "ours", "torch's", "gloo's",
         "gloo's, wrapped", "the program's, wrapped"],
)  # fmt: skip
def test_a_program_has_connections_of_its_own(trace, lost):
    assert words(1, stderr=trace).startswith("lost its peers" if lost else "raised")


def test_the_cause_comes_first_although_the_consequence_was_earlier():
    report = build_report(
        [RankExit(0, 1, 1.0, stderr=LOST), RankExit(1, 1, 1.2, stderr=BOOM)], NOTHING
    )
    assert report.lines == (
        "rank 1 raised ValueError: boom (exit code 1).",
        "then rank 0 lost its peers: Connection reset by peer (exit code 1).",
    )


def test_of_two_causes_the_earlier_one_comes_first():
    report = build_report([RankExit(0, 3, 2.0), RankExit(2, -11, 1.0)], NOTHING)
    assert (report.root, report.exitcode) == (2, 128 + 11)
    assert report.lines[0].startswith("rank 2 died of a segmentation fault")


def test_the_trace_of_the_cause_is_shown_without_rank_prefixes():
    report = build_report(
        [RankExit(0, 1, 1.0, stderr=LOST), RankExit(1, 1, 1.2, stderr=BOOM)], NOTHING
    )
    assert report.trace.splitlines()[0] == "Traceback (most recent call last):"
    assert report.trace.splitlines()[-2:] == ["ValueError: boom", "second line"]


def test_consequences_in_the_same_words_share_a_line():
    deaths = [RankExit(r, 1, 2.0, stderr=LOST) for r in (0, 1, 2, 5)]
    report = build_report([*deaths, RankExit(3, -9, 1.0)], NOTHING)
    assert report.lines[1:] == (
        "then ranks 0-2, 5 lost its peers: Connection reset by peer (exit code 1).",
    )


def test_causes_in_other_words_each_have_a_line():
    report = build_report([RankExit(0, -11, 1.0), RankExit(1, 1, 1.1, stderr=BOOM)], NOTHING)
    assert report.lines == (
        "rank 0 died of a segmentation fault (SIGSEGV).",
        "rank 1 raised ValueError: boom (exit code 1).",
    )


@pytest.mark.parametrize(("exitcode", "expected"), [(3, 3), (-9, 137), (-6, 134)])
def test_the_launcher_ends_with_the_code_of_the_cause(exitcode, expected):
    deaths = [RankExit(0, 76, 1.0), RankExit(1, exitcode, 1.5)]
    assert build_report(deaths, NOTHING).exitcode == expected


def test_a_clean_run_has_nothing_to_report():
    report = build_report([RankExit(0, 0, 1.0), RankExit(1, 0, 1.0)], NOTHING)
    assert (report.lines, report.exitcode) == ((), 0)


RANK_LOST = "Traceback (most recent call last):\nzeroshard.errors.RankLost: RankLost at step 3"


@pytest.mark.parametrize(
    ("code", "stderr", "what"),
    [
        (76, "", "lost its peers (exit code 76)"),
        (1, RANK_LOST, "lost its peers: RankLost (exit code 1)"),
        (75, RANK_LOST, "was stopped by ZeroShard's watchdog (exit code 75): zeroshard.errors.RankLost: "
         "RankLost at step 3"),
    ],
)  # fmt: skip
def test_a_rank_that_left_early_with_code_0_is_named_first(code, stderr, what):
    report = build_report([RankExit(1, 0, 1.0), RankExit(0, code, 2.0, stderr=stderr)], NOTHING)
    assert report.lines == (
        "rank 1 ended with exit code 0 while others still waited for it.",
        f"then rank 0 {what}.",
    )
    assert (report.exitcode, report.root, report.consequence) == (code, 1, False)


@pytest.mark.parametrize("left", ["closed its engine", "ended its program"])
def test_a_rank_whose_process_ends_later_left_early_if_the_traceback_says_so(left):
    said = f"{RANK_LOST}\n  rank 1 (node1): {left}; its last call was gather 'a' (#3)"
    report = build_report([RankExit(0, 1, 2.0, stderr=said), RankExit(1, 0, 3.0)], NOTHING)
    assert report.lines[0] == "rank 1 ended with exit code 0 while others still waited for it."


def test_a_rank_that_the_watchdog_stopped_for_a_lost_one_follows_it():
    told = Blame("RankLost")
    deaths = [RankExit(0, 75, 1.0, stderr=RANK_LOST, blame=told), RankExit(1, 3, 1.5)]
    assert build_report(deaths, NOTHING).lines[0].startswith("rank 1 exited with code 3")


def test_an_interrupted_run_is_one_line():
    deaths = [RankExit(0, -2, 1.0, stopped=True), RankExit(1, 1, 1.0, stopped=True)]
    report = build_report(deaths, NOTHING, interrupted=signal.SIGINT)
    assert (report.lines, report.exitcode) == (("stopped by SIGINT; ranks 0-1 ended.",), 130)


def test_a_headline_that_introduces_a_list_has_its_first_line():
    problem = "1 problem in the configuration:\n  zero_optimization.stage: 4 is no stage"
    stderr = BOOM.replace("ValueError: boom", f"zeroshard.errors.ConfigError: {problem}")
    assert stderr != BOOM
    trace = last_trace(stderr)
    assert trace is not None
    assert trace.headline == "zeroshard.errors.ConfigError: " + " ".join(problem.split())


def test_a_chain_of_causes_is_one_trace_with_the_last_exception_as_headline():
    stderr = (
        "Traceback (most recent call last):\n  a\nKeyError: 'x'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  b\nZeroDivisionError: division by zero\n"
    )
    trace = last_trace(stderr)
    assert trace is not None
    assert trace.headline == "ZeroDivisionError: division by zero"
    assert trace.text.startswith("Traceback (most recent call last):\n  a\n")


def test_a_logged_traceback_is_not_the_fatal_one():
    logged = "Traceback (most recent call last):\n  a\nOSError: retried\ngoing on\n"
    trace = last_trace(logged + BOOM)
    assert trace is not None
    assert "OSError" not in trace.text


def test_what_is_printed_after_the_exception_is_left_out():
    trace = last_trace(BOOM + "[rank1]:[W1120 ProcessGroup.cpp] destroy_process_group\n")
    assert trace is not None
    assert trace.text.endswith("second line")


def test_a_late_ignored_exception_is_not_the_cause():
    late = "Exception ignored in: <f>\nTraceback (most recent call last):\n  z\nOSError: late\n"
    trace = last_trace(BOOM + late)
    assert trace is not None
    assert trace.headline == "ValueError: boom"


def test_an_abort_and_its_python_stack_are_one_trace():
    trace = last_trace(GLOO)
    assert trace is not None
    assert "op.preamble" in trace.text
    assert trace.text.endswith('File "train.py", line 5 in <module>')


def test_a_long_trace_keeps_both_ends():
    frames = "".join(f"  frame {i}\n" for i in range(500))
    trace = last_trace(f"Traceback (most recent call last):\n{frames}RecursionError: deep\n")
    assert trace is not None
    lines = trace.text.splitlines()
    assert (len(lines), lines[1], lines[-1]) == (60, "  frame 0", "RecursionError: deep")


def test_the_error_file_of_torch_elastic_is_read():
    content = json.dumps({"message": {"message": "x", "extraInfo": {"py_callstack": BOOM}}})
    trace = trace_of_error_file(content)
    assert trace is not None
    assert trace.headline == "ValueError: boom"


UNPARSED = '  File "train.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'


def test_a_script_that_cannot_be_parsed_has_a_trace_without_a_head():
    trace = last_trace("a warning\n" + UNPARSED)
    assert trace is not None
    assert trace.headline == "SyntaxError: invalid syntax"
    assert trace.text.startswith('  File "train.py", line 1\n    def f(:')
    inner = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    import b\n'
    whole = last_trace(inner + UNPARSED)
    assert whole is not None
    assert whole.text.startswith(inner)
    assert whole.headline == "SyntaxError: invalid syntax"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, '{"message": 3}', '{"message": {}}']
)
def test_a_broken_error_file_is_no_trace(content):
    assert trace_of_error_file(content) is None


@pytest.mark.parametrize(
    ("line", "opens"),
    [
        ("Traceback (most recent call last):\n", True),
        ("[rank12]: Traceback (most recent call last):\n", True),
        ("Fatal Python error: Segmentation fault\n", True),
        ('  File "train.py", line 1\n', True),
        ('  File "train.py", line 1, in <module>\n', False),
        ("loss 2.5\n", False),
        ("see Traceback (most recent call last): above\n", False),
    ],
)
def test_lines_that_open_a_trace(line, opens):
    assert starts_trace(line) is opens


FROZEN = "Traceback (most recent call last):\nzeroshard.errors.RankFrozen: rank 1 stands still"


def test_a_frozen_rank_is_the_cause_and_not_the_rank_that_noticed_it():
    deaths = [RankExit(0, 1, 1.0, stderr=FROZEN), RankExit(1, -9, 1.1, frozen=True)]
    report = build_report(deaths, NOTHING)
    assert (report.root, report.exitcode, report.trace) == (1, 137, "")
    assert report.lines[0].startswith("rank 1 was stopped by a signal (SIGSTOP)")
    assert report.lines[1].startswith("then rank 0 gave up on a frozen rank")


def test_an_error_before_is_the_cause_although_another_rank_is_frozen():
    error = "Traceback (most recent call last):\nValueError: boom"
    deaths = [RankExit(0, 1, 1.0, stderr=error), RankExit(1, -9, 1.1, frozen=True)]
    assert build_report(deaths, NOTHING).root == 0


def diagnosis(kind: str, *lines: str, printed: bool = False) -> str:
    title = f"{kind} at step 2 after 4 s (2 of 2 ranks answered; details: /tmp/hang-2-7.json)\n"
    raised = "" if printed else f"Traceback (most recent call last):\nzeroshard.errors.{kind}: "
    return raised + title + "".join(f"  {line}\n" for line in lines)


LATE = (
    "rank 0: waiting in gather 'head' (#9) in forward (train.py:9 main)",
    "rank 1: outside collectives, train.py:7 read_batch < train.py:9 main",
    "No other call so far: rank 1 is slow, or will not make this call. Fix: make it on every rank.",
)


WAS_LATE = Blame(
    "RankLate",
    (1,),
    "was late, and the others gave up: outside collectives, train.py:7 read_batch < train.py:9 main",
)


def test_the_rank_that_was_late_is_the_cause_and_not_those_that_gave_up():
    deaths = [
        RankExit(0, 1, 1.0, stderr=diagnosis("RankLate", *LATE), blame=WAS_LATE),
        RankExit(1, 75, 3.0, stderr=diagnosis("RankLate", *LATE, printed=True), blame=WAS_LATE),
    ]
    report = build_report(deaths, NOTHING)
    assert (report.root, report.exitcode, report.consequence) == (1, 75, False)
    assert report.lines == (
        "rank 1 was late, and the others gave up: outside collectives, train.py:7 read_batch < "
        "train.py:9 main (exit code 75).",
        "then rank 0 gave up: zeroshard.errors.RankLate: RankLate at step 2 after 4 s (2 of 2 ranks "
        "answered; details: /tmp/hang-2-7.json) (exit code 1).",
    )
    assert report.trace_rank == 0  # it has the diagnosis
    assert "rank 1: outside collectives" in report.trace


def test_a_rank_leaves_its_launcher_the_cause_that_the_diagnosis_names(tmp_path):
    diagnosis = Diagnosis("RankLate", True, (1, 2), "RankLate after 4 s", (1, 2), "were late")
    again = diagnosis_of_values(json.loads(json.dumps(asdict(diagnosis))))
    assert again == diagnosis
    tell_launcher(again.error(), {BLAME_VARIABLE: str(tmp_path / "blame-0.json")})
    assert read_blame(tmp_path / "blame-0.json") == Blame("RankLate", (1, 2), "were late")
    assert (tmp_path / "blame-0.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'["a", "b", "c"]', b"[1, 2, 3]"])
def test_a_damaged_file_of_a_rank_blames_nobody(tmp_path, content):
    (tmp_path / "blame-0.json").write_bytes(content)
    assert read_blame(tmp_path / "blame-0.json") is None
    assert read_blame(tmp_path / "none.json") is None


def test_without_a_launcher_or_a_disk_an_error_is_only_raised(tmp_path):
    tell_launcher(RankLate("late"), {})
    tell_launcher(RankLate("late"), {BLAME_VARIABLE: str(tmp_path / "gone" / "blame-0.json")})
    assert not [*tmp_path.iterdir()]


def test_a_late_rank_that_the_launcher_had_to_stop_is_the_cause_too():
    deaths = [
        RankExit(0, 1, 1.0, stderr=diagnosis("RankLate", *LATE), blame=WAS_LATE),
        RankExit(1, -15, 6.0, stopped=True),
    ]
    report = build_report(deaths, NOTHING)
    assert (report.root, report.exitcode) == (1, 1)
    assert report.lines[0].startswith("rank 1 was late, and the others gave up: outside")
    assert report.lines[0].endswith("(was stopped by the launcher).")


def test_the_rank_that_skipped_a_module_comes_first():
    text = diagnosis(
        "RankDivergence",
        "last agreed: gather 'a' (#1). Rank 1 skipped 'b' (train.py:5).",
        "Fix: no",
    )
    skipped = Blame("RankDivergence", (1,), "skipped 'b' (train.py:5)")
    deaths = [RankExit(rank, 1, 1.0, stderr=text, blame=skipped) for rank in (0, 1)]
    report = build_report(deaths, NOTHING)
    assert report.root == 1
    assert report.lines[0] == "rank 1 skipped 'b' (train.py:5) (exit code 1)."


def test_a_report_that_did_not_end_the_run_names_no_cause():
    early = diagnosis("RankLate", *LATE[:2], "No other call so far: rank 1 is slow, or will not make "
                      "this call. Not ended; limit 1800 s.", printed=True)  # fmt: skip
    report = build_report([RankExit(0, 75, 1.0, stderr=early)], NOTHING)
    assert report.lines == ("rank 0 was stopped by ZeroShard's watchdog (exit code 75).",)


def test_a_rank_that_the_watchdog_stopped_for_a_frozen_one_follows_it():
    text = diagnosis("RankFrozen", "rank 1 (node1): process 7 is stopped by a signal", printed=True)
    told = Blame("RankFrozen")
    deaths = [RankExit(0, 75, 1.0, stderr=text, blame=told), RankExit(1, -9, 1.1, frozen=True)]
    report = build_report(deaths, NOTHING)
    assert (report.root, report.exitcode) == (1, 137)
    assert report.lines[1].startswith("then rank 0 was stopped by ZeroShard's watchdog")
