"""The program of one rank of a probe: exchanges tensors, checks the values, and prints numbers as JSON.

    python -m zeroshard.doctor.exchange RANK RANKS STORE BACKEND WRONG

``WRONG`` 1: this rank sends other values. Bandwidths of the bus have the factors of nccl-tests: 2(n-1)/n
for an all-reduce, (n-1)/n for the others.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

SMALL, LARGE = 2, 1 << 22  # fp32 elements: 8 bytes and 16 MiB
ROUNDS = 5


def main() -> None:
    """Run all collectives as one rank."""
    rank, ranks, store, backend, wrong = sys.argv[1:]
    on = torch.device("cpu") if backend == "gloo" else torch.device("cuda", int(rank))
    dist.init_process_group(
        backend,
        store=FileStore(store, int(ranks)),
        rank=int(rank),
        world_size=int(ranks),
        timeout=datetime.timedelta(seconds=600),  # the one who started this ends it
        device_id=None if on.type == "cpu" else on,
    )
    found = {name: _measure(name, int(rank), int(ranks), on, wrong == "1") for name in _CALLS}
    faulty = [name for name, row in found.items() if not row.pop("right")]
    # Every rank tells what it saw; the first one prints it.
    seen: list[list[str]] = [[] for _ in range(int(ranks))]
    dist.all_gather_object(seen, faulty)
    if rank == "0":
        print(json.dumps({"wrong": sorted({name for row in seen for name in row}), **found}))
    dist.destroy_process_group()


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
    call, row, right = _CALLS[name], {}, True
    for size, numel in (("latency_s", SMALL * ranks), ("busbw_Bps", LARGE // ranks * ranks)):
        seconds = []
        out = torch.empty(numel * ranks, device=on)
        for _ in range(ROUNDS):
            x_N = torch.full((numel,), float(rank + 1 + wrong), device=on)
            begin = time.perf_counter()
            result = call(x_N, out)
            right = right and _is_right(name, result, ranks)  # reading waits for the device
            seconds.append(time.perf_counter() - begin)
        best = min(seconds)
        moved = (
            4 * numel * (ranks - 1) / ranks * {"all_reduce": 2, "all_gather": ranks}.get(name, 1)
        )
        row[size] = best if size == "latency_s" else moved / best
    return {**row, "right": right}


def _is_right(name: str, result: Tensor, ranks: int) -> bool:
    if name != "all_gather":
        return bool((result == ranks * (ranks + 1) / 2).all())
    parts = result.view(ranks, -1)
    return all(bool((part == rank + 1).all()) for rank, part in enumerate(parts))


if __name__ == "__main__":
    main()
