"""Small trainings on pretended CUDA devices, and the same trainings on the CPU.

:func:`zeroshard_testing.streams.pretend_cuda` replaces functions of the whole process. So a scenario
runs in a forked child of a rank of the test kit, which has imported everything and trained nothing.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import select
import shutil
import signal
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn
from unittest import mock

import torch
from kit import DTYPES, config, engine
from support.nodes import KEYS
from torch import nn
from zeroshard_testing.streams import Finding, Watch, pretend_cuda

from zeroshard.core import tiers
from zeroshard.offload.swap_file import SwapFile
from zeroshard.optim import native_adam
from zeroshard.zero import (
    GatheredParameters,
    Init,
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)

WIDTH = 16
CHUNK_NUMEL = 192
"""Small enough that optimizer state on disk is cut into several chunks."""

OFFLOADS = ("none", "optimizer", "parameters", "delayed", "disk", "all disk")
QUERIES = {"always": True, "never": False}


# ---------------------------------------------------------------------- model and configuration


class Block(nn.Module):
    """Two layers and the sum with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BD):
        return x_BD + self.down(torch.relu(self.up(x_BD)))


def model() -> nn.Module:
    """Four units. The first is one parameter without padding, so that its gradient is adopted."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Block(), Block(), nn.Linear(WIDTH, 4))


def zero_section(offload: str, folder: str) -> dict[str, Any]:
    """The keys of ``zero_optimization`` for one kind of offload."""
    host = {"device": "cpu", "pin_memory": True}
    disk = {"device": "nvme", "nvme_path": folder, "pin_memory": True}
    return {
        "none": {},
        "optimizer": {"offload_optimizer": host},
        "parameters": {"offload_optimizer": host, "offload_param": host},
        "delayed": {"offload_optimizer": {**host, "delayed_update": True}},
        "early": {"offload_optimizer": {**host, "super_offload": True}},
        "disk": {"offload_optimizer": disk},
        "all disk": {"offload_optimizer": disk, "offload_param": disk},
    }[offload]


@contextmanager
def cuda(ranks: int = 1, query: bool | None = None) -> Iterator[Watch]:
    """Pretended devices, in a world of ``ranks`` ranks."""
    with pretend_cuda(devices=2, query=query) as watch:
        with watch.world(ranks) if ranks > 1 else nullcontext():
            yield watch


# ---------------------------------------------------------------------- scenarios


@dataclass(frozen=True)
class Scenario:
    """One training. ``query``: what ``Event.query`` answers. ``program``: a function of this module.

    ``nodes``: those of ``support/nodes.py`` that four ranks are on.
    """

    stage: int
    offload: str
    program: str
    ranks: int = 1
    precision: str = "fp32"
    query: str = "always"
    nodes: str | None = None

    def __str__(self) -> str:
        text = f"stage {self.stage}, {self.offload}, {self.program}, {self.ranks} ranks"
        text = f"{text}, {self.precision}, {self.query} done"
        return text if self.nodes is None else f"{text}, {self.nodes}"


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


class Run:
    """One training on one device. On the CPU everything that names streams does nothing."""

    def __init__(
        self,
        scenario: Scenario,
        device: str,
        watch: Watch | None,
        *,
        rank: int = 0,
        folder: str | None = None,
    ) -> None:
        self.scenario = scenario
        self.device = device
        self.watch = watch
        self.losses: list[torch.Tensor] = []
        self.values: list[float] = []
        self.folder = folder or tempfile.mkdtemp(prefix="zeroshard-streams-")
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.rank = rank
        self.micro = 0

    def open(self, net: nn.Module | None = None, **keys: Any) -> Any:
        """The engine of the scenario, by default of :func:`model`."""
        zero = zero_section(self.scenario.offload, self.folder) | KEYS[self.scenario.nodes]
        scale = {"fp16": {"enabled": True, "loss_scale": 64}}
        if self.scenario.precision == "fp16":
            keys = {**scale, **keys}
        self.model = net or model()
        return engine(
            self.model,
            self.scenario.stage,
            self.scenario.precision,
            optimizer=fused_adamw,  # in host memory the worker thread runs it
            zero_optimization=zero,
            **keys,
        )

    def batch(self) -> torch.Tensor:
        """The next input of this rank, in device memory."""
        self.micro += 1
        x_BD = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) * (1 + self.micro / 4)
        x_BD = x_BD.roll(self.rank)
        return x_BD.to(DTYPES[self.scenario.precision]).to(self.device)

    def loss(self, trained: Any) -> torch.Tensor:
        """The loss of the next input. Its value is kept."""
        loss = trained(self.batch()).float().square().mean()
        self.losses.append(loss.detach())
        return loss

    def step(self, trained: Any) -> None:
        """Forward, backward and step."""
        trained.backward(self.loss(trained))
        trained.step()

    def phase(self, name: str) -> None:
        """Let the watch count in this phase."""
        if self.watch is not None:
            self.watch.phase(name)

    def side_stream(self) -> Any:
        """A stream that begins after the present work; None on the CPU."""
        if self.device == "cpu":
            return None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        return stream

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Use ``stream`` as a program should: the present one goes on after it."""
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    def finish(self, trained: Any) -> None:
        """Read all losses and the parameters, and close the engine."""
        with GatheredParameters(list(self.model.parameters())):
            for param in self.model.parameters():
                self.values += param.detach().double().cpu().flatten().tolist()
        self.values += [float(loss) for loss in self.losses]
        trained.close()


def plain(run: Run) -> None:
    """Three steps."""
    trained = run.open()
    for at in range(3):
        run.phase(f"step {at}")
        run.step(trained)
    run.phase("end")
    run.finish(trained)


def whole_blocks(run: Run) -> None:
    """Matrices of a block are units of their own, which are gathered and reduced together."""
    evaluation(run, block_max_numel=2000, unit_max_numel=600)


def accumulation(run: Run) -> None:
    """Two micro-batches for each step."""
    trained = run.open(gradient_accumulation_steps=2)
    for _ in range(6):
        run.step(trained)
    run.finish(trained)


def evaluation(run: Run, **keys: Any) -> None:
    """A forward without gradient between steps."""
    trained = run.open(**keys)
    for _ in range(3):
        run.step(trained)
        trained.eval()
        with torch.no_grad():
            run.loss(trained)
        trained.train()
    run.finish(trained)


def edits(run: Run) -> None:
    """Parameters are changed between steps."""
    trained = run.open()
    for _ in range(3):
        run.step(trained)
        params = list(run.model.parameters())
        with GatheredParameters(params, modifier_rank=0), torch.no_grad():
            for param in params:
                param.mul_(0.9)
    run.finish(trained)


def gradients(run: Run) -> None:
    """Gradients are read and changed between backward and step."""
    trained = run.open()
    for _ in range(3):
        trained.backward(run.loss(trained))
        for param in run.model.parameters():
            grad = safe_get_full_grad(param)
            safe_set_full_grad(param, grad * 0.5)
        trained.step()
    run.finish(trained)


def two_backwards(run: Run) -> None:
    """Two losses are computed for one step."""
    trained = run.open()
    for _ in range(3):
        trained.backward(run.loss(trained))
        trained.backward(run.loss(trained))
        trained.step()
    run.finish(trained)


def offload_states(run: Run) -> None:
    """All state leaves the device between steps, and comes back."""
    trained = run.open()
    for at in range(3):
        run.step(trained)
        trained.offload_states(non_blocking=at != 1)
        trained.reload_states(non_blocking=at != 1)
    run.finish(trained)


def offload_states_on_side_stream(run: Run) -> None:
    """The same, on another stream than training."""
    trained = run.open()
    for _ in range(3):
        run.step(trained)
        with run.on(run.side_stream()):
            trained.offload_states(non_blocking=True)
        with run.on(run.side_stream()):
            trained.reload_states(non_blocking=True)
    run.finish(trained)


def background_save(run: Run) -> None:
    """A checkpoint is written while training goes on."""
    trained = run.open(checkpoint={"asynchronous": True})
    for at in range(3):
        run.step(trained)
        trained.save_checkpoint(run.folder, tag=f"at{at}")
    run.finish(trained)


def side_stream(run: Run) -> None:
    """Construction and training on a stream of the program."""
    with run.on(run.side_stream()):
        trained = run.open()
        for _ in range(3):
            run.step(trained)
        run.finish(trained)


def stream_per_step(run: Run) -> None:
    """Each step on a new stream."""
    trained = run.open()
    for _ in range(3):
        with run.on(run.side_stream()):
            run.step(trained)
    run.finish(trained)


def close_after_step(run: Run) -> None:
    """Nothing is read before the engine is closed."""
    trained = run.open()
    for _ in range(2):
        run.step(trained)
    trained.close()
    run.values += [float(loss) for loss in run.losses]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD.clone()

    @staticmethod
    def backward(ctx: Any, grad_BD: torch.Tensor) -> Any:
        raise KeyError("in backward")


def exception_in_backward(run: Run, **keys: Any) -> None:
    """Backward ends in the middle; the step begins anew."""
    trained = run.open(**keys)
    for at in range(3):
        if at == 1:
            hook = run.model[1].register_forward_hook(lambda _m, _i, out: _Raises.apply(out))
            try:
                trained.backward(run.loss(trained))
            except KeyError:
                hook.remove()
            else:
                raise AssertionError("backward did not raise")
        run.step(trained)
    run.finish(trained)


# ---------------------------------------------------------------------- programs for one statement


def reports(run: Run) -> None:
    """The outcome of a step is read at once, where no events are sent: their copy is behind it."""
    trained = run.open(trust={"report": False})
    for _ in range(2):
        run.step(trained)
        run.values.append(float(trained.last_step.skipped))
    run.finish(trained)


class Scaled(nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x_BD):
        return x_BD * self.scale.to(x_BD.dtype)


def buffers(run: Run) -> None:
    """A buffer is read before a parameter is used."""
    trained = run.open(nn.Sequential(Scaled(), *model()))
    run.model[0](run.batch())
    run.step(trained)
    run.finish(trained)


class Decaying(nn.Linear):
    """A layer that writes into its weight in forward."""

    def forward(self, x_BD):
        with torch.no_grad():
            self.weight.mul_(0.75)
        return super().forward(x_BD)


def edits_in_forward(run: Run) -> None:
    """Parameters are changed while they are gathered."""
    trained = run.open(
        nn.Sequential(*list(model())[:2], Decaying(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    )
    for _ in range(3):
        run.step(trained)
    run.finish(trained)


class Optional(nn.Module):
    """A layer that is left out if ``used`` is False."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.used = Block(), True

    def forward(self, x_BD):
        return self.inner(x_BD) if self.used else x_BD


def unused_module(run: Run) -> None:
    """Every second step leaves out the last module, whose gradient is zero then."""
    trained = run.open(nn.Sequential(*list(model())[:2], Optional()))
    for at in range(4):
        run.model[2].used = at % 2 == 0
        run.step(trained)
    run.finish(trained)


def masters(run: Run) -> None:
    """Masters are set right after a step."""
    trained = run.open()
    for _ in range(3):
        run.step(trained)
        for param in run.model.parameters():
            safe_set_full_fp32_param(param, torch.full(param.shape, 0.125, device=run.device))
    run.finish(trained)


def sharded_construction(run: Run) -> None:
    """The model is sharded while it is built, and read and changed before the engine is."""
    with Init(config_dict_or_path=config(3, run.scenario.precision)):
        net = model()
        with GatheredParameters(list(net.parameters()), modifier_rank=0), torch.no_grad():
            net[1].up.weight.mul_(0.5)
    for param in net.parameters():
        run.values.append(float(param.detach().double().sum()))
    with GatheredParameters(list(net.parameters()), modifier_rank=0), torch.no_grad():
        net[0].weight.mul_(0.5)
    trained = run.open(net)
    run.step(trained)
    run.finish(trained)


def sums(run: Run) -> None:
    """The sum of gradients is read before it is complete."""
    trained = run.open(gradient_accumulation_steps=2)
    for _ in range(4):
        trained.backward(run.loss(trained))
        run.values += [float(safe_get_full_grad(p).sum()) for p in run.model.parameters()]
        trained.step()
    run.finish(trained)


def exception_in_micro_batch(run: Run) -> None:
    """The same, while several micro-batches are summed."""
    exception_in_backward(run, gradient_accumulation_steps=2)


def load(run: Run) -> None:
    """A checkpoint is loaded right after a step."""
    trained = run.open()
    run.step(trained)
    trained.save_checkpoint(run.folder, tag="one")
    for _ in range(2):
        run.step(trained)
        trained.load_checkpoint(run.folder, tag="one")
    run.finish(trained)


def two_offloads(run: Run) -> None:
    """State leaves in two calls, then in one. The engine is closed as soon as it is back."""
    trained = run.open()
    for kinds in (["optim_states"], ["lp_params"]), (["lp_params", "optim_states"],):
        run.step(trained)
        for kind in kinds:
            trained.offload_states(include=kind, non_blocking=True)
        trained.reload_states(non_blocking=True)
    trained.close()
    run.values += [float(loss) for loss in run.losses]


def close_by_error(run: Run) -> None:
    """The engine is closed because the program failed."""
    trained = run.open()
    for _ in range(3):
        run.step(trained)
    trained.backward(run.loss(trained))
    trained.close("ValueError: in the program")
    run.values += [float(loss) for loss in run.losses]


def on_the_cpu(run: Run) -> None:
    """The ranks are CPU ranks. Threads that read and write files are watched.

    Writes take a while, so that what does not wait for them comes before their end.
    """
    run.device = "cpu"
    move = SwapFile._call

    def slowly(file: SwapFile, *args: Any, writes: bool) -> None:
        if writes:
            time.sleep(0.002)
        move(file, *args, writes=writes)

    with (
        mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}),
        mock.patch.object(SwapFile, "_call", slowly),
    ):
        trained = run.open(gradient_accumulation_steps=2)
        for _ in range(6):
            trained.backward(run.loss(trained))
            for param in run.model.parameters():
                safe_get_full_grad(param)
            trained.step()
        run.finish(trained)


PROGRAMS = {
    program.__name__: program
    for program in (
        plain, accumulation, evaluation, edits, gradients, two_backwards, offload_states,
        offload_states_on_side_stream, background_save, side_stream, stream_per_step,
        close_after_step, exception_in_backward, whole_blocks,
    )
}  # fmt: skip
SPECIAL = {
    program.__name__: program
    for program in (
        reports, buffers, edits_in_forward, unused_module, masters, sharded_construction, sums,
        exception_in_micro_batch, load, two_offloads, close_by_error, on_the_cpu,
    )
}  # fmt: skip
"""Programs that need an ordering statement which no program above needs alone."""


@dataclass(frozen=True)
class Outcome:
    """The findings of one scenario, and whether its values are those of the CPU (None: not compared)."""

    findings: list[Finding]
    is_equal: bool | None

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


def run_scenario(scenario: Scenario, *, without: Any = None) -> Outcome:
    """Run it in a child: on the pretended device, and at one rank on the CPU.

    ``without``: a context manager for the run on the pretended device. If this run shows a mistake, there
    is none on the CPU.
    """
    prepare()
    return in_child(lambda: _run(scenario, without or nullcontext()))


@cache
def prepare() -> None:
    """Import and compile here what children would otherwise import and compile once each."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    native_adam.prepare()  # a thread that compiles would be missing in the children
    native_adam.wait()
    plain(Run(Scenario(3, "none", "plain"), "cpu", None))


def _run(scenario: Scenario, without: Any) -> Outcome:
    program = (PROGRAMS | SPECIAL)[scenario.program]
    with mock.patch.object(tiers, "CHUNK_NUMEL", CHUNK_NUMEL):
        with cuda(scenario.ranks, QUERIES[scenario.query]) as watch, without:
            run = Run(scenario, "cuda", watch)
            program(run)
            findings = watch.findings
        if findings or scenario.ranks > 1:
            return Outcome(findings, None)
        expected = Run(scenario, "cpu", None)
        program(expected)
    return Outcome(findings, run.values == expected.values)


def in_child(call: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """What ``call`` returns in a forked child, which ends then. The result travels as a pickle."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _serve(call, write_end)
    os.close(write_end)
    ends_s, said = time.monotonic() + timeout_s, b""
    try:
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], max(0.0, ends_s - time.monotonic()))[0]:
                part = pipe.read(1 << 16)
                if not part:
                    break
                said += part
            else:
                raise TimeoutError(f"the child did not end within {timeout_s} seconds")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it has nothing left to do
        _, status = os.waitpid(pid, 0)
    if not said:
        raise ChildProcessError(f"the child ended with status {status} and said nothing")
    result, error = pickle.loads(said)
    if error is not None:
        raise ChildProcessError(error)
    return result


def _serve(call: Callable[[], Any], write_end: int) -> NoReturn:
    result, error = None, None
    try:
        result = call()
    except BaseException:
        error = traceback.format_exc()
    with os.fdopen(write_end, "wb") as pipe:
        pickle.dump((result, error), pipe)
    os._exit(0)


# ---------------------------------------------------------------------- which scenarios


def is_allowed(scenario: Scenario) -> bool:
    """Whether the configuration allows it, and a world without other ranks can do it."""
    if scenario.stage == 0 and scenario.offload != "none":
        return False
    if scenario.stage != 3 and scenario.offload in ("parameters", "all disk"):
        return False
    nodes = scenario.nodes or ""
    if nodes == "hpz" and scenario.stage != 3:
        return False
    if ("hpz" in nodes or "hybrid" in nodes) and scenario.offload in ("parameters", "all disk"):
        return False  # second shards stay on the device
    return not (scenario.ranks > 1 and scenario.program == "background_save")


DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "offload": OFFLOADS,
    "program": tuple(PROGRAMS),
    "ranks": (1, 4),
    "precision": ("fp32", "bf16", "fp16"),
    "query": tuple(QUERIES),
}
ALL = [row for row in itertools.product(*DIMENSIONS.values()) if is_allowed(Scenario(*row))]
