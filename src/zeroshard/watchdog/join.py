"""Joins this process to the ranks of its run, and reports ranks that do not join."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import cast
from urllib.parse import urlparse

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

from zeroshard.comm.agreement import Store as AgreeStore
from zeroshard.comm.env import (
    DEFAULT_TIMEOUT,
    RankInfo,
    check_master,
    current_rank_info,
    default_backend,
    rank_info_of,
    run_name,
)
from zeroshard.errors import LaunchError
from zeroshard.watchdog.startup import await_all, await_server, launcher_serves, watch_from_now_on


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> RankInfo:
    """Initialise ``torch.distributed``, unless it is initialised already.

    The signature is DeepSpeed's ``init_distributed``. The default of ``dist_backend`` is NCCL with CUDA
    and gloo without. Without a launcher this process becomes the only rank and opens no port. The keys
    in the store are private to this attempt at the run, so that a restarted rank cannot read the
    addresses of dead ranks. ``config`` is ignored.

    Raises:
        LaunchError: ``dist_init_required=False`` without a group, a broken environment, or MPI over
            several hosts without the address of rank 0.
        RankLate: some ranks did not join within ``timeout``; it names them.
    """
    del config  # part of DeepSpeed's signature; nothing in it concerns the process group
    if dist.is_initialized():
        return current_rank_info()
    if dist_init_required is False:
        raise LaunchError(
            "dist_init_required is False, but torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group first, or leave the argument out."
        )
    rank_info = rank_info_of(mpi=auto_mpi_discovery)
    space = f"zs/{run_name().run}/{run_name().attempt}"
    if rank >= 0 and world_size > 0:
        rank_info = RankInfo(
            rank, world_size, rank_info.local_rank, rank_info.local_world_size, "arguments"
        )
    if init_method is None:
        check_master(rank_info)
    store: Store
    if init_method is None and rank_info.launcher == "none":
        store = HashStore()
    else:
        method = init_method or (
            "env://" if _has_master() else f"tcp://{_master(distributed_port)}"
        )
        store = _store(method, rank_info, timeout)
        if init_method is None:
            store = PrefixStore(space, store)
        await_all(
            cast("AgreeStore", PrefixStore("joining", store)),
            rank_info.rank,
            rank_info.world_size,
            timeout_s=timeout.total_seconds(),
        )
    backend = dist_backend or default_backend()
    dist.init_process_group(
        backend,
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timeout,
    )
    watch_from_now_on(space)
    if verbose and rank_info.rank == 0:
        print(
            f"zeroshard: {rank_info.world_size} ranks over {backend} ({rank_info.launcher})",
            flush=True,
        )
    return rank_info


def _store(method: str, rank_info: RankInfo, timeout: timedelta) -> Store:
    """The store that the ranks meet through. Waits for the rank that serves it, and for no other."""
    url = urlparse(method)
    if url.scheme not in ("env", "tcp"):
        store, _, _ = next(
            rendezvous(method, rank_info.rank, rank_info.world_size, timeout=timeout)
        )
        return cast("Store", store)
    if url.scheme == "env":
        url = urlparse(f"tcp://{_master(0)}")
    host, port = url.hostname or "127.0.0.1", url.port or 0
    serves = rank_info.rank == 0 and not launcher_serves()
    if not serves:
        await_server(
            host, port, rank_info.rank, rank_info.world_size,
            timeout_s=timeout.total_seconds(), server="" if launcher_serves() else "rank 0",
        )  # fmt: skip
    return TCPStore(
        host, port, rank_info.world_size, serves, timeout, wait_for_workers=False, multi_tenant=True
    )


def _master(port: int) -> str:
    """``address:port`` of the store, from the launcher's environment; ``port`` if it gives none."""
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    address = f"[{address}]" if ":" in address else address
    return f"{address}:{os.environ.get('MASTER_PORT', str(port))}"


def _has_master() -> bool:
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
