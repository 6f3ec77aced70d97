"""Ranks of any mesh in one process, without an engine: their units, saves and loads, for tests of
checkpoints.

A model is a table of global tensors. Each simulated rank holds real units and a real optimizer for its
part of them: its pipeline stage, its blocks of split tensors, its shard of each unit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.checkpoint import json_state, rng
from zeroshard.checkpoint.local_state import LocalState, global_shape
from zeroshard.checkpoint.manifest import VALUE
from zeroshard.checkpoint.reader import Source
from zeroshard.checkpoint.restore import Loader, match
from zeroshard.checkpoint.save import no_fault, plan, run
from zeroshard.checkpoint.save_decisions import CheckpointMetadata, Options
from zeroshard.comm.agreement import ControlGroup
from zeroshard.comm.collectives import DONE, Handle, SoloComm
from zeroshard.comm.env import RankInfo
from zeroshard.config.sections import CheckpointConfig
from zeroshard.core.layout import Slot, SlotBlock, pack
from zeroshard.core.ledger import Ledger
from zeroshard.core.mesh import Mesh
from zeroshard.engine.checkpoint_loader import CheckpointLoader, Loaded
from zeroshard.engine.checkpoint_saver import CheckpointSaver, Counters, TrainingState
from zeroshard.optim.inner_optimizer import rebind
from zeroshard.precision.loss_scaler import LossScaler
from zeroshard.precision.policy import DtypeRow
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.life import Life
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.unit import Unit

MOMENTS = ("exp_avg", "exp_avg_sq")
ROW = DtypeRow(
    torch.bfloat16, torch.float32, torch.float32, master=torch.float32, moments=torch.float32
)


@dataclass(frozen=True, slots=True)
class Global:
    """A parameter of the model. ``axis``: that tensor parallelism splits; None: every rank has all."""

    shape: tuple[int, ...]
    axis: int | None = None
    trained: bool = True


def block_tensors(name: str) -> dict[str, Global]:
    """One block: column- and row-split matrices, uneven and replicated ones, and a frozen one."""
    return {
        f"{name}.up.weight": Global((44, 24), 0),
        f"{name}.up.bias": Global((44,), 0),
        f"{name}.down.weight": Global((24, 44), 1),
        f"{name}.norm": Global((24,)),
        f"{name}.odd": Global((5, 33), 0),  # over four ranks: 2, 2, 1 and 0 rows
        f"{name}.experts": Global((3, 10, 7), 2),
        f"{name}.base": Global((13, 9), 1, trained=False),
    }


MODEL: list[tuple[str, dict[str, Global]]] = [
    ("embed", {"embed": Global((37, 24), 0), "nothing": Global((0, 7))}),
    *((f"blocks.{at}", block_tensors(f"blocks.{at}")) for at in range(4)),
    ("head", {"head": Global((24, 37), 1), "gain": Global(())}),
]
"""The layers, in order. The first and the last third belong to the first and the last stage."""

ALIASES = {"embed": ["tied"]}

MESHES = {
    "one rank": Mesh(),
    "dp 8": Mesh(data_shard=8),
    "replicate 2 x shard 4": Mesh(data_replicate=2, data_shard=4),
    "tp 4 x dp 2": Mesh(data_shard=2, tensor=4),
    "pp 4 x dp 2": Mesh(pipeline=4, data_shard=2),
    "pp 2 x dp 2 x tp 2": Mesh(pipeline=2, data_shard=2, tensor=2),
}


@cache
def values() -> dict[str, dict[str, Tensor]]:
    """The global tensors of a run after some steps, by parameter and name."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for _, params in MODEL:
        for fqn, param in params.items():
            names = (VALUE, *MOMENTS) if param.trained else (VALUE,)
            tensors = {name: torch.randn(param.shape, generator=generator) for name in names}
            if not param.trained:
                tensors[VALUE] = tensors[VALUE].bfloat16()
            found[fqn] = tensors
    return found


def steps_of(fqn: str) -> float:
    """The step count of a parameter: a number that depends on its name."""
    return float(3 + sum(map(ord, fqn)) % 5)


class _LocalComm(SoloComm):
    """One rank of a group whose other ranks do not exist: nothing moves."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank = rank  # type: ignore[misc]
        self.size = size  # type: ignore[misc]

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """Only this rank's part arrives."""
        begin = self.rank * shard_S.numel()
        full_N[begin : begin + shard_S.numel()].copy_(shard_S)
        return DONE

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """Every rank has the values."""
        return DONE


@dataclass(eq=False)
class SimulatedRank:
    """One rank of a mesh, and what it holds. ``filled``: with :func:`values`, else with zeros."""

    mesh: Mesh
    rank: int
    filled: bool = True
    resident: bool = False
    local: LocalState = field(init=False)

    def __post_init__(self) -> None:
        at = self.mesh.coordinate(self.rank)
        self.tensor_rank = at["tensor"]
        group = self.mesh.group(self.rank, {"data_shard"})
        comm = _LocalComm(group.index(self.rank), len(group))
        ledger, units = Ledger(), []
        for name, params in _stage(at["pipeline"], self.mesh.pipeline):
            for trained in (True, False):
                own = {fqn: param for fqn, param in params.items() if param.trained == trained}
                if own:
                    units.append(self._unit(name, own, comm, ledger, trained=trained))
        buffers = [
            GradBuffer(unit, comm=comm, ledger=ledger, transient=True)
            for unit in units
            if unit.trainable
        ]
        inner = torch.optim.AdamW([param for b in buffers for param in b.unit.params])
        optimizer = ShardedOptimizer(
            inner, buffers, spans=[()] * len(buffers), shards_optimizer=True, ledger=ledger,
            life=Life(), rebind=rebind, compiles=False,
        )  # fmt: skip
        self.local = LocalState(
            units,
            optimizer,
            lambda slot: (
                at["data_replicate"] == 0
                and (at["tensor"] == 0 or (slot.block is not None and "tensor" in slot.block.split))
            ),
        )
        if self.filled:
            self._fill(inner)

    def _unit(
        self,
        name: str,
        params: Mapping[str, Global],
        comm: _LocalComm,
        ledger: Ledger,
        *,
        trained: bool,
    ) -> Unit:
        cut = {fqn: self._block(param) for fqn, param in params.items()}
        shapes = [(fqn, shape) for fqn, (shape, _) in cut.items()]
        blocks = {fqn: block for fqn, (_, block) in cut.items() if block is not None}
        layout = pack(shapes, num_shards=comm.size, blocks=blocks)
        dtype = ROW.param
        whole = [
            self.part(slot, values()[slot.fqn][VALUE]).to(dtype)
            if self.filled
            else torch.zeros(slot.shape, dtype=dtype)
            for slot in layout.slots
        ]
        return Unit(
            f"{name}.{'trained' if trained else 'frozen'}",
            layout,
            [nn.Parameter(value.clone(), requires_grad=trained) for value in whole],
            positions=range(len(layout.slots)),
            row=ROW,
            trainable=trained,
            resident=self.resident,
            comm=comm,
            ledger=ledger,
            device=torch.device("cpu"),
        )

    def _block(self, param: Global) -> tuple[tuple[int, ...], SlotBlock | None]:
        """The local shape of a parameter, cut as DTensor cuts it, and its block."""
        if param.axis is None or self.mesh.tensor == 1:
            return param.shape, None
        size = param.shape[param.axis]
        step = -(-size // self.mesh.tensor)
        low = min(size, step * self.tensor_rank)
        shape, start = list(param.shape), [0] * len(param.shape)
        largest = prod([*shape[: param.axis], step, *shape[param.axis + 1 :]])
        shape[param.axis], start[param.axis] = min(step, size - low), low
        return tuple(shape), SlotBlock(param.shape, tuple(start), frozenset({"tensor"}), largest)

    @staticmethod
    def part(slot: Slot, whole: Tensor) -> Tensor:
        """The slot's part of a global tensor."""
        if slot.block is None:
            return whole
        places = [slice(a, a + n) for a, n in zip(slot.block.start, slot.shape, strict=True)]
        return whole[tuple(places)].contiguous()

    def _fill(self, inner: torch.optim.Optimizer) -> None:
        for _, slot, value, state in self.fragments():
            with torch._C.DisableTorchFunctionSubclass():  # it refuses writes of programs
                value.copy_(state(VALUE))
            inner.state[value] = {"step": torch.tensor(steps_of(slot.fqn))} | {
                name: state(name).clone().view(value.shape) for name in MOMENTS
            }

    def fragments(self) -> Iterator[tuple[Unit, Slot, Tensor, Callable[[str], Tensor]]]:
        """Every trained fragment: its unit, slot, master, and a function for its expected tensors."""
        assert self.local.optimizer is not None
        for shard in self.local.optimizer.shards:
            for f in shard.fragments:
                slot = shard.unit.layout.slots[f.index]

                def expected(name: str, slot: Slot = slot, f: Any = f) -> Tensor:
                    flat = self.part(slot, values()[slot.fqn][name]).view(-1)
                    return flat[f.begin : f.begin + f.numel].view(f.value.shape)

                yield shard.unit, slot, f.value, expected

    def load(self, source: Source) -> None:
        """Fill everything from ``source``."""
        shapes = {s.fqn: global_shape(s) for unit in self.local.units for s in unit.layout.slots}
        names = match(source, shapes, strict=True, elsewhere=tuple(values()))
        loader = Loader(self.local, source, names, with_state=True, max_buffer_nbytes=1 << 12)
        loader.fill()
        if loader.failure is not None:
            raise loader.failure

    def wrong(self) -> list[str]:
        """What differs from :func:`values` in any bit. Raises if this rank holds nothing."""
        assert self.local.optimizer is not None
        found, checked = [], 0
        for unit, slot, value, expected in self.fragments():
            state = self.local.optimizer.inner.state.get(value, {})
            checked += 1
            here = {VALUE: value, **{name: state.get(name) for name in MOMENTS}}
            for name, tensor in here.items():
                if tensor is None or not torch.equal(tensor, expected(name)):
                    found.append(f"{name} of {slot.fqn} in {unit.name}")
            if state.get("step") != steps_of(slot.fqn):
                found.append(f"step of {slot.fqn}")
        for unit in self.local.units:
            slots = {slot.fqn: slot for slot in unit.layout.slots}
            for f in unit.layout.fragments(unit.comm.rank):
                checked += 1
                value = self.part(slots[f.fqn], values()[f.fqn][VALUE]).view(-1)
                here = unit.shard_S[f.at : f.at + f.numel]
                if not torch.equal(here, value[f.begin : f.begin + f.numel].to(here.dtype)):
                    found.append(f"{f.fqn} in the shard of {unit.name}")
        assert checked
        return found

    def buffers(self) -> dict[str, Tensor]:
        """One buffer that each stage has for itself, and one with other values for other samples."""
        stage = self.mesh.coordinate(self.rank)["pipeline"]
        found = {
            f"{name}.seen": torch.tensor(len(name)) for name, _ in _stage(stage, self.mesh.pipeline)
        }
        last = stage == self.mesh.pipeline - 1
        return found | ({"mean": torch.tensor(self.mesh.dp_rank(self.rank))} if last else {})

    def metadata(self) -> CheckpointMetadata:
        """What an engine would add to a save. The generators are those of the rank's samples."""
        dp_rank = self.mesh.dp_rank(self.rank)
        state = torch.Generator().manual_seed(dp_rank).get_state()
        own, own_tensors = json_state.encode({"rng": {"torch": state}}, where="rank")
        dp_ranks = [self.mesh.dp_rank(rank) for rank in range(self.mesh.world_size)]
        return CheckpointMetadata(
            step=3,
            stage=3,
            writer={"zeroshard": "test"},
            aliases=ALIASES if any(slot.fqn == "embed" for slot in self._slots()) else {},
            shared={"counters": {"global_steps": 3}},
            shared_tensors={},
            own=own,
            own_tensors=own_tensors,
            buffers=self.buffers(),
            mesh=rng.mesh_text(self.mesh),
            dp_ranks=() if self.mesh.is_data_only else dp_ranks,
        )

    def _slots(self) -> list[Slot]:
        return [slot for unit in self.local.units for slot in unit.layout.slots]

    def save(
        self,
        root: Path,
        tag: str,
        control_group: ControlGroup,
        *,
        options: Options | None = None,
        at: Callable[[str], None] = no_fault,
    ) -> None:
        """Take part in a save."""
        task = plan(
            root,
            tag,
            local=self.local,
            control_group=control_group,
            metadata=self.metadata,
            options=options or Options(),
            at=at,
        )
        run(task)


class EnginePart:
    """The checkpoint saver and loader of an engine, for a simulated rank. ``module`` has its buffers."""

    def __init__(self, rank: SimulatedRank, control_group: ControlGroup) -> None:
        assert rank.local.optimizer is not None
        info = RankInfo(rank.rank, rank.mesh.world_size)
        self.module = nn.Module()
        for name, buffer in rank.buffers().items():
            *path, leaf = name.split(".")
            owner = self.module
            for step in path:
                if step not in owner._modules:
                    owner.add_module(step, nn.Module())
                owner = owner.get_submodule(step)
            owner.register_buffer(leaf, buffer.clone())
        inner = rank.local.optimizer.inner
        self.state = TrainingState(
            Counters(global_steps=3), self.module, inner, inner.param_groups, LossScaler(), None,
            None, accumulation_steps=1,
        )  # fmt: skip
        section, device = CheckpointConfig(), torch.device("cpu")
        self.saver = CheckpointSaver(
            section, stage=3, local=rank.local, control_group=control_group, rank_info=info,
            device=device, ledger=Ledger(), uses_disk=False, mesh=rank.mesh,
        )  # fmt: skip
        self.loader = CheckpointLoader(
            section, local=rank.local, comm=_LocalComm(rank.rank, rank.mesh.world_size),
            control_group=control_group, rank_info=info, device=device, life=Life(), mesh=rank.mesh,
        )  # fmt: skip

    def save(self, root: Path, tag: str) -> None:
        """As an engine does."""
        self.saver.save(
            root, tag, {"note": tag}, self.state, save_latest=True, exclude_frozen=False
        )

    def load(self, root: Path, tag: str, *, strict: bool = True) -> Loaded:
        """As an engine does."""
        found = self.loader.load(
            root, tag, self.state, strict=strict, optimizer_states=True, scheduler_states=True,
            module_only=False, missing_ok=False,
        )  # fmt: skip
        assert found is not None
        return found


def _stage(stage: int, stages: int) -> Sequence[tuple[str, dict[str, Global]]]:
    """The layers of one pipeline stage."""
    first, *blocks, last = MODEL
    count = len(blocks) // stages
    own = blocks[stage * count : (stage + 1) * count]
    return [*([first] if stage == 0 else []), *own, *([last] if stage == stages - 1 else [])]


def simulate(mesh: Mesh, **keys: Any) -> list[SimulatedRank]:
    """All ranks of a mesh."""
    return [SimulatedRank(mesh, rank, **keys) for rank in range(mesh.world_size)]


def on_threads(ranks: Sequence[SimulatedRank], act: Callable[..., None]) -> list[Exception | None]:
    """Call ``act(rank, control_group)`` for all ranks at once, each on a thread. Returns their errors."""
    store = dist.HashStore()
    errors: list[Exception | None] = [None] * len(ranks)

    def body(rank: SimulatedRank) -> None:
        group = ControlGroup(
            store if len(ranks) > 1 else None, rank=rank.rank, size=len(ranks), timeout_s=20
        )
        try:
            act(rank, group)
        except Exception as error:
            errors[rank.rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def save_all(ranks: Sequence[SimulatedRank], root: Path, tag: str, **keys: Any) -> Path:
    """Save with all ranks of a mesh. Returns the checkpoint's directory."""
    for error in on_threads(ranks, lambda rank, group: rank.save(root, tag, group, **keys)):
        if error is not None:
            raise error
    return root / tag
