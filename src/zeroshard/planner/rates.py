"""Measures what one CPU rank computes and communicates per second of its processor.

``zeroshard plan --measure`` runs this module in two processes at once, so that they share caches and
memory bandwidth as the ranks of a run do: ``alone`` for what a rank computes, and on two ranks
``together`` for collectives. Seconds are those of the process's CPU time, medians of repeated calls.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.comm.collectives import Comm
from zeroshard.comm.connect import make_comm
from zeroshard.comm.env import current_rank_info
from zeroshard.config.machine_file import rate_at
from zeroshard.engine.engine import Engine
from zeroshard.memory.host_limits import read_rss_nbytes
from zeroshard.planner.prices import sent_part, updated_by
from zeroshard.planner.step_log import attention_backward_flop, attention_flop
from zeroshard.session.join import init_distributed

Points = list[tuple[float, float]]

MATMUL_SIZES = (32, 64, 128, 256, 512, 1024)
"""Rows and columns of the square matrices of a product."""

ATTENTION_LENGTHS = (32, 128, 512)
"""Tokens of an attention over 8 heads of width 64."""

MEMORY_NUMELS = (2**10, 2**14, 2**17, 2**19, 2**21, 2**23)
"""Elements of the tensors of an addition, from the first cache to memory."""

LINK_NBYTES = (2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28)
"""Bytes of the whole tensors of collectives."""

COLD_NBYTES = 2**26
"""Calls take other operands until this many bytes have passed, more than a core's cache has. In a step
too, an operation reads what was written a while ago. With the same operands again, products are 1.3 times
and additions 2.5 times as fast."""

UPDATE_NUMEL = 2**22
"""Parameters of the measured update."""

DISK_NBYTES = 2**26


MOST_OPERANDS = 1024
"""Sets of operands of a call."""


class Stopwatch:
    """Measures calls. ``turn_s``: how long it repeats a call, in CPU seconds. ``cold_nbytes``: see
    :data:`COLD_NBYTES`."""

    def __init__(self, turn_s: float, cold_nbytes: int = COLD_NBYTES) -> None:
        self._turn_s = turn_s
        self._cold_nbytes = cold_nbytes

    def cold_seconds(
        self, make: Callable[[], Sequence[Tensor]], call: Callable[..., object]
    ) -> float:
        """CPU seconds of ``call`` on what ``make`` returns, other operands each time. Keeps results as
        long as operands, so that their memory is not in the cache either."""
        first = make()
        count = self._cold_nbytes // sum(tensor.nbytes for tensor in first)
        count = max(2, min(MOST_OPERANDS, count))
        operands = [first, *(make() for _ in range(count - 1))]
        results: list[object] = [None] * count
        turns: Iterator[int] = itertools.cycle(range(count))

        def turn() -> None:
            at = next(turns)
            results[at] = call(*operands[at])

        return self.seconds(turn)

    def seconds(self, call: Callable[[], object]) -> float:
        """CPU seconds of one call: the median of at least four turns, each of several short calls."""
        call()
        begin = time.process_time()
        call()
        once_s = max(time.process_time() - begin, 1e-7)
        count = max(1, int(self._turn_s / 5 / once_s))
        turns: list[float] = []
        end_s = time.process_time() + self._turn_s
        while len(turns) < 4 or time.process_time() < end_s:
            begin = time.process_time()
            for _ in range(count):
                call()
            turns.append((time.process_time() - begin) / count)
        return statistics.median(turns)


def matmul_rates(watch: Stopwatch, dtype: torch.dtype, memory: Points) -> Points:
    """FLOP/s of the three products of a linear layer, forward and backward, by the FLOP of one.

    Without the time of their bytes at the rates ``memory``, and without that of an operation.
    """
    found = []
    for size in MATMUL_SIZES:

        def make(size: int = size) -> list[Tensor]:
            return [torch.randn(size, size).to(dtype) for _ in range(3)]

        seconds = watch.cold_seconds(make, lambda x, w, g: (x @ w.t(), g @ w, g.t() @ x)) / 3
        nbytes = 3 * size**2 * dtype.itemsize
        other_s = nbytes / rate_at(memory, nbytes) + call_s(watch)
        found.append((2.0 * size**3, 2 * size**3 / max(seconds - other_s, seconds / 4)))
    return found


def call_s(watch: Stopwatch) -> float:
    """CPU seconds of an addition of one element, which counts as those of an operation."""
    return watch.cold_seconds(lambda: [torch.ones(1), torch.ones(1)], torch.add)


def attention_rates(watch: Stopwatch, dtype: torch.dtype) -> Points:
    """FLOP/s of the fused attention of the CPU, forward and backward, by the FLOP of one of them."""
    found = []
    for length in ATTENTION_LENGTHS:

        def make(length: int = length) -> list[Tensor]:
            return [
                torch.randn(2, 4, length, 64, dtype=dtype, requires_grad=True) for _ in range(3)
            ]

        def call(q: Tensor, k: Tensor, v: Tensor) -> object:
            result = F.scaled_dot_product_attention(q, k, v)
            return torch.autograd.grad(result, (q, k, v), result.detach())

        flop = attention_flop(*make())
        whole = flop + attention_backward_flop(*make())
        found.append((whole / 2, whole / watch.cold_seconds(make, call)))
    return found


def memory_rates(watch: Stopwatch) -> Points:
    """Bytes/s of an addition with a new result, by the bytes that it reads and writes.

    Without the time of an operation, :func:`call_s`.
    """
    found = []
    least_s = call_s(watch)
    for numel in MEMORY_NUMELS:

        def make(numel: int = numel) -> list[Tensor]:
            return [torch.ones(numel), torch.ones(numel)]

        nbytes = 12 * numel
        seconds = watch.cold_seconds(make, torch.add)
        found.append((float(nbytes), nbytes / max(seconds - least_s, seconds / 10)))
    return found


def special_rates(watch: Stopwatch) -> dict[str, float]:
    """Elements/s of operations that compute more than they read."""
    ops = torch.ops.aten
    weight = torch.ones(512)
    _, mean, scale = torch.native_layer_norm(torch.randn(256, 512), [512], weight, weight, 1e-5)
    calls: dict[str, Callable[[Tensor, Tensor], object]] = {
        "exp": lambda x, _: x.exp(),
        "tanh": lambda x, _: x.tanh(),
        "tanh_backward": ops.tanh_backward,
        "pow": lambda x, _: x.pow(3.0),
        "gelu": lambda x, _: F.gelu(x),
        "gelu_backward": ops.gelu_backward,
        "silu": lambda x, _: F.silu(x),
        "silu_backward": ops.silu_backward,
        "_softmax": lambda x, _: ops._softmax(x, -1, False),
        "_safe_softmax": lambda x, _: ops._safe_softmax(x, -1),
        "_softmax_backward_data": lambda g, y: ops._softmax_backward_data(g, y, -1, g.dtype),
        "_log_softmax": lambda x, _: ops._log_softmax(x, -1, False),
        "_log_softmax_backward_data": lambda g, y: ops._log_softmax_backward_data(
            g, y, -1, g.dtype
        ),
        "native_layer_norm": lambda x, _: torch.native_layer_norm(x, [512], weight, weight, 1e-5),
        "native_layer_norm_backward": lambda g, x: ops.native_layer_norm_backward(
            g, x, [512], mean, scale, weight, weight, [True] * 3
        ),
    }

    def make() -> list[Tensor]:
        return [torch.randn(256, 512), torch.randn(256, 512)]

    numel = 256 * 512
    return {name: numel / watch.cold_seconds(make, call) for name, call in calls.items()}


def random_rate(watch: Stopwatch) -> float:
    """Elements/s of the random numbers of dropout."""
    seconds = watch.cold_seconds(lambda: [torch.empty(2**17)], lambda x: x.bernoulli_(0.9))
    return 2**17 / seconds


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class _Block(nn.Module):
    """A layer of a transformer, so small that only the number of its operations matters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 2, width // 2).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(width, dim=-1)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


def operation_s(watch: Stopwatch) -> float:
    """CPU seconds of torch, autograd and Python for each operation of forward and backward."""
    model = nn.Sequential(*(_Block(8) for _ in range(4)))
    x = torch.randn(1, 4, 8)

    def step() -> None:
        model(x).sum().backward()

    step()
    with _Count() as count:
        step()
    return watch.seconds(step) / float(count.calls)


class _Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(UPDATE_NUMEL))

    def forward(self) -> Any:
        return self.weight.sum()


def update_rate() -> float:
    """Bytes/s of states that the engine's update reads and writes on one rank, with AdamW in fp32."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    seconds = []
    with contextlib.closing(Engine(_Vector(), config=config)) as engine:
        for _ in range(6):  # the first one is not counted
            engine.backward(engine())
            begin = time.process_time()
            engine.step()
            seconds.append(time.process_time() - begin)
        nbytes = updated_by(engine).nbytes
    return nbytes / statistics.median(seconds[1:])


def disk_rates(folder: str) -> dict[str, float]:
    """Bytes/s of a new file in ``folder``, by the clock: written until it is on the disk, and read."""
    data = torch.randint(256, (DISK_NBYTES,), dtype=torch.uint8).numpy().tobytes()
    with tempfile.TemporaryFile(dir=folder) as file:
        begin = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - begin
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else memory answers
        file.seek(0)
        begin = time.perf_counter()
        file.read()
        read_s = time.perf_counter() - begin
    return {"read_bytes_per_s": DISK_NBYTES / read_s, "write_bytes_per_s": DISK_NBYTES / write_s}


def alone(turn_s: float, largest_nbytes: int, folder: str) -> dict[str, Any]:
    """All that a process measures by itself. ``folder``: on the disk to measure."""
    watch = Stopwatch(turn_s, min(COLD_NBYTES, largest_nbytes))
    memory = memory_rates(watch)
    return {
        "matmul": {
            name: matmul_rates(watch, getattr(torch, name), memory)
            for name in ("float32", "bfloat16")
        },
        "attention": {"float32": attention_rates(watch, torch.float32)},
        "bytes_per_s": memory,
        "special": special_rates(watch),
        "random_per_s": random_rate(watch),
        "operation_s": operation_s(watch),
        "optimizer_bytes_per_s": update_rate(),
        "resident_nbytes": read_rss_nbytes(os.getpid()) or 0,
        "disk": disk_rates(folder),
    }


def together(turn_s: float, largest_nbytes: int) -> dict[str, Any]:
    """Latency, and bytes/s that a rank sends, of the engine's collectives. On all ranks.

    Every rank makes the same number of calls.
    """
    init_distributed(verbose=False)
    comm = make_comm(purpose="rates")
    sizes = [512, *(n for n in LINK_NBYTES if n <= largest_nbytes)]
    times = {
        name: [(n, _median_s(comm, name, n, turn_s)) for n in sizes]
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    }
    comm.close()
    alpha_s = statistics.median(found[0][1] for found in times.values())
    found: dict[str, Any] = {"alpha_s": alpha_s}
    for name, seconds in times.items():
        sent = sent_part(name, comm.size)
        found[name] = [(float(n), n * sent / max(s - alpha_s, s / 20)) for n, s in seconds[1:]]
    return found


class _Calls:
    """The collectives of one size. Targets are new in every call, as those of gathers are at stage 3."""

    def __init__(self, comm: Comm, numel: int) -> None:
        self._comm, self._numel = comm, numel
        self._shard_S = torch.ones(numel // comm.size)

    def all_gather(self) -> None:
        full_N = torch.empty(self._numel)
        self._comm.all_gather(full_N, self._shard_S, name="rate").wait()

    def reduce_scatter(self) -> None:
        full_N = self._comm.allocate(self._numel, dtype=torch.float32, device=torch.device("cpu"))
        out_S = torch.empty(len(self._shard_S))
        self._comm.reduce_scatter(out_S, full_N, name="rate").wait()

    def all_reduce(self) -> None:
        self.reduce_scatter()
        self.all_gather()


def _median_s(comm: Comm, name: str, nbytes: int, turn_s: float) -> float:
    """CPU seconds of one call, the median of some. All ranks make the same number."""
    call = getattr(_Calls(comm, nbytes // 4), name)
    seconds = []
    for _ in range(max(4, min(100, int(2e9 * turn_s / (nbytes + 2**18))))):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds[1:])


def main() -> None:
    """``alone OUT TURN_S LARGEST_NBYTES FOLDER`` or ``together OUT TURN_S LARGEST_NBYTES``: measure, and
    write JSON to OUT. ``LARGEST_NBYTES``: of tensors of collectives, and of the operands of a call."""
    what, out, turn_s, largest_nbytes, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    if what == "alone":
        Path(out).write_text(json.dumps(alone(float(turn_s), int(largest_nbytes), *rest)))
        return
    found = together(float(turn_s), int(largest_nbytes))
    if current_rank_info().is_main_rank:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
