"""*rim*: pages for a browser on this machine that knows the token. Nothing here writes.

A page of another site cannot read or ask: the name that it was asked by, the origin of the asker
and the cookie are checked for each request.
"""

import hmac
from collections.abc import Sequence
from importlib.resources import files
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sluice.page import Html, tag

from .views import document

HOST = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
FILES = {"style.css": "text/css", "live.js": "text/javascript"}
UNKNOWN = "The token is missing or of another run: open the address that `sluice ui` printed."


class Source(Protocol):
    """What is looked at."""

    async def page(self, path: Sequence[str]) -> Html | None:
        """The page of a path, None where there is nothing."""
        ...


class Site:
    """The pages of `source`, on `port` of loopback."""

    def __init__(self, source: Source, token: str, port: int) -> None:
        self._source, self._token = source, token
        self._hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
        self._cookie = f"sluice-ui-{port}"  # a browser has one jar for all ports

    def app(self) -> web.Application:
        """The application, behind its guard."""
        app = web.Application(middlewares=[self._guard()])
        app.router.add_get("/", self._page)
        app.router.add_get("/services/{namespace}/{name}", self._page)
        for name, kind in FILES.items():
            app.router.add_get(f"/{name}", _file(name, kind))
        app.on_response_prepare.append(_add_headers)
        return app

    async def _page(self, request: web.Request) -> web.Response:
        path = [
            request.match_info[key] for key in ("namespace", "name") if key in request.match_info
        ]
        page, status = await self._source.page(path), 200
        if page is None:
            status, said = 404, tag("p", "There is no such service, or not any more.")
            page = document(
                "Gone", tag("section", said, tag("a", "all services", href="/"), id="head")
            )
        return web.Response(text=page, content_type="text/html", charset="utf-8", status=status)

    def _guard(self) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method not in ("GET", "HEAD"):
                raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
            if request.host not in self._hosts:
                raise web.HTTPForbidden(text="This page answers by 127.0.0.1 or localhost only.")
            if request.headers.get("Origin", f"http://{request.host}") != f"http://{request.host}":
                raise web.HTTPForbidden(text="This page answers no other site.")
            if self._is_token(request.query.get("token")):
                onward = web.HTTPSeeOther("/")
                onward.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict")
                raise onward
            if not self._is_token(request.cookies.get(self._cookie)):
                raise web.HTTPUnauthorized(text=UNKNOWN)
            return await handler(request)

        return guard

    def _is_token(self, given: str | None) -> bool:
        return hmac.compare_digest((given or "").encode(errors="replace"), self._token.encode())


def _file(name: str, kind: str) -> Handler:
    text = (files("sluice.ui") / name).read_text()

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=kind, charset="utf-8")

    return answer


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
