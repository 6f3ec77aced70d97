"""What a plan tells while it is made."""

from __future__ import annotations

import time

from zeroshard.cli import plan as module


def test_a_long_plan_says_once_that_it_is_long_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(module, "LONG_S", 0.01)
    with module.progress(verbose=False) as audience:
        for _ in range(2):
            audience.begins("stage 3")
            time.sleep(0.2)
            audience.ended(None)
    told = "the first simulation: stage 3: not possible; more may follow"
    assert capsys.readouterr().err == f"zeroshard: {module.LONG}\nzeroshard: {told}\n"
    monkeypatch.setattr(module, "LONG_S", 0.1)
    with module.progress(verbose=False):
        pass
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
