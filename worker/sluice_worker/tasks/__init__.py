"""What this worker does for clients: each module is a task, and `served` binds its operations."""

import importlib
import pkgutil

from sluice_frontend.api.operations import BoundOperation

from ..api.service import Service


def all_served(service: Service) -> list[BoundOperation]:
    """Collect the routes of all tasks."""
    names = (module.name for module in pkgutil.iter_modules(__path__, f"{__name__}."))
    tasks = (importlib.import_module(name) for name in names)
    return [route for task in tasks for route in task.served(service)]
