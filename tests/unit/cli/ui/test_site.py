"""Who sees a page: a browser that knows the token and asks by our name, and only to read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest
from aiohttp import web
from sluice.page import Html, tag
from sluice.processes import free_ports
from sluice.ui.site import HEADERS, HOST, Site

TOKEN = "right"


class Pages:
    """A source with one page and one service."""

    async def page(self, path: Sequence[str]) -> Html | None:
        return tag("p", "/".join(path)) if path in ([], ["default", "demo"]) else None


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Where the pages are."""
    [port] = free_ports(1)
    runner = web.AppRunner(Site(Pages(), TOKEN, port).app())
    await runner.setup()
    await web.TCPSite(runner, HOST, port).start()
    yield f"http://{HOST}:{port}"
    await runner.cleanup()


@pytest.fixture
async def browser(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """One that has opened the address with the token."""
    jar = aiohttp.CookieJar(unsafe=True)  # also for addresses
    async with aiohttp.ClientSession(cookie_jar=jar) as session:
        async with session.get(f"{url}/?token={TOKEN}") as answer:
            assert (answer.status, str(answer.url)) == (200, f"{url}/"), "the token has left it"
        yield session


async def status(session: aiohttp.ClientSession, method: str, url: str, **headers: str) -> int:
    async with session.request(method, url, headers=headers, allow_redirects=False) as answer:
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, f"{answer.status} without {name}"
        return answer.status


async def test_the_first_address_leaves_a_cookie_that_no_script_and_no_other_site_uses(
    url: str,
) -> None:
    async with aiohttp.ClientSession() as session:
        answer = await session.get(f"{url}/?token={TOKEN}", allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        set_cookie = answer.headers["Set-Cookie"]
        assert set_cookie.startswith(f"sluice-ui-{url.rpartition(':')[2]}={TOKEN}")
        assert "HttpOnly" in set_cookie
        assert "SameSite=Strict" in set_cookie


@pytest.mark.parametrize("path", ["/", "/style.css", "/live.js", "/services/default/demo", "/x"])
async def test_without_the_token_there_is_nothing(url: str, path: str) -> None:
    async with aiohttp.ClientSession() as session:
        assert await status(session, "GET", url + path) == 401
        assert await status(session, "GET", url + path + "?token=wr%C3%B6ng") == 401
        cookie = f"sluice-ui-{url.rpartition(':')[2]}=wr\xf6ng"
        assert await status(session, "GET", url + path, Cookie=cookie) == 401


async def test_with_it_there_are_the_pages(browser: aiohttp.ClientSession, url: str) -> None:
    paths = {"/": 200, "/style.css": 200, "/live.js": 200, "/services/default/demo": 200,
             "/services/default/other": 404, "/services": 404}  # fmt: skip
    assert {path: await status(browser, "GET", url + path) for path in paths} == paths
    assert await status(browser, "HEAD", f"{url}/") == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
async def test_nothing_writes(browser: aiohttp.ClientSession, url: str, method: str) -> None:
    assert await status(browser, method, f"{url}/") == 405


@pytest.mark.parametrize("host", ["evil.example", "localhost", "127.0.0.1:1", "localhost.evil:80"])
async def test_another_name_is_refused_though_the_token_is_right(
    browser: aiohttp.ClientSession, url: str, host: str
) -> None:
    assert await status(browser, "GET", f"{url}/", Host=host) == 403
    assert await status(browser, "GET", f"{url}/?token={TOKEN}", Host=host) == 403


async def test_another_origin_is_refused(browser: aiohttp.ClientSession, url: str) -> None:
    assert await status(browser, "GET", f"{url}/", Origin="http://evil.example") == 403
    assert await status(browser, "GET", f"{url}/", Origin="null") == 403
    assert await status(browser, "GET", f"{url}/", Origin=url) == 200
    port = url.rpartition(":")[2]
    assert await status(browser, "GET", f"{url}/", Host=f"localhost:{port}") == 200
