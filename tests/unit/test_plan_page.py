"""The page and the trace of a plan: they have the plan's own numbers."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict

import plan_model
import pytest
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.config.machine_file import load_machine
from zeroshard.core.texts import gib
from zeroshard.planner.make_plan import Asked, make_plan
from zeroshard.planner.plan import blocks, timeline
from zeroshard.planner.trace import trace
from zeroshard.report.plan_page import plan_page

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


WORDS = """
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids, labels):
        logits = self.head(self.table(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def entry():
    return Words()
"""


def planned(*, machine: str | None = None):
    return make_plan(
        Asked(
            "plan_model:factory",
            plan_model.config(),
            ranks=4,
            memory_gib=0.0005,
            machine=None if machine is None else load_machine(machine),
        ),
        with_events=True,
    )


@pytest.fixture(scope="module", autouse=True)
def timed():
    plan = planned(machine="h100")
    plan_page(
        plan.as_dict(), ()
    )  # matplotlib keeps the files of its fonts open from their first use on
    return plan


def test_the_page_has_what_the_plan_says_and_no_script(timed):
    plan = timed.as_dict()
    page = plan_page(plan, timed.config)
    assert re.search(r"operations of</t[dh]>\s*<td[^>]*>cuda<", page)
    assert len(page.encode()) < 2e6
    assert "<script" not in page and "<img" not in page
    assert page.count("<svg") == page.count("<summary>Table</summary>") == 4
    over = -plan["spare_nbytes"]
    assert f"does not fit: {gib(over)} GiB too much for {gib(plan['limit_nbytes'])} GiB" in page
    for phase, moment in plan["phases"].items():
        assert phase in page
        assert f">{gib(moment['device_nbytes'])}<" in page
    for row in plan["traffic"]:
        assert f"<td>{row['numel']:,}</td>" in page
    for text in (*plan["assumed"], "of the time: "):
        assert text.replace("'", "&#39;") in page
    assert plan["step_peak"]["op"] in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)


def test_the_page_has_a_line_for_each_pipeline_stage(timed):
    needs = {
        "parameters": 77123,
        "states_nbytes": 1,
        "in_flight": 3,
        "sent_numel": 0,
        "sent_nbytes": 0,
    }
    stages = [{"rank": 2 * at, "peak_nbytes": 2**20, **needs} for at in range(2)]
    page = plan_page(timed.as_dict() | {"pipeline_stages": stages}, ())
    assert "rank 2: 77,123 parameters, peak 0.000977 GiB, 3 micro-batches in flight" in page


def test_the_page_has_changes_that_make_the_run_fit_and_what_passes_to_the_disk(timed):
    change = {"text": "stage 2", "line": '{"a": 1}', "peak_nbytes": 2**20, "slowdown": 0.01}
    disk = {"file_nbytes": 4096, "read_nbytes": 1234, "written_nbytes": 5678}
    page = plan_page(
        timed.as_dict() | {"changes": [change | {"predicted": False}], "disk": disk}, ()
    )
    cells = ("stage 2", "{&#34;a&#34;: 1}", "0.000977 GiB", "+1% (assumed)")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert "0.00000381 GiB of files; a step reads 0.00000115 GiB and writes 0.00000529 GiB" in page


def test_the_peak_has_its_line_and_the_timeline_its_peak(timed):
    found = timed.as_dict()
    peak, line = found["step_peak"], found["timeline"]
    assert peak["line"] == f"plan_model.py:{_line('exp()')}"
    assert peak["op"] in ("aten::exp", "aten::mul")
    columns = [line["device_nbytes"], line["others"], *line["held"].values()]
    assert len({*map(len, columns), len(line["phase"]), len(line["allocation"])}) == 1
    assert max(line["device_nbytes"]) == timed.simulation.peak_nbytes
    for at, device in enumerate(line["device_nbytes"]):
        assert device == sum(column[at] for column in columns[1:])
    assert list(dict.fromkeys(line["phase"])) == ["forward", "backward", "step"]
    few = timeline(timed.simulation.events, 5)
    assert max(held.device_nbytes for _, held in few) == timed.simulation.peak_nbytes
    assert "█" in blocks(few)


def _line(text: str) -> int:
    lines = open(plan_model.__file__).read().splitlines()
    return next(at for at, line in enumerate(lines, 1) if text in line)


def lanes(found):
    """Slices by stream, and the slices of phases."""
    names = {
        e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"
    }
    slices, phases = defaultdict(list), []
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            is_phase = event["name"] in ("forward", "backward", "step")
            (phases if is_phase else slices[names[event["tid"]]]).append(event)
    return slices, phases


def check_order(slices, phases):
    for events in slices.values():
        for before, after in itertools.pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    assert [phase["name"] for phase in phases] == ["forward", "backward", "step"]
    for event in slices["compute"]:
        inside = [
            p for p in phases
            if p["ts"] <= event["ts"] and event["ts"] + event["dur"] <= p["ts"] + p["dur"] + 1e-6
        ]  # fmt: skip
        assert len(inside) == 1, event


def test_a_trace_with_a_machine_adds_up_to_the_time_of_the_step(timed):
    found = json.loads(json.dumps(trace(timed)))
    slices, phases = lanes(found)
    check_order(slices, phases)
    times = timed.time.timing

    def seconds(events, *, waits=False):
        return sum(e["dur"] for e in events if e["name"].startswith("wait") == waits) / 1e6

    assert seconds(slices["compute"]) == pytest.approx(times.compute_s)
    assert seconds(slices["compute"], waits=True) == pytest.approx(sum(times.exposed_s.values()))
    for stream, busy_s in times.busy_s.items():
        assert seconds(slices[stream]) == pytest.approx(busy_s)
    assert set(slices) == {"compute", *times.busy_s}
    end = max(e["ts"] + e["dur"] for e in slices["compute"])
    assert 0 < end / 1e6 <= times.total_s + 1e-12
    counted = [sum(e["args"].values()) for e in found["traceEvents"] if e["ph"] == "C"]
    assert max(counted) == timed.simulation.peak_nbytes


def test_a_trace_without_a_machine_has_every_event_in_order():
    plan = planned()
    slices, phases = lanes(trace(plan))
    check_order(slices, phases)
    starts = sorted(event["ts"] for events in slices.values() for event in events)
    assert starts == pytest.approx(range(len(starts)))  # one tick for each
    calls = sum(row.calls for row in plan.simulation.traffic)
    assert sum(len(events) for stream, events in slices.items() if stream != "compute") == calls


def test_the_command_writes_both_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(plan_model.config(1)))
    words = ["plan", "plan_model:factory", "--config", "ds.json", "--ranks", "2"]
    words += ["--html", "plan.html", "--trace", "trace.json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "over the step (forward, backward, step): " in result.output
    assert "<svg" in (tmp_path / "plan.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    refused = CliRunner().invoke(main, [*words, "--fit", "speed", "--memory", "1"])
    assert refused.exit_code == 2
    assert "--html and --trace are of one plan" in refused.output
    nowhere = CliRunner().invoke(main, [*words[:-2], "--trace", "no/folder/trace.json"])
    assert nowhere.exit_code == 2
    assert "no/folder/trace.json" in nowhere.output


def test_no_secret_of_the_configuration_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss.py").write_text(WORDS)
    keys = plan_model.config(1) | {
        "train_micro_batch_size_per_gpu": 1, "unknown_keys": "warn",
        "comet": {"api_key": "planted-1", "workspace": "ours"},
        "wandb": {"api_key": "planted-2", "project": "shown"},  # a key that is not known
        "mlflow": {"tracking_uri": "https://me:planted-3" + "0" * 60 + "@host.example/runs"},
    }  # fmt: skip
    (tmp_path / "ds.json").write_text("// planted-4\n" + json.dumps(keys))
    words = "plan loss.py:entry --seq 4 --ranks 2 --memory 1 --config ds.json".split()
    files = ["--html", "plan.html", "--trace", "trace.json"]
    fits = ["--fit", "speed"]
    for more in (files, ["--json"], fits, [*fits, "--json"]):
        result = CliRunner().invoke(main, [*words, *more])
        assert result.exit_code == 0, result.output
        assert "planted" not in result.output
        assert ("***" in result.output) == (fits[0] in more)
    page = (tmp_path / "plan.html").read_text()
    assert "planted" not in page + (tmp_path / "trace.json").read_text()
    origin = "<td>file ds.json</td>"
    assert f"<td>comet.api_key</td><td>&#34;***&#34;</td>{origin}" in page
    assert f"<td>wandb.project</td><td>&#34;shown&#34;</td>{origin}" in page
    assert "https://***@host.example/runs" in page
    for wrong in ('"api_key": ["planted-1"]', '"api_key": "planted-1", "api_key": "planted-2"'):
        (tmp_path / "ds.json").write_text(f'{{"comet": {{{wrong}}}}}')
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2 and "api_key" in result.output, result.output
        assert "planted" not in result.output
