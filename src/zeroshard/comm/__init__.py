"""How ranks talk to each other: transports, records, agreement and the watch over both."""

from zeroshard.comm.collectives import Comm, Handle, ProcessGroupComm, SoloComm
from zeroshard.comm.connect import make_comm
from zeroshard.comm.env import RankInfo, current_rank_info, init_distributed, local_device
from zeroshard.comm.p2p import P2PComm
from zeroshard.comm.recorder import Recorder
from zeroshard.watchdog.settings import WatchdogSettings

__all__ = [
    "Comm",
    "Handle",
    "P2PComm",
    "RankInfo",
    "ProcessGroupComm",
    "Recorder",
    "SoloComm",
    "WatchdogSettings",
    "current_rank_info",
    "init_distributed",
    "local_device",
    "make_comm",
]
