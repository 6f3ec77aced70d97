"""Measures the memory that is allocated on this rank, independently of the engine's ledger."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.core.ledger import RESTING
from zeroshard.optim import native_adam

WIDTH = 384
"""64 x 6: on 1, 2, 3 and 6 ranks no parameter, and no unit, needs padding."""

BATCH, TRIVIAL_NBYTES = 2, 16 * 1024


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(x)).relu())
        return x + y


class Stack(nn.Module):
    """Blocks of one size between two linears that belong to the root."""

    def __init__(self, depth: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.out(x)
        return y


def stack_config(
    stage: int, precision: str = "bf16", accumulation: int = 1, **zero: Any
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "units": ["Block"],
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["loss_scale"] = 128
    return config


def micro_step(engine: Any) -> None:
    """Forward and backward of one micro-batch. No tensor of it stays alive."""
    x = torch.ones(BATCH, WIDTH, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().mean())


def storage_sizes(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of each storage behind the tensors, by identity: views of one storage count once."""
    storages = [t.untyped_storage() for t in tensors if isinstance(t, Tensor) and not t.is_sparse]
    return {s._cdata: s.nbytes() for s in storages}


def everything_alive() -> dict[int, int]:
    """Every storage that any Python object of this process can reach."""
    native_adam.wait()  # a thread compares it with torch once, with separate tensors
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():  # sharded parameters hide their storage
        return storage_sizes(o for o in gc.get_objects() if issubclass(type(o), Tensor))


def offload_plan(engine: Any) -> dict[str, int]:
    """Bytes of parameters, masters and optimizer state, from model and optimizer themselves.

    An offloaded parameter shows one element, expanded to its shape. Units have at least 64 elements.
    """
    with torch._C.DisableTorchFunctionSubclass():
        params = storage_sizes(engine.module.parameters())
        params = {key: nbytes for key, nbytes in params.items() if nbytes > 8}
        params |= storage_sizes(unit.shard_S for unit in engine.runtime.units)
        updated = storage_sizes(p for g in engine.optimizer.param_groups for p in g["params"])
    masters = {key: nbytes for key, nbytes in updated.items() if key not in params}
    state = storage_sizes(v for s in engine.optimizer.state.values() for v in s.values())
    return {
        "parameters": sum(params.values()),
        "master": sum(masters.values()),
        "optimizer": sum(state.values()),
    }


def transport_nbytes(engine: Any) -> int:
    """Bytes of tensors that the communicators keep: their memory without the unused ends of blocks."""
    arenas = [comm._ring.arena for comm in engine._watch.comms if getattr(comm, "_ring", None)]
    blocks = [block for arena in arenas for block in arena.blocks.values()]
    unused = sum(block.nbytes - block.bytes.nbytes for block in blocks)
    return int(engine._watch.scratch_nbytes) - unused


def planned(engine: Any) -> dict[str, int]:
    return {
        row.category: row.planned for row in engine.memory_report().rows if row.planned is not None
    }


def measured(engine: Any) -> dict[str, int]:
    return {row.category: row.measured for row in engine.memory_report().rows}


def assert_plan_is_real(
    engine: Any,
    before: dict[int, int],
    *,
    micro: Callable[[Any], None] = micro_step,
) -> None:
    """Train, then check that plan, ledger and census agree to the byte in every category of state.

    ``before``: storages that existed before the model. Besides state and the communicator's scratch
    memory, only trivial tensors may be alive (a learning rate, a loss scale, sampled positions).
    """
    grads_peak = 0
    for _ in range(max(2, engine.accumulation.steps)):
        micro(engine)
        alive = everything_alive()
        new = sum(nbytes for key, nbytes in alive.items() if key not in before)
        known = sum(offload_plan(engine).values()) + transport_nbytes(engine)
        held = engine.runtime.ledger.nbytes("gradients")
        assert 0 <= new - known - held <= TRIVIAL_NBYTES, (new, known, held)
        grads_peak = max(grads_peak, held)
        engine.step()
    plan, ledger = planned(engine), measured(engine)
    listed = {name: ledger[name] for name in RESTING}
    real = {**offload_plan(engine), "gradients": grads_peak}
    assert listed == plan, f"ledger {listed} != plan {plan}"
    assert real == plan, f"census {real} != plan {plan}"
