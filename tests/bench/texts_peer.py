"""Runs in a peer's own environment, for those that are libraries: one JSON line in, one out.

    python texts_peer.py KIND MODEL

KIND: st-float32, st-bfloat16 (sentence-transformers), onnx-int8 (its ONNX backend, quantised for
the processor that it is on), or pipeline-bfloat16 (transformers' image classification). It writes
`{"ready": true}` and then answers `{"texts": [...]}` or `{"images": [...]}` (paths) with its
seconds, and with vectors if `"vectors"` is true. It imports nothing of this repository.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[list[str]], Any]
BATCH = 32


def sentences(kind: str, model: str) -> Run:
    """`encode` of a list, sorted by length and in batches of 32, as its default is."""
    library = importlib.import_module("sentence_transformers")
    if kind == "onnx-int8":
        loaded = library.SentenceTransformer(
            model, backend="onnx", device="cpu", model_kwargs={"file_name": "onnx/int8.onnx"}
        )
    else:
        loaded = library.SentenceTransformer(
            model, device="cpu", model_kwargs={"dtype": kind.removeprefix("st-")}
        )
    return lambda texts: loaded.encode(texts, batch_size=BATCH, convert_to_tensor=True).float()


def images(model: str) -> Run:
    """transformers' pipeline on paths."""
    torch = importlib.import_module("torch")
    pipeline = importlib.import_module("transformers").pipeline
    pipe = pipeline("image-classification", model=model, dtype=torch.bfloat16, device="cpu")
    return lambda paths: pipe(paths, batch_size=BATCH)


def export(model: str) -> None:
    """Write the ONNX model and its int8 form into the checkpoint's folder `onnx`."""
    library = importlib.import_module("sentence_transformers")
    backend = importlib.import_module("sentence_transformers.backend")
    with open("/proc/cpuinfo") as file:
        flags = file.read()
    form = "avx512_vnni" if "avx512_vnni" in flags else "avx2"
    loaded = library.SentenceTransformer(model, backend="onnx", device="cpu")
    loaded.save_pretrained(model)
    backend.export_dynamic_quantized_onnx_model(loaded, form, model)


def main() -> None:
    """Entry point."""
    kind, model = sys.argv[1:]
    if kind == "export":
        export(model)
        return
    run = images(model) if kind.startswith("pipeline") else sentences(kind, model)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.monotonic()
        found = run(asked.get("texts") or asked["images"])
        told: dict[str, Any] = {"seconds": time.monotonic() - started}
        if asked.get("vectors"):
            told["vectors"] = found.tolist()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
