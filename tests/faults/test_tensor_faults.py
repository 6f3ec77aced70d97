"""A rank of a tensor group dies or raises: every other rank ends with a verdict that names it.

The connection that breaks first is often that of a collective of torch inside the layers. Each rank is a
process of its own, because a rank that waits in such a collective can only be ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.tensor_networks import cut, loss_of, network, samples

import zeroshard
from zeroshard.core.mesh import Mesh

LIMIT_S = 60
RANKS = 4


def train(what: str, stage: int) -> None:
    """Train until rank 3 fails in the third step."""
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "unit_min_numel": 1,
        "zero_optimization": {"stage": stage},
    }
    zeroshard.init_distributed()
    model = cut(network(32, torch.float32), 2)
    with zeroshard.Engine(model, config=config, mesh=Mesh(data_shard=2, tensor=2)) as engine:
        for step in range(5):
            words = samples(step).chunk(2)[engine.dp_rank]
            logits = engine(words)
            if step == 2 and engine.global_rank == 3:
                if what == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("an error of the program")
            engine.backward(loss_of(logits, words))
            engine.step()


@pytest.mark.parametrize("what", ["killed", "raised"])
@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_names_the_one_that_failed(stage, what):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(RANKS):
            numbers = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": RANKS,
                "LOCAL_WORLD_SIZE": RANKS,
            }
            environ = os.environ | {name: str(number) for name, number in numbers.items()}
            path = f"{Path(__file__).parents[1]}{os.pathsep}{environ.get('PYTHONPATH', '')}"
            process = subprocess.Popen(
                [sys.executable, __file__, what, str(stage)],
                env=environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.kill)
            ranks.append(process)
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    assert time.monotonic() - began_s < LIMIT_S
    for process, output in zip(ranks[:3], outputs[:3], strict=True):
        assert process.returncode, output
        verdict = output[output.rindex("RankLost at step 2") :].splitlines()
        assert "  rank 3 (" in verdict[1], output
        assert "  The cause is in the output of rank 3;" in verdict[3], output


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
