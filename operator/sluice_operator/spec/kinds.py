"""Values that the object spells otherwise than Python: schema, CEL rule and reader. Pure.

`extra` of a field's `msgspec.Meta` holds its `schema`, how it is `read`, and its `default` as the
object spells it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

Schema = dict[str, Any]
MAX_NUM_SEQS = 4096
MAX_BATCHED_TOKENS = 65_536
_INT_OR_STRING: Final[Schema] = {"x-kubernetes-int-or-string": True}


class SpecObject(Struct, frozen=True, rename="camel"):
    """An object of the spec. A docstring's lines `field: words` are the CRD's descriptions."""


def matches(pattern: str, subject: str = "self") -> str:
    """CEL: the whole text matches `pattern`, written in what RE2 and Python have in common."""
    escaped = pattern.replace("\\", "\\\\")
    return f"{subject}.matches('^({escaped})$')"


@dataclass(frozen=True, slots=True)
class Amount:
    """Numbers with `units` in [low, high]; `message` says so."""

    pattern: str
    units: Mapping[str, int]
    low: str
    high: str
    message: str

    def written(self, value: object) -> str:
        """`value` as text; raises ValueError where it does not match."""
        if not re.fullmatch(self.pattern, str(value)):
            raise ValueError(self.message)
        return str(value)

    def read(self, value: object) -> Decimal:
        """The sum of the parts; raises ValueError where it is no amount, or out of bounds."""
        amount = self._sum(self.written(value))
        if not self._sum(self.low) <= amount <= self._sum(self.high):
            raise ValueError(self.message)
        return amount

    def _sum(self, text: str) -> Decimal:
        parts = re.findall(r"([0-9.]+)([A-Za-z]*)", text)
        return sum((Decimal(number) * self.units[unit] for number, unit in parts), Decimal())


def _quantity(units: Mapping[str, int], low: str, high: str, message: str) -> Amount:
    suffixes = "|".join(filter(None, units))
    return Amount(rf"[0-9]{{1,16}}(\.[0-9]{{1,3}})?({suffixes})?", units, low, high, message)


BYTES: Final = {
    "Ti": 2**40, "Gi": 2**30, "Mi": 2**20, "Ki": 2**10,
    "T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3, "": 1,
}  # fmt: skip
"""Bytes of a unit, in the order in which the API server would use them."""
MEMORY: Final = _quantity(
    BYTES, "1", "1024Ti", "must be bytes over zero and at most 1024Ti, such as 24Gi or 1500Mi"
)
_BODY: Final = _quantity(BYTES, "1Ki", "1Gi", "must be bytes from 1Ki to 1Gi, such as 4Mi or 64Mi")
_CPU: Final = _quantity(
    {"": 1000, "m": 1}, "1m", "1024", "must be CPUs from 1m to 1024, such as 2 or 500m"
)
_UTILIZATION: Final = Amount(
    r"0\.(0[1-9]|[1-9])[0-9]*|1(\.0+)?", {"": 1}, "0", "1",
    'must be a string from "0.01" to "1", such as "0.90"',
)  # fmt: skip
_PERCENTILE: Final = Amount(
    r"[5-9][0-9](\.[0-9]{1,2})?", {"": 1}, "50", "99.99",
    'must be a string from "50" to "99.99", such as "99.9"',
)  # fmt: skip
_SHARE: Final = Amount(
    r"0(\.[0-9]{1,4})?|1(\.0{1,4})?", {"": 1}, "0", "1",
    'must be a string from "0" to "1", such as "0.5"',
)  # fmt: skip
_MILLISECONDS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


def _spelled(
    schema: Schema, cel: str, message: str, read: Callable[[Any], object], **default: str
) -> dict[str, Any]:
    rules = [{"rule": cel, "message": message}]
    return {"schema": {**schema, "x-kubernetes-validations": rules}, "read": read, **default}


def auto_or(low: int, high: int) -> Meta:
    """`Auto`, the default, which is read as None, or a whole number in [low, high]."""
    cel = f"type(self) == int ? self >= {low} && self <= {high} : self == 'Auto'"
    message = f"must be Auto or a whole number between {low} and {high}"

    def read(value: object) -> object:
        return None if value == "Auto" else value

    extra = _spelled(_INT_OR_STRING, cel, message, read, default="Auto")
    return Meta(ge=low, le=high, extra=extra)


def duration(low: str, high: str, *, unit: str = "ms", why: str = "", **default: str) -> Meta:
    """A duration in [low, high] such as 1m30s, read as a float in `unit`."""
    message = f"must be a duration between {low} and {high}, such as {low} or {high}{why}"
    pattern = r"([0-9]{1,9}(\.[0-9]{1,3})?(ms|s|m|h)){1,4}"
    amount = Amount(pattern, _MILLISECONDS, low, high, message)

    def read(value: object) -> float:
        return float(amount.read(value)) / _MILLISECONDS[unit]

    bounds = f"duration(self) >= duration('{low}') && duration(self) <= duration('{high}')"
    schema = {"type": "string", "maxLength": 32}
    return Meta(extra=_spelled(schema, f"{matches(pattern)} && {bounds}", message, read, **default))


def _of_quantity(amount: Amount) -> Meta:
    def between(value: str) -> str:
        low = f"quantity({value}).isLessThan(quantity('{amount.low}'))"
        return f"!{low} && !quantity({value}).isGreaterThan(quantity('{amount.high}'))"

    # The ternary keeps `quantity` away from what does not match: it would fail with its own words.
    text = f"{matches(amount.pattern)} && {between('self')}"
    cel = f"type(self) == int ? {between('string(self)')} : {text}"
    return Meta(extra=_spelled(_INT_OR_STRING, cel, amount.message, lambda v: int(amount.read(v))))


Text = Annotated[str, Meta(min_length=1, max_length=253)]
TextOrEmpty = Annotated[
    str, Meta(min_length=0, max_length=253, extra={"read": lambda v: None if v == "" else v})
]
"""An empty one is read as None, as if the field were left out."""
LabelValue = Annotated[str, Meta(min_length=0, max_length=63)]
Bytes = Annotated[int, _of_quantity(MEMORY)]
BodyBytes = Annotated[int, _of_quantity(_BODY)]
MilliCpus = Annotated[int, _of_quantity(_CPU)]
"""CPUs in thousandths."""
NumSeqs = Annotated[int, auto_or(1, MAX_NUM_SEQS)]
Utilization = Annotated[float, Meta(extra=_spelled(
    {"type": "string", "minLength": 1, "maxLength": 8}, matches(_UTILIZATION.pattern),
    _UTILIZATION.message, lambda value: float(_UTILIZATION.read(value)), default="0.90",
))]  # fmt: skip
"""A share of (0, 1], a text in the object, for the schema has no floats."""
Share = Annotated[float, Meta(extra=_spelled(
    _INT_OR_STRING, matches(_SHARE.pattern, "string(self)"), _SHARE.message,
    lambda value: float(_SHARE.read(value)), default="1",
))]  # fmt: skip
"""A share of [0, 1], in the object a text, or an integer where it is one (YAML's 0)."""
Percentile = Annotated[str, Meta(extra=_spelled(
    _INT_OR_STRING, matches(_PERCENTILE.pattern, "string(self)"), _PERCENTILE.message,
    _PERCENTILE.written,
))]  # fmt: skip
"""In the object a text, or an integer where it is one (YAML's 99)."""
