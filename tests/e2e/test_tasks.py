"""Services that write no text: each is Ready and answers its client."""

import base64
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import httpx
import PIL.Image
import pytest
from e2e.kit import Cluster
from openai import OpenAI

pytestmark = [pytest.mark.timeout(420)]
TASKS = {"Embed": "random-texts", "Classify": "random-classes", "ImageClassify": "random-images"}
DUMMY = {"args": ["--load-format=dummy"]}
SLO = {"endToEnd": "2s"}


def name_of(task: str) -> str:
    return f"e2e-{task.lower()}"


@pytest.fixture(scope="module")
def services(cluster: Cluster) -> Iterator[Cluster]:
    for task, checkpoint in TASKS.items():
        model = {"uri": f"file:///models/{checkpoint}", "task": task}
        hardware = {"accelerator": "cpu", "cpu": "250m", "memory": "2Gi"}
        cluster.apply(
            name_of(task), checkpoint, model=model, hardware=hardware, engine=DUMMY, slo=SLO
        )
    for task in TASKS:
        cluster.wait_condition(name_of(task), "Ready", "True", 300)
    yield cluster
    for task in TASKS:
        cluster.delete(name_of(task))


def test_the_memory_is_planned_before_any_pod(services: Cluster) -> None:
    for task in TASKS:
        fits = services.wait_condition(name_of(task), "ModelFits", "True", 30)
        assert "no KV cache is needed" in fits["message"]
        assert services.status(name_of(task))["batching"]["ceiling"] == 2048


def test_texts_become_vectors(services: Cluster) -> None:
    name = name_of("Embed")
    with services.kube.service_url(name) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = client.embeddings.create(model=name, input=["a text", "another one"])
    first, second = (one.embedding for one in answer.data)
    assert len(first) == len(second) == 384
    assert first != second


def ask(services: Cluster, task: str, **body: Any) -> Any:
    with services.kube.service_url(name_of(task)) as url:
        answer = httpx.post(f"{url}/classify", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def test_texts_and_images_are_classified(services: Cluster) -> None:
    [one] = ask(services, "Classify", input="a text")
    assert one["label"] in ("bad", "good", "odd")
    file = BytesIO()
    PIL.Image.new("RGB", (300, 200), (9, 99, 199)).save(file, "JPEG")
    image = base64.b64encode(file.getvalue()).decode()
    [one] = ask(services, "ImageClassify", input=image)
    assert one["label"] in ("cat", "dog", "fox")
    assert sum(one["probs"]) == pytest.approx(1)


def test_another_task_than_the_checkpoints_gets_no_pod(cluster: Cluster) -> None:
    model = {"uri": "file:///models/random-texts", "task": "Classify"}
    cluster.apply("e2e-other-task", "random-texts", model=model, engine=DUMMY, slo=SLO)
    try:
        fits = cluster.wait_condition("e2e-other-task", "ModelFits", "False", 60)
        assert "the checkpoint is for Embed" in fits["message"]
        assert cluster.kube.pods("e2e-other-task") == []
    finally:
        cluster.delete("e2e-other-task")
