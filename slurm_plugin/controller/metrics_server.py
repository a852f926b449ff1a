"""Answers Prometheus at an address. Anybody who reaches it may connect, which must not cost the controller its work."""

import socket
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from muri.newcomers import Newcomers

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MOST_CONNECTIONS: Final = 20
REQUEST_LIMIT_S: Final = 10.0
"""A connection with its request and answer takes no longer."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (so it is called there)
        """Strangers write nothing into the log."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection; the oldest of too many ends.

    Args:
        host: Name or address of this machine.
        port: TCP port; 0 for any.
        registry: What is served.

    Raises:
        OSError: Nothing can listen there.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, registry: "CollectorRegistry") -> None:
        from prometheus_client import make_wsgi_app

        self._newcomers = Newcomers(MOST_CONNECTIONS)
        self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(make_wsgi_app(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own."""
        self._newcomers.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._newcomers.take(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End what takes too long; called twice a second."""
        self._newcomers.end_older(REQUEST_LIMIT_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections of strangers end as they like: nothing is logged."""
