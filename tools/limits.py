"""Checks the limits of the code of ``zeroshard`` and ``zeroshard_testing``; ``make lint`` runs it.

    python tools/limits.py

Complexity is cyclomatic complexity as radon counts it: boolean operators, comprehensions and assertions
count too. A function inside another one counts for the outer one. No function is excepted from the
limits of complexity and length. Parameters are limited where this project chooses them: not of names
in docs/api.md or docs/compat.md (DeepSpeed's), and not of commands, whose parameters are options.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path

from radon.complexity import cc_visit
from radon.visitors import Class, Function

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "zeroshard"
TEST_KIT = ROOT / "testing" / "src" / "zeroshard_testing"

MOST_COMPLEXITY = 15
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 10
MOST_FILE_LINES = 500

LONGER_FILES: Mapping[str, int] = {
    "watchdog/watchdog.py": 597,
    "zero/gradients.py": 560,  # these four run in every step: a seam must not cost a call there
    "zero/hooks.py": 785,
    "zero/sharded_parameter.py": 680,
    "zero/unit.py": 757,
}
"""Files that are not yet within the limit, with their lines. A number may only become smaller."""

WIDER: Mapping[str, int] = {
    "config/resolve.py:load_config": 12,
    "data/data_loader.py:ResumableLoader.__init__": 11,
    "optim/triton_kernels.py:_block": 14,  # a kernel takes each tensor and each number by itself
    "optim/triton_kernels.py:update": 13,
    "zero/mesh_norm.py:MeshExchange.__init__": 12,
    "zero/optimizer.py:ShardedOptimizer.__init__": 13,
    "zero/unit.py:Unit.__init__": 14,
}
"""Functions of the project that may have more parameters, with how many."""


def too_complex(source: str) -> Iterator[str]:
    """A line for each function above :data:`MOST_COMPLEXITY`."""
    for each in _functions_of(cc_visit(source)):
        complexity = _complexity(each)
        if complexity > MOST_COMPLEXITY:
            yield (
                f"{each.lineno}: {each.fullname} has the complexity {complexity}, more than "
                f"{MOST_COMPLEXITY}. Make a decision a function of its own, or name a step."
            )


def _functions_of(blocks: Collection[Function | Class]) -> Iterator[Function]:
    """The functions and methods, with those of classes inside classes, each once."""
    for block in blocks:
        if isinstance(block, Class):
            yield from block.methods
            yield from _functions_of(block.inner_classes)
        elif not block.is_method:  # methods are in their class
            yield block


def _complexity(function: Function) -> int:
    """That of a function and of the functions inside it, which radon leaves out."""
    own: int = function.complexity
    return own + sum(map(_complexity, function.closures))


def too_long(source: str) -> Iterator[str]:
    """A line for each function above :data:`MOST_FUNCTION_LINES`, from ``def`` to its end."""
    for name, node in _definitions(ast.parse(source)):
        assert node.end_lineno is not None  # parsed from text
        lines = node.end_lineno - node.lineno + 1
        if lines > MOST_FUNCTION_LINES:
            yield f"{node.lineno}: {name} has {lines} lines, more than {MOST_FUNCTION_LINES}."


def too_wide(source: str, path: str, public: Set[str]) -> Iterator[str]:
    """A line for each function above :data:`MOST_PARAMETERS`. ``public``: names whose users expect them.

    ``path``: of the file; parameters of functions of ``cli`` are options of commands.
    """
    for name, node in _definitions(ast.parse(source)):
        most = WIDER.get(f"{path}:{name}", MOST_PARAMETERS)
        count = len(_parameters(node))
        is_public = path.startswith("cli/") or not public.isdisjoint(name.split("."))
        if count > most and not is_public:
            yield f"{node.lineno}: {name} has {count} parameters, more than {most}."


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of the parameters, without ``self`` and ``cls``."""
    own = node.args
    several = [each for each in (own.vararg, own.kwarg) if each is not None]
    found = [each.arg for each in (*own.posonlyargs, *own.args, *own.kwonlyargs, *several)]
    return found[1:] if found[:1] in (["self"], ["cls"]) else found


def _definitions(
    tree: ast.AST, within: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name, also those inside of others."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{within}{node.name}", node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _definitions(node, f"{within}{node.name}.")
        else:
            yield from _definitions(node, within)


def too_many_lines(source: str, path: str) -> Iterator[str]:
    """A line if a file is above :data:`MOST_FILE_LINES`."""
    lines, most = source.count("\n"), LONGER_FILES.get(path, MOST_FILE_LINES)
    if lines > most:
        yield f"1: the file has {lines} lines, more than {most}. Let a file answer one question."


def public_names(pages: Collection[str]) -> frozenset[str]:
    """The last parts of the names that pages list, in backquotes or as objects of Sphinx.

    >>> sorted(public_names(["`deepspeed.zero` `Init`", ".. autofunction:: zeroshard.initialize"]))
    ['Init', 'initialize', 'zero']
    """
    listed = re.compile(r"(?:`|:: )(?:\w+\.)*(\w+)(?:`|$)", re.MULTILINE)
    return frozenset(name for page in pages for name in listed.findall(page))


def findings(path: str, source: str, public: Set[str]) -> list[str]:
    """What is above a limit in one file, as lines of a report."""
    found = [
        *too_many_lines(source, path),
        *too_complex(source),
        *too_long(source),
        *too_wide(source, path, public),
    ]
    return [f"{path}:{line}" for line in found]


def main() -> int:
    """Print what is above a limit. The exit code is 1 if something is."""
    docs = ROOT / "docs"
    public = public_names([(docs / name).read_text() for name in ("api.md", "compat.md")])
    found = [
        line
        for source in (SOURCE, TEST_KIT)
        for path in sorted(source.rglob("*.py"))
        for line in findings(path.relative_to(source).as_posix(), path.read_text(), public)
    ]
    print("\n".join(found) or "limits: all functions and files are within them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
