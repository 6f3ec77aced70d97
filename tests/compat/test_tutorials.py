"""The programs of ``docs/tutorials`` run unedited on ranks, and print what the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from by_name import no_deepspeed_on_ranks  # noqa: F401
from programs import ROOT, on_warm_ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_deepspeed_on_ranks", "inside")

TUTORIALS = ROOT / "docs" / "tutorials"
VARY = ("gathered", "buckets", "scratch", "transport", "activations", "peak")
"""Rows of the memory report without a plan: their bytes depend on the run."""


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are saved to a directory of their own, and started in it."""
    monkeypatch.chdir(tmp_path)


def blocks(page: str, language: str = "") -> list[str]:
    text = (TUTORIALS / page).read_text()
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def saved(page: str, name: str) -> Path:
    """The program that the page calls ``name``, saved."""
    (code,) = (block for block in blocks(page, "python") if block.startswith(f"# {name}\n"))
    Path(name).write_text(code)
    return Path(name)


def printed(page: str, first: str) -> list[str]:
    """The block of the page that shows what a program prints; ``first`` is how the blocks begin."""
    return [block for block in blocks(page) if block.startswith(first)]


def assert_prints(said: str, shown: str, *, relative: float = 0.02) -> None:
    """The last lines of ``said`` are those of the page. Losses may differ between CPUs by rounding."""
    wanted = shown.strip().splitlines()
    for line, on_page in zip(said.strip().splitlines()[-len(wanted) :], wanted, strict=True):
        words, numbers = told(line)
        words_on_page, numbers_on_page = told(on_page)
        assert words == words_on_page
        if not any(row in words for row in VARY):
            assert numbers == pytest.approx(numbers_on_page, rel=relative), on_page


def told(line: str) -> tuple[list[str], list[float]]:
    """The words of a line, and its numbers with a decimal point."""
    return re.sub(r"\d+\.\d+", "#", line).split(), [float(n) for n in re.findall(r"\d+\.\d+", line)]


def training_lines(said: str) -> list[str]:
    return re.findall(r"^(?:epoch|step) \d+: .*$", said, re.MULTILINE)


def test_the_stages_of_the_first_run_have_the_same_losses_and_the_bytes_of_the_table():
    program = saved("first_run.md", "first_run.py")
    table = re.findall(r"^\| (\d) \| (.+) \|$", (TUTORIALS / "first_run.md").read_text(), re.M)
    said = {stage: on_warm_ranks(2, program, "--stage", stage) for stage, _ in table[:3]}
    said["3"] = on_warm_ranks(2, program)  # as the page starts it
    (shown,) = printed("first_run.md", "epoch")
    assert_prints(said["3"], shown)
    assert list(said) == [stage for stage, _ in table]
    assert all(training_lines(text) == training_lines(said["3"]) for text in said.values())
    for stage, bytes_of in table:
        rows = re.findall(r"^ +0  (?:parameters|gradients|optimizer) +(\S+)", said[stage], re.M)
        assert rows == bytes_of.split(" | "), stage


def test_the_first_run_on_one_rank_has_the_same_norms():
    program = saved("first_run.md", "first_run.py")
    norms = [
        [float(norm) for norm in re.findall(r"norm (\S+)", on_warm_ranks(ranks, program))]
        for ranks in (1, 2)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_offload_moves_all_state_to_disk_and_changes_no_loss():
    program = saved("offload.md", "offload.py")
    Path("disk").mkdir()
    in_memory, on_disk = printed("offload.md", "step")
    said = [on_warm_ranks(2, program), on_warm_ranks(2, program, "--nvme-path", "disk")]
    assert_prints(said[0], in_memory)
    assert_prints(said[1], on_disk)
    assert training_lines(said[0]) == training_lines(said[1])
    assert list(Path("disk").iterdir()) == []


def losses(said: str) -> list[tuple[float, float]]:
    found = re.findall(r"'loss': '?([\d.]+)'?, 'grad_norm': '?([\d.]+)", said)
    return [(float(loss), float(norm)) for loss, norm in found]


def test_the_trainer_fine_tunes_resumes_on_more_ranks_and_saves_a_whole_model():
    page = "trainer.md"
    on_warm_ranks(1, saved(page, "base.py"))
    program = saved(page, "finetune.py")
    rows = re.findall(r"^\| \d+ \| ([\d.]+) \| ([\d.]+) \|$", (TUTORIALS / page).read_text(), re.M)
    said = on_warm_ranks(2, program)
    assert losses(said) == [pytest.approx([float(n) for n in row], rel=0.02) for row in rows]
    assert Path("runs/checkpoint-20/latest").is_file()
    (shown,) = printed(page, "base")
    use = saved(page, "use.py")
    assert_prints(on_warm_ranks(1, use), shown)

    resumed = losses(on_warm_ranks(3, program, "--steps", "30", "--resume"))
    assert len(resumed) == 2  # of steps 25 and 30
    assert resumed[-1][0] < losses(said)[-1][0]
    (loss,) = re.findall(
        r"After the resumed run, the loss is ([\d.]+)\.\n", (TUTORIALS / page).read_text()
    )
    assert_prints(on_warm_ranks(1, use), f"final: loss {loss}")
