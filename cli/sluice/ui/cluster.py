"""*rim*: what a user may see of a cluster, asked again and again through `kubectl proxy`.

kubectl reads the kubeconfig and signs in, as for any command. Here it listens on a socket in a
folder of this user alone, and passes only GET of the lists that are shown.
"""

import asyncio
import json
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
from sluice_core.words import clean, clean_all
from sluice_operator.children.manifests import INSTANCE_LABEL, MANAGED_BY, MANAGED_BY_LABEL
from sluice_operator.cluster.observed import uid_of
from sluice_operator.spec.batch import BATCH_PLURAL
from sluice_operator.spec.service import API_VERSION, PLURAL

from sluice.kube import NAMESPACE, UNREADABLE, KubeError
from sluice.page import Html
from sluice.processes import LEAVES_S, die_with_parent, end, spawn

from . import views
from .history import History, of_status
from .objects import Detail, Fleet, Object, in_order, key_of

PERIOD_S = 2.0
WATCHED_S = 10.0
"""Pods and events of an object are asked for until nobody has looked at it for so long."""
LIMIT_S = 15.0
MAX_TOLD = 300
NOT_INSTALLED = "Sluice's chart is not installed in it"
GUARDS = (
    "--reject-methods=POST,PUT,PATCH,DELETE",
    f"--accept-paths=^/apis/{API_VERSION}/(namespaces/[^/]+/)?({PLURAL}|{BATCH_PLURAL})$,"
    "^/api/v1/namespaces/[^/]+/(pods|events)$",
)
"""Of kubectl: only the lists that are shown."""
Notes = tuple[str, ...]


class Refused(KubeError):
    """An answer without a list. `status`: HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """One cluster as one user sees it. `namespace`: the only one to show; None: all, or `own`,
    that of kubectl's context, if he may not list them all."""

    def __init__(self, session: aiohttp.ClientSession, namespace: str | None, own: str) -> None:
        self._session, self._namespace, self._own = session, namespace, own
        self._fleet = Fleet()
        self._details = dict[tuple[str, str], Detail]()
        self._asked_s = dict[tuple[str, str], float]()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def page(self, path: Sequence[str]) -> Html | None:
        """All services, or the one of that namespace and name; None if it is not there."""
        if not path:
            return views.fleet(self._fleet, time.time())
        namespace, name = path
        body = self._fleet.find(namespace, name)
        if body is None:
            return None
        key = key_of(body)
        if key not in self._details:
            self._details[key] = await self._closer(body)
        self._asked_s[key] = time.monotonic()
        return views.service(self._fleet, body, self._details[key], time.time())

    async def look(self) -> None:
        """Ask once for all that is shown. What cannot be read stays as it was."""
        histories = self._fleet.histories
        try:
            services, notes = await self._everywhere(PLURAL, ())
            batches, notes = await self._batches(notes)
        except KubeError as e:
            self._fleet = replace(self._fleet, problem=str(e))
            for history in histories.values():
                history.interrupt()
            return
        now = time.time()
        kept = {uid: histories.get(uid) or History() for uid in map(uid_of, services)}
        for body in services:
            try:
                kept[uid_of(body)].add(now, of_status(body.get("status") or {}))
            except UNREADABLE:
                kept[uid_of(body)].interrupt()
        self._fleet = Fleet(in_order(services), batches, now, "", notes, kept)
        for key, asked_s in list(self._asked_s.items()):
            found = self._fleet.find(*key)
            if found is None or time.monotonic() > asked_s + WATCHED_S:
                del self._asked_s[key], self._details[key]
            else:
                self._details[key] = await self._closer(found)

    async def _batches(self, notes: Notes) -> tuple[list[Object], Notes]:
        try:
            return await self._everywhere(BATCH_PLURAL, notes)
        except Refused as e:
            return [], (*notes, f"Batches cannot be listed: {e}.")

    async def _everywhere(self, plural: str, notes: Notes) -> tuple[list[Object], Notes]:
        """All objects of a kind that he may list, and `notes` with what he may not."""
        if self._namespace is None:
            try:
                return await self._list(f"/apis/{API_VERSION}/{plural}"), notes
            except Refused as e:
                if e.status != 403:
                    raise
        namespace = self._namespace or self._own
        found = await self._list(f"/apis/{API_VERSION}/namespaces/{namespace}/{plural}")
        note = f"You may not list all namespaces: only {namespace} is shown."
        return found, notes if self._namespace or note in notes else (*notes, note)

    async def _closer(self, body: Object) -> Detail:
        """Pods and events of one service."""
        (namespace, name), uid = key_of(body), uid_of(body)
        asked = {
            "pods": {"labelSelector": f"{INSTANCE_LABEL}={name},{MANAGED_BY_LABEL}={MANAGED_BY}"},
            "events": {"fieldSelector": f"involvedObject.uid={uid}"},
        }
        found, notes = dict[str, list[Object]](), list[str]()
        for plural, chosen in asked.items():
            try:
                path = f"/api/v1/namespaces/{namespace}/{plural}"
                found[plural] = await self._list(path, chosen)
            except KubeError as e:
                notes.append(f"Its {plural} cannot be listed: {e}.")
        return Detail(found.get("pods", ()), found.get("events", ()), tuple(notes))

    async def _list(self, path: str, chosen: Mapping[str, str] | None = None) -> list[Object]:
        """The objects of a list. All their texts are cleaned; raises KubeError."""
        try:
            async with self._session.get(f"http://localhost{path}", params=chosen) as response:
                told = await response.read()
        except (aiohttp.ClientError, TimeoutError) as e:
            raise KubeError(f"the API server does not answer ({type(e).__name__})") from e
        if response.status == 404:
            raise Refused(404, f"the cluster has no {path.rpartition('/')[2]}: {NOT_INSTALLED}")
        try:
            found = clean_all(json.loads(told))
        except (ValueError, RecursionError) as e:  # kubectl's own words
            said = clean(told.decode(errors="replace").strip(), MAX_TOLD)
            raise Refused(response.status, f"the API server does not answer: {said}") from e
        if response.status != 200:
            raise Refused(response.status, f"the API server says: {found.get('message')}")
        return list(found["items"])


@asynccontextmanager
async def opened(kubeconfig: Path | None, namespace: str | None) -> AsyncIterator[Cluster]:
    """The cluster of kubectl's context, behind a `kubectl proxy` that ends on leaving. Raises
    KubeError."""
    chosen = [f"--kubeconfig={kubeconfig}"] if kubeconfig else []
    own = await _own_namespace(chosen)
    with tempfile.TemporaryDirectory(prefix="sluice-ui-") as folder:  # nobody else may enter it
        socket = Path(folder) / "kubectl"
        words = ["kubectl", "proxy", *chosen, f"--unix-socket={socket}", *GUARDS]
        proxy = await spawn(words, prepare=die_with_parent, stdout=PIPE)
        try:
            if not proxy.stdout or not await proxy.stdout.readline():  # it tells where it listens
                raise KubeError("kubectl proxy has ended")
            limit = aiohttp.ClientTimeout(total=LIMIT_S)
            connector = aiohttp.UnixConnector(str(socket))
            async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
                cluster = Cluster(session, namespace, own)
                await cluster.look()
                yield cluster
        finally:
            await end(proxy, LEAVES_S)


async def _own_namespace(chosen: Sequence[str]) -> str:
    """The namespace of kubectl's context; raises KubeError where there is no context."""
    command = ("kubectl", "config", "view", "--minify", "--output=json", *chosen)
    try:
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    except OSError as e:
        raise KubeError(f"kubectl: {e.strerror}") from e
    told = (await process.communicate())[0]
    if process.returncode:
        raise KubeError("kubectl has no cluster: set KUBECONFIG, or give --kubeconfig or --url")
    context = json.loads(told)["contexts"][0]["context"]
    return str(context.get("namespace") or NAMESPACE)
