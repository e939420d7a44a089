"""The flags that describe the engine behind the gate."""

from dataclasses import MISSING, dataclass
from pathlib import Path

from sluice_core.bounded import Share
from sluice_core.contract import SchedulingPolicy
from sluice_core.engines import ENGINES
from sluice_core.engines.engine import EngineName, ForeignEngine
from sluice_frontend.config import HOLD_SHARE_SAYS, Positive, flag


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The engine behind the gate. `epoch`: of the first cap."""

    upstream: str = flag("the engine's URL, as http://127.0.0.1:8100 (required)", MISSING)
    engine: EngineName = flag("which engine; custom: any OpenAI server", "custom")
    max_num_seqs: Positive | None = flag(
        "the most sequences that the engine runs at once; live caps stay below; default: as the "
        "engine tells, else as it starts with us"
    )
    initial_num_seqs: Positive | None = flag("the first cap; default: all that the engine runs")
    max_num_batched_tokens: Positive = flag("the engine's own token budget of one step", 2048)
    scheduling_policy: SchedulingPolicy | None = flag(
        "who is served first; default: deadline with --slo-ttft-ms, else fcfs"
    )
    hold_share: Share = flag(HOLD_SHARE_SAYS, 1.0)
    health_path: str | None = flag("a path that answers 200 while the engine serves")
    engine_admin_key_file: Path | None = flag("file of SGLang's admin key, for its live cap")
    engine_socket: Path | None = flag("Unix socket on which sluice_vllm inside vLLM finds the gate")
    served_file: Path | None = flag(
        "file that is there once the engine has served, for a gate that starts again beside it"
    )
    epoch: int = 0

    def capacity(self, told: int | None) -> int:
        """The most sequences that the engine runs; `told`: by itself."""
        return self.max_num_seqs or told or self.facts.capacity

    @property
    def facts(self) -> ForeignEngine:
        """The engine as data."""
        return ENGINES[self.engine]

    @property
    def health(self) -> str:
        """The path of the engine's health."""
        return self.health_path or self.facts.health
