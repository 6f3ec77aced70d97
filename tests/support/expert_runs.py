"""Engines for the models of :mod:`.expert_models`, and their training on this rank's batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from kit import config

import zeroshard
from support import expert_models as tiny
from support.expert_models import Run, Setting, StarvingGate
from zeroshard.core.mesh import Mesh

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
CUT = {
    **PLAN,
    "blocks.*.moe.deepspeed_moe.experts.deepspeed_experts.*.0": "colwise",
    "blocks.*.moe.deepspeed_moe.experts.deepspeed_experts.*.2": "rowwise",
}
"""Tensor ranks share experts, too."""


@contextlib.contextmanager
def opened(
    setting: Setting,
    ep_size: int,
    stage: int,
    dtype: torch.dtype = torch.float64,
    mesh: Mesh | None = None,
    net: Any = None,
    plan: Any = PLAN,
    **keys: Any,
) -> Iterator[zeroshard.Engine]:
    asked = config(
        stage,
        train_micro_batch_size_per_gpu=tiny.SAMPLES,
        gradient_clipping=tiny.CLIP,
        optimizer={"type": "AdamW", "params": {"lr": tiny.LR, "weight_decay": 0.01}},
        **{"unit_min_numel": 1, "gradient_accumulation_steps": setting.micro, **keys},
    )
    net = tiny.model(setting, ep_size, dtype, mesh=mesh) if net is None else net
    plan = None if mesh is None or mesh.tensor == 1 else plan
    engine, *_ = zeroshard.initialize(model=net, config=asked, mesh=mesh, plan=plan)
    try:
        yield engine
    finally:
        engine.close()


def trained(engine: zeroshard.Engine, setting: Setting, steps: int = tiny.STEPS) -> Run:
    run = Run()
    for step in tiny.batches(setting, engine.dp_size)[:steps]:
        for micro in step:
            StarvingGate.data_rank = engine.dp_rank
            words = micro[engine.dp_rank]
            engine.backward(tiny.loss_of(engine(words), words))
            engine.step()
        run.losses.append(float(engine.last_step.loss))
        run.norms.append(engine.get_global_grad_norm())
    run.params = {name: param.clone() for name, param in engine.iter_full_params()}
    return run
