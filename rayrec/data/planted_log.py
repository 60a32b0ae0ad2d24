"""The planted truth of a synthetic event log: what a seed decides, and the events drawn from it.

The log has the shape of a music service's: users meet items over some days and skip, listen to or
like each. Whether a user engages has a known probability, and its logit is a sum of three terms
beside a constant: the user's own readiness; the popularity of the item, which moves from day to
day; and the affinity of the item with what the user engaged with among the last `history` events,
likes counting twice. So nobody predicts well who does not read histories. From `drift_day` on all
items have other factors, as if tastes had changed overnight.

Items are shown by their popularity of the day, to whomever. Users are drawn in chunks, each a pure
function of (config, chunk); a chunk walks the events of all its users at once, one step each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayrec.data.hashing import mix_int
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
DAY = 86_400  # seconds
SKIP, LISTEN, LIKE = ACTIONS = range(3)  # also how much an event counts in a history
FACTORS = 4  # of an item
_CHUNK_USERS = 4096
_PERIOD = 40  # days in which the popularity of an item goes round
_LIKED = 0.25  # share of likes among engagements


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedLogConfig:
    """The events to draw, and the truth to plant in them.

    Attributes:
        events, users, items: numbers of them; a user has `events / users` on average.
        days: the log lasts so many. The last tenth of them is the test, the tenth before it the
            validation, and each at least one day.
        history: events of a user that decide on the next one; the longest history of the schema.
        dim: width of every table of the schema.
        base: the logit of an event to which no term adds.
        affinity, popularity, readiness: weights of the three terms of the logit.
        drift_day: from this day on items have other factors; None keeps them.
    Raises:
        ConfigError: a value out of range.
    """

    events: int = 1_500_000
    users: int = 30_000
    items: int = 500
    days: int = 20
    history: int = 20
    dim: int = 16
    base: float = -0.8
    affinity: float = 1.2
    popularity: float = 0.5
    readiness: float = 0.5
    drift_day: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        least = {"events": 1, "users": 1, "items": 2, "days": 3, "history": 1, "dim": 4}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be at least {low}.")
        if not all(np.isfinite([self.base, self.affinity, self.popularity, self.readiness])):
            raise ConfigError("base, affinity, popularity and readiness must be finite numbers.")
        if self.drift_day is not None and not 0 < self.drift_day < self.days:
            raise ConfigError(
                f"drift_day={self.drift_day}; it must lie between 1 and {self.days - 1}, the last "
                f"of days={self.days}."
            )

    @property
    def first_held_out(self) -> tuple[int, int]:
        """First day of the validation, and of the test."""
        each = max(1, self.days // 10)
        return self.days - 2 * each, self.days - each


class Events(NamedTuple):
    """Events of some users, by user and time, with their true logits."""

    user: I64
    item: I64
    time: I64  # seconds from the begin of the log
    action: I64
    logits: F64


class PlantedLog:
    """The truth: all that `config.seed` decides, and the events drawn from it.

    Attributes:
        factors: (2, items, FACTORS) before and from `drift_day` on.
        popularity: (days, items), of variance 1 over all of them.
        readiness: (users,).
    """

    def __init__(self, config: PlantedLogConfig) -> None:
        self.config = c = config
        # one stream of numbers: the order of the draws below is part of the data's definition
        rng = np.random.Generator(np.random.Philox(mix_int(c.seed, 9)))
        activity = rng.standard_gamma(2.0, c.users)
        self._counts = rng.multinomial(c.events, activity / activity.sum())
        self.readiness = rng.standard_normal(c.users)
        # in units of 2**-16, so that sums over histories are exact in any order
        self.factors = np.rint(rng.standard_normal((2, c.items, FACTORS)) * 2**16) / 2**16
        still, phase = rng.standard_normal(c.items), rng.random(c.items)
        turns = np.arange(c.days)[:, None] / _PERIOD + phase
        self.popularity: F64 = 0.8 * still + 0.6 * 2**0.5 * np.sin(2 * np.pi * turns)
        shown = np.cumsum(np.exp(self.popularity), axis=1)
        shown /= shown[:, -1:]
        # day d in (d, d + 1], so that one search finds the items of all days
        self._shown = (shown + np.arange(c.days)[:, None]).ravel()

    def chunks(self) -> Iterator[Events]:
        """Yield the events of all users, who come in order."""
        for index in range(-(-self.config.users // _CHUNK_USERS)):
            yield self.chunk(index)

    def chunk(self, index: int) -> Events:
        """Return the events of some users, a pure function of the config and the index."""
        c, first = self.config, index * _CHUNK_USERS
        counts = self._counts[first : first + _CHUNK_USERS]
        own, count = np.repeat(np.arange(len(counts)), counts), int(counts.sum())
        rng = np.random.Generator(np.random.Philox(mix_int(c.seed, 10, index)))
        span = c.days * DAY
        times = np.sort(own * span + rng.integers(0, span, count)) % span
        days = times // DAY
        found = np.searchsorted(self._shown, rng.random(count) + days, side="right")
        items = np.clip(found - days * c.items, 0, c.items - 1)
        logits = c.base + c.readiness * self.readiness[first + own]
        logits += c.popularity * self.popularity[days, items]
        chances, likes = rng.random(count), LISTEN + (rng.random(count) < _LIKED)
        drifted = days >= (c.days if c.drift_day is None else c.drift_day)
        actions = self._walk(counts, items, drifted.astype(np.int64), logits, chances, likes)
        return Events(first + own, items, times, actions, logits)

    def _walk(
        self, counts: I64, items: I64, drifted: I64, logits: F64, chances: F64, engaged: I64
    ) -> I64:
        """Add the affinities to the logits of (N,) events, and return what the users do.

        Args:
            counts: (U,) events of each user.
            chances: (N,) a user engages where the probability is above it.
            engaged: (N,) the action of a user who engages.
        """
        c, starts = self.config, np.cumsum(counts) - counts
        scale = c.affinity * (c.history * FACTORS) ** -0.5
        # the users with most events first, so that those who have a next one are the first of them
        busy = np.argsort(-counts, kind="stable")
        alive = np.searchsorted(-counts[busy], -np.arange(counts.max(initial=0)), side="left")
        # (2, U, FACTORS) sums over the history of each user, by the factors before and after
        sums = np.zeros((2, len(busy), FACTORS))
        actions = np.zeros_like(items)
        for step, users in enumerate(alive):
            at = starts[busy[:users]] + step
            factors, now = self.factors[:, items[at]], sums[:, :users]
            affinities = (factors * now).sum(2)
            logits[at] += scale * np.where(drifted[at], affinities[1], affinities[0])
            engages = chances[at] < 1 / (1 + np.exp(-logits[at]))
            actions[at] = np.where(engages, engaged[at], SKIP)
            now += factors * actions[at, None]
            if step >= c.history:
                old = at - c.history
                now -= self.factors[:, items[old]] * actions[old, None]
        return actions
