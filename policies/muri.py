"""Former place of the policies; see `muri.policies.schedulers`."""

from muri.policies.schedulers.fifo import Fifo
from muri.policies.schedulers.muri import Auto, MuriL, MuriS
from muri.policies.schedulers.shortest import Srsf

__all__ = ["Auto", "Fifo", "MuriL", "MuriS", "Srsf"]
