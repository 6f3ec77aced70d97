"""Optimizers that packages publish train under every stage as in plain PyTorch, or are refused.

All classes of the packages have a row here. ``make test-programs`` installs the packages. A row whose
package is not installed is skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from support.edge_case_models import BATCH, CASES
from support.optimizer_runs import compare, offload
from support.parity import make_batches
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.errors import UnsupportedError

CASE = CASES["mlp"]
STEPS = 4
PLACES = [
    *((stage, "") for stage in range(4)),
    *((stage, where) for stage in (1, 3) for where in ("cpu", "nvme")),
]
TRAINED = {
    "schedulefree": "AdamWScheduleFree SGDScheduleFree RAdamScheduleFree AdamWScheduleFreePaper",
    "lion_pytorch": "Lion",
    "pytorch_optimizer": "ADOPT APOLLO AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaMax AdaMod "
    "AdaPNM AdaSmooth AdamC AdamG AdamWSN Adan AggMo Ano BCOS DiffGrad DualAdam EXAdam "
    "EmoLynx EmoNavi FOCUS FTRL Fira GaLore Grams GrokFastAdamW Kate LaProp Lion MADGRAD MSVAG "
    "PAdam PID PNM QHAdam QHM RAdam SGDW SRMM ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD "
    "SignSGD SimplifiedAdEMAMix Tiger VSGD Yogi",
    "timm.optim": "AdaBelief AdamWLegacy Adan Adopt LaProp Lars Lion MADGRAD NAdamLegacy NAdamW "
    "RAdamLegacy RMSpropTF SGDW",
}
SPLIT, STATE = "other results for a matrix that is split in two", "belongs to no single element"
OBJECT = "instead of tensors and numbers"
COUNTED, FAILS = "computes '.*' from many elements", "fails on a (small|piece of a) matrix: "
REFUSED = {
    ("schedulefree", "closure"): "AdamWScheduleFreeClosure RAdamScheduleFreeClosure "
    "SGDScheduleFreeClosure",
    ("prodigyopt", STATE): "Prodigy",
    ("pytorch_optimizer", SPLIT): "ASGD A2Grad AdaGC AdaShift AdaTAM Adai AdamP AdamS Aida Amos "
    "ApolloDQN AvaGrad DAdaptSGD Fromage Gravity LARS Lamb MARS NovoGrad ROSE Ranger SCION SCIONLight "
    "SGDP SGDSaI StableAdamW StableSPAM TAM",
    ("pytorch_optimizer", STATE): "AdaFactor Adalite Alice CAME DASH EmoFact FlashAdamW Nero "
    "RACS SM3 SOAP SPAM SPlus SaRA Shampoo",
    ("pytorch_optimizer", COUNTED): "AdaNorm DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion "
    "Prodigy SWATS",
    ("pytorch_optimizer", OBJECT): "Conda ScalableShampoo",
    ("pytorch_optimizer", "wraps another optimizer"): "Magma",
    ("pytorch_optimizer", FAILS): "AdaHessian AliG LoRARite SophiaH",
    ("timm.optim", SPLIT): "AdamP Lamb Mars Muon NvNovoGrad SGDP",
    ("timm.optim", STATE): "Adafactor AdafactorBigVision",
    ("timm.optim", FAILS): "Adahessian",
}
# Copies for reading; made from a model, another optimizer, a number of steps or groups with marks; slow
# (Kron), or with a package that is not installed (DeMo).
NOT_TRIED = {
    "schedulefree": "AdamWScheduleFreeReference SGDScheduleFreeReference",
    "pytorch_optimizer": "AdaGO AdaLOMO AdaMuon AdamMini BSAM DeMo DistributedMuon FAdam "
    "FriendlySAM GSAM Kron LOMO LookSAM Lookahead Muon MuonClip NorMuon OrthoGrad PCGrad Ranger21 "
    "SAM SafeFP16Optimizer ScheduleFreeWrapper SpectralSphere TRAC WSAM",
    "timm.optim": "Lookahead",
}


def with_options(package: Any, name: str) -> Any:
    """Rows whose result depends on options: makers from parameters."""
    adamw = torch.optim.AdamW
    ranked = {"rank": 2, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}
    makers = {
        "FlashAdamW, not quantized": lambda p: package.FlashAdamW(p, lr=1e-3, quantize=False),
        "Muon, no matrix": lambda p: package.Muon([{"params": list(p), "use_muon": False}]),
        "Lion, cautious": lambda p: package.Lion(p, lr=1e-3, cautious=True),
        "GaLore, with a rank": lambda p: package.GaLore([{"params": list(p), **ranked}], lr=1e-3),
        "AdaShift, of single elements": lambda p: package.AdaShift(
            p, lr=1e-3, keep_num=3, reduce_func=None
        ),
        "AdaShift, of means": lambda p: package.AdaShift(
            p, lr=1e-3, keep_num=3, reduce_func=torch.mean
        ),
        "Ranger21": lambda p: package.Ranger21(p, num_iterations=20, lr=1e-3),
        "Lookahead": lambda p: package.Lookahead(adamw(p, lr=1e-3), k=2),
        "OrthoGrad": lambda p: package.OrthoGrad(adamw(p, lr=1e-3)),
        "ScheduleFreeWrapper": lambda p: package.ScheduleFreeWrapper(adamw(p, lr=1e-3)),
        "TRAC": lambda p: package.TRAC(adamw(p, lr=1e-3)),
        "PCGrad": lambda p: package.PCGrad(adamw(p, lr=1e-3)),
    }
    return makers[name]


TRAINED_WITH_OPTIONS = {
    "pytorch_optimizer": ["FlashAdamW, not quantized", "Muon, no matrix"],
}
WRAPS = "wraps another optimizer, AdamW"
REFUSED_WITH_OPTIONS = [
    ("pytorch_optimizer", "Lion, cautious", SPLIT),
    ("pytorch_optimizer", "GaLore, with a rank", "'projector', a GaLoreProjector"),
    ("pytorch_optimizer", "AdaShift, of means", SPLIT),
    ("pytorch_optimizer", "Ranger21", SPLIT),
    *(
        ("pytorch_optimizer", name, WRAPS)
        for name in ("Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "TRAC", "PCGrad")
    ),
    ("timm.optim", "Lookahead", WRAPS),
]


def rows(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(package, name) for package, names in table.items() for name in names.split()] + [
        (package, name) for package, names in TRAINED_WITH_OPTIONS.items() for name in names
    ]


def package_of(name: str) -> Any:
    """The package. Of timm, ``optim`` alone: the rest needs a torchvision for this torch."""
    if name == "timm.optim" and name not in sys.modules:
        spec = importlib.util.find_spec("timm")
        if spec is None:
            pytest.skip("timm is not installed")
        parent, models = ModuleType("timm"), ModuleType("timm.models")
        parent.__path__ = list(spec.submodule_search_locations or ())
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules.update({"timm": parent, "timm.models": models})
        try:
            return importlib.import_module(name)
        finally:
            del sys.modules["timm"], sys.modules["timm.models"]
    return pytest.importorskip(name)


def maker(package: str, name: str) -> Any:
    """Makes the optimizer from named parameters; a schedule-free one is in its mode for training."""
    module = package_of(package)
    has_options = name in TRAINED_WITH_OPTIONS.get(package, ())
    made: Any = with_options(module, name) if has_options else None
    cls = None if has_options else getattr(module, name)

    def make(named: Any) -> torch.optim.Optimizer:
        params = [param for _, param in named]
        optimizer: Any = cls(params, lr=1e-3) if cls else made(params)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    return make


@pytest.mark.parametrize("package", [*TRAINED, "prodigyopt"])
def test_every_class_of_the_packages_has_a_row(package):
    found = {
        name
        for name, cls in vars(package_of(package)).items()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and not cls.__module__.startswith("torch.")
    }
    tables = [TRAINED.get(package, ""), NOT_TRIED.get(package, "")]
    tables += [names for (owner, _), names in REFUSED.items() if owner == package]
    names = [name for table in tables for name in table.split()]
    assert len(set(names)) == len(names)
    assert found == set(names)


@pytest.mark.parametrize(("package", "name"), rows(TRAINED))
def test_an_element_wise_optimizer_gives_the_bits_of_plain_pytorch(package, name, tmp_path):
    make = maker(package, name)
    compare(CASE, make, PLACES, tmp_path, steps=STEPS, world=1, most=0.0)


@pytest.mark.timeout(620)
@pytest.mark.parametrize("package", TRAINED)
@on_ranks(2, timeout=600)
def test_element_wise_optimizers_train_on_two_ranks_as_in_plain_pytorch(package, tmp_path):
    for name in [n for owner, n in rows(TRAINED) if owner == package]:
        make = maker(package, name)
        compare(CASE, make, PLACES, tmp_path, steps=STEPS, world=2, most=1e-12)


def losses(engine: Any, batches: Any) -> list[float]:
    found = []
    for micros in batches:
        loss = CASE.loss(engine, micros[0][0])
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    return found


@pytest.mark.parametrize(("package", "name"), rows(TRAINED))
def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(package, name, tmp_path):
    make, batches = maker(package, name), make_batches(CASE, steps=STEPS, world=1)
    config = {"train_micro_batch_size_per_gpu": BATCH, "unit_min_numel": 1}
    for stage, where in [(1, ""), (3, "nvme")]:
        keys = offload(where, tmp_path, stage).get("zero_optimization", {})
        runs = []
        for loads in (False, True):
            model = CASE.build()
            with zeroshard.Engine(
                model,
                config={**config, "zero_optimization": {"stage": stage, **keys}},
                optimizer=make(list(model.named_parameters())),
            ) as engine:
                if loads:
                    engine.load_checkpoint(str(tmp_path / f"saved{stage}"))
                else:
                    losses(engine, batches[:2])
                    engine.save_checkpoint(str(tmp_path / f"saved{stage}"))
                runs.append(losses(engine, batches[2:]))
        assert runs[0] == runs[1], (stage, where)


def refuses(make: Any, name: str, words: str) -> None:
    model = CASE.build()
    with pytest.raises(
        UnsupportedError, match=f"{name} cannot run on sharded parameters: .*{words}"
    ):
        zeroshard.Engine(
            model,
            config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
            optimizer=make(model.parameters()),
        )


@pytest.mark.parametrize(
    ("package", "name", "words"),
    [(package, n, words) for (package, words), names in REFUSED.items() for n in names.split()],
)
def test_other_optimizers_are_refused_before_the_first_step(package, name, words):
    cls = getattr(package_of(package), name)
    refuses(lambda params: cls(params, lr=1e-3), name, words)


@pytest.mark.parametrize(("package", "name", "words"), REFUSED_WITH_OPTIONS)
def test_options_that_are_not_element_wise_are_refused(package, name, words):
    refuses(with_options(package_of(package), name), name.split(",")[0], words)
