"""``zero.Init``, ``GatheredParameters`` and related names of ``deepspeed.zero``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.deepspeed.collectives import get_world_size
from zeroshard.deepspeed.config_model import model_config
from zeroshard.deepspeed.parameters import is_zero_param, mark_parameters
from zeroshard.errors import UsageError
from zeroshard.zero import gathered, init


class Init(init.Init):
    """:class:`zeroshard.zero.Init` that also sets DeepSpeed's attributes on parameters."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
        mesh: Any = None,
    ) -> None:
        super().__init__(
            module,
            data_parallel_group,
            mem_efficient_linear,
            remote_device,
            pin_memory,
            model_config(config if config_dict_or_path is None else config_dict_or_path),
            None,
            enabled,
            dtype,
            mpu,
            mesh,
        )

    def _check_group(self, group: Any) -> None:
        if group is not None and get_world_size(group) == 1 < get_world_size():
            raise UsageError(
                f"zero.Init got a data_parallel_group of one rank, and there are {get_world_size()}: "
                "nothing would be sharded. Leave it out, or pass the group of all ranks."
            )

    def _take(self, holder: nn.Module, leaf: str, param: nn.Parameter) -> None:
        super()._take(holder, leaf, param)
        if not is_zero_param(param):
            mark_parameters([param])


class GatheredParameters(gathered.GatheredParameters):
    """:class:`zeroshard.zero.GatheredParameters`."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing but a check of the types: a read of a sharded parameter gathers it in any module.

    Raises:
        RuntimeError: an argument is of another type.
    """
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"module is a {type(module).__name__}, not a torch.nn.Module")
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"parameter is a {type(parameter).__name__}, not a torch.nn.Parameter")


unregister_external_parameter = register_external_parameter


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """A context with the engine's module, all parameters whole, for many forward passes.

    Entering and leaving are collective. Ranks may make different calls inside.
    """
    module = model.module if hasattr(model, "module") else model
    with GatheredParameters(list(module.parameters())):
        yield module


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor],
    target_fp_dtype: torch.dtype,
    target_device: torch.device | None = None,
) -> Callable[..., Tensor]:
    """``fn`` itself: :class:`Init` casts parameters, and leaves what a program computes as it is."""
    return fn


_orig_torch_arange = torch.arange


class TiledLinear(nn.Linear):
    """``torch.nn.Linear``. The arguments about splitting have no effect.

    Units already limit what is gathered, so tiles would save nothing.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Linear] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        if init_linear is not None:
            with torch.no_grad():
                self.weight.copy_(init_linear.weight)
                if init_linear.bias is not None:
                    self.bias.copy_(init_linear.bias)
