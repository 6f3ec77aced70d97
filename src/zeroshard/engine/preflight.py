"""Can this host hold, and serve, what the plan puts into its memory and on its disks?

Asked before the first byte moves: a run that cannot work ends here, with the numbers of every rank.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.comm.env import Place
from zeroshard.config import Config
from zeroshard.core.ledger import Key
from zeroshard.core.tiers import Tier
from zeroshard.engine.fit import check_host
from zeroshard.engine.host_memory import host_limits
from zeroshard.store import disk_check

logger = logging.getLogger("zeroshard")

PROBE_NBYTES = 128 << 20
"""Written and read once to measure a disk: well under a second on any that can be trained on."""

PROBED_FROM_NBYTES = 64 << 20
"""What rests on disk below this many bytes costs no time worth a forecast."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a rank will hold beside the model that it was given. Bytes."""

    host_nbytes: int  # in host memory; on CPU ranks all that is not on disk
    optimizer_nbytes: int  # on disk
    param_nbytes: int  # on disk

    @property
    def read_nbytes(self) -> int:
        """Read from disk in a step: state once; shards for forward, backward and update."""
        return self.optimizer_nbytes + 3 * self.param_nbytes

    @property
    def written_nbytes(self) -> int:
        """Written to disk in a step."""
        return self.optimizer_nbytes + self.param_nbytes


def demand_of(planned: Mapping[Key, int], *, on_cpu: bool) -> Demand:
    """``planned``: bytes per category and tier. ``on_cpu``: the device's memory is the host's.

    >>> tiers = {(c, t): 0 for c in ("parameters", "gradients", "master", "optimizer") for t in Tier}
    >>> demand_of({**tiers, ("master", Tier.DISK): 4, ("optimizer", Tier.DISK): 8}, on_cpu=True)
    Demand(host_nbytes=0, optimizer_nbytes=12, param_nbytes=0)
    """
    tiers = (Tier.HOST, Tier.DEVICE) if on_cpu else (Tier.HOST,)
    new = ("gradients", "master", "optimizer")  # parameters exist already, in the model
    return Demand(
        sum(planned[category, tier] for category in new for tier in tiers),
        planned["master", Tier.DISK] + planned["optimizer", Tier.DISK],
        planned["parameters", Tier.DISK],
    )


def check_room(
    planned: Mapping[Key, int], config: Config, comm: Comm, place: Place, device: torch.device
) -> None:
    """Refuse a plan that this host cannot hold, and forecast what its disks will cost. Collective.

    Raises :class:`HostMemoryError` or :class:`DiskError` with the numbers of all ranks of the host.
    """
    mine = demand_of(planned, on_cpu=device.type == "cpu")
    host = place.rank // place.local_world_size
    row = torch.tensor([host, *astuple(mine)], dtype=torch.float64).to(device)
    rows = comm.gather_small(row, name="room").tolist()
    here = [Demand(*map(int, numbers)) for other, *numbers in rows if other == host]
    check_host([demand.host_nbytes for demand in here], host_limits())
    wanted: dict[str, int] = defaultdict(int)
    zero = config.zero_optimization
    if zero.offload_optimizer is not None and zero.offload_optimizer.nvme_path:
        wanted[zero.offload_optimizer.nvme_path] += sum(d.optimizer_nbytes for d in here)
    if zero.offload_param is not None and zero.offload_param.nvme_path:
        wanted[zero.offload_param.nvme_path] += sum(d.param_nbytes for d in here)
    for path, nbytes in wanted.items():
        if nbytes:
            disk_check.check(path, nbytes)
            if place.local_rank == 0 and nbytes >= PROBED_FROM_NBYTES:
                _forecast(path, nbytes, here)


def _forecast(path: str, nbytes: int, here: list[Demand]) -> None:
    """Say what the disk will cost. Measured by one rank of a host, so that ranks do not disturb it."""
    speed = disk_check.measure(path, PROBE_NBYTES)
    seconds = disk_check.forecast(
        sum(d.read_nbytes for d in here), sum(d.written_nbytes for d in here), speed
    )
    logger.info(
        "%.2f GB of state rest in %s: %s; about %.1f s of transfers per step",
        nbytes / 1e9, path, speed, seconds,
    )  # fmt: skip
    if doubt := disk_check.warning(path):
        logger.warning("%s", doubt)
