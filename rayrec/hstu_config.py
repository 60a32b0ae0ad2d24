"""`HSTUConfig`: HSTU as a click model, as files and command lines say it.

Standard library only; torch is imported where the encoder is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrec.checks import MAX_LAYERS, MAX_SIZE, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields

if TYPE_CHECKING:
    from rayrec.modules import HSTUEncoder

TIME_BUCKETS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class HSTUConfig:
    """Encoder of a ranking model, and the times that it reads.

    Attributes:
        width: columns of a token.
        layers, heads: of the encoder.
        dropout: share of the columns that are dropped.
        hidden: width of the hidden layer of the MLP that makes an event's token; `width` unless
            given.
        times: sequence of the schema with the time of each event of the histories; there is a bias
            of time where it is given.
        candidate_time: sequence of the schema with one time for each row, that of the candidate;
            without it the candidate has the time of the last event.
    Raises:
        ConfigError: a size is out of range, or the heads do not divide the width.
    """

    width: int = 64
    layers: int = 2
    heads: int = 2
    dropout: float = 0.1
    hidden: int | None = None
    times: str | None = None
    candidate_time: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("width", "layers", "heads", "hidden"):
            if getattr(self, name) is not None:
                most = MAX_LAYERS if name == "layers" else MAX_SIZE
                whole_number(name, getattr(self, name), 1, most)
        if self.width % self.heads:
            raise ConfigError(f"width={self.width} cannot be divided among heads={self.heads}.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}; it must be at least 0 and below 1.")
        if self.times is None and self.candidate_time is not None:
            raise ConfigError(
                f"candidate_time={self.candidate_time!r} without times, those of the events; name "
                "them, too, or leave it out."
            )

    def encoder(self, tokens: int) -> HSTUEncoder:
        """Return the encoder of sequences of so many tokens at most."""
        from rayrec.modules import HSTUEncoder

        buckets = TIME_BUCKETS if self.times is not None else 0
        sizes = self.width, tokens, self.layers, self.heads
        return HSTUEncoder(*sizes, self.dropout, time_buckets=buckets)
