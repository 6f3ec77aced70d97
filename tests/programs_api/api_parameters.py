"""Programs around parameters: their values, gradients and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from api_modules import WRITES_SHARDED
from api_rows import NOT_APPLICABLE, WIDTH, Net, Program, named, row, sgd
from torch import Tensor, nn

GRADS = "safe_get_full_grad|safe_set_full_grad|gradient_clipping"

# ---------------------------------------------------------------------- values


@row("Tensor.data Tensor.detach")
def parameter_is_read(p: Program) -> Any:
    p.train(2)
    weight = p.module.second.weight
    with torch.no_grad():
        return (
            [weight.data.clone(), weight.detach().sum(), weight.tolist(), weight[1].clone()],
            [weight.norm(), (weight @ weight).mean(), torch.linalg.norm(weight), weight.cpu() + 0],
            [weight.numpy(force=True).sum().item(), weight.max().item(), bool((weight > 9).any())],
        )


@row("Tensor.T Tensor.mT Tensor.H Tensor.mH Tensor.real")
def parameter_views_are_read(p: Program) -> Any:
    p.train()
    weight = p.module.second.weight
    return [x.detach() + 0 for x in (weight.T, weight.mT, weight.H, weight.mH, weight.real)]


@row(
    "Tensor.device Tensor.dtype Tensor.itemsize Tensor.layout Tensor.nbytes Tensor.ndim "
    "Tensor.shape Tensor.is_leaf Tensor.is_cpu Tensor.requires_grad Tensor.grad_fn Tensor.output_nr "
    "Tensor.name Tensor.is_sparse Tensor.is_nested Tensor.is_meta Tensor.is_quantized "
    "Tensor.retains_grad Tensor.dim_order Tensor.is_shared"
)
def parameter_metadata(p: Program) -> Any:
    p.train()
    names = (
        "dtype itemsize layout nbytes ndim shape is_leaf is_cpu requires_grad grad_fn output_nr name "
        "is_sparse is_nested is_meta is_quantized retains_grad"
    )
    weight = p.module.second.weight
    found = [getattr(weight, name) for name in names.split()]
    return found, str(weight.device), weight.dim_order(), weight.stride(), weight.is_contiguous()


@row()
def parameter_is_part_of_the_loss(p: Program) -> None:
    for at in range(2):
        penalty = sum(q.square().sum() for q in p.model.parameters())
        (p.loss(at) + 0.1 * penalty).backward()
        p.step()


@row()
def parameter_alias_is_read_after_a_step(p: Program) -> Any:
    p.train()
    kept = p.module.second.weight
    p.train(1, first=1)
    return kept.detach() + 0


@row("Tensor.data", raises=r"clone\(\)", at=(3,), on=(2,))
def parameter_data_is_kept_over_a_step(p: Program) -> Any:
    p.train()
    kept = [q.data for q in p.module.parameters()]
    p.train(1, first=1)
    return [value + 0 for value in kept]


@row()
def parameter_copies_are_averaged(p: Program) -> Any:
    averages = [q.detach().clone() for q in p.module.parameters()]
    for at in range(3):
        p.train(1, first=at)
        with torch.no_grad():
            for average, q in zip(averages, p.module.parameters(), strict=True):
                average.lerp_(q, 0.25)
    return averages


@row("Tensor.data", **WRITES_SHARDED)
def parameter_data_is_replaced(p: Program) -> None:
    p.train()
    p.module.second.weight.data = torch.eye(4).double()
    p.train(2)


@row("Tensor.data", **WRITES_SHARDED)
def parameter_data_is_written(p: Program) -> None:
    p.train()
    p.module.second.weight.data.mul_(0.5)
    p.module.second.bias.data[1] = 0.25
    p.train(2)


_IN_PLACE: dict[str, tuple[Any, ...]] = {
    "add_": (0.5,),
    "addcdiv_": (torch.eye(4).double(), torch.ones(4).double()),
    "addcmul_": (torch.eye(4).double(), torch.ones(4).double()),
    "clamp_": (-0.1, 0.1),
    "copy_": (torch.eye(4).double(),),
    "div_": (2.0,),
    "fill_": (0.25,),
    "fill_diagonal_": (0.5,),
    "lerp_": (torch.eye(4).double(), 0.5),
    "masked_fill_": (torch.eye(4).bool(), 0.5),
    "mul_": (0.5,),
    "neg_": (),
    "normal_": (),
    "sub_": (0.5,),
    "uniform_": (-0.1, 0.1),
    "zero_": (),
    "index_add_": (0, torch.tensor([1]), torch.ones(1, 4).double()),
    "renorm_": (2, 0, 0.1),
    "tril_": (),
}


def _in_place(name: str) -> None:
    def program(p: Program) -> None:
        p.train()
        with torch.no_grad():
            getattr(p.module.second.weight, name)(*_IN_PLACE[name])
        p.train(1, first=1)

    row(f"Tensor.{name}", **WRITES_SHARDED)(named(program, f"parameter_{name}"))


for _name in _IN_PLACE:
    _in_place(_name)


@row(**WRITES_SHARDED)
def parameter_elements_are_written(p: Program) -> None:
    p.train()
    with torch.no_grad():
        p.module.second.weight[1, 2] = 0.5
        p.module.second.weight[0] += 1
    p.train()


@row(**WRITES_SHARDED)
def parameter_is_written_by_init(p: Program) -> None:
    p.train()
    nn.init.xavier_uniform_(p.module.second.weight)
    p.train()


@row(**WRITES_SHARDED)
def parameter_is_written_as_out(p: Program) -> None:
    p.train()
    with torch.no_grad():
        torch.mul(torch.eye(4).double(), 2, out=p.module.second.weight)
    p.train()


@row(raises="leaf|GatheredParameters")
def parameter_is_written_with_gradients(p: Program) -> None:
    p.module.second.weight.mul_(2)


# ---------------------------------------------------------------------- gradients


@row("Tensor.grad", raises=GRADS)
def gradient_is_read(p: Program) -> Any:
    p.train()
    p.backward(1)
    return p.module.second.weight.grad + 0


@row("Tensor.grad", optimizer=sgd)
def gradient_is_scaled(p: Program) -> None:
    p.train()
    p.backward(1)
    for q in p.model.parameters():
        q.grad.mul_(0.5)
    p.step()


@row("Tensor.grad", optimizer=sgd)
def gradient_is_scaled_where_there_is_one(p: Program) -> None:
    p.train()
    p.backward(1)
    for q in p.model.parameters():
        if q.grad is not None:
            q.grad *= 0.5
    p.step()


@row("Tensor.grad", optimizer=sgd)
def gradient_data_is_scaled(p: Program) -> None:
    p.train()
    p.backward(1)
    for q in p.model.parameters():
        q.grad.data.mul_(0.5)
    p.step()


@row("Tensor.grad", raises=GRADS)
def gradient_is_replaced(p: Program) -> None:
    p.train()
    p.backward(1)
    for q in p.model.parameters():
        q.grad = torch.ones_like(q)
    p.step()


@row("Tensor.grad")
def gradient_is_dropped(p: Program) -> None:
    p.train()
    p.backward(7)
    for q in p.model.parameters():
        q.grad = None
    p.train(2)


@row("Tensor.grad")
def gradient_of_one_parameter_is_dropped(p: Program) -> None:
    p.train()
    p.backward(1)
    p.module.second.weight.grad = None
    p.step()


def _step_after(drop: Callable[[Program], Any], name: str) -> None:
    def program(p: Program) -> None:
        p.train()
        p.backward(1)
        drop(p)
        p.step()
        p.train(2, first=2)

    row("Tensor.grad")(named(program, name))


def _drop_each(p: Program) -> None:
    for q in p.module.parameters():
        q.grad = None


_step_after(_drop_each, "gradients_are_dropped_before_a_step")
_step_after(
    lambda p: p.optimizer.zero_grad(), "gradients_are_dropped_by_the_optimizer_before_a_step"
)
_step_after(lambda p: p.module.zero_grad(), "gradients_are_dropped_by_the_module_before_a_step")
_step_after(lambda p: p.model.zero_grad(), "gradients_are_dropped_by_the_model_before_a_step")


def _penalty_after_drops(of: Callable[[int], bool], name: str) -> None:
    """A backward that reaches parameters, and no output of a module."""

    def program(p: Program) -> None:
        p.train()
        p.backward(1)
        for at, q in enumerate(p.module.parameters()):
            if of(at):
                q.grad = None
        (0.1 * sum(q.square().sum() for q in p.module.parameters())).backward()
        p.step()
        p.train(1, first=2)

    row("Tensor.grad")(named(program, f"penalty_after_{name}_dropped"))


_penalty_after_drops(lambda at: False, "no_gradient_was")
_penalty_after_drops(lambda at: True, "all_gradients_were")
for _at in range(6):
    _penalty_after_drops(lambda at, chosen=_at: at == chosen, f"gradient_{_at}_was")
for _at in (0, 5):
    _penalty_after_drops(lambda at, chosen=_at: at != chosen, f"gradients_but_{_at}_were")


@row("Tensor.grad", raises=GRADS)
def gradient_norm_by_hand(p: Program) -> Any:
    p.backward()
    norms = [q.grad.norm() for q in p.model.parameters() if q.grad is not None]
    p.step()
    return torch.stack(norms).norm() if norms else 0.0


@row("Tensor.grad")
def gradient_is_asked_for_none(p: Program) -> Any:
    p.backward()
    found = [q.grad is not None for q in p.module.parameters()]
    p.step()
    return found


@row("Tensor.grad")
def gradient_after_a_step_is_none(p: Program) -> Any:
    p.train()
    return [q.grad is None for q in p.module.parameters()]


@row("Tensor.grad_dtype")
def gradient_dtype(p: Program) -> Any:
    p.train()
    return p.module.second.weight.grad_dtype


@row("Tensor.backward")
def gradients_of_two_backwards_add_up(p: Program) -> None:
    for at in range(2):
        p.backward(at)
        p.backward(at + 5)
        p.step()


@row("Tensor.backward")
def gradients_by_backward_of_autograd(p: Program) -> None:
    for at in range(2):
        torch.autograd.backward(p.loss(at))
        p.step()


@row("Tensor.backward")
def gradients_of_a_retained_graph(p: Program) -> None:
    for at in range(2):
        loss = p.loss(at)
        loss.backward(retain_graph=True)
        loss.backward()
        p.step()


@row("Tensor.backward")
def gradients_of_some_inputs(p: Program) -> None:
    p.loss().backward(inputs=[p.module.second.weight])
    p.step()


@row()
def gradients_by_autograd_grad(p: Program) -> Any:
    grads = torch.autograd.grad(p.loss(), list(p.module.parameters()))
    p.train(2)
    return [p.mean(grad) for grad in grads]


@row()
def gradient_penalty(p: Program) -> None:
    for at in range(2):
        x, _ = p.batch(at)
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(p.model(x).sum(), x, create_graph=True)
        slope.square().mean().backward()
        p.step()


# ---------------------------------------------------------------------- hooks of tensors


@row("Tensor.register_hook", optimizer=sgd)
def parameter_hook_scales_the_gradient(p: Program) -> Any:
    calls = []

    def half(grad: Tensor) -> Tensor:
        calls.append(tuple(grad.shape))
        return grad * 0.5

    p.module.second.weight.register_hook(half)
    p.train(2)
    return calls


@row("Tensor.register_post_accumulate_grad_hook")
def parameter_hook_after_accumulation_counts(p: Program) -> Any:
    calls = []
    p.module.second.weight.register_post_accumulate_grad_hook(lambda q: calls.append(1))
    p.train(2)
    return len(calls)


def _after_accumulation(p: Program, hook: Callable[[Tensor], Any], backwards: int = 1) -> None:
    p.train()
    for q in p.module.parameters():
        q.register_post_accumulate_grad_hook(hook)
    for at in range(2):
        for more in range(backwards):
            p.backward(at + 5 * more)
        p.step()


def _halve(q: Tensor) -> None:
    q.grad.mul_(0.5)


@row("Tensor.register_post_accumulate_grad_hook", optimizer=sgd)
def parameter_hook_after_accumulation_scales(p: Program) -> None:
    _after_accumulation(p, _halve)


@row("Tensor.register_post_accumulate_grad_hook", optimizer=sgd)
def parameter_hook_after_accumulation_assigns(p: Program) -> None:
    def halve(q: Tensor) -> None:
        q.grad = q.grad * 0.5

    _after_accumulation(p, halve)


@row("Tensor.register_post_accumulate_grad_hook")
def parameter_hook_after_accumulation_reads(p: Program) -> Any:
    grads: list[Tensor] = []
    _after_accumulation(p, lambda q: grads.append(q.grad.clone()))
    return [p.mean(grad) for grad in grads]


@row("Tensor.register_post_accumulate_grad_hook")
def parameter_hook_after_accumulation_drops(p: Program) -> None:
    def drop(q: Tensor) -> None:
        q.grad = None

    p.module.second.weight.register_post_accumulate_grad_hook(drop)
    p.train(2)


@row("Tensor.register_post_accumulate_grad_hook", optimizer=sgd)
def parameter_hook_after_accumulation_of_a_penalty(p: Program) -> None:
    """Backward reaches parameters first, and not an output of a module."""
    for q in p.module.parameters():
        q.register_post_accumulate_grad_hook(_halve)
    for at in range(2):
        loss = p.loss(at)
        (loss + 0.1 * sum(q.square().sum() for q in p.module.parameters())).backward()
        p.step()


@row("Tensor.register_post_accumulate_grad_hook")
def parameter_hook_after_accumulation_is_removed(p: Program) -> None:
    hook = p.module.second.weight.register_post_accumulate_grad_hook(_halve)
    p.train()
    hook.remove()
    p.train(2)


@row("Tensor.register_post_accumulate_grad_hook")
def parameter_hook_after_two_accumulations_counts(p: Program) -> Any:
    calls: list[int] = []
    _after_accumulation(p, lambda q: calls.append(1), backwards=2)
    return len(calls)


@row("Tensor.register_post_accumulate_grad_hook", raises=GRADS, optimizer=sgd)
def parameter_hook_after_two_accumulations_scales(p: Program) -> None:
    _after_accumulation(p, _halve, backwards=2)


@row("Tensor.register_post_accumulate_grad_hook", raises=GRADS)
def parameter_hook_after_two_accumulations_drops_the_second(p: Program) -> None:
    calls: list[int] = []

    def drop(q: Tensor) -> None:
        calls.append(1)
        if len(calls) % 2 == 0:
            q.grad = None

    p.module.second.weight.register_post_accumulate_grad_hook(drop)
    for at in range(2):
        p.backward(at)
        p.backward(at + 5)
        p.step()


@row("Tensor.register_post_accumulate_grad_hook")
def parameter_hook_after_two_accumulations_drops_both(p: Program) -> None:
    def drop(q: Tensor) -> None:
        q.grad = None

    p.module.second.weight.register_post_accumulate_grad_hook(drop)
    for at in range(2):
        p.backward(at)
        p.backward(at + 5)
        p.step()


@row("Tensor.register_post_accumulate_grad_hook", raises="engine.step|Gathered", on=(2,))
def optimizer_steps_inside_backward(p: Program) -> None:
    single = {q: torch.optim.SGD([q], lr=0.1) for q in p.module.parameters()}

    def step(q: Tensor) -> None:
        single[q].step()
        single[q].zero_grad()

    for q in p.module.parameters():
        q.register_post_accumulate_grad_hook(step)
    p.train(2)


@row("Tensor.register_hook")
def activation_hook_scales_the_gradient(p: Program) -> None:
    for at in range(2):
        x, y = p.batch(at)
        out = p.model(x)
        out.register_hook(lambda grad: grad * 0.5)
        nn.functional.mse_loss(out, y).backward()
        p.step()


@row("Tensor.requires_grad_ Tensor.requires_grad")
def parameter_is_frozen_between_steps(p: Program) -> None:
    p.train()
    p.module.second.weight.requires_grad_(False)
    p.module.first.bias.requires_grad = False
    p.train(2)


@row(**WRITES_SHARDED)
def parameters_are_swapped_with_averages(p: Program) -> Any:
    averages = [q.detach().clone() for q in p.module.parameters()]
    p.train(2)
    pairs = list(zip(p.module.parameters(), averages, strict=True))
    for q, average in pairs:
        q.data, average.data = average.data, q.data
    with torch.no_grad():
        loss = p.mean(p.loss(5))
    for q, average in pairs:
        q.data, average.data = average.data, q.data
    p.train(1)
    return loss, averages


# ---------------------------------------------------------------------- addresses


@row("Tensor.detach_", **WRITES_SHARDED)
def parameter_is_detached_in_place(p: Program) -> None:
    p.train()
    p.module.second.weight.detach_()
    p.train(1, first=1)


@row("Tensor.storage", raises="GatheredParameters", at=(3,), on=(2,))
def parameter_has_an_address(p: Program) -> Any:
    p.train()
    weight = p.module.second.weight
    return weight.untyped_storage().nbytes() > 0, weight.data_ptr() != 0


@row("Tensor.set_", **WRITES_SHARDED)
def parameter_set_takes_another_storage(p: Program) -> None:
    p.train()
    with torch.no_grad():
        p.module.second.weight.set_(torch.eye(4).double())
    p.train(2)


@row("Tensor.resize_", raises="(?i)resize|GatheredParameters")
def parameter_is_resized(p: Program) -> None:
    p.train()
    with torch.no_grad():
        p.module.second.weight.resize_(2, 2)
    p.loss()


@row(raises="GatheredParameters|Assign a copy")
def parameter_takes_its_own_transpose(p: Program) -> None:
    p.train()
    p.module.second.weight.data = p.module.second.weight.data.t()
    p.train(2)


@row(raises="GatheredParameters|Assign a copy")
def parameters_are_swapped(p: Program) -> None:
    p.train()
    first, second = p.module.first.weight, p.module.second.weight
    first.data, second.data = second.data, first.data
    p.train(2)


class Twins(Net):
    """Two parameters of one shape in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.full((WIDTH,), x)) for x in (0.5, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.left) * self.right


@row(make=Twins, raises="GatheredParameters|Assign a copy")
def parameters_of_one_module_are_swapped(p: Program) -> None:
    p.train()
    left, right = p.module.left, p.module.right
    left.data, right.data = right.data, left.data
    p.train(2)


@row("Tensor.share_memory_", raises="(?i)share|memory|Gathered", at=(3,), on=(2,))
def parameter_share_memory(p: Program) -> None:
    p.train()
    p.module.second.weight.share_memory_()


for _name in "cuda ipu maia mkldnn mps mtia sparse_csr vulkan xla xpu".split():
    NOT_APPLICABLE[f"Tensor.is_{_name}"] = "false on the CPU; Tensor.is_cpu has a row"
NOT_APPLICABLE["Tensor.volatile"] = "removed from torch"
NOT_APPLICABLE["Tensor.imag"] = "of complex parameters"
