"""Programs that use torch's tools: utilities, functional calls, mixed precision, averages."""

from __future__ import annotations

from typing import Any

import torch
from api_modules import WRITES_SHARDED
from api_rows import NOT_APPLICABLE, WIDTH, Net, Program, row
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils

GRADS = "safe_get_full_grad|safe_set_full_grad|gradient_clipping"

# ---------------------------------------------------------------------- torch.nn.utils


@row("utils.clip_grad_norm_")
def clips_by_the_norm(p: Program) -> Any:
    norms = []
    for at in range(2):
        p.backward(at)
        norms.append(utils.clip_grad_norm_(p.model.parameters(), 0.1))
        p.step()
    return norms


@row("utils.clip_grad_norm_")
def clips_by_a_norm_that_is_not_reached(p: Program) -> Any:
    p.backward()
    norm = utils.clip_grad_norm_(p.module.parameters(), 100.0)
    p.step()
    return norm


@row("utils.clip_grad_norm_", raises=GRADS)
def clips_a_part_by_the_norm(p: Program) -> Any:
    p.backward()
    norm = utils.clip_grad_norm_(p.module.second.parameters(), 0.01)
    p.step()
    return norm


@row("utils.clip_grad_norm_", raises=GRADS)
def clips_by_the_largest_element(p: Program) -> Any:
    p.backward()
    norm = utils.clip_grad_norm_(p.model.parameters(), 0.01, norm_type=float("inf"))
    p.step()
    return norm


@row("utils.clip_grad_norm")
def clips_by_the_norm_with_the_old_name(p: Program) -> Any:
    p.backward()
    norm = utils.clip_grad_norm(p.model.parameters(), 0.1)
    p.step()
    return norm


@row("utils.clip_grad_value_", raises=GRADS)
def clips_by_value(p: Program) -> None:
    p.backward()
    utils.clip_grad_value_(p.model.parameters(), 0.01)
    p.step()


@row("utils.get_total_norm")
def total_norm_of_gradients(p: Program) -> Any:
    p.backward()
    norm = utils.get_total_norm([q.grad for q in p.model.parameters() if q.grad is not None])
    p.step()
    return norm


@row("utils.clip_grads_with_norm_")
def clips_with_a_norm(p: Program) -> None:
    p.backward()
    utils.clip_grads_with_norm_(p.model.parameters(), 0.01, torch.tensor(1.0).double())
    p.step()


@row("utils.parameters_to_vector")
def parameters_as_a_vector(p: Program) -> Any:
    p.train(2)
    return utils.parameters_to_vector(p.model.parameters()).detach()


@row("utils.vector_to_parameters", **WRITES_SHARDED)
def parameters_from_a_vector(p: Program) -> None:
    p.train()
    size = sum(q.numel() for q in p.module.parameters())
    utils.vector_to_parameters(torch.linspace(-1, 1, size).double(), p.module.parameters())
    p.train()


def with_spectral_norm() -> nn.Module:
    model = Net()
    parametrizations.spectral_norm(model.second)
    return model


def with_weight_norm() -> nn.Module:
    model = Net()
    parametrizations.weight_norm(model.second)
    return model


def with_orthogonal() -> nn.Module:
    model = Net()
    parametrizations.orthogonal(model.second)
    return model


@row("parametrizations.spectral_norm utils.parametrizations", make=with_spectral_norm, close=1e-9)
def trains_a_spectral_norm(p: Program) -> Any:
    p.train(2)
    return parametrize.is_parametrized(p.module.second)


@row("parametrizations.weight_norm utils.parametrize", make=with_weight_norm)
def trains_a_weight_norm(p: Program) -> Any:
    with parametrize.cached():
        p.train()
    p.train()
    return p.module.second.weight.detach() + 0


@row("parametrizations.orthogonal", make=with_orthogonal)
def trains_an_orthogonal_matrix(p: Program) -> None:
    p.train(2)


def with_old_weight_norm() -> nn.Module:
    model = Net()
    utils.weight_norm(model.second)
    return model


def with_old_spectral_norm() -> nn.Module:
    model = Net()
    utils.spectral_norm(model.second)
    return model


@row("utils.weight_norm", make=with_old_weight_norm)
def trains_a_weight_norm_of_hooks(p: Program) -> None:
    p.train(2)


@row("utils.spectral_norm", make=with_old_spectral_norm)
def trains_a_spectral_norm_of_hooks(p: Program) -> None:
    p.train(2)


@row("utils.remove_weight_norm", make=with_old_weight_norm, raises="(?i)parameter|weight_g")
def removes_a_weight_norm(p: Program) -> None:
    p.train()
    utils.remove_weight_norm(p.module.second)
    p.train()


@row("utils.remove_spectral_norm", make=with_old_spectral_norm, raises="(?i)parameter|weight_orig")
def removes_a_spectral_norm(p: Program) -> None:
    p.train()
    utils.remove_spectral_norm(p.module.second)
    p.train()


class Half(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5

    def right_inverse(self, x: Tensor) -> Tensor:
        return x * 2


@row(
    "parametrize.register_parametrization",
    raises="(?i)parameter|GatheredParameters",
    at=(3,),
    on=(2,),
)
def parametrizes_between_steps(p: Program) -> None:
    p.train()
    parametrize.register_parametrization(p.module.second, "weight", Half())
    p.train(2)


def with_pruning() -> nn.Module:
    model = Net()
    prune.random_unstructured(model.second, "weight", amount=0.5)
    return model


@row("utils.prune", make=with_pruning)
def trains_a_pruned_layer(p: Program) -> Any:
    p.train(2)
    return p.module.second.weight.detach() == 0


@row("utils.prune")
def prunes_between_steps(p: Program) -> None:
    p.train()
    prune.l1_unstructured(p.module.second, "weight", amount=0.5)
    p.train(2)


@row("utils.skip_init")
def skips_initialization(p: Program) -> Any:
    return tuple(utils.skip_init(nn.Linear, 2, 3).weight.shape)


@row("utils.stateless")
def calls_statelessly(p: Program) -> Any:
    p.train()
    x, _ = p.batch()
    zeros = {name: torch.zeros_like(q) for name, q in p.module.named_parameters()}
    out = utils.stateless.functional_call(p.module, zeros, (x,))
    p.train()
    return p.mean(out.sum())


for (
    _name
) in "fuse_conv_bn_eval fuse_conv_bn_weights fuse_linear_bn_eval fuse_linear_bn_weights".split():
    NOT_APPLICABLE[f"utils.{_name}"] = "for inference: makes a new module from two"
for _name in ("convert_conv2d_weight_memory_format", "convert_conv3d_weight_memory_format"):
    NOT_APPLICABLE[f"utils.{_name}"] = "of convolutions; writes .data, which has rows"
NOT_APPLICABLE["utils.rnn"] = "packs sequences: no parameters"

# ---------------------------------------------------------------------- torch.func


def _of_program(p: Program) -> tuple[dict[str, Tensor], Any]:
    """Detached parameters, and a loss that is a function of them."""
    x, y = p.batch(3)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(p.module, params, (x,)), y)

    return {name: q.detach().clone() for name, q in p.module.named_parameters()}, loss


@row("func.functional_call")
def functional_call_with_other_values(p: Program) -> Any:
    p.train()
    params, loss = _of_program(p)
    value = loss({name: q * 0.5 for name, q in params.items()})
    p.train()
    return p.mean(value)


@row("func.functional_call")
def functional_call_trains_the_parameters(p: Program) -> None:
    for _ in range(2):
        _, loss = _of_program(p)
        loss(dict(p.module.named_parameters())).backward()
        p.step()


class Adapted(nn.Module):
    """Takes an inner step inside its forward. All ranks take the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        params = dict(self.net.named_parameters())
        inner = _inner_step(self.net, params)
        return torch.func.functional_call(self.net, inner, (x,))


def _inner_step(module: nn.Module, params: dict[str, Tensor]) -> dict[str, Tensor]:
    x = torch.linspace(-1, 1, 3 * WIDTH).double().view(3, WIDTH)
    loss = torch.func.functional_call(module, params, (x,)).square().mean()
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    return {n: q - 0.1 * g for (n, q), g in zip(params.items(), grads, strict=True)}


@row("func.functional_call")
def functional_call_with_an_inner_step(p: Program) -> None:
    for _ in range(2):
        _, loss = _of_program(p)
        inner = _inner_step(p.module, dict(p.module.named_parameters()))
        loss(inner).backward()
        p.step()


@row("func.functional_call", make=Adapted)
def functional_call_with_an_inner_step_in_forward(p: Program) -> None:
    p.train(2)


@row("func.functional_call")
def functional_call_with_two_inner_steps(p: Program) -> None:
    for _ in range(2):
        _, loss = _of_program(p)
        inner = _inner_step(p.module, dict(p.module.named_parameters()))
        inner = _inner_step(p.module, inner)
        (loss(inner) + p.loss()).backward()
        p.step()


@row("func.functional_call")
def functional_call_of_the_model_with_parameters_of_another(p: Program) -> Any:
    p.train()
    torch.manual_seed(2)
    other = Net().double()
    x, y = p.batch()
    prefix = "" if p.rank is None else "module."
    params = {prefix + name: q for name, q in other.named_parameters()}
    out = torch.func.functional_call(p.model, params, (x,))
    nn.functional.mse_loss(p.model(x), y + out.detach()).backward()
    p.step()
    torch.func.functional_call(p.model, params, (x,)).mean().backward()
    return [p.mean(q.grad) for q in other.parameters()]


@row()
def module_is_cloned_for_an_inner_step(p: Program) -> None:
    """As libraries for meta-learning do it: a second tree of modules with other tensors."""
    for at in range(2):
        inner = _inner_step(p.module, dict(p.module.named_parameters()))
        clone = _clone_tree(p.module, "", inner)
        x, y = p.batch(at)
        nn.functional.mse_loss(clone(x), y).backward()
        p.step()


def _clone_tree(module: nn.Module, prefix: str, tensors: dict[str, Tensor]) -> nn.Module:
    clone = module.__new__(type(module))
    clone.__dict__ = dict(module.__dict__)
    clone._parameters = {n: tensors[prefix + n] for n in module._parameters}  # type: ignore
    clone._modules = {
        n: _clone_tree(child, f"{prefix}{n}.", tensors)  # type: ignore[arg-type]
        for n, child in module._modules.items()
    }
    return clone


@row()
def gradient_penalty_between_two_forwards(p: Program) -> None:
    for at in range(2):
        x, _ = p.batch(at)
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(p.model(x).sum(), x, create_graph=True)
        (p.loss(at) + p.loss(at + 1) + slope.square().mean()).backward()
        p.step()


@row("func.grad func.grad_and_value")
def func_grad(p: Program) -> Any:
    p.train()
    params, loss = _of_program(p)
    grads = torch.func.grad(loss)(params)
    again, value = torch.func.grad_and_value(loss)(params)
    p.train()
    return {n: p.mean(g) for n, g in grads.items()}, p.mean(value), p.mean(again["first.bias"])


@row("func.vjp func.jvp func.linearize")
def func_products(p: Program) -> Any:
    p.train()
    params, loss = _of_program(p)
    tangents = {name: torch.ones_like(q) for name, q in params.items()}
    value, pull = torch.func.vjp(loss, params)
    _, forward = torch.func.jvp(loss, (params,), (tangents,))
    return p.mean(pull(torch.ones_like(value))[0]["first.bias"]), p.mean(forward)


@row("func.jacrev func.jacfwd func.hessian")
def func_jacobians(p: Program) -> Any:
    p.train()
    params, loss = _of_program(p)

    def of_bias(bias: Tensor) -> Tensor:
        return loss({**params, "third.bias": bias})

    bias = params["third.bias"]
    tools = (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian)
    return [p.mean(tool(of_bias)(bias)) for tool in tools]


@row("func.vmap")
def func_vmap_of_the_model(p: Program) -> Any:
    p.train()
    x, _ = p.batch()
    out = torch.func.vmap(p.module)(x)
    return p.mean(out.mean())


@row("func.vmap func.functional_call")
def func_gradients_of_samples(p: Program) -> Any:
    p.train()
    x, y = p.batch()
    params = {name: q.detach() for name, q in p.module.named_parameters()}

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(p.module, params, (x,)), y)

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
    p.train()
    return {name: p.mean(grad.mean(0)) for name, grad in grads.items()}


@row("func.stack_module_state")
def func_stack_of_modules(p: Program) -> Any:
    p.train()
    params, buffers = torch.func.stack_module_state([p.module, p.module])
    return {name: value.detach() + 0 for name, value in params.items()}, list(buffers)


@row("func.functionalize")
def func_functionalize(p: Program) -> Any:
    p.train()
    params, loss = _of_program(p)
    return p.mean(torch.func.functionalize(loss)(params))


NOT_APPLICABLE["func.replace_all_batch_norm_modules_"] = "changes a model before it is trained"
NOT_APPLICABLE["func.debug_unwrap"] = "for printing inside transforms"
NOT_APPLICABLE["func.rearrange"] = "of plain tensors"

# ---------------------------------------------------------------------- torch.amp


@row("amp.autocast")
def autocast_around_forward(p: Program) -> None:
    for at in range(2):
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss = p.loss(at)
        loss.backward()
        p.step()


class Cube(torch.autograd.Function):
    """Casts for autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


@row("amp.custom_fwd amp.custom_bwd amp.is_autocast_available")
def function_with_casts_reads_a_parameter(p: Program) -> Any:
    for at in range(2):
        (p.loss(at) + Cube.apply(p.module.second.weight).sum()).backward()
        p.step()
    return torch.amp.is_autocast_available("cpu")


@row("amp.GradScaler GradScaler.scale GradScaler.step", raises="(?i)scaler|engine.step|scale")
def scaler_steps(p: Program) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.loss()).backward()
    scaler.step(p.optimizer)
    scaler.update()


@row("GradScaler.unscale_", raises="(?i)scaler|scale|" + GRADS)
def scaler_unscales(p: Program) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.loss()).backward()
    scaler.unscale_(p.optimizer)
    p.step()


@row(
    "GradScaler.is_enabled GradScaler.get_scale GradScaler.update GradScaler.state_dict "
    "GradScaler.load_state_dict GradScaler.get_backoff_factor GradScaler.get_growth_factor "
    "GradScaler.get_growth_interval GradScaler.set_backoff_factor GradScaler.set_growth_factor "
    "GradScaler.set_growth_interval"
)
def scaler_that_is_switched_off(p: Program) -> Any:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for at in range(2):
        scaler.scale(p.loss(at)).backward()
        p.step()
        scaler.update()
    scaler.load_state_dict(scaler.state_dict())
    return scaler.is_enabled(), scaler.get_scale()


# ---------------------------------------------------------------------- torch.optim.swa_utils


def _averages(p: Program, **options: Any) -> Any:
    average = swa_utils.AveragedModel(p.module, **options)
    for at in range(3):
        p.train(1, first=at)
        average.update_parameters(p.module)
    x, _ = p.batch()
    with torch.no_grad():
        out = p.mean(average(x).mean())
    return out, {n: q.detach() + 0 for n, q in average.module.named_parameters()}


@row("swa_utils.AveragedModel AveragedModel.update_parameters")
def averaged_model(p: Program) -> Any:
    return _averages(p)


@row("swa_utils.get_ema_multi_avg_fn")
def averaged_model_of_moving_averages(p: Program) -> Any:
    return _averages(p, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))


@row("swa_utils.get_swa_multi_avg_fn")
def averaged_model_of_plain_averages(p: Program) -> Any:
    return _averages(p, multi_avg_fn=swa_utils.get_swa_multi_avg_fn())


@row("swa_utils.get_ema_avg_fn")
def averaged_model_of_moving_averages_one_by_one(p: Program) -> Any:
    return _averages(p, avg_fn=swa_utils.get_ema_avg_fn(0.9))


@row("swa_utils.get_swa_avg_fn")
def averaged_model_of_plain_averages_one_by_one(p: Program) -> Any:
    return _averages(p, avg_fn=swa_utils.get_swa_avg_fn(), use_buffers=True)


@row("swa_utils.AveragedModel")
def averaged_model_of_the_engine(p: Program) -> Any:
    average = swa_utils.AveragedModel(p.module)
    p.train()
    average.update_parameters(p.model)
    return {n: q.detach() + 0 for n, q in average.module.named_parameters()}


def with_batch_norm() -> nn.Module:
    model = Net()
    model.third = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    model.third[0].track_running_stats = True
    return model.eval()


@row("swa_utils.update_bn", make=with_batch_norm)
def statistics_are_computed_again(p: Program) -> Any:
    p.train()
    x = torch.linspace(-1, 1, 8 * WIDTH).double().view(8, WIDTH)
    swa_utils.update_bn([x[:4], x[4:]], p.module)
    norm = p.module.third[0]
    return norm.running_mean, norm.running_var, norm.num_batches_tracked
