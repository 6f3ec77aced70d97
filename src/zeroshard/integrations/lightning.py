"""How does a Lightning program train under ZeroShard, with GPUs or without?

    Trainer(strategy=ZeroShardStrategy(stage=3), accelerator="cpu", devices=2)

Lightning's own strategy for DeepSpeed drives the engine, with all its arguments; what it refuses without
CUDA is put right here, and so is what it passes over where ``config=`` and the program contradict each
other. ``Trainer(strategy="deepspeed")`` works too, on GPUs, in a program that found ZeroShard as
``deepspeed`` (:mod:`zeroshard.compat`).
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

    Raises :class:`UsageError` if another ``deepspeed`` was imported already, if an argument contradicts
    ``config``, and, when training starts, if the Trainer does.
    """

    strategy_name = "zeroshard"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        come_first()
        super().__init__(*args, **kwargs)
        given = inspect.signature(DeepSpeedStrategy).bind_partial(*args, **kwargs).arguments
        if given.get("config") is not None:
            _refuse(_against_arguments(self.config or {}, given))

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

    def init_deepspeed(self) -> None:
        """After a look at what the Trainer and ``config`` say: Lightning fills in only what is absent."""
        assert self.lightning_module is not None  # Lightning calls this with a module only
        clip = self.lightning_module.trainer.gradient_clip_val
        precision = str(self.precision_plugin.precision)
        _refuse(_against_trainer(self.config or {}, precision=precision, clip=clip))
        super().init_deepspeed()


def _refuse(problems: Iterator[str]) -> None:
    if lines := list(problems):
        raise UsageError("\n".join(lines))


def _against_arguments(config: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """A line for each argument that contradicts ``config``, and would be passed over in silence."""
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if given.get("stage", stage) != stage:
        yield (
            f"ZeroShardStrategy(stage={given['stage']}) and zero_optimization.stage: {stage} in config: "
            "with config=, Lightning takes the stage from there alone. Drop the argument, or change the "
            "config."
        )
    for argument, key in (
        ("offload_optimizer", "offload_optimizer"),
        ("offload_parameters", "offload_param"),
    ):
        section = zero.get(key) or {}
        if given.get(argument) and section.get("device", "none") == "none":
            yield (
                f"ZeroShardStrategy({argument}=True), and config has no zero_optimization.{key}.device: "
                "with config=, Lightning takes offloading from there alone. Write it into the config."
            )


def _against_trainer(
    config: Mapping[str, Any], *, precision: str, clip: float | None
) -> Iterator[str]:
    """A line for each argument of the Trainer that contradicts ``config``.

    ``precision``: Lightning's word for it; ``clip``: ``gradient_clip_val``. With "32-true" a mode in
    ``config`` is legal: models that take tokens train so.
    """
    in_config = config.get("gradient_clipping")
    if clip is not None and isinstance(in_config, (int, float)) and in_config != clip:
        yield (
            f"Trainer(gradient_clip_val={clip}) and gradient_clipping: {in_config} in the configuration: "
            "only the second would act. Write it in one place."
        )
    enabled = [mode for mode in ("fp16", "bf16") if (config.get(mode) or {}).get("enabled") is True]
    wanted = {"16": "fp16", "bf16": "bf16"}.get(precision.partition("-")[0])
    if wanted is not None and (others := [mode for mode in enabled if mode != wanted]):
        yield (
            f'Trainer(precision="{precision}") and {others[0]}.enabled: true in the configuration: '
            "parameters have one dtype. Let both say the same."
        )
