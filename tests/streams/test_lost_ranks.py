"""After a rank is lost, no number of an aborted collective is read or used. No GPU is needed.

Two ranks train on pretended devices, and one is killed. The collectives of the other one never end, until
its watchdog aborts them; then its waits end with garbage, as they do on a GPU.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from scenarios import engine, fused_adamw, model
from stepwise import OFFLOADS, batch, loss_of, report
from zeroshard_testing import on_ranks
from zeroshard_testing.ranks import run_ranks
from zeroshard_testing.streams import pretend_cuda
from zeroshard_testing.streams.nccl import GARBAGE, PeerGoneError

from zeroshard.errors import DistributedError, RankLost
from zeroshard.optim import native_adam
from zeroshard.session import session
from zeroshard.watchdog.watchdog import Watchdog

QUICK = {"first_report_s": 0.5, "frozen_s": 30.0, "grace_s": 60.0}
RANKS = 2

LOOKS: dict[str, Callable[[Any], Any]] = {
    "skipped": lambda trained: trained.last_step.skipped,
    "norm": lambda trained: trained.last_step.grad_norm,
    "loss": lambda trained: trained.last_step.loss,
    "scale": lambda trained: trained.last_step.loss_scale,
    "memory": lambda trained: trained.memory_report(all_ranks=True),
    "batches": lambda trained: list(trained.batches([1])),
    "step": lambda trained: step(trained, 2),
}
"""What a program may read after a step that ended with garbage."""


def go_on(trained: Any) -> None:
    """Two steps: with offload, the update of the first may be waited for in the second."""
    for at in (1, 2):
        step(trained, at)


def step(trained: Any, at: int) -> None:
    dtype = next(trained.module.parameters()).dtype
    trained.backward(loss_of(trained, batch(at, "cuda", "fp32").to(dtype)))
    trained.step()


@contextmanager
def late(seconds: float) -> Iterator[None]:
    """A context in which this rank comes late to the opening of communicators, after all have agreed."""
    on_time = session._open

    def open_late(*given: Any) -> Any:
        time.sleep(seconds)
        return on_time(*given)

    with mock.patch.object(session, "_open", open_late):
        yield


@contextmanager
def not_watched() -> Iterator[None]:
    """A context in which the watchdog of this rank looks at nothing: a step ends before it aborts."""
    with mock.patch.object(Watchdog, "tick", lambda _: None):
        yield


def masters(trained: Any) -> list[torch.Tensor]:
    """What the optimizer updates."""
    shards = trained.runtime.optimizer.shards
    return [chunk.master_C for shard in shards for chunk in shard.chunks]


def after_the_loss(
    stage: int, offload: str, precision: str, looks: Sequence[str], late_s: float = 0.0
) -> tuple[dict[str, tuple[str, str]], bool, str]:
    """On the rank that is left: class and text of the error of each look, whether masters have changed
    since the last step of both ranks, and what the checker found.

    The first look waits until the collectives are aborted. The others find that they were. Without
    ``looks``: of :func:`go_on`. ``late_s``: how late the rank that dies comes to the opening.
    """
    native_adam.prepare()
    native_adam.wait()
    rank = dist.get_rank()
    own = {"DS_ACCELERATOR": "", "LOCAL_RANK": str(rank)}
    with (
        mock.patch.dict(os.environ, own),
        pretend_cuda(devices=RANKS, query=True) as watch,
        watch.ranks(),
    ):
        torch.cuda.set_device(rank)
        with late(late_s * rank):
            trained = engine(
                model(),
                stage,
                precision,
                optimizer=fused_adamw,
                trust=QUICK,
                zero_optimization=OFFLOADS[offload],
            )
        step(trained, 0)
        trained.memory_report(all_ranks=True)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        held = masters(trained)
        before = [master.clone() for master in held]
        if looks:
            with not_watched():
                step(trained, 1)
        said = {}
        for look in looks or ["go on"]:
            try:
                said[look] = "", f"read {LOOKS.get(look, go_on)(trained)!r}"
            except DistributedError as error:
                said[look] = type(error).__name__, str(error)
        trained.close("a rank was lost")  # waits for updates that have begun
        same = all(map(torch.equal, before, held))
        return said, not same, report(watch)


def left_alone(*given: Any) -> tuple[dict[str, tuple[str, str]], bool, str]:
    """:func:`after_the_loss` on rank 0, with rank 1 killed."""
    died = {1: signal.SIGKILL}
    found: tuple[dict[str, tuple[str, str]], bool, str] = run_ranks(
        after_the_loss, RANKS, *given, expect_death=died, timeout=60
    )[0]
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_number_of_an_aborted_step_is_the_diagnosis(stage: int) -> None:
    said, _, found = left_alone(stage, "none", "fp16", list(LOOKS))
    assert {look: kind for look, (kind, _) in said.items()} == dict.fromkeys(LOOKS, "RankLost"), (
        said
    )
    assert all("rank 1 (" in text for _, text in said.values()), said
    assert found == ""


@pytest.mark.parametrize(("stage", "late_s"), [(1, 0.0), (3, 0.5)])
def test_the_host_does_not_update_with_an_aborted_gradient(stage: int, late_s: float) -> None:
    said, changed, _ = left_alone(stage, "optimizer", "fp32", [], late_s)
    assert said["go on"][0] == "RankLost", said
    assert not changed


@on_ranks(1, group=False)
def test_a_collective_without_its_peer_ends_only_when_it_is_aborted() -> None:
    def gone(mine_K: torch.Tensor, size: int) -> torch.Tensor:
        raise PeerGoneError("rank 1")

    with pretend_cuda() as watch, watch.world(RANKS):
        group: Any = dist.group.WORLD
        group._exchange = gone
        x, event = torch.ones(4, device="cuda"), torch.cuda.Event()
        group.allreduce([x]).wait()
        event.record()
        assert not event.query()
        timer = threading.Timer(0.2, group.abort)
        timer.start()
        event.synchronize()
        timer.join()
        assert event.query()
        assert (x == GARBAGE).all()
        with pytest.raises(RuntimeError, match="communicator was aborted"):
            group.allreduce([x])
        assert report(watch) == ""


class _Guard:
    def __init__(self) -> None:
        self.text = ""

    def check_wait(self) -> None:
        if self.text:
            raise RankLost(self.text)


@on_ranks(1, group=False)
def test_each_wait_whose_values_are_read_asks_the_guard_and_waits_before_memory_is_freed_do_not() -> (
    None
):
    from zeroshard.device.choice import on_host, ops_of, read
    from zeroshard.device.copy_streams import CudaCopyStreams

    with pretend_cuda():
        device = torch.device("cuda", 0)
        ops, guard, streams = ops_of(device), _Guard(), CudaCopyStreams(device)
        ops.guard_waits(guard)
        x, host = torch.ones(2, device=device), torch.zeros(2, pin_memory=True)

        def reads() -> dict[str, Callable[[], Any]]:
            flag, values = ops.host_flag(x[0] > 0), ops.host_values([x])
            return {
                "flag": flag.__bool__, "values": values.read, "read": lambda: read(x),
                "copy": lambda: on_host(x), "arrival": streams.d2h(x, host).synchronize,
            }  # fmt: skip

        for call in reads().values():
            call()
        guard.text = "rank 1 was lost"
        for name, call in reads().items():
            with pytest.raises(RankLost, match="rank 1 was lost"):
                call()
                pytest.fail(name)
        ops.synchronize()
        streams.synchronize()
        streams.h2d(host, x).synchronize()
        del guard  # a session that is gone guards nothing
        for call in reads().values():
            call()
