"""The example with state on disk runs, stores 16 bytes per parameter there and leaves no files."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import warm_python

from zeroshard.core.layout import ALIGNMENT

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt2_xl_offload"
RANKS = 2
NBYTES_PER_PARAM = 16  # 16-bit parameters and gradients, fp32 masters and both of Adam's moments
MIB = 2**20


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def lines(disk: Path) -> list[str]:
    """What a finished run of the smallest size printed."""
    command = [
        *(sys.executable, "-m", "zeroshard.launch", "--nproc", str(RANKS)),
        *(str(EXAMPLE / "train.py"), "--smoke", "--nvme-path", str(disk)),
    ]
    done = warm_python.run(command, cwd=disk, env=os.environ, timeout=150, warm_ranks=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout.splitlines()


def matches(lines: list[str], pattern: str) -> list[re.Match[str]]:
    return [found for line in lines if (found := re.search(pattern, line))]


def numel_of_smoke() -> tuple[int, int]:
    """Elements and tensors of the smallest size."""
    model = runpy.run_path(str(EXAMPLE / "model.py"))
    with torch.device("meta"):
        sizes = [p.numel() for p in model["GPT2"](model["SIZES"]["smoke"]).parameters()]
    return sum(sizes), len(sizes)


def test_the_loss_falls_with_every_step(lines: list[str]) -> None:
    losses = [float(found[1]) for found in matches(lines, r"^step \d+  loss (\S+) ")]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.03


def test_each_rank_holds_its_part_of_16_bytes_a_parameter_on_disk(lines: list[str]) -> None:
    numel, tensors = numel_of_smoke()
    padding = ALIGNMENT * tensors
    head = next(line for line in lines if line.startswith("rank  category"))
    columns = re.findall(r"(?:device|host|disk) planned|measured", head)
    at = columns.index("disk planned")
    for rank in range(RANKS):
        cells = [line.split() for line in lines if re.match(rf" +{rank}  \w", line)]
        rows = {name: list(map(float, rest)) for _, name, *rest in cells}
        names = ("parameters", "gradients", "master", "optimizer")
        on_disk = {name: rows[name][-2:] for name in names}
        assert len(rows["optimizer"]) == at + 2
        for planned, measured in on_disk.values():
            assert planned == measured
        held = MIB * sum(measured for _, measured in on_disk.values())
        rounding = 4 * 0.005 * MIB  # the table has two decimals
        assert held >= NBYTES_PER_PARAM * numel / RANKS - rounding
        assert held <= NBYTES_PER_PARAM * (numel + padding) / RANKS + rounding


def test_each_step_says_what_the_disk_did_with_every_unit(lines: list[str]) -> None:
    (units,) = matches(lines, r" parameters in (\d+) units")
    found = matches(lines, r"disk: (\d+) pages in .*; waited .* s for reads, .* s for writes$")
    assert [match[1] for match in found] == 3 * [units[1]]


def test_the_peak_of_all_ranks_together_is_below_the_sum_of_their_peaks(lines: list[str]) -> None:
    pattern = r"^peak memory of all ranks together: (\S+) GiB PSS \(at most (\S+),"
    (found,) = matches(lines, pattern)
    assert 0 < float(found[1]) <= float(found[2])


def test_nothing_is_left_on_the_disk(lines: list[str], disk: Path) -> None:
    assert lines
    assert os.listdir(disk) == []
