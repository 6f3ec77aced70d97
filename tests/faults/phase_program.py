"""A program that trains, evaluates, saves, loads, exports and ends, with faults of one rank in phases.

``test_phases_and_faults.py`` launches it on two ranks: ``phase_program.py PLAN``; PLAN is the JSON of
:class:`Plan`. All kinds of run train the same model on the same two micro-batches per step, so that
:func:`losses_of_one_process` gives the losses of every kind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.interpreter_lock import hold
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard.core.mesh import Mesh
from zeroshard.parallel import pipeline, tensor_parallel

WORDS, WIDTH, LENGTH, BATCH, DEPTH, LR = 16, 8, 4, 2, 4, 0.1
JOIN_S = 20.0
"""The timeout of ``init_distributed``."""
LAST = 4
"""Number of the last step."""
CUT = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


@dataclass(frozen=True)
class Plan:
    """``faults``: phase -> what happens there, once, on rank ``at``. Times are in seconds.

    ``frozen_s``: ``trust.frozen_s``. ``late_s``: all limits for late ranks. ``pause_s``, ``lock_s``: how
    long a rank is stopped, or its interpreter lock is held. ``folder``: for all files of the run.
    """

    kind: str
    faults: dict[str, str]
    at: int
    folder: str
    frozen_s: float
    late_s: float
    pause_s: float
    lock_s: float


class Point:
    """Where faults may begin. ``armed``: the phases that have begun and whose fault has not."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._is_here = int(os.environ["RANK"]) == plan.at
        self.armed: set[str] = set()

    def arm(self, *phases: str) -> None:
        self.armed |= {*phases} & self._plan.faults.keys()

    def reach(self, phase: str) -> bool:
        """Let the fault of an armed phase happen. True: this rank must leave the call out."""
        if phase not in self.armed:
            return False
        self.armed.discard(phase)
        if not self._is_here:
            return False
        what, plan = self._plan.faults[phase], self._plan
        with (Path(plan.folder) / "begun").open(
            "a"
        ) as file:  # the last line: when the last one began
            file.write(f"{time.time()} {phase}\n")
        if what == "skips":
            return True
        _FAULTS[what](plan)
        return False

    def begin(self, phase: str) -> None:
        """Let the fault of an armed phase happen, where a call cannot be left out."""
        self.reach(phase)

    def leaves_out(self, *phases: str) -> bool:
        """Whether this rank must leave out the call of one of ``phases``, in which other faults begin."""
        skipped = [phase for phase in phases if self._plan.faults.get(phase) == "skips"]
        reached = [self.reach(phase) for phase in skipped]
        return any(reached)

    def at(self, phase: str) -> bool:
        """Arm ``phase`` and reach its point."""
        self.arm(phase)
        return self.reach(phase)


def _raise(error: type[BaseException], text: object) -> Callable[[Plan], None]:
    def fail(_: Plan) -> None:
        raise error(text)

    return fail


def _stop_for_a_while(plan: Plan) -> None:
    words = f"sleep {plan.pause_s}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", words], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep_for_good(_: Plan) -> None:
    time.sleep(600.0)


_FAULTS: dict[str, Callable[[Plan], None]] = {
    "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "quits": lambda _: os._exit(3),
    "exits": _raise(SystemExit, 0),
    "raises": _raise(ValueError, "bad sample 17"),
    "memory": _raise(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 1.00 MiB."),
    "frozen": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "paused": _stop_for_a_while,
    "locked": lambda plan: hold(plan.lock_s),
    "hangs": _sleep_for_good,
}


# -- the model, its data, and plain training of it ---------------------------------------------------


class Block(nn.Module):
    """``point``: where faults of a forward and a backward begin; only one block of a rank has one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.point: Point | None = None

    def forward(self, x: Tensor) -> Tensor:
        point = self.point
        if point is not None:
            for phase in ("first", "forward", "evaluate"):
                point.reach(phase)
        y: Tensor = x + self.down(self.up(x).tanh())
        if point is not None and y.requires_grad:
            y.register_hook(lambda _: point.begin("backward"))
        return y


class Network(nn.Module):
    """Embedding, blocks and head. ``between()`` is called before the head is made."""

    def __init__(self, between: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        between()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        for layer in self.layers:
            if layer.point is None or not layer.point.leaves_out("forward", "evaluate"):
                x = layer(x)
        y: Tensor = self.head(x)
        return y


def network(between: Callable[[], object] = lambda: None) -> Network:
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Network(between)
    finally:
        torch.set_default_dtype(before)


def loss_of(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def micro_batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """Two: stages 1 and 3 give one to each rank, a pipeline runs both, tensor ranks share them."""
    made = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(WORDS, (2, BATCH, LENGTH), generator=made)
    return [(part, part.roll(-1, 1)) for part in tokens]


def losses_of_one_process() -> list[float]:
    """The mean losses of steps 0 to 4 in plain PyTorch; :func:`train` repeats step 3."""
    model, losses = network(), []
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(LAST + 1):
        loss = torch.stack([loss_of(model(x), y) for x, y in micro_batches(step)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [*losses[:4], *losses[3:]]


# -- the kinds of run ------------------------------------------------------------------------------


class Training:
    """An engine of one kind and what the program does with it."""

    def __init__(self, plan: Plan, point: Point) -> None:
        self.kind, self.point = plan.kind, point
        stage = {"stage 3": 3, "zero.Init": 3}.get(plan.kind, 1)
        limits = dict.fromkeys(("compile", "save", "load", "export", "eval"), plan.late_s)
        limits["setup"] = plan.late_s if "construct" in plan.faults else 60.0
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2 * BATCH if plan.kind == "tensor" else BATCH,
            "gradient_clipping": 0.0,
            "unit_min_numel": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "checkpoint": {"asynchronous": "behind" in plan.faults},
            "trust": {
                "frozen_s": plan.frozen_s,
                "collective_timeout_s": plan.late_s,
                "sections": limits,
                "grace_s": 2.0,
            },
        }
        mesh = None

        def construct() -> None:
            point.at("construct")

        model: nn.Module
        if plan.kind == "zero.Init":
            with zeroshard.zero.Init(config_dict_or_path=config, dtype=torch.float64):
                model = network(construct)
        else:
            model = network(construct)
        last = list(model.layers)[-2 if plan.at else 1]  # of a pipeline, in the stage of this rank
        last.point = point
        if plan.kind == "pipeline":
            order = ("embed", "layers", "head")
            model = pipeline(model, split=["layers.2"], order=order, loss_fn=loss_of)
            config["parallel"] = {"pipeline": 2}
            config["gradient_accumulation_steps"] = 2
        if plan.kind == "tensor":
            grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
            model = tensor_parallel(model, grid, CUT)
            mesh = Mesh(data_shard=1, tensor=2)
        self.engine = zeroshard.Engine(model, config=config, optimizer=self._optimizer, mesh=mesh)

    def _optimizer(self, params: Any) -> torch.optim.Optimizer:
        point = self.point

        class Descent(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                point.reach("step")
                return super().step(closure)

        return Descent(params, LR)

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        both = micro_batches(step)
        if self.kind == "pipeline":
            return both
        if self.kind == "tensor":
            return [tuple(map(torch.cat, zip(*both, strict=True)))]  # type: ignore[list-item]
        return [both[self.engine.global_rank]]

    def step(self, number: int) -> float:
        """Train on a batch; the mean loss of what this rank has of it."""
        batches = self.batches(number)
        if self.kind == "pipeline":
            return float(self.engine.train_batch(iter(batches)).detach())
        ((tokens, labels),) = batches
        loss = loss_of(self.engine(tokens), labels)
        if not self.point.leaves_out("backward"):
            self.engine.backward(loss)
        if not self.point.leaves_out("step"):
            self.engine.step()
        return float(loss.detach())

    def evaluate(self, number: int) -> None:
        if self.kind == "pipeline":
            self.engine.eval_batch(iter(self.batches(number)))
            return
        self.engine.eval()
        with torch.no_grad():
            self.engine(self.batches(number)[0][0])
        self.engine.train()


# -- the program -----------------------------------------------------------------------------------


def train(plan: Plan) -> Iterator[float]:
    """The losses of this rank."""
    point, root = Point(plan), Path(plan.folder) / "checkpoints"
    point.at("join")
    # Also the limit of the program's own calls.
    join_s = JOIN_S if plan.faults.get("join") == "hangs" else 600.0
    zeroshard.init_distributed(verbose=False, timeout=timedelta(seconds=join_s))
    training = Training(plan, point)
    engine = training.engine
    point.arm("first")
    yield training.step(0)
    engine.save_checkpoint(root, "a")
    engine.wait_for_checkpoint()
    yield training.step(1)
    point.arm("forward", "backward", "step")
    yield training.step(2)
    point.arm("evaluate")
    training.evaluate(2)
    if not point.at("save"):
        engine.save_checkpoint(root, "b")
    point.at("behind")
    yield training.step(3)
    if not point.at("load"):
        engine.load_checkpoint(root, "b")
    yield training.step(3)
    if not point.at("own"):
        dist.all_reduce(torch.ones(1))
    if plan.kind != "pipeline" and not point.at("export"):
        engine.save_16bit_model(Path(plan.folder) / "exported")
    if not point.at("data"):
        yield training.step(LAST)
    point.at("close")
    engine.close()
    point.at("after")
    dist.destroy_process_group()


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    folder, rank = Path(plan.folder), os.environ["RANK"]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    (folder / f"losses-{rank}").write_text(json.dumps(list(train(plan))))


if __name__ == "__main__":
    main()
