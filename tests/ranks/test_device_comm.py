"""Communicators for tensors of an accelerator: which transport, how many, and what a call costs.

No accelerator is needed: a device is named, and no tensor of it is moved.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from zeroshard_testing.ranks import on_ranks

from zeroshard.comm import make_comm
from zeroshard.comm.collectives import Scratch
from zeroshard.comm.env import default_backend
from zeroshard.comm.process_group import ProcessGroupComm
from zeroshard.config import load_config
from zeroshard.engine.build import gathers_while_reducing
from zeroshard.errors import ConfigError, LaunchError, RankMismatch, UsageError
from zeroshard.session import comm_session as module
from zeroshard.session import session
from zeroshard.watchdog.run_record import Peer
from zeroshard.watchdog.settings import WatchdogSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@on_ranks(2)
def test_gloo_moves_tensors_of_a_gpu_by_its_own_collectives():
    comm = make_comm(device=CUDA)
    assert comm.transport == "stock:gloo"
    dist.barrier()  # the other rank may still be connecting
    comm.close()
    for transport in ("p2p", "shm"):
        with pytest.raises(ConfigError, match="it moves tensors of the CPU, not of cuda"):
            make_comm(transport=transport, device=CUDA)


def test_scratch_memory_is_on_the_device_of_the_reduced_tensor():
    scratch = Scratch()
    there = scratch.take(torch.float32, 8, torch.device("meta"))
    scratch.give(there)
    here = scratch.take(torch.float32, 8)
    assert (there.device.type, here.device.type) == ("meta", "cpu")
    assert scratch.nbytes == 64
    assert scratch.take(torch.float32, 4, torch.device("meta")) is there


@on_ranks(2)
def test_a_collective_is_not_looked_up_again_in_each_call():
    comm = ProcessGroupComm(dist.new_group(backend="gloo"), owns_group=True)
    rank, refusal = dist.get_rank(), AssertionError("looked up")
    out_S, full_N = torch.empty(2), torch.arange(4.0) + rank
    with mock.patch.object(distributed_c10d, "_check_single_tensor", side_effect=refusal):
        comm.reduce_scatter(out_S, full_N, name="r").wait()
        comm.all_gather(full_N, out_S, name="g").wait()
        rows = comm.all_gather_small(out_S, name="s")
    assert full_N.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert rows.tolist() == [[1.0, 3.0], [5.0, 7.0]]
    comm.close()


def opened_for(device=CPU, **options):
    """The purposes of the communicators of a session whose transport queues on the device."""
    purposes = []

    def made(*, purpose, **rest):
        purposes.append(purpose)
        comm = make_comm(purpose=purpose, **{**rest, "transport": "stock"})
        comm.queues_on_device = True
        return comm

    settings = WatchdogSettings(first_report_s=1.0, tick_s=0.1)
    with mock.patch.object(module, "make_comm", made):
        opened = session.open_session(
            transport="auto", device=device, trust=settings, plan={"a": "1"}, **options
        )
    dist.barrier()  # the other rank may still be connecting
    opened.close()
    return purposes


@on_ranks(2)
def test_a_session_opens_no_more_communicators_than_it_uses_at_once():
    assert opened_for(separate_reductions=True) == ["gathers", "reductions"]
    assert opened_for() == ["gathers"]
    assert opened_for(call="Init") == ["init"]


@pytest.mark.parametrize(
    ("stage", "overlaps", "separate"),
    [(0, True, False), (1, True, False), (2, True, False), (3, True, True), (3, False, False)],
)
def test_only_stage_3_with_overlap_gathers_while_it_reduces(stage, overlaps, separate):
    zero = {"stage": stage, "overlap_comm": overlaps}
    config = {"train_batch_size": 2, "zero_optimization": zero}
    assert gathers_while_reducing(load_config(config, world_size=2).config) is separate


@on_ranks(2)
def test_a_communicator_on_a_device_connects_at_once_and_counts_the_memory_that_it_takes():
    """The backend is NCCL by name; the group behind it is gloo's."""
    made = {}

    def new_group(**options):
        made.update(options)
        return dist.distributed_c10d._get_default_group()

    free_nbytes = mock.Mock(side_effect=[1000, 400])
    with (
        mock.patch("zeroshard.comm.connect._backend_for", lambda group, kind: "nccl"),
        mock.patch("zeroshard.comm.connect.dist.new_group", new_group),
        mock.patch("zeroshard.device.accelerator.AcceleratorOps.free_nbytes", free_nbytes),
    ):
        comm = make_comm(device=CUDA)
    assert made["device_id"] == CUDA
    assert comm.scratch_nbytes == 600


@pytest.mark.parametrize(("backend", "count"), [("nccl", 2), ("gloo", 1)])
@on_ranks(2)
def test_on_a_mesh_each_purpose_has_a_process_group_of_its_own_on_a_device(backend, count):
    """Collectives of one NCCL communicator share a stream, so gathers would wait for reductions."""
    made, opened = [], []

    def new_group(ranks, *, device_id, **options):
        made.append((ranks, device_id))
        return dist.distributed_c10d._get_default_group()

    def make_comm(*, purpose, **options):
        opened.append(purpose)
        return mock.Mock(queues_on_device=backend == "nccl")

    rank = dist.get_rank()
    peer = Peer(rank, mock.Mock(), "")
    ranks = module.SetUpRanks((0, 1), rank, 1, mock.Mock(), "initialize", WatchdogSettings(), None)
    opener = module.SessionOpener(ranks, {rank: peer}, "auto", CUDA, mock.Mock(), None)
    kind = module.GroupKind("holders", [(0,), (1,)])
    with (
        mock.patch("zeroshard.comm.connect._backend_for", lambda group, kind: backend),
        mock.patch("zeroshard.session.comm_session.dist.new_group", new_group),
        mock.patch("zeroshard.session.comm_session.make_comm", make_comm),
    ):
        comms = opener.open_group(kind, ("gathers", "reductions"))
    assert len({id(comm) for comm in comms}) == count
    assert opened == ["holders gathers", "holders reductions"][:count]
    device = CUDA if backend == "nccl" else None
    assert made == [([0], device), ([1], device)] * count
    assert len(opener.groups) == count


@on_ranks(2)
def test_a_process_group_that_is_bound_to_another_device_is_an_error():
    bound = mock.Mock(bound_device_id=torch.device("cuda", 3))
    with (
        mock.patch("zeroshard.comm.connect._backend_for", lambda group, kind: "nccl"),
        mock.patch("zeroshard.comm.connect.dist.group", mock.Mock(WORLD=bound)),
        pytest.raises(UsageError, match=r"trains on cuda:0, but .* given device_id=cuda:3\. Give"),
    ):
        make_comm(device=CUDA, group=dist.distributed_c10d._get_default_group())


@pytest.mark.parametrize(
    ("kind", "built", "backend"),
    [
        ("cuda", True, "nccl"),
        ("cuda", False, "gloo"),
        ("xpu", True, "xccl"),
        ("openreg", True, "gloo"),
        (None, True, "gloo"),
    ],
)
def test_the_backend_is_torchs_for_the_accelerator_if_this_torch_has_it(kind, built, backend):
    with (
        mock.patch("zeroshard.comm.env.accelerator_type", lambda: kind),
        mock.patch("zeroshard.comm.env.dist.is_backend_available", lambda _: built),
    ):
        assert default_backend() == backend


@on_ranks(2)
def test_two_ranks_on_one_gpu_get_the_same_error_before_nccl_starts():
    nothing = mock.Mock(side_effect=AssertionError("a communicator is opened"))
    with (
        mock.patch("zeroshard.comm.connect._backend_for", lambda group, kind: "nccl"),
        mock.patch("zeroshard.device.accelerator.CudaOps.identity", lambda ops: "GPU-a"),
        mock.patch("zeroshard.comm.connect.dist.new_group", nothing),
        pytest.raises(LaunchError, match=r"Ranks train .*: ranks 0,1 \(cuda:0, GPU-a\)\. The coll"),
    ):
        opened_for(device=CUDA)


@on_ranks(2)
def test_a_rank_on_another_kind_of_device_is_named():
    device = CUDA if dist.get_rank() else CPU
    with pytest.raises(RankMismatch, match="device type"):
        opened_for(device=device)


@on_ranks(2)
def test_a_rank_with_another_version_of_torch_is_named():
    own = "2.12.0+cu130" if dist.get_rank() else "2.12.1"
    with (
        mock.patch.object(torch, "__version__", own),
        pytest.raises(RankMismatch, match=r"version of torch = 2\.12\.1 .* vs 2\.12\.0 \(rank 1"),
    ):
        opened_for(device=CPU)


@on_ranks(2)
def test_builds_of_one_version_of_torch_may_differ():
    own = "2.12.0+cu130" if dist.get_rank() else "2.12.0"
    with mock.patch.object(torch, "__version__", own):
        opened_for(device=CPU)
