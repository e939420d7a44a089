"""Tables as text, and HTML pages that need no other files. Pure."""

import base64
from collections.abc import Sequence
from html import escape

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:64em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;border-bottom:1px solid #ddd}
td{text-align:right}td:first-child,th{text-align:left}img{max-width:100%}h2{margin-top:1.6em}"""

Rows = Sequence[Sequence[str]]
"""The first row is the header."""


def text_table(rows: Rows) -> str:
    """Columns as wide as their widest cell, the first one left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{'>' if at else '<'}{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def table(rows: Rows) -> str:
    head, *body = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    lines = "".join(f"<tr>{row}</tr>\n" for row in body)
    return f"<table><tr>{head.replace('td>', 'th>')}</tr>\n{lines}</table>"


def section(title: str, *texts: str) -> str:
    """A heading with paragraphs."""
    return f"<h2>{escape(title)}</h2>" + "".join(f"<p>{escape(text)}</p>" for text in texts)


def picture(png: bytes, alt: str) -> str:
    data = base64.b64encode(png).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def page(title: str, *parts: str) -> str:
    """A whole page of `parts`, which are HTML."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "</html>\n"
    )
