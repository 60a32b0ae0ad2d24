"""Documents of JSON that were changed by whoever can write their sha256, too."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

VALUES = (None, -1, 0, 2**31, 10**30, 1.5, "", "x", [], {}, True, ["a"], {"a": 1}, "\ud800", "\0")


def places(value: object, place: tuple = ()) -> Iterator[tuple]:
    """The places of all values in a JSON document."""
    named = value.items() if isinstance(value, dict) else ()
    for key, inner in named or (enumerate(value) if isinstance(value, list) else ()):
        yield (*place, key)
        yield from places(inner, (*place, key))


def distorted(text: str, rng: random.Random) -> dict[str, Any]:
    """A document with two values changed."""
    body = json.loads(text)
    body.pop("sha256")
    for place in rng.sample(list(places(body)), 2):
        inner = body
        with suppress(LookupError, TypeError):  # the other one was above it
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = copy.deepcopy(rng.choice(VALUES))
    return body


def sealed(body: dict[str, Any]) -> str:
    """A document with its sha256, as it is written."""
    # an index that met a dict has become a key of it, and keys of JSON are text
    body = {key: value for key, value in json.loads(json.dumps(body)).items() if key != "sha256"}
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body)
