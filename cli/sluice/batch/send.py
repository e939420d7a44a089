"""*rim*: one request to its result, with few retries."""

import asyncio
import time
from collections.abc import Callable, Mapping

import aiohttp
from sluice_core.bounded import number
from sluice_core.words import clean
from sluice_frontend.batches.item import MAX_DETAIL, TOO_MANY, Result, answered, unanswered
from sluice_frontend.batches.run import delay_s

PROBE_S = 10.0


class EndpointGone(Exception):
    """Nothing answers at the endpoint any more."""


class Sender:
    """Sends requests to the API at `url`; `slow_down` is told the monotonic time at which a request
    was sent that got 429. Waits before retries grow from `backoff_s`, drawn about it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        slow_down: Callable[[float], None],
        max_retries: int,
        backoff_s: float = 1.0,
        headers: Mapping[str, str] = {},
    ) -> None:
        self._session, self._url, self._slow_down = session, url, slow_down
        self._max_retries, self._backoff_s = max_retries, backoff_s
        self._headers = {"Content-Type": "application/json", **headers}

    async def send(self, custom_id: str, route: str, body: bytes) -> Result:
        """The result of one request; raises `EndpointGone`.

        429, 5xx and broken connections are tried again; nothing else is.
        """
        for retries in range(self._max_retries + 1):
            asked_s = None
            try:
                result, asked_s = await self._try(custom_id, route, body)
                is_last = not result.is_temporary
            except (aiohttp.ClientError, OSError) as e:
                is_connecting = isinstance(e, aiohttp.ConnectionTimeoutError)
                is_last = isinstance(e, TimeoutError) and not is_connecting
                result = unanswered(custom_id, "timeout" if is_last else "connection_error", e)
            if is_last or retries == self._max_retries:
                break
            await asyncio.sleep(delay_s(asked_s, retries, self._backoff_s))
        if result.response is None and not await answers(self._session, self._url):
            raise EndpointGone(f"{self._url} does not answer any more")
        return result

    async def _try(self, custom_id: str, route: str, body: bytes) -> tuple[Result, float | None]:
        """The result of one answer, and the seconds of its Retry-After."""
        sent_s = time.monotonic()
        async with self._session.post(
            self._url + route, data=body, headers=self._headers
        ) as answer:
            data = await answer.read()
        if answer.status == TOO_MANY:
            self._slow_down(sent_s)
        request_id = clean(answer.headers.get("x-request-id", ""), MAX_DETAIL)
        result = answered(custom_id, answer.status, request_id, data)
        return result, number(answer.headers.get("Retry-After"))


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """True if anything of HTTP comes from the server at `url`."""
    try:
        async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(PROBE_S)):
            return True
    except (aiohttp.ClientError, OSError):
        return False
