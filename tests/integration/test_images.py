"""Workers that read images: their clients' routes, and what they refuse."""

import asyncio
import base64
import io
import statistics
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import PIL.Image
import pytest
from integration.worker_process import Worker, running_worker
from openai import OpenAI
from transformers import AutoTokenizer, CLIPProcessor, pipeline
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from unit.worker.execution.encoder_models import random_model, save_tokenizer
from unit.worker.execution.image_models import (
    base64_of,
    pictures,
    random_images_model,
    random_joint_model,
    save,
)

LABELS = ["cat", "dog", "a", "fox"]


def serving(path: Path, name: str, model: Any) -> Iterator[Worker]:
    save(path / "model", name, model)
    with running_worker(path, "--load-format", "auto", model=path / "model") as worker:
        yield worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Iterator[Worker]:
    yield from serving(folder / "classes", "vit", random_images_model("vit", num_labels=5))


@pytest.fixture(scope="module")
def joint(folder: Path) -> Iterator[Worker]:
    yield from serving(folder / "joint", "clip", random_joint_model("clip", eos_token_id=3))


@pytest.fixture(scope="module")
def texts(folder: Path) -> Iterator[Worker]:
    path = folder / "texts"
    random_model("Bert").save_pretrained(path / "model")
    save_tokenizer(path / "model")
    with running_worker(path, "--load-format", "auto", model=path / "model") as worker:
        yield worker


def url(picture: PIL.Image.Image, form: str = "PNG") -> str:
    return f"data:image/{form.lower()};base64,{base64_of(picture, form)}"


def post(worker: Worker, path: str, **body: Any) -> Any:
    return httpx.post(worker.url + path, json=body).raise_for_status().json()


def refused(worker: Worker, path: str, **body: Any) -> str:
    answer = httpx.post(worker.url + path, json=body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def test_classes_are_the_pipelines(classifier: Worker, folder: Path) -> None:
    path = folder / "classes" / "model"
    processor = ViTImageProcessorPil.from_pretrained(path)
    pipe = pipeline(
        "image-classification", model=str(path), image_processor=processor, device="cpu"
    )
    sent = [url(picture) for picture in pictures()]
    ours = post(classifier, "/classify", input=sent)["data"]
    bare = post(classifier, "/predict", inputs=[[base64_of(one)] for one in pictures()])
    chats = [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": one}}]}]
        for one in sent
    ]
    in_messages = post(classifier, "/classify", messages=chats)["data"]
    for picture, one, predicted, said in zip(pictures(), ours, bare, in_messages, strict=True):
        expected = pipe(picture, top_k=5)
        assert one["label"] == said["label"] == predicted[0]["label"] == expected[0]["label"]
        assert [row["score"] for row in predicted] == pytest.approx(
            [row["score"] for row in expected], abs=2e-5
        )
        assert one["probs"] == pytest.approx(said["probs"])


def test_labels_of_a_request_are_the_zero_shot_pipelines(joint: Worker, folder: Path) -> None:
    path = folder / "joint" / "model"
    processor = CLIPProcessor.from_pretrained(path)
    pipe = pipeline(
        "zero-shot-image-classification",
        model=str(path),
        image_processor=processor.image_processor,
        tokenizer=AutoTokenizer.from_pretrained(path),
        device="cpu",
    )
    sent = [url(picture) for picture in pictures()]
    template = "a {}"
    ours = post(joint, "/classify", input=sent, labels=LABELS, hypothesis_template=template)["data"]
    for picture, one in zip(pictures(), ours, strict=True):
        expected = pipe(picture, candidate_labels=LABELS, hypothesis_template=template)
        assert one["label"] == expected[0]["label"]
        scores = {row["label"]: row["score"] for row in expected}
        assert one["probs"] == pytest.approx([scores[label] for label in LABELS], abs=1e-4)
    assert "labels is missing" in refused(joint, "/classify", input=sent)


def test_each_form_of_an_image_gives_the_same_vector(joint: Worker) -> None:
    """Data URL, base64 with Infinity's modality, vLLM's messages, Cohere's images and inputs."""
    picture = pictures()[0]
    data, part = url(picture), {"type": "image_url", "image_url": {"url": url(picture)}}
    content = [{"role": "user", "content": [part]}]
    with OpenAI(base_url=joint.url + "/v1", api_key="none", max_retries=0) as client:
        mixed = client.embeddings.create(model="", input=[data, "a dog"])
        first, text = (one.embedding for one in mixed.data)
    assert first != pytest.approx(text, abs=1e-3)
    alone = post(joint, "/v1/embeddings", input="a dog", modality="text")["data"][0]["embedding"]
    assert text == pytest.approx(alone, abs=2e-5)
    bare = base64_of(picture)
    forms = [
        post(joint, "/v1/embeddings", input=bare, modality="image")["data"][0]["embedding"],
        post(joint, "/v1/embeddings", messages=content)["data"][0]["embedding"],
        post(joint, "/pooling", messages=content)["data"][0]["data"],
        post(joint, "/embed", inputs=data)[0],
        post(joint, "/v2/embed", images=[data])["embeddings"]["float"][0],
        post(joint, "/v2/embed", inputs=[{"content": [part]}])["embeddings"]["float"][0],
    ]
    for form in forms:
        assert form == pytest.approx(first, abs=2e-5)
    assert post(joint, "/v1/embeddings", input=data)["usage"]["prompt_tokens"] == 17


def test_images_of_many_requests_share_steps(classifier: Worker) -> None:
    sent = [url(picture, "JPEG") for picture in pictures()]
    expected = [post(classifier, "/classify", input=one)["data"][0]["label"] for one in sent]
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(post, classifier, "/classify", input=one) for one in sent * 12]
        found = [each.result()["data"][0]["label"] for each in asked]
    assert found == expected * 12


async def test_health_answers_while_images_are_decoded(classifier: Worker) -> None:
    large = url(pictures()[0].resize((1600, 1200)), "JPEG")
    async with httpx.AsyncClient(timeout=120) as client:
        asked = [
            asyncio.create_task(
                client.post(f"{classifier.url}/classify", json={"input": [large] * 8})
            )
            for _ in range(8)
        ]
        took_s = list[float]()
        while not all(each.done() for each in asked):
            began_s = time.monotonic()
            (await client.get(classifier.url + "/health")).raise_for_status()
            took_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.01)
        assert {each.result().status_code for each in asked} == {200}
    assert len(took_s) > 20
    assert statistics.median(took_s) < 0.05


def bomb(side: int) -> str:
    """A PNG whose header alone says that it has side x side pixels."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"x"))
    return base64.b64encode(png + chunk(b"IEND", b"")).decode()


def stripe() -> str:
    """An image that would be resized to a billion pixels."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (1, 1 << 23)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_what_is_no_image_is_refused_and_harms_nothing(classifier: Worker, joint: Worker) -> None:
    whole = base64_of(pictures()[4], "JPEG")
    for data, sentence in (
        (base64.b64encode(base64.b64decode(whole)[:300]).decode(), "input 1 is no image"),
        (whole[: len(whole) // 2 // 4 * 4], "input 1 is no image"),
        (base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0").decode(), "input 1 is no image"),
        ("data:text/plain;base64,aGk=", "a data URL of an image"),
        ("not base64", "neither base64 nor a data URL"),
        (bomb(32_000), "32000 x 32000 pixels"),
    ):
        good = url(pictures()[0])
        assert sentence in refused(classifier, "/classify", input=[good, data])
        assert len(post(classifier, "/classify", input=good)["data"]) == 1
    told = refused(joint, "/v1/embeddings", input=stripe(), modality="image")
    assert "would be resized" in told
    assert "images only" in refused(classifier, "/classify", input=[[1, 2]])
    many = [url(PIL.Image.new("RGB", (2, 2)))] * 129
    assert "128" in refused(classifier, "/classify", input=many)
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": url(pictures()[0])}]
    chat = [{"role": "user", "content": parts}]
    assert "2 texts and images" in refused(joint, "/v1/embeddings", messages=chat)


def test_a_model_of_texts_reads_no_image(texts: Worker) -> None:
    data = url(pictures()[0])
    content = [{"type": "image_url", "image_url": {"url": data}}]
    chat = [{"role": "user", "content": content}]
    for body in ({"input": data}, {"input": base64_of(pictures()[0]), "modality": "image"}):
        assert "this model reads texts" in refused(texts, "/v1/embeddings", **body)
    assert "no messages" in refused(texts, "/v1/embeddings", messages=chat)
    assert "this model reads texts" in refused(texts, "/v2/embed", images=[data])
    assert len(post(texts, "/v1/embeddings", input="a dog")["data"]) == 1


def test_a_url_is_never_fetched(joint: Worker, classifier: Worker) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}/x.png"
    content = [{"type": "image_url", "image_url": {"url": place}}]
    try:
        for worker, body in (
            (joint, {"input": place, "modality": "image"}),
            (joint, {"messages": [{"role": "user", "content": content}]}),
        ):
            assert "no URL is fetched" in refused(worker, "/v1/embeddings", **body)
        assert "no URL is fetched" in refused(classifier, "/classify", input=place)
    finally:
        server.shutdown()
        server.server_close()
    assert not asked
