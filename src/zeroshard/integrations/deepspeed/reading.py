"""What does a program that calls ``deepspeed`` mean by its configuration, before there is an engine?"""

from __future__ import annotations

from typing import Any

from zeroshard.comm.env import current_place
from zeroshard.config import Config, load_config


def model_config(source: Any) -> Config | None:
    """What decides how a model is built: ``source`` without batch sizes, optimizer and schedule; None if
    there is none. Keys that DeepSpeed ignores are ignored: ``initialize`` names them."""
    if source is None or isinstance(source, Config):
        return source
    world_size = current_place().world_size
    return load_config(source, world_size=world_size, for_training=False, as_deepspeed=True).config
