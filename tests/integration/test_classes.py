"""A worker that classifies and one that ranks, under the forms of vLLM, Jina and TEI."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from integration.worker_process import Worker, running_worker
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Transformer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)
from unit.worker.execution.encoder_models import random_model, save_tokenizer
from unit.worker.execution.test_decoders_make_vectors import HEADS

TEXTS = ["a", "the quick brown fox", "jumps over", "the lazy dog and on and on it runs"]
QUERY = "what runs"
LABELS = {0: "bad", 1: "good", 2: "odd"}
KIND = "ForSequenceClassification"


def serving(path: Path, name: str, **changes: Any) -> Iterator[Worker]:
    random_model(name, KIND, **changes).save_pretrained(path / "model")
    save_tokenizer(path / "model", tells_pairs=name == "Bert")
    with running_worker(path, "--load-format", "auto", model=path / "model") as worker:
        yield worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classes")


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Iterator[Worker]:
    yield from serving(folder / "labels", "DistilBert", id2label=LABELS)


@pytest.fixture(scope="module")
def ranker(folder: Path) -> Iterator[Worker]:
    yield from serving(folder / "scores", "Bert", num_labels=1)


def post(worker: Worker, path: str, **body: Any) -> Any:
    return httpx.post(worker.url + path, json=body).raise_for_status().json()


def test_classes_are_the_pipelines(classifier: Worker, folder: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "labels" / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "labels" / "model")
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    theirs = pipe(TEXTS, top_k=None)
    ours = post(classifier, "/classify", input=TEXTS)["data"]
    bare = post(classifier, "/predict", inputs=[[text] for text in TEXTS])
    for expected, one, predicted in zip(theirs, ours, bare, strict=True):
        probs = {row["label"]: row["score"] for row in expected}
        assert one["probs"] == pytest.approx([probs[label] for label in LABELS.values()], abs=2e-5)
        assert one["label"] == predicted[0]["label"] == expected[0]["label"]
        assert [row["score"] for row in predicted] == pytest.approx(
            [row["score"] for row in expected], abs=2e-5
        )
    alone = post(classifier, "/predict", inputs=TEXTS[0])
    assert [row["label"] for row in alone] == [row["label"] for row in bare[0]]


def test_raw_numbers_only_where_they_are_asked_for(classifier: Worker) -> None:
    raw = post(classifier, "/classify", input=TEXTS, use_activation=False)["data"]
    assert any(abs(sum(one["probs"]) - 1) > 1e-3 for one in raw)
    for one in post(classifier, "/classify", input=TEXTS)["data"]:
        assert sum(one["probs"]) == pytest.approx(1)


def test_scores_are_the_cross_encoders(ranker: Worker, folder: Path) -> None:
    theirs = CrossEncoder(str(folder / "scores" / "model"), device="cpu")
    expected = theirs.predict([(QUERY, text) for text in TEXTS]).tolist()
    for sides in (("queries", "documents"), ("data_1", "data_2"), ("text_1", "text_2")):
        body = dict(zip(sides, (QUERY, TEXTS), strict=True))
        scores = [one["score"] for one in post(ranker, "/v1/score", **body)["data"]]
        assert scores == pytest.approx(expected, abs=2e-5)
    [[pair], _] = post(ranker, "/predict", inputs=[[QUERY, TEXTS[0]], [QUERY, TEXTS[1]]])
    assert pair["score"] == pytest.approx(expected[0], abs=2e-5)


def test_what_sentence_transformers_saves_is_scored_as_it_scores(
    folder: Path, tmp_path: Path
) -> None:
    """A file that says Identity: scores are the model's numbers, relevances are 0 to 1."""
    theirs = CrossEncoder(
        str(folder / "scores" / "model"), activation_fn=torch.nn.Identity(), device="cpu"
    )
    theirs.save_pretrained(str(tmp_path / "saved"))
    expected = theirs.predict([(QUERY, text) for text in TEXTS])
    with running_worker(tmp_path, "--load-format", "auto", model=tmp_path / "saved") as worker:
        scores = post(worker, "/score", queries=QUERY, documents=TEXTS)["data"]
        assert [one["score"] for one in scores] == pytest.approx(expected.tolist(), abs=5e-5)
        ranked = post(worker, "/rerank", query=QUERY, documents=TEXTS)["results"]
    sigmoids = sorted((1 / (1 + math.exp(-value)) for value in expected), reverse=True)
    assert [one["relevance_score"] for one in ranked] == pytest.approx(sigmoids, abs=2e-5)


def test_each_rerank_route_answers_in_its_own_form(ranker: Worker, folder: Path) -> None:
    theirs = CrossEncoder(str(folder / "scores" / "model"), device="cpu")
    ranked = theirs.rank(QUERY, TEXTS)
    order = [one["corpus_id"] for one in ranked]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        found = post(ranker, path, query=QUERY, documents=TEXTS)["results"]
        assert [one["index"] for one in found] == order
        assert [one["relevance_score"] for one in found] == pytest.approx(
            [one["score"] for one in ranked], abs=2e-5
        )
        assert "document" not in found[0]
    objects = [{"text": text} for text in TEXTS]
    two = post(ranker, "/v1/rerank", query=QUERY, documents=objects, top_n=2, return_documents=True)
    assert [one["document"]["text"] for one in two["results"]] == [TEXTS[i] for i in order[:2]]
    bare = post(ranker, "/rerank", query=QUERY, texts=TEXTS, return_text=True)
    assert [(one["index"], one["text"]) for one in bare] == [(i, TEXTS[i]) for i in order]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/rerank", {"query": QUERY, "documents": []}, "documents"),
        ("/v1/rerank", {"query": QUERY, "documents": [{"title": "a"}]}, "objects with text"),
        ("/v1/rerank", {"query": QUERY, "documents": ["word " * 40]}, "maximum context length"),
        ("/v1/score", {"queries": ["a", "b"], "documents": TEXTS}, "2 texts for 4"),
        ("/v1/score", {"queries": "a"}, "queries and documents are missing"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, "neither a text nor a pair"),
        ("/classify", {"input": [64]}, "outside the vocabulary of 64"),
    ],
)
def test_a_request_that_cannot_be_right_is_told_so(
    ranker: Worker, path: str, body: dict[str, Any], said: str
) -> None:
    reply = httpx.post(ranker.url + path, json=body)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert post(ranker, "/v1/score", queries="a", documents="b")["data"]


def test_a_long_document_is_cut_where_that_is_asked_for(ranker: Worker) -> None:
    body = {"query": QUERY, "documents": ["word " * 40]}
    assert post(ranker, "/v1/rerank", **body, truncate_prompt_tokens=-1)["results"]


def test_a_classifier_of_several_classes_ranks_nothing(classifier: Worker) -> None:
    for path in ("/v1/rerank", "/v1/score", "/v1/embeddings", "/v1/completions"):
        assert httpx.post(classifier.url + path, json={"input": "a"}).status_code == 404


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("gemma2", {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 16}),
    ],
)
def test_a_reranker_that_writes_is_scored_by_its_tokens_and_its_template(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """As rerankers are published now: LogitScore, and a chat template with query and document."""
    config = AutoConfig.for_model(name, **{**HEADS, "initializer_range": 0.2, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[:1] }}{{ m.content }}[SEP]{% endfor %}"
        "{% if add_generation_prompt %}yn{% endif %}"
    )
    transformer = Transformer(
        str(tmp_path / "base"),
        transformer_task="text-generation",
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )
    theirs = CrossEncoder(
        modules=[transformer, LogitScore(7, 9)],
        prompts={"web": "find"},
        default_prompt_name="web",
        device="cpu",
    )
    theirs.save_pretrained(str(tmp_path / "saved"))
    expected = theirs.predict([(QUERY, text) for text in TEXTS])
    assert max(expected) - min(expected) > 0.05
    with running_worker(tmp_path, "--load-format", "auto", model=tmp_path / "saved") as worker:
        scores = post(worker, "/v1/score", queries=QUERY, documents=TEXTS)["data"]
        assert [one["score"] for one in scores] == pytest.approx(expected.tolist(), abs=2e-5)
        alone = httpx.post(worker.url + "/classify", json={"input": "a"})
        assert alone.status_code == 400
        assert "reads pairs of texts" in alone.json()["error"]["message"]
