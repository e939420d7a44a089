"""`sluice ui` in a real browser: of a real API server, and of a real worker without a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from integration import browser
from integration.apiserver import ApiServer, running_apiserver
from integration.operator_runs import Namespace, administrator, as_account, create_namespace
from integration.worker_process import running_worker
from sluice.__main__ import main
from sluice.ui.cluster import NOT_INSTALLED
from sluice_operator.reasons import Reason
from sluice_operator.status import events
from unit.cli.served import service_under_traffic
from unit.operator.batches import valid_batch

HOSTILE = '<img src=x onerror="window.hacked=1"><b>bold</b> \x1b[31m\u202e end'
SHOWN = '<img src=x onerror="window.hacked=1"><b>bold</b> \\x1b[31m\\u202e end'
NO_SCROLL = "document.documentElement.scrollWidth <= innerWidth"


@contextmanager
def running_ui(*flags: str, kubectl: Path | None = None) -> Iterator[str]:
    """`sluice ui`, and its address with the token; it ends with 0."""
    path = f"{kubectl.parent}{os.pathsep}" if kubectl else ""
    command = [sys.executable, "-m", "sluice", "ui", *flags]
    environment = {**os.environ, "PATH": path + os.environ["PATH"]}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().split()[0]
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


@pytest.fixture
async def tab() -> AsyncIterator[browser.Tab]:
    """A page whose console stays empty."""
    try:
        async with browser.opened() as tab:
            yield tab
            assert tab.errors == []
    except browser.NoBrowserError as e:
        pytest.skip(str(e))


def create_service(space: Namespace, name: str = "demo") -> dict[str, str]:
    """An object under traffic with its status; its metadata."""
    body = service_under_traffic()
    body["metadata"] = {"name": name}
    meta: dict[str, str] = space.create("inferenceservices", body)["metadata"]
    status = {"status": body["status"]}
    space.patch("inferenceservices", name, status, subresource="status")
    return meta


@pytest.fixture
def demo(space: Namespace) -> Namespace:
    """A namespace with a service that misses a target, one that does not, and a batch."""
    meta = create_service(space)
    notice = events.Notice(False, Reason.HEADROOM, "epoch 1: cap 2 -> 4", "epoch/1")
    space.create("events", events.manifest(meta, notice, time.time()))
    create_service(space, "another")
    calm = {"slo": {"timeToFirstToken": {"verdict": "Hold"}, "interTokenLatency": None}}
    space.patch("inferenceservices", "another", {"status": calm}, subresource="status")
    batch = valid_batch("nightly")
    batch["metadata"]["namespace"] = space.name
    space.create("inferencebatches", batch)
    counts = {"state": "in_progress", "counts": {"total": 10, "completed": 4, "failed": 0}}
    space.patch("inferencebatches", "nightly", {"status": counts}, subresource="status")
    return space


async def test_services_are_shown_live_and_fit_on_a_desk_and_in_a_hand(
    apiserver: ApiServer, demo: Namespace, tab: browser.Tab
) -> None:
    flags = (f"--kubeconfig={apiserver.kubeconfig}", "-n", demo.name)
    with running_ui(*flags, kubectl=apiserver.kubectl) as url:
        await tab.open(url)
        assert await tab.value("location.search") == "", "the token is not in the address"
        await tab.until("document.querySelectorAll('#fleet tbody tr').length == 2")
        names = await tab.value("[...document.querySelectorAll('#fleet a')].map(a => a.text)")
        assert names == ["demo", "another"], "who breaches is first"
        assert "4 of 10" in await tab.text()
        papers = set()
        for width, is_dark in ((1280, False), (1280, True), (400, False), (400, True)):
            await tab.size(width, is_dark=is_dark)
            for path in ("/", f"/services/{demo.name}/demo"):
                await tab.open(url.partition("/?")[0] + path)
                assert await tab.value(NO_SCROLL), (width, path)
            papers.add(await tab.value("getComputedStyle(document.body).backgroundColor"))
        assert len(papers) == 2, "light and dark"
        said = await tab.text()
        for part in ("P99 of first tokens", "Headroom: epoch 1: cap 2 -> 4", "nightly", "97.500%"):
            assert part in said
        await tab.value("window.kept = true")
        change = {"status": {"batching": {"cap": 63}}}
        demo.patch("inferenceservices", "demo", change, subresource="status")
        await tab.until("document.body.innerText.includes('cap 63')")
        assert await tab.value("window.kept"), "the page was not loaded again"
        demo.delete("inferenceservices", "demo")
        await tab.until("document.body.innerText.includes('not any more')")
    tab.errors = [e for e in tab.errors if "404" not in e]  # the browser logs each such answer


async def test_markup_and_control_characters_of_others_are_shown_as_text(
    apiserver: ApiServer, demo: Namespace, tab: browser.Tab
) -> None:
    told = {"type": "Ready", "status": "False", "reason": HOSTILE, "message": HOSTILE}
    status = {"status": {"conditions": [told], "batching": {"reason": "x", "message": HOSTILE}}}
    demo.patch("inferenceservices", "demo", status, subresource="status")
    meta = demo.get("inferenceservices", "demo")["metadata"]
    event = events.manifest(meta, events.Notice(True, Reason.HUNG, "-", "-"), time.time())
    demo.create("events", event | {"message": HOSTILE, "reason": "Told"})
    flags = (f"--kubeconfig={apiserver.kubeconfig}", "-n", demo.name)
    with running_ui(*flags, kubectl=apiserver.kubectl) as url:
        await tab.open(url)
        await tab.open(url.partition("/?")[0] + f"/services/{demo.name}/demo")
        said = await tab.text()
        assert said.count(SHOWN) >= 4, said
        assert await tab.value("document.querySelectorAll('img, main b b').length") == 0
        assert await tab.value("window.hacked") is None
        await tab.size(400)
        assert await tab.value(NO_SCROLL)


def test_who_may_list_one_namespace_sees_that_and_what_he_may_not(
    apiserver: ApiServer, client: httpx.Client, demo: Namespace, tmp_path: Path
) -> None:
    rights = "/apis/rbac.authorization.k8s.io/v1"
    for path, body in (
        ("/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": demo.name}}),
        (f"{rights}/namespaces/{demo.name}/roles", {
            "metadata": {"name": "looks"},
            "rules": [{"apiGroups": ["sluice.dev"], "resources": ["*"], "verbs": ["list"]}],
        }),
        (f"{rights}/namespaces/{demo.name}/rolebindings", {
            "metadata": {"name": "looks"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "looks"},
            "subjects": [{"kind": "ServiceAccount", "namespace": "default", "name": demo.name}],
        }),
    ):  # fmt: skip
        assert client.post(path, json=body).is_success
    own = as_account(apiserver, client, demo.name, tmp_path)
    config = json.loads(own.kubeconfig.read_text())
    for namespace, shown in ((demo.name, "only {} is shown"), ("default", "forbidden")):
        config["contexts"][0]["context"]["namespace"] = namespace
        own.kubeconfig.write_text(json.dumps(config))
        with (
            running_ui(f"--kubeconfig={own.kubeconfig}", kubectl=apiserver.kubectl) as url,
            httpx.Client(follow_redirects=True, trust_env=False) as person,
        ):
            assert shown.format(namespace) in person.get(url).text
            if namespace == demo.name:
                page = person.get(url.partition("/?")[0] + f"/services/{namespace}/demo").text
                assert "Its pods cannot be listed" in page
                assert "Its events cannot be listed" in page
                assert "P99 of first tokens" in page


async def test_an_api_server_that_is_away_leaves_the_page_with_the_age_of_its_data(
    tmp_path: Path, tab: browser.Tab
) -> None:
    with ExitStack() as life:
        server = life.enter_context(running_apiserver(tmp_path))
        with running_ui(f"--kubeconfig={server.kubeconfig}", kubectl=server.kubectl) as url:
            await tab.open(url)
            await tab.until(f"document.body.innerText.includes({json.dumps(NOT_INSTALLED)})")
            with administrator(server) as client:
                create_service(create_namespace(client, "away"))
            await tab.until("document.querySelector('#fleet a') != null")
            life.close()
            await tab.until("document.body.innerText.includes('All below is old')")
            assert "the API server does not answer" in await tab.text()
            assert await tab.value("document.querySelector('#fleet a').text") == "demo"
    await tab.until("!document.getElementById('gone').hidden")
    assert "sluice ui does not answer" in await tab.text()
    tab.errors = [e for e in tab.errors if "ERR_CONNECTION_REFUSED" not in e]


async def test_one_server_is_shown_without_a_cluster(tmp_path: Path, tab: browser.Tab) -> None:
    slo = ("--slo-ttft-ms", "500", "--slo-itl-ms", "100")
    with ExitStack() as life:
        worker = life.enter_context(running_worker(tmp_path, "--max-num-seqs", "4", *slo))
        flags = (f"--url={worker.url}", f"--admin-url={worker.admin_url}")
        with running_ui(*flags) as url:
            await tab.open(url)
            await tab.size(1280)
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 64, "ignore_eos": True}
            async with httpx.AsyncClient(timeout=60) as client:
                for _ in range(20):
                    answer = await client.post(f"{worker.url}/v1/completions", json=body)
                    assert answer.is_success
                await tab.until("document.querySelector('path.line.purple')?.getAttribute('d')")
                patch, route = {"epoch": 1, "cap": 2}, "/v1/runtime_config"
                assert (await client.patch(worker.admin_url + route, json=patch)).is_success
            await tab.until("document.body.innerText.includes('epoch 1: cap 4 -> 2')")
            said = await tab.text()
            assert "cap 2 of at most 4" in said
            assert "KV cache" in said
            await tab.size(400)
            assert await tab.value(NO_SCROLL)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--kubeconfig=/nowhere"], "--kubeconfig /nowhere is not a file"),
        (["--url=http://127.0.0.1:9"], "no admin port answers at http://127.0.0.1:8001"),
        ([], "kubectl has no cluster: set KUBECONFIG, or give --kubeconfig or --url"),
    ],
)
def test_without_anything_to_look_at_it_ends_with_one_sentence(
    apiserver: ApiServer, flags: list[str], told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", f"{apiserver.kubectl.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["ui", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sluice ui: {told}")
    assert error.count("\n") == 1
