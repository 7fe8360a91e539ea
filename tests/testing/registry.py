"""A registry of images on 127.0.0.1, with prepared content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.kit.http_server import HttpReply, HttpRequest, HttpServer

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"


def registry(contents: Mapping[str, bytes]) -> HttpServer:
    """Serves this content by path; manifests only to requests that accept their type."""

    def respond(request: HttpRequest) -> HttpReply:
        good = request.path in contents and ("blobs" in request.path or MANIFEST in request.headers["accept"])
        return HttpReply(200 if good else 404, contents[request.path] if good else b"{}", {"Content-Type": MANIFEST})

    return HttpServer(respond)
