"""A cluster measures itself through its ranks, and plans use what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayrec.cli.main import main
from rayrec.data.synthetic import SyntheticPaths
from rayrec.errors import ConfigError, PlanError
from rayrec.layout import Topology
from rayrec.layout.rates import Rates
from tests.ray import worlds

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.slow
def test_a_calibrated_driver_plans_with_what_its_ranks_measured(clicks: SyntheticPaths) -> None:
    driver = worlds.driver(clicks, 2)
    by_default = driver.plan().estimates
    found = driver.calibrate()
    plan = driver.plan()
    assert (
        found.world_size == 2
        and found.rates != Rates()
        and plan.estimates is not None
        and by_default is not None
    )
    assert (
        plan.estimates.topology.rates == found.rates
        and plan.estimates.topology.memory_bytes == by_default.topology.memory_bytes
    )
    assert by_default.topology.rates == Rates() and plan.estimates.step_s != by_default.step_s


@pytest.mark.slow
def test_the_command_writes_a_topology_that_plans_read(
    clicks: SyntheticPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "topology.json")
    assert main(["calibrate", "--ranks", "2", "--memory", "1", "--out", out]) == 0
    assert "random plan 1 of" in capsys.readouterr().out
    found = Topology.from_json(Path(out).read_text())
    assert found.memory_bytes == (10**9, 10**9) and found.rates != Rates()
    assert main(["plan", "--schema", str(clicks.schema), "--topology", out]) == 0
    plan = worlds.driver(clicks, 2, topology=out).plan()
    assert plan.estimates is not None and plan.estimates.topology.rates == found.rates


def test_a_topology_that_is_none_is_refused_before_anything_starts(
    clicks: SyntheticPaths, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot read the topology"):
        worlds.driver(clicks, 2, topology=str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(PlanError, match=r"bad.json has no field .hosts."):
        worlds.driver(clicks, 2, topology=str(tmp_path / "bad.json"))


@pytest.mark.parametrize("plan", worlds.some(["auto", "row_wise"], []))
def test_a_run_is_compared_with_its_prediction(clicks: SyntheticPaths, plan: str) -> None:
    result = worlds.driver(clicks, 2, plan=plan, epochs=2).fit()
    hindsight = result.hindsight
    assert hindsight is not None and len(hindsight.measured) == len(hindsight.predicted) == 2
    for times in hindsight.measured:
        idle = [part for part, t in times.parts.items() if t.seconds + t.ahead == 0]
        assert idle == ["output"] and times.ahead  # rows are read in place and need no way home
        assert 0 < times.rest_s < times.step_s and 0 < times.waits < 10
    assert "measured/predicted" in hindsight.report()
