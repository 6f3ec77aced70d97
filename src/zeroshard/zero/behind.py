"""How does the update in host memory run behind what the device does next?

One worker takes chunk after chunk, in the order of forward: it waits for the gradient, updates, and sends
the parameter up. The main thread waits only where a unit is used that is not back yet.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from zeroshard.store.bus import Arrival
from zeroshard.zero.crossing import Crossing

Sent = Callable[[], Arrival | None]
"""Gives the transfer of a parameter to the device once it is under way; None where it stays."""


class Behind:
    """The worker thread of one engine. ``threads``: how many an update may use, itself among them."""

    def __init__(self, *, threads: int) -> None:
        self.threads = threads
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-update")

    def submit(self, update: Sent, *, then: Sent | None = None) -> Sent:
        """Run ``update`` behind. Calling what is returned waits for it, raises what it raised, and
        gives what it returned; with ``then``, what that gives, run by the caller."""
        future: Future[Arrival | None] = self._worker.submit(update)

        def sent() -> Arrival | None:
            arrival = future.result()
            return arrival if then is None else then()

        return sent

    def close(self) -> None:
        """Wait for the update that runs, and drop those that have not begun."""
        self._worker.shutdown(wait=True, cancel_futures=True)


class Pending:
    """The chunks of one unit whose update is not known to have arrived."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Crossing, Sent]] = []

    def add(self, crossing: Crossing, sent: Sent) -> None:
        """One more chunk."""
        self._chunks.append((crossing, sent))

    def finish(self) -> None:
        """Wait, so that the current stream may use the unit's own part. Raises what the worker did."""
        while self._chunks:
            crossing, sent = self._chunks[0]
            crossing.arrived(sent())
            del self._chunks[0]  # what failed fails again for the next who waits
