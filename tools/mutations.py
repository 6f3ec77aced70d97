"""Puts one mistake after another into a copy of the package, and checks that `make test` finds each.

    python tools/mutations.py                    # all of tools/mutation_list.py; takes half an hour
    python tools/mutations.py --jobs 2 shm-      # those whose names begin so
    python tools/mutations.py --list

A mutation names its witness: tests that `make test` runs, one of which fails with the mistake. The tool
works in a copy of the repository with an environment of its own, so that new interpreters and ranks
import the changed package too. Told apart are witnesses that fail without the mistake as well, and those
that do not end within the limit. The exit code is 1 unless every mistake is found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
FOUND = "found"


@dataclass(frozen=True)
class WitnessRun:
    """One run of a witness. ``code``: pytest's exit code; None: it was killed at the limit."""

    code: int | None
    seconds: float
    output: str

    @property
    def failed_test(self) -> str:
        """The first test that failed."""
        names = re.findall(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)
        return names[0] if names else ""


def mutated(text: str, mutation: Mutation) -> str:
    """``text`` of the file with the mistake.

    Raises:
        ValueError: what is to be replaced does not occur exactly once.
    """
    times = text.count(mutation.old)
    if times != 1:
        raise ValueError(f"{mutation.name}: its text occurs {times} times in {mutation.path}")
    return text.replace(mutation.old, mutation.new)


class Copy:
    """A copy of the repository with an environment that imports the package from it.

    Installed packages are links to those of this interpreter; only what names a place is written anew.
    """

    _stamp_s = int(time.time())

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (source := ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder / name)
        self._make_environment(Path(sys.prefix), folder / ".venv")
        asked = [str(self.python), "-c", "import zeroshard; print(zeroshard.__file__)"]
        found = subprocess.run(asked, cwd="/", check=True, capture_output=True, text=True).stdout
        if not Path(found).is_relative_to(folder):
            raise RuntimeError(f"the copy in {folder} imports {found.strip()}")

    @property
    def python(self) -> Path:
        """The interpreter of the copy's environment."""
        return self.folder / ".venv/bin/python"

    def _make_environment(self, old: Path, new: Path) -> None:
        packages = Path(f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")
        (new / packages).mkdir(parents=True)
        (new / "bin").mkdir()
        shutil.copy(old / "pyvenv.cfg", new)
        for entry in (old / packages).iterdir():
            if not entry.name.startswith("__editable__"):
                (new / packages / entry.name).symlink_to(entry)
        (new / packages / "copy.pth").write_text(
            f"{self.folder / 'src'}\n{self.folder / 'testing/src'}\n"
        )
        for entry in (old / "bin").iterdir():
            place = new / "bin" / entry.name
            if entry.is_symlink():
                place.symlink_to(os.readlink(entry))
            elif (head := entry.read_bytes()).startswith(b"#!"):
                place.write_bytes(head.replace(str(old).encode(), str(new).encode()))
                place.chmod(0o755)

    def write(self, path: str, text: str) -> None:
        """Replace a file, at a new second: a compiled file is valid for one time and size."""
        file = self.folder / path
        file.write_text(text)
        Copy._stamp_s += 1
        os.utime(file, (Copy._stamp_s, Copy._stamp_s))

    def run(self, witness: str, limit_s: float) -> WitnessRun:
        """Run the tests of ``witness`` that `make test` runs, up to the first failure."""
        command = [str(self.python), "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
        command += shlex.split(witness)
        env = {name: value for name, value in os.environ.items() if name != "ZEROSHARD_TEST_ALL"}
        begin_s = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env={"OMP_NUM_THREADS": "1", **env},
            )  # fmt: skip
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            return WitnessRun(code, time.monotonic() - begin_s, output.read())


class Judge:
    """Judges mutations, each in a free copy."""

    def __init__(self, copies: Sequence[Copy], limit_s: float, *, shows: bool) -> None:
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            self._free.put(copy)
        self._limit_s, self._shows = limit_s, shows
        self._unchanged: dict[str, int | None] = {}  # exit code without mutation, by witness
        self._lock = threading.Lock()

    def judge(self, mutation: Mutation) -> str:
        """Run the witness with and, if it failed, without the mistake. Prints and returns the verdict."""
        copy, path = self._free.get(), mutation.file
        text = (ROOT / path).read_text()
        try:
            copy.write(path, mutated(text, mutation))
            found = copy.run(mutation.witness, self._limit_s)
            copy.write(path, text)
            verdict = self._verdict(copy, mutation, found)
        finally:
            copy.write(path, text)
            self._free.put(copy)
        print(
            f"{verdict:<28} {found.seconds:4.0f} s  {mutation.name}  {found.failed_test}",
            flush=True,
        )
        if self._shows:
            print(found.output, flush=True)
        return verdict

    def _verdict(self, copy: Copy, mutation: Mutation, found: WitnessRun) -> str:
        if found.code is None:
            return "KILLED AT THE LIMIT"
        if found.code == 0:
            return "NOT FOUND"
        if found.code != 1:  # a mistake that nothing can be collected with is not a subtle one
            return f"NO TEST RAN (exit code {found.code})"
        with self._lock:
            known = mutation.witness in self._unchanged
        if not known:
            code = copy.run(mutation.witness, self._limit_s).code
            with self._lock:
                self._unchanged[mutation.witness] = code
        return FOUND if self._unchanged[mutation.witness] == 0 else "FAILS WITHOUT IT TOO"


def main() -> int:
    """Judge the chosen mutations."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="how many witnesses run at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one witness")
    parser.add_argument(
        "--list", action="store_true", help="print the mutations and their witnesses"
    )
    parser.add_argument("--show", action="store_true", help="print what the witnesses print")
    given = parser.parse_args()
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not given.names or mutation.name.startswith(tuple(given.names))
    ]
    if given.list:
        for mutation in chosen:
            print(f"{mutation.name}  {mutation.path}  {mutation.witness}")
        return 0
    with tempfile.TemporaryDirectory(prefix="zeroshard-mutations-") as folder:
        copies = [Copy(Path(folder) / str(number)) for number in range(max(1, given.jobs))]
        judge = Judge(copies, given.limit, shows=given.show)
        with ThreadPoolExecutor(len(copies)) as threads:
            verdicts = Counter(threads.map(judge.judge, chosen))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    print(f"{len(chosen)} mutations: {counts}")
    return 0 if chosen and verdicts[FOUND] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
