"""The watcher of AWS's notices, against a metadata service that answers as AWS documents it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rayrec.machine.spot_notice import announced_end, drain_command, watch

TOKEN = "a-token"


@contextmanager
def metadata(answers: Sequence[tuple[int, str]]) -> Iterator[str]:
    """A service whose notice is each of `answers` in turn, and then the last one."""
    left = list(answers)

    class Service(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            given = "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
            self.answer(200 if given and self.path == "/api/token" else 400, TOKEN)

        def do_GET(self) -> None:
            known = self.headers.get("X-aws-ec2-metadata-token") == TOKEN
            if not known or self.path != "/meta-data/spot/instance-action":
                self.answer(401, "")
                return
            self.answer(*(left.pop(0) if len(left) > 1 else left[0]))

        def answer(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def notice(in_s: float) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + in_s))
    return f'{{"action": "terminate", "time": "{at}"}}'


def test_a_notice_drains_the_node_with_the_time_that_is_left() -> None:
    ran: list[Sequence[str]] = []

    def run(words: Sequence[str]) -> int:
        ran.append(words)
        return 0

    with metadata([(404, ""), (500, ""), (404, ""), (200, notice(120))]) as service:
        code, line = watch(service, run, look_s=0.01)
    (words,) = ran
    assert code == 0 and line.endswith("s; Ray drains this node")
    assert words[:2] == ["ray", "drain-node"] and 110 <= int(words[-1]) <= 120


def test_time_that_is_over_is_none() -> None:
    assert drain_command(-3.0)[-1] == "0" and drain_command(59.9)[-1] == "59"


def test_a_command_that_fails_is_told() -> None:
    with metadata([(200, notice(60))]) as service:
        code, line = watch(service, lambda words: 3, look_s=0.01)
    assert code == 3 and line.endswith("s; ray drain-node failed with 3")


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"time": 5}', '{"time": "tomorrow"}'])
def test_what_is_no_notice_is_not_taken_for_one(text: str) -> None:
    with metadata([(200, text)]) as service, pytest.raises(ValueError):
        announced_end(service)


def test_a_machine_of_another_kind_is_told_in_one_line() -> None:
    with metadata([(404, "")]) as service:
        assert announced_end(service) is None
    code, line = watch(service, lambda words: 0, look_s=0.01)
    assert code == 1 and line.startswith(f"{service} gives no notices of a spot machine: ")
    assert "\n" not in line
