"""The checker finds each kind of mistake in a small program, and nothing in the corrected program."""

from __future__ import annotations

import _thread
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from zeroshard_testing import on_ranks
from zeroshard_testing.streams import pretend_cuda

from zeroshard.device.pinned import HostArena
from zeroshard.memory.host_memory import host_access, kernel_access

# Each program gets ``right``: whether to do what the kind of mistake leaves out.


def kernel_on_another_stream(right):
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    x.add_(1)


def kernel_after_an_event(right):
    x, side, event = torch.ones(8, device="cuda"), torch.Stream("cuda"), torch.Event("cuda")
    if right:
        event.record()
    side.wait_event(event)  # an event that was not recorded orders nothing
    with side:
        y = x * 2
    side.synchronize()
    del y


def kernel_after_an_event_of_the_other_family(right):
    x, event = torch.ones(8, device="cuda"), torch.cuda.Event()
    side = torch.cuda.Stream() if right else torch.Stream("cuda")
    event.record()
    side.wait_event(event)  # a torch.Stream waits for an event that nobody recorded
    with side:
        y = x * 2
    side.synchronize()
    del y


def event_recorded_on_a_stream_of_the_other_family(right):
    event = torch.cuda.Event()
    event.record(torch.cuda.Stream() if right else torch.Stream("cuda"))


def copy_to_the_host(right):
    x, host = torch.ones(8, device="cuda"), torch.empty(8, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if right:
        torch.accelerator.synchronize()
    host.sum()


def host_memory_written_under_a_copy(right):
    host, x = torch.ones(8).pin_memory(), torch.empty(8, device="cuda")
    x.copy_(host, non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    host.zero_()


def compiled_code_reads_under_a_copy(right):
    x, host = torch.ones(8, device="cuda"), torch.empty(8, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    if right:
        event.synchronize()
    host_access(reads=[host])


def compiled_kernel_on_another_stream(right):
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kernel_access(reads=[], writes=[x])
    side.synchronize()


def block_of_the_last_owner(right):
    old = torch.ones(8, device="cuda")
    del old
    fresh, side = torch.empty(8, device="cuda"), torch.cuda.Stream()
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fresh.fill_(1)
    side.synchronize()


def resized_storage(right):
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if right:
        torch.cuda.current_stream().wait_stream(side)
    x.untyped_storage().resize_(0)
    side.synchronize()
    del y


def block_freed_under_a_kernel(right):
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    if right:
        x.record_stream(side)
    del x
    side.synchronize()


def block_freed_under_a_collective(right):
    x, gathered = torch.ones(8, device="cuda"), torch.empty(32, device="cuda")
    work = dist.all_gather_into_tensor(gathered, x, async_op=True)
    if right:
        work.wait()
    gathered.sum()


def pageable_memory(right):
    host = torch.ones(8).pin_memory() if right else torch.ones(8)
    torch.empty(8, device="cuda").copy_(host, non_blocking=True)
    torch.cuda.synchronize()


def arena_closed_under_a_copy(right):
    arena, x = HostArena(4096, pin=True), torch.ones(8, device="cuda")
    arena.take(8, torch.float32).copy_(x, non_blocking=True)
    if right:
        torch.cuda.synchronize()
    arena.close()


def host_code_on_device_memory(right):
    x = torch.ones(8, device="cuda")
    host_access(writes=[x.cpu() if right else x])


def tensors_of_two_devices(right):
    x = torch.ones(8, device="cuda:0")
    y = torch.ones(8, device="cuda:0" if right else "cuda:1")
    x + y


def host_tensor_in_a_kernel(right):
    torch.ones(8, device="cuda").add_(torch.ones(8).cuda() if right else torch.ones(8))


def thread_without_a_device(right):
    def run():
        if right:
            torch.cuda.set_device(1)
        torch.cuda.Event().record()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def thread_that_is_not_waited_for(right):
    host, go = torch.ones(8).pin_memory(), SimpleQueue()

    def run():
        torch.accelerator.set_device_index(0)
        host.mul_(2)
        go.put(None)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        if right:
            future.result()
        while not future.done():
            pass  # the order in time is right, and no proof
        x = torch.empty(8, device="cuda").copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    del x


def threads_that_add_to_one_tensor(right):
    total, lock = torch.zeros(8), threading.Lock()

    def run():
        with lock if right else threading.Lock():
            total.add_(1)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total.tolist() == [2.0] * 8


def write_before_a_lock(right):
    total, lock, done = torch.zeros(8), threading.RLock(), []

    def run():
        if right:
            with lock, lock:
                total.add_(1)
        else:
            total.add_(1)  # the lock below does not order it
            with lock:
                total.add_(1)
        done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    while not done:
        pass
    with lock:
        total.add_(1)
    thread.join()


PROGRAMS = {
    threads_that_add_to_one_tensor: "race",
    write_before_a_lock: "race",
    kernel_on_another_stream: "race",
    kernel_after_an_event: "race",
    copy_to_the_host: "race",
    host_memory_written_under_a_copy: "race",
    compiled_code_reads_under_a_copy: "race",
    compiled_kernel_on_another_stream: "race",
    block_of_the_last_owner: "race",
    thread_that_is_not_waited_for: "race",
    resized_storage: "reuse",
    block_freed_under_a_kernel: "reuse",
    block_freed_under_a_collective: "race",
    pageable_memory: "unpinned",
    arena_closed_under_a_copy: "unpin",
    kernel_after_an_event_of_the_other_family: "family",
    event_recorded_on_a_stream_of_the_other_family: "family",
    host_code_on_device_memory: "device",
    tensors_of_two_devices: "device",
    host_tensor_in_a_kernel: "device",
    thread_without_a_device: "thread",
}


@pytest.mark.parametrize(
    ("program", "right"),
    [*product(PROGRAMS, (True, False))],
    ids=lambda v: getattr(v, "__name__", v),
)
@on_ranks(1, group=False)
def test_a_program_and_its_mistake(program, right):
    ranks = 4 if program is block_freed_under_a_collective else 1
    with pretend_cuda(devices=2) as watch, watch.world(ranks):
        program(right)
        found = {finding.kind for finding in watch.findings}
    assert not found if right else PROGRAMS[program] in found


@on_ranks(1, group=False)
def test_a_finding_names_both_lines():
    with pretend_cuda() as watch:
        with watch.phase("backward"):
            copy_to_the_host(right=False)
        (finding,) = watch.findings
    text = str(finding)
    assert text.startswith("race in backward: sum on MainThread reads bytes 0 to 32 of 32 bytes")
    assert finding.where[0].function == finding.other[0].function == "copy_to_the_host"
    assert finding.where[0].line == finding.other[0].line + 3


@pytest.mark.parametrize(("query", "answers"), [(True, [True] * 2), (False, [False] * 2)])
@on_ranks(1, group=False)
def test_queries_say_done_always_or_never(query, answers):
    with pretend_cuda(query=query) as watch:
        x, event = torch.ones(8, device="cuda"), torch.cuda.Event()
        host = torch.empty(8, pin_memory=True)
        host.copy_(x, non_blocking=True)
        event.record()
        found = [event.query(), torch.cuda.current_stream().query()]
        host.sum()
        kinds = [finding.kind for finding in watch.findings]
    assert found == answers
    assert kinds == ([] if query else ["race"])  # a yes is a proof that the copy has ended


@on_ranks(1, group=False)
def test_the_generic_family_does_not_record_events_of_cuda():
    with (
        pretend_cuda(),
        pytest.raises(RuntimeError, match="does not match recording stream's cuda:0"),
    ):
        torch.Stream("cuda").record_event(torch.cuda.Event())


@on_ranks(1, group=False)
def test_streams_of_the_two_families_are_never_equal():
    with pretend_cuda():
        assert torch.accelerator.current_stream() == torch.accelerator.current_stream()
        assert torch.cuda.current_stream() == torch.cuda.current_stream()
        assert torch.accelerator.current_stream() != torch.cuda.current_stream()


@on_ranks(1, group=False)
def test_a_thread_sleeps_only_on_a_blocking_event_of_cuda():
    waits = {}
    events = {"sleeps": lambda: torch.cuda.Event(blocking=True), "cuda": lambda: torch.cuda.Event(),
              "generic": lambda: torch.Event("cuda", blocking=True)}  # fmt: skip
    for name, make in events.items():
        with pretend_cuda() as watch, watch.phase("wait"):
            torch.ones(8, device="cuda")
            event = make()
            event.record()
            event.synchronize()
        waits[name] = dict(watch.waits("wait"))
    assert waits == {
        "sleeps": {"event": 1},
        "cuda": {"polled event": 1},
        "generic": {"polled event": 1},
    }


@on_ranks(1, group=False)
def test_what_is_counted():
    with pretend_cuda() as watch:
        x = torch.empty(256, device="cuda")
        watch.phase("first")
        y = x.fill_(1) * 2
        assert watch.kernels("first") == {"fill_": 1, "mul": 1}
        assert watch.traffic("first") == (1024, 2048)
        assert watch.allocations("first") == (1, 1024)
        with watch.phase("second"):
            assert y.sum().item() == 512
            y.cpu()
            torch.cuda.synchronize()  # everything is known to have ended
        assert watch.waits("second") == {"item": 1, "copy d2h": 1}
        assert not watch.waits("first")
        assert watch.live_nbytes == 2048
        assert [block.nbytes for block in watch.live_blocks] == [1024, 1024]
        del y
        assert watch.live_nbytes == torch.cuda.memory_allocated() == 1024
        assert not watch.findings


@on_ranks(1, group=False)
def test_torch_says_that_tensors_are_on_the_device():
    with pretend_cuda(devices=2):
        model = nn.Linear(4, 4, device="cuda:1")
        loss = model(torch.ones(2, 4, device="cuda:1")).sum()
        loss.backward()
        weight = model.weight
        assert weight.device == weight.grad.device == loss.device == torch.device("cuda", 1)
        assert weight.is_cuda
        assert not weight.is_cpu
        assert weight.get_device() == 1
        assert weight.cpu().device == weight.to("cpu", torch.bfloat16).device == torch.device("cpu")
        assert torch.zeros_like(weight).is_cuda
        assert weight.new_empty(3).is_cuda
        assert not weight.new_empty(3, device="cpu").is_cuda
        assert weight.untyped_storage().device == torch.device("cuda", 1)
        assert torch.empty(3, pin_memory=True).is_pinned()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        with torch.device("cuda"):
            assert torch.zeros(2).device == torch.device("cuda", 0)
        with pytest.raises(TypeError, match="numpy"):
            weight.detach().numpy()
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.zeros(2, device="cuda:2")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        optimizer.step()
        assert optimizer.state[weight]["exp_avg"].is_cuda
    assert not torch.cuda.is_available()
    assert weight.device == torch.device("cpu")


@on_ranks(1, group=False)
def test_a_gradient_flows_through_a_copy_between_memories():
    with pretend_cuda():
        x = torch.ones(4, requires_grad=True)
        (x.cuda() * 3).sum().cpu().backward()
        assert x.grad.tolist() == [3.0] * 4
        assert x.grad.device == torch.device("cpu")


@on_ranks(1, group=False)
def test_an_operator_in_place_reads_what_it_writes():
    with pretend_cuda() as watch:
        x = torch.empty(256, device="cuda")
        with watch.phase("fill"):
            x.fill_(1)
        with watch.phase("scale"):
            x.mul_(2)
        with watch.phase("add"):
            torch._foreach_add_([x], [x])
        assert watch.traffic("fill") == (0, 1024)
        assert watch.traffic("scale") == (1024, 1024)
        assert watch.traffic("add") == (2048, 1024)


@on_ranks(1, group=False)
def test_a_compiler_on_another_thread_traces_with_tensors_without_memory():
    """What it copies from and to such tensors is in no memory."""
    found = []

    def trace():
        torch.cuda.set_device(0)
        with FakeTensorMode(allow_non_fake_inputs=True):
            found.append((torch.empty(8) + torch.empty(8)).shape)
        found.append(torch.ones(8, device="cuda").to("meta").device.type)
        torch.empty(8, device="meta").copy_(torch.ones(8))

    with pretend_cuda() as watch:
        thread = threading.Thread(target=trace)
        thread.start()
        thread.join()
        assert watch.findings == [], "\n".join(map(str, watch.findings))
    assert found == [(8,), "meta"]


def test_a_thread_that_python_did_not_start_may_set_an_event():
    with pretend_cuda() as watch:
        done = threading.Event()
        _thread.start_new_thread(done.set, ())
        assert done.wait(10.0)
        assert watch.findings == []
