"""An all-gather that failed leaves a unit that can be closed, and says so when it is used again."""

from __future__ import annotations

import warnings

import pytest
import torch
from loops import open_engine
from zeroshard_testing import on_ranks

from zeroshard.errors import DistributedError


class Broken:
    def wait(self) -> None:
        raise ConnectionError("the peer is gone")


@on_ranks(2)
def test_the_second_use_is_an_error_and_the_first_error_stays_alone():
    engine = open_engine(3)
    with engine, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        units = [unit for unit in engine.runtime.units if not unit.resident]
        for unit in units:
            patch.setattr(unit.store, "all_gather", lambda *_, **__: Broken())
        model = engine.module
        x = torch.ones(2, next(iter(model.children())).in_features)
        with pytest.raises(ConnectionError, match="the peer is gone"):
            engine(x)
        with pytest.raises(DistributedError, match="because their all-gather failed before"):
            for unit in units:
                unit.wait_for_unshard()
        for unit in units:
            unit.reshard()
