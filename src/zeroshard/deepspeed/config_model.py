"""Reads configurations for programs that call ``deepspeed`` without an engine."""

from __future__ import annotations

from typing import Any, ClassVar

from zeroshard.comm.env import current_rank_info
from zeroshard.config import Config, load_config
from zeroshard.config.fields import Section, is_auto


def model_config(source: Any) -> Config | None:
    """The settings that matter for building a model: without batch sizes, optimizer and schedule.

    None if ``source`` is None. Unknown keys that DeepSpeed ignores are ignored here; ``initialize``
    reports them.
    """
    if source is None or isinstance(source, Config):
        return source
    world_size = current_rank_info().world_size
    return load_config(source, world_size=world_size, for_training=False, as_deepspeed=True).config


class DeepSpeedConfigModel(Section):
    """Base class for sections that programs define.

    Fields are checked, also on assignment. Unknown names are errors. A value ``"auto"`` means the
    default, unless ``strict``.
    """

    model_config: ClassVar[Any] = {  # in addition to that of ``Section``
        "frozen": False,
        "populate_by_name": True,
        "validate_default": True,
        "validate_assignment": True,
        "use_enum_values": True,
        "arbitrary_types_allowed": True,
    }

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(
            **{name: value for name, value in data.items() if strict or not is_auto(value)}
        )
