"""CPU ranks that copy between "device" and host memory, as ranks with GPUs do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from zeroshard.device.copy_streams import CopyStreams
from zeroshard.engine import build_runtime
from zeroshard.offload import stores as offload_stores


@contextlib.contextmanager
def a_bus_between() -> Iterator[CopyStreams]:
    """Copies between device and host, as on a GPU machine. Here both are host memory."""
    streams = CopyStreams()
    with (
        mock.patch.object(build_runtime, "has_copy_streams", lambda _device: True),
        mock.patch.object(
            build_runtime, "check_device", lambda *_, **__: None
        ),  # parameters alone, too
        mock.patch.object(offload_stores, "make_copy_streams", lambda _device, *, copies: streams),
    ):
        yield streams
