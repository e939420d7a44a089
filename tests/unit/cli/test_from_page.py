"""The page for users of vLLM shows what `sluice from` makes of the Deployment above it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from sluice.__main__ import main

PAGE = Path(__file__).parents[3] / "docs/from-vllm.md"
NEW = ("slo", "scaling")
"""What no manifest says, and the reader adds."""


def test_the_pages_object_is_what_the_command_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, shown = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]
    file = tmp_path / "vllm.yaml"
    file.write_text(manifest)
    assert main(["from", str(file)]) == 0
    made, wanted = yaml.safe_load(capsys.readouterr().out), yaml.safe_load(shown)
    assert all(wanted["spec"].pop(name) for name in NEW)
    assert made == wanted
