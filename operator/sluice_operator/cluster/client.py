"""The only module that writes to the API server: server-side apply through the official client.

Every write is idempotent (deterministic names, one field manager). So one that is repeated after a
crash or a broken connection does no harm. Calls run in threads and each has a deadline.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import urllib3
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from sluice_core.bounded import count
from sluice_core.words import clean

from ..metrics import Metrics
from ..settings import FIELD_MANAGER
from ..spec.batch import BATCH_KIND, BATCH_PLURAL
from ..spec.service import API_VERSION, GROUP, KIND, PLURAL, VERSION
from .observed import Object, uid_of, version

_log = logging.getLogger(__name__)
_DEADLINE_S = 30
_THREADS = 64
"""Concurrent calls: a slow webhook for many objects must not hold up the others."""
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_ATTEMPTS = 4
_MAX_WAIT_S = 10.0
_PAGE = "10"
"""Objects on one page of a list: a user may create objects of some MiB each."""
_METADATA_PAGE = "100"
"""... of a list that holds only their metadata, each at most some hundred KiB."""
_LISTS = 4
"""Pages that are read at once."""
_MAX_FAILED = 200
_JSON = {"Accept": "application/json", "Content-Type": "application/json"}
_METADATA = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
"""Content type of a list that holds only the metadata of each object."""
LIVE_PODS = "status.phase!=Failed,status.phase!=Succeeded"
"""Selects pods that have not ended; there may be thousands that have."""
_ENDED_PODS = "status.phase!=Pending,status.phase!=Running,status.phase!=Unknown"
RESOURCES: Mapping[str, tuple[str, str, str]] = {
    KIND: (GROUP, VERSION, PLURAL),
    BATCH_KIND: (GROUP, VERSION, BATCH_PLURAL),
    "ConfigMap": ("", "v1", "configmaps"),
    "Secret": ("", "v1", "secrets"),
    "Service": ("", "v1", "services"),
    "Event": ("", "v1", "events"),
    "Pod": ("", "v1", "pods"),
    "Deployment": ("apps", "v1", "deployments"),
    "Job": ("batch", "v1", "jobs"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
    "PodDisruptionBudget": ("policy", "v1", "poddisruptionbudgets"),
}
"""Group, version and plural of each kind."""


_OF_TEMPLATE = re.compile(r"spec\.(template|leaderWorkerTemplate\.\w+Template)\.")


class ClusterError(Exception):
    """The API server refused a request or could not be reached; `status` 0 means the latter. Its
    words may be a webhook's."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(clean(message))
        self.status, self.reason, self.retry_after_s = status, clean(reason), retry_after_s

    @property
    def is_of_template(self) -> bool:
        """True if a pod template was refused for a field or a value. Its writer must mend it: the
        API server answers 500 to a field that it does not know."""
        return self.status in (422, 500) and bool(_OF_TEMPLATE.search(str(self)))


@dataclass(frozen=True, slots=True)
class Ref:
    """The name of one object."""

    kind: str
    namespace: str
    name: str = ""

    @property
    def path(self) -> str:
        """Its path at the API server; without a name the collection's, and without a namespace that
        of all."""
        group, version, plural = RESOURCES[self.kind]
        prefix = f"apis/{group}" if group else "api"
        inside = f"namespaces/{self.namespace}/" if self.namespace else ""
        collection = f"/{prefix}/{version}/{inside}{plural}"
        return f"{collection}/{self.name}" if self.name else collection


@dataclass(frozen=True, slots=True)
class Listed:
    """The uids of a list, and the resourceVersion at which it was taken."""

    uids: frozenset[str]
    version: int

    def lacks(self, body: Object | None) -> bool:
        """True if that object was gone when the list was taken. A newer one may not be in it."""
        return body is not None and version(body) <= self.version and uid_of(body) not in self.uids


def ref_of(manifest: Object) -> Ref:
    """The name of `manifest`."""
    meta = manifest["metadata"]
    return Ref(manifest["kind"], meta["namespace"], meta["name"])


class Cluster:
    """One connection pool to the API server."""

    def __init__(self, api: ApiClient, metrics: Metrics) -> None:
        self._api, self._metrics = api, metrics
        self._threads = ThreadPoolExecutor(_THREADS, "api")
        self._lists = asyncio.Semaphore(_LISTS)

    @staticmethod
    def connect(metrics: Metrics) -> "Cluster":
        """Connect by the pod's service account, else by KUBECONFIG; ClusterError without either."""
        configuration = Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)
        except ConfigException:
            try:
                config.load_kube_config(client_configuration=configuration)
            except (ConfigException, OSError) as e:
                raise ClusterError(0, "NoCluster", f"no cluster is configured: {e}") from e
        configuration.retries = False  # the passes retry, and count it
        configuration.connection_pool_maxsize = _THREADS
        return Cluster(ApiClient(configuration), metrics)

    async def get(self, ref: Ref) -> Object | None:
        """The live object, or None if there is none."""
        return await self._unless(404, "GET", ref.kind, ref.path)

    async def listed(self, collection: Ref, label: str = "") -> Listed:
        """All that has the label, or all without one. Pods that have ended are left out."""
        query = [("labelSelector", label)] if label else []
        if collection.kind == "Pod":
            query.append(("fieldSelector", LIVE_PODS))
        headers, uids, taken = {**_JSON, "Accept": _METADATA}, list[str](), 0
        async for page in self._pages(collection, query, headers, _METADATA_PAGE):
            taken = version(page)
            uids += [body["metadata"]["uid"] for body in page.get("items") or ()]
        return Listed(frozenset(uids), taken)

    def live_pods(self, namespace: str, label: str) -> AsyncIterator[Object]:
        """The pods with the label that have not ended."""
        query = [("labelSelector", label), ("fieldSelector", LIVE_PODS)]
        return self._list(Ref("Pod", namespace), query)

    async def failed_pods(self, namespace: str, label: str) -> AsyncIterator[Object]:
        """The first pods with the label that have failed. Names are random, so a sample of
        thousands holds some of each hour."""
        query = [("labelSelector", label), ("fieldSelector", "status.phase=Failed")]
        num_left = _MAX_FAILED
        async for body in self._list(Ref("Pod", namespace), query):
            yield body
            num_left -= 1
            if not num_left:
                return

    def ended_pods(self, namespace: str, label: str) -> AsyncIterator[Object]:
        """The pods with the label that have ended."""
        query = [("labelSelector", label), ("fieldSelector", _ENDED_PODS)]
        return self._list(Ref("Pod", namespace), query)

    async def _list(self, ref: Ref, query: Sequence[tuple[str, str]]) -> AsyncIterator[Object]:
        """The objects of a kind and namespace that `query` selects, read a few at a time."""
        async for page in self._pages(ref, query, _JSON, _PAGE):
            for body in page.get("items") or ():
                yield body

    async def _pages(
        self, ref: Ref, query: Sequence[tuple[str, str]], headers: Mapping[str, str], size: str
    ) -> AsyncIterator[Object]:
        rest = ""
        while True:
            page = [*query, ("limit", size), *([("continue", rest)] if rest else [])]
            async with self._lists:
                answer = await self._call("GET", ref.kind, ref.path, page, headers=headers)
            yield answer
            rest = (answer.get("metadata") or {}).get("continue") or ""
            if not rest:
                return

    async def serves_objects(self) -> bool:
        """True if the CRD is installed."""
        known = await self._unless(404, "GET", KIND, f"/apis/{API_VERSION}") or {}
        return any(resource.get("name") == PLURAL for resource in known.get("resources", ()))

    async def apply(self, manifest: Object, subresource: str = "") -> Object:
        """Server-side apply of all of `manifest`'s fields; returns the object after it.

        A resourceVersion in the manifest makes it conditional: 409 if somebody else wrote since.
        """
        ref = ref_of(manifest)
        path = f"{ref.path}/{subresource}" if subresource else ref.path
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        headers = {**_JSON, "Content-Type": _APPLY}
        return await self._call("PATCH", ref.kind, path, query, manifest, headers)

    async def merge(self, ref: Ref, patch: Object) -> Object:
        """Write `patch` over the live object, and return that: a list replaces the list there, and
        None removes a field. Server-side apply would leave what others have put beside ours."""
        headers = {**_JSON, "Content-Type": _MERGE}
        query = [("fieldManager", FIELD_MANAGER)]
        return await self._call("PATCH", ref.kind, ref.path, query, patch, headers)

    async def create_once(self, manifest: Object) -> None:
        """Create `manifest`, unless an object of that name is there already."""
        ref = ref_of(manifest)
        await self._unless(409, "POST", ref.kind, replace(ref, name="").path, body=manifest)

    async def _unless(self, status: int, *call: Any, **more: Any) -> Object | None:
        """The answer of `_call`; None if it is refused with `status`."""
        try:
            return await self._call(*call, **more)
        except ClusterError as e:
            if e.status == status:
                return None
            raise

    async def _call(
        self,
        verb: str,
        kind: str,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        body: Object | None = None,
        headers: Mapping[str, str] = _JSON,
    ) -> Object:
        """One request with its retries."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                send = partial(self._send, verb, kind, path, list(query), body, headers)
                return await asyncio.get_running_loop().run_in_executor(self._threads, send)
            except ClusterError as e:
                if attempt == _ATTEMPTS or not _is_worth_retrying(e):
                    raise
                wait_s = min(max(e.retry_after_s, 0.2 * 2**attempt), _MAX_WAIT_S)
                _log.debug("%s %s: %s; again in %.1f s", verb, path, e, wait_s)
                await asyncio.sleep(wait_s)
        raise AssertionError("unreachable")

    def _send(
        self,
        verb: str,
        kind: str,
        path: str,
        query: list[tuple[str, str]],
        body: Object | None,
        headers: Mapping[str, str],
    ) -> Object:
        try:
            request = self._api.param_serialize(
                verb,
                path,
                query_params=query,
                header_params=dict(headers),
                body=body,
                auth_settings=[
                    "BearerToken"
                ],  # read anew, from a file that a moment may be without
            )
            response = self._api.call_api(*request, _request_timeout=_DEADLINE_S)
            data = response.read()
        except _UNREACHABLE as e:
            self._metrics.api_requests.labels(verb, kind, "0").inc()
            raise ClusterError(0, "Unreachable", f"the API server cannot be reached: {e}") from e
        self._metrics.api_requests.labels(verb, kind, str(response.status)).inc()
        if not 200 <= response.status < 300:
            raise _refusal(response.status, data, response.getheader("Retry-After"))
        if (answer := _object_of(data)) is None:
            raise ClusterError(0, "BadAnswer", "the API server did not answer with a JSON object")
        return answer


_UNREACHABLE = (urllib3.exceptions.HTTPError, ApiException, ConfigException, OSError)
"""Errors of a connection: ApiException comes from TLS, ConfigException from an empty token."""


def _is_worth_retrying(error: ClusterError) -> bool:
    # 409 is not here: it means that our knowledge is stale, and the next pass looks again.
    return error.status in (0, 429) or error.status >= 500


def _object_of(data: bytes) -> Object | None:
    """`data` as a JSON object; None if it is none, for example a proxy's page."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refusal(status: int, data: bytes, retry_after: str | None) -> ClusterError:
    """The API server's own words; its Status objects never repeat what we sent of a Secret."""
    said = _object_of(data) or {}
    wait_s = float(count(retry_after) or 0)
    message = str(said.get("message") or f"the API server answered {status}")
    return ClusterError(status, str(said.get("reason") or "Unknown"), message, wait_s)
