"""What a checkpoint is for, and the memory of models that write no text."""

from pathlib import Path
from typing import Any

import pytest
from sluice_core.model.sizing import MIB
from sluice_operator.children.worker_flags import worker_flags
from sluice_operator.model.checkpoint import ModelFacts, read
from sluice_operator.model.fit import ceiling_of, judge
from sluice_operator.reasons import Reason
from unit.operator.observations import create_service

MODELS = Path(__file__).parents[4] / "examples" / "models"


def facts(name: str) -> ModelFacts:
    found = read(f"file:///models/{name}", "auto", MODELS, on_cpu=True)
    assert isinstance(found, ModelFacts)
    return found


def spec(task: str, **changes: Any) -> Any:
    given = {"hardware__memory": "2Gi", "slo": {"endToEnd": "500ms"}, **changes}
    return create_service(model__task=task, **given).spec


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("random-texts", "Embed"),
        ("random-classes", "Classify"),
        ("random-classes", "Score"),
        ("random-images", "ImageClassify"),
    ],
)
def test_a_checkpoint_of_the_named_task_fits_without_a_kv_cache(name: str, task: str) -> None:
    fit = judge(spec(task), facts(name))
    assert (fit.status, fit.reason) == ("True", Reason.FITS)
    assert fit.message.endswith("no KV cache is needed.")
    assert ceiling_of(spec(task), fit) == 2048
    few = judge(spec(task, batching__maxNumSeqs=8), facts(name))
    assert ceiling_of(spec(task, batching__maxNumSeqs=8), few) == 8


@pytest.mark.parametrize(
    ("name", "task", "possible"),
    [
        ("random-texts", "Generate", "Embed"),
        ("random-60m", "Embed", "Generate"),
        ("random-images", "Classify", "ImageClassify"),
        ("random-classes", "Embed", "Classify or Score"),
    ],
)
def test_another_task_is_refused_with_what_the_checkpoint_is_for(
    name: str, task: str, possible: str
) -> None:
    fit = judge(spec(task), facts(name))
    assert (fit.status, fit.reason) == ("False", Reason.UNSUPPORTED_CHECKPOINT)
    assert fit.message == f"spec.model.task is {task}, and the checkpoint is for {possible}."


def test_too_little_memory_is_told_with_what_would_do() -> None:
    fit = judge(spec("Embed", hardware__memory="800Mi"), facts("random-texts"))
    assert fit.reason == Reason.INSUFFICIENT_MEMORY
    assert "of memory instead of 800.0 MiB" in fit.message
    assert "a smaller max_num_batched_tokens" in fit.message
    assert fit.memory
    assert fit.memory.weights_bytes < 60 * MIB


def test_images_that_wait_are_planned() -> None:
    images, texts = (
        judge(spec(task), facts(name)).memory
        for task, name in (("ImageClassify", "random-images"), ("Embed", "random-texts"))
    )
    assert images
    assert texts
    decoding = 7 << 25
    assert images.reserve_bytes - texts.reserve_bytes == decoding + 2 * 1024 * 224 * 224 * 3


def test_a_foreign_engine_decides_for_itself() -> None:
    foreign = create_service(
        model__task="Embed", engine__name="VLLM", engine__image="vllm:1", slo={"endToEnd": "1s"}
    )
    fit = judge(foreign.spec, facts("random-texts"))
    assert (fit.status, fit.reason) == ("Unknown", Reason.LEFT_TO_ENGINE)


def test_a_worker_that_writes_nothing_is_told_of_no_drafts_and_no_prefixes() -> None:
    given = worker_flags(spec("Embed", batching__prefixCaching=False), {}, {}, {}, 4)
    assert not [flag for flag in given if "speculative" in flag or "prefix" in flag]
    assert [f for f in worker_flags(spec("Generate"), {}, {}, {}, 4) if "speculative" in f]
