"""Reads the configuration objects of Transformers models, without that library."""

from __future__ import annotations

from typing import Any


def text_config(config: Any) -> Any:
    """The part of a model's configuration that describes its language model; ``config`` itself if none.

    A model of several modalities has a configuration for each. If several of them describe a language
    model, there is none of the whole.
    """
    get = getattr(config, "get_text_config", None)
    if get is None:
        return config
    try:
        return get()
    except ValueError:  # an encoder and a decoder have one each
        return config
