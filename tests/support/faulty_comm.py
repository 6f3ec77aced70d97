"""A communicator for tests that makes one rank fail at one collective.

comm = FaultyComm(comm, Fault("kill", rank=1, name="layers.0"))
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from support.interpreter_lock import hold
from zeroshard.comm.collectives import DONE, Comm, Handle
from zeroshard.comm.recorder import Recorder

KINDS = (
    *("skip", "swap", "bytes", "dtype", "operation"),
    *("raise", "kill", "abort", "exit", "freeze", "hold", "late"),
)


@dataclass(frozen=True)
class Fault:
    """What happens on ``rank`` (inside the group) at the ``at``-th call named ``name``, from 1.

    ``skip``: the call is not made. ``swap``: from then on, calls named ``name`` are named ``other`` and
    the reverse, which is as if two units of the same size were run in another order. ``bytes``,
    ``dtype``, ``operation``: the call has another size, dtype or operation under the same name.
    ``raise``: an exception. ``kill``, ``abort``, ``exit``: SIGKILL, SIGABRT, ``os._exit(0)``.
    ``freeze``: SIGSTOP. ``hold``: holds the interpreter lock for ``seconds``. ``late``: sleeps for
    ``seconds``.
    """

    kind: str
    rank: int
    name: str
    at: int = 1
    other: str = ""
    seconds: float = 5.0


class InjectedError(RuntimeError):
    """The exception of ``Fault("raise")``."""


class FaultyComm:
    """A communicator whose calls fail as ``faults`` say. It passes all other calls on unchanged."""

    def __init__(self, inner: Comm, *faults: Fault) -> None:
        for fault in faults:
            if fault.kind not in KINDS:
                raise ValueError(f"fault {fault.kind!r}: use one of {', '.join(KINDS)}")
        self.inner = inner
        self.size = inner.size
        self.rank = inner.rank
        self.transport = inner.transport
        self.recorder: Recorder = inner.recorder
        self._faults = [fault for fault in faults if fault.rank == inner.rank]
        self._calls: Counter[str] = Counter()
        self._names: dict[str, str] = {}

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """The inner communicator's, or the fault."""
        fault, name = self._strike(name)
        if fault is None:
            return self.inner.all_gather(full_N, shard_S, name=name)
        if fault.kind == "bytes":
            full_N, shard_S = full_N.new_empty(2 * full_N.numel()), torch.cat([shard_S, shard_S])
        elif fault.kind == "dtype":
            full_N, shard_S = _other_dtype(full_N), _other_dtype(shard_S)
        elif fault.kind == "operation":
            return self.inner.reduce_scatter(torch.empty_like(shard_S), full_N, name=name)
        else:
            return DONE
        return self.inner.all_gather(full_N, shard_S, name=name)

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """The inner communicator's, or the fault."""
        fault, name = self._strike(name)
        if fault is None:
            return self.inner.reduce_scatter(out_S, full_N, name=name)
        if fault.kind == "bytes":
            out_S, full_N = torch.cat([out_S, out_S]), torch.cat([full_N, full_N])
        elif fault.kind == "dtype":
            out_S, full_N = _other_dtype(out_S), _other_dtype(full_N)
        elif fault.kind == "operation":
            return self.inner.all_gather(torch.empty_like(full_N), out_S, name=name)
        else:
            return DONE
        return self.inner.reduce_scatter(out_S, full_N, name=name)

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """The inner communicator's, or the fault. A skipped call returns this rank's row W times."""
        fault, name = self._strike(name)
        if fault is not None and fault.kind == "skip":
            return vector_K.expand(self.size, -1).clone()
        if fault is not None and fault.kind == "bytes":
            vector_K = torch.cat([vector_K, vector_K])
        return self.inner.all_gather_small(vector_K, name=name)

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """The inner communicator's, or the fault."""
        fault, name = self._strike(name)
        if fault is not None and fault.kind == "skip":
            return DONE
        return self.inner.broadcast(tensor, src, name=name)

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The inner communicator's."""
        return self.inner.allocate(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """Close the inner communicator."""
        self.inner.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def _strike(self, name: str) -> tuple[Fault | None, str]:
        """The fault that changes this call, if any, and the call's name. Runs faults that act at once."""
        self._calls[name] += 1
        changes = None
        for fault in self._faults:
            if fault.name == name and fault.at == self._calls[name]:
                if fault.kind == "swap":
                    self._names |= {fault.name: fault.other, fault.other: fault.name}
                elif fault.kind in _AT_ONCE:
                    _AT_ONCE[fault.kind](fault)
                else:
                    changes = fault
        return changes, self._names.get(name, name)


def _other_dtype(tensor: Tensor) -> Tensor:
    """The same bytes with an integer dtype of the same size."""
    twins = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return tensor.view(twins[tensor.element_size()])


def _raise(fault: Fault) -> None:
    raise InjectedError(f"injected at {fault.name!r} on rank {fault.rank}")


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold(fault: Fault) -> None:
    hold(fault.seconds)


def _late(fault: Fault) -> None:
    time.sleep(fault.seconds)


_AT_ONCE: dict[str, Callable[[Fault], None]] = {
    "raise": _raise,
    "kill": _kill,
    "abort": lambda _: os.abort(),
    "exit": lambda _: os._exit(0),
    "freeze": _freeze,
    "hold": _hold,
    "late": _late,
}
