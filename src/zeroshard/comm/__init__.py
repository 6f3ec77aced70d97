"""Communication between ranks: transports, records of collectives, and agreement through the store."""

from zeroshard.comm.collectives import Comm, Handle, SoloComm
from zeroshard.comm.connect import make_comm
from zeroshard.comm.env import RankInfo, current_rank_info, local_device
from zeroshard.comm.p2p import P2PComm
from zeroshard.comm.process_group import ProcessGroupComm
from zeroshard.comm.recorder import Recorder

__all__ = [
    "Comm",
    "Handle",
    "P2PComm",
    "ProcessGroupComm",
    "RankInfo",
    "Recorder",
    "SoloComm",
    "current_rank_info",
    "local_device",
    "make_comm",
]
