"""The page of a run: what it shows, what it leaves out, and records that cannot be read."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.errors import UsageError
from zeroshard.report.figures import buckets, line_chart, thinned
from zeroshard.report.page import CHARTS, expected_volume, make_page
from zeroshard.report.record import read_record
from zeroshard.run.exit_report import ExitReport
from zeroshard.run.run_folder import keep_exit

SCRIPT = "<script>alert(1)</script>"
FIRST = {
    "kind": "run", "format": 1, "time_s": 1e9, "attempt": 0, "host": "node1", "rank": 0,
    "world_size": 2, "mesh": {"tensor": 1}, "versions": {"zeroshard": "0.1"}, "device": "cpu",
    "transport": "gloo", "dtypes": "fp32", "stage": 3, "accumulation": 2, "train_batch_size": 8,
    "model": "GPT", "parameters": 1000, "units": 2,
    "config": [["a.b", "1", "config"], ["c", "2", "default"]], "environment": {}, "notes": [],
}  # fmt: skip
MEMORY = [
    {"category": "parameters", "planned": 2**20, "measured": 2**21, "tier": "device"},
    {"category": "gathered", "planned": None, "measured": 2**22, "tier": "device"},
]
TRAFFIC = [
    {"group": "data", "op": "all_gather", "name": "u", "calls": 8, "sent_nbytes": 2**20,
     "waited_s": 0.5, "flight_s": 0.0, "flight_nbytes": 0, "payload_numel": 8000},
    {"group": "data", "op": "reduce_scatter", "name": "u", "calls": 4, "sent_nbytes": 2**20,
     "waited_s": 0.5, "flight_s": 0.0, "flight_nbytes": 0, "payload_numel": 4000},
]  # fmt: skip


def step(number: int, **values: float | None) -> dict:
    return {"kind": "step", "step": number, "samples": 8 * number, "time_s": 1e9 + number, **values}


def incident(number: int, text: str) -> dict:
    return {"kind": "incident", "step": number, "time_s": 1e9 + number, "text": text}


def end(number: int, reason: str = "") -> dict:
    return {"kind": "end", "step": number, "time_s": 1e9 + number, "reason": reason,
            "memory": MEMORY, "traffic": TRAFFIC}  # fmt: skip


def write(folder: Path, *lines: dict, first: dict = FIRST) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "steps-0-1-0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *lines)))
    return path


@pytest.fixture(autouse=True, scope="module")
def fonts_are_open(tmp_path_factory):
    """matplotlib keeps the files of its fonts open from their first use on."""
    folder = tmp_path_factory.mktemp("first")
    write(folder, step(1, grad_norm=1.0), step(9, grad_norm=1e6), end(1))
    make_page(folder)
    line_chart({"a": [(1, 1e-9), (100_000, 2e-9)]}, r"$\mathit{x} \times 10^9$", log=False)


def test_a_page_shows_curves_memory_traffic_and_the_configuration(tmp_path):
    write(tmp_path, step(1, train_loss=2.5), step(2, train_loss=None, skipped=1.0), end(2))
    page = make_page(tmp_path)
    assert page.count("<svg") == page.count("<details><summary>Table</summary>") == 3
    assert "1 values were not finite and are not drawn." in page
    assert "2, the last one is step 2; 1 skipped" in page
    assert re.search(r"<td>parameters</td><td>1\.00</td><td>2\.00</td>", page)
    assert re.search(r"<td>gathered</td><td>none</td><td>4\.00</td>", page)
    # 2 steps: 8000 elements gathered are 4 times 1000 parameters a step, as stage 3 with 2 needs
    assert re.search(r"<td>all_gather</td><td>4</td><td>4</td>", page)
    assert re.search(r"<td>reduce_scatter</td><td>2</td><td>2</td>", page)
    assert "4 (all elements, all_gather) + 2 (all elements, reduce_scatter)" in page
    assert re.search(r"<td>a\.b</td><td>1</td><td>config</td>", page)


def test_texts_of_the_user_are_not_code(tmp_path):
    first = {**FIRST, "model": SCRIPT, "config": [[SCRIPT, SCRIPT, "file " + SCRIPT]]}
    write(tmp_path, step(1, **{SCRIPT: 1.0}), incident(1, SCRIPT), end(1, SCRIPT), first=first)
    (tmp_path / "hang-1-1.json").write_text(json.dumps({"diagnosis": {"text": SCRIPT}}))
    page = make_page(tmp_path)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6


def test_a_page_asks_for_nothing(tmp_path):
    write(tmp_path, step(1, train_loss=2.5, grad_norm=1.0, grad_norm_clipped=0.5), end(1))
    page = make_page(tmp_path)
    loads = re.findall(
        r"<(?:img|link|iframe|object|embed|use)[^>]*?(?:src|href)\s*=\s*[\"']?([^\"'>]*)", page
    )
    assert all(address.startswith(("data:,", "#")) for address in loads)
    assert not re.findall(r"@import|url\((?!#)", page)
    names = re.findall(r"\bid=\"(\w+)\"", page)
    assert len(names) > 20
    drawn = [name for name in names if re.match(r"[mpC]\w{8,}", name)]  # of clips and markers
    assert len(drawn) == len(set(drawn))


def test_a_hundred_thousand_steps_are_two_megabytes_at_most(tmp_path):
    names = "train_loss grad_norm grad_norm_clipped lr samples_per_second step_time_ms"
    values = dict.fromkeys(names.split(), 0.0)
    numbers = range(1, 100_001)
    lines = (step(n, **{name: 1 + math.sin(n * n) for name in values}) for n in numbers)
    write(tmp_path, *lines, *(incident(n, "x" * 100) for n in range(1, 2001)), end(100_000))
    begin_s = time.process_time()
    page = make_page(tmp_path)
    assert len(page.encode()) < 2_000_000
    assert time.process_time() - begin_s < 60  # 5 s where nothing else runs
    assert "The oldest and the newest 300 are shown." in page


def test_a_page_of_sixty_engines_is_two_megabytes_at_most(tmp_path):
    names = [name for chart in CHARTS for name in chart.names]
    for number in range(60):
        lines = [step(1, train_loss=number + 0.25), end(1, SCRIPT + "x" * 1000)]
        if number >= 50:
            lines = [
                *(step(n, **{name: 2 + math.sin(n * n) for name in names}) for n in range(1, 2001)),
                *(incident(n, "x" * 100) for n in range(1, 401)), end(2000),
            ]  # fmt: skip
        first = {**FIRST, "model": f"Net{number}", "time_s": 1e9 + number}
        write(tmp_path, *lines, first=first).rename(tmp_path / f"steps-0-2-{number}.jsonl")
    begin_s = time.process_time()
    page = make_page(tmp_path)
    assert len(page.encode()) < 2_000_000
    assert time.process_time() - begin_s < 20  # 6 s where nothing else runs
    assert re.findall(r"<h2>(Net\d+)</h2>", page) == [f"Net{n}" for n in range(55, 60)]
    assert "60 engines were recorded. The newest 5 are shown in full" in page
    assert re.findall(r"<td>steps-0-2-\d+.jsonl</td><td>(Net\d+)", page) == [
        f"Net{n}" for n in range(55)
    ]
    assert "<td>7.25</td>" in page and "<script" not in page and "x" * 200 not in page
    assert "The oldest and the newest 60 are shown." in page


def test_a_page_of_few_engines_shows_all_of_them(tmp_path):
    for number in range(5):
        path = write(tmp_path, step(1, train_loss=2.5), end(1))
        path.rename(tmp_path / f"steps-0-2-{number}.jsonl")
    page = make_page(tmp_path)
    assert page.count("<h2>GPT</h2>") == 5
    assert "engines were recorded" not in page and "Other records" not in page


def test_no_extreme_is_lost():
    points = [(n, math.sin(n)) for n in range(10_000)]
    points[777], points[5432] = (777, 50.0), (5432, -50.0)
    few = thinned(points, 100)
    assert len(few) <= 200
    assert (777.0, 50.0) in few and (5432.0, -50.0) in few
    assert [s for s, _ in few] == sorted(s for s, _ in few)
    found = buckets(points, 10)
    assert max(each.high for each in found) == 50.0 and min(each.low for each in found) == -50.0


def test_values_that_are_not_finite_are_counted_and_not_drawn():
    (bucket,) = buckets([(1, math.nan), (2, 1.0), (3, 3.0)], 1)
    assert bucket == (1, 3, 1.0, 2.0, 3.0, 1)


@pytest.mark.parametrize(("stage", "accumulation", "volume"), [
    (0, 1, 2), (1, 4, 2), (2, 1, 2), (2, 4, 5), (3, 1, 3), (3, 4, 12),
])  # fmt: skip
def test_the_volume_of_the_formula(stage, accumulation, volume):
    assert sum(expected_volume(stage, accumulation).values()) == volume


def test_no_label_is_broken_inside_a_word(tmp_path):
    write(tmp_path, step(1, train_loss=2.5), end(1))
    (style,) = re.findall(r"td, th \{(.*?)\}", make_page(tmp_path))
    assert "overflow-wrap: break-word" in style
    assert "anywhere" not in style


def test_a_failed_run_says_which_rank_was_the_cause_and_where(tmp_path, monkeypatch):
    """Rank 0 has the record, and knows only that rank 1 has left."""
    folder = tmp_path / "run7"
    folder.mkdir()
    write(folder, step(1), end(1, "RankLost: rank 1 left"))
    assert "Why the run ended" not in make_page(folder)
    monkeypatch.setattr("zeroshard.run.run_folder.default_root", lambda: tmp_path)
    message = f"rank 1 raised ValueError: a bad <sample> {'x' * 300} (exit code 1)."
    trace = 'Traceback:\n  File "train.py", line 7, in main\nValueError: a bad <sample>'
    lines = (message, "then rank 0 gave up.")
    keep_exit(ExitReport(lines, 1, trace, 1), 0, {"ZEROSHARD_RUN_ID": "run7"})
    page = make_page(folder)
    assert f"rank 1: raised ValueError: a bad &lt;sample&gt; {'x' * 300}" in page
    assert "raised at train.py:7 in main" in page
    assert page.index("Why the run ended") < page.index("RankLost: rank 1 left")


def test_a_process_that_was_killed_leaves_half_a_line(tmp_path):
    path = write(tmp_path, step(1, train_loss=2.5), step(2, train_loss=2.0))
    path.write_text(path.read_text()[:-20])
    record = read_record(path)
    assert record.num_steps == 1
    assert "killed while it wrote" in record.notes[0]
    assert record.ending.startswith("no last line")


@pytest.mark.parametrize(("text", "words"), [
    ("", "its first line does not describe one"),
    ('{"kind": "step", "step": 1}\n', "its first line does not describe one"),
    (json.dumps({**FIRST, "format": 99}) + "\n", "format 99, and this release reads format 1"),
    (json.dumps(FIRST) + '\n{"kind": "st\n{}\n', "line 2 is damaged"),
    (json.dumps(FIRST) + "\n[1]\n", "line 2 is damaged"),
    (json.dumps(FIRST) + '\n{"kind": "step", "step": 1}\n', "line 2 is damaged: KeyError: 'time_s'"),
    (json.dumps(FIRST).replace('"units": 2, ', "") + "\n", "it lacks units"),
    ("\n".join(map(json.dumps, (FIRST, {**end(1), "memory": [{}]}))) + "\n", "line 2 is damaged: Key"),
])  # fmt: skip
def test_a_record_that_is_damaged_is_an_error(tmp_path, text, words):
    path = tmp_path / "steps-0-1-0.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        make_page(tmp_path)


def test_the_command_says_what_it_wrote_and_what_is_wrong(tmp_path):
    def called(*arguments: str):
        return CliRunner().invoke(main, ["report", *map(str, arguments)])

    write(tmp_path / "run", step(1, train_loss=2.5), end(1))
    done = called(tmp_path)
    assert done.exit_code == 0 and f"{tmp_path / 'run' / 'report.html'}" in done.output
    assert (tmp_path / "run/report.html").stat().st_size > 10_000
    for arguments, words in (
        ([tmp_path / "nothing"], "is not a directory"),
        ([tmp_path / "run" / "report.html"], "is not a directory"),
        ([tmp_path, "-o", tmp_path / "no" / "x.html"], "cannot be written"),
    ):
        bad = called(*arguments)
        assert bad.exit_code == 2, bad.output
        assert words in " ".join(bad.output.split())


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write(tmp_path, step(1, train_loss=2.5))
    with pytest.raises(UsageError, match=r"pip install 'zeroshard\[report\]'"):
        make_page(tmp_path)


def test_a_report_needs_no_torch(tmp_path):
    write(tmp_path, step(1, train_loss=2.5), end(1))
    program = (
        "import sys; from pathlib import Path; from zeroshard.report.page import make_page; "
        "make_page(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=60)
