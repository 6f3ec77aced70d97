"""Reads DeepSpeed's JSON into one typed, resolved ``Config``. Other packages do not see the JSON."""

from __future__ import annotations

from zeroshard.config.fields import Key
from zeroshard.config.keys import KEYS
from zeroshard.config.resolve import Hardware, LoadedConfig, load_config
from zeroshard.config.schema import Config

__all__ = ["KEYS", "Config", "Hardware", "Key", "LoadedConfig", "load_config"]
