"""The configuration that may change while the worker serves, as one value. Pure.

The limits (cap and token budget) carry an epoch, because evidence is booked under them. Targets,
overload and order may change at any time.
"""

from msgspec import Struct
from msgspec.structs import asdict, replace
from sluice_core.contract import (
    Overload,
    RuntimePatch,
    SchedulingPolicy,
    Slo,
    policy_in_force,
)
from sluice_core.errors import OverCeiling, StaleEpoch
from sluice_core.port import EngineLimits


class RuntimeLimits(Struct, frozen=True):
    """The configuration that is in force. `scheduling_policy`: None unless one was asked for.

    `hold_share`: as in `port.EngineLimits`.
    """

    epoch: int
    cap: int
    max_num_batched_tokens: int
    slo: Slo
    overload: Overload
    scheduling_policy: SchedulingPolicy | None
    hold_share: float = 1.0

    @property
    def policy(self) -> SchedulingPolicy:
        return policy_in_force(self.scheduling_policy, self.slo.ttft_ms)

    @property
    def shed_ms(self) -> float | None:
        """The first-token deadline of requests that bring none; None: they may wait."""
        return self.slo.ttft_ms if self.overload == "Shed" else None

    def for_engine(self) -> EngineLimits:
        return EngineLimits(
            epoch=self.epoch,
            cap=self.cap,
            max_num_batched_tokens=self.max_num_batched_tokens,
            itl_ms=self.slo.itl_ms,
            ttft_ms=self.slo.ttft_ms,
            policy=self.policy,
            hold_share=self.hold_share,
        )

    def changed(self, patch: RuntimePatch, *, ceiling: int, largest_budget: int) -> "RuntimeLimits":
        """The configuration after `patch`.

        `ceiling` and `largest_budget`: for which buffers were sized and memory was planned. Raises
        StaleEpoch, OverCeiling; see `contract.RuntimePatch`.
        """
        given = {name: value for name, value in asdict(patch).items() if value is not None}
        new = replace(self, **given)
        if new.epoch < self.epoch:
            raise StaleEpoch(
                f"epoch {new.epoch} is older than epoch {self.epoch}, which is in force",
                param="epoch",
            )
        new._check_fits(ceiling, largest_budget)
        if new.epoch == self.epoch and new._limits != self._limits:
            raise StaleEpoch(
                f"epoch {new.epoch} is in force with other limits; they need a new one",
                param="epoch",
            )
        return new

    @property
    def _limits(self) -> tuple[int, int]:
        return self.cap, self.max_num_batched_tokens

    def _check_fits(self, ceiling: int, largest_budget: int) -> None:
        cap, budget = self._limits
        if cap > ceiling:
            raise OverCeiling(
                f"cap {cap} is over the ceiling of {ceiling}, for which the buffers were "
                "sized at start",
                param="cap",
            )
        if not cap <= budget <= largest_budget:
            raise OverCeiling(
                f"max_num_batched_tokens {budget} must be from cap {cap} to the "
                f"{largest_budget} that memory was planned for",
                param="max_num_batched_tokens",
            )
