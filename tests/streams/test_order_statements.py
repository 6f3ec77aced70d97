"""Every statement that orders streams or threads is needed: without it, a scenario shows a mistake.

A mistake is a finding, or values that are not those of the CPU. This keeps the checker honest too: it
sees each of these mistakes. The few statements that wait for another reason are listed with it.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from ordering import Statement, removed, statements
from scenarios import SPECIAL, Scenario, run_scenario
from support.covering import sampled
from zeroshard_testing import on_ranks

from zeroshard.zero.unit import Unit


def on_nodes(program: str) -> Scenario:
    """Four ranks on two nodes, whose sums pass between them once per step."""
    return Scenario(3, "none", program, 4, "bf16", nodes="replicas boundary")


SHOWN: list[tuple[str, str, str, Scenario]] = [
    ("checkpoint/save.py", "snapshot", "ops_of(device).synchronize",
     Scenario(2, "none", "background_save")),
    ("comm/process_group.py", "ProcessGroupComm.finish", "work.wait()",
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
    ("offload/host_chunk.py", "HostChunk.fetch_gradient", "arrival.synchronize",
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
    ("offload/disk_stores.py", "StagingSlots.take", "leaving.synchronize",
     Scenario(3, "all disk", "plain")),
    ("offload/disk_stores.py", "StagedDiskShardStore.open_gather", "self._staging.wait",
     Scenario(3, "all disk", "plain")),
    ("offload/host_chunk.py", "StepNumbers.wait", "self._arrival.synchronize",
     Scenario(2, "optimizer", "plain", 1, "fp16")),
    ("offload/stores.py", "Stores.finish_copies", "streams.synchronize",
     Scenario(2, "delayed", "close_after_step")),
    ("offload/swapped_storage.py", "HostBuffer.copy_in", "ops_of(here.device).record_use",
     Scenario(3, "none", "offload_states_on_side_stream")),
    ("zero/reduce.py", "GradReducer._drain", "handle.wait",
     Scenario(2, "none", "plain", 4)),
    ("comm/process_group.py", "JointHandle.wait", "handle.wait",
     Scenario(3, "none", "whole_blocks", 4)),
    ("zero/prefetch.py", "UnitGroup.wait_for_unshard", "handle.wait",
     Scenario(3, "none", "whole_blocks", 4)),
    ("zero/reduce.py", "GradReducer._spread", "handle.wait",
     Scenario(0, "none", "plain", 4)),
    ("zero/reduce.py", "GradReducer.abandon", "self._in_flight.popleft().handle.wait",
     Scenario(2, "none", "exception_in_backward", 4)),
    ("zero/unit.py", "Unit.wait_for_unshard", "handle.wait",
     Scenario(3, "none", "plain", 4)),
    ("zero/updaters.py", "HostUpdater.receive", "transfer.wait",
     Scenario(2, "disk", "plain")),
    ("comm/process_group.py", "ProcessGroupComm.all_gather_small", "self._start",
     Scenario(0, "none", "plain", 4)),
    ("device/accelerator.py", "AcceleratorOps.synchronize", "torch.accelerator.synchronize",
     Scenario(3, "none", "two_offloads")),
    ("device/ops.py", "HostFlag.__bool__", "self._arrival.synchronize",
     Scenario(2, "none", "reports", 1, "fp16")),
    ("engine/build.py", "_share_buffers", "comm.broadcast",
     Scenario(0, "none", "buffers", 4)),
    ("engine/offload_states.py", "StateOffloader.forget_spare", "self._ops.synchronize",
     Scenario(3, "none", "two_offloads")),
    ("engine/offload_states.py", "StateOffloader._arrived", "self._ops.synchronize",
     Scenario(3, "none", "two_offloads")),
    ("engine/optimizer_step.py", "OptimizerStep.all_gather_late", "pending.wait",
     Scenario(2, "delayed", "plain")),  # it sends the parameter, too
    ("offload/async_update.py", "AsyncUpdateWorker.update", "transfer.wait",
     Scenario(2, "optimizer", "plain")),
    ("offload/async_update.py", "Guess.arrived_factor", "self._arrival.synchronize",
     Scenario(2, "early", "plain")),
    ("offload/async_update.py", "EarlyUpdate.run", "arrival.synchronize",
     Scenario(2, "early", "plain")),
    ("offload/async_update.py", "EarlyUpdate.settle", "transfer.wait",
     Scenario(2, "early", "plain")),
    ("offload/grad_store.py", "DiskGradStore.acquire", "read.wait",
     Scenario(2, "disk", "on_the_cpu")),
    ("offload/grad_store.py", "DiskGradStore.finish", "self._write.wait",
     Scenario(2, "disk", "on_the_cpu")),
    ("offload/grad_store.py", "DiskGradStore.peek", "self._file.read",
     Scenario(2, "disk", "on_the_cpu")),
    ("offload/host_chunk.py", "HostChunk.fetch_gradient", "self.streams.h2d",
     Scenario(2, "optimizer", "gradients")),
    ("offload/host_chunk.py", "HostChunk.copy_param_from_device", "self._copy_from_device",
     Scenario(2, "optimizer", "edits", 1, "bf16")),
    ("offload/host_chunk.py", "HostChunk.wait_until_unused", "leaving.synchronize",
     Scenario(2, "optimizer", "load", 1, "bf16")),
    ("offload/grad_store.py", "HostGradStore.write", "self._before",
     Scenario(2, "optimizer", "unused_module")),
    ("offload/shard_store.py", "HostShardStore.all_gather", "written.wait_stream",
     Scenario(3, "parameters", "edits_in_forward")),
    ("offload/disk_stores.py", "DiskShardStore.acquire", "self._write.wait",
     Scenario(3, "all disk", "masters")),
    ("offload/disk_stores.py", "DiskShardStore._acquire_to_read", "read.wait",
     Scenario(3, "all disk", "on_the_cpu")),
    ("offload/disk_stores.py", "DiskShardStore.finish", "self._write.wait",
     Scenario(3, "all disk", "on_the_cpu")),
    ("offload/stores.py", "Stores.finish_copies.<locals>.finish", "streams.synchronize",
     Scenario(2, "optimizer", "close_by_error")),
    ("offload/swap_file.py", "Transfer.wait", "self._ended.wait",
     Scenario(2, "disk", "on_the_cpu")),
    ("offload/swap_file.py", "Transfer.join", "self._ended.wait",
     Scenario(3, "all disk", "exception_in_backward")),
    ("zero/gathered.py", "_adopt_edits", "unit.comm.broadcast",
     Scenario(2, "none", "edits", 4)),
    ("zero/materialize.py", "scatter", "comm.broadcast",
     Scenario(3, "none", "sharded_construction", 4)),
    ("zero/materialize.py", "ParamScatterer._send_until", "self.comm.broadcast",
     Scenario(0, "none", "plain", 4)),
    ("zero/node_sums.py", "NodeSums.drain", "handle.wait()", on_nodes("accumulation")),
    ("zero/node_sums.py", "NodeSums.drain", "passing.wait()", on_nodes("accumulation")),
    ("zero/node_sums.py", "NodeSums.summed", "handle.wait()", on_nodes("sums")),
    ("zero/node_sums.py", "NodeSums.abandon", "flight.popleft", on_nodes("exception_in_micro_batch")),
    ("zero/optimizer.py", "ShardedOptimizer.wait_for_worker", "self._worker.wait",
     Scenario(2, "optimizer", "background_save")),
    ("zero/param_bucket.py", "BucketedParameter.send", "self.context.comm.broadcast",
     Scenario(3, "none", "sharded_construction", 4)),
    ("zero/param_bucket.py", "ParamBucket._gather", "comm.all_gather",
     Scenario(3, "none", "sharded_construction", 4)),
    ("zero/reduce.py", "GradReducer._summed_over_holders", "self._reduce_scatter",
     Scenario(1, "none", "sums", 4)),
    ("zero/unit.py", "Unit.gathered_copy", "self.comm.all_gather",
     Scenario(3, "none", "gradients", 4)),
]  # fmt: skip
"""File, function and beginning of each statement, and a scenario that needs it."""

NOT_FOR_ORDER = [
    ("comm/hops.py", "", "", "tests/streams/test_two_hop_streams.py removes each of them."),
    ("comm/collectives.py", "Then.wait", "", "tests/streams/test_two_hop_streams.py removes it."),
    ("comm/process_group.py", "ProcessGroupComm.finish", "work.wait(self._slice)",
     "Gloo, where no stream is used."),
    ("engine/build_runtime.py", "_members", "tensor.broadcast",
     "A mesh, of which the checker has no model."),
    ("engine/build.py", "_first_values", "watch.world.broadcast",
     "One message while an engine is built; no scenario builds a model on the meta device."),
    ("zero/mesh_norm.py", "", "", "A mesh, of which the checker has no model."),
    ("metrics/flops.py", "", "", "A measurement of time."),
    ("offload/capacity_check.py", "", "", "A measurement of the disk."),
    ("device/ops.py", "ArrivingValues.read", "self._arrival.synchronize",
     "The stream of steps reads only numbers that have arrived."),
    ("metrics/step_stream.py", "StepStream.close", "self.ops.synchronize",
     "The engine ends. Without it the values of the last steps are lost; none is wrong."),
    ("engine/offload_states.py", "StateOffloader.offload", "self._ops.synchronize",
     "The program asked to wait. What follows is ordered by streams in any case."),
    ("engine/offload_states.py", "StateOffloader.reload", "self._ops.synchronize",
     "The program asked to wait. What follows is ordered by streams in any case."),
    ("offload/pager.py", "Pager._arrive", "page._write.wait",
     "The write has ended: the read of the slot began after it. It raises the error of the write."),
    ("zero/optimizer.py", "ShardedOptimizer.update", "pending.wait",
     "The unit's parameter is in host memory, so that no copy is waited for. It raises the errors of "
     "updates."),
]  # fmt: skip
"""File, function and beginning of the other statements ("": all of the file), and what they are for."""


def find(file: str, function: str, text: str) -> Statement:
    """The first statement of the source with this beginning."""
    found = [s for s in statements() if s[:2] == (file, function) and s.call.startswith(text)]
    assert found, f"{file}: {function} has no statement {text!r} any more: remove its row"
    return found[0]


TRIES = 20
"""If a thread of the disk has ended before somebody asks, no mistake shows. Nearly always one shows."""


def shows_mistake(scenario: Scenario, statement: Statement) -> bool:
    """Whether the training without the statement is wrong.

    Memory that is freed too early may end it, or its values may be no numbers.
    """
    try:
        outcome = run_scenario(scenario, without=removed(statement))
    except ChildProcessError as error:
        return "and said nothing" in str(error) or "NonFiniteError" in str(error)
    return bool(outcome.findings) or outcome.is_equal is False


FIRST_OF_FILE = {row[0]: row for row in reversed(SHOWN)}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row in FIRST_OF_FILE.values() else pytest.mark.full)
        for row in SHOWN
    ],
    ids=lambda row: f"{row[1]}: {row[2]}",
)
@on_ranks(1, group=False)
def test_without_it_a_mistake_is_found(row):
    *which, scenario = row
    assert any(shows_mistake(scenario, find(*which)) for _ in range(TRIES))


class _Dropped:
    """The handle of an all-gather for which nobody waits."""

    def wait(self) -> None:
        pass


@contextmanager
def dropped_when_resharded():
    """A context in which units are freed while their all-gather runs."""
    original = Unit.reshard

    def reshard(unit):
        if unit.handle is not None:
            unit.handle = _Dropped()
        original(unit)

    Unit.reshard = reshard
    try:
        yield
    finally:
        Unit.reshard = original


@on_ranks(1, group=False)
def test_an_all_gather_that_is_dropped_is_found_beside_reductions():
    """With one communicator for both, the wait for the next reduction would cover it."""
    scenario = Scenario(3, "none", "exception_in_backward", 4)
    outcome = run_scenario(scenario, without=dropped_when_resharded())
    assert outcome.findings


SPECIAL_SCENARIOS = sorted({row[-1] for row in SHOWN if row[-1].program in SPECIAL}, key=str)


@pytest.mark.parametrize("scenario", sampled(SPECIAL_SCENARIOS, every=3), ids=str)
@on_ranks(1, group=False)
def test_with_all_statements_nothing_is_found(scenario):
    outcome = run_scenario(scenario)
    assert not outcome.findings, str(outcome)
    assert outcome.is_equal in (True, None), "values differ from those of the CPU"


def test_every_ordering_statement_is_in_a_table():
    rows = [row[:3] for row in (*SHOWN, *NOT_FOR_ORDER)]
    missing = [
        str(statement)
        for statement in statements()
        if not any(
            statement.file == file
            and function in ("", statement.function)
            and statement.call.startswith(beginning)
            for file, function, beginning in rows
        )
    ]
    assert not missing, "\n".join(missing)
    for *which, _ in SHOWN:  # most of these rows run in `make test-full` only
        find(*which)
    found = {statement[:2] for statement in statements()}
    files = {file for file, _ in found}
    for file, function, _, _ in NOT_FOR_ORDER:
        assert (file, function) in found if function else file in files, (file, function)
