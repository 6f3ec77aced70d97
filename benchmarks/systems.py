"""Builds every system so that all train the same model in the same way.

Each builder makes one system on one rank, in its best configuration for this setting, from the same fp32
model. All use AdamW with the same hyperparameters and torch's fused kernel, and clip gradients at norm
1.0. ``compute`` is "bf16" (with an fp32 master) or "fp32". Gradients are reduced in the dtype ``reduce``;
if that is empty, in ``compute``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ADAMW: dict[str, Any] = {"lr": 5e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""The learning rate is low. At 3e-4 the loss of such a small batch jumps after about 20 steps; at 1e-4 it
can jump within 50. After a jump, losses depend on rounding, and systems cannot be compared."""
CLIP = 1.0
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TRANSPORTS = ("stock", "p2p", "shm")
"""All transports of ZeroShard between CPU ranks. If a version lacks one, its line says so."""


def _nothing(_last: bool) -> None:
    pass


def _no_norm() -> None:
    return None


@dataclass(frozen=True)
class Trainer:
    """One training step in parts. ``before(last)`` is called before the forward of every micro-batch.

    ``norm``: of the whole gradient of the last step, before clipping; None if it is not computed.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]
    close: Callable[[], Any] = lambda: None
    before: Callable[[bool], Any] = _nothing
    norm: Callable[[], float | None] = _no_norm
    counts: bool = False
    """The system counts micro-batches itself: ``step`` is called after every one."""
    moved: Callable[[], Mapping[str, int]] = dict
    """Bytes moved over the bus and to disk since the start, by direction. Empty if they are not
    counted."""


Build = Callable[[Any, int], Trainer]
"""Builds a system from a model and the number of micro-batches per step."""


@dataclass(frozen=True)
class System:
    """One line of a table. ``library``: the package that must be installed.

    ``compared``: whether it trains on the data of all ranks, so that its losses must equal those of the
    others. ``unavailable``: why it cannot run here, for a reason other than a missing library.
    """

    name: str
    family: str
    library: str
    build: Build
    setting: str
    stage: int | None = None
    transport: str = ""
    compared: bool = True
    unavailable: str = ""

    @property
    def version(self) -> str | None:
        """The installed version; None if the library is missing."""
        try:
            return importlib.metadata.version(self.library)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def absent(self) -> str:
        """Why this line cannot run here; empty if it can."""
        if self.version is None:
            return f"{self.library} is not installed"
        if self.transport and not has_transport(self.transport):
            return f"transport {self.transport!r} is not in this version"
        return self.unavailable


def has_transport(name: str) -> bool:
    """Whether the installed ZeroShard has this transport."""
    from zeroshard.comm import connect

    return name == "auto" or name in connect.TRANSPORTS


# ---------------------------------------------------------------------- PyTorch


def floor(compute: str = "bf16") -> Build:
    """Forward and backward of the model, without exchange and update: a lower bound for all systems."""

    def build(model: Any, micro_batches: int) -> Trainer:
        model.to(_DTYPES[compute])
        return Trainer(model, _backward(micro_batches), lambda: model.zero_grad(set_to_none=True))

    return build


def _backward(micro_batches: int) -> Callable[[Tensor], None]:
    """Backward of one micro-batch. Together the micro-batches give the gradient of their mean loss."""

    def backward(loss: Tensor) -> None:
        torch.autograd.backward(loss / micro_batches)

    return backward


class ClippedStep:
    """Clip, update, free the gradients. ``foreach``: the kernel of the norm; None for the fastest."""

    def __init__(
        self,
        params: list[Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        foreach: bool | None = None,
    ) -> None:
        self._params = params
        self._optimizer = optimizer
        self._foreach = foreach
        self._norm: Any = None

    def __call__(self) -> None:
        self._norm = nn.utils.clip_grad_norm_(self._params, CLIP, foreach=self._foreach)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def norm(self) -> float | None:
        """The norm of the gradient of the last step before clipping, over all ranks."""
        found = self._norm
        return None if found is None else float(getattr(found, "full_tensor", lambda: found)())


class MasterStep(ClippedStep):
    """The same on fp32 masters of 16-bit parameters, with explicit casts."""

    def __init__(
        self,
        params: list[Tensor],
        masters: list[Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(masters, optimizer, foreach=foreach)
        self._params_16bit = params

    def __call__(self) -> None:
        for master, param in zip(self._params, self._params_16bit, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        super().__call__()
        with torch.no_grad():
            torch._foreach_copy_(self._params_16bit, self._params)


def plain(compute: str = "bf16", **kernel: bool) -> Build:
    """Clipping and one ``torch.optim.AdamW``. In bf16 each parameter has an fp32 master, with casts."""

    options: dict[str, Any] = {**ADAMW, **kernel}

    def build(model: Any, micro_batches: int) -> Trainer:
        if compute == "fp32":
            own: list[Tensor] = list(model.parameters())
            alone = ClippedStep(own, torch.optim.AdamW(own, **options))
            return Trainer(model, _backward(micro_batches), alone, norm=alone.norm)
        masters = [param.detach().clone() for param in model.parameters()]
        params = list(model.bfloat16().parameters())
        step = MasterStep(params, masters, torch.optim.AdamW(masters, **options))
        return Trainer(model, _backward(micro_batches), step, norm=step.norm)

    return build


def ddp(compute: str = "bf16") -> Build:
    """DDP with fp32 parameters and fp32 all-reduce. bf16 compute is autocast."""

    def build(model: Any, micro_batches: int) -> Trainer:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        step = fused_step(model)

        def forward(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=compute == "bf16"):
                loss: Tensor = wrapped(x, y)
                return loss

        def before(last: bool) -> None:  # sets the flag that no_sync() sets
            wrapped.require_backward_grad_sync = last

        return Trainer(forward, _backward(micro_batches), step, before=before, norm=step.norm)

    return build


def shard_with_fsdp2(
    model: Any, *, reshard: bool, compute: str = "bf16", reduce: str = "", **options: Any
) -> None:
    """FSDP2: fp32 shards, one group per large module."""
    for module in [*model.groups(), model]:
        shard_group_with_fsdp2(module, reshard=reshard, compute=compute, reduce=reduce, **options)


def shard_group_with_fsdp2(
    module: Any, *, reshard: bool, compute: str = "bf16", reduce: str = "", **options: Any
) -> None:
    """One group of FSDP2: the parameters of ``module`` that are in no other group."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=_DTYPES[compute], reduce_dtype=_DTYPES[reduce or compute]
    )
    fully_shard(module, mp_policy=policy, reshard_after_forward=reshard, **options)


def fsdp2(
    reshard: bool, *, syncs_always: bool = True, compute: str = "bf16", reduce: str = ""
) -> Build:
    """``syncs_always=False``: gradients are reduced only after the last micro-batch."""

    def build(model: Any, micro_batches: int) -> Trainer:
        shard_with_fsdp2(model, reshard=reshard, compute=compute, reduce=reduce)
        step = fused_step(model)
        return Trainer(
            model, _backward(micro_batches), step,
            before=lambda last: model.set_requires_gradient_sync(last or syncs_always),
            norm=step.norm,
        )  # fmt: skip

    return build


def fused_step(model: nn.Module, adamw: Mapping[str, Any] = ADAMW) -> ClippedStep:
    """Clip, and update all parameters with torch's fused AdamW."""
    params: list[Tensor] = list(model.parameters())
    return ClippedStep(params, torch.optim.AdamW(params, fused=True, **adamw))


# ---------------------------------------------------------------------- DeepSpeed


def import_deepspeed() -> Any:
    """Import DeepSpeed and suppress what it prints."""
    with contextlib.redirect_stdout(None):
        return importlib.import_module("deepspeed")


def deepspeed_config(
    stage: int, micro_batches: int = 1, compute: str = "bf16", reduce: str = ""
) -> dict[str, Any]:
    """The fastest configuration found for this size; see benchmarks/README.md."""
    return {
        **_common_config(micro_batches, compute, reduce),
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5_000_000,
            "allgather_bucket_size": 5_000_000,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _common_config(micro_batches: int, compute: str, reduce: str) -> dict[str, Any]:
    """Keys that DeepSpeed and ZeroShard share. Both reduce in ``compute`` by default."""
    keys: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": compute == "bf16"},
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
    }
    return keys if reduce in ("", compute) else {**keys, "communication_data_type": reduce}


def deepspeed(stage: int, compute: str = "bf16", reduce: str = "") -> Build:
    """DeepSpeed with torch's fused AdamW."""

    def build(model: Any, micro_batches: int) -> Trainer:
        library = import_deepspeed()
        engine, *_ = library.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
            config=deepspeed_config(stage, micro_batches, compute, reduce),
            dist_init_required=False,
        )
        return engine_trainer(engine, engine.destroy)

    return build


# ---------------------------------------------------------------------- ZeroShard


def engine_trainer(engine: Any, close: Callable[[], Any]) -> Trainer:
    """The trainer of an engine of DeepSpeed or ZeroShard."""

    def norm() -> float | None:
        found = engine.get_global_grad_norm()
        return None if found is None else float(found)

    return Trainer(engine, engine.backward, engine.step, close, norm=norm, counts=True)


def adamw_config(adamw: Mapping[str, Any] = ADAMW) -> dict[str, Any]:
    """The section ``optimizer`` of a configuration."""
    return {"type": "AdamW", "params": {**adamw, "betas": list(adamw["betas"])}}


def zeroshard_config(
    stage: int, micro_batches: int = 1, compute: str = "bf16", reduce: str = "", **keys: Any
) -> dict[str, Any]:
    """The defaults of ZeroShard with the hyperparameters that all systems share."""
    return {
        **_common_config(micro_batches, compute, reduce),
        "optimizer": adamw_config(),
        "zero_optimization": {"stage": stage},
        **keys,
    }


def zeroshard(stage: int, compute: str = "bf16", reduce: str = "", **keys: Any) -> Build:
    """ZeroShard with further keys of its configuration, such as ``transport``."""

    def build(model: Any, micro_batches: int) -> Trainer:
        from zeroshard import Engine

        config = zeroshard_config(stage, micro_batches, compute, reduce, **keys)
        engine = Engine(model, config=config)
        return engine_trainer(engine, engine.close)

    return build


# ---------------------------------------------------------------------- the lines of the tables


def floor_line(compute: str = "bf16") -> System:
    """Forward and backward of the model alone."""
    setting = f"{compute}, one rank by itself"
    return System("forward + backward", "floor", "torch", floor(compute), setting, compared=False)


def plain_line(name: str, *, compared: bool, compute: str = "bf16", **kernel: bool) -> System:
    """PyTorch in one process. It can be compared (``compared``) in protocols with one rank, where
    all lines have the same data."""
    words = "bf16, fp32 master" if compute == "bf16" else "fp32"
    return System(
        name, "PyTorch", "torch", plain(compute, **kernel), f"{words}, one rank by itself",
        compared=compared,
    )  # fmt: skip


def ddp_line(compute: str = "bf16") -> System:
    """DDP: without sharding."""
    words = ", bf16 autocast" if compute == "bf16" else ""
    return System(
        "DDP", "DDP", "torch", ddp(compute),
        f"fp32 parameters and reductions{words}; no_sync while it accumulates",
    )  # fmt: skip


def fsdp2_line(
    reshard: bool, *, syncs_always: bool = True, compute: str = "bf16", reduce: str = ""
) -> System:
    """FSDP2. It counts as stage 3 if parameters are resharded after forward, otherwise as stage 2."""
    name = f"FSDP2, {'resharded' if reshard else 'not resharded'}"
    setting = f"fp32 shards, {reduce or compute} reductions, reshard_after_forward={reshard}"
    if not syncs_always:
        name, setting = f"{name}, no sync", f"{setting}, set_requires_gradient_sync(False)"
    build = fsdp2(reshard, syncs_always=syncs_always, compute=compute, reduce=reduce)
    return System(name, "FSDP2", "torch", build, setting, stage=3 if reshard else 2)


def deepspeed_line(stage: int, *, compute: str = "bf16", reduce: str = "") -> System:
    """One stage of DeepSpeed."""
    return System(
        f"DeepSpeed stage {stage}", "DeepSpeed", "deepspeed", deepspeed(stage, compute, reduce),
        f"{reduce or compute} reductions, overlap_comm off, buckets of 5e6", stage=stage,
    )  # fmt: skip


def zeroshard_line(
    stage: int,
    transport: str = "auto",
    *,
    suffix: str = "",
    compute: str = "bf16",
    reduce: str = "",
    **keys: Any,
) -> System:
    """One stage of ZeroShard. The name of the line contains the transport unless it is ``auto``, the
    default."""
    name = f"ZeroShard stage {stage}" + (f", {transport}" if transport != "auto" else "") + suffix
    extra = "".join(f", {key}={value}" for key, value in keys.items())
    return System(
        name, f"ZeroShard {transport}", "zeroshard",
        zeroshard(stage, compute, reduce, transport=transport, **keys),
        f"{reduce or compute} reductions, transport {transport}{extra or ', defaults'}",
        stage=stage, transport=transport,
    )  # fmt: skip
