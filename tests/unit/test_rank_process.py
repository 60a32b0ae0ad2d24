"""The class of a rank's actor reaches its process, whatever else has the name of its module."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
from ray import cloudpickle

from rayrec.driver import rank_process
from rayrec.errors import ConfigError


def test_another_module_in_place_of_the_actors_is_named_in_one_line(monkeypatch):
    other = types.ModuleType("actors")
    other.__file__ = "/srv/other/actors.py"
    monkeypatch.setitem(sys.modules, "actors", other)
    monkeypatch.delitem(sys.modules, "actors.rank", raising=False)
    with pytest.raises(ConfigError, match=r"^the module 'actors' is /srv/other/actors\.py.*\.$"):
        rank_process._rank_actor.__wrapped__()


def test_a_rank_needs_no_module_of_its_actor(monkeypatch):
    rank_process._rank_actor()
    from actors.rank import RankActor

    shipped = cloudpickle.dumps(RankActor)
    code = (
        "import pickle, sys; sys.modules['actors'] = None; "
        "made = pickle.loads(sys.stdin.buffer.read()); print(made.__name__, made({}).poll())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=shipped, capture_output=True, timeout=120
    )
    assert done.stdout.startswith(b"RankActor RankPoll("), done.stderr.decode()
