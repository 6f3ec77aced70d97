"""The program of a probe: ranks exchange tensors, check the values, and the first prints numbers as JSON.

    python -m zeroshard.doctor.exchange RANKS STORE BACKEND WRONG_RANK

torch is imported once; the ranks are forks of this process. ``WRONG_RANK`` sends other values; -1: none
does. Bandwidths of the bus have the factors of nccl-tests: 2(n-1)/n for an all-reduce, (n-1)/n for the
others.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from zeroshard.run.address import listening_addresses

SMALL, LARGE = 2, 1 << 22  # fp32 elements: 8 bytes and 16 MiB
ROUNDS = 5


def main() -> None:
    """Start the ranks. Ends with 1 as soon as one has failed; who started this ends the others."""
    ranks, store, backend, wrong_rank = sys.argv[1:]
    for rank in range(int(ranks)):
        if not os.fork():
            _run(rank, int(ranks), store, backend, int(wrong_rank))
            sys.stdout.flush()
            os._exit(0)
    for _ in range(int(ranks)):
        if os.wait()[1]:
            sys.exit(1)


def _run(rank: int, ranks: int, store: str, backend: str, wrong_rank: int) -> None:
    """All collectives as one rank."""
    try:
        on = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
        dist.init_process_group(
            backend,
            store=FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=600),  # the one who started this ends it
            device_id=None if on.type == "cpu" else on,
        )
        found = {name: _measure(name, rank, ranks, on, rank == wrong_rank) for name in _CALLS}
        faulty = [name for name, row in found.items() if not row.pop("right")]
        # Every rank tells what it saw; the first one prints it.
        seen: list[tuple[list[str], list[str]]] = [([], [])] * ranks
        dist.all_gather_object(seen, (faulty, listening_addresses()))
        if not rank:
            wrong = sorted({name for row, _ in seen for name in row})
            listens = sorted({address for _, row in seen for address in row})
            print(json.dumps({"wrong": wrong, "listens": listens, **found}))
        dist.destroy_process_group()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _all_reduce(x_N: Tensor, _out: Tensor) -> Tensor:
    dist.all_reduce(x_N)
    return x_N


def _all_gather(x_N: Tensor, out: Tensor) -> Tensor:
    dist.all_gather_into_tensor(out, x_N)
    return out


def _reduce_scatter(x_N: Tensor, _out: Tensor) -> Tensor:
    shards = [part.clone() for part in x_N.chunk(dist.get_world_size())]
    mine = torch.empty_like(shards[0])
    dist.reduce_scatter(mine, shards)
    return mine


_CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def _measure(
    name: str, rank: int, ranks: int, on: torch.device, wrong: bool
) -> dict[str, float | bool]:
    """Latency with 8 bytes, bandwidth of the bus with 16 MiB, and whether the values were right."""
    call, row, right = _CALLS[name], {}, True
    for kind, whole in (("latency_s", SMALL * ranks), ("busbw_Bps", LARGE // ranks * ranks)):
        numel = whole // ranks if name == "all_gather" else whole
        out = torch.empty(numel * ranks if name == "all_gather" else 0, device=on)
        seconds = []
        for _ in range(ROUNDS):
            x_N = _values(numel, rank + wrong, on)
            begin = time.perf_counter()
            result = call(x_N, out)
            result[0].item()  # waits for the device
            seconds.append(time.perf_counter() - begin)
            right = right and torch.equal(result, _expected(name, numel, rank, ranks, on))
        best = min(seconds)
        moved = 4 * whole * (ranks - 1) / ranks * (2 if name == "all_reduce" else 1)
        row[kind] = best if kind == "latency_s" else moved / best
    return {**row, "right": right}


def _values(numel: int, rank: int, on: torch.device) -> Tensor:
    """What a rank sends: other values in each place, so that misplaced ones are found. Sums are exact."""
    return torch.arange(numel, device=on).remainder(251).float() + rank


def _expected(name: str, numel: int, rank: int, ranks: int, on: torch.device) -> Tensor:
    if name == "all_gather":
        return torch.cat([_values(numel, each, on) for each in range(ranks)])
    total = ranks * _values(numel, 0, on) + ranks * (ranks - 1) / 2
    return total if name == "all_reduce" else total.chunk(ranks)[rank]


if __name__ == "__main__":
    main()
