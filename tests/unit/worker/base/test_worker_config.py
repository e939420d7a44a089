"""Flags: the values asked for, or every problem at once."""

import logging
from pathlib import Path

import pytest
from sluice_core.contract import policy_in_force
from sluice_core.errors import ConfigError
from sluice_frontend.config import API_KEY, Secret
from sluice_frontend.http import logs
from sluice_worker.__main__ import main
from sluice_worker.api.service import live_at_start
from sluice_worker.base.config import NgramSpeculation, parse
from unit.worker.api.tiny import write_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def problems_of(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        parse(arguments)
    return refused.value.problems


def test_flags_become_the_two_configurations(model: Path) -> None:
    config = parse(
        [
            *("--model", str(model), "--load-format", "dummy", "--max-num-seqs", "8"),
            *("--gpu-memory-utilization", "0.90", "--no-enable-prefix-caching", "--port", "9000"),
            *("--slo-itl-ms", "50", "--slo-ttft-ms", "500", "--served-model-name", "tiny"),
        ]
    )
    assert (config.engine.max_num_seqs, config.engine.memory_utilization) == (8, 0.9)
    assert (config.engine.enable_prefix_caching, config.engine.itl_ms) == (False, 50)
    assert (config.server.port, config.server.slo.ttft_ms, config.model_name) == (9000, 500, "tiny")


@pytest.mark.parametrize(("flags", "expected"), [([], True), (["--parse-special=false"], False)])
def test_control_tokens_of_prompts_are_read_unless_the_flag_says_otherwise(
    model: Path, flags: list[str], expected: bool
) -> None:
    basic = ["--model", str(model), "--load-format", "dummy"]
    assert parse([*basic, *flags]).text.parse_special is expected
    (problem,) = problems_of(*basic, "--parse-special", "no")
    assert problem == "--parse-special must be true or false, not 'no'"


def test_a_level_of_the_log_is_one_in_any_case_or_refused_in_a_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    logs.install("debug")
    assert logging.getLogger("sluice_worker").level == logging.DEBUG
    logs.install()
    monkeypatch.setenv("SLUICE_LOG_LEVEL", "loud")
    assert main(["--model", str(model), "--load-format", "dummy"]) == 2
    assert capsys.readouterr().err == (
        "sluice-worker: SLUICE_LOG_LEVEL must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL, "
        "not 'loud'\n"
    )


def test_every_problem_is_named_in_a_sentence_of_its_own(model: Path) -> None:
    problems = problems_of(
        *("--model", str(model), "--port", "70000", "--dtype", "int3", "--max-num-seqs", "many"),
        *("--overload", "Shed", "--colour"),
    )
    expected = ("--colour", "--dtype", "--max-num-seqs", "--port", "--overload", "safetensors")
    for word in expected:
        assert sum(word in problem for problem in problems) == 1, problems
    assert len(problems) == len(expected)


def test_one_gpu_is_what_a_pod_has_anyway(model: Path) -> None:
    base = ("--model", str(model), "--load-format", "dummy")
    for flag in (("--tensor-parallel-size", "1"), ("-tp", "1"), ("--tensor-parallel-size=1",)):
        assert parse([*base, *flag]) == parse(base)
    neutral = ("--kv-cache-dtype=auto", "-pp=1", "--stream-interval=1")
    assert parse([*base, *neutral]) == parse(base)
    assert problems_of(*base, "--kv-cache-dtype", "fp8") == (
        "--kv-cache-dtype must be auto, not 'fp8'",
    )
    assert problems_of(*base, "--tensor-parallel-size", "2") == (
        "--tensor-parallel-size must be 1, not '2': a pod has one GPU, and more GPUs are more pods",
    )


@pytest.mark.parametrize(
    ("arguments", "strays"),
    [
        (("--colour", "red"), ["--colour"]),
        (("--colour", "red", "blue", "--port", "9000", "--taste", "-1"), ["--colour", "--taste"]),
        (("--colour=red",), ["--colour"]),
        (("red", "--colour"), ["red", "--colour"]),
    ],
)
def test_the_value_of_an_unknown_flag_is_not_called_a_flag(
    model: Path, arguments: tuple[str, ...], strays: list[str]
) -> None:
    problems = problems_of("--model", str(model), "--load-format", "dummy", *arguments)
    assert [*problems] == [f"{stray} is not a flag of sluice-worker" for stray in strays]


def test_help_tells_choices_and_the_defaults_of_the_configurations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    for part in (
        "--device {auto,cpu,cuda} where the model runs; default: auto",
        "share of the memory to use; default: 0.9",
        "request bodies over it get 413; default: 4194304",
        "default: HF_HUB_CACHE --host",
        "begin with; default: on",
    ):
        assert part in told, told


@pytest.mark.parametrize("name", ["", "file://"])
def test_an_empty_name_is_no_model_of_the_working_directory(name: str) -> None:
    assert problems_of("--model", name) == (
        "--model is required: a checkpoint's directory, or hf://ORG/NAME",
    )


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--port", "8001"), "different ports"),
        (("--seed", "-1"), "from 0 to 9223372036854775807, not -1"),
        (("--max-num-seqs", "4", "--initial-num-seqs", "5"), "--initial-num-seqs"),
        (("--max-num-seqs", "4", "--max-num-batched-tokens", "3"), "--max-num-batched-tokens"),
        (("--runtime-config-dir", "/nowhere/at/all"), "--runtime-config-dir"),
        (("--admin-token-file", "/nowhere/at/all"), "--admin-token-file"),
        (("--liveness-timeout", "nan"), "--liveness-timeout"),
        (("--hold-share", "2"), "--hold-share must be a number from 0 to 1, not 2"),
        (("--hold-share", "0.5"), "--hold-share needs --slo-ttft-ms, the target that it is"),
        (("--shutdown-timeout", "inf"), "--shutdown-timeout"),
        (("--seed",), "--seed"),
    ],
)
def test_contradictions_and_bad_files_are_refused(
    model: Path, flags: tuple[str, ...], word: str
) -> None:
    (problem,) = problems_of("--model", str(model), "--load-format", "dummy", *flags)
    assert word in problem


def test_cap_and_epoch_come_from_the_runtime_directory_first(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cap").write_text("6\n")
    (tmp_path / "epoch").write_text("41")
    flags = ("--model", str(model), "--load-format", "dummy", "--initial-num-seqs", "2")
    with_files = parse([*flags, "--runtime-config-dir", str(tmp_path)])
    assert (with_files.engine.initial_num_seqs, with_files.engine.epoch) == (6, 41)
    (tmp_path / "cap").unlink()
    assert parse([*flags, "--runtime-config-dir", str(tmp_path)]).engine.initial_num_seqs == 2


def test_an_empty_secret_file_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(" \n\n")
    flags = ("--load-format", "dummy", "--api-key-file", str(tmp_path / "keys"))
    (problem,) = problems_of("--model", str(model), *flags)
    assert "keys is empty" in problem


def test_the_key_of_the_environment_is_taken_unless_a_file_holds_keys_and_never_shown(
    model: Path, tmp_path: Path
) -> None:
    base, environ = ("--model", str(model), "--load-format", "dummy"), {API_KEY: " key-canary\n"}
    assert not parse(base, {}).server.has_api_keys
    assert not parse(base, {API_KEY: " "}).server.has_api_keys
    config = parse(base, environ)
    assert config.server.has_api_keys
    assert config.server.api_key == Secret("key-canary")
    assert "key-canary" not in f"{config} {config!r} {config.server.api_key}"
    (tmp_path / "keys").write_text("another\n")
    filed = parse([*base, "--api-key-file", str(tmp_path / "keys")], environ).server
    assert (filed.api_key, filed.has_api_keys) == (None, True)


@pytest.mark.parametrize("key", ["key-canary\nof two", "key-canaré", "key-canary\udcff"])
def test_a_key_that_no_header_can_bear_is_refused_unshown(model: Path, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(("--model", str(model), "--load-format", "dummy"), {API_KEY: key})
    assert refused.value.problems == ("VLLM_API_KEY must be one line of ASCII",)


@pytest.mark.parametrize("flag", [("--api-key", "key-canary", "2nd-canary"), ("--api-key=canary",)])
def test_a_key_among_the_arguments_is_refused_unshown(model: Path, flag: tuple[str, ...]) -> None:
    (problem,) = problems_of("--model", str(model), *flag, "--load-format", "dummy")
    assert "--api-key-file" in problem
    assert "VLLM_API_KEY" in problem
    assert "canary" not in problem


def test_static_batching_and_its_flags_need_each_other(model: Path) -> None:
    base = ("--model", str(model), "--load-format", "dummy")
    (alone,) = problems_of(*base, "--static-batch-size", "8")
    assert "--static-batch-size needs --batching-mode static" in alone
    (sizeless,) = problems_of(*base, "--batching-mode", "static")
    assert "--static-batch-size" in sizeless
    static = (*base, "--batching-mode", "static", "--static-batch-size", "8")
    (slow,) = problems_of(*static, "--static-batch-timeout-ms", "20000")
    assert "--liveness-timeout" in slow
    engine = parse([*static, "--static-batch-timeout-ms", "50"]).engine
    assert (engine.static_batch_size, engine.static_batch_timeout_ms) == (8, 50)


@pytest.mark.parametrize(
    "text",
    [
        "ngram",
        "{}",
        '{"method": "eagle", "num_speculative_tokens": 4}',
        '{"method": "ngram"}',
        '{"method": "ngram", "num_speculative_tokens": 0}',
        '{"method": "ngram", "num_speculative_tokens": 4, "model": "x"}',
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 6}',
    ],
)
def test_a_speculative_config_that_is_not_honoured_whole_is_refused(model: Path, text: str) -> None:
    base = ("--model", str(model), "--load-format", "dummy")
    (problem,) = problems_of(*base, "--speculative-config", text)
    assert problem.startswith("--speculative-config must be a JSON object with method ngram")


def test_a_speculative_config_is_read_as_vllm_spells_it(model: Path) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6}'
    base = ("--model", str(model), "--load-format", "dummy")
    config = parse([*base, "--speculative-config", text]).engine.speculative_config
    assert config == NgramSpeculation("ngram", 5, prompt_lookup_max=6, prompt_lookup_min=3)


def test_the_runtime_directorys_targets_are_in_force_from_the_start(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "slo_itl_ms").write_text("42.5")
    (tmp_path / "slo_ttft_ms").write_text("700.0\n")
    (tmp_path / "overload").write_text("Shed")
    flags = ("--model", str(model), "--load-format", "dummy", "--slo-itl-ms", "9")
    parsed = parse([*flags, "--runtime-config-dir", str(tmp_path)])
    assert (parsed.server.slo.ttft_ms, parsed.server.slo.itl_ms) == (700, 42.5)
    assert (parsed.server.flag_slo.ttft_ms, parsed.server.flag_slo.itl_ms) == (None, 9)
    shed = parse([*flags, "--overload", "Shed", "--runtime-config-dir", str(tmp_path)])
    assert shed.server.overload == "Shed", "the target that it sheds for is a file's"
    assert (parsed.engine.itl_ms, parsed.server.overload) == (42.5, "Shed")
    (tmp_path / "slo_ttft_ms").unlink()  # what the operator wrote stops no pod
    assert parse([*flags, "--runtime-config-dir", str(tmp_path)]).server.overload == "Shed"
    (tmp_path / "epoch").write_text("-1")
    (problem,) = problems_of(*flags, "--runtime-config-dir", str(tmp_path))
    assert "epoch must be a whole number from 0 on" in problem


def test_the_share_of_a_hold_is_the_files_and_else_the_flags(model: Path, tmp_path: Path) -> None:
    given = ("--model", str(model), "--load-format", "dummy", "--runtime-config-dir", str(tmp_path))
    flags = (*given, "--slo-ttft-ms", "500", "--hold-share", "0.5")
    for written, share in ((None, 0.5), ("0.0", 0.0), ("1.0", 1.0)):
        if written:
            (tmp_path / "hold_share").write_text(written)
        parsed = parse(flags)
        assert (parsed.engine.hold_share, live_at_start(parsed).hold_share) == (share, share)


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ((), "fcfs"),
        (("--slo-itl-ms=50",), "fcfs"),
        (("--slo-ttft-ms=900",), "deadline"),
        (("--slo-ttft-ms=900", "--scheduling-policy=fcfs"), "fcfs"),
        (("--scheduling-policy=priority",), "priority"),
        (("--slo-ttft-ms=900", "--batching-mode=static", "--static-batch-size=4"), "fcfs"),
    ],
)
def test_a_first_token_target_is_what_requests_are_ordered_for(
    model: Path, flags: tuple[str, ...], policy: str
) -> None:
    parsed = parse(["--model", str(model), "--load-format", "dummy", *flags])
    engine = parsed.engine
    assert policy_in_force(engine.scheduling_policy, engine.ttft_ms) == policy
    assert live_at_start(parsed).for_engine().policy == policy


def test_the_runtime_directory_says_the_order_or_a_target_to_order_for(
    model: Path, tmp_path: Path
) -> None:
    flags = ("--model", str(model), "--load-format", "dummy", "--scheduling-policy", "priority")
    (tmp_path / "slo_ttft_ms").write_text("700.0")

    def policy(*flags: str) -> str:
        return live_at_start(parse([*flags, "--runtime-config-dir", str(tmp_path)])).policy

    assert policy(*flags[:4]) == "deadline"
    assert policy(*flags) == "priority"
    (tmp_path / "scheduling_policy").write_text("fcfs\n")
    assert policy(*flags) == "fcfs"
    (tmp_path / "scheduling_policy").write_text("lifo")
    (problem,) = problems_of(*flags, "--runtime-config-dir", str(tmp_path))
    assert "scheduling_policy must be one of deadline, fcfs, priority, not 'lifo'" in problem
