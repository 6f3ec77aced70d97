"""Wrong calls and the exact texts of their errors. Used on one rank and on several."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kit
import torch
from kit import ADAMW
from torch import nn
from torch.utils.data import DataLoader

import zeroshard
from zeroshard.errors import ConfigError, UnsupportedError, UsageError


@dataclass(frozen=True)
class Case:
    """``call()`` raises ``error`` with ``text``; one that ends in "..." is the beginning."""

    name: str
    call: Callable[[], Any]
    text: str
    error: type[Exception] = UsageError


CASES: list[Case] = []


def wrong(text: str, error: type[Exception] = UsageError) -> Callable[[Callable[[], Any]], Any]:
    """Register a function without arguments as a wrong call."""

    def register(call: Callable[[], Any]) -> Callable[[], Any]:
        CASES.append(Case(call.__name__, call, text, error))
        return call

    return register


def config(**keys: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "unit_min_numel": 1, **keys}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def engine(model: nn.Module | None = None, *, stage: int = 2, **keys: Any) -> Any:
    """Closed by the ``with`` block."""
    keys = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": ADAMW,
        **keys,
    }
    return kit.engine(linear() if model is None else model, stage, **keys)


def loss_of(e: Any) -> torch.Tensor:
    return e(torch.ones(2, 3)).float().square().mean()


# ---------------------------------------------------------------------- initialize and Engine


@wrong("initialize() needs model=: the torch.nn.Module to train.")
def no_model():
    zeroshard.initialize(config=config())


@wrong("model is a function, not a torch.nn.Module. Pass the model itself.")
def model_is_a_function():
    zeroshard.initialize(model=linear, config=config())


@wrong(
    "model is wrapped in DataParallel, which also distributes it over ranks or devices. Pass the "
    "model itself: model.module."
)
def model_is_wrapped():
    engine(nn.DataParallel(linear()))


IN_USE = (
    "model already belongs to an engine, and two engines would write its parameters. Call close() "
    "(or destroy()) of that engine before you build another, and pass engine.module."
)


@wrong(IN_USE)
def model_of_an_open_engine():
    with engine(model := linear()):
        engine(model)


@wrong(IN_USE)
def model_is_an_engine():
    with engine(stage=3) as e:
        engine(e)


@wrong(
    "no configuration: pass config= (a dict or the path of a JSON file), or start the program with "
    "--deepspeed_config FILE."
)
def no_config():
    zeroshard.initialize(model=linear())


@wrong("the configuration was given 2 times: as config and as args.deepspeed_config. Give it once.")
def config_and_args():
    args = argparse.Namespace(deepspeed_config="ds.json")
    zeroshard.initialize(args, model=linear(), config=config())


@wrong("the configuration was given 2 times: as config and as config_params. Give it once.")
def config_and_config_params():
    zeroshard.initialize(model=linear(), config=config(), config_params=config())


@wrong(
    "mpu is a object without any getter of a size, so it says nothing about the ranks. It needs "
    "methods such as get_data_parallel_world_size() and get_model_parallel_world_size()."
)
def mpu_without_getters():
    zeroshard.initialize(model=linear(), mpu=object(), config=config())


@wrong(
    "optimizer is a str, not a torch.optim.Optimizer. Pass an optimizer object, or a function that "
    "makes one from parameters."
)
def optimizer_is_a_name():
    engine(optimizer="AdamW")


@wrong(
    "optimizer is a NoneType, not a torch.optim.Optimizer. Pass an optimizer object, or a function "
    "that makes one from parameters."
)
def optimizer_function_returns_nothing():
    engine(optimizer=lambda params: None)


@wrong(
    "the optimizer (or model_parameters) holds 2 parameters that are not in the model (the first "
    "has shape (2, 3)). They would never be reduced or updated. Build the optimizer from the "
    "parameters of the model that you pass, after the last change that replaces parameters."
)
def optimizer_of_another_model():
    engine(optimizer=torch.optim.SGD(linear().parameters()))


@wrong(
    "the optimizer was stepped before the engine was built, and its state would be lost. Build the "
    "engine first; load a saved optimizer through the engine."
)
def used_optimizer():
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    engine(model, optimizer=optimizer)


@wrong('the config names the optimizer "AdamW", but no parameter of the model requires a gradient.')
def nothing_to_train():
    engine(linear().requires_grad_(False))


@wrong(
    "Adafactor cannot run on sharded parameters: Adafactor keeps state 'row_var', which has "
    "another shape ((128, 1) for a parameter of (128, 96)) and so belongs to "
    "no single element. With ZeRO, an optimizer updates pieces of "
    "each parameter. Use an element-wise optimizer (Adam, AdamW, SGD, Adagrad, Lion, RMSprop...), "
    "or Muon or Lamb, whose parameters are never split.",
    UnsupportedError,
)
def adafactor():
    engine(optimizer=torch.optim.Adafactor)


@wrong(
    "LBFGS cannot run on sharded parameters: LBFGS.step needs a closure that runs the model "
    "again. ...",
    UnsupportedError,
)
def lbfgs():
    engine(optimizer=torch.optim.LBFGS)


@wrong(
    "SparseAdam cannot run on sharded parameters: SparseAdam fails on a small matrix: "
    "RuntimeError: SparseAdam does not support dense gradients, please consider Adam instead. ...",
    UnsupportedError,
)
def sparse_adam():
    engine(optimizer=torch.optim.SparseAdam)


@wrong(
    "model_parameters is a Linear, not an iterable of parameters. Pass model.parameters(), a list "
    "of them, or a list of param-group dicts."
)
def model_as_parameters():
    engine(model_parameters=linear())


@wrong(
    "model_parameters is a Parameter, not an iterable of parameters. Pass model.parameters(), a "
    "list of them, or a list of param-group dicts."
)
def one_parameter():
    model = linear()
    engine(model, model_parameters=model.weight)


@wrong(
    "model_parameters holds a str, which is not a parameter. Pass model.parameters(), a list of "
    "them, or a list of param-group dicts."
)
def names_as_parameters():
    engine(model_parameters=["weight"])


@wrong(
    "model_parameters holds a group with the keys ['lr', 'param'], but without \"params\". Add "
    'its parameters as "params".'
)
def group_without_params():
    engine(model_parameters=[{"param": [], "lr": 1.0}])


@wrong("model_parameters mixes parameters and param-group dicts. Put the parameters into a group.")
def parameters_and_groups():
    model = linear()
    engine(model, model_parameters=[model.weight, {"params": [model.bias]}])


@wrong(
    "a learning-rate schedule needs an optimizer, and there is none. Pass one to initialize(), or "
    "name one in the config."
)
def schedule_without_optimizer():
    engine(optimizer=None, scheduler={"type": "WarmupLR"})


@wrong(
    "lr_scheduler is a NoneType without a step() method. Pass a schedule, or a function that makes "
    "one from the optimizer."
)
def schedule_function_returns_nothing():
    engine(lr_scheduler=lambda optimizer: None)


@wrong(
    "lr_scheduler belongs to another optimizer (SGD) than the engine's (AdamW), so it would have "
    "no effect. Pass a function that makes it from the engine's optimizer."
)
def schedule_of_another_optimizer():
    other = torch.optim.SGD(linear().parameters())
    engine(lr_scheduler=torch.optim.lr_scheduler.StepLR(other, 1))


@wrong(
    "training_data is a DataLoader, not a dataset. Pass the dataset itself; the engine makes the "
    "loader that splits it over the ranks."
)
def loader_as_training_data():
    zeroshard.initialize(
        model=linear(), config=config(optimizer=ADAMW), training_data=DataLoader([1, 2])
    )


@wrong(
    "units: 'Block' matches no module name and no class name of the model. Classes in the model: "
    "Linear.",
    ConfigError,
)
def unit_pattern_without_match():
    engine(units=["Block"])


@wrong(
    "conditional_modules: 'visual' matches no module name and no class name of the model. Classes "
    "in the model: Linear.",
    ConfigError,
)
def conditional_pattern_without_match():
    engine(conditional_modules=["visual"])


# ---------------------------------------------------------------------- backward


@wrong(
    "engine.backward needs a scalar loss, got (2, 2). Reduce it first, for instance with .mean()."
)
def loss_is_a_matrix():
    with engine() as e:
        e.backward(e(torch.ones(2, 3)))


@wrong(
    "engine.backward needs a scalar loss, got float. Reduce it first, for instance with .mean()."
)
def loss_is_a_number():
    with engine() as e:
        e.backward(loss_of(e).item())


@wrong(
    "engine.backward(loss): the loss has no graph. It was computed under torch.no_grad(), "
    "detached, or depends on no trainable parameter."
)
def loss_without_graph():
    with engine() as e, torch.no_grad():
        e.backward(loss_of(e))


@wrong(
    "loss.backward() in fp16 without loss scaling: small gradients would become 0. Use "
    "engine.backward(loss), or engine.scale(loss).backward(). A loss of several engines needs "
    "backward() of one of them."
)
def unscaled_fp16():
    with engine(fp16={"enabled": True, "auto_cast": True}) as e:
        loss_of(e).backward()


@wrong(
    "engine.backward(loss) and loss.backward() were mixed in one step with "
    "gradient_accumulation_steps=2: engine.backward divides the loss, and gradients of "
    "loss.backward() are divided in the step. Use one of them for all losses of a step."
)
def both_kinds_of_backward():
    with engine(gradient_accumulation_steps=2) as e:
        e.backward(loss_of(e))
        e.step()
        loss_of(e).backward()


@wrong(
    "one loss was computed with two engines, with gradient_accumulation_steps=1 and 2. backward() "
    "of one engine divides the loss wrongly for the other. Use the same number."
)
def shared_loss_divided_differently():
    with engine() as a, engine(gradient_accumulation_steps=2) as b:
        a.backward(loss_of(a) + loss_of(b))


@wrong(
    "one loss was computed with two engines, and only one of them scales it (fp16). What overflows "
    "there would be an error of the other one, or be lost. Train both in fp16, or give each engine "
    "its own loss."
)
def shared_loss_in_fp16():
    with engine(fp16={"enabled": True, "auto_cast": True}) as a, engine() as b:
        a.backward(loss_of(a) + loss_of(b))


# ---------------------------------------------------------------------- step


@wrong(
    "engine.step() before any backward of this step: there is no gradient. Call "
    "engine.backward(loss) first."
)
def step_without_backward():
    with engine() as e:
        e.step()


@wrong(
    "engine.step() before any backward of this step: there is no gradient. Call "
    "engine.backward(loss) first."
)
def step_twice():
    with engine() as e:
        e.backward(loss_of(e))
        e.step()
        e.step()


@wrong("engine.step() inside no_sync(): leave the context before stepping.")
def step_inside_no_sync():
    with engine() as e, e.no_sync():
        e.backward(loss_of(e))
        e.step()


@wrong(
    "engine.step() without an optimizer: pass one to initialize(), or name one in the config under "
    '"optimizer".'
)
def step_without_optimizer():
    with engine(optimizer=None) as e:
        e.backward(loss_of(e))
        e.step()


@wrong(
    "engine.step() after a backward that raised an exception: its gradients are incomplete and "
    "were deleted. Run the micro-batches of the step again."
)
def step_after_an_exception():
    def fall(_grad):
        raise KeyError

    with engine() as e:
        out = e(torch.ones(2, 3))
        out.register_hook(lambda grad: grad)
        e.module.weight.register_hook(fall)
        try:
            e.backward(out.sum())
        except KeyError:
            e.step()


@wrong(
    "optimizer.step() was called directly. The gradients are sharded and belong to the engine: "
    "call engine.step(), which also clips gradients and advances the schedule."
)
def optimizer_stepped_directly():
    with engine() as e:
        e.backward(loss_of(e))
        e.optimizer.step()


@wrong(
    "1 trainable parameters got no gradient on any rank: spare. Freeze them, use them, or set "
    '"ignore_unused_parameters": true.'
)
def unused_parameter():
    model = linear()
    model.spare = nn.Parameter(torch.ones(4))
    section = {"stage": 2, "ignore_unused_parameters": False}
    with zeroshard.Engine(model, config=config(optimizer=ADAMW, zero_optimization=section)) as e:
        e.backward(loss_of(e))
        e.step()


@wrong(
    "parameter 'weight' has a sparse gradient; ZeRO reduces dense flat gradients. Use "
    "sparse=False in the embedding.",
    UnsupportedError,
)
def sparse_gradient():
    with engine(nn.Embedding(5, 3, sparse=True)) as e:
        e.backward(e(torch.tensor([1])).sum())


# ---------------------------------------------------------------------- batch size, data


@wrong("set_train_batch_size(7): not a multiple of micro-batch 2 x world size ...")
def odd_batch_size():
    with engine() as e:
        e.set_train_batch_size(7)


@wrong("set_train_batch_size(0): give a whole number of samples, at least 1.")
def empty_batch_size():
    with engine() as e:
        e.set_train_batch_size(0)


@wrong("set_train_micro_batch_size(1.5): give a whole number of samples, at least 1.")
def broken_micro_batch_size():
    with engine() as e:
        e.set_train_micro_batch_size(1.5)


@wrong("set_train_batch_size in the middle of a step: call it after step().")
def batch_size_in_the_middle():
    with engine(gradient_accumulation_steps=2) as e:
        e.backward(loss_of(e))
        e.step()
        e.set_train_batch_size(8)


# ---------------------------------------------------------------------- after close

CLOSED = "this engine was closed; build a new one to continue."


def _closed(use: Callable[[Any], Any]) -> Callable[[], Any]:
    def call() -> Any:
        e = engine()
        e.backward(loss_of(e))
        e.close()
        return use(e)

    return call


CASES += [
    Case(f"closed_{name}", _closed(use), CLOSED)
    for name, use in {
        "forward": lambda e: e(torch.ones(2, 3)),
        "backward": lambda e: e.backward(torch.ones((), requires_grad=True)),
        "step": lambda e: e.step(),
        "zero_grad": lambda e: e.zero_grad(),
        "no_sync": lambda e: e.no_sync().__enter__(),
        "batches": lambda e: e.batches([]),
        "scale": lambda e: e.scale(torch.ones(())),
        "iter_full_params": lambda e: list(e.iter_full_params()),
        "set_train_batch_size": lambda e: e.set_train_batch_size(4),
        "memory_report": lambda e: e.memory_report(all_ranks=True),
    }.items()
]

# ---------------------------------------------------------------------- parameters


@wrong(
    "a tensor of shape (3,) does not belong to any open engine. Pass a parameter of the model that "
    "was given to zeroshard.initialize()."
)
def stranger_read():
    from zeroshard.zero import safe_get_full_fp32_param

    safe_get_full_fp32_param(nn.Parameter(torch.ones(3)))


@wrong(
    "engine.save_checkpoint() got None as the directory. Pass a path; '.' is the working directory."
)
def save_nowhere():
    engine().save_checkpoint(None)


@wrong(
    "engine.save_checkpoint() got '' as the directory. Pass a path; '.' is the working directory."
)
def save_into_an_empty_name():
    engine().save_checkpoint("")


@wrong(
    "engine.load_checkpoint() got None as the directory. Pass a path; '.' is the working directory."
)
def load_from_nowhere():
    engine().load_checkpoint(None)


@wrong(
    "engine.save_16bit_model() got '' as the directory. Pass a path; '.' is the working directory."
)
def weights_into_an_empty_name():
    engine().save_16bit_model("")
