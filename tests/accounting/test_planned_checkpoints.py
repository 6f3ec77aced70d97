"""What a plan says of a checkpoint is what a save and a load of two ranks need."""

from __future__ import annotations

import pickle
from pathlib import Path

import plan_check
import pytest
from zeroshard_testing.ranks import run_ranks

from zeroshard.checkpoint import blocks
from zeroshard.core.mesh import Mesh
from zeroshard.core.tiers import Tier
from zeroshard.planner.model_source import loss_of
from zeroshard.planner.simulate import observe, simulate

ASYNCHRONOUS = {
    "checkpoint": {"asynchronous": True},
    "fp16": {"enabled": True, "initial_scale_power": 1},
}
GENERATORS = 32 << 10
"""The states of generators, which a save and a load copy, are smaller than this."""


def observed(case: plan_check.Case, config: dict, folder: str) -> None:
    """Save and load, and count the bytes of buffers and of blocks that are read in part."""
    made, read = blocks.aligned_bytes, blocks.BlockFile._read_edge
    written, edges = [], []

    def allocated(nbytes):
        written.append(nbytes)
        return made(nbytes)

    def kept(file, block):
        found = read(file, block)
        edges.append(len(found))
        return found

    blocks.aligned_bytes, blocks.BlockFile._read_edge = allocated, kept
    try:
        batch = plan_check._batch(case)
        found = observe(
            plan_check.build(case), config, batch, loss_fn=loss_of, directory=f"{folder}/saved"
        )
    finally:
        blocks.aligned_bytes, blocks.BlockFile._read_edge = made, read
    seen = found, sum(written), sum(edges)
    Path(folder, f"rank-{found.rank}").write_bytes(pickle.dumps(seen))


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        (plan_check.Case("gpt2", 0, False), {}),
        (plan_check.Case("bert", 3, False, "cpu"), ASYNCHRONOUS),
    ],
    ids=["whole", "sharded and asynchronous"],
)
def test_files_and_memory_of_a_checkpoint_are_planned(tmp_path, case, keys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = plan_check.settings(case) | keys
    run_ranks(observed, 2, case, config, str(tmp_path), timeout=120)
    saved = {
        path.name: path.stat().st_size for path in (tmp_path / "saved").glob("*/*.safetensors")
    }
    planned_files = {}
    for rank in range(2):
        plan = simulate(
            plan_check.build(case), config, plan_check._batch(case), mesh=Mesh(data_shard=2),
            rank=rank, loss_fn=loss_of, with_checkpoint=True,
        )  # fmt: skip
        real, written, edges = pickle.loads((tmp_path / f"rank-{rank}").read_bytes())  # our own
        needs = plan.checkpoint
        planned_files |= needs.files
        assert needs.write_nbytes == written
        assert needs.copy_nbytes == (sum(needs.files.values()) if keys else 0)
        if not rank:  # it has the file that all ranks read
            assert needs.read_nbytes == pytest.approx(edges, abs=4096)  # ranks' headers differ
        if not keys:  # the copy is in memory that is not followed
            assert 0 <= real.together["save"] - plan.together["save"] < GENERATORS
            ours, said = real.moments["load"], plan.moments["load"]
            assert 0 <= ours.device_nbytes - said.device_nbytes < GENERATORS
        lent = plan.moments["save"].held["scratch", Tier.HOST.name]
        assert lent >= needs.write_nbytes + needs.copy_nbytes
    assert planned_files == saved
