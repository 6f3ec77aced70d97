"""Forwards connections between the hosts of a run to its store, for those who know the run's secret.

Torch's store has no password, so it listens on the loopback interface of the first host. Two processes of
this program, which their launchers start, connect the ranks of another host to it:

    rank -> relay on its loopback -> (network) -> relay of the first host -> store on its loopback

A process of its own goes on while its launcher is stopped, and is all that a flood of connections slows
down. It ends when its standard input does, which only the launcher holds. It imports nothing but the
standard library, and runs as a script.

A connection over the network begins with 48 bytes of the first host: a greeting and a random challenge.
The client answers with a random number of its own and the HMAC of both; the first host shows with another
HMAC that it knows the secret too. What follows is forwarded as it is, neither encrypted nor checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import resource
import secrets
import signal
import socket
import sys
import time
from typing import cast

PROOF_S = 5.0
"""Seconds that a client has to show its proof."""
WAITING = 256
"""Clients that may be about to show a proof. The oldest makes place for another: a client of the run
needs milliseconds."""
START_S = 900.0
"""Seconds that the first host may take to start."""
READY = "ready"
"""The line on standard output when connections are forwarded; any other line says why they are not."""
_WRONG_S = 10.0
"""Seconds for which a wrong answer is asked for again: an earlier run may just be ending there."""
_AGAIN_S = 30.0
"""Seconds for which a connection that breaks before it is forwarded is made again."""
_PAUSE_S = 0.2
_BACKLOG = 512
_GREETING = b"zeroshard relay\n"
_RANDOM_NBYTES = _PROOF_NBYTES = 32
_REFUSAL = bytes(_PROOF_NBYTES)
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to save, or to end in order: ranks need the store until they have."""


class WrongAnswerError(Exception):
    """What answers is not the first host of this run. The text says why."""


class End(asyncio.Protocol):
    """One end of a forwarded connection. What arrives here is written to ``other``."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.other: asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self.other.write(data)

    def pause_writing(self) -> None:
        self.other.pause_reading()

    def resume_writing(self) -> None:
        self.other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.other.close()  # after what is still to be written


def forward(one: asyncio.Transport, other: asyncio.Transport) -> None:
    """Forward between two connections until one of them ends, and end the other then."""
    for transport, far in ((one, other), (other, one)):
        end = End()
        end.transport, end.other = transport, far
        transport.set_protocol(end)
    for transport in (one, other):
        if transport.is_closing():
            one.close()
            other.close()
            return
        transport.resume_reading()


class Gate:
    """Lets clients that know ``secret`` connect to ``store``. Tells the user once of each kind of others.

    ``port``: the one that clients connect to.
    """

    def __init__(self, secret: bytes, store: tuple[str, int], port: int) -> None:
        self.secret, self.store = secret, store
        self._port = port
        self._waiting: dict[Client, None] = {}  # the oldest first
        self._told: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself does not keep them

    def came(self, client: Client) -> None:
        self._waiting[client] = None
        if len(self._waiting) > WAITING:
            next(iter(self._waiting)).refuse(
                f"was the oldest of more than {WAITING} without a proof"
            )

    def left(self, client: Client) -> None:
        self._waiting.pop(client, None)

    def admit(self, transport: asyncio.Transport, answer: bytes) -> None:
        task = asyncio.ensure_future(self._admit(transport, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, transport: asyncio.Transport, answer: bytes) -> None:
        try:
            loop = asyncio.get_running_loop()
            inner, _ = await loop.create_connection(asyncio.Protocol, *self.store)
        except OSError:  # the run has ended
            transport.close()
            return
        transport.write(answer)
        forward(transport, inner)

    def tell(self, peer: object, what: str, hint: str = "") -> None:
        """Tell the user of a client that was refused, unless one of the kind ``what`` came before."""
        if what not in self._told:
            self._told.add(what)
            address = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "an unknown address"
            say(
                f"a connection from {address} to port {self._port}, where the hosts of this run meet, "
                f"was refused: it {what}.{hint} Others like it are refused without a line."
            )


class Client(asyncio.Protocol):
    """A connection over the network that has not shown a proof."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._challenge = secrets.token_bytes(_RANDOM_NBYTES)
        self._said = b""
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(_GREETING + self._challenge)
        late = f"showed no proof of the secret within {PROOF_S:g} s"
        self._timer = asyncio.get_running_loop().call_later(PROOF_S, self.refuse, late)
        self._gate.came(self)

    def data_received(self, data: bytes) -> None:
        self._said += data
        if len(self._said) < _RANDOM_NBYTES + _PROOF_NBYTES:
            return
        number, shown = self._said[:_RANDOM_NBYTES], self._said[_RANDOM_NBYTES:]
        secret = self._gate.secret
        if not hmac.compare_digest(shown, proof(secret, b"client", self._challenge, number)):
            self._transport.write(_REFUSAL)
            hint = " If it is a host of this run, give its launcher the same ZEROSHARD_SECRET."
            self.refuse("showed a wrong proof of the secret", hint)
            return
        self._leave()
        self._transport.pause_reading()
        self._gate.admit(self._transport, proof(secret, b"server", self._challenge, number))

    def connection_lost(self, error: Exception | None) -> None:
        if self._leave():
            self._tell("ended without a proof of the secret")

    def refuse(self, what: str, hint: str = "") -> None:
        """End the connection. ``what``: it did, which the user is told."""
        self._leave()
        self._tell(what, hint)
        self._transport.close()

    def _tell(self, what: str, hint: str = "") -> None:
        self._gate.tell(self._transport.get_extra_info("peername"), what, hint)

    def _leave(self) -> bool:
        """Stop waiting for the proof. False: that had ended before."""
        waited = not self._timer.cancelled()
        self._timer.cancel()
        self._gate.left(self)
        return waited


class Visit(asyncio.Protocol):
    """A connection to the first host, until both have shown their proofs. Then ``done`` has a result.

    ``done`` raises :class:`WrongAnswerError`, or an ``OSError`` if the connection ends.
    """

    def __init__(self, secret: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._secret = secret
        self._number = secrets.token_bytes(_RANDOM_NBYTES)
        self._expected = b""
        self._said = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._said += data
        if not self._expected:
            begun = len(_GREETING)
            if self._said[:begun] != _GREETING[: len(self._said)]:
                self._fail("another program answers there")
            elif len(self._said) >= begun + _RANDOM_NBYTES:
                challenge, self._said = self._said[begun:], b""
                shown = proof(self._secret, b"client", challenge, self._number)
                self._expected = proof(self._secret, b"server", challenge, self._number)
                self._transport.write(self._number + shown)
        elif len(self._said) >= _PROOF_NBYTES and not self.done.done():
            if hmac.compare_digest(self._said, self._expected):
                self._transport.pause_reading()
                self.done.set_result(None)
            elif self._said == _REFUSAL:
                self._fail("it has another secret")
            else:
                self._fail("what answers there does not know the secret of this run")

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionResetError("the connection was closed"))

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(WrongAnswerError(why))
        self._transport.close()


async def visit(first_host: tuple[str, int], secret: bytes) -> asyncio.Transport:
    """A connection to the first host that is ready to be forwarded; nothing is read from it yet.

    Raises:
        OSError: it cannot be reached, or ends.
        TimeoutError, asyncio.TimeoutError: it does not answer.
        WrongAnswerError: it is not the first host of this run.
    """
    loop = asyncio.get_running_loop()
    opening = loop.create_connection(lambda: Visit(secret), *first_host)
    transport, made = await asyncio.wait_for(opening, PROOF_S)
    try:
        await asyncio.wait_for(made.done, PROOF_S)
    except BaseException:
        transport.abort()
        raise
    return transport


class Local(asyncio.Protocol):
    """A connection of this host to its relay. The first host is reached when it says something.

    So connections that say nothing cost nothing there. A client of a store speaks first.
    """

    def __init__(self, first_host: tuple[str, int], secret: bytes) -> None:
        self._first_host, self._secret = first_host, secret
        self._here: asyncio.Transport
        self._task: asyncio.Task[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._here = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._here.pause_reading()
        self._task = asyncio.ensure_future(self._go(self._here, data))

    async def _go(self, here: asyncio.Transport, said: bytes) -> None:
        until_s = time.monotonic() + _AGAIN_S
        while not here.is_closing():
            try:
                there = await visit(self._first_host, self._secret)
                there.write(said)
                forward(here, there)
                return
            except (OSError, asyncio.TimeoutError, WrongAnswerError) as error:
                # A refused connection: the run has ended there.
                if isinstance(error, ConnectionRefusedError) or time.monotonic() > until_s:
                    here.close()
                    return
            await asyncio.sleep(_PAUSE_S)


async def reach(first_host: tuple[str, int], secret: bytes) -> str:
    """Wait until the first host has started. Returns "", or why it is of no use."""
    where = f"{first_host[0]}:{first_host[1]}"
    until_s, wrong_s = time.monotonic() + START_S, float("inf")
    while True:
        try:
            (await visit(first_host, secret)).close()
            return ""
        except WrongAnswerError as error:
            wrong_s = min(wrong_s, time.monotonic() + _WRONG_S)
            why = (
                f"the first host of the run is at {where}, and {error}. Give all its launchers the same "
                "ZEROSHARD_SECRET, --master_addr and --master_port."
            )
        except (OSError, asyncio.TimeoutError) as error:
            wrong_s = float("inf")
            reason = str(error) or "no answer"
            why = (
                f"the first host of the run does not answer at {where} ({reason}). Start its "
                "launcher too, and check --master_addr and --master_port."
            )
        if time.monotonic() > min(until_s, wrong_s):
            return why
        await asyncio.sleep(_PAUSE_S)


async def serve(side: str, listening: socket.socket, far: tuple[str, int], secret: bytes) -> None:
    """Forward what connects to ``listening``, until this task is cancelled.

    ``side``: "store": from the network to the store at ``far``; "ranks": from this host to the first host
    at ``far``.
    """
    loop = asyncio.get_running_loop()
    if side == "store":
        gate = Gate(secret, far, listening.getsockname()[1])
        server = await loop.create_server(lambda: Client(gate), sock=listening, backlog=_BACKLOG)
    else:
        if why := await reach(far, secret):
            print(why, flush=True)
            return
        server = await loop.create_server(
            lambda: Local(far, secret), sock=listening, backlog=_BACKLOG
        )
    print(READY, flush=True)
    async with server:
        await server.serve_forever()


async def run(side: str, listening: socket.socket, far: tuple[str, int], secret: bytes) -> None:
    """:func:`serve` until standard input ends."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)
    tasks = {
        asyncio.ensure_future(serve(side, listening, far, secret)),
        asyncio.ensure_future(ended.wait()),
    }
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def proof(secret: bytes, side: bytes, challenge: bytes, number: bytes) -> bytes:
    """What shows that ``side`` knows ``secret``. Each side chooses one of the two random numbers."""
    return hmac.new(secret, side + challenge + number, "sha256").digest()


def say(text: str) -> None:
    """Print a line as the launcher does, at once: it prints to the same place."""
    with contextlib.suppress(OSError):
        os.write(2, f"zeroshard: {text}\n".encode())


def _secret() -> bytes:
    """The first line on standard input, in hexadecimal. Reads nothing beyond that line."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            sys.exit()  # the launcher has ended
        line += byte
    return bytes.fromhex(line.decode())


def main(words: list[str]) -> None:
    """``words``: the side, a descriptor that listens, and the host and port of the far end."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # two descriptors for each connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    side, fd, host, port = words
    secret = _secret()
    with socket.socket(fileno=int(fd)) as listening:
        asyncio.run(run(side, listening, (host, int(port)), secret))


if __name__ == "__main__":
    main(sys.argv[1:])
