"""Imports a training script for the function that gives a plan its model, without running the script."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType

from zeroshard.errors import UsageError

ENTRY = "plan_entry"
"""The function of a script if none is named."""


def script_module(script: str, function: str) -> ModuleType:
    """The script as a module. Its ``__name__`` is not ``"__main__"``; its arguments are empty.

    Raises:
        UsageError: it cannot be read, defines no such function at its top level (then nothing of it
            runs), or raises an error.
    """
    path = Path(script)
    try:
        text, changed = path.read_text(), path.stat().st_mtime_ns
        tree = ast.parse(text, script)
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"the script {script} cannot be read: {error}") from error
    if not any(_defines(node, function) for node in tree.body):
        raise UsageError(
            f"the script {script} defines no function {function!r}. A plan does not run a script: it "
            f"calls {function}(), which takes no arguments and returns the model, or the model and a "
            "batch. Add it, or name another function as script.py:function."
        )
    return _imported(path.resolve(), changed)


def _defines(node: ast.stmt, function: str) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name == function
    targets = node.targets if isinstance(node, ast.Assign) else []
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [alias.asname or alias.name for alias in node.names]
    return function in names


@cache
def _imported(path: Path, _changed: int) -> ModuleType:
    """``_changed``: when the file was changed, so that it is imported anew after an edit."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder, arguments = str(path.parent), sys.argv
    if folder not in sys.path:  # as python does for a script, for what it imports now and later
        sys.path.insert(0, folder)
    sys.modules.setdefault(path.stem, module)
    sys.argv = [str(path)]
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        where = f"line {frames[-1].lineno} ({frames[-1].line})" if frames else "its import"
        raise UsageError(
            f"the script {path.name} cannot be imported: {type(error).__name__} at {where}: {error} "
            "A plan imports a script. Put what trains, and what reads arguments, under "
            'if __name__ == "__main__".'
        ) from error
    finally:
        sys.argv = arguments
    return module
