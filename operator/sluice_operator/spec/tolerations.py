"""A pod's toleration, with the rules that the API server would check only in the pod."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from . import kinds
from .fields import Rule, SpecObject, choice, integer, spec_field, wire_fields

Operator = Literal["Exists", "Equal"]
Effect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration(SpecObject):
    """As in a pod; None: not given."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
            "operator must be Exists where key is left out",
            lambda toleration: bool(toleration.key) or toleration.operator == "Exists",
        ),
        Rule(
            "!has(self.value) || !has(self.operator) || self.operator != 'Exists'",
            "value must be left out with operator Exists",
            lambda toleration: toleration.value is None or toleration.operator != "Exists",
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds needs effect NoExecute",
            lambda t: t.toleration_seconds is None or t.effect == "NoExecute",
        ),
    )

    key: str | None = spec_field("key", kinds.LABEL_KEY, "Taint key; left out, all keys.")
    operator: Operator | None = spec_field(
        "operator", choice(Operator), "How key and value are compared."
    )
    value: str | None = spec_field("value", kinds.LABEL_VALUE, "Taint value.")
    effect: Effect | None = spec_field("effect", choice(Effect), "Taint effect.")
    toleration_seconds: int | None = spec_field(
        "tolerationSeconds", integer(0, 2**31 - 1), "How long NoExecute is tolerated."
    )

    def manifest(self) -> dict[str, object]:
        """As a pod spec wants it."""
        given = {field.wire: getattr(self, name) for name, field in wire_fields(type(self))}
        return {wire: value for wire, value in given.items() if value is not None}
