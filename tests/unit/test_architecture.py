"""The rules of the architecture: layers of imports, owners of mechanisms, the cost of ``import
zeroshard``.

Imports point to a lower layer only. Packages of one layer do not import each other. Each rule is one
test, which reports every file that breaks it.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import package_map
import pytest

import zeroshard
from zeroshard.watchdog.stacks import OWN_FILES

pytestmark = pytest.mark.smoke

SRC = Path(zeroshard.__file__).parent
ROOT = Path(__file__).parents[2]

LAYERS = [  # from the bottom
    {"errors", "version"},
    {"core"},
    {"config", "memory"},
    {"device", "run"},
    {"comm", "precision", "optim"},
    {"watchdog"},
    {"session", "metrics"},
    {"offload", "experts"},
    {"zero"},
    {"checkpoint", "parallel", "sequence"},
    {"data"},
    {"engine"},
    {"launch"},
    {"doctor", "planner", "report"},
    {"deepspeed"},
    {"integrations"},
    {"cli"},
    {"__init__", "compat"},  # the public names
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}

OWNERS = {  # module, or prefix of modules: the layers that may import it
    "torch.distributed": {
        "comm",
        "watchdog",
        "session",
        "launch",
        "experts",
        "parallel",
        "sequence",
        "deepspeed",
        "doctor",
    },
    "torch": set(HEIGHT) - {"core", "config", "errors", "version"},
    "pydantic": {"config", "checkpoint"},
    "typer": {"cli", "launch"},
    "pytest": set(),
    "_pytest": set(),
    "zeroshard_testing": set(),
}

DEVICE_HOMES = (
    "device/",
    "deepspeed/device.py",  # the API of DeepSpeed's accelerator is that of torch.cuda
)
"""Files, or folders, that may use torch's device interfaces."""
DEVICE_INTERFACES = (
    "cuda",
    "accelerator",
    "xpu",
    "mps",
    "mtia",
    "Stream",
    "Event",
    "get_device_module",
)
ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "npu", "mtia")

OPTIONAL = {
    "accelerate", "comet_ml", "deepspeed", "lightning", "matplotlib", "peft", "tensorboard", "tokenizers",
    "transformers", "wandb",
}  # fmt: skip


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """All files, parsed. Not when this file is imported: every process that collects tests imports it."""
    return {path: ast.parse(path.read_text(), str(path)) for path in sorted(SRC.rglob("*.py"))}


def layer_of(path: Path) -> str:
    if path.name == "__main__.py":  # ``python -m``: a command, in any package
        return "cli"
    return path.relative_to(SRC).parts[0].removesuffix(".py")


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


def misplaced_imports(tree: ast.Module, layer: str) -> list[str]:
    """Imports that ``layer`` may not make: owned by others, or not pointing down."""
    found = []
    for name in dict.fromkeys(imports(tree)):
        owned = [o for o in OWNERS if name == o or name.startswith(o + ".")]
        found += [f"{name}: only {sorted(OWNERS[o])} may" for o in owned if layer not in OWNERS[o]]
        other = name.split(".")[1] if name.startswith("zeroshard.") else layer
        if layer != other and HEIGHT.get(other, -1) >= HEIGHT[layer]:
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


def device_questions(tree: ast.Module) -> list[str]:
    """Uses of torch's device interfaces, and questions which kind of device something is on."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            node.attr in ("is_cuda", "is_xpu", "is_mps", "record_stream")
            or (_is_named(node.value, "torch") and node.attr in DEVICE_INTERFACES)
        ):
            found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) and side.value in ACCELERATORS for side in sides):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    names = [f"torch.{name}" for name in DEVICE_INTERFACES]
    return found + [name for name in imports(tree) if name.startswith(tuple(names))]


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> modules of ``trees`` that it imports, anywhere in the file.

    ``from a import b`` is an edge to the module ``a.b`` if there is one, else to ``a``.
    """
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & trees.keys()
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                whole = set() if full <= trees.keys() else {str(node.module)}
                graph[name] |= (full | whole) & trees.keys()
        graph[name].discard(name)  # a package's ``from package import module``
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, in the order in which they import each other; empty if none."""
    done: set[str] = set()

    def search(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return trail[trail.index(name) :]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if cycle := search(other, [*trail, name]):
                return cycle
        done.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := search(name, []))), [])


def documented_layers(text: str) -> list[set[str]]:
    """The layers that CONTRIBUTING lists, from the bottom."""
    block = text.partition("imports point down only:\n\n")[2].partition("\n\n")[0]
    rows = [re.split(r"\s{2,}", line.strip())[0] for line in block.splitlines()]
    return [set(row.split(", ")) for row in reversed(rows)]


def offenders(check: Callable[[Path, ast.Module], object]) -> dict[str, object]:
    """File -> what ``check`` found in it, for every file in which it found something."""
    found = {str(path.relative_to(SRC)): check(path, tree) for path, tree in trees().items()}
    return {path: problems for path, problems in found.items() if problems}


def test_the_picture_of_the_packages_is_current():
    picture = (ROOT / "CONTRIBUTING.md").read_text().split("```mermaid\n")[1].split("```")[0]
    assert picture == package_map.flowchart(SRC), "python tools/package_map.py prints the picture"


def test_imports_point_down_and_owned_ones_stay_home():
    assert offenders(lambda path, tree: misplaced_imports(tree, layer_of(path))) == {}


def test_the_environment_is_read_at_the_border_only():
    borders = {
        "comm",
        "device",
        "doctor",
        "run",
        "session",
        "watchdog",
        "launch",
        "memory",
        "optim",
        "precision",
    }  # memory: settings of malloc; optim: CXX
    found = offenders(lambda path, tree: layer_of(path) not in borders and environment_uses(tree))
    assert found == {}


def test_a_stall_shows_no_line_of_a_package_that_runs_in_ranks():
    """Ranks run nothing of the others while they wait, or run their program in them."""
    shown = {path.parent.name for path in SRC.glob("*/__init__.py") if not _is_own(path)}
    assert shown == {"cli", "config", "core", "doctor", "launch", "planner", "report"}


def _is_own(path: Path) -> bool:
    return str(path).startswith(OWN_FILES)


def test_hooks_are_registered_in_one_file():
    home = SRC / "zero" / "hooks.py"
    assert offenders(lambda path, tree: path != home and hook_calls(tree)) == {}


def test_only_one_package_knows_the_kinds_of_devices():
    def misplaced(path: Path, tree: ast.Module) -> list[str]:
        where = path.relative_to(SRC).as_posix()
        return [] if where.startswith(DEVICE_HOMES) else device_questions(tree)

    assert offenders(misplaced) == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.cuda.synchronize()", True),
        ("event = torch.Event()", True),
        ("from torch.cuda import Stream", True),
        ("import torch.cuda.nvtx", True),
        ("if x.is_cuda: pass", True),
        ("y = device.type == 'cuda'", True),
        ("y = 'cuda' != tensor.device.type", True),
        ("x.record_stream(stream)", True),
        ("y = device.type == 'cpu'", False),
        ("y = torch.device('cuda', 0)", False),
    ],
)
def test_a_question_for_the_kind_of_device_is_found(source, found):
    assert bool(device_questions(ast.parse(source))) is found


def test_every_file_says_which_question_it_answers():
    assert offenders(lambda path, tree: tree.body and not ast.get_docstring(tree)) == {}


UNPLAIN = (
    r"the own|nobody|whoever|is through|for ever|not there yet|that much|of old|at hand|luggage|herd|"
    r"crowd|speaks?|rests (?:in|on|there)|(?:that|to) rest|(?<!here )(?:is|are) no(?! longer| more)"
)


def unplain_texts(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and words of string literals, other than docstrings, that have plainer words."""
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        (node.lineno, found)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        for found in re.findall(rf"\b(?:{UNPLAIN})\b", node.value, re.IGNORECASE)
    ]


def test_messages_are_in_plain_words():
    assert offenders(lambda path, tree: unplain_texts(tree)) == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("'x is no tensor'", True),
        ("f'{x} is no {y}'", True),
        ("'state rests on disk'", True),
        ("'there is no tensor'", False),
        ("'There are no tensors, and it is no longer used; the rest follows'", False),
    ],
)
def test_unplain_words_are_found(text, found):
    assert bool(unplain_texts(ast.parse(f"x = {text}"))) is found


def test_every_package_has_a_layer():
    assert {layer_of(path) for path in trees()} <= set(HEIGHT)


def test_contributing_lists_the_layers():
    there = {layer_of(path) for path in trees()}
    layers = [names & there for names in LAYERS if names & there]
    assert documented_layers((ROOT / "CONTRIBUTING.md").read_text()) == layers


def test_modules_do_not_import_each_other_in_a_cycle():
    """Imports for type checking and imports inside functions count too."""
    graph = import_graph({module_of(path): tree for path, tree in trees().items()})
    assert cycle_in(graph) == []


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
        ("engine", "def f():\n    import zeroshard_testing"),
        ("config", "if TYPE_CHECKING:\n    from zeroshard.comm.env import x"),
    ],
)
def test_a_misplaced_import_is_found(layer, source):
    assert misplaced_imports(ast.parse(source), layer)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("comm", "import torch.distributed as dist"),
        ("zero", "import torch\nfrom zeroshard.comm.env import x\nfrom zeroshard.errors import E"),
        ("cli", "from zeroshard.launch.agent import run"),
    ],
)
def test_a_rightful_import_passes(layer, source):
    assert misplaced_imports(ast.parse(source), layer) == []


@pytest.mark.parametrize(
    "source",
    [
        "import p.b",
        "from p import b",
        "from p.b import name",
        "def f():\n    from p.b import name",
        "if TYPE_CHECKING:\n    from p.b import name",
    ],
)
def test_an_import_cycle_is_found(source):
    graph = import_graph({"p.a": ast.parse(source), "p.b": ast.parse("from p import a")})
    assert cycle_in(graph) == ["p.a", "p.b"]


def test_two_ways_to_one_module_are_no_cycle():
    sources = {"p.a": "from p import b, c", "p.b": "from p import d", "p.c": "from p import d"}
    trees = {name: ast.parse(source) for name, source in {**sources, "p.d": ""}.items()}
    assert cycle_in(import_graph(trees)) == []


def test_layers_are_read_from_the_bottom():
    text = "imports point down only:\n\n    b, c   two  words\n    a      one\n\nRest"
    assert documented_layers(text) == [{"a"}, {"b", "c"}]


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


SAME_IDEA = {
    "Event",  # of a device; the pretended one of the test kit
    "export.py",  # weights for other libraries: of an engine, and of a checkpoint
    "GatheredParameters",  # DeepSpeed's name for ours, with its arguments
    "Init",
    "LossScaler",
    "OptimizerStep",  # of an engine; DeepSpeed's name of the instruction to do one
}
"""Names of classes in several files that stand for one idea. Private classes belong to their file."""

SHOWN_ELSEWHERE = {"cli", "compat", "deepspeed", "integrations"}
"""Their modules may be named for the module that they show, forward to or imitate."""


def repeated_names(sources: dict[str, str]) -> list[str]:
    """Public classes and modules with one name in several files."""
    homes: dict[str, list[str]] = {}
    for file, source in sources.items():
        package, _, name = file.rpartition("/")
        if name not in ("__init__.py", "__main__.py") and not SHOWN_ELSEWHERE & set(
            package.split("/")
        ):
            homes.setdefault(name, []).append(file)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                homes.setdefault(node.name, []).append(file)
    return [
        f"{name}: {', '.join(sorted(found))}"
        for name, found in sorted(homes.items())
        if len(found) > 1 and name not in SAME_IDEA
    ]


def test_one_name_has_one_meaning():
    sources = {str(path.relative_to(SRC)): path.read_text() for path in SRC.rglob("*.py")}
    assert repeated_names(sources) == []


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"core/a.py": "class Span: ...", "optim/b.py": "class Span: ..."}, 1),
        ({"core/plan.py": "", "launch/plan.py": ""}, 1),
        ({"core/plan.py": "class _Part: ...", "cli/plan.py": "class _Part: ..."}, 0),
        ({"zero/init.py": "class Init: ...", "deepspeed/init.py": "class Init: ..."}, 0),
    ],
)
def test_a_repeated_name_is_found(sources, found):
    assert len(repeated_names(sources)) == found
