"""Proves on a CPU that everything a program does on CUDA devices comes after what it depends on.

Open it around a program, in a process of its own::

    from zeroshard_testing.streams import pretend_cuda

    with pretend_cuda(devices=1) as watch:
        engine = zeroshard.Engine(model, config=config)  # on the pretended device cuda:0
        for at, batch in enumerate(batches):
            with watch.phase(f"step {at}"):
                engine.backward(engine(batch.cuda()).mean())
                engine.step()
        engine.close()
    assert watch.findings == [], "\\n".join(map(str, watch.findings))

Tensors have real values, which are in host memory. Storages are marked as device memory. Functions that
talk to the driver are replaced: ``torch.cuda``, ``torch.accelerator``, streams, events, page-locking. All
other code is the program's own. Operators run at once, in program order. The checker keeps vector clocks
of streams and host threads, and reports what a real device may do in another order. So one run proves all
timings of that program. No timing has to be guessed.

``watch.findings`` has the kinds of :data:`~zeroshard_testing.streams.findings.KINDS`. A finding prints
the lines of both operations. ``watch.waits(phase)`` counts host waits by kind, ``watch.kernels(phase)``
operators, ``watch.traffic(phase)`` the bytes that they read and wrote, ``watch.allocations(phase)``
blocks of device memory. ``watch.live_nbytes`` are the bytes of device memory in use,
``watch.live_blocks`` the blocks with the lines that allocated them, ``watch.peak_nbytes`` the most at one
time. With ``pretend_cuda(device_nbytes=...)`` larger allocations fail as torch's do. ``watch.world(4)``
is a context in which this process is one of four ranks over a model of NCCL: order is right, values are
not. With ``watch.ranks()`` processes that gloo connects are the ranks, and values are right too.

Code that torch does not see declares what it uses: :mod:`zeroshard.memory.host_memory`.

Limits. One operator is one kernel, and uses the range of bytes from the first to the last element of a
tensor. Autograd runs on the calling thread. Threads, futures, events and queues order host threads. Locks
do not, but what is done under the same lock is no race. Only one ``pretend_cuda`` may be open in a
process. It replaces functions of the whole process while it is open, so a test runs it in a process of
its own (``tests/streams/scenarios.py``).
"""

from __future__ import annotations

from zeroshard_testing.streams.findings import Finding
from zeroshard_testing.streams.watch import Watch, pretend_cuda

__all__ = ["Finding", "Watch", "pretend_cuda"]
