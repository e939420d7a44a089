"""The two services of the comparison, their targets and the noises of their steps."""

from research.generate import Lengths
from sluice.simulate.params import Params

GPU = Params(a=12, b=0.06, c=9e-5, d=0.07, kv_tokens=160_000, cold_start_s=60)
"""As an A100-class GPU with an 8B model in bf16: 2,048 tokens of prefill take 150 ms."""
CPU = Params(a=21, b=5.3, c=0.002, d=0.8, kv_tokens=40_000, cold_start_s=20, block_size=64)
"""As one core with an 88M model: 512 tokens of prefill take 400 ms, 8 decodes 63 ms."""
SERVICES = {"gpu": (GPU, Lengths(512, 128)), "cpu": (CPU, Lengths(128, 48))}
TARGETS = {
    "gpu": {
        "tight": "ttft=500ms,itl=25ms",
        "default": "ttft=1s,itl=50ms",
        "loose": "ttft=3s,itl=150ms",
        "patient": "ttft=30s,itl=25ms",
    },
    "cpu": {
        "tight": "ttft=1s,itl=60ms",
        "default": "ttft=2s,itl=100ms",
        "loose": "ttft=5s,itl=300ms",
        "patient": "ttft=30s,itl=60ms",
    },
}
NOISES: dict[str, dict[str, float]] = {
    "independent": {},
    "interference": {
        "interference_every_s": 120.0,
        "interference_mean_s": 5.0,
        "interference_factor": 3.0,
    },
}
