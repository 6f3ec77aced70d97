"""Models of Transformers load, change and save as usual while every rank holds a part of them."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import with_deepspeed
from zeroshard_testing import on_ranks
from zeroshard_testing.ranks import run_ranks

from zeroshard.errors import DistributedError, ShardedAccess

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")

rank_test = on_ranks(2, group=False, timeout=120)
SHAPE = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16,
         "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
         "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # fmt: skip
ZERO3 = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}


@with_deepspeed
def save_gpt2(folder: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    GPT2LMHeadModel(GPT2Config(**SHAPE)).save_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, deepspeed_on_ranks: None) -> str:
    """A folder with a randomly initialized GPT-2."""
    folder = str(tmp_path_factory.mktemp("gpt2"))
    run_ranks(save_gpt2, 1, folder, group=False)
    return folder


def whole(saved: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(str(Path(saved, "model.safetensors")))


def loaded_sharded(folder: str, **config: Any) -> tuple[Any, Any]:
    """A model of the folder while a stage-3 configuration is alive, and that configuration."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig({**ZERO3, **config})
    return AutoModelForCausalLM.from_pretrained(folder), alive


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole values of all parameters."""
    import deepspeed

    found = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters(param):
            found[name] = param.detach().clone()
    return found


@rank_test
@with_deepspeed
def test_from_pretrained_under_zero_init_brings_the_weights(saved):
    import deepspeed

    deepspeed.init_distributed()
    model, _alive = loaded_sharded(saved)
    for name, param in model.named_parameters():
        assert hasattr(param, "ds_id"), name
        parts = torch.tensor(param.ds_tensor.numel())
        torch.distributed.all_reduce(parts)
        assert parts == param.ds_numel, name
    found, wanted = values(model), whole(saved)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert model.lm_head.weight is model.transformer.wte.weight


@with_deepspeed
def save_bert(folder: str) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(6)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 48, "vocab_size": 50, "max_position_embeddings": 16}  # fmt: skip
    BertModel(BertConfig(**shape), add_pooling_layer=False).save_pretrained(folder)


@pytest.fixture(scope="module")
def saved_base(tmp_path_factory: pytest.TempPathFactory, deepspeed_on_ranks: None) -> str:
    """A folder of a BERT without a head, and without a pooler."""
    folder = str(tmp_path_factory.mktemp("bert"))
    run_ranks(save_bert, 1, folder, group=False)
    return folder


@rank_test
@with_deepspeed
def test_a_model_with_a_fresh_head_is_loaded_and_trains(saved_base):
    """Transformers gathers what the file lacks in the order of a set, which differs between ranks."""
    import deepspeed
    from transformers import AutoModelForSequenceClassification
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed()
    torch.manual_seed(40 + deepspeed.comm.get_rank())
    _alive = HfDeepSpeedConfig(ZERO3)
    model = AutoModelForSequenceClassification.from_pretrained(saved_base, num_labels=3)
    found = values(model)
    for name, value in whole(saved_base).items():
        assert torch.equal(found[f"bert.{name}"], value), name
    for name in ("bert.pooler.dense.weight", "classifier.weight"):
        assert 0.01 < found[name].std() < 0.03, name  # BERT's own initialiser, not torch's
    assert found["classifier.bias"].unique().tolist() == [0.0]
    seen = [None, None]
    torch.distributed.all_gather_object(seen, found["classifier.weight"])
    assert torch.equal(seen[0], seen[1])
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = deepspeed.initialize(model=model, config={**ZERO3, **adamw})
    tokens, labels = torch.arange(3, 19).view(2, 8), torch.tensor([0, 2])
    losses = []
    for _ in range(3):
        loss = engine(input_ids=tokens, labels=labels).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@rank_test
@with_deepspeed
def test_from_pretrained_of_another_shape_is_an_error(saved, tmp_path_name):
    import deepspeed
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    deepspeed.init_distributed()
    folder = Path(tmp_path_name)
    if deepspeed.comm.get_rank() == 0:
        weights = whole(saved)
        weights["transformer.h.0.mlp.c_fc.weight"] = torch.zeros(32, 64)
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "config.json").write_text(Path(saved, "config.json").read_text())
    deepspeed.comm.barrier()
    from transformers.integrations import HfDeepSpeedConfig

    _alive = HfDeepSpeedConfig(ZERO3)
    if deepspeed.comm.get_rank() == 0:  # it reads the file, and ends the program
        with pytest.raises(RuntimeError, match=r"c_fc"):
            AutoModelForCausalLM.from_pretrained(folder)
    else:
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def tmp_path_name(tmp_path: Path) -> str:
    return str(tmp_path)


def trained(model: Any, vocab: int = 50, steps: int = 3, **config: Any) -> tuple[Any, list[float]]:
    """An engine of the model after some steps, and the mean losses."""
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**ZERO3, "gradient_clipping": 0.0,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **config},
    )  # fmt: skip
    return engine, go_on(engine, vocab, steps)


def go_on(engine: Any, vocab: int, steps: int) -> list[float]:
    losses = []
    dice = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(steps):
        tokens = torch.randint(3, vocab, (2, 8), generator=dice)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
    return losses


@pytest.mark.parametrize("vocab", [57, 43])
@rank_test
@with_deepspeed
def test_resize_token_embeddings_of_a_sharded_model(saved, vocab):
    import deepspeed
    from transformers import AutoModelForCausalLM

    deepspeed.init_distributed()
    both = min(vocab, 50)
    model, _alive = loaded_sharded(saved)
    model.resize_token_embeddings(vocab, mean_resizing=False)
    assert model.lm_head.weight is model.transformer.wte.weight
    found = values(model)
    assert found["transformer.wte.weight"].shape == (vocab, 32)
    wanted = whole(saved)["transformer.wte.weight"]
    assert torch.equal(found["transformer.wte.weight"][:both], wanted[:both])

    engine, losses = trained(model, both)
    del _alive
    reference = AutoModelForCausalLM.from_pretrained(saved)
    reference.resize_token_embeddings(vocab, mean_resizing=False)
    with torch.no_grad():
        reference.transformer.wte.weight.copy_(found["transformer.wte.weight"])
    other, wanted_losses = trained(reference, both, zero_optimization={"stage": 0})
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    engine.destroy()
    other.destroy()


@rank_test
@with_deepspeed
def test_mean_resizing_draws_new_rows_around_the_old_ones(saved):
    import deepspeed

    deepspeed.init_distributed()
    model, _alive = loaded_sharded(saved)
    model.resize_token_embeddings(60)
    found = values(model)["transformer.wte.weight"]
    old, new = found[:50], found[50:]
    assert (new - old.mean(0)).abs().max() < 0.05
    gathered = [torch.empty_like(new) for _ in range(2)]
    torch.distributed.all_gather(gathered, new.contiguous())
    assert torch.equal(*gathered)


@rank_test
@with_deepspeed
def test_save_pretrained_of_an_engine_at_stage_3(saved, tmp_path_name):
    import deepspeed
    from transformers import AutoModelForCausalLM

    deepspeed.init_distributed()
    model, _alive = loaded_sharded(saved)
    engine, _ = trained(model)
    state = engine._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (engine.global_rank != 0)
    if state is not None:
        engine.module.save_pretrained(tmp_path_name, state_dict=state)
    torch.distributed.barrier()
    wanted = values(engine.module)
    del _alive
    found, report = AutoModelForCausalLM.from_pretrained(tmp_path_name, output_loading_info=True)
    assert not report["missing_keys"]
    for name, value in found.named_parameters():
        assert torch.equal(value, wanted[name]), name
    engine.destroy()


@rank_test
@with_deepspeed
def test_gradient_checkpointing_at_stage_3_changes_nothing(saved):
    import deepspeed

    deepspeed.init_distributed()
    model, _alive = loaded_sharded(saved)
    engine, wanted = trained(model)
    engine.destroy()
    for reentrant in (True, False):
        model, _alive = loaded_sharded(saved)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        engine, losses = trained(model)
        assert losses == pytest.approx(wanted, rel=1e-6)
        engine.destroy()


@rank_test
@with_deepspeed
def test_generate_through_the_engine_with_prompts_and_answers_of_other_lengths(saved):
    import deepspeed
    from transformers import AutoModelForCausalLM

    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    prompt = torch.arange(3, 6 + 2 * rank)[None]
    options = {
        "do_sample": False, "max_new_tokens": 8 - 5 * rank, "num_beams": 1 + rank,
        "attention_mask": torch.ones_like(prompt),
    }  # fmt: skip
    wanted = AutoModelForCausalLM.from_pretrained(saved).generate(prompt, **options)
    model, _alive = loaded_sharded(saved)
    engine, *_ = deepspeed.initialize(model=model, config=ZERO3)
    engine.eval()
    found = engine.generate(prompt, synced_gpus=True, **options)
    assert torch.equal(found, wanted)
    torch.distributed.barrier()
    engine.destroy()


@rank_test
@with_deepspeed
def test_one_rank_may_list_a_state_dict_and_values_need_all(saved):
    """Programs save on rank 0; the others, or rank 0 alone, only look at names, shapes and sharing."""
    import deepspeed

    deepspeed.init_distributed()
    model, _alive = loaded_sharded(saved)
    engine, _ = trained(model)
    if engine.global_rank == 1:
        state = engine.module.state_dict()
        assert [tuple(value.shape) for value in state.values()] == [
            tuple(param.shape) for param in engine.module.state_dict(keep_vars=True).values()
        ]
        assert all(value.is_meta and not value.requires_grad for value in state.values())
        tied = state["lm_head.weight"], state["transformer.wte.weight"]
        assert tied[0].untyped_storage().data_ptr() == tied[1].data_ptr() == 0
        assert tied[0].view(-1)[-1].data_ptr() == tied[1].view(-1)[-1].data_ptr()
    torch.distributed.barrier()

    state, wanted = engine.module.state_dict(), values(engine.module)
    for name, param in engine.module.named_parameters():
        assert torch.equal(state[name], wanted[name]), name
        assert torch.equal(state[name].view(-1)[-1], wanted[name].view(-1)[-1]), name
        assert state[name].to("cpu").device == torch.zeros_like(state[name]).device == param.device
    copied = copy.deepcopy(state)
    assert type(copied["lm_head.weight"]) is torch.Tensor
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for name, value in torch.load(file).items():
        assert torch.equal(value, copied[name]), name
    with pytest.raises(ShardedAccess, match="written in place"):
        state["lm_head.weight"].zero_()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        whole_state = engine.module.state_dict()
        assert all(type(value) is torch.Tensor for value in whole_state.values())
        assert all(torch.equal(state[name], value) for name, value in whole_state.items())
    engine.destroy()
    with pytest.raises(ShardedAccess, match="closed"):
        state["lm_head.weight"].sum()


@with_deepspeed
def loads_without_rank_1(folder: str, gate: str) -> str:
    """Rank 1 calls ``from_pretrained`` after rank 0 has given up."""
    import deepspeed

    deepspeed.init_distributed()
    limits = {"first_report_s": 0.4, "sections": {"setup": 1.0}, "collective_timeout_s": 1.0}
    os.environ["ZEROSHARD_STALL_S"] = "0.4"
    rank = deepspeed.comm.get_rank()
    try:
        if rank:
            Path(gate).read_bytes()
        loaded_sharded(folder, trust=limits)
    except DistributedError as error:
        return str(error)
    finally:
        if not rank:
            Path(gate).write_bytes(b"open")
    raise AssertionError("nothing failed")


def test_a_rank_that_does_not_come_to_from_pretrained_is_named(saved, tmp_path):
    os.mkfifo(tmp_path / "gate")
    texts = run_ranks(loads_without_rank_1, 2, saved, str(tmp_path / "gate"), group=False)
    assert texts[0] == texts[1]
    assert texts[0].startswith("RankLate after ")
    assert "  rank 0: waiting in zero.Init in from_pretrained (modeling_utils.py:" in texts[0]
    assert "  rank 1: outside collectives, pathlib.py:" in texts[0]
    assert "test_trainer.py:" in texts[0]
