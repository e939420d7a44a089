"""`sluice report`: promise, cost and advice from the object's status, with their arithmetic."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sluice import report
from sluice.status import UNSEEN, describe
from sluice_core.contract import TARGETS
from sluice_operator.spec.service import parse
from unit.cli.served import MODEL, NUM_TICKS, service_under_traffic


def build(body: dict[str, Any], price: float | None = None) -> dict[str, Any]:
    return report.build(parse(body), body.get("status") or {}, price)


def advice(body: dict[str, Any], about: str) -> list[str]:
    return [text for text in build(body)["advice"] if text.startswith(about)]


def test_attainment_has_its_interval_and_misses_their_cause() -> None:
    found = build(service_under_traffic())
    first = found["targets"][0]
    assert (first["name"], first["samples"], first["over"]) == ("timeToFirstToken", 240, 6)
    assert first["attained"] == pytest.approx(0.975)
    low, high = first["interval"]
    assert low < 0.975 < high < 0.99 == pytest.approx(first["asked"])
    assert found["misses"] == {"cap": 6, "kv": 0, "prefill": 0, "outside": 0, "other": 0}


def test_cost_is_what_the_pods_held_by_what_they_generated() -> None:
    cost = build(service_under_traffic(), price=0.9)["cost"]
    assert (cost["unit"], cost["units_of_a_pod"]) == ("CPU", 0.5)
    seconds = 1000 * 0.5 * 2 * NUM_TICKS / (120 * NUM_TICKS)
    assert cost["unit_seconds_per_1k_tokens"] == pytest.approx(seconds)
    assert cost["price_per_1k_tokens"] == pytest.approx(seconds * 0.9 / 3600)
    gpu = build(service_under_traffic(hardware={"accelerator": "nvidia", "memory": "24Gi"}))
    assert gpu["cost"]["unit"] == "GPU"
    assert gpu["cost"]["price_per_1k_tokens"] is None


def test_cap_costs_what_the_step_model_says_that_as_many_as_can_run_would_bring() -> None:
    body = service_under_traffic()
    cap = build(body)["cap"]
    assert cap["most"] == body["status"]["memory"]["sequences"] < cap["ceiling"]

    def tokens_per_s(n: int) -> float:
        step_ms = MODEL.a + n * (MODEL.b + MODEL.c * 65)
        return 1000 * n * 30 / (30 * step_ms + n * MODEL.d * 50)

    assert cap["tokens_per_s"] == pytest.approx(tokens_per_s(4))
    assert cap["ceiling_tokens_per_s"] == pytest.approx(tokens_per_s(cap["most"]))
    assert cap["costs_percent"] == pytest.approx(
        100 * (1 - tokens_per_s(4) / tokens_per_s(cap["most"]))
    )


def test_a_target_under_one_sequence_s_step_asks_for_a_faster_device() -> None:
    slo = {"interTokenLatency": "4ms"}
    (said,) = advice(service_under_traffic(slo=slo), "Device")
    assert "4.56 ms" in said
    assert f"{4.565 / (0.85 * 4):.2g} times as fast" in said


def test_memory_is_advised_where_it_limits_with_what_more_would_hold() -> None:
    body = service_under_traffic()
    assert not advice(body, "Memory")
    body["status"]["batching"]["limitedBy"] = "VRAM"
    (said,) = advice(body, "Memory")
    assert "4096 KV tokens / 80 tokens a request = 51.2 sequences" in said


def test_float32_weights_are_told_what_bfloat16_would_free() -> None:
    (said,) = advice(service_under_traffic(), "dtype")
    assert "4 bytes a weight" in said
    body = service_under_traffic()
    body["status"]["model"]["bytes"] //= 2
    assert not advice(body, "dtype")


def test_mixed_lengths_speak_for_continuous_batches_and_equal_ones_do_not() -> None:
    assert "Batching: continuous. O" in advice(service_under_traffic(sigma=60), "Batching")[0]
    assert "lose nothing" in advice(service_under_traffic(sigma=0.1), "Batching")[0]


def test_only_outputs_are_padded_by_static_batches() -> None:
    """Outputs of 30 +- 3 of 80 tokens: of 4 the longest has 35, 14 % more; of 80, 6 %."""
    (said,) = advice(service_under_traffic(sigma=3), "Batching")
    assert "30 + 3 sqrt(2 ln 4) = 35" in said
    assert "up to 14 % of their rows" in said


def test_the_cap_is_compared_with_what_memory_lets_run() -> None:
    body = service_under_traffic()
    body["status"]["memory"]["sequences"] = body["status"]["batching"]["cap"]
    found = build(body)
    assert found["cap"]["most"] == 4
    assert found["cap"]["costs_percent"] == 0
    assert "at 4, as many as can run" in report.as_text(found)


def test_more_memory_brings_nothing_where_the_cap_is_what_limits() -> None:
    body = service_under_traffic()
    body["status"]["load"]["misses"]["kv"] = 3
    (said,) = advice(body, "Memory")
    assert "twice as many, of which the cap lets 4 run: " in said
    before, after = said.split("run: ")[1].split(" tokens/s")[0].split(" -> ")
    assert before == after == f"{build(body)['cap']['tokens_per_s']:.0f}"


def test_without_traffic_it_says_so_and_divides_by_nothing() -> None:
    body = service_under_traffic()
    statuses: list[dict[str, Any]] = [{"conditions": []}, {**body["status"], "load": {}}]
    for status in statuses:
        found = build({**body, "status": status})
        assert found["advice"][0].startswith("Too little traffic")
        assert found["cost"]["unit_seconds_per_1k_tokens"] is None
        assert report.as_text(found)


def test_a_service_without_targets_is_not_said_to_promise_anything() -> None:
    body = service_under_traffic(slo=None)
    assert "slo" not in body["status"]
    found = build(body)
    assert (found["percentile"], found["window_s"], found["targets"]) == (None, None, [])
    assert "no targets" in report.as_text(found).splitlines()[0]
    assert found["cost"]["tokens"] == 7200


def test_text_and_json_tell_the_same_numbers() -> None:
    found = build(service_under_traffic(), price=1.0)
    text = report.as_text(found)
    for number in ("97.500%", "7200 tokens", "CPU-seconds", "6 cap"):
        assert number in text
    assert json.loads(json.dumps(found))["cost"]["tokens"] == 7200


def test_evidence_of_an_older_spec_says_so_wherever_it_is_told() -> None:
    body = service_under_traffic()
    assert body["status"]["observedGeneration"] == body["metadata"]["generation"]
    assert build(body)["note"] is None
    assert "generation" not in report.as_text(build(body))
    body["metadata"]["generation"] += 1
    found, note = build(body), "of generation 3; the spec is at 4"
    assert found["note"] == note
    assert report.as_text(found).splitlines()[0].endswith(f"({note})")
    assert f"({note})" in describe(body, [])


def test_an_object_that_no_operator_has_seen_promised_nothing_yet() -> None:
    body = service_under_traffic()
    del body["status"]
    found = build(body)
    assert (found["note"], found["advice"]) == (UNSEEN, [])
    assert report.as_text(found) == f"default/demo: {UNSEEN}"


def test_fields_that_are_not_there_are_dashes() -> None:
    body = service_under_traffic()
    first, gaps = (body["status"]["slo"][name] for name in TARGETS[:2])
    del first["allowedPercent"], first["target"]
    del gaps["samples"], body["status"]["load"]["busyPercent"]
    said = report.as_text(build(body))
    rows = [line.split() for line in said.splitlines() if line.startswith(TARGETS)]
    assert [rows[0][1], rows[0][-1]] == ["-", "-"]
    assert rows[1][-4:] == ["-", "-", "-", "-"]
    assert "busy - %" in said


def test_failed_requests_are_told_by_how_and_instead_of_advice_on_speed() -> None:
    assert "Failed requests: none." in report.as_text(build(service_under_traffic()))
    found = build(service_under_traffic(failed={"500": 2, "cut": 1}))
    assert found["failed"] == {"500": 120, "cut": 60}
    said = report.as_text(found)
    assert "Failed requests: 120 500, 60 cut (42.9 %)." in said
    (advised,) = found["advice"]
    assert advised.startswith("Engine: 180 of 420 requests failed: 500 (120), cut (60) in 600 s.")
    assert not advice(service_under_traffic(), "Engine")
