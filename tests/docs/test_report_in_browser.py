"""Pages of runs and plans in headless Chromium: no error, request, script or sideways scroll; 2 MB."""

from __future__ import annotations

import json
import math
from pathlib import Path

import plan_model
import pytest
from browser import CHROMIUM, DRIVER, opened, served

from zeroshard.config.machine_file import load_machine
from zeroshard.planner.make_plan import Asked, make_plan
from zeroshard.report.page import make_page
from zeroshard.report.plan_page import plan_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium or no ChromeDriver"),
]
SCRIPT = "<script>window.ran = true</script><img src=x onerror='window.ran = true'>"
LONG = "a" * 500


def record(steps: int) -> str:
    """A record with every figure, texts that are scripts, and texts without spaces."""
    names = (
        "train_loss grad_norm grad_norm_clipped lr loss_scale samples_per_second tokens_per_second mfu "
        "step_time_ms exposed_comm_ms elapsed_time_ms_forward device_memory_gib host_memory_peak_gib"
    )
    first = {
        "kind": "run", "format": 1, "time_s": 1e9, "attempt": 1, "host": LONG, "rank": 0,
        "world_size": 2, "mesh": {"tensor": 2}, "versions": {"zeroshard": "0.1"}, "device": "cpu",
        "transport": "gloo", "dtypes": LONG, "stage": 3, "accumulation": 2, "train_batch_size": 8,
        "model": SCRIPT, "parameters": 1000, "units": 2,
        "config": [[SCRIPT, SCRIPT, "config"], ["a.path", json.dumps(LONG), "file"]],
        "environment": {"NCCL_DEBUG": LONG}, "notes": [SCRIPT],
    }  # fmt: skip
    lines = [first]
    for step in range(1, steps + 1):
        values = {name: 2 + math.sin(step * len(name)) for name in names.split()}
        lines.append(
            {"kind": "step", "step": step, "samples": step, "time_s": 1e9 + step, **values}
        )
    lines.append({"kind": "incident", "step": 3, "time_s": 1e9, "text": SCRIPT + LONG})
    memory = [{"category": LONG[:60], "planned": 1, "measured": 2, "tier": "host"}]
    lines.append({"kind": "end", "step": steps, "time_s": 1e9 + 9, "reason": SCRIPT, "memory": memory,
                  "traffic": []})  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture(autouse=True, scope="module")
def fonts_are_open(tmp_path_factory):
    """matplotlib keeps the files of its fonts open from their first use on."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "steps-0-1-0.jsonl").write_text(record(1000))
    make_page(folder)


@pytest.mark.parametrize(("steps", "engines", "figures"), [(100_000, 1, 11), (20, 7, 55)])
def test_the_page_of_a_run(tmp_path, steps, engines, figures):
    folder = tmp_path / "run"
    folder.mkdir()
    for number in range(engines):
        (folder / f"steps-0-1-{number}.jsonl").write_text(record(steps))
    page = make_page(folder)
    assert len(page.encode()) <= 2_000_000
    (folder / "report.html").write_text(page)
    look_at(folder, "report.html", figures)


def test_the_page_of_a_plan(tmp_path):
    plan = make_plan(
        Asked(
            "plan_model:factory",
            {**plan_model.config(), "comet": {"api_key": "planted"}},
            ranks=4,
            machine=load_machine("h100"),
        )
    )
    rows = [*plan.config, (SCRIPT, SCRIPT, f"file {SCRIPT}"), (LONG, LONG, "config")]
    page = plan_page(plan.as_dict() | {"model": SCRIPT + LONG}, rows)
    assert "planted" not in page and len(page.encode()) <= 2_000_000
    (tmp_path / "plan.html").write_text(page)
    look_at(tmp_path, "plan.html", 4)


def look_at(folder: Path, name: str, count: int) -> None:
    """``count``: figures of the page, and tables behind them."""
    with served(folder) as address, opened(folder / "profile") as browser:
        page = f"{address}/{name}"
        for pixels in (1280, 390):
            browser.width(pixels)
            visit = browser.open(page)
            assert visit.console == []
            assert visit.failed == []
            assert [each for each in visit.requests if not each.startswith("data:")] == [page]
            assert browser.run("return window.ran") is None  # no script of a name ran
            assert (
                browser.run(
                    "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
                )
                == 0
            )
        figures, tables = browser.run(
            "const all = q => [...document.querySelectorAll(q)];"
            "return [all('svg').length, all('summary').filter(s => s.innerText === 'Table').length]"
        )
        assert figures == tables == count
        browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert (
            browser.run(
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            == 0
        )
