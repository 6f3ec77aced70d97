"""Compares training over the collectives of one or two ranks on one GPU with a plain loop.

NCCL refuses two ranks on one GPU of one host. With different host names in ``NCCL_HOSTID`` it takes them
for two hosts, which are connected through sockets.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from checks import OFFLOAD_LIMIT, Curve, curve, difference, same_bits_each_time
from sharded import over_collectives
from torch import Tensor, nn
from trainers import ADAMW, Job, batches, build

NO_CLIPPING = {"gradient_clipping": 0.0}
"""Ranks add the squares of a norm in another order than one process. Without clipping all bits agree."""


Facts = Iterator[tuple[str, Any]]
"""What a rank finds out, by name. Each is told at once: a rank that hangs loses only the rest."""

SILENT_S = 30.0
"""A rank that tells nothing for this time hangs."""


def ranks(job: Job, *, ranks: int, backend: str) -> dict[str, Any]:
    """Run all cases on ``ranks`` new processes. By case "" if it holds, else what the ranks found."""
    job = replace(job, extra=NO_CLIPPING)
    answers = [dict(on_rank(job, 0, 1))] if job.pretended else on_processes(
        on_rank, job, ranks=ranks, backend=backend
    )  # fmt: skip
    names = dict.fromkeys(name for answer in answers for name in answer)
    return {
        "checks": {name: _joined([a.get(name, "no answer") for a in answers]) for name in names}
    }


def on_processes(
    work: Callable[[Job, int, int], Facts], job: Job, *, ranks: int, backend: str
) -> list[dict[str, Any]]:
    """What ``work(job, rank, ranks)`` tells on each of ``ranks`` new processes, joined over ``backend``.

    "joins" tells why a process could not join or did not end.
    """
    start = get_context("fork")  # CUDA is not initialized yet
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = start.Pipe(duplex=False)
            given = (theirs, work, job, rank, ranks, backend, folder)
            processes.append(start.Process(target=_child, args=given, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return [_answer(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.join(3)
                process.kill()


_ENDED = ("", None)


def _answer(pipe: Connection) -> dict[str, Any]:
    found: dict[str, Any] = {"joins": ""}
    until_s = time.monotonic() + SILENT_S
    while pipe.poll(max(0.0, until_s - time.monotonic())):
        try:
            name, fact = pipe.recv()
        except EOFError:
            return {**found, "joins": "its process died"}
        if (name, fact) == _ENDED:
            return found
        found[name] = fact
        until_s = time.monotonic() + SILENT_S
    last = list(found)[-1]
    return {**found, "joins": f"hangs after {last!r}: nothing in {SILENT_S:.0f} s"}


def _joined(texts: list[str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


def _child(
    pipe: Connection,
    work: Callable[[Job, int, int], Facts],
    job: Job,
    rank: int,
    ranks: int,
    backend: str,
    folder: str,
) -> None:
    os.environ |= environment(rank, ranks)
    try:
        if job.device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks
        )
        for fact in work(job, rank, ranks):
            pipe.send(fact)
        dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        pipe.send(("joins", f"{type(error).__name__}: {error}"))
    pipe.send(_ENDED)


def environment(rank: int, ranks: int) -> dict[str, str]:
    """The variables of a rank. All ranks use the first GPU."""
    names = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": "1",
    }
    names["GLOO_SOCKET_IFNAME"] = "lo"
    if ranks == 1:
        return names
    return names | {
        "NCCL_HOSTID": f"host-of-rank-{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def on_rank(job: Job, rank: int, ranks: int) -> Facts:
    """All cases on one rank, also after one that failed on all ranks."""
    yield "joins", ""
    with same_bits_each_time(job):
        wanted = plain_on_all(job, rank, ranks)
        for stage in range(4):
            name = f"stage {stage} = plain loop over the batches of all ranks"
            yield name, _case(_equal, wanted, replace(job, stage=stage), rank, ranks)
        for stage, params in ((2, False), (3, False), (3, True)):
            more = " and parameters" if params else ""
            case = replace(job, stage=stage, offload="cpu", offloads_params=params)
            name = f"stage {stage} with state{more} in host memory"
            yield name, _case(_close, wanted, case, rank, ranks)


def _case(check: Callable[..., str], *given: Any) -> str:
    try:
        return check(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _equal(wanted: Curve, job: Job, rank: int, ranks: int) -> str:
    return difference(wanted, curve(over_collectives(job), job, data_of(job, rank, ranks)))


def _close(wanted: Curve, job: Job, rank: int, ranks: int) -> str:
    losses = curve(over_collectives(job), job, data_of(job, rank, ranks))[0]
    pairs = zip(wanted[0], losses, strict=True)
    worst = max(abs(float(a) - float(b)) / abs(float(a)) for a, b in pairs)
    return (
        "" if worst <= OFFLOAD_LIMIT and math.isfinite(worst) else f"losses differ by {worst:.1e}"
    )


def data_of(job: Job, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of one rank: every rank has others."""
    return batches(job.shape, 1, job.device, count=2 * ranks)[rank::ranks]


def plain_on_all(job: Job, rank: int, ranks: int) -> Curve:
    """Losses of ``rank`` and masters of a plain bf16 loop over the batches of all ranks.

    Gradients of the ranks are added in bf16, in rank order, and divided in fp32.
    """
    model = build(job.shape, job.device, dtype=torch.bfloat16)
    params = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)
    data, losses = [data_of(job, r, ranks) for r in range(ranks)], []
    for number in range(job.steps):
        sums: list[Tensor] = []
        for r, own in enumerate(data):
            loss = model(*own[number % len(own)])
            loss.backward()
            grads = [param.grad for param in params if param.grad is not None]
            sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
            model.zero_grad(set_to_none=True)
            if r == rank:
                losses.append(loss.detach().clone())
        for master, summed in zip(masters, sums, strict=True):
            master.grad = summed.float() / ranks
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
    names = [name for name, _ in model.named_parameters()]
    return losses, {name: m.detach().clone() for name, m in zip(names, masters, strict=True)}
