"""Compares plans with real runs of two and three ranks; writes the tables of ``docs/plan-reference.md``.

    python tools/plan_check.py                    # all parts; takes tens of minutes on two cores
    python tools/plan_check.py --part process     # one part
    python tools/plan_check.py --write            # also the page, and the JSON of all rows

Small models of Transformers with random weights, on the CPU. A row that differs in anything but the peak,
or whose peak is farther off than allowed, ends the tool. Needs Transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from zeroshard_testing.ranks import run_ranks

import zeroshard
from zeroshard.comm import shm, shm_ring
from zeroshard.comm.process_group import ProcessGroupComm
from zeroshard.comm.shared_memory import window_listeners
from zeroshard.comm.simulation import lone_rank
from zeroshard.core.mesh import Mesh
from zeroshard.memory.storage import resize_listeners
from zeroshard.planner.allocations import Allocations
from zeroshard.planner.model_source import cut_evenly, loss_of
from zeroshard.planner.simulate import observe, simulate
from zeroshard.planner.simulated import Simulation
from zeroshard.sequence import register

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/plan-reference.md", ROOT / "benchmarks/results/plan-check.json"

TOLERANCE = 0.02
"""How far a planned peak may be from that of the followed tensors of the run, as a fraction."""

PROCESS_TOLERANCE = 0.05
"""How far it may be from the growth of the process."""

INIT_SLACK = 1.1

LATE_S = 60.0
"""How long the thread of a transport may keep a tensor after its collective."""


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of its batch."""

    width: int = 64
    layers: int = 2
    words: int = 512
    batch: int = 4
    tokens: int = 32


SMALL, LARGE = Size(), Size(width=384, layers=4, words=8192, batch=4, tokens=128)
DEEP = Size(width=512, layers=8, words=1024)
"""The largest module is a block, not the table of words."""

_IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}


def _gpt2(size: Size) -> dict[str, int]:
    return {"n_layer": size.layers, "n_embd": size.width, "n_head": 2, "n_positions": size.tokens}


def _bert(size: Size) -> dict[str, int]:
    return {
        "hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": 2,
        "intermediate_size": 2 * size.width,
    }  # fmt: skip


def _llama(size: Size) -> dict[str, int]:
    return {**_bert(size), "num_key_value_heads": 2}


def _t5(size: Size) -> dict[str, int]:
    half = size.width // 2
    return {
        "d_model": size.width, "d_ff": 2 * size.width, "num_layers": size.layers, "num_heads": 2,
        "d_kv": half,
    }  # fmt: skip


def _whisper(size: Size) -> dict[str, int]:
    ends = {f"{side}_layers": size.layers for side in ("encoder", "decoder")}
    ends |= {f"{side}_ffn_dim": 2 * size.width for side in ("encoder", "decoder")}
    ends |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    return {"d_model": size.width, "max_source_positions": size.tokens, **ends}


FAMILIES: dict[str, tuple[str, Callable[[Size], dict[str, int]]]] = {
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "llama": ("LlamaForCausalLM", _llama),
    "bert": ("BertForMaskedLM", _bert),
    "t5": ("T5ForConditionalGeneration", _t5),
}
"""The class in Transformers of each family, and its sizes."""

OTHERS: dict[str, tuple[str, Callable[[Size], dict[str, int]]]] = {
    "whisper": ("WhisperForConditionalGeneration", _whisper)
}
"""Models that a test compares too, and no table."""


@dataclass(frozen=True)
class Case:
    """One run. ``offload``: where the optimizer is between steps; "nvme": parameters too at stage 3.

    ``tensor``: of the ranks, how many a model is cut over. ``pipeline``: pipeline stages, each with as
    many blocks, and four micro-batches in a step. ``sequence``: ranks that share the tokens.
    ``packed``: a row has two samples, one after the other.
    """

    family: str
    stage: int
    checkpointed: bool
    offload: str = "none"
    transport: str = "p2p"
    ranks: int = 2
    size: Size = SMALL
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    packed: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        words = [self.family, f"stage {self.stage}", self.transport, f"{self.ranks} ranks"]
        words += ["checkpointed"] * self.checkpointed + [self.offload] * (self.offload != "none")
        words += [f"tensor {self.tensor}"] * (self.tensor > 1)
        words += [f"pipeline {self.pipeline}"] * (self.pipeline > 1)
        words += [f"sequence {self.sequence}"] * (self.sequence > 1) + ["packed"] * self.packed
        return ", ".join(words)


ALL = [
    Case(family, stage, checkpointed, offload, transport, ranks)
    for family, stage, checkpointed, offload, transport, ranks in itertools.product(
        FAMILIES, range(4), (False, True), ("none", "cpu"), ("shm", "p2p"), (2, 3)
    )
    if stage or offload == "none"
]
"""Without offload at stage 0, which is a mistake in a configuration."""

ON_DISK = [
    Case(family, stage, False, "nvme", transport, ranks)
    for family, (stage, transport, ranks) in itertools.product(
        FAMILIES, ((1, "p2p", 3), (2, "shm", 2), (3, "p2p", 2), (3, "shm", 3))
    )
]


CUT = [
    Case(
        "llama", stage, False, "none", "shm" if stage % 2 == ranks // 4 else "p2p", ranks, tensor=2
    )
    for stage, ranks in itertools.product(range(4), (2, 4))
]


OVER_GLOO = [
    Case(family, stage, False, "none", "stock", ranks)
    for family, stage, ranks in itertools.product(("gpt2", "llama"), (1, 2, 3), (2, 3))
]


PIPED = [
    Case("llama", stage, ranks == 4, "none", "p2p", ranks, pipeline=2)
    for stage, ranks in ((0, 2), (1, 4), (2, 2), (3, 4))
] + [Case("gpt2", stage, False, "none", "p2p", 2, pipeline=2) for stage in (1, 2)]
"""Messages go through the process group: the blocks of shared memory for them are not planned."""


def covering() -> list[Case]:
    """16 cases. Every two values that can be together in a case are so in one of them."""
    return [
        Case(
            family,
            stage,
            (at + stage) % 2 == 1,
            "cpu" if stage and (at // 2 + stage) % 2 else "none",
            "shm" if (at // 2 + at + stage // 2) % 2 else "p2p",
            3 if (at + stage // 2) % 2 else 2,
        )
        for at, family in enumerate(FAMILIES)
        for stage in range(4)
    ]


def build(case: Case, *, init: bool = False) -> Callable[[], nn.Module]:
    """A function that makes the model of a case; ``init``: sharded from the start, in bf16."""
    import transformers

    name, sizes = (FAMILIES | OTHERS)[case.family]

    def made() -> nn.Module:
        config = transformers.AutoConfig.for_model(
            case.family, vocab_size=case.size.words, **_IDS, **sizes(case.size)
        )
        config.use_cache = False
        sharded = (
            zeroshard.zero.Init(config_dict_or_path=settings(case), dtype=torch.bfloat16)
            if init
            else contextlib.nullcontext()
        )
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if init else usual)
        try:
            with sharded:
                model: Any = getattr(transformers, name)(config)
        finally:
            torch.set_default_dtype(usual)
        if case.checkpointed:
            model.gradient_checkpointing_enable()
        found: nn.Module = model.train()
        return cut_evenly(found, case.pipeline) if case.pipeline > 1 else found

    return made


def settings(case: Case, folder: str = "/tmp") -> dict[str, Any]:
    """The configuration of a case."""
    zero: dict[str, Any] = {"stage": case.stage}
    if case.offload != "none":
        place = {"device": case.offload} | ({"nvme_path": folder} if case.offload == "nvme" else {})
        zero["offload_optimizer"] = place
        if case.stage == 3 and case.offload == "nvme":
            zero["offload_param"] = place
    cut: dict[str, Any] = {}
    if case.tensor > 1:
        cut["tensor_parallel"] = {"autotp_size": case.tensor}
    if case.pipeline > 1:
        cut |= {"parallel": {"pipeline": case.pipeline}, "gradient_accumulation_steps": 4}
    if case.sequence > 1:
        cut["parallel"] = {**cut.get("parallel", {}), "sequence": case.sequence}
    return cut | {
        "train_micro_batch_size_per_gpu": case.size.batch,
        "gradient_clipping": 1.0,
        "transport": case.transport,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }


def _batch(case: Case, rank: int = 0) -> tuple[dict[str, torch.Tensor], None]:
    size, tokens = case.size, case.size.tokens // case.sequence
    ids = torch.randint(2, size.words, (size.batch, tokens))
    if case.family == "whisper":  # two frames of 80 frequencies for each position
        return {"input_features": torch.randn(size.batch, 80, 2 * tokens), "labels": ids}, None
    batch = {"input_ids": ids, "labels": ids.clone()}
    if case.packed:
        batch["position_ids"] = torch.arange(tokens // 2).repeat(size.batch, 2)
    elif case.sequence > 1:
        first = rank % case.sequence * tokens
        batch["position_ids"] = torch.arange(first, first + tokens).repeat(size.batch, 1)
    return batch, None


# ------------------------------------------------------------------ tensors


@contextlib.contextmanager
def in_lockstep(path: str) -> Iterator[None]:
    """All ranks begin and end each wait for shared memory together, as a plan takes them to do.

    How many blocks of shared memory a rank needs depends on how far the others are. ``path``: an empty
    file, through which the ranks meet.
    """
    wait, rank, size = shm_ring.Pending.wait, dist.get_rank(), dist.get_world_size()
    met = torch.from_file(path, shared=True, size=size, dtype=torch.int64)

    def meet() -> None:
        met[rank] += 1
        while int(met.min()) < int(met[rank]):
            time.sleep(1e-4)

    def together(pending: Any) -> None:
        if getattr(pending.complete, "func", shm.read_small) is shm.read_small:  # only readers wait
            wait(pending)
            return
        with _disable_current_modes():
            meet()
        wait(pending)
        with _disable_current_modes():
            meet()

    shm_ring.Pending.wait = together  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        shm_ring.Pending.wait = wait  # type: ignore[method-assign]


@contextlib.contextmanager
def no_late_references() -> Iterator[None]:
    """Waits for gloo return when gloo's thread has let go of the tensors, as a plan takes them to do.

    That thread first says that a collective is done, and then drops its references. So a tensor that is
    freed right after may live on for as long as the system lets the thread wait.

    Functional collectives, those of DTensors, are done when they return.
    """
    all_reduce, start = dist.all_reduce, ProcessGroupComm._start

    def waiting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        held = _References([tensor])
        result = all_reduce(tensor, *args, **kwargs)
        held.wait()
        return result

    def starting(comm: Any, item: Any, call: Any, *args: Any) -> Any:
        held = _References([each for each in args if isinstance(each, torch.Tensor)])
        handle = start(comm, item, call, *args)
        return held.after(handle) if comm.transport == "stock:gloo" else handle

    dist.all_reduce = waiting
    ProcessGroupComm._start = starting  # type: ignore[method-assign, assignment]
    try:
        with _FunctionalWaits():
            yield
    finally:
        dist.all_reduce = all_reduce
        ProcessGroupComm._start = start  # type: ignore[method-assign]


class _FunctionalWaits(TorchDispatchMode):
    """Ends each functional collective before it returns, and waits for its late references."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        result = func(*args, **(kwargs or {}))
        if func.namespace != "_c10d_functional" or "wait_tensor" in func.name():
            return result
        results = [result] if isinstance(result, torch.Tensor) else result
        held = _References.of_new(results)  # gloo holds views of what it gathers
        for each in results:
            torch.ops._c10d_functional.wait_tensor(each)
        held.wait()
        return result


def _references(tensor: torch.Tensor) -> int:
    return int(tensor._use_count())  # type: ignore[attr-defined]


def _references_with_views(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    views = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return _references(tensor) + int(views)


class _References:
    """How often tensors are referred to. ``wait``: until it is no more often than at first."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._counts = [(tensor, _references(tensor)) for tensor in tensors]
        self._count = _references
        self._handle: Any = None

    @classmethod
    def of_new(cls, tensors: Sequence[torch.Tensor]) -> _References:
        """Of tensors that nobody but the caller should hold, nor views of them."""
        made = cls(())
        alone = _references_with_views(torch.empty(0))
        made._counts = [(tensor, alone) for tensor in tensors]
        made._count = _references_with_views
        return made

    def after(self, handle: Any) -> _References:
        """Wait for this collective first."""
        self._handle = handle
        return self

    def wait(self) -> None:
        """Return when nobody else holds the tensors."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
            del handle
        counts, self._counts = self._counts, []
        end_s = time.monotonic() + LATE_S
        while any(self._count(tensor) > before for tensor, before in counts):
            if time.monotonic() > end_s:
                raise RuntimeError(
                    f"A collective is done, and its tensors are still held after {LATE_S} s."
                )
            time.sleep(1e-4)


def _observe(case: Case, folder: str, path: str, lockstep: bool) -> None:
    shared = lockstep and case.transport == "shm"
    held = in_lockstep(path + ".met") if shared else contextlib.nullcontext()
    if case.sequence > 1:
        groups = [range(at, at + case.sequence) for at in range(0, case.ranks, case.sequence)]
        register("sdpa", dist.new_subgroups_by_enumeration([list(own) for own in groups])[0])
    with held, no_late_references():
        found = observe(
            build(case),
            settings(case, folder),
            _batch(case, dist.get_rank()),
            loss_fn=loss_of,
            steps=3,
        )
    Path(f"{path}.{found.rank}").write_bytes(pickle.dumps(found))


def run_and_plan(case: Case, *, lockstep: bool = True) -> tuple[Simulation, Simulation]:
    """What rank 0 of a real run needed, and what its plan says."""
    return run_and_plans(case, [0], lockstep=lockstep)[0]


def run_and_plans(
    case: Case, ranks: Sequence[int], *, lockstep: bool = True
) -> list[tuple[Simulation, Simulation]]:
    """What these ranks of a real run needed, and what their plans say."""
    with swap_folder() as folder:
        place = str(Path(folder) / "found")
        run_ranks(_observe, case.ranks, case, folder, place, lockstep, timeout=300)
        files = [Path(f"{place}.{rank}") for rank in ranks]
        real = [pickle.loads(file.read_bytes()) for file in files]  # our own files
    return [(found, planned(case, rank)) for found, rank in zip(real, ranks, strict=True)]


def swap_folder() -> tempfile.TemporaryDirectory[str]:
    """For swap files. Not in /tmp, which may be memory."""
    return tempfile.TemporaryDirectory(dir=Path.home())


def planned(case: Case, rank: int = 0) -> Simulation:
    """The plan of a rank."""
    data = case.ranks // case.tensor // case.pipeline // case.sequence
    mesh = Mesh(case.pipeline, data_shard=data, sequence=case.sequence, tensor=case.tensor)
    return simulate(
        build(case), settings(case), _batch(case, rank), mesh=mesh, rank=rank, loss_fn=loss_of, steps=3,
        plan="auto" if case.tensor > 1 else None,
    )  # fmt: skip


def differences(real: Simulation, plan: Simulation) -> list[str]:
    """In what a plan differs from its run, in words: bytes of states and temporaries, traffic, order."""
    return [
        f"{key}: real {ours.get(key)!r}, planned {said.get(key)!r}"
        for table in (_held, _moved, _files, _order)
        for ours, said in [(table(real), table(plan))]
        for key in {**ours, **said}
        if ours.get(key) != said.get(key)
    ]


def _held(found: Simulation) -> dict[tuple[str, ...], Any]:
    return {(row.category, row.tier): row.measured for row in found.memory}


def _moved(found: Simulation) -> dict[tuple[str, ...], Any]:
    return {
        (row.group, row.op, row.name): (row.calls, row.numel, row.sent_numel)
        for row in found.traffic
    }


def _files(found: Simulation) -> dict[tuple[str, ...], Any]:
    read, written = found.swapped
    return {("files",): found.file_nbytes, ("read",): read, ("written",): written}


def _order(found: Simulation) -> dict[tuple[str, ...], Any]:
    return {
        ("order of collectives", name, str(group)): n
        for (name, group), n in found.histories.items()
    }


def offs(real: Simulation, plan: Simulation) -> dict[str, float]:
    """Of each phase, how far the planned peak is above the real one, as a fraction.

    That of the device, and that of device and host memory together.
    """
    on_device = {
        name: plan.moments[name].device_nbytes / moment.device_nbytes - 1
        for name, moment in real.moments.items()
    }
    together = {
        f"{name}, with the host": plan.together[name] / nbytes - 1
        for name, nbytes in real.together.items()
    }
    return on_device | together


def tensor_row(case: Case) -> dict[str, Any]:
    """A run whose tensors are followed, and its plan. With state on disk, host memory counts too."""
    return _compared(case, *run_and_plan(case))


def stages_row(case: Case) -> dict[str, Any]:
    """A run of a pipeline, one rank of each stage: that whose peak is farthest off."""
    firsts = range(0, case.ranks, case.ranks // case.pipeline)
    rows = [_compared(case, *each) for each in run_and_plans(case, firsts)]
    return max(rows, key=lambda row: abs(row["off"]))


def _compared(case: Case, real: Simulation, plan: Simulation) -> dict[str, Any]:
    where = f"{case.name}, rank {real.rank}"
    if wrong := differences(real, plan):
        sys.exit(f"{where}: {wrong}")
    off = offs(real, plan)
    worst = max(off.items(), key=lambda item: abs(item[1]))
    if abs(worst[1]) > TOLERANCE:
        sys.exit(f"{where}: the planned peak of {worst[0]} is {worst[1]:+.2%} off")
    peak = whole_peak if case.offload == "nvme" else attrgetter("peak_nbytes")
    return {
        **_row(case), "real_nbytes": peak(real), "planned_nbytes": peak(plan),
        "off": peak(plan) / peak(real) - 1, "worst_phase": worst[0], "worst_off": worst[1],
        "transport_nbytes": plan.nbytes("transport"),
    }  # fmt: skip


def whole_peak(found: Simulation) -> int:
    """The most bytes of device and host memory in a step."""
    return max(nbytes for name, nbytes in found.together.items() if name != "init")


def _row(case: Case) -> dict[str, Any]:
    return {key: value for key, value in asdict(case).items() if key != "size"}


# ------------------------------------------------------------------ processes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_PERTURB = -1, -3, -6  # from malloc.h
BLOCK_NBYTES = 64 << 10
"""Freed blocks from this size on go back to the system."""

LOOK_FROM_NBYTES, PAGE_NBYTES = 512 << 10, 4096


def return_all_blocks() -> None:
    """Let the C library return freed blocks to the system, else the process has them."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(_M_MMAP_THRESHOLD, BLOCK_NBYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, 128 << 10)
    libc.malloc_trim(0)


def process_nbytes() -> int:
    """Anonymous and shared memory of this process; of shared pages, its share."""
    text = Path("/proc/self/smaps_rollup").read_text()
    rows = {line.split(":")[0]: line.split()[1] for line in text.splitlines()[1:]}
    return 1024 * (int(rows["Pss_Anon"]) + int(rows["Pss_Shmem"]))


class Looks(TorchDispatchMode):
    """Looks at the process after each operation that returns much memory, and after each gather.

    The size that the kernel counts all the time says when the slower look is worth it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_nbytes = self._resident_nbytes = 0

    def look(self, *_: Any) -> None:
        """Look now."""
        resident_nbytes = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_NBYTES
        if resident_nbytes >= self._resident_nbytes + LOOK_FROM_NBYTES:
            self._resident_nbytes = resident_nbytes
            self.peak_nbytes = max(self.peak_nbytes, process_nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.nbytes >= LOOK_FROM_NBYTES:
            self.look()
        return result


def _train(case: Case, folder: str, steps: int, looks: Looks | None) -> None:
    model = build(case)()
    batch, _ = _batch(case)
    engine, *_ = zeroshard.initialize(model=model, config=settings(case, folder))
    for last in reversed(range(steps)):
        return_all_blocks()  # holes that the construction and earlier steps left in the heap
        with looks if looks is not None and not last else contextlib.nullcontext():
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            del loss
    engine.close()


def write_all_blocks() -> None:
    """Let the C library write every block when it is allocated, so that all its pages are in memory."""
    ctypes.CDLL("libc.so.6").mallopt(_M_PERTURB, 1)


def _grow(case: Case, folder: str, written: bool) -> int:
    """By how much the process of this rank grows in the last of three steps, at most."""
    if written:
        write_all_blocks()
    return_all_blocks()
    looks = Looks()
    _train(replace(case, size=SMALL), folder, 2, None)  # imports, threads, compiled kernels
    for _ in range(3):
        gc.collect()
    return_all_blocks()
    dist.barrier()
    before = process_nbytes()
    for listeners in (resize_listeners, window_listeners):
        listeners.append(looks.look)  # type: ignore[attr-defined]
    try:
        _train(case, folder, 3, looks)
    finally:
        for listeners in (resize_listeners, window_listeners):
            listeners.remove(looks.look)  # type: ignore[attr-defined]
    grown: int = looks.peak_nbytes - before
    return grown


def process_row(case: Case, *, written: bool = False) -> dict[str, Any]:
    """A run that is not followed, the mean growth of its processes, and its plan.

    ``written``: all pages of a block count from its allocation on, as on a GPU; otherwise those that
    have been written.
    """
    with swap_folder() as folder:
        grown = run_ranks(_grow, case.ranks, case, folder, written, timeout=500)
    plan = whole_peak(planned(case))
    mean = sum(grown) / len(grown)
    off = plan / mean - 1
    if abs(off) > PROCESS_TOLERANCE:
        print(f"{case.name}: {plan} planned, {grown} real: {off:+.2%}", file=sys.stderr)
    return {**_row(case), "real_nbytes": round(mean), "planned_nbytes": plan, "off": off}


# ------------------------------------------------------------------ construction


def _constructed(case: Case) -> int:
    with Allocations(lambda *_: None, real=True) as watch:
        build(case, init=True)()
    peak_nbytes: int = watch.moments["init"].device_nbytes
    return peak_nbytes


def init_row(case: Case) -> dict[str, Any]:
    """The peak of a construction under ``zero.Init``, real and planned, and its bound."""
    real = max(run_ranks(_constructed, case.ranks, case, timeout=200))
    with lone_rank(0, case.ranks), FakeTensorMode(), Allocations(lambda *_: None) as watch:
        model = build(case, init=True)()
    numel = sum(param.numel() for param in model.parameters())
    blocks = [
        block for m in model.modules() if isinstance(m, nn.ModuleList) for block in m.children()
    ]
    largest = max(sum(param.numel() for param in block.parameters()) for block in blocks)
    plan = watch.moments["init"].device_nbytes
    bound = (2 * numel / case.ranks + 2 * largest) * INIT_SLACK
    return {**_row(case), "real_nbytes": real, "planned_nbytes": plan, "bound_nbytes": round(bound)}


# ------------------------------------------------------------------ the page


_PROCESSES = [replace(case, size=LARGE) for case in covering()]

PARTS: dict[str, tuple[list[Case], Callable[[Case], dict[str, Any]]]] = {
    "tensors": (ALL, tensor_row),
    "cut": (CUT, tensor_row),
    "stock": (OVER_GLOO, tensor_row),
    "pipeline": (PIPED, stages_row),
    "disk": (ON_DISK, tensor_row),
    "process": (_PROCESSES, process_row),
    "process written": (_PROCESSES, partial(process_row, written=True)),
    "disk process": ([replace(case, size=LARGE) for case in ON_DISK], process_row),
    "init": (
        [Case(family, 3, False, ranks=ranks, size=DEEP) for family in FAMILIES for ranks in (2, 3)],
        init_row,
    ),
}


def _summary(part: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    if part == "init":
        yield "| model | ranks | real peak | planned | bound |"
        yield "|---|--:|--:|--:|--:|"
        for row in rows:
            cells = (row[key] for key in ("real_nbytes", "planned_nbytes", "bound_nbytes"))
            yield (
                f"| {row['family']} | {row['ranks']} | "
                + " | ".join(f"{n:,}" for n in cells)
                + " |"
            )
        return
    yield "| model | runs | equal to the byte | off, lowest | median | highest |"
    yield "|---|--:|--:|--:|--:|--:|"
    for family in FAMILIES:
        found = [row for row in rows if row["family"] == family]
        if not found:
            continue
        off = [row["off"] for row in found]
        equal = sum(row["real_nbytes"] == row["planned_nbytes"] for row in found)
        yield (
            f"| {family} | {len(found)} | {equal} | {min(off):+.2%} | {median(off):+.2%} | "
            f"{max(off):+.2%} |"
        )
    yield ""
    if "worst_off" in rows[0]:
        worst = max((row["worst_off"] for row in rows), key=abs)
        yield f"{len(rows)} runs. Of all peaks of phases, the one that is farthest off is {worst:+.2%}."
    else:
        within = sum(abs(row["off"]) <= PROCESS_TOLERANCE for row in rows)
        yield f"{within} of {len(rows)} are within {PROCESS_TOLERANCE:.0%}."


def main() -> None:
    """Compare all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part")
    parser.add_argument(
        "--write", action="store_true", help="put tables into the page, rows into JSON"
    )
    given = parser.parse_args()
    # MKL keeps buffers of its kernels: 6 to 7 MB in the first run of a process with such matrices, none
    # in the next one. No plan has them.
    os.environ["MKL_DISABLE_FAST_MM"] = "1"  # ranks inherit it
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(BLOCK_NBYTES)  # engines leave it
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    tables = {}
    for part in given.part or PARTS:
        cases, row_of = PARTS[part]
        rows = results[part] = []
        for case in cases:
            rows.append(row_of(case))
            print(rows[-1], file=sys.stderr, flush=True)
        tables[part] = "\n".join(_summary(part, rows))
        print(tables[part])
    if given.write:
        RESULTS.write_text(json.dumps(results, indent=0) + "\n")
        PAGE.write_text(filled(PAGE.read_text(), tables))


def filled(page: str, tables: Mapping[str, str]) -> str:
    """The page with these tables, by part."""
    for part, table in tables.items():
        begin, end = (f"<!-- plan_check.py {part}: {edge} -->" for edge in ("begin", "end"))
        page = f"{page.split(begin, maxsplit=1)[0]}{begin}\n{table}\n{end}{page.split(end)[1]}"
    return page


if __name__ == "__main__":
    main()
