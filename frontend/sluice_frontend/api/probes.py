"""Routes that bring an engine no work: health, metrics, the model, the admin port. Pure."""

from . import response_types
from .operations import JSON, TEXT, Operation

HEALTHZ = Operation(
    "GET", "/healthz", "Would a restart help?", response_types.Health, answers=(200, 503)
)
HEALTH = Operation("GET", "/health", "Is the engine up?", response_types.Health, answers=(200, 503))
READYZ = Operation(
    "GET", "/readyz", "Is new work taken?", response_types.Readiness, answers=(200, 503)
)
VERSION = Operation("GET", "/version", "Sluice's version.", response_types.Version)
METRICS = Operation("GET", "/metrics", "Prometheus metrics.", media_type=TEXT)

MODELS = Operation("GET", "/v1/models", "The one model that is served.", response_types.ModelList)
MODEL = Operation(
    "GET", "/v1/models/{model:path}", "The same by name.", response_types.ModelCard, errors=(404,)
)
LOAD = Operation("GET", "/load", "How many sequences are open.", response_types.Load)
DOCUMENT = Operation("GET", "/openapi.json", "This document.", media_type=JSON)

# The admin port, by which the operator reads and changes a server.
RUNTIME_CONFIG = Operation("GET", "/v1/runtime_config", "The limits in force.")
PATCH = Operation("PATCH", "/v1/runtime_config", "Changes limits.")
EVIDENCE = Operation("GET", "/v1/evidence", "The closed ticks behind `after`.")
INTEGRITY = Operation("GET", "/v1/integrity", "Checks the engine's books.")
