"""How ranks talk to each other: transports, records, agreement and the watch over both."""

from zeroshard.comm.collectives import Comm, Handle, ProcessGroupComm, SoloComm
from zeroshard.comm.connect import make_comm
from zeroshard.comm.env import Place, current_place, init_distributed, local_device
from zeroshard.comm.p2p import P2PComm
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.trust import TrustSettings

__all__ = [
    "Comm",
    "Handle",
    "P2PComm",
    "Place",
    "ProcessGroupComm",
    "Recorder",
    "SoloComm",
    "TrustSettings",
    "current_place",
    "init_distributed",
    "local_device",
    "make_comm",
]
