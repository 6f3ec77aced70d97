"""Lightning with ZeroShard on ranks without a GPU trains like plain DDP."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec

import pytest
import warm_python

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="lightning is not installed"
)  # not imported here: each worker that collects would

PROGRAM = """
import json, os, sys
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zeroshard.integrations.lightning import ZeroShardStrategy


class Net(lightning.LightningModule):
    def configure_model(self):
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def fit(stage, epochs, resume=None):
    strategy = "ddp" if stage is None else ZeroShardStrategy(stage=stage, logging_batch_size_per_gpu=4)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )
    model = Net()
    model.losses = []
    trainer.fit(model, loader, ckpt_path=resume)
    return trainer, model.losses


x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
stages = json.loads(sys.argv[1])
for stage in stages:
    if stage is None:
        trainer, losses = fit(None, 3)
    else:
        trainer, losses = fit(stage, 2)
        trainer.save_checkpoint(f"saved-{stage}.ckpt")
        losses += fit(stage, 3, f"saved-{stage}.ckpt")[1]
    if trainer.global_rank == 0:
        print("LOSSES", json.dumps(losses), flush=True)
if None in stages:  # DDP left to the end of the interpreter sometimes aborts there: a thread of gloo's
    torch.distributed.barrier()
    os._exit(0)
"""

STAGES = (2, 3)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, list[float]]:
    """The losses at each stage and, last, of DDP for None: all in the same two processes."""
    folder = tmp_path_factory.mktemp("lightning")
    stages = [*STAGES, None]
    (folder / "program.py").write_text(PROGRAM)
    done = warm_python.run(
        [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
         "program.py", json.dumps(stages)],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=150,
        warm_ranks=True, imports=["lightning"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOSSES")]
    losses = [json.loads(line.removeprefix("LOSSES")) for line in lines]
    return dict(zip(stages, losses, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_ddp_also_after_saving_and_resuming(stage, found):
    assert found[stage] == pytest.approx(found[None], rel=1e-5)
