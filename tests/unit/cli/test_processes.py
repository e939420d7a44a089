"""Ports for servers that a command starts."""

import socket

import pytest
from sluice import processes
from sluice.processes import free_ports


def test_a_port_on_which_somebody_listens_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    [taken, *free] = free_ports(3)
    monkeypatch.setattr(processes, "PORTS", [taken, *free])
    with socket.create_server(("127.0.0.1", taken)):
        assert sorted(free_ports(2)) == sorted(free)
        with pytest.raises(IndexError):
            free_ports(3)
