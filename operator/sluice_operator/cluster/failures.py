"""Why an object's pods failed before any container ran, asked for while none of them serves.

The watch shows no pod that has ended. If a node refuses every pod, one more fails each second, up
to 12,500 by default (kube-controller-manager's `--terminated-pod-gc-threshold`).
"""

import math
import time
from collections.abc import Sequence

from .client import Cluster
from .observed import Object, Pod, Trouble, essence_of, failure_of


class FailedPods:
    """Failed pods of one object, by the pods' `label`; read every `every_s` at most."""

    def __init__(self, cluster: Cluster, namespace: str, label: str, every_s: float) -> None:
        self._cluster, self._namespace, self._label = cluster, namespace, label
        self._every_s, self._looked_s = every_s, -math.inf
        self._seen: Sequence[Object] = ()
        self._num_gone = -1

    async def newest(self, pods: Sequence[Pod], num_gone: int, now: float) -> Trouble | None:
        """Why the newest failed, if lately and while none of `pods` serves. Raises ClusterError.

        `num_gone`: pods that have gone so far. Without one more, none has failed since.
        """
        if any(pod.serving for pod in pods):
            return None
        is_due = time.monotonic() - self._looked_s >= self._every_s
        if is_due and num_gone != self._num_gone:
            self._num_gone = num_gone
            found = self._cluster.failed_pods(self._namespace, self._label)
            self._seen = [essence_of(body) async for body in found]
            self._looked_s = time.monotonic()
        return failure_of(self._seen, now)
