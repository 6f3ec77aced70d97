"""Compares ZeroShard with DDP, FSDP2 and DeepSpeed on CPU ranks of this machine.

    python benchmarks/run.py                  # protocols A1 to A10, about 15 minutes
    python benchmarks/run.py --only a1 a4     # some of them
    python benchmarks/run.py --smoke          # a tiny version of everything

The group ``bench`` of pyproject.toml has the peers; see benchmarks/README.md. A line that cannot run
here is reported with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def protocols(disk: str) -> dict[str, Callable[..., dict[str, Any]]]:
    """Every protocol by its key, in the order of the report. ``disk``: a directory on a disk."""
    import checkpoints
    import collectives
    import memory
    import offload
    from protocols import COMPARISONS

    runs: dict[str, Callable[..., dict[str, Any]]] = {c.key: c.run for c in COMPARISONS}
    runs |= {"a3": partial(collectives.run, ranks=2), "a3-4": partial(collectives.run, ranks=4)}
    runs |= {"a5": memory.run}
    runs["a9"] = partial(offload.run, directory=disk)
    runs["a9-disk"] = partial(offload.run_disk, directory=disk)
    runs["a10"] = partial(checkpoints.run, directory=disk)
    return dict(sorted(runs.items(), key=lambda item: int(item[0].partition("-")[0][1:])))


def measure(
    chosen: dict[str, Callable[..., dict[str, Any]]], *, smoke: bool, rounds: int | None
) -> dict[str, Any]:
    """Run the chosen protocols one after the other."""
    import machine
    import stream
    from protocols import COMPUTE, HARDWARE
    from targets import FORMAT

    began, nbytes = time.monotonic(), 2**24 if smoke else 2**28

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)

    result: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "smoke": smoke,
        "unit": "milliseconds; cpu is process time, mean over ranks; wall is the slowest rank's",
        "machine": machine.describe(),
        "compute": COMPUTE,
        "compute_because": HARDWARE.because,
        "stream_gb_per_s": stream.measure(nbytes),
        "stream_gb_per_s_of_2_threads": stream.measure(nbytes, threads=2),
        "protocols": {},
    }
    say(f"the GPT is trained in {COMPUTE}: {HARDWARE.because}")
    for key, run in chosen.items():
        say(f"{key} begins")
        result["protocols"][key] = run(partial(_tell, say, key), smoke=smoke, rounds=rounds)
        result["protocols"][key]["load_average"] = [round(x, 2) for x in os.getloadavg()]
    result["seconds"] = round(time.monotonic() - began)
    return result


def _tell(say: Callable[[str], None], key: str, text: str) -> None:
    say(f"{key}: {text}")


def output_path(given: argparse.Namespace) -> Path | None:
    """The file of the result. Only a whole run gets the name of a whole run. A smoke run has no file
    unless the user names one."""
    if given.out or given.smoke:
        out: Path | None = given.out
        return out
    day, parts = datetime.date.today().isoformat(), "".join(f"-{key}" for key in given.only)
    return RESULTS / f"{day}-cpu{parts}.json"


def main() -> None:
    """Parse the arguments, measure, write the result and print it."""
    families = sorted({key.partition("-")[0] for key in protocols("")})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], choices=families, help="some protocols")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; no file unless --out")
    parser.add_argument(
        "--rounds", type=int, help="turns of every line; the default depends on the protocol"
    )
    parser.add_argument(
        "--disk", default=tempfile.gettempdir(), metavar="DIR",
        help="for A9 and A10, a directory on a disk; default: the system's temporary directory",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<date>-cpu.json")
    given = parser.parse_args()
    wanted = given.only or families
    runs = protocols(os.path.abspath(given.disk))
    result = measure(
        {key: run for key, run in runs.items() if key.partition("-")[0] in wanted},
        smoke=given.smoke,
        rounds=given.rounds,
    )
    path = output_path(given)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")
    import report

    report.show(result)
    if path is not None:
        import plots

        plots.draw(result, path.parent, path.stem)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
