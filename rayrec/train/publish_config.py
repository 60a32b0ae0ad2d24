"""`PublishConfig`: the schedule and content of a run's publications for servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rayrec.checks import is_uri, lasting_path, positive, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.misfit import meant
from rayrec.fields.typed import check_fields
from rayrec.serve.signing import key_place
from rayrec.train.every import Every

# the values of `rayrec.quant.QuantType`, which needs torch
ROW_TYPES = ("fp32", "fp16", "int8", "int4")


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishConfig:
    """Schedule and content of a run's publications. Servers follow it: `rayrec serve --follow`.

    The first publication of a run is a base, and so is the first after a restart or a recovery.
    Each other one is a delta: the rows that were touched since the one before.

    Attributes:
        path: local folder, seen by all hosts; None takes `published` below the folder of the run.
        every_n_steps: publish after every so many global steps.
        every_n_rows: publish after the step that trains on the last of every so many rows, counted
            over all ranks since the run was begun or resumed.
        every_event_s: publish at the end of a window of a stream, the first whose events pass a
            multiple of so many seconds of event time.
        every_s: publish when so many seconds have gone by since the last time, at the end of a
            window. One of these is given; the end of a run is published in any case.
        dtype: type of the rows of all tables: fp32, fp16, int8 or int4.
        tables: table -> its own type, in place of `dtype`.
        full_every: every so many-th publication is a base, at which a server can begin; None makes
            one only where it is needed.
        num_to_keep: keep so many newest bases and what follows them; None keeps all.
        max_logit_error: largest distance of a logit from the model's at which a base is accepted.
        signing_key: place of a key to sign publications with, on the host of rank 0: a file, or
            "env:NAME", an environment variable; None signs none.
    Raises:
        ConfigError: an option is out of range, or two contradict each other.
    """

    path: str | None = None
    every_n_steps: int | None = None
    every_n_rows: int | None = None
    every_event_s: int | None = None
    every_s: float | None = None
    dtype: str = "int8"
    tables: Mapping[str, str] = field(default_factory=dict)
    full_every: int | None = None
    num_to_keep: int | None = None
    max_logit_error: float = 0.5
    signing_key: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        self.every.check("PublishConfig", needed=True)
        for what, least in (("full_every", 2), ("num_to_keep", 1)):
            value = getattr(self, what)
            if value is not None:
                whole_number(f"PublishConfig has {what}", value, least)
        positive("PublishConfig has max_logit_error", self.max_logit_error)
        for what, kind in (("dtype", self.dtype), *self.tables.items()):
            if kind not in ROW_TYPES:
                raise ConfigError(
                    f"PublishConfig has {kind!r} for {what!r}; choose one of "
                    f"{', '.join(ROW_TYPES)}."
                )
        if self.num_to_keep is not None and self.full_every is None:
            raise ConfigError(
                f"PublishConfig has num_to_keep={self.num_to_keep} without full_every: no base "
                "would come after the first, and nothing be deleted. Give full_every, too."
            )
        place = key_place("PublishConfig has signing_key", self.signing_key)
        object.__setattr__(self, "signing_key", place)
        if self.path is not None:
            object.__setattr__(self, "path", lasting_path("PublishConfig has path", self.path))
            if is_uri(self.path):
                raise ConfigError(
                    f"PublishConfig has path={self.path!r}; servers read them from a local disk. "
                    "Name a local folder."
                )

    @property
    def every(self) -> Every:
        """How often a run publishes on the way."""
        return Every(self.every_n_steps, self.every_s, self.every_n_rows, self.every_event_s)

    def check_tables(self, names: Iterable[str]) -> None:
        """Check that all tables with a type of their own exist.

        Raises:
            ConfigError: a table does not exist.
        """
        known = list(names)
        for name in self.tables:
            if name not in known:
                raise ConfigError(
                    f"PublishConfig has a type for table {name!r}, which the model does not have"
                    f"{meant(name, known)}"
                )
