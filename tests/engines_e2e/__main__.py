"""`make engines-e2e`: other engines under the same operator, on the cluster that is up.

    PYTHONPATH=cluster:tests .venv/bin/python -m engines_e2e vllm llamacpp

Each engine gets an image for CPUs and an object, and its pods live through the demo's load and a
rolling update. It writes a timeline as PNG and JSON. Exit 0 only if all was seen.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

import httpx
from bench.peers.install import CannotInstall
from demo.__main__ import Demo, say
from demo.timeline import Check
from e2e.kit import Cluster, NoClusterError
from engines_e2e.contexts import HERE, context_of
from sluice.kube import KubeError
from sluice_cluster import images
from sluice_cluster.settings import ClusterSettings, LocalClusterError
from sluice_cluster.state import State

CAP_IS = {"llamacpp": "gate", "vllm": "live"}
"""By engine: where the cap is held; live is inside, by our scheduler class."""
PHASES = [
    "warmup:closed:12:60", "capacity:closed:12:30", "low:open:0.5:40", "high:open:1.3:150",
    "ebb:open:0.25:120", "roll:open:0.4:90",
]  # fmt: skip
LOAD = ("--prompt-tokens", "8", "32", "--max-tokens", "8", "40")


def show(engine: str, cluster: Cluster, out: Path) -> bool:
    """Tell one engine's story; whether all was seen."""
    paths = ClusterSettings.from_environment().paths
    state = State.read(paths.state_file)
    assert state is not None, "Cluster.installed has read it"
    image = context_of(engine, paths.repository / "build" / "engines-e2e")
    say(f"\n== {engine}: its image")
    reference = images.deliver(paths, state, [image])[image.name]
    manifest = Template((HERE / f"{engine}.yaml").read_text()).substitute(image=reference)
    ours = {"operator": cluster.operator_image}
    demo = Demo(cluster.kube, paths.repository, ours, f"engines-{engine}", manifest)
    try:
        demo.apply()
        demo.complete()
        demo.drive(PHASES, LOAD)
        demo.seen.append(held(cluster.status(demo.name), CAP_IS[engine]))
        return demo.finish(out)
    finally:
        cluster.delete(demo.name)


def held(status: dict[str, dict[str, object]], where: str) -> Check:
    """The status says where the cap is held, and what gaps are measured on."""
    batching = status.get("batching", {})
    detail = f"capIs {batching.get('capIs')}, gapsFrom {batching.get('gapsFrom')}"
    return Check(f"the object says capIs {where}", batching.get("capIs") == where, detail)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all was seen, 1 if not, 3 without a cluster."""
    parser = argparse.ArgumentParser(prog="make engines-e2e", description=__doc__)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(CAP_IS)}")
    parser.add_argument("--out", type=Path, default=Path("build"), help="where PNG and JSON go")
    args = parser.parse_args(argv)
    if unknown := set(args.engines) - set(CAP_IS):
        parser.error(f"there is no engine {', '.join(sorted(unknown))}")
    try:
        cluster = Cluster.installed()
        told = [show(engine, cluster, args.out) for engine in args.engines or CAP_IS]
        return 0 if all(told) else 1
    except NoClusterError as e:
        say(str(e))
        return 3
    except (KubeError, LocalClusterError, CannotInstall, httpx.HTTPError) as e:
        say(f"\nIt stopped: {e}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
