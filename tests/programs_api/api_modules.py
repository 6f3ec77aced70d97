"""Programs around modules: all public methods of ``nn.Module``, and the hooks of all modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from api_rows import NOT_APPLICABLE, WIDTH, Net, Program, row
from torch import Tensor, nn
from torch.nn.modules import module as of_all

WRITES_SHARDED: dict[str, Any] = {
    "raises": "GatheredParameters",
    "at": (3,),
    "on": (2,),
}
"""Of programs that write parameters which are elsewhere."""

# ---------------------------------------------------------------------- reading the tree


@row("Module.parameters Module.named_parameters Module.get_parameter")
def module_lists_parameters(p: Program) -> Any:
    p.train(2)
    seen = {name: (tuple(q.shape), q.dtype) for name, q in p.module.named_parameters()}
    seen["direct"] = p.module.get_parameter("second.weight") is p.module.second.weight
    return seen, len(list(p.model.parameters())), [q.numel() for q in p.module.parameters()]


@row("Module.parameters Module.named_parameters Module.get_parameter")
def module_gives_values_of_parameters(p: Program) -> Any:
    p.train(2)
    values = {name: q.detach().clone() for name, q in p.module.named_parameters()}
    return values, p.module.get_parameter("first.bias") * 2, [q.sum() for q in p.model.parameters()]


@row("Module.buffers Module.named_buffers Module.get_buffer Module.register_buffer")
def module_has_buffers(p: Program) -> Any:
    p.module.register_buffer("late", torch.zeros(2).double())
    p.module.scale.mul_(0.5)
    p.train(2)
    return dict(p.module.named_buffers()), list(p.model.buffers()), p.module.get_buffer("late")


@row("Module.children Module.named_children Module.modules Module.named_modules")
def module_lists_modules(p: Program) -> Any:
    names = [name for name, _ in p.module.named_modules()]
    kinds = [type(child).__name__ for child in p.module.children()]
    return names, kinds, [n for n, _ in p.module.named_children()], len(list(p.module.modules()))


@row("Module.get_submodule Module.extra_repr")
def module_finds_a_module(p: Program) -> Any:
    return p.module.get_submodule("second").extra_repr(), repr(p.module)


@row("Module.apply", raises="GatheredParameters", at=(3,), on=(2,))
def module_apply_writes(p: Program) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)

    p.model.apply(fill)
    p.train(2)


@row("Module.apply")
def module_apply_reads(p: Program) -> Any:
    seen: list[str] = []
    p.model.apply(lambda module: seen.append(type(module).__name__))
    return [name for name in seen if "Engine" not in name][:4]


# ---------------------------------------------------------------------- state


@row("Module.state_dict")
def module_state_dict_has_values(p: Program) -> Any:
    p.train(2)
    return {name: value.clone() for name, value in p.module.state_dict().items()}


@row("Module.state_dict")
def module_state_dict_of_the_model(p: Program) -> Any:
    p.train(2)
    state = p.model.state_dict()
    return {name.removeprefix("module."): value.clone() for name, value in state.items()}


@row("Module.load_state_dict", **WRITES_SHARDED)
def module_loads_its_state(p: Program) -> Any:
    p.train()
    saved = {name: value.clone() for name, value in p.module.state_dict().items()}
    p.train(2, first=5)
    keys = p.module.load_state_dict(saved)
    p.train()
    return list(keys.missing_keys), list(keys.unexpected_keys)


@row("Module.load_state_dict", **WRITES_SHARDED)
def module_loads_into_a_part(p: Program) -> None:
    p.train()
    p.module.second.load_state_dict(
        {"weight": torch.eye(WIDTH).double(), "bias": torch.zeros(WIDTH).double()}
    )
    p.train(2)


@row("Module.load_state_dict", raises="nothing.weight")
def module_loads_unknown_keys(p: Program) -> None:
    p.module.load_state_dict({**p.module.state_dict(), "nothing.weight": torch.ones(1)})


@row("Module.load_state_dict", raises="(?i)assign")
def module_loads_by_assignment(p: Program) -> None:
    p.train()
    saved = {name: value.clone() * 2 for name, value in p.module.state_dict().items()}
    p.module.load_state_dict(saved, assign=True)
    p.train()


@row("Module.register_state_dict_pre_hook Module.register_state_dict_post_hook")
def module_hooks_of_state_dict(p: Program) -> Any:
    calls = []
    p.module.register_state_dict_pre_hook(lambda *a: calls.append("pre"))
    p.module.register_state_dict_post_hook(lambda *a: calls.append("post"))
    return sorted(p.module.state_dict()), calls


@row(
    "Module.register_load_state_dict_pre_hook Module.register_load_state_dict_post_hook",
    **WRITES_SHARDED,
)
def module_hooks_of_load_state_dict(p: Program) -> Any:
    calls = []
    p.module.register_load_state_dict_pre_hook(lambda *a: calls.append("pre"))
    p.module.register_load_state_dict_post_hook(lambda *a: calls.append("post"))
    p.module.load_state_dict({k: v.clone() for k, v in p.module.state_dict().items()})
    p.train()
    return calls


class Counting(Net):
    """Has extra state."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"] + 1


@row("Module.get_extra_state Module.set_extra_state", make=Counting, **WRITES_SHARDED)
def module_has_extra_state(p: Program) -> Any:
    p.train()
    saved = {k: v.clone() if isinstance(v, Tensor) else v for k, v in p.module.state_dict().items()}
    p.module.load_state_dict(saved)
    p.train()
    return p.module.count, saved["_extra_state"]


# ---------------------------------------------------------------------- modes and gradients


@row("Module.train Module.eval")
def module_modes(p: Program) -> Any:
    p.model.eval()
    modes = [p.model.training, p.module.second.training]
    p.train()
    p.model.train()
    p.module.first.eval()
    p.train()
    return modes, p.module.first.training, p.module.training


@row("Module.zero_grad")
def module_zero_grad_drops_a_batch(p: Program) -> None:
    p.train()
    p.backward(7)
    p.module.zero_grad()
    p.train(2)


@row("Module.zero_grad")
def module_zero_grad_of_the_model(p: Program) -> None:
    p.train()
    p.backward(7)
    p.model.zero_grad()
    p.train(2)


@row("Module.zero_grad")
def module_zero_grad_of_a_part(p: Program) -> None:
    p.train()
    p.backward(7)
    p.module.second.zero_grad()
    p.backward(1)
    p.step()


@row("Module.requires_grad_")
def module_is_frozen_in_part(p: Program) -> None:
    p.train()
    p.module.first.requires_grad_(False)
    p.train(2)


@row("Module.requires_grad_")
def module_is_frozen_for_one_backward(p: Program) -> None:
    p.train()
    p.module.first.requires_grad_(False)
    x, _y = p.batch(3)
    p.model(x)
    p.module.first.requires_grad_(True)
    p.train(2)


def frozen_first() -> nn.Module:
    model = Net()
    model.first.requires_grad_(False)
    return model


@row("Module.requires_grad_", make=frozen_first)
def module_was_frozen_in_part(p: Program) -> Any:
    p.train(3)
    return [q.requires_grad for q in p.module.parameters()]


@row("Module.requires_grad_", make=frozen_first, raises="(?i)requires_grad|frozen|froze|optimizer")
def module_is_unfrozen(p: Program) -> None:
    p.train()
    p.module.first.requires_grad_(True)
    p.optimizer.add_param_group({"params": list(p.module.first.parameters())})
    p.train(2)


# ---------------------------------------------------------------------- calling


@row("Module.forward")
def module_forward_is_called(p: Program) -> Any:
    x, _ = p.batch()
    y = p.model.forward(x)
    y.square().mean().backward()
    p.step()
    return p.mean(y.mean())


@row("Module.forward")
def module_below_the_engine_is_called(p: Program) -> Any:
    for at in range(2):
        x, y = p.batch(at)
        nn.functional.mse_loss(p.module(x), y).backward()
        p.step()


@row("Module.forward")
def module_parts_are_called(p: Program) -> Any:
    for at in range(2):
        x, y = p.batch(at)
        hidden = p.module.second(p.module.first(x))
        nn.functional.mse_loss(p.module.third(hidden), y).backward()
        p.step()


@row("Module.forward")
def module_is_called_twice_for_one_loss(p: Program) -> None:
    for at in range(2):
        (p.loss(at) + 0.5 * p.loss(at + 10)).backward()
        p.step()


@row("Module.forward")
def module_without_gradients(p: Program) -> Any:
    p.train()
    with torch.no_grad():
        first = p.mean(p.loss(1))
    with torch.inference_mode():
        second = p.mean(p.loss(2))
    p.train()
    return first, second


@row("Module.compile")
def module_compiles_lazily(p: Program) -> None:
    p.module.second.compile(backend="eager")
    p.train(2)


# ---------------------------------------------------------------------- hooks


@row("Module.register_forward_hook Module.register_forward_pre_hook")
def module_hooks_of_forward(p: Program) -> Any:
    p.module.second.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    p.module.second.register_forward_hook(lambda module, args, output: output + module.bias)
    p.train(2)


@row("Module.register_forward_hook")
def module_hook_takes_features_into_the_loss(p: Program) -> None:
    kept: list[Tensor] = []
    p.module.second.register_forward_hook(lambda module, args, output: kept.append(output))
    for at in range(2):
        (p.loss(at) + kept.pop().square().mean()).backward()
        p.step()


@row("Module.register_forward_hook")
def module_hook_takes_features_alone(p: Program) -> None:
    kept: list[Tensor] = []
    p.module.second.register_forward_hook(lambda module, args, output: kept.append(output))
    for at in range(2):
        p.loss(at)
        kept.pop().square().mean().backward()
        p.step()


@row("Module.register_full_backward_hook Module.register_full_backward_pre_hook")
def module_hooks_of_backward(p: Program) -> Any:
    calls = []

    def half(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        calls.append("hook")
        return (grad_input[0] * 0.5,)

    def double(module: nn.Module, grad_output: Any) -> Any:
        calls.append("pre")
        return (grad_output[0] * 2,)

    p.module.third.register_full_backward_hook(half)
    p.module.second.register_full_backward_pre_hook(double)
    p.train(2)
    return calls


@row("Module.register_backward_hook")
def module_hook_of_backward_before_full_ones(p: Program) -> Any:
    calls = []
    p.module.second.register_backward_hook(lambda *a: calls.append("hook"))
    p.train(2)
    return calls


@row(
    "module.register_module_forward_pre_hook module.register_module_forward_hook "
    "module.register_module_full_backward_pre_hook module.register_module_full_backward_hook"
)
def hooks_of_all_modules(p: Program) -> Any:
    calls: list[str] = []

    def note(kind: str) -> Any:
        def hook(module: nn.Module, *_: Any) -> None:
            if isinstance(module, nn.Linear):
                calls.append(kind)

        return hook

    handles = [
        of_all.register_module_forward_pre_hook(note("forward pre")),
        of_all.register_module_forward_hook(note("forward")),
        of_all.register_module_full_backward_pre_hook(note("backward pre")),
        of_all.register_module_full_backward_hook(note("backward")),
    ]
    try:
        p.train(2)
    finally:
        for handle in handles:
            handle.remove()
        of_all._global_is_full_backward_hook = None
    return sorted(calls)


@row("module.register_module_backward_hook")
def hook_of_all_modules_before_full_ones(p: Program) -> Any:
    calls: list[str] = []
    handle = of_all.register_module_backward_hook(
        lambda module, *_: calls.append("x") if isinstance(module, nn.Linear) else None
    )
    try:
        p.train(2)
    finally:
        handle.remove()
        of_all._global_is_full_backward_hook = None
    return calls


@row(
    "module.register_module_buffer_registration_hook "
    "module.register_module_module_registration_hook "
    "module.register_module_parameter_registration_hook"
)
def hooks_of_registration(p: Program) -> Any:
    calls: list[str] = []
    handles = [
        of_all.register_module_buffer_registration_hook(lambda m, n, b: calls.append(n)),
        of_all.register_module_module_registration_hook(lambda m, n, c: calls.append(n)),
        of_all.register_module_parameter_registration_hook(lambda m, n, q: calls.append(n)),
    ]
    try:
        p.train()
        p.module.register_buffer("late", torch.ones(1).double())
    finally:
        for handle in handles:
            handle.remove()
    return calls


NOT_APPLICABLE["module.Module"] = "its methods have rows"

# ---------------------------------------------------------------------- changing the tree


@row("Module.add_module Module.register_module")
def module_gets_a_part_without_parameters(p: Program) -> Any:
    p.module.add_module("drop", nn.Identity())
    p.module.register_module("act", nn.Tanh())
    p.train(2)
    return [name for name, _ in p.module.named_children()]


@row("Module.add_module", raises="(?i)parameter|module|replaced|added")
def module_gets_a_trained_part(p: Program) -> None:
    p.train()
    part = nn.Linear(WIDTH, WIDTH).double()
    p.module.add_module("third", nn.Sequential(p.module.third, part))
    p.optimizer.add_param_group({"params": list(part.parameters())})
    p.train(2)


@row("Module.register_parameter", raises="(?i)parameter")
def module_parameter_is_replaced(p: Program) -> None:
    p.train()
    with torch.no_grad():
        new = nn.Parameter(torch.eye(WIDTH).double())
    p.module.second.register_parameter("weight", new)
    p.train(2)


@row("Module.register_parameter", raises="(?i)parameter")
def module_gets_a_parameter(p: Program) -> None:
    p.train()
    p.module.register_parameter("late", nn.Parameter(torch.ones(WIDTH).double()))
    p.module.scale = p.module.late
    p.train(2)


@row("Module.set_submodule")
def module_part_is_replaced_by_one_without_parameters(p: Program) -> None:
    p.train()
    p.module.set_submodule("second", nn.Identity())
    x, _y = p.batch()
    with torch.no_grad():
        p.mean(p.model(x).sum())


@row("Module.set_submodule", raises="(?i)parameter|module|replaced")
def module_part_is_replaced(p: Program) -> None:
    p.train()
    p.module.set_submodule("second", nn.Linear(WIDTH, WIDTH).double())
    p.train(2)


@row()
def module_part_is_taken_twice(p: Program) -> None:
    p.train()
    p.module.third = p.module.second
    p.train(2)


@row()
def module_is_copied(p: Program) -> Any:
    p.train(2)
    other = copy.deepcopy(p.module)
    p.train(2)
    _x, _ = p.batch()
    return {name: q.detach().clone() for name, q in other.named_parameters()}


@row()
def module_part_is_pickled(p: Program) -> Any:
    p.train(2)
    other = pickle.loads(pickle.dumps(dict(p.module.named_parameters())))
    return {name: q.detach().clone() for name, q in other.items()}


# ---------------------------------------------------------------------- moving and casting


@row("Module.to Module.cpu Module.double")
def module_stays_where_it_is(p: Program) -> Any:
    p.train()
    p.model.to("cpu")
    p.model.to(torch.float64)
    p.model.cpu()
    p.model.double()
    p.module.double()
    p.train(2)


@row(
    "Module.float Module.half Module.bfloat16 Module.type",
    raises="(?i)dtype|cast|initialize|given other values",
)
def module_float(p: Program) -> None:
    p.train()
    p.model.float()
    p.loss()


@row("Module.half", raises="(?i)dtype|cast|initialize|given other values")
def module_half_below_the_engine(p: Program) -> None:
    p.train()
    p.module.half()
    p.train()


@row("Module.bfloat16", raises="(?i)dtype|cast|initialize|given other values")
def module_bfloat16_of_a_part(p: Program) -> None:
    p.train()
    p.module.second.bfloat16()
    p.train()


@row("Module.type", raises="(?i)dtype|cast|initialize|given other values")
def module_type(p: Program) -> None:
    p.train()
    p.model.type(torch.float32)
    p.train()


@row("Module.to_empty", raises="(?i)to_empty|values|empty")
def module_to_empty(p: Program) -> None:
    p.train()
    p.model.to_empty(device="cpu")


@row("Module.share_memory", raises="(?i)share|memory")
def module_share_memory(p: Program) -> None:
    p.train()
    p.model.share_memory()


@row("Module.to", raises="(?i)meta|device")
def module_to_meta(p: Program) -> None:
    p.train()
    p.module.to("meta")
    p.train()


for _name in ("cuda", "xpu", "ipu", "mtia"):
    NOT_APPLICABLE[f"Module.{_name}"] = "needs such a device; Module.to has rows"
NOT_APPLICABLE["Module.T_destination"] = "a type variable"
NOT_APPLICABLE["Module.dump_patches"] = "a constant"
NOT_APPLICABLE["Module.call_super_init"] = "a constant of a class"
