"""Claims on the operator's flags."""

from __future__ import annotations

import socket

import pytest
from sluice_operator.__main__ import run
from sluice_operator.settings import ALL_OF_IPV4, ALL_OF_IPV6, Settings, parse

WORKER = "--worker-image=registry/worker:1"


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ([], ALL_OF_IPV4),
        (["--address=127.0.0.1"], "127.0.0.1"),
        (["--pod-ip=10.0.0.7"], ALL_OF_IPV4),
        (["--pod-ip=fd00::7"], ALL_OF_IPV6),
    ],
)
def test_a_pod_listens_on_all_addresses_of_its_family(flags: list[str], address: str) -> None:
    assert parse([WORKER, *flags]).address == address


@pytest.mark.parametrize("flags", [["--pod-ip="], ["--pod-ip=::1", "--address=::1"]])
def test_a_wrong_address_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([WORKER, *flags])
    assert "--pod-ip" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--tick-seconds=2s", "2s is not a positive number of seconds"),
        ("--resync-seconds=nan", "nan is not a positive number of seconds"),
        ("--metrics-port=http", "http is not a port, from 1 to 65535"),
        ("--liveness-port=70000", "70000 is not a port, from 1 to 65535"),
    ],
)
def test_a_wrong_number_is_refused_with_what_is_wanted(
    flag: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([WORKER, flag])
    assert says in capsys.readouterr().err


def test_authorities_are_a_config_map_and_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    flag = "--hub-ca-config-map="
    assert parse([WORKER, f"{flag}ca/all.pem"]).hub_authorities == ("ca", "all.pem")
    assert parse([WORKER]).hub_authorities is None
    for wrong in ("ca", "ca/", "/all.pem", "a/b/c"):
        with pytest.raises(SystemExit):
            parse([WORKER, flag + wrong])
        assert f"{wrong} is not NAME/KEY of a ConfigMap" in capsys.readouterr().err


def test_help_says_what_the_program_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "InferenceService" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["https://mirror:port", "https://[::1", "https://", "http://:80"])
def test_a_url_that_no_client_can_ask_is_refused(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([WORKER, f"--hub-endpoint={url}"])
    assert "is no URL of a host" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--hub-proxy", "--hub-endpoint"])
@pytest.mark.parametrize(
    "url", ["http://me:canary@proxy:3128", "me:canary@proxy", "https://canary@h"]
)
def test_credentials_in_a_url_are_refused_and_not_shown(
    flag: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All tenants see it in their pods and conditions."""
    with pytest.raises(SystemExit):
        parse([WORKER, f"{flag}={url}"])
    said = capsys.readouterr().err
    assert f"{flag}: a URL here is seen by all, so it may hold no credentials" in said
    assert "canary" not in said


def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        for name, ports in (("metrics", (taken, 0)), ("liveness", (0, taken))):
            metrics, liveness = ports
            settings = Settings(
                WORKER, address="127.0.0.1", metrics_port=metrics, liveness_port=liveness
            )
            with pytest.raises(SystemExit, match=f"--{name}-port {taken} cannot be used: Address "):
                run(settings)
