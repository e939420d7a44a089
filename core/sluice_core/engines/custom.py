"""Any server with OpenAI's routes: image, command, port and health path come from the object. Pure.

`$(SLUICE_MODEL)` and `$(SLUICE_CAPACITY)` in its arguments are replaced by the kubelet.
"""

from .engine import ForeignEngine, Invocation, Start


def _invoke(start: Start) -> Invocation:
    env = {
        "SLUICE_MODEL": start.model,
        "SLUICE_MODEL_NAME": start.name or start.model,
        "SLUICE_CAPACITY": str(start.capacity),
        **({"SLUICE_REVISION": start.revision} if start.is_hub and start.revision else {}),
    }
    return Invocation(env=env)


ENGINE = ForeignEngine(
    name="custom", kind="Custom", image="", invoke=_invoke, capacity=256, health="/v1/models"
)
