"""Reads the numbers of a machine, which turn a plan into seconds, from a TOML file.

Every number is a pair ``{value, source}``. ``source`` says how it is known: "measured" on this machine,
"vendor" for a data sheet, "assumed" for anything else. Files may leave numbers out. A plan that needs one
of them gets an error with its name (:class:`Values`), and never another number instead.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, ValidationError

from zeroshard.config.fields import Section, show
from zeroshard.config.keys import nearest
from zeroshard.errors import ConfigError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRESETS = Path(__file__).with_name("machines")
"""The folder of the files that ``--machine`` knows by name."""

Source: TypeAlias = Literal["measured", "vendor", "assumed"]
Points: TypeAlias = Sequence[tuple[float, float]]
"""Pairs (size, rate) by increasing size."""


def _positive(value: float) -> float:
    if not 0 < value < math.inf:  # also NaN
        raise ValueError("must be a positive number")
    return value


def _increasing(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    sizes = [size for size, _ in points]
    if not points or any(after <= before for before, after in pairwise(sizes)):
        raise ValueError("must be pairs [size, rate], one or more, by increasing size")
    return points


Positive = Annotated[float, Field(strict=True), AfterValidator(_positive)]


class Number(Section):
    """One number and how it is known."""

    value: Positive
    source: Source


class Curve(Section):
    """A rate that depends on a size."""

    value: Annotated[tuple[tuple[Positive, Positive], ...], AfterValidator(_increasing)]
    source: Source


class Device(Section):
    """What computes: a GPU, or the core of a CPU rank."""

    memory_bytes: Number | None = Field(default=None, description="Memory that a process can use.")
    context_bytes: Number | None = Field(
        default=None, description="Memory that the device's context takes before the first tensor."
    )
    communicator_bytes: Number | None = Field(
        default=None, description="Memory that one communicator of NCCL takes for its buffers."
    )
    bytes_per_s: Curve | None = Field(
        default=None,
        description="Rate of an elementwise operation, by the bytes that it reads and writes: the first "
        "points are in a cache, the last one is in memory.",
    )
    random_per_s: Number | None = Field(default=None, description="Elements of dropout.")
    operation_s: Number | None = Field(
        default=None,
        description="Seconds of the host for each operation of torch: Python, autograd, launch.",
    )
    optimizer_bytes_per_s: Number | None = Field(
        default=None,
        description="Rate of the update, by the bytes of states that it reads and writes.",
    )


class Copies(Section):
    """Copies between host memory and the device, in bytes/s."""

    host_to_device_bytes_per_s: Number | None = None
    device_to_host_bytes_per_s: Number | None = None


class HostRates(Section):
    """The host of a node, which its ranks share."""

    memory_bytes_per_s: Number | None = Field(default=None, description="Of all cores together.")
    optimizer_bytes_per_s: Number | None = Field(
        default=None, description="Rate of the update in host memory, of one core."
    )
    cores: Number | None = None


class DiskRates(Section):
    """A local disk, in bytes/s for one rank."""

    read_bytes_per_s: Number | None = None
    write_bytes_per_s: Number | None = None


class Link(Section):
    """How ranks communicate.

    A collective takes ``alpha_s`` plus the bytes that a rank sends, divided by the rate at the bytes of
    the whole tensor.
    """

    alpha_s: Number | None = None
    all_gather: Curve | None = None
    reduce_scatter: Curve | None = None
    all_reduce: Curve | None = None


class MachineFile(Section):
    """The numbers of a machine. See the descriptions of its sections.

    ``execution``: "streams" if the device computes and communicates at the same time, "serial" if one
    processor does both, as a CPU rank's does.
    """

    name: str
    execution: Literal["streams", "serial"]
    devices_per_node: Number | None = None
    device: Device = Device()
    matmul: dict[Literal["float64", "float32", "bfloat16", "float16"], Curve] = Field(
        default_factory=dict, description="FLOP/s of matrix products by their FLOP, for each dtype."
    )
    attention: dict[Literal["float64", "float32", "bfloat16", "float16"], Curve] = Field(
        default_factory=dict, description="FLOP/s of fused attention, as for matrix products."
    )
    special: dict[str, Number] = Field(
        default_factory=dict,
        description="Elements/s of operations that arithmetic limits, not memory, by their names "
        'in torch ("_softmax"). "exp" stands for all that are not named.',
    )
    copies: Copies = Copies()
    host: HostRates = HostRates()
    disk: DiskRates = DiskRates()
    inside_node: Link = Link()
    between_nodes: Link = Link()


def presets() -> list[str]:
    """The names of machines that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def check_links(machine: MachineFile, ranks: int) -> None:
    """Check that a machine has a link for ``ranks`` ranks, before anything is simulated.

    Some collective of a run on several nodes is always between nodes, and needs ``alpha_s`` and a rate.

    Raises:
        UsageError: it has no size of a node, or no link between nodes and the ranks are on several.
    """
    if ranks == 1:
        return
    added = (
        f"Add it to the machine file, with the source of each number: copy the file of a preset "
        f"({', '.join(presets())} in {PRESETS}), and give its path to --machine"
    )
    if machine.devices_per_node is None:
        raise UsageError(
            f"the machine {machine.name!r} has no devices_per_node, and the time of a step of {ranks} "
            f"ranks depends on which of them share a node. {added}; or give --ranks-per-node."
        )
    size = round(machine.devices_per_node.value)
    link = dict(machine.between_nodes)
    missing = [key for key, value in link.items() if value is None]
    if ranks <= size or ("alpha_s" not in missing and len(missing) < len(link) - 1):
        return
    raise UsageError(
        f"the machine {machine.name!r} has no {', '.join(f'between_nodes.{key}' for key in missing)}, "
        f"and {ranks} ranks on nodes of {size} devices communicate between nodes. {added}; or give at "
        f"most {size} ranks, or --ranks-per-node."
    )


def load_machine(name: str) -> MachineFile:
    """The machine of a preset or of a file.

    Raises:
        ConfigError: there is none, or the file has mistakes; all of them are in the message.
    """
    path = PRESETS / f"{name}.toml" if name in presets() else Path(name)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--machine {name}: {error}. Give a TOML file, which `zeroshard plan --measure FILE.toml` "
            f"writes, or one of {', '.join(presets())}."
        ) from error
    return parse_machine(text, str(path))


def parse_machine(text: str, name: str) -> MachineFile:
    """The machine of a TOML text. ``name``: of the text, for messages.

    Raises:
        ConfigError: the text has mistakes; all of them are in the message, one per line.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}. Correct it at this place.") from None
    try:
        return MachineFile.model_validate(found)
    except ValidationError as error:
        lines = [_problem(dict(each), found) for each in error.errors()]
        raise ConfigError("\n".join([f"{name} describes no machine:", *lines, _FORM])) from None


def _problem(error: dict[str, Any], given: Any) -> str:
    """One line: key, value, what is wrong and what to do."""
    places = [at for at in error["loc"] if at != "[key]"]
    key = ".".join(map(str, places)) or "the file"
    kind = error["type"]
    if kind == "missing":
        return f"{key} is missing."
    if kind == "extra_forbidden":
        known = _keys_at(places[:-1])
        close = nearest(str(places[-1]), known)
        hint = f"Did you mean {close!r}?" if close else f"Known: {', '.join(sorted(known))}."
        return f"{key} is unknown. {hint}"
    wrong = error["msg"].removeprefix("Value error, ")
    return f"{key} is {show(_value_at(given, places))}: {wrong}."


_FORM = (
    'A number is {value = 1.5e12, source = "vendor"}, with the source "measured", "vendor" or '
    '"assumed"; a rate by size has value = [[size, rate], ...]; name and execution ("streams" or '
    '"serial") are texts.'
)


def _keys_at(places: Sequence[Any]) -> list[str]:
    section: Any = MachineFile
    for place in places:
        field = section.model_fields.get(place) if hasattr(section, "model_fields") else None
        section = field.annotation if field is not None else Number
    return list(getattr(section, "model_fields", Number.model_fields))


def _value_at(given: Any, places: Sequence[Any]) -> Any:
    for place in places:
        try:
            given = given[place]
        except (KeyError, IndexError, TypeError):
            return given
    return given


def rate_at(points: Points, size: float) -> float:
    """The rate at a size: between two points linear in the logarithms, outside that of the nearest point.

    >>> rate_at([(1, 10), (100, 1000)], 10)
    100.0
    >>> rate_at([(1, 10), (100, 1000)], 1e6)
    1000
    """
    at = bisect_left([each for each, _ in points], size)
    if at in (0, len(points)):
        return points[max(0, at - 1)][1]
    (low, slow), (high, fast) = points[at - 1 : at + 1]
    part = math.log(size / low) / math.log(high / low)
    return round(math.exp(math.log(slow) + part * math.log(fast / slow)), 6)


class Values:
    """The numbers of a machine, by name. ``used``: the source of each that was asked for."""

    def __init__(self, machine: MachineFile) -> None:
        self.machine = machine
        self.used: dict[str, Source] = {}

    def number(self, key: str) -> float:
        """A number such as "device.operation_s".

        Raises:
            UsageError: the machine file does not have it.
        """
        found: float = self._find(key).value
        return found

    def points(self, key: str) -> Points:
        """The points of a rate such as "matmul.bfloat16".

        Raises:
            UsageError: the machine file does not have it.
        """
        found: Points = self._find(key).value
        return found

    def has(self, key: str) -> bool:
        """Whether the machine file has a number."""
        return self._look(key) is not None

    def _look(self, key: str) -> Any:
        found: Any = self.machine
        for word in key.split("."):
            found = found.get(word) if isinstance(found, dict) else getattr(found, word)
        return found

    def _find(self, key: str) -> Any:
        found = self._look(key)
        if found is None:
            raise UsageError(
                f"the machine {self.machine.name!r} has no {key}, which the time of this step depends "
                "on. Add it to the machine file, with its source, or choose another machine."
            )
        self.used[key] = found.source
        return found
