"""Says what to do where memory does not suffice, before a run allocates any and when it runs out.

What surely cannot fit is an error on every rank, with changes of the configuration that free memory.
State in host memory and on disks, if the configuration moves some there, is checked by
:mod:`zeroshard.offload.capacity_check`.

The text about a failed allocation is added to the message of torch's exception. Its type and the
beginning of its message stay, because programs that look for a batch size that fits catch it by them.
"""

from __future__ import annotations

import os
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from zeroshard.comm.collectives import Comm
from zeroshard.comm.dtensors import local_of
from zeroshard.comm.env import current_rank_info
from zeroshard.comm.host import host_number
from zeroshard.config import Config
from zeroshard.core.layout import UnitLayout
from zeroshard.core.ledger import RESTING, TEMPORARY, TRANSPORT, Key, Ledger
from zeroshard.core.stages import Stage, UnitBytes, state_nbytes
from zeroshard.core.texts import mib, size_text
from zeroshard.core.tiers import TIERS, Tier
from zeroshard.device.choice import ops_of, read
from zeroshard.engine.remedies import (
    PlannedRun,
    Remedy,
    Run,
    accumulating,
    enough_nbytes,
    is_offloaded,
    remedies,
    search_lines,
)
from zeroshard.errors import HostMemoryError
from zeroshard.memory.host_limits import host_limits, read_peak_rss_nbytes, read_rss_nbytes
from zeroshard.parallel.split import PipelineModel
from zeroshard.precision.policy import DtypeRow
from zeroshard.zero.sharded_parameter import owner_of

_SIZES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_OF_HOST = "DefaultCPUAllocator"
UPDATE = "the update"
LESS_ON_HOST = (
    "It is memory of the host that is missing. Less of it is needed if state is offloaded to the device "
    '"nvme", or not offloaded, or if a data loader has fewer processes.'
)
RECOMPUTE = "model.gradient_checkpointing_enable()"
INTERVAL = '{"pipeline": {"activation_checkpoint_interval": 1}}'
_BEGIN = "ZeroShard: the memory of rank"


def requested_nbytes(error: BaseException) -> int | None:
    """The size of the allocation that failed; None: the error is another one.

    >>> requested_nbytes(RuntimeError("CUDA out of memory. Tried to allocate 1.50 MiB. GPU 0 has..."))
    1572864
    >>> requested_nbytes(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to "
    ...     "allocate 64 bytes. Error code 12 (Cannot allocate memory)"))
    64
    >>> requested_nbytes(RuntimeError("shape mismatch")) is None
    True
    """
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _SIZES[found[2]])


def reached(error: BaseException, model: nn.Module) -> tuple[str, float]:
    """The module that a forward was in when ``error`` was raised, and the part of the blocks that ran.

    The blocks are the longest list of modules around it. ("", 1.0) if no frame is of a module.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    part, most = 1.0, 1
    parts = found.split(".")
    for depth in range(1, len(parts)):
        holder = model.get_submodule(".".join(parts[:depth]))
        if isinstance(holder, (nn.ModuleList, nn.Sequential)) and len(holder) > most:
            most = len(holder)
            part = (list(dict(holder.named_children())).index(parts[depth]) + 0.5) / most
    return found, part


class MemoryBaseline:
    """What was held when the engine was built. The growth since then is that of the model's run."""

    def __init__(self, ledger: Ledger) -> None:
        self._resident = read_rss_nbytes(os.getpid())
        self._held = ledger.totals()[0]
        self._most = 0

    def note(self, engine: Any) -> None:
        """Look at the activations, where there are most of them: a backward begins."""
        self._most = max(self._most, self.activations(engine))

    def peaks(self, device: torch.device) -> dict[str, int]:
        """The most activations that :meth:`note` saw, and the most memory in use so far, in bytes."""
        in_use = ops_of(device).memory_in_use()
        peak = read_peak_rss_nbytes(os.getpid()) or 0 if in_use is None else in_use[1]
        return {"activations": self._most, "peak": peak}

    def activations(self, engine: Any) -> int:
        """Device memory that the engine does not hold: activations, temporaries, the program's own.

        On the CPU it is the growth of the process, which contains memory that allocators keep.
        """
        everything: int
        on_device: int
        everything, on_device = engine.runtime.ledger.totals()
        waiting: int = sum(buffer.waiting_nbytes for buffer in engine.runtime.reducer.buffers)
        in_use: tuple[int, int] | None = ops_of(engine.device).memory_in_use()
        if in_use is not None:
            return max(0, in_use[0] - on_device - waiting)
        resident = read_rss_nbytes(os.getpid())
        if resident is None or self._resident is None:
            return 0
        return max(0, resident - self._resident - (everything - self._held) - waiting)


def explain(engine: Any, error: BaseException, phase: str) -> None:
    """Add to the message of a failed allocation what the rank holds; other errors stay as they are."""
    asked = requested_nbytes(error)
    if asked is None or _BEGIN in str(error):
        return
    activations = engine.memory_baseline.activations(engine)
    module, part = reached(error, engine.module) if phase == "forward" else ("", 1.0)
    where = f"{phase} of {module!r}" if module else phase
    lines = [
        f"{_BEGIN} {engine.global_rank} when {mib(asked)} MiB could not be allocated, in {where}, "
        f"step {engine.global_steps + 1} (MiB):",
        *_table(engine, activations),
    ]
    if engine.device.type != "cpu" and _OF_HOST in str(error):
        lines += [host_limits().in_words(), LESS_ON_HOST]
    else:
        lines += _changes(engine, phase, asked, activations, part)
        lines += search_lines(planned_run(engine), _room(engine, activations))
    error.args = ("\n".join([str(error.args[0]), *lines]), *error.args[1:])


def _changes(engine: Any, phase: str, asked: int, activations: int, part: float) -> Iterator[str]:
    """``part``: of the blocks that had run."""
    whole = int(activations / part)
    missing = _missing(engine, phase, asked, whole - activations, whole)
    if part < 1.0:
        yield (
            f"{part:.0%} of the blocks had run, so a whole forward would hold about {mib(whole)} MiB of "
            "others."
        )
    run = run_of(engine, whole)
    yield from _advice(remedies(run, missing), missing, enough_nbytes(run, missing))


def _room(engine: Any, activations: int) -> int:
    """Bytes that this rank can have for tensors; on the CPU, where limits are several, those it had."""
    ops = ops_of(engine.device)
    in_use: tuple[int, int] | None = ops.memory_in_use()
    if in_use is not None:
        return in_use[0] + ops.allocatable_nbytes()
    on_device: int = engine.runtime.ledger.totals()[1]
    return on_device + activations


def planned_run(engine: Any) -> PlannedRun:
    """An engine's run for a command line."""
    updates, sizes = engine.runtime.optimizer, engine._hooks.input_sizes
    return PlannedRun(
        engine.module,
        engine.loaded,
        None
        if updates is None
        else updates.inner,  # engine.optimizer may be that of DeepSpeed's API
        engine.mesh,
        current_rank_info(),
        engine.device.type != "cpu",
        engine.train_micro_batch_size_per_gpu(),
        engine.accumulation.steps,
        sizes[1] if sizes is not None and len(sizes) == 2 else None,
    )


def _missing(engine: Any, phase: str, asked: int, rest: int, whole: int) -> int:
    """Bytes that a step needs more than there are.

    ``rest``: what the forward that was not finished would still allocate. ``whole``: all of it. Backward
    holds about as much as a block on top, and the update's state, if it is to come, stays from then on.
    """
    to_come = _to_come(engine)
    if phase == UPDATE:
        return max(asked, to_come)
    blocks = longest_list(engine.module)
    return max(asked, rest + (whole // blocks if blocks > 1 else 0)) + to_come


def longest_list(model: nn.Module) -> int:
    """The length of the longest list of modules, which are the blocks of a model; 1 without one."""
    lists = (nn.ModuleList, nn.Sequential)
    return max((len(each) for each in model.modules() if isinstance(each, lists)), default=1)


def _to_come(engine: Any) -> int:
    """Bytes of optimizer state on the device that are planned and not allocated yet."""
    runtime = engine.runtime
    planned = state_nbytes(runtime.plan, runtime.stage, engine._watch.gathers.rank)
    kinds = ("master", "optimizer")
    now: int = sum(runtime.ledger.nbytes(kind) for kind in kinds)
    return sum(planned[kind, Tier.DEVICE] for kind in kinds) - now


def run_of(engine: Any, activations: int) -> Run:
    """What is known of an engine's run. ``activations``: bytes that a whole forward holds."""
    runtime, zero = engine.runtime, engine.settings.zero_optimization
    rows = {id(unit.layout): unit.row for unit in runtime.units}
    model = engine.module
    return Run(
        units=runtime.plan,
        accumulated=[
            accumulating(each, rows[id(each.layout)].grad_accum.itemsize)
            if id(each.layout) in rows
            else each
            for each in runtime.plan
        ],
        rank=engine._watch.gathers.rank,
        stage=runtime.stage.number,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        accumulation=engine.accumulation.steps,
        activation_nbytes=activations,
        has_host=engine.device.type != "cpu",
        checkpointing=_checkpointing(model),
        offloads_optimizer=is_offloaded(zero.offload_optimizer),
        offloads_params=is_offloaded(zero.offload_param),
        block_nbytes=activations // longest_list(model),
    )


def states_only(plan: Sequence[UnitBytes], config: Config, device: torch.device) -> Run:
    """The run for a choice of remedies while nothing but its states is known, as of its first rank."""
    zero = config.zero_optimization
    return Run(
        units=plan,
        accumulated=plan,
        rank=0,
        stage=int(zero.stage),
        micro_batch=1,
        accumulation=1,
        activation_nbytes=0,
        has_host=device.type != "cpu",
        checkpointing="",
        offloads_optimizer=is_offloaded(zero.offload_optimizer),
        offloads_params=is_offloaded(zero.offload_param),
        block_nbytes=0,
    )


def _checkpointing(model: nn.Module) -> str:
    """The line with which a model recomputes its activations; "" if it cannot, or does already."""
    if isinstance(model, PipelineModel):
        interval = getattr(model, "activation_checkpoint_interval", None)  # of a PipelineModule
        if interval is not None:
            return "" if interval else INTERVAL
        model = model.inner
    able = hasattr(model, "gradient_checkpointing_enable")
    able = able and getattr(model, "supports_gradient_checkpointing", True)
    return RECOMPUTE if able and not _is_checkpointing(model) else ""


def _is_checkpointing(model: nn.Module) -> bool:
    """Whether a model recomputes its activations. Transformers 5 warns of the older name."""
    newer = "is_activation_checkpointing"
    name = newer if hasattr(type(model), newer) else "is_gradient_checkpointing"
    return bool(getattr(model, name, False))


def _table(engine: Any, activations: int) -> Iterator[str]:
    """A line per category and tier: planned bytes between steps, bytes now, and the peak."""
    runtime = engine.runtime
    ledger: Ledger = runtime.ledger
    planned = state_nbytes(runtime.plan, runtime.stage, engine._watch.gathers.rank)
    yield f"  {'':24}{'planned':>10}{'now':>10}{'peak':>10}"
    for tier in TIERS.values():
        for category in (*RESTING, *TEMPORARY):
            plan = planned.get((category, tier))
            now, peak = ledger.nbytes(category, tier), ledger.peak(category, tier)
            if category == TRANSPORT and tier is Tier.DEVICE:
                now, peak = engine._watch.scratch_nbytes, engine._watch.scratch_peak_nbytes
            if plan or now or peak:
                cells = "".join(f"{'' if n is None else mib(n):>10}" for n in (plan, now, peak))
                yield f"  {category + ', ' + tier.name:24}{cells}"
    yield f"  {'others':24}{'':>10}{mib(activations):>10}   activations, temporaries, the program's own"
    if engine.device.type == "cpu":
        yield f"  {host_limits().in_words()}"


def _advice(found: Sequence[Remedy], missing: int, enough: int) -> Iterator[str]:
    if not found:
        yield (
            "No change of stage, micro-batch or offload frees memory here. Use more ranks, or a smaller "
            "or shorter input."
        )
        return
    yield "Changes that free memory, by arithmetic, in the order of assumed slowdown per byte:"
    if found[0].freed_nbytes < enough:
        yield f"  (none of them alone is sure to free the {mib(missing)} MiB that are missing)"
    for number, each in enumerate(found, start=1):
        yield f"  {number}. {each.text}: frees about {mib(each.freed_nbytes)} MiB"
        yield f"     {each.line}"


TIGHT = 0.8
"""A larger part of the free memory for state alone leaves little for activations."""

_UNKNOWN_NBYTES = 1 << 52  # exact in float64


@dataclass(frozen=True, slots=True)
class Need:
    """One rank: its number, its host (a number), bytes that it will allocate, bytes that are free.

    ``held_nbytes``: those that it has already, of what it will have.
    """

    rank: int
    host: int
    new_nbytes: int
    free_nbytes: int
    held_nbytes: int = 0


def passing_nbytes(
    layout: UnitLayout, row: DtypeRow, stage: Stage, *, ranks: int, has_scratch: bool
) -> int:
    """Bytes on the device beside all states when the last unit of a backward is reduced, at least.

    That is the first unit of forward. The gradients of all others are complete then. It has its whole
    parameters where they are sharded, its whole gradient where gradients are, and a transport with memory
    of its own (``has_scratch``) a part of it that arrives or is read by others.
    """
    if ranks == 1:
        return 0
    nbytes = layout.full_numel * row.reduce.itemsize if stage.shards_grads else 0
    nbytes += layout.full_numel * row.param.itemsize if stage.shards_params else 0
    return nbytes + (layout.shard_numel * row.reduce.itemsize if has_scratch else 0)


def new_nbytes(
    planned: Mapping[Key, int], model: nn.Module, device: torch.device, passing: int = 0
) -> int:
    """Bytes on the device that the run needs beyond the model's own parameters there, at least.

    ``planned``: between steps; ``passing``: beside that, at one moment of a step.
    A parameter that is sharded already counts as whole: its shard is in memory, and not more than that.
    """
    kept: dict[int, int] = {}  # by storage, or by sharded parameter
    with torch._C.DisableTorchFunctionSubclass():
        for param in model.parameters():
            local = local_of(param)
            if local.device.type != device.type:
                continue
            if owner_of(param) is not None:
                kept[id(param)] = local.nbytes
            else:
                storage = local.untyped_storage()
                kept[storage._cdata] = storage.nbytes()
    total = sum(nbytes for (_, tier), nbytes in planned.items() if tier is Tier.DEVICE)
    return max(0, total + passing - sum(kept.values()))


@dataclass(frozen=True, slots=True)
class Shortage:
    """Ranks that share memory which surely does not suffice: bytes that they need, and that are free."""

    ranks: Sequence[Need]
    wanted_nbytes: int
    free_nbytes: int
    shared: bool

    @property
    def missing_nbytes(self) -> int:
        """Of each rank."""
        return -((self.free_nbytes - self.wanted_nbytes) // len(self.ranks))

    @property
    def room_nbytes(self) -> int:
        """What each rank can have at most, if all have as much."""
        return self.free_nbytes // len(self.ranks) + min(each.held_nbytes for each in self.ranks)

    @property
    def who(self) -> str:
        """The ranks in words."""
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0].rank}"
        return f"{len(self.ranks)} ranks of one host (from rank {self.ranks[0].rank})"


def check_memory(
    wanted_nbytes: int,
    held_nbytes: int,
    comm: Comm,
    rank: int,
    device: torch.device,
    run: Callable[[], Run],
    search: Callable[[int], Sequence[str]],
) -> list[str]:
    """Refuse a run whose state does not fit. Collective.

    ``held_nbytes``: what the rank has of its state already. ``search``: lines that say how to look for a
    configuration that fits into so many bytes; the same on all ranks.
    Returns lines: nothing, or that the memory is tight.

    Raises:
        HostMemoryError: on all ranks, if one of the devices or hosts has too little memory.
    """
    on_cpu = device.type == "cpu"
    free = host_limits().free_nbytes if on_cpu else ops_of(device).allocatable_nbytes()
    room = _UNKNOWN_NBYTES if free is None else free
    row = [rank, host_number(), wanted_nbytes, room, held_nbytes]
    row_K = torch.tensor(row, dtype=torch.float64).to(device)
    rows = comm.all_gather_small(row_K, name="free memory")
    if is_fake(rows):
        return []
    needs = [Need(*map(int, numbers)) for numbers in read(rows)]
    short, tight = verdict(needs, shared=on_cpu)
    if short is None:
        return tight
    raise HostMemoryError("\n".join([*_refusal(short, run()), *search(short.room_nbytes)]))


def verdict(needs: Sequence[Need], *, shared: bool) -> tuple[Shortage | None, list[str]]:
    """The first ranks whose memory surely does not suffice, and a line if memory is tight.

    ``shared``: the ranks of a host share its memory.
    """
    places: dict[tuple[int, int], list[Need]] = defaultdict(list)
    for need in needs:
        places[need.host, 0 if shared else need.rank].append(need)
    tight: list[str] = []
    for ranks in places.values():
        wanted = sum(need.new_nbytes for need in ranks)
        found = Shortage(ranks, wanted, min(need.free_nbytes for need in ranks), shared)
        if wanted > found.free_nbytes:
            return found, []
        if wanted > TIGHT * found.free_nbytes:
            tight.append(
                f"state will take {size_text(wanted)} of the {size_text(found.free_nbytes)} that are "
                f"free for {found.who}; gathered parameters and activations come on top, and probably do "
                "not fit. `zeroshard plan` tells what the run needs."
            )
    return None, tight[:1]


def _refusal(short: Shortage, run: Run) -> Iterator[str]:
    memory = "host memory" if short.shared else "device memory"
    yield (
        "This run does not fit: parameters, gradients, optimizer state and their temporary copies "
        f"need another {size_text(short.wanted_nbytes)} of {memory} on {short.who}, and "
        f"{size_text(short.free_nbytes)} are free. Nothing was allocated."
    )
    found = remedies(run, short.missing_nbytes)
    if not found:
        yield "More ranks or hosts, or a smaller model, would help; a higher stage would not."
        return
    yield "Each of these frees memory, by arithmetic:"
    if found[0].freed_nbytes < short.missing_nbytes:
        yield "  (none of them alone is enough)"
    for number, each in enumerate(found, start=1):
        yield f"  {number}. {each.text}: about {size_text(each.freed_nbytes)} per rank"
        yield f"     {each.line}"
