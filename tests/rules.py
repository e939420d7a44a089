"""The rules of the tuner, as docs/slo.md prints them: their names and sentences are the code's.

    PYTHONPATH=tests python -m rules [--write]

`--write` puts them between the markers of the page.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sluice_core import law
from sluice_operator.tuner.capacity import BUDGET_RULES
from sluice_operator.tuner.caps import CAP_RULES
from sluice_operator.tuner.replicas import REPLICAS_RULES

PAGE = Path(__file__).parents[1] / "docs/slo.md"
BEGIN, END = "<!-- rules: begin -->\n", "<!-- rules: end -->\n"
Told = tuple[str, str]
"""The name of a rule, and its sentence."""


def told(rules: Iterable[Callable[[Any], Any]]) -> list[Told]:
    """Names functions and takes the first sentences of their docstrings."""
    return [(rule.__name__.replace("_", " "), _sentence(rule.__doc__ or "")) for rule in rules]


def _sentence(docstring: str) -> str:
    return " ".join(docstring.split()).split(". ")[0].rstrip(".") + "."


LISTS: dict[str, list[Told]] = {
    "The prompt chunk of a step": [(rule.name, rule.says) for rule in law.RULES],
    "The cap": told(CAP_RULES),
    "The replicas": told(REPLICAS_RULES),
    "The token budget of an engine whose prefill chunks are fixed": told(BUDGET_RULES),
}


def section(lists: dict[str, list[Told]]) -> str:
    """Writes the lists in Markdown."""
    parts = []
    for title, rules in lists.items():
        rows = [f"{at}. *{name}*: {sentence}" for at, (name, sentence) in enumerate(rules, 1)]
        parts.append("\n".join([f"### {title}", "", *rows]) + "\n")
    return "\n".join(parts)


def with_rules(page: str) -> str:
    """Puts the section between the markers of `page`."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
    return f"{before}{begin}{section(LISTS)}{end}{after}"


def main() -> None:
    """Prints the section, or writes it into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/slo.md")
    if parser.parse_args().write:
        PAGE.write_text(with_rules(PAGE.read_text()))
    else:
        print(section(LISTS), end="")


if __name__ == "__main__":
    main()
