"""Configuration files of the local cluster, as text. Pure: the templates and values come in."""

import base64
import json
from pathlib import Path
from string import Template

from sluice_cluster.settings import LocalClusterError


def render(template: str, values: dict[str, str]) -> str:
    """`template` with every ${name} replaced; ClusterError names one that has no value."""
    try:
        return Template(template).substitute(values)
    except KeyError as error:
        raise LocalClusterError(f"a template asks for {error}, which nobody gave") from error


def kubeconfig(server: str, ca: bytes, certificate: bytes, key: bytes) -> str:
    """A kubeconfig with everything inside it. JSON, which every YAML reader reads."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "sluice",
            "clusters": [
                {
                    "name": "sluice",
                    "cluster": {"server": server, "certificate-authority-data": _b64(ca)},
                }
            ],
            "users": [
                {
                    "name": "sluice",
                    "user": {
                        "client-certificate-data": _b64(certificate),
                        "client-key-data": _b64(key),
                    },
                }
            ],
            "contexts": [{"name": "sluice", "context": {"cluster": "sluice", "user": "sluice"}}],
        },
        indent=1,
    )


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def render_folder(templates: Path, target: Path, values: dict[str, str]) -> None:
    """Render every file below `templates` to the same name below `target`."""
    for source in sorted(p for p in templates.rglob("*") if p.is_file()):
        destination = target / source.relative_to(templates)
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.write_text(render(source.read_text(), values))
