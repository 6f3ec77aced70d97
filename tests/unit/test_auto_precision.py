"""The dtype that "auto" resolves to in the precision sections, and the warnings about slow precisions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeroshard.config import Hardware, LoadedConfig, load_config
from zeroshard.device.accelerator import multiplies_bf16
from zeroshard.integrations.accelerate.arguments import Wishes, completed
from zeroshard.precision import hardware as native
from zeroshard.precision.hardware import of_cpu
from zeroshard.precision.policy import Policy

FAST = Hardware(bf16=True, fp16=True, because="this CPU has AMX-BF16")
SLOW = Hardware(bf16=False, fp16=False, because="this CPU has no bf16 instructions")
AUTO = {"enabled": "auto"}


def load(hardware: Hardware | None, **sections: Any) -> LoadedConfig:
    config = {"train_micro_batch_size_per_gpu": 1, **sections}
    return load_config(
        config, world_size=1, hardware=None if hardware is None else lambda: hardware
    )


def modes(loaded: LoadedConfig) -> tuple[bool, bool]:
    return loaded.config.bf16.enabled, loaded.config.fp16.enabled


@pytest.mark.parametrize("section", ["bf16", "bfloat16"])
def test_auto_is_bf16_where_the_hardware_multiplies_it_and_fp32_elsewhere(section: str) -> None:
    for hardware, expected in ((FAST, True), (SLOW, False)):
        loaded = load(hardware, **{section: AUTO})
        assert modes(loaded) == (expected, False)
        assert loaded.origins["bf16.enabled"] == f"auto: {hardware.because}"
        assert hardware.because in loaded.table()
        assert loaded.notices == () or not any(
            '"auto" was not replaced' in n for n in loaded.notices
        )


def test_an_auto_in_fp16_that_a_launcher_left_asks_for_the_same_and_never_for_a_loss_scale() -> (
    None
):
    fast = load(FAST, fp16=AUTO)
    assert modes(fast) == (True, False)
    assert fast.origins["fp16.enabled"] == "auto: bf16 is on"
    slow = load(SLOW, fp16=AUTO, bf16=AUTO)
    assert modes(slow) == (False, False)
    assert slow.origins["fp16.enabled"] == f"auto: {SLOW.because}"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"bf16": AUTO, "fp16": {"enabled": True}}, (False, True)),
        ({"fp16": AUTO, "bf16": {"enabled": True}}, (True, False)),
        ({"fp16": AUTO, "bf16": {"enabled": False}}, (False, False)),
        ({"bf16": AUTO, "torch_autocast": {"enabled": True}}, (False, False)),
        ({"bf16": AUTO, "data_types": {"param_dtype": "fp32"}}, (False, False)),
        ({"bf16": AUTO, "data_types": {"param_dtype": "bf16"}}, (True, False)),
    ],
    ids=str,
)
def test_what_the_configuration_says_decides_before_the_hardware(
    sections: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    for hardware in (FAST, SLOW):
        assert modes(load(hardware, **sections)) == expected


def test_hardware_is_not_asked_where_nothing_is_auto() -> None:
    def never() -> Hardware:
        raise AssertionError("asked")

    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    assert load_config(config, world_size=1, hardware=never).config.bf16.enabled


@pytest.mark.parametrize("word", ["no", "bf16", "fp16"])
def test_what_accelerate_was_told_wins_over_the_hardware(word: str) -> None:
    given = {"train_micro_batch_size_per_gpu": 1, "bf16": AUTO, "fp16": AUTO}
    full = completed(given, Wishes(1, 1, word))
    loaded = load_config(full, world_size=1, hardware=lambda: FAST)
    assert modes(loaded) == (word == "bf16", word == "fp16")


@pytest.mark.parametrize(
    ("flags", "environ", "because"),
    [
        ({"avx2", "avx512f", "avx512_bf16"}, {}, ""),
        ({"avx2", "amx_bf16"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, ""),
        ({"asimd", "bf16"}, {}, ""),
        ({"avx2", "avx512f"}, {}, "this CPU has no bf16 instructions"),
        (
            {"avx2", "avx512_bf16"},
            {"ONEDNN_MAX_CPU_ISA": "AVX2"},
            "ONEDNN_MAX_CPU_ISA=AVX2 disables",
        ),
        (
            {"avx2", "avx512_bf16"},
            {"ATEN_CPU_CAPABILITY": "avx2"},
            "ATEN_CPU_CAPABILITY=avx2 disables",
        ),
        (frozenset(), {}, "this CPU has no bf16 instructions"),
    ],
)
def test_a_cpu_is_known_by_its_flags_and_the_limits_of_the_environment(
    flags: set[str], environ: dict[str, str], because: str
) -> None:
    found = of_cpu(flags, environ, mkldnn=True)
    assert found.bf16 == (not because)
    assert because in found.because
    assert not of_cpu(flags, environ, mkldnn=False).bf16


def test_an_older_gpu_has_no_bf16() -> None:
    assert multiplies_bf16((9, 0), rocm=False)[0]
    assert multiplies_bf16((9, 0), rocm=True)[0]
    assert "7.5" in multiplies_bf16((7, 5), rocm=False)[1]
    assert not multiplies_bf16((7, 5), rocm=False)[0]


@pytest.mark.parametrize(
    ("policy", "remedy"),
    [
        (Policy(mode="bf16", param=torch.bfloat16), '"bf16": {"enabled": "auto"}'),
        (Policy(mode="fp16", param=torch.float16), '"fp16": {"enabled": false}'),
        (Policy(autocast=torch.bfloat16), '"torch_autocast": {"enabled": false}'),
    ],
    ids=["bf16", "fp16", "autocast"],
)
def test_who_asks_for_what_is_slow_gets_one_line_with_factor_and_remedy(
    policy: Policy,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native._tell_once.cache_clear()
    lines: list[str] = []
    monkeypatch.setattr(native.logger, "warning", lambda text, *a: lines.append(text % a))
    monkeypatch.setattr(native, "slowdown", lambda dtype: 31.4)
    for _ in range(2):
        native.tell_if_slow(policy, FAST)
        native.tell_if_slow(policy, SLOW)
        native.tell_if_slow(Policy(), SLOW)
    [line] = lines
    assert "31 times" in line
    assert SLOW.because in line
    assert remedy in line
    native._tell_once.cache_clear()


def test_the_factor_is_measured_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def takes(x: torch.Tensor) -> float:
        sizes.append(len(x))
        return len(x) ** 3 * (20e-9 if x.dtype == torch.bfloat16 else 1e-9)

    monkeypatch.setattr(native, "_product_s", takes)
    assert native.slowdown(torch.bfloat16) == pytest.approx(20)
    assert max(sizes) == 128  # 0.04 s: larger ones are not tried
