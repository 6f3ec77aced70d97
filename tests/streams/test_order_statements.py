"""Every statement that orders streams is needed: without it, a scenario finds a mistake.

This keeps the checker honest too: it sees each of these mistakes.
"""

from __future__ import annotations

import pytest
from ordering import Statement, removed, statements
from scenarios import Scenario, run_scenario

from zeroshard.testing import on_ranks

SHOWN: list[tuple[str, str, str, Scenario]] = [
    ("checkpoint/save.py", "snapshot", "ops_of(device).synchronize",
     Scenario(2, "none", "background_save")),
    ("comm/collectives.py", "ProcessGroupComm.finish", "work.wait()",
     Scenario(3, "none", "plain", 4)),
    ("device/accelerator.py", "AcceleratorOps.record_use", "tensor.record_stream",
     Scenario(2, "optimizer", "gradients")),
    ("device/copy_streams.py", "CudaCopyStreams.d2h", "self._down.wait_stream",
     Scenario(2, "optimizer", "plain")),
    ("device/copy_streams.py", "CudaCopyStreams.d2h", "self._ops.record_use",
     Scenario(2, "optimizer", "gradients")),
    ("device/copy_streams.py", "CudaCopyStreams.h2d", "self._up.wait_stream",
     Scenario(2, "optimizer", "gradients")),
    ("device/copy_streams.py", "CudaCopyStreams.synchronize", "stream.synchronize",
     Scenario(2, "delayed", "close_after_step")),
    ("device/copy_streams.py", "_Event.synchronize", "self.event.synchronize",
     Scenario(2, "optimizer", "plain")),
    ("device/copy_streams.py", "_Event.wait_stream", "self.ops.current_stream().wait_event",
     Scenario(2, "optimizer", "plain")),
    ("offload/host_chunk.py", "HostGradTransfer.wait", "self.numbers.wait",
     Scenario(2, "optimizer", "gradients")),
    ("offload/host_chunk.py", "HostGradTransfer.wait", "arrival.synchronize",
     Scenario(2, "disk", "plain")),
    ("offload/host_chunk.py", "HostChunk.fetch_gradient", "self._grad_arrival.synchronize",
     Scenario(2, "optimizer", "gradients")),
    ("offload/host_chunk.py", "HostChunk._copy_from_device", "leaving.wait_stream",
     Scenario(2, "disk", "plain")),
    ("offload/host_chunk.py", "HostChunk.wait_for_param", "arrival.wait_stream",
     Scenario(2, "optimizer", "gradients")),
    ("offload/pager.py", "Pager._arrive", "slot.read.wait",
     Scenario(2, "disk", "plain")),
    ("offload/pager.py", "_settle", "write.wait",
     Scenario(2, "disk", "plain")),
    ("offload/shard_store.py", "HostShardStore.acquire", "copy.synchronize",
     Scenario(3, "parameters", "edits", 4)),
    ("offload/shard_store.py", "CopyGather.wait", "self._copy.wait_stream",
     Scenario(3, "parameters", "gradients")),
    ("offload/staged_shard_store.py", "StagingSlots.take", "leaving.synchronize",
     Scenario(3, "all disk", "plain")),
    ("offload/staged_shard_store.py", "StagedDiskShardStore.open_gather", "self._staging.wait",
     Scenario(3, "all disk", "plain")),
    ("offload/step_numbers.py", "StepNumbers.wait", "self._arrival.synchronize",
     Scenario(2, "optimizer", "plain", 1, "fp16")),
    ("offload/stores.py", "Stores.finish_copies", "streams.synchronize",
     Scenario(2, "delayed", "close_after_step")),
    ("offload/swapped_storage.py", "HostBuffer.copy_in", "ops_of(here.device).record_use",
     Scenario(3, "none", "offload_states_on_side_stream")),
    ("zero/reduce.py", "GradReducer._drain", "handle.wait",
     Scenario(2, "none", "plain", 4)),
    ("zero/reduce.py", "GradReducer._spread", "handle.wait",
     Scenario(0, "none", "plain", 4)),
    ("zero/reduce.py", "GradReducer.abandon", "handle.wait",
     Scenario(2, "none", "exception_in_backward", 4)),
    ("zero/unit.py", "Unit.wait_for_unshard", "handle.wait",
     Scenario(3, "none", "plain", 4)),
    ("zero/updaters.py", "HostUpdater._update", "transfer.wait",
     Scenario(2, "disk", "plain")),
]  # fmt: skip
"""File, function and beginning of each statement, and a scenario that needs it."""

COVERED = {
    "comm/two_hop.py": "tests/streams/test_two_hop_streams.py removes each of them",
    "device/ops.py": "a flag is read after a later wait",
    "engine/build.py": "buffers are used after other waits",
    "engine/flops.py": "a measurement of time",
    "engine/offload_states.py": "waits of a call that is asked to be complete when it returns",
    "engine/optimizer_step.py": "the update was waited for when the next one began",
    "offload/async_update.py": "the numbers of the step arrive after the gradient",
    "offload/disk_check.py": "a measurement of the disk",
    "offload/grad_store.py": "gradients on disk are measured where they are read",
    "offload/swap_file.py": "waits of host threads",
    "zero/access.py": "broadcasts before a gather that is waited for",
    "zero/materialize.py": "construction",
    "zero/optimizer.py": "the update was waited for when the next one began",
    "zero/param_bucket.py": "construction",
}
"""Files whose other ordering statements no scenario needs alone, and why."""


def find(file: str, function: str, text: str) -> Statement:
    """The first statement of the source with this beginning."""
    found = [s for s in statements() if s[:2] == (file, function) and s.call.startswith(text)]
    assert found, f"{file}: {function} has no statement {text!r} any more: remove its row"
    return found[0]


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: f"{row[1]}: {row[2]}")
@on_ranks(1, group=False)
def test_without_it_a_mistake_is_found(row):
    *which, scenario = row
    outcome = run_scenario(scenario, without=removed(find(*which)))
    assert outcome.findings


def test_ordering_statements_are_in_the_files_of_the_tables():
    files = {statement.file for statement in statements()}
    assert files <= {row[0] for row in SHOWN} | set(COVERED)
