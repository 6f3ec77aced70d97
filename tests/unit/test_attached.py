"""A value that is attached to an object stays with this object and disappears with it."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from zeroshard.zero.attached import Attached


def test_a_value_belongs_to_one_object_not_to_an_equal_one():
    values: Attached[Tensor, str] = Attached()
    one, other = torch.ones(3), torch.ones(3)
    values[one] = "one"
    assert values.get(one) == "one"
    assert one in values
    assert values.get(other) is None
    assert other not in values


def test_the_last_value_counts_until_it_is_discarded():
    values: Attached[Tensor, int] = Attached()
    tensor = torch.ones(3)
    values[tensor] = 1
    values[tensor] = 2
    gc.collect()
    assert values.get(tensor) == 2
    values.discard(tensor)
    values.discard(tensor)
    assert values.get(tensor) is None
    assert len(values) == 0


def test_an_entry_goes_with_its_object_so_that_no_other_inherits_it():
    values: Attached[Tensor, int] = Attached()
    for number in range(100):  # memory, and with it ids, are used again and again
        tensor = nn.Parameter(torch.ones(3))
        assert values.get(tensor) is None
        values[tensor] = number
        del tensor
    assert len(values) == 0


def test_an_entry_goes_with_an_object_in_a_cycle():
    values: Attached[nn.Module, int] = Attached()
    module = nn.Linear(2, 2)
    module.__dict__["itself"] = module
    values[module] = 1
    del module
    gc.collect()
    assert len(values) == 0


def test_a_parameter_that_only_autograd_holds_keeps_its_value():
    values: Attached[Tensor, int] = Attached()
    param = nn.Parameter(torch.ones(3))
    values[param] = 7
    loss = (param * 2).sum()
    del param
    gc.collect()
    node = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    assert values.get(node.variable) == 7
