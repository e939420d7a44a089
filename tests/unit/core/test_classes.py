"""What a classifier's numbers mean."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import CheckpointError
from sluice_core.model.classes import Classes, sigmoid
from sluice_core.model.files import Directory

NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8)


@given(NUMBERS)
def test_activations_are_torchs(values: list[float]) -> None:
    rows = torch.tensor(values, dtype=torch.float64)
    labels = tuple(map(str, range(len(values))))
    expected = {"softmax": rows.softmax(0), "sigmoid": rows.sigmoid(), "identity": rows}
    for name, theirs in expected.items():
        found = Classes(labels, name).probabilities(values)  # type: ignore[arg-type]
        assert found == pytest.approx(theirs.tolist(), abs=1e-12)
    assert all(math.isfinite(sigmoid(value)) for value in values)


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"0": "no", "1": "yes"}}, ("no", "yes"), "softmax"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "identity"),
        (
            {
                "num_labels": 1,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            ("LABEL_0",),
            "identity",
        ),
        (
            {
                "num_labels": 1,
                "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid",
            },
            ("LABEL_0",),
            "sigmoid",
        ),
    ],
)
def test_labels_and_activation_come_from_the_file(
    config: dict[str, Any], labels: tuple[str, ...], activation: str, tmp_path: Path
) -> None:
    found = Classes.read(Directory(tmp_path), config)
    assert (found.labels, found.activation) == (labels, activation)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"id2label": {"1": "a"}}, "number its labels from 0"),
        ({"id2label": {}}, "must name 1 to"),
        ({"num_labels": 0}, "num_labels must be 1 to"),
        ({"problem_type": "ranking"}, "problem_type ranking is not known"),
        ({"sentence_transformers": {"activation_fn": "os.system"}}, "os.system is not built"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        Classes.read(Directory(tmp_path), config)


def test_the_newer_file_of_sentence_transformers_goes_first(tmp_path: Path) -> None:
    path = tmp_path / "config_sentence_transformers.json"
    path.write_text('{"activation_fn": "torch.nn.modules.linear.Identity"}')
    old = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}
    assert Classes.read(Directory(tmp_path), {"num_labels": 1, **old}).activation == "identity"
    path.write_text('{"default_prompt_name": "query", "prompts": {"query": "find: "}}')
    with pytest.raises(CheckpointError, match="default_prompt_name is not built"):
        Classes.read(Directory(tmp_path), {})
