"""Where no cgroup holds a member's processes together, they are gone all the same when its pilot job has ended."""

import pytest
from pilot_ends import PilotEnds

from sandbox.driver import Driver


@pytest.mark.thorough
def test_members_of_an_array_and_others_end_without_cgroups(cluster: Driver) -> None:
    ends = PilotEnds(cluster)
    pilot = ends.pilot("n1")
    kinds = ("obeys", "ignores", "daemon", "stops")
    members = [ends.member("n1", pilot, f"exec python3 hold.py {kind}", "--array=4") for kind in kinds]
    other = ends.submit("n1", "other", script="exec python3 hold.py obeys")
    held = [*members, other]
    running = "pgrep -fc '^[^ ]*python3 hold.py' || true"
    cluster.wait_until(lambda: int(ends.root(running)) == len(held) + 1, "all to run")  # the daemon is two processes
    waits = ends.submit("n1", "next", f"--gres=gpu:{ends.gpus}", script=running)
    cluster.run("scancel", str(pilot))
    cluster.wait_state(waits, "COMPLETED")
    assert ends.output("next", waits) == "1\n"
    for member in members:
        cluster.wait_until(lambda member=member: ends.is_back(member), f"{member} in the queue")
    assert cluster.job(other)["JobState"] == "RUNNING"
