"""`sluice plan`: the arithmetic at the command line, with the exit code as its answer."""

import json
import os
import shutil
from pathlib import Path

import pytest
from sluice.__main__ import main
from unit.core.model.test_gguf import gguf
from unit.core.model.test_parallel import LLAMA_70B, STORED

MODEL = Path(__file__).parents[3] / "examples/model"
TOO_LARGE = str(Path(__file__).parents[3] / "examples/models/too-large")


def test_model_that_cannot_fit_is_refused_with_what_would_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", TOO_LARGE, "--memory", "24Gi"]) == 1
    said = capsys.readouterr().out
    assert "24.0 GiB" in said
    assert "It would fit with" in said


@pytest.mark.parametrize("named", [{}, {"dtype": None}])
def test_without_a_dtype_in_the_config_the_stored_tensors_tell_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: dict[str, object]
) -> None:
    shutil.copytree(MODEL, tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    del config["dtype"]
    (tmp_path / "m/config.json").write_text(json.dumps({**config, **named}))
    asked = ["--memory", "4Gi", "--device", "cpu"]
    assert main(["plan", str(tmp_path / "m"), *asked]) == 0
    said = capsys.readouterr().out
    assert "weights 5.3 MiB" in said
    assert "1.0 KiB per token" in said
    assert main(["plan", str(MODEL), *asked]) == 0
    assert capsys.readouterr().out == said


def test_same_model_fits_where_there_is_enough_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TOO_LARGE, "--memory", "320Gi", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["fits"] is True
    assert 1 <= seen["ceiling"] <= 256


def test_the_ceiling_says_of_which_lengths_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", TOO_LARGE, "--memory", "170Gi"])
    said = capsys.readouterr().out
    longest = int(said.split(" tokens.")[0].rpartition(" sequences of")[0].split()[-1])
    ceiling = said.splitlines()[-1]
    assert ceiling.endswith(f" (of usual length; {longest} of the longest)")
    assert int(ceiling.split()[1]) > longest
    main(["plan", TOO_LARGE, "--memory", "170Gi", "--max-num-seqs", "1"])
    assert capsys.readouterr().out.splitlines()[-1] == "max_num_seqs: 1"


def test_plan_for_a_gpu_says_what_the_pod_asks_of_its_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["plan", TOO_LARGE, "--memory", "320Gi"])
    assert "host memory: 5Gi requested (spec.hardware.hostMemory)" in capsys.readouterr().out
    main(["plan", TOO_LARGE, "--memory", "320Gi", "--json"])
    assert json.loads(capsys.readouterr().out)["host_memory_bytes"] == 5 << 30
    main(["plan", TOO_LARGE, "--memory", "320Gi", "--device", "cpu"])
    assert "host memory" not in capsys.readouterr().out


def test_user_maximum_bounds_the_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", TOO_LARGE, "--memory", "320Gi", "--json", "--max-num-seqs", "3"])
    assert json.loads(capsys.readouterr().out)["ceiling"] == 3


def test_folder_without_checkpoint_is_one_sentence_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path), "--memory", "1Gi"]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_snapshot_of_a_hubs_cache_is_read_through_its_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `sluice serve ORG/NAME` has fetched."""
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/1f0c"
    shutil.copytree(TOO_LARGE, blobs)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    assert main(["plan", str(snapshot), "--memory", "320Gi"]) == 0
    (tmp_path / "elsewhere").mkdir()
    (blobs / "config.json").rename(tmp_path / "elsewhere/config.json")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "elsewhere/config.json")
    capsys.readouterr()
    assert main(["plan", str(snapshot), "--memory", "320Gi"]) == 2
    assert "leads outside" in capsys.readouterr().err


def test_a_path_that_no_system_can_follow_is_one_sentence_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "itself").symlink_to("itself")
    for path, why in (
        (tmp_path / ("a" * 300), ": File name too long."),
        (Path("b/" * 3000), ": File name too long."),
        (tmp_path / "itself", " is a link that leads to itself."),
    ):
        assert main(["plan", str(path), "--memory", "1Gi"]) == 2
        assert capsys.readouterr().err == f"sluice plan: {path}{why}\n"


def test_a_folder_that_may_not_be_listed_is_one_sentence_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(TOO_LARGE, tmp_path / "m")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)  # who is root may list all
    assert main(["plan", str(tmp_path / "m"), "--memory", "1Gi"]) == 2
    told = capsys.readouterr().err
    assert told == f"sluice plan: {tmp_path / 'm'}: permission denied for user {os.geteuid()}.\n"


@pytest.mark.parametrize("text", ["much", "-1Gi", "0", "Gi"])
def test_memory_that_is_no_quantity_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", TOO_LARGE, "--memory", text])
    assert stop.value.code == 2
    assert "memory" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max-model-len", "--block-size", "--max-num-seqs"])
@pytest.mark.parametrize("text", ["0", "-3", "1.5"])
def test_a_number_that_is_none_is_refused(
    flag: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", TOO_LARGE, "--memory", "320Gi", flag, text])
    assert stop.value.code == 2
    assert f"argument {flag}: {text!r} is not a whole number" in capsys.readouterr().err


def test_quantization_that_a_gpu_has_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TOO_LARGE, "--memory", "320Gi", "--quantization", "w8a8"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_quantization_of_a_dtype_that_has_none_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--device", "cpu", "--quantization", "w8a8", "--dtype", "float16"]
    assert main(["plan", TOO_LARGE, "--memory", "320Gi", *asked]) == 2
    assert "needs dtype bfloat16 or float32" in capsys.readouterr().err


@pytest.fixture
def large(tmp_path: Path) -> str:
    """The config and index of Llama-3.3-70B."""
    index = {"metadata": {"total_size": STORED}, "weight_map": {"w": "model-1.safetensors"}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(tmp_path)


def test_gpus_share_a_model_that_is_too_large_for_one(
    large: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", large, "--memory", "80Gi", "--max-model-len", "8192"]
    assert main(asked) == 1
    assert " with 2 GPUs or a GPU of " in capsys.readouterr().out
    assert main([*asked, "--gpus", "4", "--nodes", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("GPU of stage 2 of 2, tensor parallel 4: 0.9 x 80.0 GiB - weights 16.4")
    assert "host memory: 20Gi requested" in said
    assert main([*asked, "--gpus", "8", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["tensor"], seen["pipeline"], seen["stage"]) == (8, 1, 1)
    assert (seen["kv_bytes_per_token"], seen["reserve_bytes"]) == (40_960, 512 << 20)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--gpus", "3"], "tensor parallel 3 does not divide num_attention_heads 64."),
        (["--nodes", "81"], "pipeline parallel 81 is over num_hidden_layers 80."),
        (["--gpus", "2", "--device", "cpu"], "--gpus and --nodes are for --device cuda."),
    ],
)
def test_gpus_that_cannot_share_it_are_one_sentence_and_code_2(
    large: str, more: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", large, "--memory", "80Gi", *more]) == 2
    assert capsys.readouterr().err == f"sluice plan: {why}\n"


def test_a_quantised_checkpoint_is_sized_as_it_is_stored_and_says_for_whom(
    large: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index = {"metadata": {"total_size": 39_770_000_000}, "weight_map": {"w": "m-1.safetensors"}}
    (Path(large) / "model.safetensors.index.json").write_text(json.dumps(index))
    quantised = {**LLAMA_70B, "quantization_config": {"quant_method": "awq"}}
    (Path(large) / "config.json").write_text(json.dumps(quantised))
    assert main(["plan", large, "--memory", "80Gi", "--max-model-len", "8192"]) == 0
    said = capsys.readouterr().out
    assert "weights 37.0 GiB" in said
    assert said.endswith(
        "quantised: for VLLM, SGLang or TGI; Sluice's own engine does not read it\n"
    )


def test_a_gguf_file_is_planned_for_llama_cpp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf(tensors={"w": ([1 << 18, 1 << 15], 8)}))
    assert main(["plan", str(file), "--memory", "24Gi"]) == 0
    said = capsys.readouterr().out
    assert "0.9 x 24.0 GiB - weights 8.5 GiB" in said
    assert "sequences of 4096 tokens." in said
    assert main(["plan", str(file), "--memory", "8Gi"]) == 1
    assert "It would fit with a GPU of " in capsys.readouterr().out
    assert main(["plan", str(file), "--memory", "8Gi", "--gpus", "2"]) == 0
    assert capsys.readouterr().out.startswith("GPU of stage 1 of 2: ")
    file.write_bytes(b"GGUF")
    assert main(["plan", str(file), "--memory", "8Gi"]) == 2
    told = capsys.readouterr().err
    assert told == "sluice plan: m.gguf: truncated, or not a GGUF file.\n"
    assert main(["plan", str(tmp_path / "absent.gguf"), "--memory", "8Gi"]) == 2
