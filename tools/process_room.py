"""Measures what a rank's process has beside the tensors of its plan: interpreter, libraries, threads.

    python tools/process_room.py

Two ranks of each case take three steps with a model of a few bytes, so that nearly all of their anonymous
and shared memory (PSS) is such room. Pages of files, which the system can drop, are not counted. The
planner prints the highest value (``planner/assumptions.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from zeroshard.core.texts import gib

PROGRAM = """
import json, re, sys
import torch, zeroshard
kind, folder = sys.argv[1:]
batch = torch.ones(1, 4)
model = torch.nn.Linear(4, 1)
if kind == "transformers":
    import transformers
    sizes = dict(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    batch = torch.ones(1, 8, dtype=torch.long)
engine, *_ = zeroshard.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3}, "log_level": "error",
})
for _ in range(3):
    output = engine(batch)
    loss = output.logits.mean() if kind == "transformers" else output.mean()
    engine.backward(loss)
    engine.step()
text = open("/proc/self/smaps_rollup").read()
kib = sum(int(re.search(rf"^{name}: +(\\d+) kB", text, re.M)[1]) for name in ("Pss_Anon", "Pss_Shmem"))
json.dump(kib * 1024, open(f"{folder}/{engine.global_rank}", "w"))
engine.close()
"""


def measured(kind: str) -> list[int]:
    """Bytes of each of two ranks. ``kind``: "plain" or "transformers"."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM, encoding="utf-8")
        command = [sys.executable, "-m", "zeroshard.cli.main", "launch", "--nproc", "2"]
        subprocess.run(
            [*command, str(program), kind, folder], check=True, stdout=subprocess.DEVNULL
        )
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(2)]


def main() -> None:
    """Print GiB of each rank of each case."""
    for kind in ("plain", "transformers"):
        print(f"{kind}: {', '.join(map(gib, measured(kind)))} GiB")


if __name__ == "__main__":
    main()
