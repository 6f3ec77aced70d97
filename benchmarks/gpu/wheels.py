"""Collects the packages that a machine without network access lacks, and installs them there.

    python benchmarks/gpu/wheels.py collect wheels --python 3.12    # here, with network access
    python benchmarks/gpu/run.py --wheels wheels                    # there; installs them itself

The other machine must have Python, PyTorch for its GPU, and numpy. Nothing here imports a package that is
not part of Python, because this file runs before anything is installed.
"""

from __future__ import annotations

import argparse
import email
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("pydantic", "rich", "safetensors", "tomli", "typer")
"""What ZeroShard requires besides PyTorch and numpy, which the other machine must have. Only Python 3.10
needs tomli."""
PEERS = ("deepspeed", "einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo", "tqdm")
"""DeepSpeed and what it requires besides those. It has no wheel, so that one is built here."""
SOURCES = frozenset({"deepspeed"})
PRESENT = frozenset({"torch", "numpy"})
GLIBC = (17, 24, 27, 28, 31, 34, 35)
"""Minor versions of glibc 2 whose wheels may be taken; pip compares each exactly."""
MIB = 2**20


def absent(version: tuple[int, int] = sys.version_info[:2]) -> list[str]:
    """What ZeroShard requires and this Python, of release ``version``, does not find."""
    names = [name for name in NEEDED if name != "tomli" or version < (3, 11)]
    return [name for name in names if importlib.util.find_spec(name) is None]


def how_to_get(names: Sequence[str]) -> str:
    """One line: which packages are missing, and how to carry them here."""
    python = "{}.{}".format(*sys.version_info[:2])
    return (
        f"ZeroShard needs {', '.join(names)}, which this Python does not find. Where there is network "
        f"access: python benchmarks/gpu/wheels.py collect wheels --python {python}. Then here: "
        "python benchmarks/gpu/run.py --wheels wheels."
    )


def platforms(machine: str, newest: int = GLIBC[-1]) -> list[str]:
    """The wheel platforms that a Linux machine with glibc 2.``newest`` accepts, newest first.

    >>> platforms("x86_64", 24)
    ['manylinux_2_24_x86_64', 'manylinux_2_17_x86_64', 'manylinux2014_x86_64', 'linux_x86_64']
    """
    names = [f"manylinux_2_{minor}" for minor in reversed(GLIBC) if minor <= newest]
    return [f"{name}_{machine}" for name in (*names, "manylinux2014", "linux")]


def download_command(folder: Path, names: Sequence[str], python: str, machine: str) -> list[str]:
    """pip's command that downloads wheels of ``names`` for another Python. It takes no sources."""
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", "--python-version", python, "--implementation", "cp"),
        *(word for name in platforms(machine) for word in ("--platform", name)),
        *("-c", str(ROOT / "constraints.txt"), "-d", str(folder), *names),
    ]


def required_by(wheel: Path, python: str) -> list[str]:
    """The requirements of a wheel without its extras, as ``name`` and version: ``rich>=12.3``."""
    marked = [text.partition(";") for text in metadata_of(wheel).get_all("Requires-Dist", [])]
    return [
        re.sub(r"\s|\[.*?\]", "", needed)
        for needed, _, marker in marked
        if holds(marker.strip(), python)
    ]


def holds(marker: str, python: str) -> bool:
    """Whether a requirement with this marker counts on Linux with CPython ``python``.

    >>> [holds(text, "3.12") for text in ("", 'extra == "x"', "python_version < '3.11'")]
    [True, False, False]
    """
    if not marker:
        return True
    from pip._vendor.packaging.markers import Marker

    release = {"python_version": python, "python_full_version": f"{python}.0"}
    return Marker(marker).evaluate({
        "extra": "", **release, "sys_platform": "linux", "platform_system": "Linux",
        "os_name": "posix", "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    })  # fmt: skip


def metadata_of(wheel: Path) -> email.message.Message:
    """The METADATA file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def plain_name(requirement: str) -> str:
    """The normalized name of a package in a requirement or in the name of a wheel.

    >>> plain_name("pydantic_core==2.41"), plain_name("Py_CpuInfo-9.0-py3-none-any.whl")
    ('pydantic-core', 'py-cpuinfo')
    """
    (name,) = re.findall(r"^(?:[A-Za-z0-9_.]|-(?!\d))+", requirement)
    return re.sub(r"[-_.]+", "-", name).lower()


def collect(folder: Path, names: Iterable[str], python: str, machine: str) -> list[Path]:
    """Download wheels of ``names`` and of all that they require into ``folder``.

    Raises:
        subprocess.CalledProcessError: pip failed; it has printed why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    have = {plain_name(wheel.name): wheel for wheel in folder.glob("*.whl")}
    wanted = list(names)
    while wanted:
        request = wanted.pop(0)
        name = plain_name(request)
        if name in PRESENT:
            continue
        if name not in have:
            have[name] = _fetch(folder, request, python, machine)
            wanted += required_by(have[name], python)
    return sorted(have.values())


def _fetch(folder: Path, request: str, python: str, machine: str) -> Path:
    before = {*folder.glob("*.whl")}
    if plain_name(request) in SOURCES:
        command = [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--no-build-isolation", "-c", str(ROOT / "constraints.txt"), "-w", str(folder), request),
        ]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    else:
        subprocess.run(download_command(folder, [request], python, machine), check=True)
    (wheel,) = {*folder.glob("*.whl")} - before
    return wheel


def listing(wheels: Iterable[Path]) -> str:
    """One line per wheel with its size, and the sum."""
    sizes = {wheel.name: wheel.stat().st_size for wheel in wheels}
    lines = [f"{nbytes / MIB:8.2f} MiB  {name}" for name, nbytes in sizes.items()]
    return "\n".join([*lines, f"{sum(sizes.values()) / MIB:8.2f} MiB  {len(sizes)} wheels"])


def install(folder: Path, target: Path) -> None:
    """Install all wheels of ``folder`` into ``target``, without network access.

    Raises:
        FileNotFoundError: there is no wheel.
        subprocess.CalledProcessError: pip failed; it has printed why.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise FileNotFoundError(f"{folder} has no wheels. Collect them first: see {__file__}.")
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
        *("--no-compile", "--upgrade", "--target", str(target), *map(str, wheels)),
    ]
    subprocess.run(command, check=True)


def activate(folder: Path, target: Path) -> None:
    """Install ``folder`` into ``target``, for this process and for those that it starts."""
    install(folder, target)
    sys.path.insert(0, str(target))
    paths = [str(target), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def main() -> int:
    """Collect or install. Returns the exit code: 1 if the wheels are larger than the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    get = actions.add_parser("collect", help="download wheels; needs network access")
    get.add_argument("folder", type=Path)
    get.add_argument("--python", default="3.12", help="the other machine's version")
    get.add_argument("--machine", default="x86_64", help="the other machine's processor")
    get.add_argument("--without-peers", action="store_true", help="without DeepSpeed")
    get.add_argument("--limit-mib", type=float, default=64.0, help="largest sum of their sizes")
    put = actions.add_parser("install", help="install them; needs no network access")
    put.add_argument("folder", type=Path)
    put.add_argument("--target", type=Path, required=True)
    given = parser.parse_args()
    if given.action == "install":
        install(given.folder, given.target)
        print(f"export PYTHONPATH={given.target}:$PYTHONPATH")
        return 0
    names = NEEDED if given.without_peers else NEEDED + PEERS
    wheels = collect(given.folder, names, given.python, given.machine)
    print(listing(wheels))
    if sum(wheel.stat().st_size for wheel in wheels) <= given.limit_mib * MIB:
        return 0
    print(f"more than {given.limit_mib:g} MiB: try --without-peers", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
