"""What work, collectives, messages, copies and updates take on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroshard.config.machine_file import Values, rate_at
from zeroshard.core.tiers import Tier
from zeroshard.engine.engine import Engine
from zeroshard.planner.step_log import MESSAGE, Begun, Work, along


@dataclass(frozen=True)
class Updated:
    """Bytes that the update of a rank reads and writes in a step, and those that offload moves.

    ``nbytes``: gradients (read; twice if their norm is measured), states, masters and parameters (read
    and written). ``tier``: of the optimizer state, where the update runs. ``gradient_nbytes`` and
    ``param_nbytes``: that leave the device for it, and come back. ``state_nbytes``: of states and
    masters.
    """

    nbytes: int
    tier: str
    gradient_nbytes: int
    param_nbytes: int
    state_nbytes: int


def updated_by(engine: Engine) -> Updated:
    """What the update of this rank moves. Optimizer state must exist: take a step before."""
    rows = engine.memory_report().rows
    kept = [row for row in rows if row.category in ("master", "optimizer")]
    state = sum(row.measured for row in kept)
    has_master = any(row.category == "master" and row.measured for row in rows)
    tiers = [row.tier for row in kept if row.measured] or [Tier.DEVICE.name]
    params = grads = 0
    for unit in engine.runtime.units:
        if unit.trainable:
            whole = not engine.runtime.stage.shards_optimizer
            numel = unit.layout.full_numel if whole else unit.layout.shard_numel
            params += numel * unit.row.param.itemsize
            grads += numel * unit.row.reduce.itemsize
    passes = 2 if engine.settings.zero_optimization.compute_grad_norm else 1
    nbytes = 2 * state + passes * grads + (1 if has_master else 2) * params
    return Updated(nbytes, tiers[-1], grads, params, state)


_CURVES = {"reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce"}
"""The rate that a collective takes; all others take that of "all_gather"."""


@dataclass(frozen=True)
class Grown:
    """What a step that was logged does with another micro-batch, on lines through it and a larger one.

    ``works``: by operation, that of the larger one. ``layers``: by the bytes of what grows. ``part``: 0
    with the micro-batch that was logged, 1 with the larger one.
    """

    works: Mapping[Work, Work]
    layers: Mapping[int, int]
    part: float

    def work(self, low: Work) -> Work:
        """An operation."""
        high = self.works.get(low)
        return low if high is None else along(low, high, self.part)

    def nbytes(self, begun: Begun) -> int:
        """The whole tensor of a collective."""
        low = begun.nbytes
        if not begun.grows:
            return low
        return max(0, round(low + self.part * (self.layers.get(low, low) - low)))


class Prices:
    """What operations and collectives cost on a machine, in seconds.

    ``ranks``: of the whole run. ``grown``: what counts instead of what was logged.
    """

    def __init__(self, values: Values, ranks: int, grown: Grown | None = None) -> None:
        self.values = values
        self._grown = grown
        self._known: dict[Work, float] = {}  # most operations of a step are repeated
        self.kinds_s: dict[str, float] = {}
        self._ranks = ranks
        self._is_serial = values.machine.execution == "serial"

    @property
    def operation_s(self) -> float:
        """Of the host, for each operation."""
        return self.values.number("device.operation_s")

    def work_s(self, work: Work) -> float:
        """Of the device, for one operation."""
        seconds = self._known.get(work)
        if seconds is None:
            seconds = self._known[work] = self._work_s(
                work if self._grown is None else self._grown.work(work)
            )
        if seconds:
            self.kinds_s[work.kind] = self.kinds_s.get(work.kind, 0.0) + seconds
        return seconds

    def _work_s(self, work: Work) -> float:
        if not work.nbytes:
            return 0.0
        seconds = work.nbytes / rate_at(self.values.points("device.bytes_per_s"), work.nbytes)
        if work.flop:
            points = self.values.points(f"{work.kind}.{work.dtype}")
            if self._is_serial and work.smallest:
                seconds += work.flop / rate_at(points, 2 * work.smallest**3)
            else:
                seconds = max(seconds, work.flop / rate_at(points, work.flop))
        elif work.kind == "random":
            seconds = max(seconds, work.numel / self.values.number("device.random_per_s"))
        elif work.kind == "special":
            own = f"special.{work.op}"
            name = own if self.values.has(own) else "special.exp"
            seconds = max(seconds, work.numel / self.values.number(name))
        return seconds

    def begun_s(self, begun: Begun) -> float:
        """Of a collective or message that was logged."""
        nbytes = begun.nbytes if self._grown is None else self._grown.nbytes(begun)
        if begun.op == MESSAGE:
            return self.message_s(nbytes, begun.ranks)
        return self.collective_s(begun.op, nbytes, begun.ranks)

    def collective_s(self, op: str, nbytes: int, ranks: Sequence[int]) -> float:
        """Of a collective over ``nbytes`` in all; 0 on one rank.

        Between nodes, each rank has a network adapter. The ranks of a group that share a node share its
        traffic: k of them have k rings, each of which leaves the node through another adapter. In an
        all-to-all each rank sends its own parts through its own adapter, and ``nbytes`` are its own.
        """
        if len(ranks) == 1:
            return 0.0
        size = round(self.values.number("devices_per_node"))
        beside = Counter(rank // size for rank in ranks)
        curve = _CURVES.get(op, "all_gather")
        sent = nbytes * sent_part(op, len(ranks))

        def seconds(link: str, adapters: int = 1) -> float:
            return sent / rate_at(self.values.points(f"{link}.{curve}"), nbytes) / adapters

        def apart(link: str, others: int) -> float:
            """To send parts to ``others``."""
            return seconds(link) * others / (len(ranks) - 1)

        if len(beside) == 1:
            return self.values.number("inside_node.alpha_s") + seconds("inside_node")
        adapters = min(beside.values())
        if op == "all_to_all":
            inside, outside = adapters - 1, len(ranks) - adapters
            slowest = max(apart("inside_node", inside), apart("between_nodes", outside))
            return self.values.number("between_nodes.alpha_s") + slowest
        slowest = seconds("between_nodes", adapters)
        if adapters > 1:
            slowest = max(slowest, seconds("inside_node"))
        return self.values.number("between_nodes.alpha_s") + slowest

    def message_s(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Of a message from one rank to another one; on one processor, what each of the two does.

        In an all-gather of two ranks each sends one part and receives another one, so the whole is twice
        as large as a message, and a processor does the work of both ends.
        """
        seconds = self.collective_s("all_gather", 2 * nbytes, ranks)
        return seconds / 2 if self._is_serial else seconds

    def update_s(self, updated: Updated) -> float:
        """Of the update, where its state is."""
        if updated.tier == Tier.DEVICE.name or self._is_serial:
            return updated.nbytes / self.values.number("device.optimizer_bytes_per_s")
        local = min(self._ranks, round(self.values.number("devices_per_node")))
        cores = max(1, int(self.values.number("host.cores")) // local)
        rate = min(
            cores * self.values.number("host.optimizer_bytes_per_s"),
            self.values.number("host.memory_bytes_per_s") / local,
        )
        return updated.nbytes / rate

    def disk_s(self, updated: Updated) -> float:
        """To read and write the states that are on disk."""
        if updated.tier != Tier.DISK.name:
            return 0.0
        read = updated.state_nbytes / self.values.number("disk.read_bytes_per_s")
        return read + updated.state_nbytes / self.values.number("disk.write_bytes_per_s")

    def copies_s(self, updated: Updated) -> tuple[float, float]:
        """To copy gradients to the host, and parameters back."""
        return (
            updated.gradient_nbytes / self.values.number("copies.device_to_host_bytes_per_s"),
            updated.param_nbytes / self.values.number("copies.host_to_device_bytes_per_s"),
        )


def sent_part(op: str, size: int) -> float:
    """The part of a tensor that each of ``size`` ranks sends in a ring.

    >>> sent_part("all_reduce", 4), sent_part("all_gather", 4)
    (1.5, 0.75)
    """
    passes = 2 if op == "all_reduce" else 1  # a reduce-scatter and an all-gather
    return passes * (size - 1) / size
