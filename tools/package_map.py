"""Draws the packages of ``zeroshard`` and their imports, for CONTRIBUTING.md.

``python tools/package_map.py [SOURCE]`` prints a Mermaid flowchart of ``SOURCE`` (default
``src/zeroshard``). A test compares the committed picture with this output.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "zeroshard"
LEFT_OUT = {"__init__", "errors", "version"}
"""Everything may import the last three, and only tests import ``testing``."""

Graph = dict[str, set[str]]
"""The packages that each package imports."""


def package_of(path: Path) -> str:
    """The package that a file belongs to, or the top-level module that it is."""
    first = path.parts[0].removesuffix(".py")
    return "cli" if path.name == "__main__.py" else first


def imports_between_packages(source: Path) -> Graph:
    """The imports between packages. Imports for type checking and inside functions count too."""
    graph: Graph = defaultdict(set)
    packages = set()
    for path in sorted(source.rglob("*.py")):
        package = package_of(path.relative_to(source))
        packages.add(package)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "zeroshard":
                names = [f"zeroshard.{alias.name}" for alias in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] == "zeroshard" and len(parts) > 1:
                    graph[package].add(parts[1])
    drawn = packages - LEFT_OUT
    return {name: (graph[name] & drawn) - {name} for name in sorted(drawn)}


def reachable(graph: Graph, start: str, without: tuple[str, str] | None = None) -> set[str]:
    """All packages that ``start`` imports, directly or not; ``without`` this direct import."""
    found: set[str] = set()
    left = [start]
    while left:
        package = left.pop()
        for other in graph[package]:
            if (package, other) != without and other not in found:
                found.add(other)
                left.append(other)
    return found


def flowchart(source: Path) -> str:
    """The packages as a Mermaid flowchart. An arrow is left out if a longer way of arrows shows it."""
    graph = imports_between_packages(source)
    lines = ["flowchart TD"]
    for name, others in graph.items():
        for other in sorted(others):
            if name in reachable(graph, other):
                lines.append(f"    {name} -. cycle .-> {other}")
            elif other not in reachable(graph, name, without=(name, other)):
                lines.append(f"    {name} --> {other}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(flowchart(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE))
