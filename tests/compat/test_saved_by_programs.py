"""What public programs save of a sharded model by hand: parameter by parameter, or as one part's dict.

Fine-tuning programs for vision-language models gather each adapter alone, copy it, and save the copies on
rank 0. Programs that train heads on a frozen model take the heads' ``state_dict()`` in one block, and
save it after the block. These are small programs that make the same calls in the same order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import with_deepspeed
from test_peft import base, config, folder, go_on, trained, with_adapters  # noqa: F401
from torch import nn
from zeroshard_testing import on_ranks

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")
rank_test = on_ranks(2, group=False, timeout=120)
TOKENS = torch.arange(3, 11)[None]


def copied(param: Any) -> Any:
    """A parameter's values, gathered alone if it is sharded."""
    from deepspeed import zero
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if not hasattr(param, "ds_id"):
        return param.detach().cpu().clone()
    assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with zero.GatheredParameters([param]):
        return param.data.detach().cpu().clone()


def adapters_of(model: Any) -> dict[str, Any]:
    named = {name: param for name, param in model.named_parameters() if "lora_" in name}
    return {name: copied(param) for name, param in named.items()}


def others_of(model: Any) -> dict[str, Any]:
    named = {name: param for name, param in model.named_parameters() if "lora_" not in name}
    return {name: copied(param) for name, param in named.items() if param.requires_grad}


@pytest.mark.parametrize("stage", [2, 3])
@rank_test
@with_deepspeed
def test_adapters_that_are_gathered_one_by_one_load_and_are_right(stage, base, folder):  # noqa: F811
    import deepspeed
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    deepspeed.init_distributed()
    model = with_adapters(base, stage)
    for name, param in model.named_parameters():
        if "norm" in name:  # as a projector that is trained whole
            param.requires_grad_(True)
    engine, _ = trained(model, stage)
    model.config.use_cache = True
    adapters, others = adapters_of(model), others_of(model)
    assert adapters and others
    go_on(engine, 1)  # the copies keep the values of their time
    adapters_now, others_now = adapters_of(model), others_of(model)
    assert not any(torch.equal(adapters[name], adapters_now[name]) for name in list(adapters)[1:2])
    if engine.global_rank == 0:
        model.config.save_pretrained(folder)
        model.save_pretrained(folder, state_dict=adapters_now)
        torch.save(others_now, Path(folder) / "non_lora_state_dict.bin")
    torch.distributed.barrier()
    engine.eval()
    with torch.no_grad():
        expected = engine(input_ids=TOKENS).logits.clone()
    engine.destroy()
    unset_hf_deepspeed_config()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    read = torch.load(Path(folder) / "non_lora_state_dict.bin")
    assert not loaded.load_state_dict(read, strict=False).unexpected_keys
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=TOKENS).logits, expected)


class WithHeads(nn.Module):
    """A frozen language model, and heads that predict later tokens."""

    def __init__(self, lm: Any, num: int = 2) -> None:
        super().__init__()
        self.lm = lm.requires_grad_(False)
        width, words = lm.config.hidden_size, lm.config.vocab_size
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, words))
            for _ in range(num)
        )

    def forward(self, tokens: Any) -> Any:
        with torch.no_grad():
            hidden = self.lm.model(input_ids=tokens)[0]
        return torch.stack([head(hidden) for head in self.heads])


@pytest.mark.parametrize("stage", [2, 3])
@rank_test
@with_deepspeed
def test_heads_whose_dict_is_taken_in_one_block_load_and_are_right(stage, base, folder):  # noqa: F811
    import deepspeed
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    deepspeed.init_distributed()
    alive = HfDeepSpeedConfig(config(stage))
    torch.manual_seed(3)
    model = WithHeads(AutoModelForCausalLM.from_pretrained(base))
    trained_ones = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained_ones, config=config(stage)
    )
    for at in range(3):
        tokens = (TOKENS + 5 * at + engine.global_rank) % 50
        engine.backward(engine(tokens).logsumexp(-1).mean())
        engine.step()
    heads = model.module.heads if hasattr(model, "module") else model.heads
    with deepspeed.zero.GatheredParameters(heads.parameters()):
        state = heads.state_dict()
    if engine.global_rank == 0:
        save_file(state, Path(folder) / "heads.safetensors")
        torch.save(state, Path(folder) / "heads.pt")
    torch.distributed.barrier()
    engine.eval()
    with torch.no_grad():
        expected = engine(TOKENS).clone()
    engine.destroy()
    del alive
    unset_hf_deepspeed_config()
    for read in (
        load_file(Path(folder) / "heads.safetensors"),
        torch.load(Path(folder) / "heads.pt"),
    ):
        loaded = WithHeads(AutoModelForCausalLM.from_pretrained(base))
        loaded.heads.load_state_dict(read)
        with torch.no_grad():
            assert torch.equal(loaded.eval()(TOKENS), expected)
