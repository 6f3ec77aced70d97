"""Checks that each host can hold what the plan puts into its memory and on its disks.

The check runs before anything is moved. A run that cannot work is refused with the numbers of every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.collectives import Comm
from zeroshard.comm.env import RankInfo
from zeroshard.comm.host import host_number
from zeroshard.config import Config
from zeroshard.core.ledger import Key
from zeroshard.core.stages import STAGES
from zeroshard.core.tiers import TIERS, Tier
from zeroshard.device.choice import read
from zeroshard.errors import DiskError
from zeroshard.memory.host_limits import HostLimits, host_limits
from zeroshard.offload import disk_check
from zeroshard.offload.host_fit import check_host
from zeroshard.offload.offload_plan import OffloadPlan, host_sizes

UNKNOWN_NBYTES = 1 << 52
"""Stands for a limit that the system does not report. A float64 represents it exactly."""

PROBE_NBYTES = 128 << 20
"""Bytes written and read once to measure a disk: takes well under a second on a usable disk."""

PROBED_FROM_NBYTES = 64 << 20
"""Less than this on a disk costs too little time per step for a forecast."""


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

    @property
    def read_nbytes(self) -> int:
        """The most bytes read from disk per step."""
        return sum(self.traffic(kind)[0] for kind in ON_DISK)

    @property
    def written_nbytes(self) -> int:
        """Bytes written to disk per step."""
        return sum(self.traffic(kind)[1] for kind in ON_DISK)


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
            disk_check.check(path, wanted, free=free)
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
        return disk_check.free_below(path)
    except DiskError:
        return UNKNOWN_NBYTES


def _forecast(path: str, kinds: Sequence[str], here: Sequence[Demand]) -> Iterator[str]:
    """The time that a disk will take, in words. One rank per host measures, or ranks would disturb it."""
    speed = disk_check.measure(path, PROBE_NBYTES)
    nbytes = _on_disk(here, kinds)
    reads, writes = (
        sum(traffic)
        for traffic in zip(
            *(demand.traffic(kind) for demand in here for kind in kinds), strict=True
        )
    )
    seconds = disk_check.forecast(reads, writes, speed)
    yield (
        f"{nbytes / 1e9:.2f} GB of this host's state are stored in {path}: {speed}; about "
        f"{seconds:.1f} s of transfers per step"
    )
    if doubt := disk_check.warning(path):
        yield doubt
