"""Log lines of Muri's own processes: UTC, ISO-8601, to standard error."""

import logging
import sys
import time


class _UtcFormatter(logging.Formatter):
    @staticmethod
    def converter(seconds: float | None) -> time.struct_time:
        """Read every time as UTC."""
        return time.gmtime(seconds)


def configure_logging(*, verbose: bool) -> None:
    """Send log lines to standard error, which systemd and cron keep."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_UtcFormatter("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
