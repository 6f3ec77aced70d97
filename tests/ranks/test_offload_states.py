"""``offload_states()`` frees the device between two steps and does not change training."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch
from loops import CASE, STAGES, assert_same, data, loss_of, open_engine, own_data, train, weights
from support.covering import some_stages
from torch import Tensor
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.core.ledger import RESTING
from zeroshard.core.tiers import TIERS, Tier
from zeroshard.engine.offload_states import KINDS, asked_of_to, is_return
from zeroshard.errors import UsageError
from zeroshard.offload.swapped_storage import HostBuffer
from zeroshard.optim import native_adam
from zeroshard.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)

BF16 = {"bf16": {"enabled": True}}
PRECISIONS = {"fp32": {}, "bf16": BF16}
MOVES = {name: [name] for name in KINDS} | {"all": None, "masters and state": list(KINDS[:2])}
ALL = {"all": None}
GRADIENTS = {name: [name] for name in KINDS if "grad" in name} | ALL


class Kind(Enum):
    """Kinds of state by the names that programs written for DeepSpeed use."""

    STATES = "optim_states"
    MASTERS = "hp_params"


def states(engine: Engine) -> dict[str, Tensor]:
    """Parameters, masters and moments. Collective."""
    found = weights(engine)
    for name, param in engine.module.named_parameters():
        found[f"{name} master"] = safe_get_full_fp32_param(param).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key).clone()
    return found


def trained(stage: int, keys: dict[str, Any], move: Any = None, *, micros: int = 1) -> dict:
    """Three steps; ``move(engine)`` between the micro-batches of the middle one, and after each."""
    keys = {"gradient_accumulation_steps": micros, **keys}
    with open_engine(stage, **keys) as engine:
        for at, batches in enumerate(own_data(engine, 3, micros)):
            for batch in batches:
                engine.backward(loss_of(engine, batch))
                if move is not None and at == 1:
                    move(engine)
                engine.step()
            if move is not None:
                move(engine)
        return states(engine)


def there_and_back(include: Any) -> Any:
    def move(engine: Engine) -> None:
        engine.offload_states(include)
        engine.reload_states()

    return move


def check_moves(keys: dict[str, Any], *, micros: int = 1, moves: dict[str, Any] = MOVES) -> None:
    for stage in some_stages(STAGES):
        plain = trained(stage, keys, micros=micros)
        for what, include in moves.items():
            found = trained(stage, keys, there_and_back(include), micros=micros)
            try:
                assert_same(found, plain)
            except AssertionError as error:
                raise AssertionError(f"stage {stage}, {what}: {error}") from error


@pytest.mark.parametrize("precision", PRECISIONS)
@on_ranks(1)
def test_a_move_changes_no_bit_on_one_rank(precision):
    check_moves(PRECISIONS[precision], moves=ALL)


@pytest.mark.parametrize("precision", PRECISIONS)
@on_ranks(2)
def test_a_move_changes_no_bit_on_two_ranks(precision):
    check_moves(PRECISIONS[precision], moves=MOVES if precision == "bf16" else ALL)


@on_ranks(2)
def test_gradients_that_wait_for_their_step_move_too():
    check_moves(BF16, micros=3, moves=GRADIENTS)


@pytest.mark.parametrize("transport", ["p2p", "shm"])
@on_ranks(2)
def test_gradients_in_memory_that_ranks_share_move_too(transport):
    check_moves({"transport": transport}, micros=2, moves=GRADIENTS)


@on_ranks(2)
def test_the_compiled_update_finds_state_that_moved_alone():
    native_adam.prepare()
    native_adam.wait()
    section = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    for stage in some_stages(STAGES):
        keys = {**BF16, "optimizer": section["optimizer"]}
        assert_same(trained(stage, keys, there_and_back(["optim_states"])), trained(stage, keys))


@on_ranks(2)
def test_state_in_other_stores_stays_there_and_no_bit_changes(tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    for stage, zero in [
        (1, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        (2, {"offload_optimizer": disk}),
        (2, {"offload_optimizer": {"device": "cpu", "delayed_update": True}}),
        (3, {"offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 200}}),
    ]:
        plain = trained(stage, {**BF16, "zero_optimization": zero})
        moved = trained(stage, {**BF16, "zero_optimization": zero}, there_and_back(None))
        assert_same(moved, plain)


# ---------------------------------------------------------------------- bytes


def on_device(engine: Engine) -> dict[str, int]:
    """Ledger bytes of the device column."""
    return {name: engine.runtime.ledger.nbytes(name) for name in RESTING}


def in_host(engine: Engine) -> dict[str, int]:
    return {name: engine.runtime.ledger.nbytes(name, Tier.HOST) for name in RESTING}


def storages(engine: Engine) -> dict[str, int]:
    """Bytes of the engine's tensors, by kind, measured without the ledger."""
    runtime = engine.runtime
    tensors: dict[str, list[Tensor]] = {
        "lp_params": [t for unit in runtime.units for t in (unit.full_N, unit.shard_S)],
        "hp_params": [
            c.master_C for t in runtime.optimizer.shards for c in t.chunks if c.has_master
        ],
        "optim_states": [v for s in engine.optimizer.state.values() for v in s.values()],
    }
    return {
        kind: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in ts}.values())
        for kind, ts in tensors.items()
    }


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_the_device_is_empty_and_full_again(stage):
    with open_engine(stage, **BF16, gradient_accumulation_steps=2) as engine:
        train(engine, own_data(engine, 1, 2))
        ((batch, *_),) = own_data(engine, 1, 2)
        engine.backward(loss_of(engine, batch))
        before, behind = on_device(engine), storages(engine)
        assert all(before.values())
        assert all(behind.values())
        engine.offload_states()
        assert on_device(engine) == dict.fromkeys(RESTING, 0)
        assert in_host(engine) == before
        assert storages(engine) == dict.fromkeys(behind, 0)
        engine.reload_states()
        assert on_device(engine) == before
        assert in_host(engine) == dict.fromkeys(RESTING, 0)
        assert storages(engine) == behind
        assert not engine.runtime.ledger.nbytes("scratch", Tier.HOST)


CATEGORY = {
    "lp_params": "parameters",
    "hp_params": "master",
    "optim_states": "optimizer",
    "lp_grads": "gradients",
}


@pytest.mark.parametrize("kind", CATEGORY)
@on_ranks(2)
def test_only_what_is_asked_for_moves(kind):
    for stage in some_stages(STAGES):
        with open_engine(stage, **BF16) as engine:
            train(engine, own_data(engine, 1))
            ((batch,),) = own_data(engine, 1)
            engine.backward(loss_of(engine, batch))
            before, behind = on_device(engine), storages(engine)
            engine.offload_states([kind])
            category = CATEGORY[kind]
            assert on_device(engine) == {**before, category: 0}
            assert in_host(engine) == dict.fromkeys(RESTING, 0) | {category: before[category]}
            assert storages(engine) == {k: 0 if k == kind else n for k, n in behind.items()}


@on_ranks(1)
def test_gradients_really_leave_and_return():
    with open_engine(2) as engine:
        ((batch,),) = own_data(engine, 1)
        engine.backward(loss_of(engine, batch))
        buffers = engine.runtime.reducer.buffers
        before = [buffer.reduced_S for buffer in buffers]
        engine.offload_states(["lp_grads"])
        away = [buffer.reduced_S for buffer in buffers]
        assert not any(a.data_ptr() == b.data_ptr() for a, b in zip(away, before, strict=True))
        engine.reload_states()
        for buffer, old, meanwhile in zip(buffers, before, away, strict=True):
            assert torch.equal(buffer.reduced_S.view(torch.int32), old.view(torch.int32))
            assert buffer.reduced_S.data_ptr() != meanwhile.data_ptr()


@on_ranks(2)
def test_what_rests_elsewhere_does_not_move(tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": disk, "offload_param": {"device": "cpu"}}
    with open_engine(3, **BF16, zero_optimization=zero) as engine:
        train(engine, own_data(engine, 1))
        keys = [(category, tier) for category in RESTING for tier in TIERS.values()]
        held = [engine.runtime.ledger.nbytes(*key) for key in keys]
        (file,) = engine.runtime.stores.files
        read, written = file.read_nbytes, file.written_nbytes
        engine.offload_states()
        assert [engine.runtime.ledger.nbytes(*key) for key in keys] == held
        assert (file.read_nbytes, file.written_nbytes) == (read, written)


@on_ranks(2)
def test_the_partition_cache_is_freed_and_gathered_anew():
    with open_engine(3) as engine:
        train(engine, own_data(engine, 1))
        ((batch,),) = own_data(engine, 1)
        loss = loss_of(engine, batch)
        assert engine.runtime.ledger.nbytes("gathered")
        engine.empty_partition_cache()
        assert not engine.runtime.ledger.nbytes("gathered")
        engine.backward(loss)
        engine.step()


def test_page_locked_memory_is_kept_for_the_next_time(monkeypatch):
    """Only CUDA can lock pages; what is done with them is the same here."""
    monkeypatch.setattr(HostBuffer, "is_pinned", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with open_engine(3, **BF16) as engine:
        ledger = engine.runtime.ledger
        engine.offload_states()
        engine.reload_states()
        small = ledger.nbytes("scratch", Tier.HOST)
        train(engine, own_data(engine, 1))
        rooms = []
        for _ in range(3):
            before = states(engine)
            engine.offload_states()
            assert not ledger.nbytes("scratch", Tier.HOST)
            (room,) = engine._offloader._rooms
            rooms.append(room)
            engine.reload_states()
            assert ledger.nbytes("scratch", Tier.HOST) == room.nbytes > small
            assert engine._offloader._spare is room
            assert_same(states(engine), before)
        assert rooms == [room] * 3
        engine.empty_partition_cache()
        assert not ledger.nbytes("scratch", Tier.HOST)
        assert engine._offloader._spare is None


# ---------------------------------------------------------------------- while it is away


def away(stage: int, include: Any = None, **keys: Any) -> Engine:
    engine = open_engine(stage, **keys)
    train(engine, own_data(engine, 1))
    engine.offload_states(include)
    return engine


CALLS = {
    "forward": lambda engine, batch: engine(batch[0]),
    "module": lambda engine, batch: engine.module(batch[0]),
    "step": lambda engine, batch: engine.step(),
    "backward": lambda engine, batch: engine.backward(torch.ones((), requires_grad=True)),
    "iter_full_params": lambda engine, batch: list(engine.iter_full_params()),
    "state_dict": lambda engine, batch: engine.state_dict(),
    "optimizer state": lambda engine, batch: engine.optimizer.state_dict(),
    "optimizer load": lambda engine, batch: engine.optimizer.load_state_dict({}),
}


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_calls_that_need_what_is_away_say_so_on_every_rank(call):
    for stage in some_stages(STAGES):
        with away(stage, **BF16) as engine:
            ((batch,),) = own_data(engine, 1)
            with pytest.raises(
                UsageError, match=r"call engine\.reload_states\(\) first|Call engine"
            ):
                CALLS[call](engine, batch)
            engine.reload_states()
            train(engine, own_data(engine, 1))


READS = {
    "sum": lambda p: p.sum(),
    "data": lambda p: p.data,
    "item": lambda p: p.view(-1)[0].item(),
    "write": lambda p: p.data.zero_(),
    "assign": lambda p: setattr(p, "data", torch.zeros_like(p)),
    "numpy": lambda p: p.detach().numpy(),
    "gathered": lambda p: GatheredParameters(p).__enter__(),
    "gathered to write": lambda p: GatheredParameters([p], modifier_rank=0).__enter__(),
    "master": safe_get_full_fp32_param,
    "local master": safe_get_local_fp32_param,
    "gradient": safe_get_full_grad,
    "state": lambda p: safe_get_full_optimizer_state(p, "exp_avg"),
    "set": lambda p: safe_set_full_fp32_param(p, torch.zeros(p.shape)),
    "set gradient": lambda p: safe_set_full_grad(p, torch.zeros(p.shape)),
}


@pytest.mark.parametrize("read", READS)
@on_ranks(2)
def test_reading_a_parameter_that_is_away_raises(read):
    for stage in some_stages(STAGES):
        with away(stage) as engine:
            for param in engine.module.parameters():
                shape, dtype = param.shape, param.dtype
                with pytest.raises(UsageError, match=r"is in host memory: engine\.offload_states"):
                    READS[read](param)
                assert (param.shape, param.dtype, param.device.type) == (shape, dtype, "cpu")


@pytest.mark.parametrize("kind", ["optim_states", "hp_params", "lp_grads"])
@on_ranks(2)
def test_a_model_whose_parameters_are_here_generates(kind):
    for stage in some_stages(STAGES):
        with away(stage, [kind], **BF16) as engine:
            ((batch,),) = own_data(engine, 1)
            with torch.no_grad():
                assert engine(batch[0]).isfinite().all()
            with GatheredParameters(engine.module.parameters()):
                assert all(p.isfinite().all() for p in engine.module.parameters())
            assert weights(engine)
            with pytest.raises(
                UsageError, match=rf"engine.step\(\) while {kind} are stored in host"
            ):
                engine.step()


PARTS = {
    "hp_params": ("master", "local master", "set"),
    "optim_states": ("state",),
    "lp_grads": ("gradient", "set gradient"),
}


@pytest.mark.parametrize("kind", PARTS)
@on_ranks(2)
def test_full_values_of_a_kind_that_is_away_are_refused(kind):
    for stage in some_stages(STAGES):
        with open_engine(stage, **BF16) as engine:
            train(engine, own_data(engine, 1))
            ((batch,),) = own_data(engine, 1)
            engine.backward(loss_of(engine, batch))
            engine.offload_states([kind])
            for read in PARTS[kind]:
                for param in engine.module.parameters():
                    with pytest.raises(
                        UsageError, match=r"is in host memory: engine\.offload_states"
                    ):
                        READS[read](param)


@pytest.mark.parametrize("include", [["optim_states", "hp_params"], ["optim_states"]])
@on_ranks(2)
def test_an_edit_made_while_masters_are_away_reaches_them(include):
    for stage in some_stages(STAGES):
        with open_engine(stage, **BF16) as engine:
            train(engine, own_data(engine, 1))
            param = next(iter(engine.module.parameters()))
            engine.offload_states(include)
            with GatheredParameters(param, modifier_rank=0):
                param.data.fill_(0.75)
            engine.reload_states()
            assert (safe_get_full_fp32_param(param) == 0.75).all()


@on_ranks(1)
def test_a_graph_from_before_waits_and_goes_on_after():
    for stage in some_stages(STAGES):
        with open_engine(stage) as engine:
            ((batch,),) = own_data(engine, 1)
            loss = loss_of(engine, batch)
            for param in engine.module.parameters():  # what was recorded last runs first
                loss = loss + param.view(-1).pow(2).sum()
            engine.offload_states()
            with pytest.raises(RuntimeError, match=r"reload_states|modified by an inplace"):
                loss.backward(retain_graph=True)
            with pytest.raises(UsageError, match="reload_states"):
                engine.backward(loss, retain_graph=True)
            engine.reload_states()
            engine.backward(loss)
            engine.step()


@on_ranks(1)
def test_numpy_arrays_of_parameters_stay_valid():
    """Their memory cannot be released; on CPU ranks it is host memory already."""
    with open_engine(1) as engine:
        param = next(iter(engine.module.parameters()))
        array = param.detach().numpy()
        engine.offload_states()
        assert array.sum() == array.sum()
        engine.reload_states()
        train(engine, own_data(engine, 1))
        assert torch.equal(torch.from_numpy(array), param.detach())


# ---------------------------------------------------------------------- the calls themselves


@on_ranks(2)
def test_both_calls_may_be_repeated_and_added_up():
    for stage in some_stages(STAGES):
        with open_engine(stage, **BF16) as engine:
            train(engine, own_data(engine, 1))
            before = states(engine)
            engine.reload_states()
            engine.offload_states([Kind.STATES])
            engine.offload_states(Kind.STATES)
            engine.offload_states("hp_params", pin_memory=False, non_blocking=True)
            engine.offload_states([])
            engine.offload_states(device="none")
            assert weights(engine)
            engine.offload_states()
            engine.offload_states()
            engine.reload_states(non_blocking=True)
            engine.reload_states()
            assert_same(states(engine), before)


@on_ranks(1)
def test_state_may_leave_before_the_first_step_and_without_an_optimizer():
    for optimizer in (None, torch.optim.SGD):
        with open_engine(3, optimizer=optimizer) as engine:
            before = weights(engine)
            engine.offload_states()
            engine.reload_states()
            assert_same(weights(engine), before)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"include": ["optim_state"]},
            "'optim_state' is not a kind of state. Use optim_states",
        ),
        ({"include": [7]}, "7 is not a kind of state"),
        ({"device": "nvme"}, "device='nvme'.*host memory only"),
        ({"device": "cuda:0"}, "device='cuda:0'"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_moves(arguments, text):
    with open_engine(1) as engine:
        with pytest.raises(UsageError, match=text):
            engine.offload_states(**arguments)
        train(engine, data(1))


@on_ranks(2)
def test_states_do_not_leave_under_a_reader_or_inside_a_pass():
    for stage in some_stages(STAGES):
        with open_engine(stage) as engine:
            param = next(iter(engine.module.parameters()))
            with (
                GatheredParameters(param),
                pytest.raises(UsageError, match="gathered by GatheredParameters"),
            ):
                engine.offload_states()
            ((batch,),) = own_data(engine, 1)
            loss = loss_of(engine, batch)
            handle = loss.register_hook(lambda _: engine.offload_states())
            with pytest.raises(UsageError, match="inside forward or backward"):
                engine.backward(loss, retain_graph=True)
            handle.remove()
            train(engine, own_data(engine, 1))


@on_ranks(1)
def test_a_closed_engine_refuses_and_an_engine_closes_while_away():
    for stage in some_stages(STAGES):
        model = CASE.build()
        engine = open_engine(stage, model=model)
        train(engine, own_data(engine, 1))
        before = weights(engine)
        engine.offload_states()
        engine.close()
        assert not any(sum(owners.values()) for owners in engine.runtime.ledger.live.values())
        after = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert_same(after, before)
        with pytest.raises(UsageError, match="closed"):
            engine.offload_states()


@on_ranks(2)
def test_zero_grad_forgets_gradients_that_are_away():
    for stage in some_stages(STAGES):
        with open_engine(stage, gradient_accumulation_steps=2) as engine:
            first, second = own_data(engine, 1, 2)[0]
            engine.backward(loss_of(engine, first))
            engine.step()
            engine.offload_states(["lp_grads"])
            engine.zero_grad()
            engine.reload_states()
            train(engine, [[first, second]])
            found = weights(engine)
        with open_engine(stage, gradient_accumulation_steps=2) as engine:
            train(engine, [[first, second]])
            assert_same(found, weights(engine))


# ---------------------------------------------------------------------- to()


@on_ranks(2)
def test_to_its_own_device_brings_an_engine_back():
    for stage in some_stages(STAGES):
        with away(stage) as engine:
            assert engine.to(engine.device) is engine
            train(engine, own_data(engine, 1))
            engine.offload_states()
            assert engine.cpu() is engine  # on CPU ranks that is home
            train(engine, own_data(engine, 1))


@pytest.mark.parametrize(
    ("asked", "home", "answer"),
    [
        ("cpu", "cpu", True),
        ("cpu", "cuda:1", False),
        ("cuda:1", "cuda:1", True),
        ("cuda", "cuda:1", True),
    ],
)
def test_to_knows_the_way(asked, home, answer):
    assert is_return(torch.device(asked), torch.device(home)) is answer


@pytest.mark.parametrize(
    ("asked", "home"), [("cuda:0", "cuda:1"), ("cuda", "cpu"), ("meta", "cpu")]
)
def test_to_another_device_is_refused(asked, home):
    with pytest.raises(UsageError, match=f"engine was built for {home}"):
        is_return(torch.device(asked), torch.device(home))


def test_to_another_memory_format_is_refused():
    with pytest.raises(UsageError, match="channels_last"):
        asked_of_to((), {"memory_format": torch.channels_last})
