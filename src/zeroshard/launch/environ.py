"""Which environment do ranks get from the launcher?

Pure. Every value is only a default: what the user exported wins.
"""

from __future__ import annotations

from collections.abc import Mapping

# Exported to other hosts when the launcher starts them over ssh.
_EXPORTED = ("NCCL_", "TORCH_", "GLOO_", "OMP_", "ZEROSHARD_", "UCX_", "FI_", "DS_", "DEEPSPEED_")
_EXPORTED_NAMES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", "TOKENIZERS_PARALLELISM")


def rank_defaults(
    env: Mapping[str, str],
    *,
    cores: int,
    num_local: int,
    node_rank: int = 0,
    num_nodes: int = 1,
) -> dict[str, str]:
    """Variables to add to ``env`` for the ranks of one node; never one that is set already.

    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``: otherwise torch (2.13) keeps the store keys of a dead
    attempt, and gloo connects to its addresses.
    """
    wanted = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(max(1, cores // num_local)),
        "PYTHONFAULTHANDLER": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "LOCAL_SIZE": str(num_local),
        "CROSS_RANK": str(node_rank),
        "CROSS_SIZE": str(num_nodes),
    }
    return {name: value for name, value in wanted.items() if name not in env}


def exported(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other hosts should see as well, sorted by name."""
    return {
        name: env[name]
        for name in sorted(env)
        if name in _EXPORTED_NAMES or name.startswith(_EXPORTED)
    }
