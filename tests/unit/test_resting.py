"""The offload plan: where state is stored, and which plans are refused."""

from __future__ import annotations

import pytest
import torch

from zeroshard.core.layout import pack
from zeroshard.core.tiers import CHUNK_NUMEL, TIERS, Placement, Span, Tier, place
from zeroshard.errors import UnsupportedError
from zeroshard.offload.offload_plan import OffloadPlan, check_device
from zeroshard.precision.policy import DtypeRow

DISK, HOST, DEVICE = Tier.DISK, Tier.HOST, Tier.DEVICE


def numel_by_tier(spans: list[list[Span]]) -> dict[Tier, int]:
    found = dict.fromkeys(TIERS.values(), 0)
    for span in (span for unit in spans for span in unit):
        found[span.tier] += span.end - span.begin
    return found


def test_spans_cover_every_unit_once_and_in_order():
    numels = [640, 64, 0, 6400]
    placed = place(numels, Placement(DISK, ratio=0.7, host_numel=1000))
    for numel, spans in zip(numels, placed, strict=True):
        ends = [0, *(span.end for span in spans)]
        assert [span.begin for span in spans] == ends[:-1]
        assert ends[-1] == numel
        assert all(span.begin % 64 == 0 for span in spans)


def test_forward_order_is_device_then_host_then_disk():
    placed = place([6400, 6400], Placement(DISK, ratio=0.75, host_numel=3200))
    tiers = [span.tier for spans in placed for span in spans]
    assert tiers == sorted(tiers, key=[DEVICE, HOST, DISK].index)
    assert numel_by_tier(placed) == {DEVICE: 3200, HOST: 3200, DISK: 6400}


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_the_ratio_is_met_up_to_the_alignment(ratio):
    placed = place([64_000, 128_000], Placement(HOST, ratio=ratio))
    assert abs(numel_by_tier(placed)[HOST] - ratio * 192_000) < 64


def test_chunks_on_disk_are_short_and_those_in_memory_are_not_cut():
    (on_disk,) = place([5 * CHUNK_NUMEL + 64], Placement(DISK))
    (in_memory,) = place([5 * CHUNK_NUMEL + 64], Placement(HOST))
    assert len(on_disk) == 6
    assert max(span.end - span.begin for span in on_disk) == CHUNK_NUMEL
    assert len(in_memory) == 1


def test_whole_matrices_are_cut_only_where_one_ends():
    cuts = [[640, 1280, 5760]]
    (spans,) = place([6400], Placement(DISK, ratio=0.95), cuts=cuts)
    assert {span.begin for span in spans} <= {0, *cuts[0]}
    assert spans[-1].end == 6400


def offload_plan(spans: tuple[Span, ...], tier: Tier) -> OffloadPlan:
    row = DtypeRow(*[torch.float32] * len(DtypeRow.__dataclass_fields__))
    numel = pack([("w", (64,))], num_shards=1).full_numel
    assert numel == 64
    return OffloadPlan({"unit": spans} if spans else {}, {"unit": tier}, {"unit": row})


@pytest.mark.parametrize("spans", [(), (Span(0, 64, DEVICE),)])
@pytest.mark.parametrize("tier", [HOST, DISK])
def test_a_gpu_refuses_masters_of_parameters_that_it_does_not_hold(spans, tier):
    with pytest.raises(UnsupportedError, match="offload_optimizer"):
        check_device(offload_plan(spans, tier), has_copy_streams=True)
    check_device(offload_plan(spans, tier), has_copy_streams=False)


def test_a_gpu_takes_state_that_rests_where_its_parameters_do():
    check_device(offload_plan((Span(0, 64, HOST),), HOST), has_copy_streams=True)
    check_device(offload_plan((Span(0, 64, DISK),), HOST), has_copy_streams=True)
    check_device(offload_plan((), DEVICE), has_copy_streams=True)
