"""The page of a profile: parts, wait and rest add up to the step, it fits a terminal, and what
cannot be written is said early.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rayrec.errors import ConfigError
from rayrec.observe.profile_summary import Operator, Profile, check_folder
from rayrec.observe.times import STEP_PARTS, PartTimes, RankTimes
from rayrec.train.profile_config import ProfileConfig

MS = 1e-3


def rank_times(extra_ms: float) -> RankTimes:
    """Each part takes 2 ms, half of it waiting, rest `extra_ms`; data and input are ahead."""
    parts = dict.fromkeys(STEP_PARTS, PartTimes(2 * MS, MS)) | {
        p: PartTimes(2 * MS, MS, 7 * MS, 3 * MS) for p in ("data", "input")
    }
    step_s = (2 * len(STEP_PARTS) + extra_ms) * MS
    return RankTimes(parts=parts, step_s=step_s, waits=4, faults=12.4, cpu_s=step_s / 2)


def profile(ranks: int) -> Profile:
    operators = (
        Operator(name="aten::bmm", self_s=3 * MS, calls=2.0),
        Operator(name="x" * 200, self_s=MS, calls=0.1),
    )
    times = tuple(rank_times(2.0 + rank) for rank in range(ranks))
    return Profile(
        folder="p", device="cpu", first_step=6, steps=10, ranks=times, operators=operators
    )


def test_rows_of_the_page_add_up_to_the_step() -> None:
    lines = profile(2).text().splitlines()
    assert "steps 6 to 15 on 2 cpu ranks" in lines[0] and "steps 16 to 25" in lines[-4]
    names = [line.split()[0] for line in lines[2:] if line]
    end = names.index("step")
    assert names[:end] == [*STEP_PARTS, "wait", "rest"]
    for column, step_ms in ((2, 20.0), (3, 21.0)):
        cells = [float(line.split()[column]) for line in lines[2 : 2 + end + 1]]
        assert sum(cells[:-1]) == pytest.approx(cells[-1]) == step_ms
    assert [line.split()[:3] for line in lines[2 + end + 1 : 2 + end + 6]] == [
        ["data", "7.000", "7.000"],
        ["input", "7.000", "7.000"],
        ["waits", "4.0", "4.0"],
        ["faults", "12", "12"],
        ["CPU", "50%", "50%"],
    ]
    assert lines[-2].split() == ["3.000", "2.0", "aten::bmm"]


@pytest.mark.parametrize("ranks", [1, 4, 5, 64])
def test_the_page_fits_a_terminal(ranks: int) -> None:
    lines = profile(ranks).text().splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) < 45
    if ranks > 4:
        assert lines[1].split() == ["part", "share", "least", "mean", "most"]
        (step,) = (line.split() for line in lines if line.startswith("step"))
        assert [float(cell) for cell in step[2:]] == pytest.approx(
            [20.0, 20 + (ranks - 1) / 2, 19.0 + ranks], abs=0.05
        )


def test_a_step_without_dense_layers_has_no_rows_for_them() -> None:
    bare = rank_times(2.0)
    ranks = (replace(bare, parts={**bare.parts, "dense": PartTimes(), "optimizer": PartTimes()}),)
    names = [line.split(" ")[0] for line in replace(profile(1), ranks=ranks).text().splitlines()]
    assert "dense" not in names and "optimizer" not in names and "update" in names


def test_shares_are_of_the_step() -> None:
    (rank,) = profile(1).to_json()["ranks"]
    assert sum(part["share"] for part in rank["parts"].values()) + rank["rest"] / rank[
        "step"
    ] == pytest.approx(1.0)
    assert rank["cpu_share"] == 0.5


def test_a_profile_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write a profile"):
        check_folder(str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="24 steps, a profile takes 25"):
        ProfileConfig(path=str(tmp_path / "new")).check_steps(24)
    with pytest.raises(ConfigError, match="own file system"):
        ProfileConfig(path="s3://bucket/run")
    monkeypatch.chdir(tmp_path)
    config = ProfileConfig(path="new")
    config.check_steps(25)
    check_folder(config.path)
    assert config.path == str(tmp_path / "new") and (tmp_path / "new").is_dir()
