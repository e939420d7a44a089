"""A worker that makes vectors, under its clients: openai's, and the routes of other servers."""

import base64
import json
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.worker_process import Worker, running_worker
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import SecretStr
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoModelForCausalLM
from unit.worker.execution.encoder_models import random_model, save_tokenizer
from unit.worker.execution.test_decoders_make_vectors import save

TEXTS = ["a", "the quick brown fox", "jumps over", "the lazy dog and on and on it runs"]
PROMPTS = {"query": "find ", "document": ""}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    random_model("Bert").save_pretrained(path / "base")
    save_tokenizer(path / "base")
    modules = [Transformer(str(path / "base"), max_seq_length=48), Pooling(32, "mean"), Normalize()]
    SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu").save(str(path / "saved"))
    return path / "saved"


@pytest.fixture(scope="module")
def worker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("embeddings")
    with running_worker(directory, "--load-format", "auto", model=model) as worker:
        yield worker


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[OpenAI]:
    with OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def reference(model: Path) -> SentenceTransformer:
    return SentenceTransformer(str(model), device="cpu")


def assert_close(ours: list[list[float]], theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(list(other), abs=2e-5)


def test_openais_client_gets_the_vectors_of_sentence_transformers(
    client: OpenAI, reference: SentenceTransformer
) -> None:
    """It asks for base64 where nothing is said."""
    reply = client.embeddings.create(model="tiny", input=TEXTS)
    assert [item.index for item in reply.data] == [0, 1, 2, 3]
    assert_close([item.embedding for item in reply.data], reference.encode(TEXTS))
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(len(t) + 2 for t in TEXTS)


def test_langchains_client_gets_them(worker: Worker, reference: SentenceTransformer) -> None:
    client = OpenAIEmbeddings(
        model="tiny",
        base_url=worker.url + "/v1",
        api_key=SecretStr("none"),
        check_embedding_ctx_length=False,  # else it splits texts by OpenAI's own tokens
    )
    assert_close(client.embed_documents(TEXTS), reference.encode(TEXTS))
    assert_close([client.embed_query("jumps")], reference.encode(["jumps"]))


def test_llamaindexs_client_gets_them(worker: Worker, reference: SentenceTransformer) -> None:
    client = OpenAILikeEmbedding(model_name="tiny", api_base=worker.url + "/v1", api_key="none")
    assert_close(client.get_text_embedding_batch(TEXTS), reference.encode(TEXTS))
    assert_close([client.get_query_embedding("jumps")], reference.encode(["jumps"]))


def test_a_decoder_with_its_modules_makes_vectors(tmp_path: Path) -> None:
    save(tmp_path / "base", "qwen3", AutoModelForCausalLM)
    save_tokenizer(tmp_path / "base")
    modules = [Transformer(str(tmp_path / "base")), Pooling(32, "lasttoken"), Normalize()]
    theirs = SentenceTransformer(modules=modules, device="cpu")
    theirs.save(str(tmp_path / "saved"))
    with running_worker(tmp_path, "--load-format", "auto", model=tmp_path / "saved") as worker:
        body = {"input": TEXTS}
        reply = httpx.post(worker.url + "/v1/embeddings", json=body).raise_for_status().json()
        assert_close([item["embedding"] for item in reply["data"]], theirs.encode(TEXTS))
        assert httpx.post(worker.url + "/v1/completions", json={"prompt": "a"}).status_code == 404


def test_both_formats_are_equal_to_the_bit(worker: Worker) -> None:
    def embedding(form: str) -> Any:
        body = {"input": "some text", "encoding_format": form}
        reply = httpx.post(worker.url + "/v1/embeddings", json=body).raise_for_status()
        return reply.json()["data"][0]["embedding"]

    packed = base64.b64decode(embedding("base64"))
    assert array("f", packed).tolist() == embedding("float")


def test_token_ids_and_2048_texts_at_once(client: OpenAI, reference: SentenceTransformer) -> None:
    ids = reference.tokenizer("some text")["input_ids"]
    by_ids = client.embeddings.create(model="tiny", input=[ids, ids[:3]]).data
    assert_close([by_ids[0].embedding], reference.encode(["some text"]))
    many = [TEXTS[i % 4][: 1 + i % 30] for i in range(2048)]
    reply = client.embeddings.create(model="tiny", input=many)
    assert_close([item.embedding for item in reply.data], reference.encode(many))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input": ""}, "empty text"),
        ({"input": []}, "input is empty"),
        ({"input": ["a"] * 2049}, "one request may have 2048"),
        ({"input": [1, 2, 64]}, "outside the vocabulary of 64"),
        ({"input": "word " * 30}, "maximum context length is 48 tokens"),
        ({"input": "a", "dimensions": 8}, "names no such trained length"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "normalize": False}, "normalize is not supported"),
        ({"input": "a", "prompt_name": "poem"}, "document, query"),
    ],
)
def test_a_request_that_cannot_be_right_is_told_so(
    worker: Worker, client: OpenAI, change: dict[str, Any], said: str
) -> None:
    reply = httpx.post(worker.url + "/v1/embeddings", json=change)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert client.embeddings.create(model="tiny", input="a").data


def test_a_long_text_is_cut_where_that_is_asked_for(
    worker: Worker, client: OpenAI, reference: SentenceTransformer
) -> None:
    long = "word " * 30
    extra = {"truncate_prompt_tokens": -1}
    reply = client.embeddings.create(model="tiny", input=[long, "a"], extra_body=extra)
    assert_close([item.embedding for item in reply.data], reference.encode([long, "a"]))
    extra = {"truncate_prompt_tokens": 49}
    with pytest.raises(BadRequestError, match="over the 48 tokens"):
        client.embeddings.create(model="tiny", input="a", extra_body=extra)


def test_the_routes_of_other_servers_answer_in_their_own_form(
    worker: Worker, reference: SentenceTransformer
) -> None:
    def post(path: str, **body: Any) -> Any:
        return httpx.post(worker.url + path, json=body).raise_for_status().json()

    plain, asked = reference.encode(TEXTS), reference.encode(TEXTS, prompt_name="query")
    assert_close(post("/embed", inputs=TEXTS), plain)
    assert_close(post("/embed", inputs=TEXTS, prompt_name="query"), asked)
    pooled = post("/pooling", input=TEXTS, task="embed")["data"]
    assert_close([item["data"] for item in pooled], plain)
    cohere = post("/v2/embed", texts=TEXTS, input_type="query", embedding_types=["float"])
    assert_close(cohere["embeddings"]["float"], asked)
    assert cohere["texts"] == TEXTS


def test_it_writes_no_text_and_says_what_it_serves(worker: Worker, client: OpenAI) -> None:
    assert client.models.list().data[0].id == "tiny"
    shown = httpx.get(worker.url + "/openapi.json").json()["paths"]
    assert {"/v1/embeddings", "/pooling", "/embed", "/v2/embed"} < shown.keys()
    assert "/v1/completions" not in shown
    with pytest.raises(NotFoundError):
        client.completions.create(model="tiny", prompt="a")


def test_its_texts_are_counted_by_their_ends_alone(worker: Worker, client: OpenAI) -> None:
    before = worker.metric("vllm:e2e_request_latency_seconds_count")
    client.embeddings.create(model="tiny", input=TEXTS)
    worker.until_metric("vllm:e2e_request_latency_seconds_count", before + len(TEXTS))
    assert worker.metric("vllm:time_to_first_token_seconds_count") == 0
    assert worker.metric("vllm:num_requests_running") == 0


def test_load_and_bench_know_vectors(worker: Worker, tmp_path: Path) -> None:
    """Their requests have no outputs: tokens are those of the texts, and the end is all."""
    route = ("--route", "/v1/embeddings", "--vocab-size", "60", "--prompt-tokens", "4", "20")
    start = (sys.executable, "-m", "sluice")
    load = ("load", "--url", worker.url, "--model", "tiny", "--phases", "a:closed:3:1")
    told = subprocess.run([*start, *load, *route], capture_output=True, text=True, check=True)
    phase = json.loads(told.stdout.splitlines()[-1])
    assert phase["results"] == {"ok": phase["sent"]}
    assert phase["tokens_per_s"] > phase["requests_per_s"] > 0
    caps = ("--max-num-seqs", "1,2", "--admin-url", worker.admin_url, "--out", str(tmp_path))
    waves = ("--wave", "8", "--waves", "2", "--silence", "0", "--seed", "1")
    bench = ("bench", "--url", worker.url, *caps, *waves)
    done = subprocess.run([*start, *bench, *route], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    points = json.loads((tmp_path / "bench.json").read_text())["points"]
    assert [point["cap"] for point in points] == [1, 2]
    assert all(point["e2e_ms"]["p99"] > 0 for point in points)
