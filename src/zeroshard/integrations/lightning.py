"""A Lightning strategy that trains under ZeroShard, with or without GPUs.

    Trainer(strategy=ZeroShardStrategy(stage=3), accelerator="cpu", devices=2)

Lightning's strategy for DeepSpeed drives the engine and takes all its arguments. This subclass removes
its requirement of CUDA, and raises where ``config=`` and the program contradict each other, which
Lightning ignores. ``Trainer(strategy="deepspeed")`` works, too, on GPUs, in a program that imports
ZeroShard as ``deepspeed`` (:mod:`zeroshard.compat`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

try:
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
except ImportError as error:
    raise ImportError(
        f"zeroshard.integrations.lightning needs Lightning, which cannot be imported ({error}): "
        "pip install 'zeroshard[lightning]'",
        name=error.name,
    ) from error

from zeroshard.deepspeed.install import come_first
from zeroshard.errors import UsageError


class ZeroShardStrategy(DeepSpeedStrategy):
    """``stage``, ``config`` and all other arguments are those of Lightning's ``DeepSpeedStrategy``.

    Raises:
        UsageError: another ``deepspeed`` was imported, or an argument contradicts ``config``. When
            training starts: an argument of the Trainer contradicts ``config``.
    """

    strategy_name = "zeroshard"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        come_first()
        super().__init__(*args, **kwargs)
        given = inspect.signature(DeepSpeedStrategy).bind_partial(*args, **kwargs).arguments
        if given.get("config") is not None:
            _refuse(_against_arguments(self.config or {}, given))

    def setup_environment(self) -> None:
        """The set-up of ``DDPStrategy``, without the check for CUDA."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """The set-up of the base class. Without a GPU its check of device numbers is left out."""
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def init_deepspeed(self) -> None:
        """Compare the Trainer with ``config`` first: Lightning fills in only absent keys.

        Raises:
            UsageError: they contradict each other.
        """
        assert self.lightning_module is not None  # Lightning calls this with a module only
        clip = self.lightning_module.trainer.gradient_clip_val
        precision = str(self.precision_plugin.precision)
        _refuse(_against_trainer(self.config or {}, precision=precision, clip=clip))
        super().init_deepspeed()


def _refuse(problems: Iterator[str]) -> None:
    if lines := list(problems):
        raise UsageError("\n".join(lines))


def _against_arguments(config: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """A line for each argument that contradicts ``config``. Lightning would ignore these."""
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if given.get("stage", stage) != stage:
        yield (
            f"ZeroShardStrategy(stage={given['stage']}) and zero_optimization.stage: {stage} in "
            "config: with config=, the stage is read only from config. Remove the argument, or "
            "change the config."
        )
    for argument, key in (
        ("offload_optimizer", "offload_optimizer"),
        ("offload_parameters", "offload_param"),
    ):
        section = zero.get(key) or {}
        if given.get(argument) and section.get("device", "none") == "none":
            yield (
                f"ZeroShardStrategy({argument}=True), and config has no "
                f"zero_optimization.{key}.device: with config=, offloading is read only from "
                "config. Write it into the config."
            )


def _against_trainer(
    config: Mapping[str, Any], *, precision: str, clip: float | None
) -> Iterator[str]:
    """A line for each argument of the Trainer that contradicts ``config``.

    ``precision``: Lightning's name for it. ``clip``: ``gradient_clip_val``. With "32-true", ``config``
    may enable a mode: models whose inputs are tokens are trained like this.
    """
    in_config = config.get("gradient_clipping")
    if clip is not None and isinstance(in_config, (int, float)) and in_config != clip:
        yield (
            f"Trainer(gradient_clip_val={clip}) and gradient_clipping: {in_config} in the "
            "configuration: only the second would have an effect. Use only one of them."
        )
    enabled = [mode for mode in ("fp16", "bf16") if (config.get(mode) or {}).get("enabled") is True]
    wanted = {"16": "fp16", "bf16": "bf16"}.get(precision.partition("-")[0])
    if wanted is not None and (others := [mode for mode in enabled if mode != wanted]):
        yield (
            f'Trainer(precision="{precision}") and {others[0]}.enabled: true in the '
            "configuration: parameters have one dtype. Use the same precision in both."
        )
