"""docs/reasons.md is the list of reasons, and none of them is a word that nobody says."""

import re
from pathlib import Path

from sluice_operator import reasons
from sluice_operator.reasons import Reason

ROOT = Path(__file__).parents[3]


def test_the_docs_list_them_all() -> None:
    assert reasons.table() in (ROOT / "docs/reasons.md").read_text()


def test_each_is_given_somewhere() -> None:
    package = ROOT / "operator/sluice_operator"
    code = "\n".join(path.read_text() for path in package.rglob("*.py"))
    given = set(re.findall(r"Reason\.([A-Z_]+)", code))
    assert given == {reason.name for reason in Reason}
