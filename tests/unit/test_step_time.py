"""What operations have to do, and how long it takes: exact numbers of made-up machines."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.config.machine_file import MachineFile, Values
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UsageError
from zeroshard.planner.prices import Prices, Updated
from zeroshard.planner.simulate import simulate
from zeroshard.planner.step_log import Begun, Ended, Operation, Work, work_of
from zeroshard.planner.step_time import stage_times

KIB = 1024


class Works(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.found.append(work_of(func, args, result))
        return result


def works(call):
    with Works() as log:
        call()
    return log.found


def only(call):
    (found,) = works(call)
    return found


def machine(execution="streams", **sections):
    def sourced(value):
        if isinstance(value, dict):
            return {key: sourced(each) for key, each in value.items()}
        return {"value": value, "source": "measured"}

    per_node = sections.pop("devices_per_node", 4)
    named = {"name": "made up", "execution": execution, "devices_per_node": sourced(per_node)}
    return MachineFile.model_validate(named | {k: sourced(v) for k, v in sections.items()})


DEVICE = {
    "bytes_per_s": [[1, 1000.0]],
    "random_per_s": 10.0,
    "operation_s": 0.5,
    "optimizer_bytes_per_s": 100.0,
}
LINK = {
    "alpha_s": 1.0,
    "all_gather": [[1, 10.0]],
    "reduce_scatter": [[1, 20.0]],
    "all_reduce": [[1, 40.0]],
}


def prices(execution="streams", ranks=8, **more):
    sections = {"device": DEVICE, "inside_node": LINK} | more
    return Prices(Values(machine(execution, **sections)), ranks)


# ---------------------------------------------------------------------- work


def test_the_flop_of_a_linear_layer_are_two_for_each_multiplication():
    layer, x = nn.Linear(5, 7), torch.ones(3, 5, requires_grad=True)
    found = works(lambda: layer(x).sum().backward())
    assert [w.flop for w in found if w.flop] == [
        2 * 3 * 5 * 7
    ] * 3  # output, grads of input and weight


@pytest.mark.parametrize("fake", [False, True])
def test_the_flop_of_attention_are_those_of_its_five_and_two_products(fake):
    batch, heads, length, keys, width = 2, 3, 8, 16, 4

    def attend():
        q = torch.ones(batch, heads, length, width, requires_grad=True)
        k, v = (torch.ones(batch, heads, keys, width, requires_grad=True) for _ in range(2))
        nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    if fake:
        with FakeTensorMode():
            found = works(attend)
    else:
        found = works(attend)
    product = 2 * batch * heads * length * keys * width
    assert [(w.kind, w.flop) for w in found if w.flop] == [
        ("attention", 2 * product),  # scores, result
        ("attention", 5 * product),  # scores; gradients of v, scores, q, k
    ]


def test_an_operation_reads_its_inputs_and_writes_its_result():
    a, b = torch.ones(4, KIB), torch.ones(KIB)
    assert only(lambda: a + b).nbytes == 4 * KIB * (4 + 1 + 4)
    assert only(lambda: a.add_(b)).nbytes == 4 * KIB * (4 + 1 + 4)
    assert only(lambda: a.copy_(b)).nbytes == 4 * KIB * (1 + 4)
    assert only(lambda: a.zero_()).nbytes == 4 * KIB * 4
    lists = [a, b], [torch.zeros(4, KIB), torch.zeros(KIB)]
    assert only(lambda: torch._foreach_copy_(*lists)).nbytes == 2 * 4 * KIB * 5


def test_an_expanded_input_is_in_memory_once():
    a, b = torch.ones(4, KIB), torch.ones(KIB).expand(4, KIB)
    assert only(lambda: a + b).nbytes == 4 * KIB * (4 + 1 + 4)


def test_views_and_new_memory_have_no_bytes():
    a = torch.ones(4, KIB)
    for call in (lambda: a.view(-1), lambda: a.t(), lambda: torch.empty(KIB), a.detach):
        assert only(call).nbytes == 0


def test_an_embedding_reads_the_rows_that_it_returns():
    table, ids = torch.ones(KIB, 16), torch.zeros(3, dtype=torch.long)
    found = only(lambda: torch.embedding(table, ids))
    assert found.nbytes == 2 * 3 * 16 * 4 + 3 * 8


def test_kinds_of_operations():
    x = torch.ones(8)
    assert only(x.exp).kind == "special"
    assert only(lambda: x.bernoulli_(0.5)).kind == "random"
    assert only(lambda: x * x).kind == "memory"
    a, b = torch.ones(6, 2, 3), torch.ones(6, 3, 4)
    batches = only(lambda: torch.bmm(a, b))
    assert (batches.kind, batches.smallest, batches.flop) == ("matmul", 2, 2 * 6 * 2 * 3 * 4)


# ---------------------------------------------------------------------- prices


def work(kind="memory", *, flop=0, nbytes=100, numel=10, op="op", smallest=0):
    return Work(op, kind, flop, "float32" if flop else "", nbytes, numel, nbytes, smallest)


def test_an_operation_takes_as_long_as_what_limits_it():
    price = prices(
        matmul={"float32": [[1000, 50.0], [10000, 500.0]]},
        attention={"float32": [[1, 25.0]]},
        special={"exp": 20.0, "gelu": 5.0},
    )
    assert price.work_s(work()) == 0.1
    assert price.work_s(work("matmul", flop=1000)) == 20.0
    assert price.work_s(work("matmul", flop=10000)) == 20.0
    assert price.work_s(work("matmul", flop=1000, nbytes=10**6)) == 1000.0  # memory limits it
    assert price.work_s(work("attention", flop=1000)) == 40.0
    assert price.work_s(work("special", op="tanh")) == 0.5
    assert price.work_s(work("special", op="gelu")) == 2.0
    assert price.work_s(work("random")) == 1.0
    assert price.work_s(work(nbytes=0)) == 0.0
    assert price.kinds_s == {
        "memory": 0.1, "matmul": 1040.0, "attention": 40.0, "special": 2.5, "random": 1.0
    }  # fmt: skip


def test_one_core_computes_a_product_at_the_rate_of_its_smallest_size_and_then_moves_it():
    curve = {"float32": [[2 * 5**3, 10.0], [2 * 50**3, 100.0]]}
    flat = work("matmul", flop=2 * 50**3, smallest=5, nbytes=1000)
    assert prices("streams", matmul=curve).work_s(flat) == 2 * 50**3 / 100
    assert prices("serial", matmul=curve).work_s(flat) == 2 * 50**3 / 10 + 1


@pytest.mark.parametrize(
    ("op", "seconds"),
    [
        ("all_gather", 1 + 100 * 3 / 4 / 10),
        ("reduce_scatter", 1 + 100 * 3 / 4 / 20),
        ("all_reduce", 1 + 100 * 6 / 4 / 40),
        ("gather_small", 1 + 100 * 3 / 4 / 10),
    ],
)
def test_a_collective_takes_its_latency_and_the_bytes_that_a_rank_sends(op, seconds):
    assert prices().collective_s(op, 100, (0, 1, 2, 3)) == seconds
    assert prices().collective_s(op, 100, (2,)) == 0


def test_ranks_of_two_nodes_communicate_between_nodes():
    price = prices(between_nodes=LINK | {"alpha_s": 5.0})
    assert price.collective_s("all_gather", 100, (4, 5, 6, 7)) == 8.5
    assert price.collective_s("all_gather", 100, (0, 4)) == 5 + 50 / 10
    with pytest.raises(UsageError, match=r"has no between_nodes\.all_gather"):
        prices().collective_s("all_gather", 100, (0, 4))


def test_ranks_that_share_a_node_send_through_an_adapter_each():
    price = prices(between_nodes=LINK | {"all_gather": [[1, 2.0]], "alpha_s": 5.0})
    assert price.collective_s("all_gather", 100, (0, 1, 4, 5)) == 5 + 75 / (2 * 2)
    assert price.collective_s("all_gather", 100, (0, 4, 5, 6)) == 5 + 75 / 2  # one on a node alone
    eight = tuple(range(8))
    assert price.collective_s("all_gather", 80, eight) == 5 + 70 / 8  # 4 adapters
    fast = prices(between_nodes=LINK | {"all_gather": [[1, 1e9]], "alpha_s": 5.0})
    assert fast.collective_s("all_gather", 80, eight) == 5 + 70 / 10  # links inside are slower


def test_an_all_to_all_between_nodes_is_no_ring():
    """Each rank sends its parts for ranks of other nodes through its own adapter."""
    price = prices(between_nodes=LINK | {"all_gather": [[1, 2.0]], "alpha_s": 5.0})
    assert price.collective_s("all_to_all", 100, (0, 1, 2, 3)) == 1 + 75 / 10
    assert price.collective_s("all_to_all", 80, tuple(range(8))) == pytest.approx(5 + 40 / 2)
    assert price.collective_s("all_to_all", 100, (0, 4)) == 5 + 50 / 2
    fast = prices(between_nodes=LINK | {"all_gather": [[1, 1e9]], "alpha_s": 5.0})
    assert fast.collective_s("all_to_all", 80, tuple(range(8))) == pytest.approx(5 + 30 / 10)


def updated(tier="device", **more):
    return Updated(**{"nbytes": 300, "tier": tier, "gradient_nbytes": 40, "param_nbytes": 20,
                      "state_nbytes": 120} | more)  # fmt: skip


def test_an_update_runs_where_its_state_is():
    host = {"memory_bytes_per_s": 400.0, "optimizer_bytes_per_s": 10.0, "cores": 16.0}
    price = prices(
        host=host,
        copies={"host_to_device_bytes_per_s": 2.0, "device_to_host_bytes_per_s": 4.0},
        disk={"read_bytes_per_s": 12.0, "write_bytes_per_s": 6.0},
    )
    assert price.update_s(updated()) == 3.0
    assert price.update_s(updated("host")) == 300 / 40  # 4 cores of each of 4 local ranks
    assert price.disk_s(updated("host")) == 0
    assert price.disk_s(updated("disk")) == 120 / 12 + 120 / 6
    assert price.copies_s(updated("host")) == (10.0, 10.0)
    slow = prices(host=host | {"memory_bytes_per_s": 8.0})
    assert slow.update_s(updated("host")) == 150.0  # each of 4 local ranks has a quarter
    assert prices("serial").update_s(updated("host")) == 3.0  # the same processor


# ---------------------------------------------------------------------- a step


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).mean()


def simulated(stage, *, ranks=4, **zero):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "unit_min_numel": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **zero},
    }
    batch = torch.empty(8, 64), None
    return simulate(
        Net, config, batch, mesh=Mesh(data_shard=ranks), rank=0, loss_fn=lambda out, _: out,
        with_events=True,
    )  # fmt: skip


FAST = {
    "device": {
        "bytes_per_s": [[1, 1e9]],
        "operation_s": 1e-6,
        "optimizer_bytes_per_s": 1e9,
        "random_per_s": 1e9,
    },
    "matmul": {"float32": [[1, 1e12]]},
    "special": {"exp": 1e9},
    "inside_node": {
        "alpha_s": 1e-3,
        "all_gather": [[1, 1e9]],
        "reduce_scatter": [[1, 1e9]],
        "all_reduce": [[1, 1e9]],
    },
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_collective_of_a_step_is_begun_and_waited_for(stage):
    found = simulated(stage)
    begun = [event for event in found.events if isinstance(event, Begun)]
    ended = [event for event in found.events if isinstance(event, Ended)]
    calls = {(row.op, row.name): row.calls for row in found.traffic}
    assert len(begun) == sum(calls.values())
    assert sorted(e.key for e in begun) == sorted(e.key for e in ended)
    moved = sum(e.nbytes for e in begun if e.op == "reduce_scatter")
    assert moved == 4 * found.moved_numel("all ranks", "reduce_scatter")
    flop = sum(e.work.flop for e in found.events if isinstance(e, Operation))
    assert flop == 5 * 2 * 8 * 64 * 64  # the first layer's input needs no gradient


def test_the_update_moves_gradients_states_and_parameters():
    found = simulated(2).updated
    numel = 2 * (64 * 64 + 256) // 4  # a rank's part of a bias is padded to 64 elements
    # gradient for norm and update; parameter and two moments, read and written; step counts
    assert 0 <= found.nbytes - numel * 4 * (2 + 2 + 2 * 2) <= 64
    assert simulated(0).updated.nbytes > 3.9 * found.nbytes
    assert simulated(2, offload_optimizer={"device": "cpu"}).updated.tier == "host"


def test_a_step_is_the_sum_of_its_parts():
    for execution in ("serial", "streams"):
        (time,) = stage_times([simulated(3)], machine(execution, **FAST), samples=32, tokens=0)
        parts = time.timing
        exposed = sum(parts.exposed_s.values())
        assert parts.total_s == pytest.approx(parts.compute_s + exposed + parts.host_s)
        assert parts.compute_s == pytest.approx(sum(time.kinds.values()) + time.update_s)
        assert sum(parts.busy_s.values()) >= exposed > 4e-3
        assert (exposed == sum(parts.busy_s.values())) == (execution == "serial")
        assert time.band == 0.2 and not time.not_measured


def test_an_offloaded_update_is_exposed_with_its_copies():
    found = simulated(2, offload_optimizer={"device": "cpu"})
    host = {"memory_bytes_per_s": 1e9, "optimizer_bytes_per_s": 1e6, "cores": 4.0}
    copies = {"host_to_device_bytes_per_s": 1e6, "device_to_host_bytes_per_s": 1e6}
    time = stage_times([found], machine(**FAST, host=host, copies=copies), samples=1, tokens=0)[0]
    moved = (found.updated.gradient_nbytes + found.updated.param_nbytes) / 1e6
    assert time.timing.exposed_s["copies"] == pytest.approx(moved)
    assert time.timing.exposed_s["host update"] == pytest.approx(found.updated.nbytes / 1e6)
    with pytest.raises(UsageError, match=r"has no copies\.device_to_host_bytes_per_s"):
        stage_times([found], machine(**FAST, host=host), samples=1, tokens=0)[0]
