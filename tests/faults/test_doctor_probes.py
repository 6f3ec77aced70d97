"""Probes of the doctor that hang, lie or are broken, and what the command prints and returns."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeroshard.doctor import examination, facts

PYTHON = sys.executable


def living(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def test_a_probe_that_hangs_is_killed_with_its_children(tmp_path):
    told = tmp_path / "session"
    program = (
        "import os, subprocess, sys, time; "
        f"open({str(told)!r}, 'w').write(str(os.getsid(0))); "
        "subprocess.Popen(['sleep', '600']); time.sleep(600)"
    )
    outcome = facts.probe([PYTHON, "-c", program], limit_s=3, environ=os.environ)
    assert (outcome.kind, outcome.text) == ("hang", "no answer in 3 s")
    session, end = int(told.read_text()), time.monotonic() + 20
    while found := living(
        session
    ):  # nobody waits for the child of the probe: it may still be dying
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_a_probe_that_fails_is_told_by_its_last_line():
    program = "raise ValueError('no such device')"
    outcome = facts.probe([PYTHON, "-c", program], limit_s=60, environ=os.environ)
    assert (outcome.kind, outcome.text) == ("failed", "ValueError: no such device")


def test_a_rank_that_fails_ends_the_probe_at_once():
    """There is no GPU here, so NCCL cannot start."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    outcome = facts.collectives(2, "nccl", limit_s=60, environ=environ)
    assert outcome.kind == "failed"
    assert "Error" in outcome.text


def test_a_program_that_is_missing_is_absent():
    outcome = facts.probe(["/no/such/program"], limit_s=5, environ=os.environ)
    assert outcome.kind == "absent"


def test_a_doctor_that_is_ended_leaves_no_probe(tmp_path):
    """SIGTERM comes while nvidia-smi hangs."""
    told, program = tmp_path / "session", tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho $$ > {told}.new && mv {told}.new {told}\nexec sleep 600\n")
    program.chmod(0o755)
    doctor = subprocess.Popen(
        [PYTHON, "-m", "zeroshard.cli.main", "doctor"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    end = time.monotonic() + 60
    while not told.exists() and time.monotonic() < end:
        time.sleep(0.01)
    doctor.terminate()
    assert doctor.wait(60) == 128 + 15
    assert living(int(told.read_text())) == []


def test_without_torch_the_doctor_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "known = metadata.version\n"
        "def version(name):\n"
        "    if name == 'torch': raise metadata.PackageNotFoundError(name)\n"
        "    return known(name)\n"
        "metadata.version = version\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run(
        [PYTHON, "-m", "zeroshard.cli.main", "doctor"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 2, found.stderr
    assert "ZS-D111  torch is missing or too old: torch is not installed." in found.stdout
    assert "gloo 2 ranks    ImportError: no torch here" in found.stdout


@pytest.mark.parametrize(("wrong_rank", "kind"), [(-1, "ok"), (1, "wrong")])
def test_values_of_collectives_are_checked(wrong_rank, kind):
    outcome = facts.collectives(2, "gloo", limit_s=60, environ=os.environ, wrong_rank=wrong_rank)
    assert outcome.kind == kind, outcome
    if kind == "wrong":
        assert outcome.text == "wrong values in all_gather, all_reduce, reduce_scatter"
    assert all(outcome.found[name]["busbw_Bps"] > 0 for name in ("all_reduce", "all_gather"))


@pytest.mark.parametrize(
    ("script", "kind", "names"),
    [
        (
            "echo 'NVIDIA A, 40960, 550.1'; echo 'NVIDIA B, 40960, 550.1'",
            "ok",
            ["NVIDIA A", "NVIDIA B"],
        ),
        ("echo 'No devices were found'", "failed", []),
        ("exit 9", "failed", []),
        ("sleep 600", "hang", []),
    ],
)
def test_an_nvidia_smi_that_answers_lies_or_hangs(tmp_path, script, kind, names):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    outcome, found = facts.listed_gpus(limit_s=1, environ=environ)
    assert outcome.kind == kind, outcome
    assert [gpu["name"] for gpu in found] == names


FAKE = """
import json, os, subprocess, sys, time
if "zeroshard.doctor.exchange" in sys.orig_argv:
    ranks, _, backend = sys.orig_argv[-4:-1]
    known = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME")
    on = [name for name in known if os.environ.get(name)]
    setting = "one" if ranks == "1" else "+".join(on) or "default"
    does = "ok" if backend == "gloo" else json.loads(os.environ["FAKE_NCCL"]).get(setting, "ok")
    open(os.environ["FAKE_SESSIONS"], "a").write(f"{os.getsid(0)}\\n")
    if does == "hang":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    if does == "fail":
        os.write(2, b"CUDA error: no device\\n")
        os._exit(1)
    row = {"latency_s": 0.05 if does == "slow" else 1e-5, "busbw_Bps": 1e10}
    print(json.dumps({"wrong": ["all_reduce"] * (does == "wrong"), "all_reduce": row}), flush=True)
    os._exit(0)
"""
P2P, SHM, NIC = "NCCL_P2P_DISABLE", "NCCL_P2P_DISABLE+NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME"
GPUS = "echo 'NVIDIA A, 40960, 550.1'; echo 'NVIDIA B, 40960, 550.1'"


@pytest.mark.parametrize(
    ("smi", "nccl", "code", "fix"),
    [
        (GPUS, {}, None, ""),
        (GPUS, {"default": "slow"}, "ZS-D209", ""),
        (GPUS, {"one": "fail"}, "ZS-D100", ""),
        (GPUS, {"default": "hang"}, "ZS-D101", "export NCCL_P2P_DISABLE=1"),
        (GPUS, {"default": "wrong"}, "ZS-D101", "export NCCL_P2P_DISABLE=1"),
        (
            *(GPUS, {"default": "hang", P2P: "hang"}, "ZS-D102"),
            "export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1",
        ),
        (GPUS, {"default": "hang", P2P: "fail", SHM: "fail", NIC: "fail"}, "ZS-D103", ""),
        (GPUS, {"default": "fail", P2P: "fail", SHM: "hang"}, "ZS-D103", f"export {NIC}="),
        ("sleep 600", {}, "ZS-D105", ""),
        ("echo what", {}, "ZS-D105", ""),
    ],
    ids=[
        "ok",
        "slow",
        "D100",
        "hang",
        "wrong",
        "D102",
        "D103",
        "interface",
        "smi-hangs",
        "smi-lies",
    ],
)
def test_every_verdict_over_gpus_from_programs_that_hang_lie_and_fail(
    tmp_path, monkeypatch, smi, nccl, code, fix
):
    """Everything runs but the collectives themselves; no process of any probe is left."""
    sessions = tmp_path / "sessions"
    for name, text in (("sitecustomize.py", FAKE), ("nvidia-smi", f"#!/bin/sh\n{smi}\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "nvidia-smi").chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "FAKE_NCCL": json.dumps(nccl),
        "FAKE_SESSIONS": str(sessions),
    }
    for name in (P2P, "NCCL_SHM_DISABLE", NIC):
        environ.pop(name, None)
    monkeypatch.setattr(examination, "NCCL_LIMIT_S", 3.0)
    monkeypatch.setattr(examination, "ANSWER_LIMIT_S", 3.0)
    monkeypatch.setattr(facts, "_interfaces", lambda _: ["eth9"])
    found = examination.examine(2, tmp_path, environ=environ)
    verdicts = [f for f in found.findings if f.code < "ZS-D106" or f.code == "ZS-D209"]
    assert [f.code for f in verdicts] == ([code] if code else [])
    assert [f.fix for f in verdicts if f.fix.startswith(fix)] == ([verdicts[0].fix] if code else [])
    assert not code or bool(fix) == bool(verdicts[0].fix)
    assert [pid for line in sessions.read_text().split() for pid in living(int(line))] == []


def test_the_command_examines_this_machine(tmp_path):
    """Two ranks; the limit of open files is too small, and a variable slows runs down."""
    words = ["doctor", "--json", "--ranks", "2", "--disk", str(tmp_path / "absent")]
    command = shlex.join([PYTHON, "-m", "zeroshard.cli.main", *words])
    found = subprocess.run(
        ["bash", "-c", f"ulimit -n 1024; exec {command}"],
        env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 1, found.stderr
    tree = json.loads(found.stdout)
    codes = {finding["code"] for finding in tree["findings"]}
    assert {"ZS-D204", "ZS-D207", "ZS-D208"} <= codes
    assert tree["gloo"]["2"]["kind"] == "ok"
    assert tree["facts"]["limits"]["-n"] == 1024
