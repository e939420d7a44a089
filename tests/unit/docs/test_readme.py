"""README.md shows an object that the operator reads, and the columns that kubectl then prints."""

import re
from pathlib import Path

import yaml
from sluice_operator.spec.service import parse
from sluice_operator.status.crd import SERVICES

README = (Path(__file__).parents[3] / "README.md").read_text()


def test_the_object_is_one_that_the_operator_reads() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    service = parse(yaml.safe_load(text))
    assert (service.spec.engine.name, service.spec.slo.ttft_ms) == ("VLLM", 2000)
    assert not service.unknown


def test_the_columns_are_those_of_the_definition() -> None:
    [header] = re.findall(r"^NAME .*$", README, re.MULTILINE)
    shown = [name.upper() for name, _, _, priority in SERVICES.columns if priority == 0]
    assert header.split() == ["NAME", *shown]
