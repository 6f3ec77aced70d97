"""Programs with sequence parallelism under DeepSpeed's and Accelerate's names train as one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import forget, with_deepspeed
from support import sequence_models as tiny
from support.sequence_models import Setting
from torch.nn import functional as F
from torch.utils.data import DataLoader
from zeroshard_testing import on_ranks

from zeroshard import sequence
from zeroshard.errors import UsageError

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from zeroshard.integrations.accelerate.sequences import open_sequences  # noqa: E402

pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")

SETTING = Setting(kv_heads=2)
KEYS = {
    "train_micro_batch_size_per_gpu": tiny.SAMPLES,
    "gradient_clipping": tiny.CLIP,
    "optimizer": {"type": "AdamW", "params": {"lr": tiny.LR, "weight_decay": 0.01}},
}


def aggregated(loss: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
    """The mean over tokens as the documentation of Accelerate and DeepSpeed has it."""
    import torch.distributed.nn.functional as differentiable

    losses = torch.stack(differentiable.all_gather(loss, group=group))
    counts = torch.stack(differentiable.all_gather((labels != -100).sum(), group=group))
    return torch.where(counts > 0, losses * counts, 0).sum() / counts.sum()


def near(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4, group=False, timeout=120)
@with_deepspeed
def test_a_deepspeed_program_with_the_adapter_equals_one_process(stage):
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (
        UlyssesSPAttentionHF,
        UlyssesSPDataLoaderAdapter,
    )
    from deepspeed.utils import groups

    net = tiny.model(SETTING)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=net, core_attn_implementation="sdpa", sequence_parallel_size=2,
        micro_batch_size=tiny.SAMPLES, seq_length=tiny.TOKENS, seq_length_is_variable=False,
    )  # fmt: skip
    config = {**KEYS, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=net, config=config, mpu=mpu)
    assert engine.mesh.text == "data_shard 2 x sequence 2"
    assert groups._get_sequence_parallel_world_size() == mpu.get_sequence_parallel_world_size() == 2
    assert groups._get_data_parallel_world_size() == engine.dp_world_size == 2
    assert groups._get_sequence_data_parallel_world_size() == 4
    rank = dist.get_rank()
    assert mpu.get_sequence_parallel_rank() == rank % 2
    assert mpu.get_data_parallel_rank() == engine.dp_rank == rank // 2
    # Ranks 0 and 1 load samples of their own: rank 0 those of steps 0 and 2, rank 1 those of step 1.
    steps = [step[0][engine.dp_rank] for step in tiny.batches(SETTING, 2)]
    mine = [steps[0], steps[2]] if rank % 2 == 0 else [steps[1], steps[1]]
    group = mpu.get_sequence_parallel_group()
    loader = UlyssesSPDataLoaderAdapter(
        mine, sp_rank=rank % 2, sp_group=group, sp_world_size=2, device=torch.device("cpu")
    )
    assert len(loader) == 4
    losses, norms = [], []
    for batch in list(loader)[:3]:
        labels = batch.pop("shift_labels")
        loss = tiny.cross_entropy(engine(**batch).logits, labels)
        # torch's differentiable all_gather fails in backward in a gloo group without rank 0.
        loss = sequence.mean_over_tokens(loss, (labels != -100).sum(), group)
        engine.backward(loss)
        engine.step()
        losses.append(float(engine.last_step.loss))
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    sequence.unregister()
    expected = tiny.in_one_process(SETTING, 2)
    near(losses, expected.losses)
    near(norms, expected.norms)


@pytest.mark.parametrize("sizes", [{"mesh_param": (1, 2)}, {"sequence_parallel_size": 2}])
@on_ranks(2, group=False)
@with_deepspeed
def test_distributed_attention_equals_attention_over_all_tokens(sizes):
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    keys, arguments = {**KEYS, "zero_optimization": {"stage": 2}}, dict(sizes)
    if "sequence_parallel_size" in sizes:
        keys, arguments = {**keys, **sizes}, {}
    net = torch.nn.Linear(8, 3 * 8).double()
    engine, *_ = deepspeed.initialize(model=net, config=keys, **arguments)
    assert (engine.dp_world_size, groups._get_sequence_parallel_world_size()) == (1, 2)
    whole = torch.randn(2, 6, 4, 8, generator=torch.Generator().manual_seed(3)).double()
    whole.requires_grad_()

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    group = groups._get_sequence_parallel_group()
    ranks = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    for kv_heads in (4, 2, 1):
        spread = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)
        own = whole[:, ranks]
        found = spread(own, own[:, :, :kv_heads], own[:, :, :kv_heads], 0)
        expected = attend(whole, whole[:, :, :kv_heads], whole[:, :, :kv_heads])
        torch.testing.assert_close(found, expected[:, ranks])
        mask = torch.zeros(
            6, 6
        ).double()  # the first of the arguments of ``attend``, in old programs
        scaled = DistributedAttention(
            lambda *all_, scale: attend(*all_[:3]) * scale + all_[3].sum(),
            group,
            scatter_idx=2,
            gather_idx=1,
            num_kv_heads=kv_heads,
        )
        again = scaled(own, own[:, :, :kv_heads], own[:, :, :kv_heads], mask, scale=1.0)
        torch.testing.assert_close(again, found)
        (grad,) = torch.autograd.grad(found.square().sum(), whole)
        dist.all_reduce(grad)
        (other,) = torch.autograd.grad(expected.square().sum(), whole)
        torch.testing.assert_close(grad, other)
    engine.destroy()


class Rows(torch.utils.data.Dataset):
    """The samples of all steps, in the order in which the adapters of two ranks use them."""

    def __init__(self) -> None:
        whole = [step[0][0] for step in tiny.batches(SETTING, 1)]
        self.rows = [{key: value[at] for key, value in batch.items()}
                     for batch in [*whole, whole[0]] for at in range(tiny.SAMPLES)]  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return self.rows[at]


def with_plugin(stage: int) -> Any:
    """Accelerate's own Accelerator, with its plug-in for DeepSpeed and two sequence ranks."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig

    forget()
    os.environ.pop("ACCELERATE_USE_CPU", None)
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=tiny.CLIP)
    asked = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=2,
        sp_handler=DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        ),
    )
    return Accelerator(deepspeed_plugin=plugin, parallelism_config=asked)


def by_name(stage: int, steps: int = 1) -> Any:
    """ZeroShard's Accelerator with two sequence ranks."""
    from accelerate.parallelism_config import ParallelismConfig

    from zeroshard.integrations.accelerate import Accelerator

    forget()
    zero = {"zero_optimization": {"stage": stage}, "gradient_clipping": tiny.CLIP}
    asked = ParallelismConfig(sp_size=2)
    return Accelerator(
        cpu=True, config=zero, parallelism_config=asked, gradient_accumulation_steps=steps
    )


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, group=False, timeout=120)
@with_deepspeed
def test_the_accelerator_of_zeroshard_shares_sequences_as_one_process_trains(stage):
    accelerator = by_name(stage)
    net = tiny.model(SETTING)
    optimizer = torch.optim.AdamW(net.parameters(), lr=tiny.LR)
    loader = DataLoader(Rows(), batch_size=tiny.SAMPLES)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    assert accelerator.prepare(loader) is loader
    assert accelerator.prepare_data_loader(loader) is loader
    assert (len(loader), net.train_batch_size(), net.mesh.text) == (4, tiny.SAMPLES, "sequence 2")
    losses, norms = [], []
    for batch in list(loader)[: tiny.STEPS]:
        labels = batch.pop("shift_labels")
        assert batch["input_ids"].shape == (tiny.SAMPLES, tiny.TOKENS // 2)
        loss = tiny.cross_entropy(net(**batch).logits, labels)
        counted = (labels != -100).sum()
        accelerator.backward(sequence.mean_over_tokens(loss, counted, accelerator.sequence_group))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(net.last_step.loss))
        norms.append(net.get_global_grad_norm())
    accelerator.free_memory()
    expected = tiny.in_one_process(SETTING, 1)
    near(losses, expected.losses)
    near(norms, expected.norms)


@on_ranks(2, group=False, timeout=120)
@with_deepspeed
def test_an_accumulation_ends_with_the_last_piece_of_the_last_batch():
    accelerator = by_name(1, steps=4)
    net = tiny.model(SETTING)
    optimizer = torch.optim.AdamW(net.parameters(), lr=tiny.LR)
    loader = DataLoader(Rows(), batch_size=tiny.SAMPLES)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    ends = []
    for batch in loader:
        labels = batch.pop("shift_labels")
        with accelerator.accumulate(net):
            loss = tiny.cross_entropy(net(**batch).logits, labels)
            counted = (labels != -100).sum()
            accelerator.backward(
                sequence.mean_over_tokens(loss, counted, accelerator.sequence_group)
            )
            optimizer.step()
            optimizer.zero_grad()
            ends.append(accelerator.sync_gradients)
    assert ends == [False, False, False, True]  # the third one is the first piece of the last batch
    accelerator.free_memory()


NUM_ROWS = 11
"""Of 4 ranks with 2 samples each: the last batch of all has 3 samples, and 5 that fill it."""


def rows() -> list[dict[str, torch.Tensor]]:
    """Samples of 4 tokens: 10 n, ..., 10 n + 3."""
    return [
        {"input_ids": 10 * n + torch.arange(4), "position_ids": torch.arange(4)}
        for n in range(NUM_ROWS)
    ]


def tokens_of(loader: Any) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for batch in loader]


@on_ranks(4, group=False)
@with_deepspeed
def test_loaders_that_skip_batches_count_those_that_the_program_gets():
    accelerator = by_name(1)
    loader = accelerator.prepare(DataLoader(rows(), batch_size=2))
    every = tokens_of(loader)
    assert (len(loader), len(every), len(every[0][0])) == (4, 4, 2)
    for count in range(5):
        rest = accelerator.skip_first_batches(loader, count)
        assert len(rest) == 4 - count
        assert tokens_of(rest) == every[count:] == tokens_of(rest)  # also in the next epoch
    twice = accelerator.skip_first_batches(accelerator.skip_first_batches(loader, 1), 2)
    assert tokens_of(twice) == every[3:]
    plain = DataLoader(range(4))
    assert len(accelerator.skip_first_batches(plain, 1)) == 3
    with pytest.raises(UsageError, match=r"call accelerator.skip_first_batches\(loader, n\)"):
        accelerate.skip_first_batches(loader, 1)
    accelerator.free_memory()


@pytest.mark.parametrize("skipped", [0, 3])
@on_ranks(4, group=False)
@with_deepspeed
def test_gathered_for_metrics_are_whole_sequences_once_each(skipped):
    accelerator = by_name(1)
    loader = accelerator.prepare(DataLoader(rows(), batch_size=2))
    loader = accelerator.skip_first_batches(loader, skipped)
    seen: list[list[int]] = []
    for batch in loader:
        ids = batch["input_ids"]
        first = ids[:, 0] // 10
        found = accelerator.gather_for_metrics(
            {"ids": ids, "wide": ids[..., None] * 2.0, "number": first, "nan": first / 0 * 0}
        )
        seen += found["ids"].tolist()
        assert torch.equal(found["wide"][..., 0], found["ids"] * 2.0)
        assert torch.equal(found["number"], found["ids"][:, 0] // 10)
        assert len(found["nan"]) == len(found["number"])
    # A piece is a batch of one rank of each group: of ranks 0 and 2, then of ranks 1 and 3.
    numbers = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10]
    left = {0: numbers, 3: [10]}[skipped]
    assert seen == [[10 * number + at for at in range(4)] for number in left]
    accelerator.free_memory()


@on_ranks(4, group=False)
@with_deepspeed
def test_what_cannot_be_joined_is_the_same_error_on_every_rank():
    accelerator = by_name(1)
    loader = accelerator.prepare(DataLoader(rows(), batch_size=2))
    for batch in loader:
        with pytest.raises(UsageError, match=r"of shape \(2,\) that differs on ranks"):
            accelerator.gather_for_metrics(batch["input_ids"].sum(1))
        with pytest.raises(UsageError, match=r"call it with tensors, inside the loop"):
            accelerator.gather_for_metrics(["text"])
    with pytest.raises(UsageError, match=r"call it with tensors, inside the loop"):
        accelerator.gather_for_metrics(torch.zeros(2))
    accelerator.free_memory()
    with pytest.raises(UsageError, match=r"use_stateful_dataloader=True with Paral.*sp_size=2"):
        open_sequences(accelerator.parallelism_config, is_stateful=True)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, group=False, timeout=120)
@with_deepspeed
def test_accelerates_sequence_ranks_equal_one_process(stage):
    accelerator = with_plugin(stage)
    from deepspeed.utils import groups

    net = tiny.model(SETTING)
    optimizer = torch.optim.AdamW(net.parameters(), lr=tiny.LR)
    loader = DataLoader(Rows(), batch_size=tiny.SAMPLES)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    assert (len(loader), net.train_batch_size()) == (4, tiny.SAMPLES)
    group = groups._get_sequence_parallel_group()
    unwrapped = accelerator.unwrap_model(net)
    losses, norms = [], []
    for batch in list(loader)[: tiny.STEPS]:
        assert batch["input_ids"].shape == (tiny.SAMPLES, tiny.TOKENS // 2)
        out = net(**batch)
        labels = batch["shift_labels"]
        loss = unwrapped.loss_function(
            logits=out.logits, labels=None, shift_labels=labels, vocab_size=tiny.VOCAB
        )
        accelerator.backward(aggregated(loss, labels, group))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(net.last_step.loss))
        norms.append(net.get_global_grad_norm())
    net.destroy()
    sequence.unregister()
    expected = tiny.in_one_process(SETTING, 1)
    assert losses == pytest.approx(expected.losses, rel=1e-5)  # Transformers' loss is fp32
    assert norms == pytest.approx(expected.norms, rel=1e-5)


@on_ranks(2, group=False)
@with_deepspeed
def test_sizes_and_models_that_do_not_fit_are_refused():
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    def register(size: int, net: Any = None, core: str | None = "sdpa", **more: Any) -> Any:
        net = tiny.model(SETTING) if net is None else net
        return UlyssesSPAttentionHF.register_with_transformers(net, core, size, 1, **more)

    assert register(1) is None
    with pytest.raises(UsageError, match=r"sequence_parallel_size is 4, but 2 rank\(s\)"):
        register(4)
    with pytest.raises(UsageError, match=r"core_attn_implementation is 'eager', but .* 'sdpa'"):
        register(2, core="eager")
    eager = tiny.model(SETTING)
    eager.set_attn_implementation("eager")
    with pytest.raises(Exception, match=r"'eager' cannot be spread over sequence ranks"):
        register(2, eager, None)
    with pytest.raises(UsageError, match=r"seq_length is 7, which 2 sequence ranks cannot divide"):
        register(2, seq_length=7, seq_length_is_variable=False)
    odd = tiny.model(SETTING)
    odd.config.num_attention_heads = odd.config.num_key_value_heads = 3
    with pytest.raises(UsageError, match=r"3 heads, which 2 sequence ranks cannot divide"):
        register(2, odd)
    odd.config.num_attention_heads = 4
    with pytest.raises(UsageError, match=r"3 key/value heads and 2 sequence ranks"):
        register(2, odd)
    mpu = register(2)
    sequence.unregister()
    config = {**KEYS, "sequence_parallel_size": 1, "parallel": {"sequence": 1}}
    with pytest.raises(Exception, match=r"parallel.sequence is 1, but mpu\.get_sequence.* is 2"):
        deepspeed.initialize(model=tiny.model(SETTING), config=config, mpu=mpu)
    with pytest.raises(Exception, match=r"data_shard 2 .*= 4 ranks, but 2 were started"):
        deepspeed.initialize(model=tiny.model(SETTING), config=KEYS, mesh_param=(2, 2))
