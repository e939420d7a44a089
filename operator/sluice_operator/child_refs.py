"""The names of an object's children: those that are watched, and those that are read by name."""

from . import children
from .cluster import Ref
from .pod import secret_name
from .runtime import runtime_name
from .spec import InferenceService


def watched_refs(service: InferenceService) -> tuple[Ref, ...]:
    """Children that the watches show."""
    return (
        Ref("ConfigMap", service.namespace, runtime_name(service.name)),
        Ref("Service", service.namespace, children.deployment_name(service)),
        Ref("Deployment", service.namespace, children.deployment_name(service)),
    )


def unwatched_refs(service: InferenceService) -> tuple[Ref, ...]:
    """Children that no watch shows: the operator has no right to list secrets, for one."""
    return (
        Ref("Secret", service.namespace, secret_name(service)),
        Ref("PodDisruptionBudget", service.namespace, children.deployment_name(service)),
    )
