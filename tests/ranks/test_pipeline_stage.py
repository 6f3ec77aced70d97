"""A stage under torch's schedules, without an engine: messages, shapes, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard.comm.connect import open_link
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.shared_memory import RING
from zeroshard.comm.stage_messages import StageMessages, channels_of
from zeroshard.errors import UsageError
from zeroshard.parallel import pipeline
from zeroshard.parallel.pipeline_stage import ZeroStage, open_schedule, run_schedule
from zeroshard.parallel.schedules import SCHEDULES

COUNT, WIDTH = 4, 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() / COUNT


def opened(
    name: str, model: Any = None, messages: StageMessages | None = None
) -> tuple[Any, list[ZeroStage], nn.Module]:
    per_rank = 2 if SCHEDULES[name].several else 1
    part = pipeline(model or build(), split=["1", "2", "3"] if per_rank == 2 else ["2"])
    part.keep(dist.get_rank(), 2)
    stages = [
        ZeroStage(
            module,
            index,
            2 * per_rank,
            device=torch.device("cpu"),
            group=dist.group.WORLD,
            forward=module,
            backward=lambda _last, *given: torch.autograd.backward(*given),
            messages=messages,
        )
        for index, module in part.kept.items()
    ]
    return open_schedule(name, stages, COUNT, loss_of), stages, part


def messages_over(transport: str) -> StageMessages:
    """Through shared memory, or through gloo."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    recorders = {c: Recorder(c.name, rank=rank) for c in channels_of([0, 1], rank)}
    links = {
        channel: open_link(
            channel, transport=transport, group=group, device=torch.device("cpu"), recorder=recorder,
            guard=None, timeout_s=20.0, check=lambda _missing: None,
        )
        for channel, recorder in recorders.items()
    }  # fmt: skip
    assert all((link is not None) == (transport == "shm") for link in links.values())
    return StageMessages(group, recorders, {c: link for c, link in links.items() if link})


def batches(step: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(step)
    made = [torch.randn(2, length, WIDTH, dtype=torch.float64) for _ in range(2 * COUNT)]
    return made[:COUNT], made[COUNT:]


def run(opened_parts: Any, step: int, length: int, *, backward: bool) -> list[Tensor]:
    schedule, stages, _ = opened_parts
    inputs, targets = batches(step, length)
    first, last = stages[0].is_first, stages[-1].is_last
    return run_schedule(
        schedule,
        stages,
        [(x,) for x in inputs] if first else None,
        targets if last else None,
        backward=backward,
    )


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(2)
def test_a_pipeline_computes_what_the_model_computes_for_every_sequence_length(name):
    """torch's own stage would compute on rows of the step before when the length changes."""
    plain, parts = build(), opened(name)
    for step, (length, backward) in enumerate(
        [(8, True), (6, True), (6, False), (9, False), (8, True)]
    ):
        plain.zero_grad()
        parts[2].zero_grad()
        expected = [loss_of(plain(x), y) for x, y in zip(*batches(step, length), strict=True)]
        with torch.set_grad_enabled(backward):
            losses = run(parts, step, length, backward=backward)
        assert len(losses) == (COUNT if parts[1][-1].is_last else 0)
        for loss, wanted in zip(losses, expected, strict=False):
            assert torch.allclose(loss, wanted, rtol=1e-14, atol=0)
        if not backward:
            continue
        for loss in expected:
            loss.backward()
        wanted_of = dict(plain.named_parameters())
        for fqn, param in parts[2].named_parameters():
            assert torch.allclose(param.grad, wanted_of[fqn].grad, rtol=1e-12, atol=1e-15)
    for stage in parts[1]:
        held = (stage._inputs, stage._outputs, stage._output_grads, stage._input_grads)
        assert not any(held), "a step leaves no tensor behind"


class Several(nn.Module):
    """Passes on a tensor with a gradient, and one of whole and one of other numbers without."""

    def forward(self, x: Tensor) -> Any:
        return x * 2, (x.detach() > 0).long(), x.detach() / 2


class Join(nn.Module):
    def forward(self, several: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, mask, half = several
        return x * mask + half


@pytest.mark.parametrize("transport", ["shm", "stock"])
@on_ranks(2)
def test_several_tensors_cross_a_boundary_also_such_without_gradient(transport):
    inputs, targets = batches(0, 5)
    model = nn.Sequential(*build()[:1], Several(), Join(), *build()[1:2])
    plain = nn.Sequential(*build()[:1], Several(), Join(), *build()[1:2])
    parts = opened("1F1B", model, messages_over(transport))
    losses = run(parts, 0, 5, backward=True)
    expected = [loss_of(plain(x), y) for x, y in zip(inputs, targets, strict=True)]
    for loss, wanted in zip(losses, expected, strict=False):
        assert torch.allclose(loss, wanted, rtol=1e-14, atol=0)
    for loss in expected:
        loss.backward()
    wanted_of = dict(plain.named_parameters())
    for fqn, param in parts[2].named_parameters():
        assert torch.allclose(param.grad, wanted_of[fqn].grad, rtol=1e-12, atol=1e-15)


class Text(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"x": x}


def test_only_tensors_can_be_sent():
    from zeroshard.parallel.pipeline_stage import as_tensors

    with pytest.raises(UsageError, match="stage 3 returned dict"):
        as_tensors(Text()(torch.ones(1)), 3)
    with pytest.raises(UsageError, match="returned 9 tensors"):
        as_tensors((torch.ones(1),) * 9, 0)


@pytest.mark.parametrize("transport", ["shm", "stock"])
@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(2)
def test_both_ends_of_a_channel_record_the_same_messages(name, transport):
    """Else the watchdog would compare histories that differ although nothing is wrong."""
    messages = messages_over(transport)
    parts = opened(name, messages=messages)
    for step, length in enumerate((8, 6)):
        run(parts, step, length, backward=True)
    own = {
        channel.name: [(r.name, r.nbytes, r.history) for r in recorder.records()]
        for channel, recorder in messages.recorders.items()
    }
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, own)
    assert everyone == [own] * 2
    forth = [name for name, *_ in own["messages from rank 0 to rank 1"]]
    assert forth[0] == "shapes, stage 0 to 1"
    assert forth.count("forward of micro-batch 1, stage 0 to 1") == 2
    if SCHEDULES[name].several:
        assert forth.count("backward of micro-batch 0, stage 2 to 1") == 2
    assert all(recorder.waiting is None for recorder in messages.recorders.values())


@pytest.mark.parametrize("transport", ["shm", "stock"])
@on_ranks(2)
def test_a_stage_that_asks_for_a_receive_does_not_wait_for_the_sender(transport):
    """torch's looped schedules ask up to p - 1 forwards too early; if that waits, all ranks stand still.

    Receives are asked for before anything is sent, and waited for in another order.
    """
    _, stages, _ = opened("LoopedBFS", messages=messages_over(transport))
    shapes = {1: (2, 3), 3: (5,)}  # of the inputs, by stage
    sent = {
        (stage, m): torch.full(shape, 10.0 * stage + m)
        for stage, shape in shapes.items()
        for m in range(2)
    }
    if dist.get_rank() == 0:
        dist.barrier()
        started = []
        for (target, m), tensor in sent.items():
            stage = stages[target // 2]
            stage._outputs[m] = (tensor,)
            started += dist.batch_isend_irecv(stage.get_fwd_send_ops(m))
        for message in started:
            message.wait()
        return
    asked = {
        (stage.stage_index, m): dist.batch_isend_irecv(stage.get_fwd_recv_ops(m))
        for stage in stages
        for m in range(2)
    }
    dist.barrier()
    for at in [(1, 1), (3, 1), (3, 0), (1, 0)]:
        for message in asked[at]:
            message.wait()
        (received,) = stages[at[0] // 2]._inputs[at[1]]
        assert torch.equal(received, sent[at]), at


@on_ranks(2)
def test_messages_in_shared_memory_keep_their_values_while_the_sender_goes_on():
    """More messages than the ring has slots; the sender writes its tensor as soon as it has started."""
    messages, count = messages_over("shm"), 2 * RING + 3
    made = [torch.tensor([True, False]), torch.ones(2, 3, dtype=torch.complex64), torch.ones(0)]
    if dist.get_rank() == 0:
        held = torch.zeros(300)
        for number in range(count):
            messages.send("a", held.fill_(number), 1, 0)
        for tensor in made:
            messages.send("b", tensor, 1, 0)
        return
    received = [torch.empty(300) for _ in range(count)]
    last = [torch.empty_like(tensor) for tensor in made]
    for number, tensor in enumerate(received):
        (operation,) = messages.receives("a", [tensor], 0)
        operation.op(tensor).wait()
        assert torch.equal(tensor, torch.full((300,), float(number)))
    for tensor, wanted in zip(last, made, strict=True):
        (operation,) = messages.receives("b", [tensor], 0)
        operation.op(tensor).wait()
        assert torch.equal(tensor, wanted)
