"""A plan has the bytes, the traffic, the windows and the peak of the real run of two or three ranks."""

from __future__ import annotations

import itertools
import json
import operator
from dataclasses import astuple

import plan_check
import pytest
import torch
import torch.distributed as dist
from support.covering import sampled
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard.comm.connect import make_comm
from zeroshard.comm.planned import (
    PLANNED,
    PlannedComm,
    PlannedGloo,
    PlannedScratch,
    PlannedShm,
    nodes_of,
)
from zeroshard.comm.simulation import diverged, lone_rank
from zeroshard.errors import UsageError
from zeroshard.offload.swap_file import BOUNCE_NBYTES, THREADS
from zeroshard.planner.allocations import Allocations
from zeroshard.planner.make_plan import Asked, make_plan
from zeroshard.planner.simulated import highest
from zeroshard.planner.step_log import StepLog

CASES = plan_check.covering()


def test_every_two_values_are_together_in_a_case():
    assert len(CASES) == 16 < len(plan_check.ALL)
    for pair in itertools.combinations(range(6), 2):
        of_pair = operator.itemgetter(*pair)
        assert {of_pair(astuple(c)) for c in CASES} == {of_pair(astuple(c)) for c in plan_check.ALL}


@pytest.mark.parametrize("case", sampled(CASES, every=4), ids=lambda case: case.name)
def test_a_plan_is_what_the_run_needs(case):
    pytest.importorskip("transformers", reason="transformers is not installed")
    real, plan = plan_check.run_and_plan(case)
    assert plan_check.differences(real, plan) == []
    assert plan.nbytes("transport") > 0
    assert highest(plan.moments)[1].held["transport", "device"] > 0
    assert real.peak_nbytes == max(m.device_nbytes for n, m in real.moments.items() if n != "init")
    for phase, off in plan_check.offs(real, plan).items():
        assert abs(off) <= plan_check.TOLERANCE, phase


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_a_plan_of_an_encoder_and_a_decoder_is_as_right_as_that_of_other_models(family):
    pytest.importorskip("transformers", reason="transformers is not installed")
    real, plan = plan_check.run_and_plan(plan_check.Case(family, 3, False))
    assert plan_check.differences(real, plan) == []
    for phase, off in plan_check.offs(real, plan).items():
        assert abs(off) <= 0.014, phase


def test_a_run_over_gloo_needs_what_its_plan_says():
    pytest.importorskip("transformers", reason="transformers is not installed")
    real, plan = plan_check.run_and_plan(plan_check.Case("gpt2", 3, False, "none", "stock", 3))
    assert plan.histories
    assert plan_check.differences(real, plan) == []
    assert plan.nbytes("transport") == max(r.numel for r in plan.traffic) * 4
    for phase, off in plan_check.offs(real, plan).items():
        assert abs(off) <= plan_check.TOLERANCE, phase


def test_with_state_on_disk_files_traffic_buffers_and_peaks_are_planned():
    pytest.importorskip("transformers", reason="transformers is not installed")
    real, plan = plan_check.run_and_plan(plan_check.Case("gpt2", 3, False, "nvme", "shm", 2))
    assert plan_check.differences(real, plan) == []
    assert plan.nbytes("parameters", "disk") and plan.nbytes("optimizer", "disk")
    assert real.file_nbytes == plan.file_nbytes > plan.nbytes("optimizer", "disk")
    assert min(real.swapped) > plan.nbytes("optimizer", "disk")
    assert plan.nbytes("scratch", "host") > THREADS * BOUNCE_NBYTES
    for phase, off in plan_check.offs(real, plan).items():
        assert abs(off) <= plan_check.TOLERANCE, phase


@pytest.mark.parametrize(("stage", "transport", "ranks"), [(1, "p2p", 2), (3, "shm", 4)])
def test_a_model_cut_over_tensor_ranks_needs_what_its_plan_says(stage, transport, ranks):
    pytest.importorskip("transformers", reason="transformers is not installed")
    case = plan_check.Case("llama", stage, False, "none", transport, ranks, tensor=2)
    real, plan = plan_check.run_and_plan(case)
    assert plan_check.differences(real, plan) == []
    cut = sum(row.numel for row in plan.traffic if row.name == "layers")
    assert cut > 10 * case.size.batch * case.size.tokens * case.size.width
    for phase, off in plan_check.offs(real, plan).items():
        assert abs(off) <= plan_check.TOLERANCE, phase


@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_of_all_pairs_of_tokens_is_planned_for_packed_rows_only(packed):
    """Transformers makes none for rows of one sample, and without values it cannot see that."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    size = plan_check.Size(tokens=512)
    case = plan_check.Case("llama", 1, False, "none", "p2p", 2, size=size, packed=packed)
    real, plan = plan_check.run_and_plan(case)
    assert plan_check.differences(real, plan) == []
    masks = [held for held in plan.largest if held.shape == (size.batch, 1, 512, 512)]
    assert bool(masks) == packed
    for phase, off in plan_check.offs(real, plan).items():
        assert abs(off) <= plan_check.TOLERANCE, phase


@pytest.mark.parametrize(("stage", "ranks"), [(3, 2), pytest.param(1, 4, marks=pytest.mark.full)])
def test_ranks_that_share_a_sequence_need_what_their_plan_says(stage, ranks):
    pytest.importorskip("transformers", reason="transformers is not installed")
    case = plan_check.Case("llama", stage, False, "none", "shm", ranks, sequence=2)
    real, plan = plan_check.run_and_plan(case)
    assert plan_check.differences(real, plan) == []
    exchanged = [row for row in plan.traffic if row.op == "all_to_all"]
    # Query, key and value before attention and its result after it, forth and back, of half the tokens.
    elements = 8 * case.size.layers * case.size.batch * (case.size.tokens // 2) * case.size.width
    assert [(row.calls, row.sent_nbytes) for row in exchanged] == [(8, elements // 2 * 4)]
    for phase, off in plan_check.offs(real, plan).items():
        assert abs(off) <= plan_check.TOLERANCE, phase


def test_stages_of_a_pipeline_need_what_their_plans_say():
    """The table of words is tied over both stages."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    case = plan_check.Case("gpt2", 1, False, pipeline=2)
    for real, plan in plan_check.run_and_plans(case, [0, 1]):
        assert plan_check.differences(real, plan) == []
        assert [m for m in real.messages if m.kind == "send"]
        assert [repr(m) for m in real.messages] == [repr(m) for m in plan.messages]
        assert max(row.numel for row in plan.traffic) == 512 * 64
        for phase, off in plan_check.offs(real, plan).items():
            assert abs(off) <= plan_check.TOLERANCE, phase


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.full)])
def test_stages_whose_ranks_share_sequences_need_what_their_plans_say(stage):
    pytest.importorskip("transformers", reason="transformers is not installed")
    case = plan_check.Case("llama", stage, False, "none", "p2p", 4, pipeline=2, sequence=2)
    for real, plan in plan_check.run_and_plans(case, [0, 2]):
        assert plan_check.differences(real, plan) == []
        assert [repr(m) for m in real.messages] == [repr(m) for m in plan.messages] != []
        for phase, off in plan_check.offs(real, plan).items():
            assert abs(off) <= plan_check.TOLERANCE, phase


@pytest.mark.parametrize("transport", PLANNED)
@pytest.mark.parametrize(("full", "part", "dtype"), [(128, 63, "float32"), (128, 64, "float16")])
def test_a_planned_transport_refuses_what_a_real_one_could_not_do(transport, full, part, dtype):
    with lone_rank(0, 2), FakeTensorMode():
        comm = make_comm(transport=transport)
        for call in (comm.all_gather, comm.reduce_scatter):
            whole, own = torch.empty(full), torch.empty(part, dtype=getattr(torch, dtype))
            tensors = (whole, own) if call == comm.all_gather else (own, whole)
            with pytest.raises(
                UsageError, match=r"'a unit' over 2 ranks: 128 elements of torch\.float32"
            ):
                call(*tensors, name="a unit")
        with pytest.raises(UsageError, match=r"'a table': .* is not contiguous"):
            comm.broadcast(torch.empty(4, 8).t(), 0, name="a table")


@pytest.mark.parametrize(
    ("calls", "diverge"),
    [
        ((("a", 8, "float32"), ("b", 8, "float32")), False),
        ((("b", 8, "float32"), ("a", 8, "float32")), True),  # another order
        ((("a", 8, "float32"), ("b", 16, "float32")), True),  # another size
        ((("a", 8, "float32"), ("b", 8, "float64")), True),  # another dtype
        ((("a", 8, "float32"),), True),
    ],
)
def test_planned_ranks_that_call_different_collectives_are_found(calls, diverge):
    said = {}
    for rank, own in enumerate([(("a", 8, "float32"), ("b", 8, "float32")), calls]):
        with lone_rank(rank, 2), FakeTensorMode():
            comm, log = make_comm(transport="shm"), StepLog()
            log.begin([comm], Allocations(log.note))
            for name, numel, dtype in own:
                full_N = torch.empty(numel, dtype=getattr(torch, dtype))
                comm.all_gather(full_N, full_N[: numel // 2], name=name).wait()
            said[rank] = log.histories()
    assert bool(diverged(said)) is diverge


def test_a_plan_whose_stages_call_different_collectives_is_an_error(tmp_path, monkeypatch):
    """The second stage exchanges something that the first one does not."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "parallel": {"pipeline": 2},
        "optimizer": {"type": "AdamW"},
    }
    arguments = {"ranks": 2, "length": 8}
    make_plan(Asked(str(tmp_path), config, **arguments))
    small = PlannedComm.all_gather_small

    def more(self, vector_K, *, name):
        if self.rank:
            small(self, vector_K, name="one more")
        return small(self, vector_K, name=name)

    monkeypatch.setattr(PlannedComm, "all_gather_small", more)
    with pytest.raises(UsageError, match="ranks 0 and 1 call different collectives over the group"):
        make_plan(Asked(str(tmp_path), config, **arguments))


@pytest.mark.parametrize(
    ("ranks", "node", "transport"),
    [
        ((0, 1), 2, PlannedShm),
        ((2, 3), 2, PlannedShm),
        ((0, 2), 2, PlannedScratch),
        ((0, 1, 2, 3), 2, PlannedScratch),
        ((0, 1, 2, 3), 4, PlannedShm),
        ((0, 1, 2, 3), None, PlannedComm),
    ],
)
def test_each_group_of_a_plan_has_the_transport_of_a_run(ranks, node, transport):
    with lone_rank(ranks[0], 4), nodes_of(node):
        group = dist.new_group(list(ranks))
        assert type(make_comm(group=group)) is transport
        assert type(make_comm(group=group, transport="stock")) is PlannedGloo


def test_windows_in_flight_are_kept_until_they_are_read():
    """Two gathers in flight need two windows, which the next two use again."""
    with lone_rank(0, 2), FakeTensorMode():
        comm = make_comm(transport="shm")
        full, shard = torch.empty(2048), torch.empty(1024)
        for _ in range(2):
            for handle in [comm.all_gather(full, shard, name=name) for name in "ab"]:
                handle.wait()
        assert comm.scratch_nbytes == comm.scratch_peak_nbytes == 2 * shard.nbytes
        lent = comm.allocate(2048, dtype=torch.float32, device=full.device)
        assert (comm.scratch_nbytes, comm.scratch_peak_nbytes) == (0, 8192)  # smaller ones went
        comm.reduce_scatter(shard, lent, name="c").wait()
        del lent
        assert comm.scratch_nbytes == 8192


def test_real_tensors_over_a_fake_group_have_the_row_of_this_rank_everywhere():
    """Benchmarks of one rank of many train with values."""
    with lone_rank(0, 2):
        comm = PlannedComm(dist.group.WORLD)
        rows = comm.all_gather_small(torch.tensor([3.0, 4.0]), name="norm")
        comm.close()
    assert rows.tolist() == [[3.0, 4.0], [3.0, 4.0]]
