"""Who may import what, who owns which mechanism, and what does ``import zeroshard`` cost?

The layers of ``docs``: imports point down only. A name ending in the same layer is a sibling, which
is not imported either.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zeroshard

SRC = Path(zeroshard.__file__).parent

LAYERS = [  # from the bottom
    {"errors"},
    {"core"},
    {"config", "memory"},
    {"comm", "precision", "optim", "launch"},
    {"watchdog"},
    {"offload"},
    {"zero"},
    {"checkpoint"},
    {"engine"},
    {"deepspeed"},
    {"integrations"},
    {"cli"},
    {"__init__", "compat"},  # the public names
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}

OWNERS = {  # module, or prefix of modules: the layers that may import it
    "torch.distributed": {"comm", "watchdog", "launch", "deepspeed", "testing"},
    "torch": set(HEIGHT) - {"core", "config", "errors"} | {"testing"},
    "pydantic": {"config", "checkpoint"},
    "typer": {"cli", "launch"},
    "pytest": {"testing"},
    "_pytest": {"testing"},
    "zeroshard.testing": {"testing"},
}

OPTIONAL = {
    "accelerate", "comet_ml", "deepspeed", "lightning", "matplotlib", "peft", "tensorboard", "tokenizers",
    "transformers", "wandb",
}  # fmt: skip

FILES = sorted(SRC.rglob("*.py"))


def layer_of(path: Path) -> str:
    if path.name == "__main__.py":  # ``python -m``: a command, wherever it lies
        return "cli"
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(tree: ast.Module) -> Iterator[str]:
    """Every imported module, for typing too; ``from a import b`` is both ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"line {node.lineno}: relative import; imports are absolute here"
            )
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def misplaced_imports(source: str, layer: str) -> list[str]:
    """Imports that ``layer`` may not make: owned by others, or not pointing down."""
    found = []
    for name in dict.fromkeys(imports(ast.parse(source))):
        owned = [o for o in OWNERS if name == o or name.startswith(o + ".")]
        found += [f"{name}: only {sorted(OWNERS[o])} may" for o in owned if layer not in OWNERS[o]]
        other = name.split(".")[1] if name.startswith("zeroshard.") else layer
        if layer not in ("testing", other) and HEIGHT.get(other, -1) >= HEIGHT[layer]:
            found.append(f"{name}: {layer} may only import from below")
    return found


def environment_uses(tree: ast.Module) -> list[int]:
    """Lines that touch ``os.environ`` or one of its ways in."""
    names = {"environ", "getenv", "putenv", "environb"}
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names and _is_os(node.value))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and _names(node) & names)
    ]


def _is_os(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "os"


def _names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


def hook_calls(tree: ast.Module) -> list[str]:
    """Registrations of autograd and module hooks."""
    pattern = re.compile(
        r"register_(full_)?(forward|backward|hook|prehook|post_accumulate).*|queue_callback"
    )
    return [
        f"line {node.lineno}: {node.func.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and pattern.fullmatch(node.func.attr)
    ]


def by_path(path: Path) -> str:
    return str(path.relative_to(SRC))


@pytest.mark.parametrize("path", FILES, ids=by_path)
def test_imports_point_down_and_owned_ones_stay_home(path):
    assert misplaced_imports(path.read_text(), layer_of(path)) == []


@pytest.mark.parametrize("path", FILES, ids=by_path)
def test_the_environment_is_read_at_the_border_only(path):
    lines = environment_uses(tree_of(path))
    borders = {
        "comm",
        "watchdog",
        "launch",
        "optim",
        "precision",
        "testing",
    }  # optim: CXX, the cache
    assert not lines or layer_of(path) in borders, f"lines {lines}"


@pytest.mark.parametrize("path", FILES, ids=by_path)
def test_hooks_are_registered_in_one_file(path):
    calls = hook_calls(tree_of(path))
    assert not calls or path == SRC / "zero" / "hooks.py", calls


@pytest.mark.parametrize("path", FILES, ids=by_path)
def test_every_file_says_which_question_it_answers(path):
    tree = tree_of(path)
    if tree.body:
        assert ast.get_docstring(tree)


def test_every_package_has_a_layer():
    assert {layer_of(path) for path in FILES} <= set(HEIGHT) | {"testing"}


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("zero", "import torch.distributed as dist"),
        ("zero", "from torch import distributed"),
        ("zero", "from torch.distributed.tensor import DTensor"),
        ("core", "import torch"),
        ("config", "from torch import Tensor"),
        ("comm", "from zeroshard.zero.unit import Unit"),
        ("comm", "from zeroshard import engine"),
        ("comm", "from zeroshard.precision.policy import Policy"),
        ("engine", "def f():\n    import zeroshard.testing"),
        ("config", "if TYPE_CHECKING:\n    from zeroshard.comm.env import x"),
    ],
)
def test_a_misplaced_import_is_found(layer, source):
    assert misplaced_imports(source, layer)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("comm", "import torch.distributed as dist"),
        ("zero", "import torch\nfrom zeroshard.comm.env import x\nfrom zeroshard.errors import E"),
        ("cli", "from zeroshard.launch.agent import run"),
        ("testing", "import zeroshard"),
    ],
)
def test_a_rightful_import_passes(layer, source):
    assert misplaced_imports(source, layer) == []


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "from os import environ", "import os\nos.getenv('A')"]
)
def test_a_look_at_the_environment_is_found(source):
    assert environment_uses(ast.parse(source))


PROBE = """
import json, multiprocessing, os, sys, threading
import zeroshard
bare = sorted(sys.modules)
variables = dict(os.environ)
for name in zeroshard.__all__:
    getattr(zeroshard, name)
import zeroshard.testing
import torch
print(json.dumps({
    "bare": bare,
    "modules": sorted(sys.modules),
    "threads": [t.name for t in threading.enumerate()],
    "children": len(multiprocessing.active_children()),
    "group": torch.distributed.is_initialized(),
    "cuda": torch.cuda.is_initialized(),
    "environ": {k: v for k, v in os.environ.items() if variables.get(k) != v},
    "dtype": str(torch.get_default_dtype()),
}))
"""


@pytest.fixture(scope="module")
def imported():
    """A fresh interpreter's state after importing zeroshard and touching all its public names."""
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False
    )
    assert probe.returncode == 0, probe.stderr
    return json.loads(probe.stdout)


def test_importing_zeroshard_alone_does_not_even_import_torch(imported):
    assert "torch" not in imported["bare"]


def test_importing_pulls_in_no_optional_package(imported):
    assert OPTIONAL & set(imported["modules"]) == set()


def test_importing_compiles_nothing(imported):
    compilers = {"torch._inductor", "torch._dynamo", "triton", "torch.utils.cpp_extension"}
    assert compilers & set(imported["modules"]) == set()


def test_importing_starts_nothing(imported):
    assert imported["threads"] == ["MainThread"]
    assert imported["children"] == 0
    assert not imported["group"]
    assert not imported["cuda"]


def test_importing_changes_nothing(imported):
    assert imported["environ"] == {}
    assert imported["dtype"] == "torch.float32"
