"""Counts the memory of a simulated rank, and finds out which module and line takes it.

The ledger has what the engine holds. Everything else is activations, temporaries of operations and
gradients on their way, which only torch's dispatcher sees: :class:`Allocations` follows the storages of
the tensors that operations return until they are freed. Functions that change the size of a storage tell
it (:data:`zeroshard.memory.storage.resize_listeners`); torch is not patched. Places are found without
hooks, from frames of Python and numbers of autograd (:class:`Places`).
"""

from __future__ import annotations

import os
import sys
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from zeroshard.comm.dtensors import has_dtensor
from zeroshard.comm.shared_memory import Windows, window_listeners
from zeroshard.core.ledger import TRANSPORT, Ledger
from zeroshard.core.tiers import Tier
from zeroshard.memory.host_memory import aligned_listeners
from zeroshard.memory.storage import resize_listeners

_FRAMES = 40
"""Frames that are looked at. A module's forward is few frames above the operation it calls."""

LIBRARIES = tuple(
    os.path.dirname(module.__file__) + os.sep for module in (torch, zeroshard) if module.__file__
)
"""Prefixes of the files of torch and of this package. A program may be in any folder."""

_PLANNER = os.path.dirname(__file__) + os.sep
"""Above its frames is what has called the planner."""


class Place(NamedTuple):
    """``module``: its name. ``line``: file and line outside of torch and this package. "": not known."""

    module: str = ""
    line: str = ""


NOWHERE = Place()


class Places:
    """Modules and lines, by what runs at the moment.

    In forward, and where a checkpoint runs it again, the innermost ``self`` on the stack is the module.
    In backward no Python runs, but autograd numbers its nodes: the place of a node is the one that was
    running when the node was made. Without ``model`` only lines are found, and none in backward. Costs
    about a microsecond for each frame.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        modules = () if model is None else model.named_modules()
        self._names = {id(module): name or "the model" for name, module in modules}
        self._numbers: list[int] = []
        self._places: list[Place] = []
        self._files: dict[CodeType, str] = {}  # "": of torch or of this package

    def here(self) -> Place:
        """The place of the operation that runs."""
        node = torch._C._current_autograd_node()
        found = self._on_stack()
        if found.module:
            if node is None:
                self._note(found)
            return found
        if node is None:
            return found
        at = bisect_left(self._numbers, node._sequence_nr() + 1)
        return self._places[at] if at < len(self._places) else NOWHERE

    def _on_stack(self) -> Place:
        frame = sys._getframe(2)
        module = line = ""
        inside = True  # the frames of the planner that have called this
        for _ in range(_FRAMES):
            code = frame.f_code
            planner = code.co_filename.startswith(_PLANNER)
            if planner and not inside:
                break
            inside = inside and planner
            names = code.co_varnames
            if not module and names and names[0] == "self" and not planner:
                module = self._names.get(id(frame.f_locals.get("self")), "")
            if not line and (file := self._file(code)):
                line = f"{file}:{frame.f_lineno}"
            if (module and line) or frame.f_back is None:
                break
            frame = frame.f_back
        return Place(module, line)

    def _file(self, code: CodeType) -> str:
        found = self._files.get(code)
        if found is None:
            name = code.co_filename
            found = "" if name.startswith((*LIBRARIES, "<")) else short(name)
            self._files[code] = found
        return found

    def _note(self, place: Place) -> None:
        number = _get_sequence_nr()
        if self._numbers and number <= self._numbers[-1]:  # no new node, or one of another thread
            return
        self._numbers.append(number)
        self._places.append(place)


def short(file: str) -> str:
    """The name of a file from its folder on ``sys.path`` on; all of it if there is none."""
    folders = [os.path.abspath(folder) + os.sep for folder in sys.path]
    inside = [folder for folder in folders if file.startswith(folder)]
    return file[len(max(inside, key=len)) :] if inside else file


_PHASES_OF_MODEL = ("init", "forward", "backward")
"""Phases whose operations are mostly the model's."""

_DEVICE = torch.ops.prim.device.default
"""What C++ asks of a tensor whose device Python decides. Fake tensors answer without the dispatcher."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One storage: bytes, the operation that made it, its first shape, phase, module and line."""

    nbytes: int
    op: str
    shape: tuple[int, ...]
    dtype: str
    phase: str
    module: str
    line: str


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment of a phase at which the device holds the most.

    ``device_nbytes``: of everything on the device. ``held``: the ledger's bytes, by category and tier.
    ``activations_nbytes``: what the ledger does not know. ``op``, ``module`` and ``line``: the operation
    that allocated last. ``event``: the number of allocations and releases until then.
    """

    device_nbytes: int
    held: Mapping[tuple[str, str], int]
    activations_nbytes: int
    op: str
    module: str
    line: str
    event: int


@dataclass(frozen=True, slots=True)
class Held:
    """What the device holds when an operation has allocated. Rows as in :class:`Moment`."""

    phase: str
    device_nbytes: int
    held: Mapping[tuple[str, str], int]
    activations_nbytes: int


class Allocations(TorchDispatchMode):
    """While it is entered, follows the storages of tensors that operations return.

    ``real``: of tensors with values, in a run that is compared with its plan; otherwise of fake ones.
    Storages that torch did not allocate, such as shared memory, are not followed; windows of a
    shared-memory transport and page-aligned memory tell of themselves. ``buffers_nbytes``: how many of
    the followed bytes are buffers of a transport.
    Costs some microseconds for each operation. ``note(func, args, result)`` gets every call. ``phase``:
    set by the program; each phase has a :class:`Moment` in ``moments``. In the phase "init" the ledger
    does not exist yet, and everything counts as device memory. ``looked(held)``: gets what is held after
    every allocation of the step that is measured.
    """

    def __init__(
        self, note: Callable[[Any, tuple[Any, ...], Any], None], *, real: bool = False
    ) -> None:
        super().__init__()
        self._note = note
        self._real = real
        self.buffers_nbytes: Callable[[], int] = int
        self._windows: dict[int, Windows] = {}
        self._at: dict[int, int] = {}  # number of the holding, by address of a storage that lives
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._holdings: list[Holding] = []
        self._events: list[int] = []  # n: holding n began; ~n: it ended
        self._live = 0
        self._ledger: Ledger | None = None
        self._places = Places()
        self._last_held: dict[tuple[str, str], int] = {}
        self.looked: Callable[[Held], None] | None = None
        self.phase = "init"
        self.moments: dict[str, Moment] = {}
        self.activations_nbytes = 0
        self.together: dict[str, int] = {}  # by phase: the most of device and host memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch's guard would be called for every operation."""
        return False

    def __enter__(self) -> Any:
        """Follow from now on."""
        resize_listeners.append(self._resize)
        window_listeners.append(self._take)
        aligned_listeners.append(self._align)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Follow nothing more."""
        resize_listeners.remove(self._resize)
        window_listeners.remove(self._take)
        aligned_listeners.remove(self._align)
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and follow what it returns.

        An operation on DTensors is left to them: it calls operations on local tensors, which come here.
        """
        if func is _DEVICE and type(args[0]) is FakeTensor:  # more than half of all calls
            return args[0].device
        if has_dtensor(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._note(func, args, result)
        if not self._real and func.name() == "_c10d_functional::wait_tensor":
            self._end_of(args[0])  # a fake result is a copy; a real one is its argument
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if self._is_followed(value):
                self._follow(value, func)
        return result

    def _is_followed(self, value: Any) -> bool:
        if not (isinstance(value, Tensor) if self._real else type(value) is FakeTensor):
            return False
        return bool(value.device.type != "meta")

    def measure(self, ledger: Ledger, places: Places) -> None:
        """Measure the peaks of the phases of one step from now on."""
        self._ledger, self._places = ledger, places
        self.activations_nbytes = 0
        self.moments = {name: at for name, at in self.moments.items() if name == "init"}
        self.together = {name: n for name, n in self.together.items() if name == "init"}

    def forget_peaks(self) -> None:
        """Forget the peaks so far."""
        self.moments.clear()
        self.together.clear()

    def look(self, what: str) -> None:
        """Compare what is held now with the peaks. ``what``: the name of the moment."""
        self._look(what, NOWHERE)

    def largest(self, moment: Moment, count: int) -> list[Holding]:
        """The largest storages that lived at a moment, largest first."""
        live: set[int] = set()
        for event in self._events[: moment.event]:
            if event >= 0:
                live.add(event)
            else:
                live.discard(~event)
        found = [self._holdings[number] for number in live]
        return sorted(found, key=lambda holding: -holding.nbytes)[:count]

    def _follow(self, tensor: Tensor, func: Any) -> None:
        if not torch._C._has_storage(tensor):  # sparse, as the stand-ins in .grad
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._at or (self._real and not storage.resizable()):  # torch did not allocate it
            return
        self._begin_storage(tensor, func.name().partition(".")[0])

    def _align(self, tensor: Tensor) -> None:
        if self._real:  # fake tensors stand for it in a plan, and the dispatcher sees these
            self._begin_storage(tensor, "page-aligned memory")

    def _begin_storage(self, tensor: Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._refs[key] = weakref.ref(storage, lambda _: self._forget(key))
        place = self.here()
        self._add(key, tensor, storage.nbytes(), op, place)
        self._look(op, place)

    def here(self) -> Place:
        """Module and line of the operation that runs, where the model runs or is built."""
        return self._places.here() if self.phase in _PHASES_OF_MODEL else NOWHERE

    def _add(self, key: int, tensor: Tensor, nbytes: int, op: str, place: Place) -> None:
        self._at[key] = number = len(self._holdings)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._holdings.append(Holding(nbytes, op, tuple(tensor.shape), dtype, self.phase, *place))
        self._events.append(number)
        self._live += nbytes

    def _resize(self, flat: Tensor) -> None:
        storage = flat.untyped_storage()
        key = storage._cdata
        if key not in self._at:  # a tensor of another simulation or of the program
            return
        self._end(key)
        nbytes, op = storage.nbytes(), "gather of a unit"
        place = self.here() if nbytes else NOWHERE
        self._add(key, flat, nbytes, op, place)
        if nbytes:
            self._look(op, place, gathered_nbytes=nbytes)

    def _take(self, windows: Windows) -> None:
        self._windows[id(windows)] = windows
        # Before there is a model of which places are known, a place is needed only for a new peak.
        self._look("window of the transport", None if self.phase == "init" else self.here())

    def _end_of(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self._at:
            self._end(key)

    def _forget(self, key: int) -> None:
        self._refs.pop(key, None)
        if key in self._at:
            self._end(key)

    def _end(self, key: int) -> None:
        number = self._at.pop(key)
        self._live -= self._holdings[number].nbytes
        self._events.append(~number)

    def _followed(self, ledger: Ledger) -> int:
        """Bytes of the ledger that are in storages."""
        disk = Tier.DISK.name
        return sum(nbytes for (_, tier), nbytes in ledger.held().items() if tier != disk)

    def _look(self, op: str, place: Place | None, *, gathered_nbytes: int = 0) -> None:
        """Compare with the peaks. ``gathered_nbytes``: what the ledger gets right after this call.

        ``place``: of the operation; None: it is looked up if the peak is new.
        """
        known = on_device = 0
        if self._ledger is not None:
            known = gathered_nbytes + self._followed(self._ledger)
            on_device = gathered_nbytes + self._ledger.totals()[1]
        transport = self.buffers_nbytes()
        others = self._live - known - transport
        for windows in self._windows.values():
            transport += windows.own_nbytes
            if (
                self._real
            ):  # the ledger knows tensors that lie in windows, and they are not followed
                others += windows.lent_nbytes
        device = others + on_device + transport
        self.activations_nbytes = max(self.activations_nbytes, others)
        together = device + known - on_device
        self.together[self.phase] = max(self.together.get(self.phase, 0), together)
        last = self.moments.get(self.phase)
        if self.looked is not None:
            self.looked(Held(self.phase, device, self._held(gathered_nbytes, transport), others))
        if last is None or device > last.device_nbytes:
            held = self._held(gathered_nbytes, transport)
            where = self.here() if place is None else place
            self.moments[self.phase] = Moment(device, held, others, op, *where, len(self._events))

    def _held(self, gathered_nbytes: int, transport_nbytes: int) -> dict[tuple[str, str], int]:
        """What the ledger holds, and the transport. The same object as the last time if it is equal."""
        device = Tier.DEVICE.name
        held: dict[tuple[str, str], int] = {}
        if self._ledger is not None:
            held = self._ledger.held()
            held["gathered", device] = held.get(("gathered", device), 0) + gathered_nbytes
        if transport_nbytes:
            held[TRANSPORT, device] = transport_nbytes
        if held != self._last_held:
            self._last_held = held
        return self._last_held
