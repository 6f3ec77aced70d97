"""Every verdict of the doctor, from facts and outcomes that are made up."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.doctor import examination
from zeroshard.doctor.examination import Examination
from zeroshard.doctor.facts import (
    Disk,
    Facts,
    ProbeOutcome,
    cpu_quota,
    disk_of,
    gather,
    registered_memory,
)
from zeroshard.doctor.verdicts import (
    CODES,
    MachineFinding,
    of_facts,
    of_gloo,
    of_gpus,
    of_name,
    of_nccl,
)
from zeroshard.memory.host_limits import CgroupLimit, HostLimits

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
GIB = 1 << 30

GOOD = Facts(
    host="node1",
    python="3.11.7",
    versions={"torch": "2.13.0+cpu"},
    memory=HostLimits(64 * GIB, 48 * GIB, None),
    shm_nbytes=32 * GIB,
    shm_free_nbytes=32 * GIB,
    cores=16,
    quota=None,
    limits={"-l": -1, "-n": 65536, "-u": -1},
    disk=Disk("/data", "ext4", 900 * GIB, True),
    interfaces=["eth0"],
    iommu=False,
    ranks=4,
)
OK, HANG = ProbeOutcome("ok", "values ok"), ProbeOutcome("hang", "no answer in 30 s")
WRONG, FAILED = (
    ProbeOutcome("wrong", "wrong values in all_reduce"),
    ProbeOutcome("failed", "CUDA error"),
)
DISK = GOOD.disk
assert DISK is not None


def with_variables(**variables: str) -> Facts:
    return replace(GOOD, variables=variables)


FACTS: list[tuple[str, Facts, str]] = [
    ("ZS-D110", replace(GOOD, memory=HostLimits(64 * GIB, GIB // 2, None)), "0.5 GiB are free"),
    (
        "ZS-D110",
        replace(
            GOOD, memory=HostLimits(64 * GIB, 48 * GIB, CgroupLimit(2 * GIB, 3 * GIB // 2, "/x"))
        ),
        "0.5 GiB are free",
    ),
    ("ZS-D111", replace(GOOD, versions={}), "torch is not installed"),
    ("ZS-D111", replace(GOOD, versions={"torch": "2.9.1"}), "torch 2.9.1"),
    ("ZS-D201", with_variables(OMP_NUM_THREADS="16"), "it is 16, and a rank has 4 cores"),
    ("ZS-D201", with_variables(OMP_NUM_THREADS="1"), "it is 1, and a rank has 4 cores"),
    ("ZS-D202", replace(GOOD, cores=3), "3 cores for 4 ranks"),
    ("ZS-D202", replace(GOOD, quota=1.5), "1.5 cores for 4 ranks"),
    ("ZS-D203", replace(GOOD, shm_nbytes=64 << 20), "0.1 GiB for 4 ranks"),
    ("ZS-D204", replace(GOOD, limits={**GOOD.limits, "-n": 1024}), "ulimit -n is 1024"),
    ("ZS-D207", replace(GOOD, disk=None, disk_trouble="no answer in 5 s"), "no answer in 5 s"),
    ("ZS-D207", replace(GOOD, disk=replace(DISK, filesystem="tmpfs")), "its files are in memory"),
    ("ZS-D207", replace(GOOD, disk=replace(DISK, filesystem="nfs4")), "it is on the network"),
    ("ZS-D207", replace(GOOD, disk=replace(DISK, direct=False)), "O_DIRECT"),
    ("ZS-D207", replace(GOOD, disk=replace(DISK, free_nbytes=1 << 29)), "0.5 GiB are free"),
    ("ZS-D208", with_variables(TORCH_DISTRIBUTED_DEBUG="DETAIL"), "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
]

SLOW = replace(OK, found={"all_reduce": {"latency_s": 49e-3}})
QUICK = replace(OK, found={"all_reduce": {"latency_s": 30e-6}})

NCCL: list[tuple[str | None, ProbeOutcome, dict[str, ProbeOutcome]]] = [
    (None, OK, {}),
    (None, OK, {"default": OK}),
    (None, OK, {"default": QUICK}),
    (None, OK, {"default": ProbeOutcome("untried", "not tried")}),
    ("ZS-D209", OK, {"default": SLOW}),
    ("ZS-D100", FAILED, {}),
    ("ZS-D100", HANG, {}),
    ("ZS-D101", OK, {"default": HANG, "P2P off": OK}),
    ("ZS-D101", OK, {"default": WRONG, "P2P off": OK}),
    ("ZS-D102", OK, {"default": HANG, "P2P off": HANG, "P2P and SHM off": OK}),
    ("ZS-D103", OK, {"default": HANG, "P2P off": HANG, "P2P and SHM off": FAILED}),
    (
        "ZS-D103",
        OK,
        {
            "default": HANG,
            "P2P off": HANG,
            "P2P and SHM off": HANG,
            "NCCL_SOCKET_IFNAME=eth1": OK,
        },
    ),
]
OTHERS: dict[str, list[MachineFinding]] = {
    "ZS-D104": list(of_gloo({2: OK, 4: WRONG})),
    "ZS-D105": list(of_gpus(GOOD, HANG)),
    "ZS-D205": list(of_gpus(replace(GOOD, limits={**GOOD.limits, "-l": 64}), OK)),
    "ZS-D206": list(of_name(["127.0.1.1", "::1"], answered=True)),
}


def test_nothing_is_found_on_a_good_machine():
    assert list(of_facts(GOOD)) == []
    assert list(of_facts(with_variables(OMP_NUM_THREADS="4", NCCL_DEBUG="INFO"))) == []
    assert list(of_gpus(GOOD, OK)) == list(of_gpus(GOOD, ProbeOutcome("absent", ""))) == []
    assert (
        list(of_gloo({2: OK, 4: ProbeOutcome("untried", "not tried")}))
        == list(of_name(["10.0.0.3"], answered=True))
        == []
    )


@pytest.mark.parametrize(("code", "facts", "detail"), FACTS, ids=str)
def test_each_fault_of_the_facts_has_its_code(code, facts, detail):
    (found,) = of_facts(facts)
    assert found.code == code
    assert detail in found.detail


@pytest.mark.parametrize(("code", "one", "tried"), NCCL, ids=str)
def test_each_row_of_the_bisection_has_its_verdict(code, one, tried):
    found = of_nccl(one, tried)
    assert (found and found.code) == code
    if code == "ZS-D101":
        assert found.fix == "export NCCL_P2P_DISABLE=1"
    if "NCCL_SOCKET_IFNAME=eth1" in tried:
        assert found.fix == "export NCCL_SOCKET_IFNAME=eth1"


@pytest.mark.parametrize("code", OTHERS)
def test_each_other_probe_has_its_code(code):
    (found,) = OTHERS[code]
    assert found.code == code


def test_a_name_that_is_unknown_or_not_answered_is_told():
    assert "not known" in next(of_name([], answered=True)).detail
    assert "does not answer" in next(of_name([], answered=False)).detail


def test_every_code_is_reached_and_is_in_the_page():
    reached = {code for code, *_ in FACTS} | {code for code, *_ in NCCL if code} | {*OTHERS}
    assert reached == {*CODES}
    page = (ROOT / "docs/doctor.md").read_text()
    rows = dict(re.findall(r"^\| (ZS-D\d+) \| (fails|warns) \|", page, re.MULTILINE))
    assert rows == {code: row.weight for code, row in CODES.items()}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_cores_is_that_of_the_cgroup(tmp_path, files, quota):
    version_1 = "cpu.cfs_quota_us" in files
    folder = tmp_path / "sys/fs/cgroup" / ("cpu" if version_1 else "")
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/\n" if version_1 else "0::/\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_values_that_look_like_secrets_are_not_told(tmp_path):
    given: dict[str, Any] = {"TORCH_HUB_TOKEN": "abc", "NCCL_DEBUG": "INFO", "HOME": "/root"}
    facts = gather(2, disk_of(tmp_path), given)
    assert facts.variables == {"TORCH_HUB_TOKEN": "(hidden)", "NCCL_DEBUG": "INFO"}
    assert facts.disk is not None
    assert facts.disk.free_nbytes > 0


@pytest.mark.parametrize(
    ("name", "raised", "direct"),
    [
        ("pwritev", errno.EINVAL, False),
        ("preadv", errno.EINVAL, False),
        ("pwritev", errno.EIO, None),
    ],
)
def test_a_disk_has_o_direct_only_if_a_page_was_written_and_read(
    monkeypatch, tmp_path, name, raised, direct
):
    """Some file systems let a file be opened with O_DIRECT and refuse the first transfer."""
    if not disk_of(tmp_path).direct:
        pytest.skip("the folder for temporary files has no O_DIRECT")

    def refuse(*_):
        raise OSError(raised, "refused")

    monkeypatch.setattr(os, name, refuse)
    found = disk_of(tmp_path)
    assert (found and found.direct) == direct
    assert not any(tmp_path.iterdir())


def test_the_versions_of_cuda_and_nccl_are_told_without_importing_torch(monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError")
    (tmp_path / "torch/version.py").write_text(
        "from typing import Optional\n__version__ = '2.13.0+cu128'\n"
        "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    (tmp_path / "nvidia_nccl_cu12-2.27.3.dist-info").mkdir()
    text = "Name: nvidia-nccl-cu12\nVersion: 2.27.3\n"
    (tmp_path / "nvidia_nccl_cu12-2.27.3.dist-info/METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    versions = gather(2, DISK, {}).versions
    assert (versions["CUDA"], versions["NCCL"]) == ("12.8", "2.27.3")
    assert "torch" not in sys.modules
    made = Examination(replace(GOOD, versions=versions), [], {}, {}, [])
    assert "CUDA 12.8, NCCL 2.27.3" in next(examination.lines(made))


def test_all_settings_of_nccl_together_have_a_limit(monkeypatch):
    """Nothing answers, and there are forty interfaces."""
    now_s, limits = [0.0], []

    def hangs(ranks, backend, *, limit_s, environ):
        limits.append(limit_s)
        now_s[0] += limit_s if (ranks, backend) == (4, "nccl") else 1.0
        return OK if (ranks, backend) != (4, "nccl") else HANG

    gpu = {"name": "A", "memory.total": "40960", "driver_version": "550.1"}
    many = replace(GOOD, interfaces=[f"eth{n}" for n in range(40)])
    monkeypatch.setattr(examination.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(examination, "collectives", hangs)
    monkeypatch.setattr(examination, "listed_gpus", lambda **_: (OK, [gpu] * 4))
    monkeypatch.setattr(examination, "disk_below", lambda *_, **__: ("", DISK))
    monkeypatch.setattr(examination, "gather", lambda *_, **__: many)
    found = examination.examine(4, Path(), environ={})
    assert now_s[0] <= examination.TOTAL_S
    assert max(limits) <= 60.0
    assert [finding.code for finding in found.findings] == ["ZS-D103"]
    assert [*found.nccl.values()].count(HANG) >= 7
    assert found.nccl["NCCL_SOCKET_IFNAME=eth39"].text == "not tried: no time was left"
    assert len(found.nccl) == 43


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([], 0),
        ([MachineFinding("ZS-D204", "ulimit -n is 1024", "ulimit -n 65536")], 1),
        (
            [
                MachineFinding("ZS-D204", ""),
                MachineFinding("ZS-D101", "hang", "export NCCL_P2P_DISABLE=1"),
            ],
            2,
        ),
    ],
)
def test_the_command_prints_remedies_and_ends_with_the_worst(monkeypatch, findings, code):
    made = Examination(GOOD, [], {2: HANG}, {}, findings)
    monkeypatch.setattr(examination, "examine", lambda *_: made)
    told = CliRunner().invoke(main, ["doctor"])
    assert told.exit_code == code, told.output
    assert "gloo 2 ranks    no answer in 30 s" in told.output
    assert ("Nothing is wrong." in told.output) == (not findings)
    for finding in findings:
        assert f"{finding.code}  {CODES[finding.code].title}: {finding.detail}." in told.output
    shell = CliRunner().invoke(main, ["doctor", "--fix-env"])
    assert shell.output.splitlines() == [finding.fix for finding in findings if finding.fix]
    checked = subprocess.run(["bash", "-n"], input=shell.output, text=True, check=False)
    assert checked.returncode == 0


@pytest.mark.parametrize(
    ("nccl", "settings", "words"),
    [
        ("2.27.3", "", 'plain, or registered with "registered_memory": true'),
        ("2.27.3", "expandable_segments:True", "plain: PYTORCH_ALLOC_CONF lets segments grow"),
        ("2.18.5", "", "plain: NCCL 2.18.5 registers no memory"),
        ("", "", "plain, or registered"),
    ],
)
def test_whether_nccl_could_use_registered_memory_is_told(nccl, settings, words):
    told = registered_memory({"NCCL": nccl}, {"PYTORCH_ALLOC_CONF": settings})
    assert told.startswith(words)
