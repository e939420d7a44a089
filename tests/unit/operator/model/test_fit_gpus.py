"""Plans of several GPUs: read from the object, and told of the one with least room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sluice_core.model.files import Directory
from sluice_core.model.parallel import ONE_GPU, Layout
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.model.checkpoint import ModelFacts, Refused, Unread, examine_gguf, read
from sluice_operator.model.fit import Fit, ceiling_of, judge, layout_of, loading_bytes
from sluice_operator.plan.plan import plan
from sluice_operator.reasons import Reason
from unit.core.model.test_gguf import gguf
from unit.core.model.test_parallel import SHAPE, STORED
from unit.operator.observations import NOW, SETTINGS, create_observed, create_service

LARGE = ModelFacts(SHAPE, "bfloat16", STORED, STORED // 2)
GIB = 1 << 30


def fit(found: ModelFacts | Refused | Unread = LARGE, **changes: Any) -> Fit:
    asked = {
        "engine__name": "VLLM", "hardware__accelerator": "nvidia", "hardware__memory": "80Gi",
        "model__maxModelLen": 8192, **changes,
    }  # fmt: skip
    return judge(create_service(**asked).spec, found)


@pytest.mark.parametrize(
    ("engine", "args", "layout"),
    [
        ("VLLM", [], Layout(tensor=4)),
        ("VLLM", ["--tensor-parallel-size=2"], Layout(tensor=2)),
        ("VLLM", ["--tensor_parallel_size", "2"], Layout(tensor=2)),
        ("VLLM", ["-tp", "2", "-pp=2"], Layout(tensor=2, pipeline=2)),
        ("VLLM", ["--pipeline-parallel-size=4"], Layout(pipeline=4)),
        ("VLLM", ["--data-parallel-size=4"], ONE_GPU),
        ("VLLM", ["-dp", "2", "-tp", "2"], Layout(tensor=2)),
        ("VLLM", ["--trust-remote-code", "--seed=1"], Layout(tensor=4)),
        ("VLLM", ["--tensor-parallel-size=much"], ONE_GPU),
        ("SGLang", ["--tp", "2"], Layout(tensor=2, rest_last=True)),
        ("SGLang", ["--tp-size=2", "--pp-size=2"], Layout(tensor=2, pipeline=2, rest_last=True)),
        ("SGLang", ["--tensor-parallel-size=2"], Layout(tensor=2, rest_last=True)),
        ("SGLang", [], Layout(tensor=4, rest_last=True)),
        ("TGI", ["--num-shard=2"], Layout(tensor=2)),
        ("TGI", [], Layout(tensor=4)),
        ("LlamaCpp", [], Layout(pipeline=4)),
        ("Sluice", ["--tensor-parallel-size=2"], ONE_GPU),
    ],
)
def test_the_arguments_name_the_gpus_or_else_the_hardware(
    engine: str, args: list[str], layout: Layout
) -> None:
    changes: dict[str, Any] = {"engine__name": engine, "engine__args": args, "hardware__gpus": 4}
    on_gpus = create_service(hardware__accelerator="nvidia", **changes)
    assert layout_of(on_gpus.spec) == layout
    changes["hardware__gpus"] = 0
    assert layout_of(create_service(hardware__accelerator="cpu", **changes).spec) == ONE_GPU


def test_nodes_are_stages_and_any_accelerator_is_planned_like_a_gpu() -> None:
    spec = create_service(
        engine__name="SGLang", hardware__accelerator="other", hardware__memory="64Gi",
        hardware__gpus=4, hardware__nodes=2, engine__image="image:1",
    ).spec  # fmt: skip
    assert layout_of(spec) == Layout(tensor=4, pipeline=2, rest_last=True)
    fitted = judge(spec, LARGE)
    assert fitted.message.startswith("GPU of stage 2 of 2, tensor parallel 4: 0.9 x 64.0 GiB")
    assert loading_bytes(fitted) == LARGE.host_bytes(4)  # each pod has half of the GPUs


def test_a_model_that_is_too_large_for_one_gpu_fits_with_the_number_that_is_advised() -> None:
    alone = fit()
    assert (alone.status, alone.reason) == ("False", Reason.INSUFFICIENT_MEMORY)
    assert " It would fit with 2 GPUs or a GPU of 1" in alone.message
    shared = fit(hardware__gpus=2)
    assert (shared.status, shared.reason) == ("True", Reason.FITS)
    assert shared.message.startswith("Each GPU, tensor parallel 2: 0.9 x 80.0 GiB - weights 65.7")
    staged = fit(hardware__gpus=8, engine__args=["-pp=2", "-tp=4"])
    assert staged.message.startswith("GPU of stage 2 of 2, tensor parallel 4: ")


def test_our_own_engine_is_advised_no_gpus() -> None:
    ours = fit(engine__name="Sluice")
    assert ours.status == "False"
    assert "GPUs" not in ours.message


def test_gpus_that_cannot_divide_a_model_are_refused_whatever_the_engine() -> None:
    odd = fit(hardware__gpus=3)
    assert (odd.status, odd.reason) == ("False", Reason.IMPOSSIBLE_SIZE)
    assert odd.message == "tensor parallel 3 does not divide num_attention_heads 64."
    long = fit(model__maxModelLen=1 << 20)
    assert (long.status, long.reason) == ("Unknown", Reason.LEFT_TO_ENGINE)


def test_each_gpu_of_a_pod_asks_for_memory_of_the_host() -> None:
    one, four = fit(), fit(hardware__gpus=4)
    assert loading_bytes(one) == LARGE.host_bytes(1)
    assert loading_bytes(four) == LARGE.host_bytes(4) > 3 * loading_bytes(one)
    assert loading_bytes(fit(Unread("away"), hardware__gpus=4)) == 12 * GIB


@pytest.fixture
def quantised(tmp_path: Path) -> ModelFacts:
    """A GGUF model of 8 GiB in Q8_0, with the cache of Llama-3-8B."""
    (tmp_path / "m.gguf").write_bytes(gguf(tensors={"w": ([1 << 18, 1 << 15], 8)}))
    return examine_gguf(Directory(tmp_path), ["m.gguf"])


def test_a_gguf_file_has_a_ceiling_by_memory(quantised: ModelFacts) -> None:
    asked = {"engine__name": "LlamaCpp", "batching__maxNumSeqs": 64, "hardware__memory": "24Gi"}
    fitted = fit(quantised, **asked)
    assert (fitted.status, fitted.reason) == ("True", Reason.FITS)
    assert "weights 8.5 GiB" in fitted.message
    spec = create_service(**asked, model__maxModelLen=8192).spec
    assert 8 < (ceiling_of(spec, fitted) or 0) < 16  # each takes 1 GiB
    usual = fit(quantised, **{**asked, "batching__maxNumSeqs": "Auto"})
    assert usual.memory
    assert usual.memory.ceiling == 4  # as without an answer
    tight = fit(quantised, **{**asked, "hardware__memory": "13Gi"})
    assert tight.memory
    assert tight.memory.ceiling == 2
    small = fit(quantised, **{**asked, "hardware__memory": "8Gi"})
    assert (small.status, small.reason) == ("False", Reason.INSUFFICIENT_MEMORY)
    two = fit(quantised, **{**asked, "hardware__memory": "8Gi", "hardware__gpus": 2})
    assert two.status == "True"
    assert two.message.startswith("GPU of stage 1 of 2: ")


def test_a_slot_has_the_tokens_that_llama_cpp_is_told(quantised: ModelFacts) -> None:
    left_out = create_service(engine__name="LlamaCpp", hardware__memory="24Gi").spec
    fitted = judge(left_out, quantised)
    assert fitted.memory
    assert fitted.memory.max_model_len == 4096


@pytest.mark.parametrize("args", [["-ngl", "20"], ["--n-cpu-moe=4"], ["--hf-file=x.gguf"]])
def test_where_arguments_place_weights_elsewhere_llama_cpp_decides(
    quantised: ModelFacts, args: list[str]
) -> None:
    fitted = fit(quantised, engine__name="LlamaCpp", engine__args=args)
    assert (fitted.status, fitted.message) == ("Unknown", "LlamaCpp sizes itself")


def test_what_cannot_be_sized_is_left_to_llama_cpp_with_the_reason(quantised: ModelFacts) -> None:
    refused = fit(Refused("m.gguf: truncated, or not a GGUF file."), engine__name="LlamaCpp")
    assert refused.status == "Unknown"
    assert refused.message == "m.gguf: truncated, or not a GGUF file. LlamaCpp decides"
    assert fit(quantised, engine__name="Ollama").message == "Ollama sizes itself"


def test_a_gguf_file_of_the_operators_own_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf())

    def found(uri: str) -> ModelFacts | Unread:
        return read(uri, "auto", tmp_path, on_cpu=False, gguf=True)

    facts = found("file:///models/m.gguf")
    assert isinstance(facts, ModelFacts)
    assert facts.stored_bytes == facts.weights_bytes
    assert isinstance(found("file:///models/absent.gguf"), Unread)
    for part in ("00001", "00002"):
        (tmp_path / f"m-{part}-of-00002.gguf").write_bytes(gguf())
    both = found("file:///models/m-00001-of-00002.gguf")
    assert isinstance(both, ModelFacts)
    assert both.weights_bytes == 2 * facts.weights_bytes
    assert isinstance(found("pvc://claim/m.gguf"), Unread)


def test_the_status_shows_the_plan_of_the_gpu_with_least_room() -> None:
    service = create_service(
        engine__name="VLLM", hardware__accelerator="nvidia", hardware__memory="80Gi",
        hardware__gpus=4, model__maxModelLen=8192,
    )  # fmt: skip
    fitted = judge(service.spec, LARGE)
    assert fitted.memory
    seen = create_observed(service, fit=fitted, runtime=DecidedRuntime(1, 4, 1))
    status: Any = plan(service, seen, SETTINGS, NOW).status
    assert status["memory"]["planned"] == fitted.memory.as_dict()
    assert status["memory"]["planned"]["reserve_bytes"] == 512 << 20
