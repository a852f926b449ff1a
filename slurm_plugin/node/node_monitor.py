"""A pilot job's look at its node: who uses what, written beside the runtime's status and told in the pilot's reports.

The runtime itself may run under its members' Python, which need not have what reads the machine; a pilot job does not.
"""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from muri.clock import now_text
from muri.files import atomic_json
from muri.foreign import json_of
from muri.profiler.resource_usage.sampler import Monitor
from muri.rendezvous import use_file

log = logging.getLogger("muri.pilot")

_TURN_S: Final = 2.0
"""Time between two looks at who is at work; the monitor itself looks more rarely, but when somebody comes or goes."""


class NodeMonitor:
    """A thread that looks now and then; whatever fails in it costs the pilot its figures and nothing else.

    Args:
        status: The runtime's status file.

    Attributes:
        latest: What the last look has found, as JSON values; None before the second look.
    """

    def __init__(self, status: Path) -> None:
        self.latest: dict[str, Any] | None = None
        self._status = status
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-monitor", daemon=True)

    def start(self) -> None:
        """Begin to look; NVML may take seconds to wake a GPU, for which nobody waits."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the file."""
        self._ended.set()
        self._thread.join(_TURN_S)
        use_file(self._status).unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            monitor = Monitor()
            for note in monitor.notes:
                log.info("the node's use: %s", note)
            while True:
                self._look(monitor)
                if self._ended.wait(_TURN_S):
                    break
            monitor.close()
        except Exception:
            log.exception("the node's use is not told any more")

    def _look(self, monitor: Monitor) -> None:
        use = monitor.look(script_pids(self._status))
        if use is not None and not self._ended.is_set():
            self.latest = use.to_dict()
            atomic_json(use_file(self._status), {"updated": now_text(), **self.latest})


def script_pids(status: Path) -> dict[str, int]:
    """Return the process of each script that a runtime's status tells of; members that are threads of one have none."""
    try:
        members = json_of(status.read_text()).get("members", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return {
        name: member["script_pid"]
        for name, member in members.items()
        if isinstance(member, Mapping) and member.get("state") == "running" and member.get("script_pid")
    }
