"""CPUs and memory follow the GPUs: what a cluster does that knows nothing of its jobs."""

from muri.policies.allocation.demand import proportional_wish
from muri.policies.allocation.seats import Round, Seating
from muri.policies.allocation.tune import tune


def proportional(round_: Round) -> Seating:
    """Seat the runnable jobs with the GPU-proportional share of their node."""
    return tune(round_, proportional_wish)
