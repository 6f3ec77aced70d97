"""State outside the device: copies wait for what they need, and nothing else waits for them."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from kit import engine
from scenarios import cuda, model, zero_section
from stepwise import batch, loss_of, report
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard.device import pinned
from zeroshard.errors import UsageError
from zeroshard.offload.async_update import AsyncUpdateWorker
from zeroshard.optim import native_adam
from zeroshard.zero import GatheredParameters, safe_get_full_fp32_param, safe_set_full_fp32_param

OFFLOADS = {name: zero_section(name, "") for name in ("optimizer", "parameters", "delayed")}
HOST, ALL = OFFLOADS["optimizer"], OFFLOADS["parameters"]
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def on_disk(where, *, params: bool) -> dict:
    """Optimizer state on disk, and the parameters too."""
    keys = {"device": "nvme", "nvme_path": str(where)}
    return {"offload_optimizer": keys, **({"offload_param": keys} if params else {})}


def compiled() -> None:
    """From here on, updates run on the worker thread."""
    native_adam.prepare()
    native_adam.wait()


def open_engine(
    keys: dict, *, stage: int, precision: str = "bf16", net: nn.Module | None = None, **more
):
    return engine(net or model(), stage, precision, optimizer=ADAMW, zero_optimization=keys, **more)


def step(trained, at: int, device: str = "cuda", precision: str = "bf16") -> None:
    trained.backward(loss_of(trained, batch(at, device, precision)))
    trained.step()


def final(trained) -> list[torch.Tensor]:
    return [full.detach().clone().cpu() for _, full in trained.iter_full_params()]


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", ["optimizer", "parameters"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1, group=False)
def test_no_gradient_is_on_the_device_between_backward_and_step(stage, name, ranks):
    if name == "parameters" and stage < 3:
        return
    compiled()
    with cuda(ranks) as watch:
        with open_engine(OFFLOADS[name], stage=stage) as trained:
            for at in range(3):
                trained.backward(loss_of(trained, batch(at, "cuda", "bf16")))
                before = watch.live_nbytes
                trained.step()
                assert abs(before - watch.live_nbytes) < 256  # numbers of the step
            rows = {(row.category, row.tier): row for row in trained.memory_report().rows}
        assert watch.findings == [], report(watch)
    gradients = rows["gradients", "device"]
    assert (gradients.planned, gradients.measured) == (0, 0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1, group=False)
def test_a_sum_of_micro_batches_is_planned_where_it_is(stage):
    compiled()
    with cuda() as watch:
        accumulate = {"gradient_accumulation_steps": 2}
        with open_engine(HOST, stage=stage, **accumulate) as trained:
            for at in range(4):
                step(trained, at)
            rows = {(row.category, row.tier): row for row in trained.memory_report().rows}
        assert watch.findings == [], report(watch)
    gradients = rows["gradients", "device"]
    assert gradients.planned == gradients.measured > 0


@on_ranks(1, group=False)
def test_the_numbers_of_all_chunks_are_one_copy():
    compiled()
    with cuda() as watch:
        with open_engine(HOST, stage=2) as trained:
            step(trained, 0)
            streams, copies = trained.runtime.stores.streams, []
            send = streams.d2h
            with mock.patch.object(
                streams,
                "d2h",
                lambda source, *a: [copies.append(source.nbytes), send(source, *a)][1],
            ):
                step(trained, 1)
            chunks = [chunk for shard in trained.runtime.optimizer.shards for chunk in shard.chunks]
            gradients = [2 * chunk.numel for chunk in chunks]
            assert sorted(copies) == sorted([*gradients, 8 * (2 + len(chunks))])
        assert watch.findings == [], report(watch)


# ---------------------------------------------------------------------- parameters in host memory


@pytest.mark.parametrize("ranks", [1, 4])
@on_ranks(1, group=False)
def test_forward_and_backward_wait_for_nothing_and_copy_nothing_back(ranks):
    compiled()
    with cuda(ranks) as watch:
        with open_engine(ALL, stage=3) as trained:
            shard_nbytes = sum(unit.shard_S.nbytes for unit in trained.runtime.units)
            numbers_nbytes = 8 * 3
            for at in range(4):
                x_BD = batch(at, "cuda", "bf16")
                before = trained.runtime.stores.moved_nbytes
                with watch.phase(f"pass {at}"):
                    trained.backward(loss_of(trained, x_BD))
                trained.step()
                after = trained.runtime.stores.moved_nbytes
                if at:
                    assert not watch.waits(f"pass {at}", thread="main")
                    assert after["up_nbytes"] - before["up_nbytes"] <= 2 * shard_nbytes
                assert after["down_nbytes"] - before["down_nbytes"] == shard_nbytes + numbers_nbytes
        assert watch.findings == [], report(watch)


class Edited(nn.Linear):
    """A layer that writes into its weight in forward, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__(16, 16)
        self.how = how

    def forward(self, x_BD):
        with torch.no_grad():
            if self.how == "in place":
                self.weight.mul_(0.5)
            elif self.how == "a row":
                self.weight[3].fill_(0.25)
            elif self.how == "assigned":
                self.weight.data = self.weight.data * 0.5
            elif self.how == "hidden":
                self.weight.data.mul_(0.5)
        return super().forward(x_BD)


def edited_model(how: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Edited(how), nn.Linear(16, 4))


def train_edited(how: str, device: str, keys: dict) -> list[torch.Tensor]:
    net = edited_model(how)
    with open_engine(keys, stage=3, net=net) as trained:
        for at in range(3):
            if how == "gathered":
                with GatheredParameters(net[1].weight, modifier_rank=0):
                    net[1].weight.data.mul_(0.5)
            elif how == "set":
                half = safe_get_full_fp32_param(net[1].weight) * 0.5
                safe_set_full_fp32_param(net[1].weight, half)
            step(trained, at, device)
        return final(trained)


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("how", ["", "in place", "a row", "assigned", "gathered", "set"])
@on_ranks(1, group=False)
def test_edits_are_taken_over_exactly(how, where, tmp_path):
    compiled()
    expected = train_edited(how, "cpu", {})
    with cuda() as watch:
        keys = ALL if where == "host" else on_disk(tmp_path, params=True)
        found = train_edited(how, "cuda", keys)
        assert watch.findings == [], report(watch)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("where", ["host", "disk"])
@on_ranks(1, group=False)
def test_an_edit_that_cannot_be_kept_is_an_error_before_the_update(where, tmp_path):
    compiled()
    with cuda():
        net = edited_model("hidden")
        keys = ALL if where == "host" else on_disk(tmp_path, params=True)
        with open_engine(keys, stage=3, net=net) as trained:
            trained.backward(loss_of(trained, batch(0, "cuda", "bf16")))
            with pytest.raises(UsageError, match=r"parameters of '1' were written .* counts?"):
                trained.step()
                trained(batch(1, "cuda", "bf16"))


# ---------------------------------------------------------------------- the update


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1, group=False)
def test_a_step_ends_before_its_update(stage, ranks):
    compiled()
    update, gate, opened = AsyncUpdateWorker.update, threading.Event(), []

    def gated(*args):
        opened.append(gate.wait(10))
        update(*args)

    with cuda(ranks) as watch:
        with open_engine(HOST, stage=stage) as trained:
            step(trained, 0)
            trained.backward(loss_of(trained, batch(1, "cuda", "bf16")))
            with mock.patch.object(AsyncUpdateWorker, "update", gated), watch.phase("step"):
                trained.step()
                assert not watch.waits("step", thread="main")
                gate.set()
                step(trained, 2)
            assert opened
            assert all(opened)
        assert watch.findings == [], report(watch)


# ---------------------------------------------------------------------- disk


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(1, group=False)
def test_a_chunk_on_disk_is_copied_while_the_one_before_it_is_updated(stage, tmp_path):
    compiled()
    with cuda() as watch:
        with open_engine(on_disk(tmp_path, params=False), stage=stage) as trained:
            step(trained, 0)
            streams, calls = trained.runtime.stores.streams, []
            send, update = streams.d2h, AsyncUpdateWorker.update

            def sent(source, target):
                calls.append("copy" if source.dtype == torch.bfloat16 else "numbers")
                return send(source, target)

            def updated(*args):
                calls.append("update")
                update(*args)

            with (
                mock.patch.object(streams, "d2h", sent),
                mock.patch.object(AsyncUpdateWorker, "update", updated),
            ):
                step(trained, 1)
        assert watch.findings == [], report(watch)
    chunks = calls.count("update")
    both = ["copy", "copy"]  # gradient and parameter
    middle = [*both, "update"] * (chunks - 1)
    assert calls == ["copy", "numbers", "copy", *middle, "update"]


@pytest.mark.parametrize("ranks", [1, 4])
@on_ranks(1, group=False)
def test_shards_on_disk_reach_the_device_through_page_locked_memory(ranks, tmp_path):
    compiled()
    with cuda(ranks) as watch:
        with open_engine(on_disk(tmp_path, params=True), stage=3) as trained:
            for at in range(3):
                x_BD = batch(at, "cuda", "bf16")
                with watch.phase(f"pass {at}"):
                    trained.backward(loss_of(trained, x_BD))
                trained.step()
            units = len(trained.runtime.units)
            waits = watch.waits("pass 2")
            assert set(waits) <= {"event"}  # no pageable copy, and no fingerprint is read
            assert waits["event"] <= 2 * units  # a slot that is used again
        assert watch.findings == [], report(watch)


# ---------------------------------------------------------------------- other uses


@pytest.mark.parametrize("name", ["optimizer", "parameters", "disk", "disk and parameters"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1, group=False)
def test_values_are_those_of_the_cpu(stage, name, tmp_path):
    if "parameters" in name and stage < 3:
        return
    compiled()
    keys = OFFLOADS.get(name) or on_disk(tmp_path, params="parameters" in name)
    with open_engine({}, stage=stage) as trained:
        for at in range(3):
            step(trained, at, "cpu")
        expected = final(trained)
    with cuda() as watch:
        with open_engine(keys, stage=stage) as trained:
            for at in range(3):
                step(trained, at)
            found = final(trained)
        assert watch.findings == [], report(watch)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["optimizer", "parameters", "delayed"])
@pytest.mark.parametrize("query", [None, True, False])
@on_ranks(1, group=False)
def test_closing_waits_for_copies(name, query):
    compiled()
    for ends_by_error in (False, True):
        with cuda(query=query) as watch:
            trained = open_engine(OFFLOADS[name], stage=3 if name == "parameters" else 2)
            for at in range(3):
                step(trained, at)
            if ends_by_error:
                trained.backward(loss_of(trained, batch(3, "cuda", "bf16")))
                trained.close("ValueError: in the program")
            else:
                trained.close()
            assert watch.findings == [], report(watch)


@pytest.mark.parametrize("name", ["optimizer", "parameters", "delayed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1, group=False)
def test_states_leave_on_a_side_stream_right_after_an_update(stage, name):
    if name == "parameters" and stage < 3:
        return
    compiled()
    with cuda() as watch:
        with open_engine(OFFLOADS[name], stage=stage) as trained:
            side = torch.cuda.Stream()
            for at in range(3):
                step(trained, at)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    trained.offload_states(non_blocking=True)
                    trained.reload_states(non_blocking=True)
                torch.cuda.current_stream().wait_stream(side)
        assert watch.findings == [], report(watch)


@pytest.mark.parametrize("name", ["optimizer", "parameters", "disk"])
@on_ranks(1, group=False)
def test_a_checkpoint_is_loaded_right_after_a_step(name, tmp_path):
    compiled()
    with cuda() as watch:
        keys = OFFLOADS.get(name) or on_disk(tmp_path, params=False)
        with open_engine(keys, stage=3) as trained:
            step(trained, 0)
            trained.save_checkpoint(tmp_path, tag="one")
            expected = final(trained)
            step(trained, 1)
            trained.load_checkpoint(tmp_path, tag="one")
            found = final(trained)
        assert watch.findings == [], report(watch)
    assert all(map(torch.equal, found, expected))


@on_ranks(1, group=False)
def test_without_page_locked_memory_training_is_slower_and_right():
    compiled()
    with open_engine({}, stage=3) as trained:
        for at in range(3):
            step(trained, at, "cpu")
        expected = final(trained)
    with cuda() as watch, pytest.MonkeyPatch.context() as patch:
        runtime = torch.cuda.cudart()
        refusing = mock.Mock(wraps=runtime, cudaHostRegister=lambda *_: 2)
        refusing.cudaGetErrorString = lambda code: f"reason {code}"
        patch.setattr(torch.cuda, "cudart", lambda: refusing)
        warn = mock.Mock()
        patch.setattr(pinned.logger, "warning", warn)
        with open_engine(ALL, stage=3) as trained:
            for at in range(3):
                step(trained, at)
            found = final(trained)
        assert {finding.kind for finding in watch.findings} == {"unpinned"}, report(watch)
    assert all(map(torch.equal, found, expected))
    assert "could not be page-locked: cudaHostRegister gave" in str(warn.call_args_list)
