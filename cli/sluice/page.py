"""Tables as text, and HTML pages that need no other files. Pure."""

import base64
from collections.abc import Sequence
from html import escape

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:64em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;border-bottom:1px solid #ddd}
td{text-align:right}td:first-child,th{text-align:left}img{max-width:100%}h2{margin-top:1.6em}"""

Rows = Sequence[Sequence[str]]
"""The first row is the header."""
_VOID = frozenset({"img", "link", "meta"})


class Html(str):
    """Text that is HTML already. `tag` escapes any other text."""


def tag(name: str, /, *inside: object, **attributes: object) -> Html:
    """An element. Attributes are escaped, and what is `inside` where it is not `Html`.

    An underscore in an attribute's name is a hyphen, and nothing at its end. None leaves it out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if name in _VOID else f"{join(*inside)}</{name}>"
    return Html(f"<{name}{given}>{end}")


def join(*parts: object) -> Html:
    """The parts, one behind the other, escaped where they are not `Html`."""
    return Html("".join(p if isinstance(p, Html) else escape(str(p)) for p in parts))


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


def table(rows: Rows) -> Html:
    lines = [
        join(tag("tr", *(tag("td" if at else "th", cell) for cell in row)), "\n")
        for at, row in enumerate(rows)
    ]
    return tag("table", *lines)


def section(title: str, *texts: str) -> Html:
    """A heading with paragraphs."""
    return join(tag("h2", title), *(tag("p", text) for text in texts))


def picture(png: bytes, alt: str) -> Html:
    data = base64.b64encode(png).decode()
    return tag("img", alt=alt, src=f"data:image/png;base64,{data}")


def page(title: str, *parts: str) -> str:
    """A whole page of `parts`, which are HTML."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "</html>\n"
    )
