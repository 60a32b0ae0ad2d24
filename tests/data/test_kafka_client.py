"""Properties of Kafka's client: brokers that ask for TLS, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayrec.errors import ConfigError
from rayrec.streams import StreamConfig
from rayrec.streams.config import KAFKA_OWN, KafkaConfig
from rayrec.streams.kafka import KafkaSource
from tests.data.kafka_cluster import awaited, cluster, send
from tests.data.stream_files import rows_of

PASSWORD = "of-the-key"


@contextlib.contextmanager
def asking_for_tls(servers: str, folder: Path) -> Iterator[str]:
    """Stand before a broker as one that asks for TLS and a certificate; give the servers."""
    host, port = servers.split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem", PASSWORD)
    context.load_verify_locations(folder / "cert.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # as of clients that leave

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(host, int(port))

        async def ask() -> None:
            while part := await reader.read(1 << 16):
                requests.write(part)
            requests.close()

        asking = asyncio.ensure_future(ask())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await answers.readexactly(4)
                answer = await answers.readexactly(int.from_bytes(size, "big"))
                # the broker tells where it is; clients shall come here
                writer.write(size + answer.replace(behind, before))
                await writer.drain()
        asking.cancel()
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", 0, ssl=context))
    own = server.sockets[0].getsockname()[1]
    behind, before = (host.encode() + struct.pack(">i", one) for one in (int(port), own))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{own}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Make a certificate, whose key has a password, and give their folder."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the program openssl, which makes certificates, is not installed")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", f"{tmp_path}/key.pem", "-out", f"{tmp_path}/cert.pem"]
    secret = ["-newkey", "rsa:2048", "-passout", f"pass:{PASSWORD}"]
    command = [openssl, "req", "-x509", *secret, *files, *names]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path


@pytest.mark.slow
def test_brokers_that_ask_for_tls_and_a_certificate(certificate: Path) -> None:
    secrets = certificate / "kafka.properties"
    secrets.write_text(f"# of the key\n\n ssl.key.password = {PASSWORD}\n")
    properties = {
        "security.protocol": "ssl",
        "ssl.ca.location": f"{certificate}/cert.pem",
        "ssl.certificate.location": f"{certificate}/cert.pem",
        "ssl.key.location": f"{certificate}/key.pem",
    }
    rows = rows_of(0, 9).to_pylist()
    with cluster() as (producer, plain), asking_for_tls(plain, certificate) as servers:
        values = [(number % 3, json.dumps(row).encode()) for number, row in enumerate(rows)]
        send(producer, "clicks", values)
        topic = KafkaConfig(
            servers=servers, topic="clicks", properties=properties, properties_file=str(secrets)
        )
        source = StreamConfig(kafka=topic).open()
        cursor, got = source.start(), list[float]()
        while len(got) < 9:
            found = awaited(source, cursor, 9)
            assert found.rows is not None
            got += found.rows["amount"].to_pylist()
            cursor = found.cursor
        assert sorted(got) == list(range(9))
        source.close()
        # without ssl.ca.location the certificate is unknown; the run is told why it waits
        topic = KafkaConfig(
            servers=servers, topic="clicks", properties={"security.protocol": "ssl"}
        )
        refused = StreamConfig(kafka=topic).open()
        why = f"topic clicks of {servers} does not answer, and is waited for: .*verify failed"
        with pytest.warns(UserWarning, match=why):
            assert refused.read(refused.start(), 1) is None
        refused.close()


def of(**options: object) -> KafkaConfig:
    return KafkaConfig(servers="localhost:9092", topic="clicks", **options)  # type: ignore[arg-type]


def test_properties_of_the_source_are_refused() -> None:
    for name in KAFKA_OWN:
        with pytest.raises(ConfigError, match=f"sets {name}, as the source does itself; leave it"):
            of(properties={name: "1"})


@pytest.mark.parametrize("name", ["sasl.password", "ssl.key.pem", "ssl.keystore.password"])
def test_secrets_stay_out_of_run_files(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"secret in properties\['{name}'\].*properties_file"):
        of(properties={name: "hidden"})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sasl.password=hidden\nhidden", "line 2 .*kafka.properties is no name=value"),
        ("=hidden", "line 1 .*kafka.properties is no name=value"),
        ("a.b=hidden\n\na.b=hidden", "line 3 .*kafka.properties says a.b once more"),
        ("group.id=hidden", "line 1 .*kafka.properties sets group.id, as the source does"),
        ("client.id=hidden", "has client.id in properties and in .*kafka.properties; leave one"),
        (b"\xff=hidden", "properties_file='.*', which cannot be read: it is no text. Put it on"),
        (None, "properties_file='.*', which cannot be read: No such file or directory"),
        ("no.such=hidden", "client of topic clicks of localhost:9092 refuses its properties: .*No"),
    ],
)
def test_what_is_no_property_is_refused(text: str | bytes | None, why: str, tmp_path: Path) -> None:
    file = tmp_path / "kafka.properties"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    topic = of(properties={"client.id": "mine"}, properties_file=str(file))
    with pytest.raises(ConfigError, match=why) as told:
        KafkaSource(topic)
    assert "hidden" not in str(told.value) and "\n" not in str(told.value)
