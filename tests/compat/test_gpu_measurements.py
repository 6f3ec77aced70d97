"""What the benchmark script for one GPU measures besides training, its parts and its files of results."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gpu_rehearsal import FOLDER, Load, rehearse, script

# ---------------------------------------------------------------- files of results


def results(path: Path, **dates: str) -> Path:
    """A file of results with a step for each date."""
    steps = {
        name: {"date": date, "machine": {"gpu": "H100"}, "rows": [{"from": path.name}]}
        for name, date in dates.items()
    }
    path.write_text(json.dumps({"format": 2, "steps": steps, "unfinished": {}}))
    return path


def test_merging_keeps_the_newest_of_each_step(load: Load, tmp_path: Path) -> None:
    one = results(tmp_path / "one.json", checks="2026-01-01", speed="2026-01-03")
    two = results(tmp_path / "two.json", speed="2026-01-02", offload="2026-01-02")
    content, source = load("results").merged([one, two])
    assert source == {"checks": one, "speed": one, "offload": two}
    assert {name: step["rows"][0]["from"] for name, step in content["steps"].items()} == {
        "checks": "one.json",
        "speed": "one.json",
        "offload": "two.json",
    }


def test_turns_of_a_step_that_another_file_has_finished_are_left_out(
    load: Load, tmp_path: Path
) -> None:
    one = results(tmp_path / "one.json", checks="2026-01-01")
    cut = tmp_path / "cut.json"
    turns = {"checks": [{"turn": "first"}], "speed": [{"turn": "second"}]}
    cut.write_text(json.dumps({"format": 2, "steps": {}, "unfinished": turns}))
    content, _ = load("results").merged([one, cut])
    assert content["unfinished"] == {"speed": [{"turn": "second"}]}


def test_merge_writes_one_file_and_tells_what_it_has(tmp_path: Path) -> None:
    one = results(tmp_path / "one.json", checks="2026-01-01")
    two = results(tmp_path / "two.json", offload="2026-01-02")
    done = script("--merge", str(one), str(two), "--out", str(tmp_path / "all.json"))
    assert done.returncode == 0, done.stderr
    assert list(json.loads((tmp_path / "all.json").read_text())["steps"]) == ["checks", "offload"]
    assert re.findall(r"^\w+", done.stdout, re.MULTILINE) == ["checks", "offload"]
    assert "two.json" in done.stdout


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1, "steps": {}}'])
def test_a_file_without_results_is_named(load: Load, tmp_path: Path, text: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(bad))):
        load("results").merged([bad])


def run_main(load: Load, *arguments: str) -> int:
    with mock.patch.object(sys, "argv", ["run.py", *arguments]):
        code: int = load("run").main()
    return code


def test_each_part_has_a_file_of_its_own(load: Load, tmp_path: Path) -> None:
    run = load("run")
    paths: list[Path | None] = []
    with (
        mock.patch.object(run, "has_cuda", lambda: True),
        mock.patch.object(run, "RESULTS", tmp_path),
        mock.patch.object(run, "Results", lambda path: paths.append(path)),
        mock.patch.object(run.steps, "limits", lambda *_: ()),
        mock.patch.object(run.signal, "signal", lambda *_: None),
    ):
        for number in ("1", "2"):
            run_main(load, "--part", number, "--folder", str(tmp_path))
    assert [path.name[10:] for path in paths] == ["-gpu-part-1.json", "-gpu-part-2.json"]


# ---------------------------------------------------------------- an image that has only torch


def test_missing_packages_are_named_before_anything_is_measured(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = load("wheels")
    with mock.patch.object(wheels, "NEEDED", ("pydantic", "not_there_at_all", "tomli")):
        assert wheels.absent((3, 12)) == ["not_there_at_all"]
        assert run_main(load, "--rehearse", "--folder", str(tmp_path)) == 2
    told = capsys.readouterr()
    assert not told.out
    assert "needs not_there_at_all" in told.err
    assert "--wheels wheels" in told.err


def closure(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions of ``names`` and of all that they require."""
    found: dict[str, importlib.metadata.Distribution] = {}
    open_names = list(names)
    while open_names:
        name = re.sub(r"[-_.]+", "-", open_names.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        for text in found[name].requires or ():
            if "extra ==" not in text:
                open_names.append(re.split(r"[ ;<>=!~\[(]", text)[0])
    return found


def packed(distribution: importlib.metadata.Distribution, folder: Path) -> None:
    """A wheel of an installed distribution."""
    name = re.sub(r"[-.]+", "_", distribution.metadata["Name"])
    file = folder / f"{name}-{distribution.version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path in distribution.files or ():
            if ".." not in path.parts and path.suffix != ".pyc":
                archive.write(path.locate(), str(path))


@pytest.mark.full
def test_an_image_that_has_only_torch_runs_the_checks(load: Load, tmp_path: Path) -> None:
    """Everything that is not torch's is carried as wheels, and installed without a network."""
    image = closure(["torch", "numpy", "pip", "setuptools"])
    carried = tmp_path / "wheels"
    carried.mkdir()
    for name, distribution in closure(load("wheels").NEEDED).items():
        if name not in image:
            packed(distribution, carried)
    python = tmp_path / "image" / "bin" / "python"
    venv.create(tmp_path / "image", symlinks=True)
    (site,) = (tmp_path / "image").glob("lib/python3*/site-packages")
    for distribution in image.values():
        for top in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
            target = Path(str(distribution.locate_file(top)))
            if target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)
    command = [python, FOLDER / "run.py", "--rehearse", "--folder", tmp_path / "folder"]
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, command), *map(str, arguments)], env=env, capture_output=True, text=True,
            timeout=170,
        )  # fmt: skip

    alone = run("--only", "checks")
    assert alone.returncode == 2, alone.stdout + alone.stderr
    assert "needs pydantic" in alone.stderr
    done = run("--only", "host", "nccl", "--wheels", carried)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "compiled update" in done.stdout
    assert "stage 3 = plain loop over the batches of all ranks" in done.stdout


# ---------------------------------------------------------------- the measurements


def job(load: Load, **given: Any) -> Any:
    shapes, trainers = load("shapes"), load("trainers")
    return trainers.Job("ZeroShard", 3, shapes.SHAPES["tiny"], device="cpu", **given)


def test_rates_of_the_host_are_measured(load: Load) -> None:
    facts = load("host_rates").host(job(load), nbytes=1 << 16, numel=1 << 12)["facts"]
    assert facts["touching pages GB/s"] > 0
    assert facts["page-locking GB/s"] > 0
    assert facts["is page-locked"] is False  # there is no GPU
    assert facts["fused AdamW of torch elements/s"] > 1e4
    assert facts.get("compiled update elements/s", 1e9) > 1e4


def bench(load: Load, answers: Iterator[dict[str, Any]], **given: Any) -> Any:
    """A bench whose turns have these answers."""
    turns = load("turns")
    made = turns.Bench(Path(), "cpu", **given)
    made.turn = lambda *_, **__: next(answers)
    return made


def test_the_cost_of_a_unit_is_what_exceeds_the_plain_loop(load: Load) -> None:
    spent = ({"us_per_unit": {"all": us}} for us in (100.0, 450.0, 180.0))
    rows = load("measurements").unit_costs(bench(load, spent))
    assert [row.get("own_us") for row in rows] == [None, 350.0, 80.0]


def test_a_system_that_failed_has_no_cost(load: Load) -> None:
    spent = iter([{"error": "out of time"}, {"us_per_unit": {"all": 1.0}}, {"error": "x"}])
    rows = load("measurements").unit_costs(bench(load, spent))
    assert [row.get("error") for row in rows] == ["out of time", None, "x"]
    assert not any("own_us" in row for row in rows)


def test_memory_is_measured_with_both_kinds_of_segments(load: Load) -> None:
    turns, given = load("turns"), []
    with mock.patch.object(
        turns, "run_process", lambda _, env, __: given.append(env) or turns.Ended("", "", 1)
    ):
        made = turns.Bench(Path("/nowhere"), "", say=lambda _: None)
        made.allow(600)
        load("measurements").unused_memory(made)
    assert [env["PYTORCH_ALLOC_CONF"] for env in given] == [
        "expandable_segments:True",
        "expandable_segments:False",
    ]


def test_what_a_rank_told_before_it_hangs_is_kept(load: Load) -> None:
    ranks = load("ranks")

    def work(job: Any, rank: int, size: int) -> Iterator[tuple[str, str]]:
        yield "first", f"told by {rank} of {size}"
        if rank:
            torch.randn(1)
            import time

            time.sleep(60)
        yield "second", "told"

    with mock.patch.object(ranks, "SILENT_S", 4.0):
        first, second = ranks.on_processes(work, job(load), ranks=2, backend="gloo")
    assert first == {"joins": "", "first": "told by 0 of 2", "second": "told"}
    assert second["first"] == "told by 1 of 2"
    assert second["joins"] == "hangs after 'first': nothing in 4 s"
    assert "second" not in second


def test_a_rank_that_dies_keeps_what_it_told(load: Load) -> None:
    ranks = load("ranks")

    def work(job: Any, rank: int, size: int) -> Iterator[tuple[str, str]]:
        import os

        yield "first", "told"
        os._exit(1)

    (found,) = ranks.on_processes(work, job(load), ranks=1, backend="gloo")
    assert found == {"joins": "its process died", "first": "told"}


# ---------------------------------------------------------------- NCCL's memory


class Registrations:
    """A backend that has the memory of NCCL, as ``torch.distributed.ProcessGroupNCCL``."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def mem_allocator(self) -> str:
        return "ncclMemAlloc"

    def register_mem_pool(self, pool: str, symm: bool = False) -> None:
        self.calls.append(f"register {pool}{' as a window' if symm else ''}")

    def deregister_mem_pool(self, pool: str) -> None:
        self.calls.append(f"deregister {pool}")

    def abort(self) -> None:
        self.calls.append("abort")


@contextmanager
def group_of_one(load: Load, backend: Registrations) -> Iterator[Any]:
    """A process group of one rank. What its backend would need of CUDA is recorded."""
    memory = load("nccl_memory")

    @contextmanager
    def inside(pool: str) -> Iterator[None]:
        backend.calls.append(f"allocate in {pool}")
        yield

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    real = memory._new_group
    wrapped = lambda *given: SimpleNamespace(  # noqa: E731
        _get_backend=lambda _: backend, gloo=real(*given)
    )
    bound = memory.BoundCollectives
    with (
        mock.patch.object(memory, "_new_group", wrapped),
        mock.patch.object(memory, "BoundCollectives", lambda group: bound(group.gloo)),
        mock.patch.object(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}"),
        mock.patch.object(torch.cuda, "use_mem_pool", inside),
    ):
        try:
            yield memory
        finally:
            dist.destroy_process_group()


def test_a_pool_is_registered_after_all_its_memory_was_allocated(load: Load) -> None:
    """A later segment would be registered by the allocator, which is a collective."""
    backend = Registrations()
    with group_of_one(load, backend) as memory:
        found = dict(memory._registered(job(load), 0, 1, numel=1 << 10))
    pool = "pool of ncclMemAlloc"
    window = [f"allocate in {pool}", f"register {pool} as a window", f"deregister {pool}"]
    policies = 2 if hasattr(dist, "ProcessGroupNCCL") else 1  # a CUDA build knows another one
    assert backend.calls == [
        f"allocate in {pool}", f"register {pool}", f"deregister {pool}",
        *window * policies,
        f"allocate in {pool}", f"register {pool} as a window", "abort",
    ]  # fmt: skip
    assert found["abort with a symmetric window"].endswith(" s")
    for name in ("plain memory", "registered pool", "symmetric window"):
        assert found[name].endswith("GB/s"), found
    assert found["symmetric memory of torch"].startswith("no: ")


def test_wrong_values_are_no_rate(load: Load) -> None:
    with group_of_one(load, Registrations()) as memory:
        turn = memory.Turn("cpu", 0, 1, 64)
        right = turn.buffers()
        lost = SimpleNamespace(all_gather=lambda *_: SimpleNamespace(wait=lambda: None))
        with mock.patch.object(memory, "BoundCollectives", lambda _: lost):
            assert memory.Turn("cpu", 0, 2, 64).rate(None, *right) == "no: values are wrong"


# ---------------------------------------------------------------- rehearsals


@pytest.mark.full
@pytest.mark.parametrize("kind", ["cpu", "pretended"])
def test_a_rehearsal_of_the_parts_with_measurements(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    code, rows = rehearse(
        load, monkeypatch, tmp_path / "folder", "--rehearse", kind, "--minutes", "30",
        "--only", "host", "nccl-memory", "units", "fragments",
    )  # fmt: skip
    assert code == 0
    assert list(rows) == ["import", "units", "fragments", "host", "nccl-memory"]
    assert not [row for found in rows.values() for row in found if "error" in row]
    assert [row["system"] for row in rows["units"]] == ["plain", "FSDP2", "ZeroShard stage 3"]
    assert [row["built"] for row in rows["fragments"]] == ["growing segments", "fixed segments"]
    facts = {row["machine"]: row["is"] for row in rows["nccl-memory"]}
    if kind == "cpu":
        assert facts["2 ranks: second communicator, after a reduction: bytes"] == 0
        assert str(facts["2 ranks: plain memory"]).endswith("GB/s")
    else:
        assert "1 rank: not measured" in facts
