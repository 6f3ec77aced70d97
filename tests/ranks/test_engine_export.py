"""The weights of a running engine are exported completely at every stage. If not, every rank raises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hugging_face import hugging_face, logits
from loops import STAGES, adamw, open_engine, own_data, train, weights
from safetensors.torch import load_file
from support.edge_case_models import CASES, Mlp
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.zero_to_fp32 import (
    export_checkpoint,
    get_fp32_state_dict_from_zero_checkpoint,
)
from zeroshard.engine import export
from zeroshard.errors import CheckpointError, UsageError

BF16 = {"bf16": {"enabled": True}}


class Model(Mlp):
    """Tied, frozen and fp32 weights, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = self.inp.weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.blocks[0].register_buffer("mask", torch.ones(5, 2).t())  # not contiguous


def built() -> nn.Module:
    torch.manual_seed(11)
    return Model()


def trained_engine(stage: int, **keys: object):
    """After two steps on this rank's data; and its state dict by all names."""
    engine = open_engine(stage, model=built(), **keys)
    train(engine, own_data(engine, 2))
    whole = weights(engine)
    whole["out.weight"] = whole["inp.weight"]
    whole["count"], whole["blocks.0.mask"] = torch.tensor(3), torch.ones(2, 5)
    return engine, whole


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def without(state: dict[str, Tensor], *starts: str) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if not name.startswith(starts)}


FROZEN = "blocks.1."

# ---------------------------------------------------------------------- save_16bit_model


@pytest.mark.parametrize("keys", [{}, BF16, {**BF16, "keep_fp32": ["*.norm.*"]}])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_all_weights_are_in_one_file_in_the_models_dtypes(stage, keys, tmp_path):
    engine, whole = trained_engine(stage, **keys)
    with engine:
        assert export.save_16bit_model(engine, tmp_path) is True
        assert_equal(load_file(tmp_path / "model.safetensors"), without(whole, "out.weight"))
        train(engine, own_data(engine, 1))  # and training continues


@on_ranks(2)
def test_a_bin_file_is_a_plain_dict_with_all_names(tmp_path):
    engine, whole = trained_engine(3, **BF16)
    with engine:
        export.save_16bit_model(engine, tmp_path, "pytorch_model.bin")
        state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        assert_equal(state, whole)
        assert state["inp.weight"].data_ptr() == state["out.weight"].data_ptr()
        built().load_state_dict(state)


@pytest.mark.parametrize("name", ["w.safetensors", "w.bin"])
@on_ranks(2)
def test_frozen_weights_may_stay_out(name, tmp_path):
    engine, whole = trained_engine(3)
    with engine:
        export.save_16bit_model(engine, tmp_path, name, exclude_frozen_parameters=True)
        path = tmp_path / name
        if name.endswith("bin"):
            assert_equal(torch.load(path), without(whole, FROZEN))
        else:
            assert_equal(load_file(path), without(whole, FROZEN, "out.weight"))


@on_ranks(2)
def test_a_file_name_with_a_directory_is_refused(tmp_path):
    with open_engine(3) as engine, pytest.raises(UsageError, match="without a directory"):
        export.save_16bit_model(engine, tmp_path, "a/model.safetensors")


@on_ranks(2)
def test_weights_that_are_away_are_asked_for(tmp_path):
    with open_engine(3) as engine:
        engine.offload_states()
        with pytest.raises(UsageError, match="reload_states"):
            export.save_16bit_model(engine, tmp_path / "out")
        assert not (tmp_path / "out").exists(), "nothing was begun"


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_what_the_program_assigned_is_saved(stage, tmp_path):
    with open_engine(stage, model=built()) as engine:
        engine.module.blocks[0].up.weight.data = torch.full((35, 23), 0.25)
        export.save_16bit_model(engine, tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        assert torch.equal(found["blocks.0.up.weight"], torch.full((35, 23), 0.25))


@on_ranks(2)
def test_an_update_that_still_runs_is_waited_for(tmp_path):
    section = {"offload_optimizer": {"device": "cpu", "delayed_update": True}}
    engine, before = trained_engine(2, zero_optimization=section, **BF16)
    with engine:
        train(engine, own_data(engine, 1))
        export.save_16bit_model(engine, tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        assert_equal(found, {name: weights(engine).get(name, before[name]) for name in found})
        assert not torch.equal(found["inp.weight"], before["inp.weight"])


@on_ranks(2)
def test_weights_that_rest_in_host_memory_are_saved_too(tmp_path):
    section = {"stage": 3, "offload_param": {"device": "cpu"}}
    engine, whole = trained_engine(3, zero_optimization=section)
    with engine:
        export.save_16bit_model(engine, tmp_path)
        assert_equal(load_file(tmp_path / "model.safetensors"), without(whole, "out.weight"))


# ---------------------------------------------------------------------- the state dict


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_rank_0_gets_the_whole_state_dict_in_the_modules_order(stage):
    engine, whole = trained_engine(stage, **BF16)
    with engine:
        state = export.consolidated_16bit_state_dict(engine)
        if engine.global_rank != 0:
            assert state is None
            return
        assert list(state) == list(built().state_dict())
        assert_equal(state, whole)
        assert state["inp.weight"] is state["out.weight"]


@on_ranks(2)
def test_the_state_dict_is_a_copy():
    engine, whole = trained_engine(0)
    with engine:
        state = export.consolidated_16bit_state_dict(engine, exclude_frozen_parameters=True)
        train(engine, own_data(engine, 1))
        if engine.global_rank == 0:
            assert_equal(state, without(whole, FROZEN))


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(3)
def test_a_directory_that_cannot_be_written_is_the_same_error_everywhere(stage, name, tmp_path):
    (tmp_path / "file").write_text("")
    with open_engine(stage) as engine:
        with pytest.raises(
            CheckpointError, match=r"save_16bit_model.* failed.*Not a directory"
        ) as e:
            export.save_16bit_model(engine, tmp_path / "file" / "out", name)
        said: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(said, str(e.value))
        assert len(set(said)) == 1
        train(engine, own_data(engine, 1))  # no rank stopped in the middle of a unit


@on_ranks(3)
def test_an_error_in_the_middle_ends_it_on_all_ranks_and_keeps_the_earlier_files(tmp_path):
    engine, _ = trained_engine(3)
    with engine:
        export.save_pretrained(engine, tmp_path, max_shard_size="4KB")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        train(engine, own_data(engine, 1))
        put, calls = export.Exporter.put, []

        def fails_at_the_tenth(self, name, pieces):
            calls.append(name)
            if len(calls) == 10:
                raise OSError(28, "No space left on device", "model")
            put(self, name, pieces)

        export.Exporter.put = fails_at_the_tenth
        try:
            with pytest.raises(CheckpointError, match=r"rank 0: model: No space left on device"):
                export.save_pretrained(engine, tmp_path, max_shard_size="4KB")
        finally:
            export.Exporter.put = put
        if engine.global_rank == 0:
            assert len(calls) == 10
            assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        train(engine, own_data(engine, 1))


# ---------------------------------------------------------------------- save_pretrained


class Config:
    """What Hugging Face's configurations have."""

    dtype = None

    def save_pretrained(self, directory: str) -> None:
        body = {"architectures": self.architectures, "dtype": self.dtype}
        Path(directory, "config.json").write_text(json.dumps(body))


@on_ranks(2)
def test_save_pretrained_cuts_files_and_writes_the_models_configuration(tmp_path):
    model = built().bfloat16()
    model.config = Config()
    with open_engine(3, model=model, **BF16) as engine:
        export.save_pretrained(engine, tmp_path, max_shard_size="4KB")
        whole = weights(engine)
        if engine.global_rank != 0:
            return
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        found: dict[str, Tensor] = {}
        for name in set(index["weight_map"].values()):
            found |= load_file(tmp_path / name)
        assert found.keys() == index["weight_map"].keys() == {*whole, "count", "blocks.0.mask"}
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
        config = json.loads((tmp_path / "config.json").read_text())
        assert config == {"architectures": ["Model"], "dtype": "bfloat16"}
        assert not hasattr(model.config, "architectures"), "the model's own is as it was"


@on_ranks(2)
def test_a_tied_weight_has_the_name_that_its_model_looks_for(tmp_path):
    model = built()
    model._tied_weights_keys = {"inp.weight": "out.weight"}
    with open_engine(3, model=model) as engine:
        export.save_pretrained(engine, tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        assert "out.weight" in found
        assert "inp.weight" not in found


class Adapters:
    """What a PEFT model adds to a module."""

    def save_pretrained(self, directory: str, state_dict: dict[str, Tensor]) -> None:
        torch.save(state_dict, Path(directory, "adapters"))


def lora(adapters: tuple[str, ...]) -> nn.Module:
    model = CASES["lora"].build()
    model.peft_config = dict.fromkeys(adapters)
    model.save_pretrained = Adapters().save_pretrained
    return model


@on_ranks(2)
def test_of_a_model_with_adapters_these_are_saved_alone(tmp_path):
    model = lora(("default",))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert 0 < len(trained) < len(list(model.parameters()))
    with open_engine(3, model=model) as engine:
        export.save_pretrained(engine, tmp_path)
        whole = weights(engine)
        if engine.global_rank == 0:
            assert_equal(
                torch.load(tmp_path / "adapters"), {n: t for n, t in whole.items() if n in trained}
            )


@on_ranks(2)
def test_units_without_adapters_are_not_gathered(tmp_path):
    with open_engine(3, model=lora(("default",))) as engine:
        trained = [u for u in engine.runtime.units if u.params[0].requires_grad]
        assert 0 < len(trained) < len(engine.runtime.units)
        recorder = engine._watch.recorder
        recorder.reset_traffic()
        export.save_pretrained(engine, tmp_path)
        gathered = recorder.payload_numel["all_gather"]
        assert gathered == sum(unit.layout.full_numel for unit in trained)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@on_ranks(2)
def test_from_pretrained_loads_what_save_pretrained_wrote(family, tmp_path):
    auto, model = hugging_face(family)
    with open_engine(3, model=model, optimizer=adamw, **BF16) as engine:
        wanted = logits(engine, family)
        export.save_pretrained(engine, tmp_path, max_shard_size="20KB")
        if engine.global_rank == 0:
            again, info = auto.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]
            assert again.dtype == torch.bfloat16
            assert (tmp_path / "generation_config.json").exists()
            assert torch.equal(logits(again.eval(), family), wanted)


@on_ranks(2)
def test_peft_loads_the_adapters_that_save_pretrained_wrote(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    _, base = hugging_face("gpt2")
    config = peft.LoraConfig(
        target_modules=["c_attn"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config)
    with open_engine(3, model=model.eval()) as engine:
        wanted = logits(engine, "gpt2")
        export.save_pretrained(engine, tmp_path)
        if engine.global_rank == 0:
            assert (tmp_path / "adapter_model.safetensors").exists()
            _, fresh = hugging_face("gpt2")
            assert not torch.allclose(logits(fresh, "gpt2"), wanted, atol=1e-3)
            again = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
            assert torch.allclose(logits(again, "gpt2"), wanted, atol=1e-6)


# ---------------------------------------------------------------------- together with a checkpoint


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(3)
def test_a_checkpoint_is_exported_to_the_weights_that_the_engine_exports(stage, tmp_path):
    engine, whole = trained_engine(stage, **BF16)
    with engine:
        engine.save_checkpoint(tmp_path)
        export.save_16bit_model(engine, tmp_path / "engine")
        if engine.global_rank == 0:
            masters = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
            assert_equal({n: t.to(whole[n].dtype) for n, t in masters.items()}, whole)
            with CheckpointReader(tmp_path / "global_step2") as saved:
                export_checkpoint(saved, tmp_path / "out", dtype="bfloat16")
            files = [tmp_path / name / "model.safetensors" for name in ("engine", "out")]
            assert_equal(*map(load_file, files))
