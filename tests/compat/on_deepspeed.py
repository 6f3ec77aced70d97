"""Runs a program under the real DeepSpeed on CPU ranks, once for each list of arguments.

    torchrun --nproc-per-node 2 on_deepspeed.py PROGRAM '["--stage", "1"]' '["--stage", "2"]'

DeepSpeed does not set the name of Accelerate's backend when it joins the ranks. This script sets it.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from typing import Any

import deepspeed
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

join = deepspeed.comm.init_distributed


def join_on_gloo(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    PartialState._shared_state["backend"] = "gloo"
    join("gloo", *args, **kwargs)


if __name__ == "__main__":
    deepspeed.comm.init_distributed = join_on_gloo
    program, *runs = sys.argv[1:]
    for run in runs:
        sys.argv = [program, *json.loads(run)]
        runpy.run_path(program, run_name="__main__")
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch's gloo threads may abort a process whose interpreter ends
