"""What a report of a step shows when it is printed."""

from __future__ import annotations

import torch

from zeroshard.metrics.step_report import StepReport


def test_a_report_shows_its_numbers_and_no_private_fields():
    report = StepReport(3, (0.5,), torch.tensor(2.0), None, torch.tensor(1.0), False)
    assert repr(report) == (
        "StepReport(step=3, lr=0.5, loss=None, grad_norm=2.0, loss_scale=1.0, skipped=False)"
    )
