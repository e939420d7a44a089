"""Claims on reading a hub's model: headers only, over Range, and what is said where that fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sluice_operator.model import hub as module
from sluice_operator.model.checkpoint import ModelFacts, Refused, Unread
from sluice_operator.model.hub import HubSource, read
from unit.core.model.test_gguf import gguf
from unit.operator.model.test_checkpoint import CONFIG
from unit.worker.hub.forward_proxy import running_proxy
from unit.worker.hub.hub_server import (
    COMMIT,
    REPO,
    TOKEN,
    Hub,
    running_hub,
    safetensors,
    tls_of_own,
)

INDEX = "model.safetensors.index.json"
TENSOR = {"dtype": "BF16", "shape": [50], "data_offsets": [0, 100]}


def header(num_elements: int, **more: Any) -> dict[str, Any]:
    """Of a file with one tensor of bfloat16."""
    tensor = {"dtype": "BF16", "shape": [num_elements], "data_offsets": [0, 2 * num_elements]}
    return {"w": tensor, **more}


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": safetensors(header(1 << 20), 2 << 20),
    }
    with running_hub(Hub(files)) as served:
        yield served


def of(hub: Hub, **changes: Any) -> HubSource:
    return dataclasses.replace(HubSource(hub.url, REPO, "main"), **changes)


def found(hub: Hub, dtype: str = "auto", **changes: Any) -> ModelFacts:
    answer = read(of(hub, **changes), dtype, on_cpu=True)
    assert isinstance(answer, ModelFacts), answer
    return answer


def refusal(model: HubSource) -> str:
    answer = read(model, "auto", on_cpu=True)
    assert isinstance(answer, Refused), answer
    return answer.message


def unread(model: HubSource) -> str:
    answer = read(model, "auto", on_cpu=True)
    assert isinstance(answer, Unread)
    return answer.message


def test_weights_come_from_the_headers_and_no_tensor_is_fetched(hub: Hub) -> None:
    seen = found(hub, "float32")
    assert (seen.weights_bytes, seen.num_parameters, seen.commit) == (4 << 20, 1 << 20, COMMIT)
    assert [one.range for one in hub.fetched("model.safetensors")] == ["bytes=0-65535"]


def test_the_commit_is_read_from_then_on(hub: Hub) -> None:
    found(hub)
    paths = {one.path for one in hub.seen if "/resolve/" in one.path}
    assert paths
    assert all(path.startswith(f"/{REPO}/resolve/{COMMIT}/") for path in paths)


def test_a_hub_with_an_authority_of_its_own_is_read_where_the_environment_names_that(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, authority = tls_of_own(tmp_path)
    with running_hub(Hub(hub.files), tls) as own:
        assert "CERTIFICATE_VERIFY_FAILED" in unread(of(own))
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        assert found(own).weights_bytes == 2 << 20
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
        names = "the certificates that SSL_CERT_FILE names cannot be read"
        assert f"{names}: No such file or directory" in unread(of(own))


def test_by_a_proxy_goes_all_that_is_asked_of_a_hub_and_its_cdn(hub: Hub) -> None:
    with running_proxy() as proxy:
        assert found(hub, proxy=proxy.url).weights_bytes == 2 << 20
        hosts = {hub.url: 0, hub.cdn_url: 0}
        for url in proxy.asked:
            hosts[next(host for host in hosts if url.startswith(host + "/"))] += 1
        assert all(hosts.values())
        assert sum(hosts.values()) == len(hub.seen)
    assert "cannot be read" in unread(of(hub, proxy=proxy.url))


def test_a_long_header_takes_a_second_look(hub: Hub) -> None:
    long = header(1000, __metadata__={"note": "x" * 100_000})
    hub.files["model.safetensors"] = safetensors(long, 2000)
    assert found(hub).weights_bytes == 2000
    assert len(hub.fetched("model.safetensors")) == 2


def test_a_server_without_ranges_is_read_as_far_as_needed(hub: Hub) -> None:
    hub.serves_ranges = False
    assert found(hub).weights_bytes == 2 << 20


def test_shards_are_added_up_and_other_files_left_out(hub: Hub) -> None:
    names = ["a.safetensors", "b.safetensors"]
    hub.files |= {"consolidated.safetensors": b"", "onnx/model.safetensors": b""}
    hub.files |= {name: safetensors({f"t{i}": TENSOR}, 100) for i, name in enumerate(names)}
    weight_map = {f"t{i}": name for i, name in enumerate(names)}
    hub.files[INDEX] = json.dumps({"weight_map": weight_map}).encode()
    assert found(hub).weights_bytes == 2 << 20
    del hub.files["model.safetensors"]
    assert found(hub).weights_bytes == 200


def test_of_very_many_shards_the_index_tells_the_size_and_one_header_the_type(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 0)
    index = {"metadata": {"total_size": 5000}, "weight_map": {"w": "model.safetensors"}}
    hub.files[INDEX] = json.dumps(index).encode()
    assert found(hub, "float32").weights_bytes == 10_000
    assert len(hub.fetched("model.safetensors")) == 1


def test_without_a_dtype_in_the_config_one_header_tells_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}
    hub.files["config.json"] = json.dumps(config).encode()
    assert found(hub).dtype == "bfloat16"
    monkeypatch.setattr(module, "MAX_FILES", 0)
    index = {"metadata": {"total_size": 5000}, "weight_map": {"w": "model.safetensors"}}
    hub.files[INDEX] = json.dumps(index).encode()
    seen = found(hub)
    assert (seen.dtype, seen.weights_bytes, seen.num_parameters) == ("bfloat16", 5000, 2500)
    assert len(hub.fetched("model.safetensors")) == 2


def test_the_token_opens_what_is_private_and_stays_with_the_hub(hub: Hub) -> None:
    hub.needs_token = True
    assert "name in spec.model.secretRef" in refusal(of(hub))
    assert found(hub, token=TOKEN).weights_bytes == 2 << 20
    assert {one.authorization for one in hub.seen if one.on_cdn} == {""}
    assert TOKEN not in repr(of(hub, token=TOKEN))


def test_what_a_person_must_put_right_is_refused(hub: Hub) -> None:
    assert "acme/none does not exist on" in refusal(of(hub, repo="acme/none"))
    assert "has no revision v9" in refusal(of(hub, revision="v9"))
    hub.gated = True
    assert "is gated" in refusal(of(hub))
    hub.gated = False
    del hub.files["config.json"]
    assert "has no config.json" in refusal(of(hub))


def test_a_model_without_safetensors_is_refused(hub: Hub) -> None:
    hub.files["pytorch_model.bin"] = hub.files.pop("model.safetensors")
    assert "pytorch_model.bin: only safetensors are read" in refusal(of(hub))
    assert hub.fetched("pytorch_model.bin") == []


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 8, b"\x09" + b"\0" * 7 + b"{}"])
def test_a_broken_header_is_refused_with_the_files_name(hub: Hub, content: bytes) -> None:
    hub.files["model.safetensors"] = content
    assert "model.safetensors: " in refusal(of(hub))


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_a_hub_that_cannot_answer_now_leaves_the_size_unknown(hub: Hub, status: int) -> None:
    hub.answers["/main"] = [(status, {})]
    assert str(status) in unread(of(hub))


def test_a_hub_out_of_reach_leaves_the_size_unknown(hub: Hub) -> None:
    url = "http://127.0.0.1:9"
    assert f"cannot be read: {url} cannot be reached" in unread(of(hub, endpoint=url))


def test_a_hub_that_takes_too_long_in_all_is_given_up(hub: Hub) -> None:
    """Each read may be in time, and the whole for ever."""
    assert "it took over 60 s" in unread(of(hub, ends_s=0.0))


def test_of_many_gguf_files_the_headers_of_one_model_are_read(hub: Hub) -> None:
    """In parts, and the one that llama.cpp takes; of each only its beginning."""
    body = bytes(8 << 20)
    hub.files = {
        "m-Q8_0.gguf": b"never read",
        "Q4/m-Q4_K_M-00001-of-00002.gguf": gguf(tensors={"w": ([64], 0)}) + body,
        "Q4/m-Q4_K_M-00002-of-00002.gguf": gguf({}, {"v": ([64], 0)}) + body,
    }
    answer = read(of(hub), "auto", on_cpu=False, gguf=True)
    assert isinstance(answer, ModelFacts)
    assert (answer.weights_bytes, answer.num_parameters, answer.commit) == (512, 128, COMMIT)
    assert answer.download.gguf == sum(map(len, hub.files.values())) - len(b"never read")
    for name in list(hub.files)[1:]:
        assert [one.range for one in hub.fetched(name)] == ["bytes=0-2097151"]
    hub.files = {"a.gguf": b"GGUF"}
    refused = read(of(hub), "auto", on_cpu=False, gguf=True)
    assert isinstance(refused, Refused)
    assert refused.message == "a.gguf: truncated, or not a GGUF file."
    hub.files = {"model.safetensors": b""}
    refused = read(of(hub), "auto", on_cpu=False, gguf=True)
    assert isinstance(refused, Refused)
    assert refused.message == f"{REPO} has no GGUF model in 1 to 32 files."
