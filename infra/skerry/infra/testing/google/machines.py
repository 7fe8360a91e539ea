"""The metadata servers of a sandbox: one for each job, and for whoever else stands on a machine of Google's."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from werkzeug.serving import make_server

from skerry.infra.testing.google.identity import Metadata
from skerry.infra.testing.google.principals import TOKEN_S
from skerry.infra.testing.google.server import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from werkzeug.serving import BaseWSGIServer

    from skerry.infra.testing.google.accounts import Account, Accounts
    from skerry.infra.testing.google.project import Project

# How often a server looks whether it shall end.
_LOOK_S: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """A machine whose account is looked up by its address each time: it may be deleted meanwhile."""

    accounts: Accounts
    email: str
    lifetime_s: Callable[[], int]

    def account(self) -> Account | None:
        return self.accounts.of_machine(self.email)

    def token(self, account: Account) -> tuple[str, int]:
        lifetime_s = self.lifetime_s()
        return self.accounts.token(account, lifetime_s), lifetime_s


class Machines:
    """All of them; each a server on a port of its own, so that a job can be told its own by GCE_METADATA_HOST."""

    def __init__(self, project: Project, accounts: Accounts, *, bind: str, host: str) -> None:
        """bind: the address to listen on. host: what those who ask call this machine."""
        self._project = project
        self._accounts = accounts
        self._bind = bind
        self._host = host
        self._servers: list[tuple[BaseWSGIServer, threading.Thread]] = []
        self.token_s = TOKEN_S
        self.asked: Final[list[str]] = []

    def serve(self, email: str) -> str:
        """host:port of the metadata server of a machine that runs as this account."""
        machine = _Machine(accounts=self._accounts, email=email, lifetime_s=lambda: self.token_s)
        return f"{self._host}:{self._start(Metadata(self._project, machine, self.asked.append))}"

    def close(self) -> None:
        """End them all."""
        servers, self._servers = self._servers, []
        for server, thread in servers:
            server.shutdown()
            thread.join()
            server.server_close()

    def _start(self, application: Metadata) -> int:
        server = make_server(self._bind, 0, application, threaded=True, request_handler=Connection)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": _LOOK_S}, daemon=True)
        thread.start()
        self._servers.append((server, thread))
        return int(server.server_address[1])
