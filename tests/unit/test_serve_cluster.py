"""What `rayrec serve --cluster` refuses before it joins a cluster, and the ports of servers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from rayrec.cli.main import main
from rayrec.errors import ConfigError
from rayrec.serve.server import held
from rayrec.serve.server.held import reserved
from rayrec.serve.server.settings import ServerSettings
from tests.unit.served_processes import free_ports


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--cluster", "served/a"),
            "there is no ARTIFACT, and --cluster takes 'served/a' as its address; write ARTIFACT",
        ),
        (("s3://bucket/a", "--cluster"), "the artifact s3://bucket/a is on another file system"),
    ],
)
def test_mistakes_are_one_line(words, says, capsys):
    assert main(["serve", *words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("error: " + says), told.err
    assert told.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "variable", "says"),
    [
        ("127.0.0.1:1", "", "the address 127.0.0.1:1: nothing answers"),
        ("ray://head:1", "", "the address ray://head:1 is a Ray Client"),
        ("", "127.0.0.1:1", "RAY_ADDRESS=127.0.0.1:1: nothing answers there"),
    ],
)
def test_an_address_without_a_cluster_is_refused(address, variable, says):
    """In a process of its own, since one that has joined a cluster stays there."""
    words = ["served/a", "--cluster", *([address] if address else [])]
    ran = subprocess.run(
        [sys.executable, "-m", "rayrec.cli.main", "serve", *words],
        env={**os.environ, "RAY_ADDRESS": variable},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("error: " + says) and ran.stderr.count("\n") == 1, ran.stderr


def test_of_two_servers_that_start_at_once_one_has_the_port(monkeypatch):
    """Both would share it, and a client would be answered by either model."""
    settings, refused = ServerSettings(port=free_ports(2), http_port=0), []

    class Pausing(socket.socket):
        def setsockopt(self, *option):
            # the first one has found the port free, and does not hold it yet
            if option[1] == socket.SO_REUSEPORT and not refused:
                refused.append(True)
                with pytest.raises(ConfigError, match="cannot listen"), reserved(settings):
                    pass
            super().setsockopt(*option)

    monkeypatch.setattr(held.socket, "socket", Pausing)
    with reserved(settings) as own:
        assert own.port == settings.port and refused


def test_servers_of_a_host_take_the_next_free_ports():
    port = free_ports(6)
    settings = ServerSettings(port=port, http_port=0)
    with (
        socket.create_server(("127.0.0.1", port)),
        reserved(settings, 3) as second,
        reserved(settings, 3) as third,
    ):
        assert [second.port, third.port] == [port + 2, port + 4]
        wanted = rf"cannot listen at 127.0.0.1:{port + 4} \(port"
        with pytest.raises(ConfigError, match=wanted), reserved(settings, 3):
            pass
    with reserved(ServerSettings(port=0, http_port=0), 3) as free:
        assert free.port and free.http_port
