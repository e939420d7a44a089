"""Whatever a kubelet, an engine, a webhook, a model or a user writes: no condition, event or log
line of the operator holds a control character."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.contract import Evidence, Hung, RuntimeConfig, decode, encode
from sluice_core.errors import StartupError
from sluice_core.model.sizing import SizingError
from sluice_operator.children.runtime import DecidedRuntime, parse
from sluice_operator.cluster.client import ClusterError
from sluice_operator.cluster.observed import Trouble
from sluice_operator.model import checkpoint
from sluice_operator.model.checkpoint import Refused
from sluice_operator.model.fit import judge
from sluice_operator.plan.observed import Observed
from sluice_operator.plan.plan import Plan, plan
from sluice_operator.pods.scrape import Scrape, ScrapeError
from sluice_operator.reasons import Foreign, Reason
from sluice_operator.spec.service import InferenceService, SpecError
from sluice_operator.spec.service import parse as parse_service
from sluice_operator.status import compose, events
from sluice_operator.tuner import Past
from sluice_operator.tuner.types import CapChange, ReplicaChange
from unit.operator.objects import changed, valid_object
from unit.operator.observations import (
    NOW,
    SETTINGS,
    create_config,
    create_evidence,
    create_observed,
    create_pod,
    create_service,
)

MISLEADING = "\x1b]0;x\x07\u202e\u2066\u2028\r\n\x9b\ud800\u200f\U000e0041"
WORDS = st.text(st.characters(codec=None, exclude_categories=()), max_size=400) | st.just(
    f"{MISLEADING}the model{MISLEADING}"
)
STORED = WORDS.map(lambda words: words.encode("utf-8", "replace").decode())
"""Words that the API server can hold: it has no lone surrogates."""
META = {"name": "demo", "namespace": "default", "uid": "uid-1"}


def texts(value: object) -> Iterator[str]:
    """All texts in a document, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


def assert_clean(made: Plan, before: dict[str, Any]) -> None:
    """Its status, its events, and those of a pass that finds this status new."""
    notices = [*made.decided, *made.noticed, *events.transitions(before, dict(made.status))]
    for told in (made.status, *(events.manifest(META, one, NOW) for one in notices)):
        assert [text for text in texts(told) if not text.isprintable()] == []
    assert all(notice.message.isprintable() for notice in notices)  # as they are logged


def planned(service: InferenceService, **changes: Any) -> tuple[Plan, Observed]:
    observed = create_observed(service, runtime=DecidedRuntime(1, 4, 1), **changes)
    return plan(service, observed, SETTINGS, NOW + 60), observed


ENDED = {"exitCode": 1, "finishedAt": "2025-10-09T08:00:00Z"}


def statuses(words: str) -> Iterator[dict[str, Any]]:
    """Pods whose words are hostile at one place each."""
    not_ready = {"type": "Ready", "status": "False"}
    for waiting in (words, "CrashLoopBackOff", "ImagePullBackOff"):
        container = {
            "name": words or "engine",
            "state": {"waiting": {"reason": waiting, "message": words}},
            "lastState": {"terminated": {**ENDED, "message": words}},
        }
        yield {"conditions": [not_ready], "containerStatuses": [container]}
    scheduled = {"type": "PodScheduled", "status": "False", "reason": words, "message": words}
    yield {"conditions": [not_ready, scheduled]}


@settings(max_examples=60, deadline=None)
@given(WORDS)
def test_words_of_the_kubelet_and_of_an_engine_come_out_clean(words: str) -> None:
    service = create_service()
    for status in statuses(words):
        pod = create_pod(**status)
        former = {pod.uid: replace(pod, ended=None, trouble=None)}
        made, _ = planned(service, pods=(pod,), former=former)
        assert_clean(made, {})


@settings(max_examples=60, deadline=None)
@given(WORDS)
def test_words_of_a_pods_report_come_out_clean(words: str) -> None:
    service, pod = create_service(), create_pod(conditions=[{"type": "Ready", "status": "False"}])
    config = create_config(hung=Hung(NOW, words[:256]))
    for scrape in (
        Scrape(create_evidence(), config, NOW),
        Scrape(create_evidence(), create_config(), NOW, str(ScrapeError("Malformed", words))),
    ):
        for one in (pod, create_pod()):
            made, _ = planned(service, pods=(one,), scrapes={one.uid: scrape})
            assert_clean(made, {})


@settings(max_examples=60, deadline=None)
@given(WORDS)
def test_words_of_a_webhook_or_a_quota_come_out_clean(words: str) -> None:
    refused = {"type": "ReplicaFailure", "status": "True", "reason": words, "message": words}
    meta = {**META, "generation": 1}
    deployment = {"metadata": meta, "spec": {}, "status": {"conditions": [refused]}}
    made, observed = planned(create_service(), live={"Deployment": deployment})
    assert_clean(made, {})
    error = ClusterError(403, words, words)
    failed = compose.fail(
        dict(made.status), observed.previous, Reason.APPLY_FAILED, str(error), NOW
    )
    assert_clean(replace(made, status=failed), {})
    made, _ = planned(create_service(), failed=Trouble(Foreign(words), words))
    assert_clean(made, {})


@settings(max_examples=60, deadline=None)
@given(STORED)
def test_words_of_a_user_come_out_clean(words: str) -> None:
    service = create_service()
    past = Past(
        last_change=CapChange(NOW, 2, 4, 1, words[:64]),
        scale_history=(ReplicaChange(NOW - 60, 2, 1, words[:64], 2.0, settled_s=NOW - 50),),
    )
    observed = create_observed(service, runtime=DecidedRuntime(1, 4, 1, past), pods=(create_pod(),))
    assert_clean(plan(service, observed, SETTINGS, NOW + 60), {})
    named = changed(valid_object(), "spec.slo", {f"x{words}": "1s"})  # never one of ours
    made, observed = planned(parse_service(named))
    assert_clean(made, {})
    with pytest.raises(SpecError) as told:
        parse_service(
            changed(valid_object(), "spec.model", {"uri": "file:///models/a", "dtype": words})
        )
    failed = compose.fail(dict(made.status), {}, Reason.INVALID_SPEC, str(told.value), NOW)
    assert_clean(replace(made, status=failed), {})


CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}


@settings(max_examples=60, deadline=None)
@given(WORDS, st.sampled_from(["model_type", "architectures", "torch_dtype", "rope_scaling"]))
def test_words_of_a_models_files_come_out_clean(
    tmp_path_factory: pytest.TempPathFactory, words: str, field: str
) -> None:
    directory = tmp_path_factory.mktemp("models")
    hostile: Any = [words] if field == "architectures" else words
    hostile = {"type": words} if field == "rope_scaling" else hostile
    (directory / "config.json").write_text(json.dumps({**CONFIG, field: hostile}))
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises((StartupError, SizingError)) as told:
        checkpoint.read("file:///models/.", "auto", directory, on_cpu=True)
    service = create_service()
    made, _ = planned(service, fit=judge(service.spec, Refused(str(told.value))))
    assert_clean(made, {})


@pytest.mark.parametrize("char", "\x1b\x07\u202e\u2028\n\x7f\x9b", ids=ascii)
def test_a_pods_report_with_misleading_names_is_refused(char: str) -> None:
    for body, kind in (
        (encode(create_config()), RuntimeConfig),
        (encode(create_evidence()), Evidence),
    ):
        assert decode(body, kind)
        named = msgspec.json.decode(body) | {"boot_id": f"boot{char}"}
        with pytest.raises(msgspec.ValidationError):
            decode(encode(named), kind)
    classed = msgspec.json.decode(encode(create_evidence()))
    classed["memory"]["planned"] = {f"weights{char}": 1}
    with pytest.raises(msgspec.ValidationError):
        decode(encode(classed), Evidence)


@pytest.mark.parametrize("text", ["²", "1_0", " 1", "9" * 5000, "-1", "1e3", ""])
def test_a_number_of_a_config_map_that_is_none_is_as_if_it_were_spoilt(text: str) -> None:
    assert parse({"epoch": text, "replicas": "1"}) is None
    assert parse({"epoch": "1", "replicas": text}) is None
    assert parse({"epoch": "1", "replicas": "1", "cap": text}) is None
