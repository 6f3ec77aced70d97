"""Says what is wrong with a machine: a table of codes, and pure functions that find them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zeroshard.core.files import medium_of
from zeroshard.doctor.facts import Facts, ProbeOutcome
from zeroshard.launch.resources import BARE_RANK_NBYTES, SMALL_SHM_NBYTES
from zeroshard.memory.host_limits import gib

Weight = Literal["fails", "warns"]

OLDEST_TORCH = (2, 11)
SLOW_LATENCY_S = 1e-3  # of 8 bytes between GPUs of one host


@dataclass(frozen=True)
class Code:
    """``weight``: "fails": a run will fail or hang; "warns": it will be slower, or may fail later."""

    weight: Weight
    title: str
    remedy: str


CODES: Mapping[str, Code] = {
    "ZS-D100": Code(
        "fails",
        "a single GPU cannot compute",
        "Check the driver with nvidia-smi, and that torch was built for its CUDA version.",
    ),
    "ZS-D101": Code(
        "fails",
        "peer-to-peer traffic between GPUs is broken",
        "Now: NCCL_P2P_DISABLE=1, which is slower. For good: turn PCIe ACS or the IOMMU off in the BIOS, "
        "or boot with iommu=pt. Do not do so on the host of virtual machines that need isolation.",
    ),
    "ZS-D102": Code(
        "fails",
        "NCCL cannot use /dev/shm",
        "Now: NCCL_SHM_DISABLE=1. For good: a larger /dev/shm (docker run --shm-size=8g, or --ipc=host).",
    ),
    "ZS-D103": Code(
        "fails",
        "NCCL does not work with any setting that was tried",
        "Check firewall and driver. Set NCCL_SOCKET_IFNAME to an interface that reaches all hosts.",
    ),
    "ZS-D104": Code(
        "fails",
        "processes of this host cannot exchange tensors with gloo",
        "Set GLOO_SOCKET_IFNAME to an interface of this host, and check the firewall for local traffic.",
    ),
    "ZS-D105": Code(
        "fails",
        "nvidia-smi does not answer or its answer cannot be read",
        "A driver that hangs needs a restart of the host. Look for Xid errors in the kernel's log.",
    ),
    "ZS-D110": Code(
        "fails",
        "there is too little memory to start the ranks",
        "Start fewer ranks, or raise the memory limit of the container.",
    ),
    "ZS-D111": Code("fails", "torch is missing or too old", "Install torch 2.11 or newer."),
    "ZS-D201": Code(
        "warns",
        "OMP_NUM_THREADS does not fit the cores of a rank",
        "Threads of all ranks together should be as many as cores. Offloaded updates use these threads.",
    ),
    "ZS-D202": Code(
        "warns", "there are fewer cores than ranks", "Start fewer ranks, or raise the limit."
    ),
    "ZS-D203": Code(
        "warns",
        "/dev/shm is small",
        "When it is full, data-loader workers and NCCL end with SIGBUS. "
        "docker run --shm-size=8g, or --ipc=host.",
    ),
    "ZS-D204": Code(
        "warns",
        "few files may be open at a time",
        "Loader workers pass tensors in files. Raise the limit: ulimit -n 65536.",
    ),
    "ZS-D205": Code(
        "warns",
        "little memory may be locked",
        "Pinned memory for copies to a GPU counts. Raise the limit: ulimit -l unlimited.",
    ),
    "ZS-D206": Code(
        "warns",
        "the host's name does not lead to an address that others reach",
        "Runs over several hosts need one: mend /etc/hosts, or give --master_addr as an address.",
    ),
    "ZS-D207": Code(
        "warns",
        "the folder is a poor place for offloaded state",
        "Give as nvme_path a folder on a local disk with free space.",
    ),
    "ZS-D209": Code(
        "warns",
        "traffic between GPUs is slow",
        "Compare with NCCL_P2P_DISABLE=1. If that is faster, PCIe ACS redirects the traffic: turn it or "
        "the IOMMU off in the BIOS, or boot with iommu=pt.",
    ),
    "ZS-D208": Code(
        "warns", "a variable makes runs slow or changes them", "Remove it after debugging."
    ),
}
"""Everything that the doctor can find."""

SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": r"1",
    "TORCH_DISTRIBUTED_DEBUG": r"DETAIL",
    "NCCL_P2P_DISABLE": r"1",
    "NCCL_SHM_DISABLE": r"1",
    "NCCL_IB_DISABLE": r"1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": r"1",
}
"""Variables, and the values with which they cost time."""


@dataclass(frozen=True)
class MachineFinding:
    """One thing that is wrong. ``fix``: a line of shell that helps now, or empty."""

    code: str
    detail: str
    fix: str = ""

    @property
    def weight(self) -> Weight:
        """See :class:`Code`."""
        return CODES[self.code].weight


def of_facts(facts: Facts) -> Iterator[MachineFinding]:
    """What the facts alone say."""
    yield from _of_versions(facts)
    free = facts.memory.free_nbytes
    if free is not None and free < facts.ranks * BARE_RANK_NBYTES:
        yield MachineFinding(
            "ZS-D110",
            f"{gib(free)} are free, {facts.ranks} ranks need a quarter of a GiB each to start",
        )
    if facts.shm_nbytes is not None and facts.shm_nbytes <= SMALL_SHM_NBYTES:
        yield MachineFinding("ZS-D203", f"{gib(facts.shm_nbytes)} for {facts.ranks} ranks")
    yield from _of_cores(facts)
    if 0 <= facts.limits["-n"] < 4096:
        yield MachineFinding("ZS-D204", f"ulimit -n is {facts.limits['-n']}", "ulimit -n 65536")
    yield from _of_disk(facts)
    for name, slow in SLOW_VARIABLES.items():
        value = facts.variables.get(name)
        if value is not None and re.fullmatch(slow, value):
            yield MachineFinding("ZS-D208", f"{name}={value}", f"unset {name}")


def _of_versions(facts: Facts) -> Iterator[MachineFinding]:
    version = facts.versions.get("torch")
    numbers = tuple(int(n) for n in re.findall(r"\d+", version or "")[:2])
    if numbers < OLDEST_TORCH:
        yield MachineFinding("ZS-D111", f"torch {version}" if version else "torch is not installed")


def _of_cores(facts: Facts) -> Iterator[MachineFinding]:
    cores, ranks = facts.usable_cores, facts.ranks
    if cores < ranks:
        yield MachineFinding("ZS-D202", f"{cores:g} cores for {ranks} ranks")
    each = max(1, int(cores / ranks))
    given = facts.variables.get("OMP_NUM_THREADS", "")
    # Without the variable, `zeroshard launch` and torchrun set it.
    if given.isdigit() and int(given) != each and (int(given) > each or each >= 4):
        line = f"export OMP_NUM_THREADS={each}"
        yield MachineFinding("ZS-D201", f"it is {given}, and a rank has {each} cores", line)


def _of_disk(facts: Facts) -> Iterator[MachineFinding]:
    disk = facts.disk
    if disk is None:
        yield MachineFinding("ZS-D207", facts.disk_trouble)
        return
    reasons = []
    medium = medium_of(disk.filesystem)
    if medium != "disk":
        reasons.append("its files are in memory" if medium == "memory" else "it is on the network")
    if not disk.direct:
        reasons.append("files cannot be written and read past the page cache (O_DIRECT)")
    if disk.free_nbytes < 1 << 30:
        reasons.append(f"{gib(disk.free_nbytes)} are free")
    if reasons:
        yield MachineFinding("ZS-D207", f"{disk.path} ({disk.filesystem}): {', '.join(reasons)}")


def of_gpus(facts: Facts, answer: ProbeOutcome) -> Iterator[MachineFinding]:
    """What ``nvidia-smi`` says. ``answer.kind`` "absent": there is none, which is fine."""
    if answer.kind == "absent":
        return
    if answer.kind != "ok":
        yield MachineFinding("ZS-D105", answer.text)
    elif 0 <= facts.limits["-l"] < 1 << 20:
        line = "ulimit -l unlimited"
        yield MachineFinding("ZS-D205", f"ulimit -l is {facts.limits['-l']} KiB", line)


def of_name(addresses: Sequence[str], *, answered: bool) -> Iterator[MachineFinding]:
    """Whether others reach this host by its name. ``addresses``: that its name leads to."""
    if not answered:
        yield MachineFinding("ZS-D206", "the name service does not answer")
    elif not addresses:
        yield MachineFinding("ZS-D206", "the name is not known")
    elif all(address.startswith("127.") or address == "::1" for address in addresses):
        yield MachineFinding("ZS-D206", f"it leads to {', '.join(addresses)}, the loopback")


def of_gloo(outcomes: Mapping[int, ProbeOutcome]) -> Iterator[MachineFinding]:
    """What the exchanges on the CPU say. ``outcomes``: by number of ranks."""
    for ranks, outcome in outcomes.items():
        if outcome.kind not in ("ok", "untried"):
            yield MachineFinding("ZS-D104", f"{ranks} ranks: {outcome.text}")


BISECT: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("default", {}),
    ("P2P off", {"NCCL_P2P_DISABLE": "1"}),
    ("P2P and SHM off", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),
)
"""Settings of NCCL, in the order in which they are tried until one works."""


def of_nccl(one_gpu: ProbeOutcome, tried: Mapping[str, ProbeOutcome]) -> MachineFinding | None:
    """The verdict over one GPU alone, and over all with the settings of :data:`BISECT`.

    >>> ok, hang = ProbeOutcome("ok", ""), ProbeOutcome("hang", "no answer in 30 s")
    >>> of_nccl(ok, {"default": hang, "P2P off": ok}).code
    'ZS-D101'
    """
    if one_gpu.kind != "ok":
        return MachineFinding("ZS-D100", one_gpu.text)
    first = tried.get("default")
    if first is not None and first.kind == "ok":
        return _of_speed(first)
    working = [name for name, outcome in tried.items() if outcome.kind == "ok"]
    if first is None or first.kind == "untried":
        return None
    detail = f"{first.text} by default"
    if not working:
        return MachineFinding("ZS-D103", detail)
    code = {"P2P off": "ZS-D101", "P2P and SHM off": "ZS-D102"}.get(working[0], "ZS-D103")
    settings = dict(BISECT).get(working[0]) or dict([working[0].split("=", 1)])
    line = "export " + " ".join(f"{name}={value}" for name, value in settings.items())
    return MachineFinding(code, f"{detail}; it works with {working[0]}", line)


def _of_speed(works: ProbeOutcome) -> MachineFinding | None:
    """Right values that come too late: redirected peer-to-peer traffic takes tens of milliseconds."""
    latency_s = works.found["all_reduce"]["latency_s"] if works.found else 0.0
    if latency_s <= SLOW_LATENCY_S:
        return None
    return MachineFinding("ZS-D209", f"8 bytes take {1e3 * latency_s:.1f} ms")
