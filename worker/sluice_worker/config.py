"""What a worker is started with. Flags are spelled as vLLM's; parsing names all problems at once."""

from pathlib import Path
from typing import Literal

from msgspec import Struct

from .contract import Slo

DType = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(Struct, frozen=True):
    """All that the engine process needs; sent to it as its first frame (msgpack)."""

    model: str
    dtype: DType = "auto"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    initial_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    block_size: int | None = None
    memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    itl_ms: float | None = None
    epoch: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"


class ServerConfig(Struct, frozen=True):
    """All that the API process needs."""

    host: str = "0.0.0.0"  # noqa: S104 - a server's default, as vLLM's
    port: int = 8000
    admin_port: int = 8001
    served_model_name: str | None = None
    api_key_file: Path | None = None
    admin_token_file: Path | None = None
    runtime_config_dir: Path | None = None
    slo: Slo = Slo()
    overload: Literal["Queue", "Shed"] = "Queue"
    max_num_queued_reqs: int = 1024
    max_body_bytes: int = 4 << 20
    liveness_timeout: float = 30.0
    shutdown_timeout: float = 30.0
