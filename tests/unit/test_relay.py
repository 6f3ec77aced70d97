"""The two processes that connect the hosts of a run to its store, and strangers who try to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from zeroshard.launch import relay

SECRET = b"a secret of this run"


class Echo:
    """Plays the store: sends back what it gets, and counts connections."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = self._listening.getsockname()
        self.connections = 0
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self.connections += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def close(self) -> None:
        with self._listening:
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()


class Relay:
    """A relay with the socket that it listens on; ``errors`` once it has ended."""

    def __init__(self, side: str, far: tuple[str, int], secret: bytes = SECRET) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
            self.address = listening.getsockname()
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", relay.__file__, side),
                    str(listening.fileno()),
                    far[0],
                    str(far[1]),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[listening.fileno()],
            )
        self.process.stdin.write(secret.hex().encode() + b"\n")
        self.process.stdin.flush()

    def ready(self) -> bool:
        return self.process.stdout.readline().decode().strip() == relay.READY

    def end(self) -> list[str]:
        """Close its standard input, as a launcher does that ends; the lines that it has printed."""
        _, errors = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, errors.decode()
        return errors.decode().splitlines()


@pytest.fixture
def started() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def echo(started) -> Echo:
    return started.enter_context(contextlib.closing(Echo()))


@pytest.fixture
def store_side(started, echo) -> Relay:
    made = Relay("store", echo.address)
    started.callback(made.process.kill)
    assert made.ready()
    return made


def test_bytes_pass_both_relays_in_both_directions(started, echo, store_side):
    ranks_side = Relay("ranks", store_side.address)
    started.callback(ranks_side.process.kill)
    assert ranks_side.ready()
    sent = secrets.token_bytes(3 << 20)
    got = bytearray()
    with socket.create_connection(ranks_side.address, timeout=20) as client:
        sender = threading.Thread(target=client.sendall, args=(sent,))
        sender.start()
        while len(got) < len(sent):
            got += client.recv(1 << 16)
        sender.join()
    assert bytes(got) == sent
    assert echo.connections == 2  # the first one found out that the first host is there
    assert ranks_side.end() == store_side.end() == []


def test_the_end_of_the_store_is_the_end_of_the_ranks_connection(started):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sides = [Relay("store", listening.getsockname())]
        sides.append(Relay("ranks", sides[0].address))
        for side in sides:
            started.callback(side.process.kill)
        assert all(side.ready() for side in sides)
        listening.accept()[0].close()  # of the ranks' relay, which only looked
        with socket.create_connection(sides[1].address, timeout=20) as client:
            client.sendall(b"?")
            listening.accept()[0].close()
            assert client.recv(1) == b""


def test_a_connection_that_says_nothing_costs_the_first_host_nothing(started, echo, store_side):
    ranks_side = Relay("ranks", store_side.address)
    started.callback(ranks_side.process.kill)
    assert ranks_side.ready()
    with contextlib.ExitStack() as held:
        for _ in range(100):
            held.enter_context(socket.create_connection(ranks_side.address, timeout=20))
        with socket.create_connection(ranks_side.address, timeout=20) as client:
            client.sendall(b"late")
            assert client.recv(10) == b"late"
        assert echo.connections == 2  # with the one that found out that the first host is there


class Bomb:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def drained(client: socket.socket) -> bytes:
    """What the relay sends before it ends the connection."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while data := client.recv(1 << 16):
            got += data
    return got


def test_strangers_are_refused_and_each_kind_of_them_is_told_once(tmp_path, echo, store_side):
    for _ in range(3):
        for payload in (pickle.dumps(Bomb(f"{tmp_path}/ran")), secrets.token_bytes(1 << 20)):
            with socket.create_connection(store_side.address, timeout=20) as client:
                with contextlib.suppress(ConnectionError):
                    client.sendall(payload.ljust(64, b"\0"))
                drained(client)
        socket.create_connection(store_side.address, timeout=20).close()
    silent = [socket.create_connection(store_side.address, timeout=20) for _ in range(2)]
    begun_s = time.monotonic()
    for client in silent:
        assert drained(client).startswith(b"zeroshard relay\n")
        client.close()
    assert time.monotonic() - begun_s < relay.PROOF_S + 10
    lines = store_side.end()
    assert len(lines) == 3, lines
    for what in ("showed a wrong proof", "ended without a proof", "showed no proof"):
        assert sum(what in line for line in lines) == 1, lines
    assert not (tmp_path / "ran").exists()
    assert echo.connections == 0


def test_clients_of_the_run_connect_while_strangers_wait(echo, store_side):
    count = relay.WAITING + 50
    strangers = [socket.create_connection(store_side.address, timeout=20) for _ in range(count)]
    begun_s = time.monotonic()
    assert asyncio.run(relay.reach(store_side.address, SECRET)) == ""
    assert time.monotonic() - begun_s < relay.PROOF_S
    for stranger in strangers:
        stranger.close()
    lines = store_side.end()
    assert sum(f"the oldest of more than {relay.WAITING}" in line for line in lines) == 1, lines


def test_another_secret_ends_the_start_in_words(monkeypatch, store_side):
    monkeypatch.setattr(relay, "_WRONG_S", 0.0)
    why = asyncio.run(relay.reach(store_side.address, b"another secret"))
    assert why.startswith("the first host of the run is at 127.0.0.1:")
    assert "it has another secret. Give all its launchers the same ZEROSHARD_SECRET" in why


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "another program answers there"),
        (b"zeroshard relay\n" + bytes(32), "does not know the secret of this run"),
    ],
    ids=["another program", "an impostor"],
)
def test_who_does_not_know_the_secret_is_not_taken_for_the_first_host(greeting, why):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(greeting)
                shown = connection.recv(64)
                connection.sendall(shown[32:])  # the client's own proof is no proof of the server
                connection.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(relay.WrongAnswerError, match=why):
            asyncio.run(relay.visit(listening.getsockname(), SECRET))


def test_a_first_host_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(relay, "START_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
    why = asyncio.run(relay.reach(address, SECRET))
    assert why.startswith(f"the first host of the run does not answer at 127.0.0.1:{address[1]} (")
    assert why.endswith("Start its launcher too, and check --master_addr and --master_port.")


def test_signals_that_ask_a_run_to_end_do_not_end_a_relay(echo, store_side):
    for number in relay._IGNORED:
        store_side.process.send_signal(number)
    assert asyncio.run(relay.reach(store_side.address, SECRET)) == ""
    assert store_side.end() == []
