"""How does a Lightning program train under ZeroShard, with GPUs or without?

    Trainer(strategy=ZeroShardStrategy(stage=3), accelerator="cpu", devices=2)

Lightning's own strategy for DeepSpeed drives the engine, with all its arguments; what it refuses without
CUDA is put right here. ``Trainer(strategy="deepspeed")`` works too, on GPUs, in a program that found
ZeroShard as ``deepspeed`` (:mod:`zeroshard.compat`).
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from zeroshard.integrations.deepspeed.install import install


class ZeroShardStrategy(DeepSpeedStrategy):
    """``stage``, ``config`` and all other arguments are those of Lightning's ``DeepSpeedStrategy``.

    Raises :class:`UsageError` if another ``deepspeed`` was imported already.
    """

    strategy_name = "zeroshard"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        install()
        super().__init__(*args, **kwargs)

    def setup_environment(self) -> None:
        """As on every device: without the check for CUDA."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Without a GPU there are no device numbers to check."""
        if self.root_device.type == "cuda":
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()
