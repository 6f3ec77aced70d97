"""Checks that each host can hold what the plan puts into its memory and on its disks.

The check runs before anything is moved. A run that cannot work is refused with the numbers of every rank:
each rank alone might fit where all ranks of a host would be killed. Disks are measured, too.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.collectives import Comm
from zeroshard.comm.env import RankInfo
from zeroshard.comm.host import host_number
from zeroshard.config import Config
from zeroshard.core.files import PAGE_NBYTES, filesystem_of, free_nbytes, medium_of
from zeroshard.core.ledger import Key
from zeroshard.core.stages import STAGES
from zeroshard.core.texts import size_text
from zeroshard.core.tiers import TIERS, Tier
from zeroshard.device.choice import read
from zeroshard.errors import DiskError, HostMemoryError
from zeroshard.memory.host_limits import HostLimits, host_limits
from zeroshard.memory.host_memory import aligned_bytes
from zeroshard.offload.offload_plan import OffloadPlan, host_sizes
from zeroshard.offload.swap_file import BLOCK_NBYTES, Extent, SwapFile

UNKNOWN_NBYTES = 1 << 52
"""Stands for a limit that the system does not report. A float64 represents it exactly."""

PROBE_NBYTES = 128 << 20
"""Bytes written and read once to measure a disk: takes well under a second on a usable disk."""

PROBED_FROM_NBYTES = 64 << 20
"""Less than this on a disk costs too little time per step for a forecast."""

_PATIENCE_S = 0.25  # per direction of a measurement; the round in which it is exceeded is finished
_FIRST_ROUND_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that a rank will need in addition to the model that it was given."""

    host_nbytes: int  # in host memory; on CPU ranks everything that is not on disk
    optimizer_nbytes: int  # on disk: in the tiers that need a path
    param_nbytes: int  # on disk
    gradient_nbytes: int  # on disk
    micro_batches: int = 1  # forwards and backwards per step
    reductions: int = 1  # gradient reductions per step

    def traffic(self, kind: str) -> tuple[int, int]:
        """The most bytes read from and written to disk per step, for the field ``kind``.

        Optimizer state is read and written once. Shards are read for every forward and backward, and for
        the update; units that stay full between forward and backward are read once for both. Gradients
        are written after each reduction, and read for the next reduction and for the update.
        """
        nbytes: int = getattr(self, kind)
        if kind == "param_nbytes":
            return (2 * self.micro_batches + 1) * nbytes, nbytes
        times = self.reductions if kind == "gradient_nbytes" else 1
        return times * nbytes, times * nbytes


ON_DISK = ("optimizer_nbytes", "param_nbytes", "gradient_nbytes")
"""The fields of :class:`Demand` that are on disk."""


def demand_of(
    planned: Mapping[Key, int], *, on_cpu: bool, micro_batches: int = 1, reductions: int = 1
) -> Demand:
    """The demand of a plan with ``planned`` bytes per category and tier.

    ``on_cpu``: the device's memory is host memory.

    >>> kinds = ("parameters", "gradients", "master", "optimizer")
    >>> nothing = {(kind, tier): 0 for kind in kinds for tier in TIERS.values()}
    >>> demand_of({**nothing, ("master", Tier.DISK): 4, ("optimizer", Tier.DISK): 8}, on_cpu=True)
    Demand(host_nbytes=0, optimizer_nbytes=12, param_nbytes=0, gradient_nbytes=0, \
micro_batches=1, reductions=1)
    """
    on_disk = [tier for tier in TIERS.values() if tier.needs_path]
    tiers = [tier for tier in TIERS.values() if tier not in on_disk]
    if not on_cpu:
        tiers.remove(Tier.DEVICE)
    new = ["gradients", "master", "optimizer"]
    if not on_cpu:
        new.append("parameters")  # on CPU ranks they exist already, as the model's
    return Demand(
        sum(planned[category, tier] for category in new for tier in tiers),
        sum(planned["master", tier] + planned["optimizer", tier] for tier in on_disk),
        sum(planned["parameters", tier] for tier in on_disk),
        sum(planned["gradients", tier] for tier in on_disk),
        micro_batches,
        reductions,
    )


def check_capacity(
    planned: Mapping[Key, int],
    offload_plan: OffloadPlan,
    config: Config,
    comm: Comm,
    rank_info: RankInfo,
    device: torch.device,
    *,
    buffer_nbytes: int = 0,
) -> list[str]:
    """Refuse a plan that a host cannot hold, and forecast the time that its disks will take. Collective.

    ``buffer_nbytes``: host memory through which state on disk passes, and to which state is copied before
    early updates (``disk_buffer_nbytes`` and ``old_state_nbytes`` of
    :mod:`zeroshard.offload.offload_plan`).

    Returns lines with the forecast on the first rank of each host, and nothing on other ranks. Every rank
    checks every host with the same numbers, so either all ranks raise or none.

    Raises:
        HostMemoryError: the ranks of one host need more memory than is free there.
        DiskError: they need more space on a disk than is free there.
    """
    paths = _paths(config)
    limits = host_limits()
    mine = _Told(
        host_number(),
        [limits.free_nbytes or UNKNOWN_NBYTES, *(_free(path) for path in paths)],
        _demand(planned, offload_plan, config, device, buffer_nbytes),
    )
    row_K = torch.tensor(mine.row(), dtype=torch.float64).to(device)
    rows = comm.all_gather_small(row_K, name="room")
    if isinstance(rows, FakeTensor):
        return []  # fake tensors take no memory
    hosts: dict[int, list[_Told]] = defaultdict(list)
    for told in (_Told.of(row, len(paths)) for row in read(rows)):
        hosts[told.host].append(told)
    forecasts: list[str] = []
    for number, ranks in hosts.items():
        demands = [told.demand for told in ranks]
        memory, *disks = (min(column) for column in zip(*(t.frees for t in ranks), strict=True))
        is_here = number == mine.host
        known = _known(limits, memory, is_here=is_here)
        check_host([demand.host_nbytes for demand in demands], known)
        measures = is_here and rank_info.local_rank == 0
        for (path, kinds), free in zip(paths.items(), disks, strict=True):
            wanted = _on_disk(demands, kinds)
            check_disk(path, wanted, free)
            if measures and wanted >= PROBED_FROM_NBYTES:
                forecasts += _forecast(path, kinds, demands)
    # No rank writes or reserves space before the measurement has ended.
    comm.all_gather_small(row_K[:1], name="room measured")
    return forecasts


class _Told(NamedTuple):
    """What a rank tells the others: ``frees`` are bytes in memory and then in each directory."""

    host: int
    frees: list[int]
    demand: Demand

    def row(self) -> list[int]:
        """As numbers."""
        return [self.host, *self.frees, *astuple(self.demand)]

    @staticmethod
    def of(row: Sequence[float], num_paths: int) -> _Told:
        """The inverse of :meth:`row`."""
        host, *rest = map(int, row)
        return _Told(host, rest[: 1 + num_paths], Demand(*rest[1 + num_paths :]))


def _known(limits: HostLimits, free_nbytes: int, *, is_here: bool) -> HostLimits:
    """The limits of a host whose ranks have told how much is free. The cgroup is that of this host."""
    return replace(
        limits,
        host_free_nbytes=None if free_nbytes == UNKNOWN_NBYTES else free_nbytes,
        cgroup=limits.cgroup if is_here and limits.is_cgroup_tighter else None,
    )


def _demand(
    planned: Mapping[Key, int],
    offload_plan: OffloadPlan,
    config: Config,
    device: torch.device,
    buffer_nbytes: int,
) -> Demand:
    """The demand of this rank, with its buffers."""
    on_cpu = device.type == "cpu"
    micro_batches = config.gradient_accumulation_steps or 1
    stage = STAGES[config.zero_optimization.stage]
    states = demand_of(
        planned,
        on_cpu=on_cpu,
        micro_batches=micro_batches,
        reductions=micro_batches if stage.shards_grads else 1,
    )
    # On a GPU the plan counts masters, but not copy buffers.
    sizes = () if on_cpu else host_sizes(offload_plan)
    scratch_nbytes = sum(
        numel * dtype.itemsize for what, numel, dtype in sizes if what == "scratch"
    )
    return replace(states, host_nbytes=states.host_nbytes + buffer_nbytes + scratch_nbytes)


def _on_disk(demands: Iterable[Demand], kinds: Sequence[str]) -> int:
    """Bytes of some fields of the demands."""
    return sum(getattr(demand, kind) for demand in demands for kind in kinds)


def _paths(config: Config) -> dict[str, list[str]]:
    """By directory, the fields of :class:`Demand` that are stored there."""
    zero = config.zero_optimization
    paths: dict[str, list[str]] = defaultdict(list)
    for section, kinds in (
        (zero.offload_optimizer, ("optimizer_nbytes", "gradient_nbytes")),
        (zero.offload_param, ("param_nbytes",)),
    ):
        path = section.nvme_path if section is not None else None
        if section is not None and path is not None and TIERS[section.device].needs_path:
            paths[path] += kinds
    return paths


def _free(path: str) -> int:
    """Free bytes, or ``UNKNOWN_NBYTES``: opening the directory will then fail with the reason."""
    try:
        return free_below(path)
    except DiskError:
        return UNKNOWN_NBYTES


def _forecast(path: str, kinds: Sequence[str], here: Sequence[Demand]) -> Iterator[str]:
    """The time that a disk will take, in words. One rank per host measures, or ranks would disturb it."""
    speed = measure(path, PROBE_NBYTES)
    nbytes = _on_disk(here, kinds)
    reads, writes = (
        sum(traffic)
        for traffic in zip(
            *(demand.traffic(kind) for demand in here for kind in kinds), strict=True
        )
    )
    seconds = reads / speed.read_Bps + writes / speed.write_Bps  # they share the device
    yield (
        f"{nbytes / 1e9:.2f} GB of this host's state are stored in {path}: {speed}; about "
        f"{seconds:.1f} s of transfers per step"
    )
    if doubt := warning(path):
        yield doubt


def check_host(planned_nbytes_of_local_ranks: Sequence[int], limits: HostLimits) -> None:
    """Refuse a plan that would make the kernel kill a rank.

    ``planned_nbytes_of_local_ranks``: bytes of host memory that each rank of this host will need in
    addition to what it holds already, by local rank. Unknown limits are not checked.

    Raises:
        HostMemoryError: the sum is more than is free; with a table of the numbers.
    """
    free_nbytes = limits.free_nbytes
    total_nbytes = sum(planned_nbytes_of_local_ranks)
    if free_nbytes is None or total_nbytes <= free_nbytes:
        return
    raise HostMemoryError(
        "\n".join(
            [
                f"The host memory that this run plans does not fit: {size_text(total_nbytes)} are "
                f"planned, {size_text(free_nbytes)} are free. The kernel would kill a rank during "
                "the run.",
                *_table(planned_nbytes_of_local_ranks, limits),
                *_remedies(total_nbytes, free_nbytes),
            ]
        )
    )


def _table(planned: Sequence[int], limits: HostLimits) -> Iterator[str]:
    free_nbytes = limits.free_nbytes
    assert free_nbytes is not None  # check_host() compared with it
    if limits.is_cgroup_tighter and limits.cgroup is not None:
        binding = f"the limit is that of the cgroup {limits.cgroup.folder}"
    else:
        binding = "the limit is the host's memory"
    yield f"{'local rank':>12}  {'planned':>12}"
    yield from (f"{rank:>12}  {size_text(nbytes):>12}" for rank, nbytes in enumerate(planned))
    yield f"{'sum':>12}  {size_text(sum(planned)):>12}"
    yield f"{'free':>12}  {size_text(free_nbytes):>12}  {binding} ({limits.in_words()})"


def _remedies(total_nbytes: int, free_nbytes: int) -> Iterator[str]:
    section = "zero_optimization.offload_optimizer"
    times = f"at least {-(-total_nbytes // free_nbytes)} times as many" if free_nbytes else "more"
    yield "Each of these helps:"
    yield f"  - {times} hosts of this kind: each host then stores a smaller part"
    yield (
        f'  - {section}.device "nvme": the state is stored on disk (with max_in_cpu, a part of it)'
    )
    yield f"  - a smaller {section}.ratio: on a GPU, more of the state stays on the device"
    yield (
        "  - bf16.bf16_master_weights_and_grads with bf16.bf16_optimizer_states: masters and "
        "moments have a 16-bit dtype, at most half the bytes"
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured bandwidth in bytes per second, each direction by itself."""

    read_Bps: float
    write_Bps: float
    direct: bool

    def __str__(self) -> str:
        how = "O_DIRECT" if self.direct else "through the page cache, O_DIRECT is refused"
        return (
            f"reads {self.read_Bps / 1e9:.2f} GB/s, writes {self.write_Bps / 1e9:.2f} GB/s ({how})"
        )


def check_disk(directory: str | Path, wanted_nbytes: int, free: int) -> None:
    """Check that a directory can hold what all ranks of its host want to store below it.

    ``free``: its free bytes before any rank reserves space.

    Raises:
        DiskError: less is free than wanted.
    """
    if wanted_nbytes > free:
        raise DiskError(
            f"{directory} has too little space for the training state: the ranks of this host "
            f"need {wanted_nbytes} bytes ({wanted_nbytes / 1e9:.2f} GB) and {free} "
            f"({free / 1e9:.2f} GB) are free, {wanted_nbytes - free} too few. Free space, name "
            "another nvme_path, store less on disk (max_in_cpu, or device 'cpu'), or use more "
            "hosts."
        )


def free_below(directory: str | Path) -> int:
    """Free bytes where ``directory`` is or will be made.

    Raises:
        DiskError: they cannot be read.
    """
    return free_nbytes(_existing(directory))


def measure(
    directory: str | Path, nbytes: int = 256 << 20, block_nbytes: int = BLOCK_NBYTES
) -> Speed:
    """Measure a disk by writing and reading up to ``nbytes``.

    Writes less on a slow disk, and never more than half of the free space. Takes about a second at most:
    rounds of doubling size, of which the last one counts. The page cache is not measured: data are
    written to the device and read from it.

    Raises:
        DiskError: the disk cannot be used.
    """
    file = SwapFile(directory, block_nbytes=block_nbytes)
    try:
        nbytes = min(nbytes, free_nbytes(directory) // 2)
        room = file.reserve(max(PAGE_NBYTES, nbytes // PAGE_NBYTES * PAGE_NBYTES))
        block = aligned_bytes(block_nbytes)
        block.random_()  # a file system cannot compress it
        into = [aligned_bytes(block_nbytes) for _ in range(4)]

        def write(round_: Extent) -> None:
            parts = _split(round_, block_nbytes)
            for transfer in [file.write(p, block, nbytes=p.nbytes) for p in parts]:
                transfer.wait()
            file.flush()

        def read(round_: Extent) -> None:
            parts = _split(round_, block_nbytes)
            moving = [
                file.read(p, into[i % len(into)], nbytes=p.nbytes) for i, p in enumerate(parts)
            ]
            for transfer in moving:
                transfer.wait()

        write_Bps, written = _last_round(write, room)
        read_Bps, _ = _last_round(read, Extent(room.offset, written))
        return Speed(read_Bps, write_Bps, file.direct)
    finally:
        file.close()


def warning(directory: str | Path) -> str | None:
    """Why the directory is a poor choice although it works; None if it is not."""
    kind = filesystem_of(_existing(directory), Path("/proc/self/mounts").read_text())
    if medium_of(kind) == "memory":
        return (
            f"{directory} is a {kind}: its files are stored in this host's memory, so offloading "
            "to it saves no memory. Give as nvme_path a directory on a disk."
        )
    if medium_of(kind) == "network":
        return (
            f"{directory} is a network file system ({kind}): every step moves the whole optimizer "
            "state over the network, and other users share its speed. Give as nvme_path a "
            "directory on a local disk."
        )
    return None


def _existing(directory: str | Path) -> Path:
    """The directory, or its parent if it does not exist yet."""
    path = Path(os.path.expanduser(directory))
    return path if path.exists() else path.absolute().parent


def _split(extent: Extent, nbytes: int) -> list[Extent]:
    return [
        Extent(extent.offset + at, min(nbytes, extent.nbytes - at))
        for at in range(0, extent.nbytes, nbytes)
    ]


def _last_round(move: Callable[[Extent], None], room: Extent) -> tuple[float, int]:
    """Bytes per second of the last round, and the bytes moved in all rounds."""
    done, size, spent_s, rate = 0, _FIRST_ROUND_NBYTES, 0.0, 0.0
    while done < room.nbytes and spent_s < _PATIENCE_S:
        left = room.nbytes - done
        part = Extent(room.offset + done, left if left < 2 * size else size)
        begin_s = time.perf_counter()
        move(part)
        took_s = time.perf_counter() - begin_s
        rate = part.nbytes / max(took_s, 1e-9)
        done, size, spent_s = done + part.nbytes, size * 2, spent_s + took_s
    return rate, done
