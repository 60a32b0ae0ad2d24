"""`Client`: asks a server of `rayrec serve` for scores, by gRPC.

    with Client("127.0.0.1:8500") as client:
        client.predict({"user": [7], "item": [12], "age": [0.3]})

It needs grpcio, pyarrow and numpy, and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rayrec.checks import whole_number
from rayrec.errors import (
    ConfigError,
    DeadlineError,
    InputError,
    OverloadedError,
    RayrecError,
    ServingError,
    UnavailableError,
)
from rayrec.serve.protobuf import MASKED, ROWS, SCORES, USER, K, fields_of, message
from rayrec.serve.wire import (
    METHOD,
    SCORE_METHOD,
    SERVICE,
    Answer,
    Columns,
    Scores,
    read_answer,
    request_bytes,
)
from rayrec.storage import one_line

_RAISED: dict[str, type[RayrecError]] = {
    "INVALID_ARGUMENT": InputError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "UNAVAILABLE": UnavailableError,
    # a request that reached a replica at its end, and that it has not read
    "CANCELLED": UnavailableError,
}
# a score changes nothing, so a request may be sent again to another replica
_RETRY = {
    "maxAttempts": 4,
    "initialBackoff": "0.05s",
    "maxBackoff": "1s",
    "backoffMultiplier": 3,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
_TOO_LARGE = "larger than max"  # words of gRPC for a message beyond the server's bound


class Client:
    """Asks one server; its calls may come from several threads.

    Args:
        address: host and gRPC port; or "ipv4:" and several of them, with commas between, of which
            one is asked while it is there, and then the next.
        timeout_s: seconds that a call waits where it does not say otherwise.
    Raises:
        ConfigError: grpcio is not installed.
    """

    def __init__(self, address: str = "127.0.0.1:8500", *, timeout_s: float = 10.0) -> None:
        try:
            import grpc
        except ImportError as error:
            raise ConfigError(
                f"a client needs the package grpcio: {one_line(error)}. Install it with pip "
                "install 'rayrec[serve]'."
            ) from None
        self.address, self._timeout_s, self._error = address, timeout_s, grpc.RpcError
        retries = {"methodConfig": [{"name": [{"service": SERVICE}], "retryPolicy": _RETRY}]}
        self._channel = grpc.insecure_channel(
            address,
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.service_config", json.dumps(retries)),
                # every client has a connection of its own, so that clients spread over replicas
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        # no serializers: bytes in, bytes out
        self._predict = self._channel.unary_unary(f"/{SERVICE}/{METHOD}")
        self._score = self._channel.unary_unary(f"/{SERVICE}/{SCORE_METHOD}")

    def predict(self, rows: Columns, *, timeout_s: float | None = None) -> Scores:
        """Return the scores of B rows.

        Args:
            rows: an Arrow record batch or table; a dict from column to a list or array of B values;
                or a list of B dicts from column to value.
            timeout_s: seconds to wait; None for those of the client.
        Returns:
            (B,) float32; for a model of several tasks a dict by their names.
        Raises:
            InputError: the predictor refuses the rows, or the request is too large for the server.
            OverloadedError: the server takes no more for now.
            DeadlineError: the time passed first.
            UnavailableError: no server answers at the address.
            ServingError: the server failed.
        """
        return self.ask(rows, timeout_s=timeout_s).scores

    def ask(self, rows: Columns, *, timeout_s: float | None = None) -> Answer:
        """Return the scores that `predict` returns, with the version of the weights."""
        return read_answer(self._sent(self._predict, request_bytes(rows), timeout_s))

    def predict_candidates(
        self,
        user: Mapping[str, Any] | Columns,
        candidates: Columns,
        *,
        timeout_s: float | None = None,
    ) -> Scores:
        """Return the scores of N candidates for one user, who is sent and looked up once.

        Args:
            user: the columns that are the same for all candidates: a dict from column to value, or
                one row as `predict` takes rows.
            candidates: N rows of all other columns, as `predict` takes them.
            timeout_s: seconds to wait; None for those of the client.
        Returns:
            (N,) float32, as `predict`.
        Raises:
            RayrecError: the errors of `predict`; an InputError where a column is on both sides.
        """
        one = [user] if isinstance(user, Mapping) else user
        return self._scored({ROWS: request_bytes(candidates), USER: request_bytes(one)}, timeout_s)

    def predict_top(
        self,
        rows: Columns,
        k: int | None = None,
        masked: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Scores:
        """Return the best items after the histories of some rows, by a next-item model.

        Args:
            rows: as of `predict`, without the column of the item.
            k, masked: the arguments of `Predictor.predict_top`.
            timeout_s: seconds to wait; None for those of the client.
        Returns:
            "item" (B, k) int64 and "score" (B, k) float32, as `Predictor.predict_top`.
        Raises:
            RayrecError: the errors of `predict`; a ConfigError where k is no whole number.
        """
        length = 0 if k is None else whole_number("k", k)
        asked: dict[int, bytes | int] = {ROWS: request_bytes(rows), K: length, MASKED: int(masked)}
        return self._scored(asked, timeout_s)

    def _scored(self, asked: Mapping[int, bytes | int], timeout_s: float | None) -> Scores:
        answer = fields_of(self._sent(self._score, message(asked), timeout_s))
        return read_answer(answer.get(SCORES, b"")).scores

    def _sent(self, call: Any, request: bytes, timeout_s: float | None) -> bytes:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        try:
            answer: bytes = call(request, timeout=timeout)
        except self._error as error:
            raise self._raised(error.code().name, error.details() or "") from error
        return answer

    def _raised(self, code: str, text: str) -> RayrecError:
        if _TOO_LARGE in text:
            return InputError(f"the request is too large: {text}. Send its rows in several.")
        kind = _RAISED.get(code, ServingError)
        own = kind in (InputError, OverloadedError)
        return kind(text if own else f"{self.address}: {code.lower().replace('_', ' ')}: {text}")

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
