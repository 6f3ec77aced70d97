"""Which part of a model's configuration describes its language model."""

from __future__ import annotations

from typing import Any

from zeroshard.comm.mesh_objects import text_config


class Several:
    def get_text_config(self) -> Any:
        raise ValueError("an encoder and a decoder")


class Nested:
    text = "the text part"

    def get_text_config(self) -> Any:
        return self.text


def test_the_text_part_is_found_and_ambiguous_or_plain_configurations_are_themselves() -> None:
    several, plain = Several(), object()
    assert text_config(several) is several
    assert text_config(plain) is plain
    assert text_config(None) is None
    assert text_config(Nested()) == "the text part"
