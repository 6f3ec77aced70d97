"""Every public name of torch around a step has a row, or a reason why it has none."""

from __future__ import annotations

from types import GetSetDescriptorType
from typing import Any

import api_functions  # noqa: F401
import api_modules  # noqa: F401
import api_optimizers  # noqa: F401
import api_outputs  # noqa: F401
import api_parameters  # noqa: F401
import torch
from api_not_yet import NOT_YET
from api_rows import NOT_APPLICABLE, ROWS
from torch import nn
from torch.nn.modules import module
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler, swa_utils


def _members(kind: type) -> set[str]:
    """Public names that ``kind`` and its bases in torch define."""
    of_torch = [base for base in kind.__mro__ if base.__module__.startswith("torch")]
    return {name for base in of_torch for name in vars(base) if not name.startswith("_")}


def _attributes(kind: Any) -> set[str]:
    found = {n for n, value in vars(kind).items() if isinstance(value, GetSetDescriptorType)}
    return {name for name in found if not name.startswith("_")}


PUBLIC = {
    "Optimizer": _members(torch.optim.Optimizer),
    "Module": _members(nn.Module),
    "module": set(module.__all__),
    "utils": set(nn.utils.__all__),
    "parametrizations": set(parametrizations.__all__),
    "func": set(torch.func.__all__),
    "amp": set(torch.amp.__all__),
    "GradScaler": _members(torch.amp.GradScaler),
    "optim": set(torch.optim.__all__),
    "swa_utils": set(swa_utils.__all__),
    "AveragedModel": _members(swa_utils.AveragedModel) - _members(nn.Module),
    "lr_scheduler": set(lr_scheduler.__all__),
    "LRScheduler": _members(lr_scheduler.LRScheduler),
    "Tensor": _attributes(torch._C.TensorBase),
}


def test_every_public_name_has_a_row():
    public = {f"{owner}.{name}" for owner, names in PUBLIC.items() for name in names}
    covered = {name for row in ROWS.values() for name in row.covers}
    assert sorted(public - covered - set(NOT_APPLICABLE)) == []
    assert sorted(covered & set(NOT_APPLICABLE)) == []


def test_names_of_rows_exist():
    """A name that torch has removed, or that was misspelled, would cover nothing."""
    owners = {
        "Tensor": torch.Tensor,
        "utils": nn.utils,
        "parametrize": nn.utils.parametrize,
        **{"Optimizer": torch.optim.Optimizer, "Module": nn.Module, "optim": torch.optim},
    }
    covered = {name for row in ROWS.values() for name in row.covers} | set(NOT_APPLICABLE)
    unknown = []
    for name in covered:
        owner, _, member = name.partition(".")
        known = member in PUBLIC.get(owner, ()) or hasattr(owners.get(owner), member)
        if not known and name not in NOT_APPLICABLE:
            unknown.append(name)
    assert sorted(unknown) == []


def test_known_faults_are_of_rows():
    assert sorted(set(NOT_YET) - set(ROWS)) == []
