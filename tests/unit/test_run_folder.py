"""One driver at a time in a run's folder: refused while the owner lives, taken over when it is
gone, also after a SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rayrec.driver import run_folder
from rayrec.driver.run_folder import LOCK, Owner, held
from rayrec.errors import ConfigError, RayrecError, SaveError
from rayrec.storage import folder_trouble, missing_file, probe_output, write_new, write_whole
from tests.limits import files_up_to

HOLD = """
import sys
from rayrec.driver.run_folder import held
from rayrec.errors import ConfigError
try:
    with held(sys.argv[1], print):
        print("held", flush=True)
        sys.stdin.read()
except ConfigError as error:
    print("refused", error, flush=True)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the folder until its input ends."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_world_that_another_one_follows_saves_no_more(tmp_path: Path) -> None:
    with held(str(tmp_path / "run"), print) as folder:
        assert folder is not None
        first = folder.next_world()
        first.check()
        second = folder.next_world()
        second.check()
        with pytest.raises(SaveError, match="world 2 of the run has followed world 1"):
            first.check()
    with pytest.raises(SaveError, match="another driver goes on with it"):
        second.check()


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    other = hold(folder)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(
                ConfigError, match=rf"in use by process {other.pid} on .*last heard of 0 s ago"
            ),
            held(str(folder), print),
        ):
            pass
        said: list[str] = []
        other.send_signal(signal.SIGKILL)
        other.wait(10)
        with held(str(folder), said.append) as mine:
            assert mine is not None
            assert said == [
                f"took over {folder} from process {other.pid} on {os.uname().nodename}, which is "
                "gone"
            ]
            assert not folder_trouble(str(folder), mine.token)
        assert not list(folder.iterdir())
    finally:
        other.kill()
        other.wait(10)


@pytest.mark.slow
def test_of_many_that_start_at_once_one_holds_the_folder(tmp_path: Path) -> None:
    drivers = [hold(tmp_path / "run") for _ in range(6)]
    # the one that holds it goes on until all have tried
    said = [driver.stdout.readline() for driver in drivers if driver.stdout is not None]
    for driver in drivers:
        driver.communicate(timeout=60)
    assert sorted(text.split()[0] for text in said) == ["held", *["refused"] * 5]
    # the driver that made the folder may be one of the refused, which removes it only when it is
    # empty
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_a_full_disk_refuses_the_folder_and_leaves_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (
        files_up_to(0),
        pytest.raises(ConfigError, match=r"cannot write to the run's folder .*too large"),
        held(str(folder), print),
    ):
        pass
    assert not folder.exists()
    with (  # room for the token, which is "0", and not for the lock
        files_up_to(1),
        pytest.raises(ConfigError, match=r"cannot write to the run's folder .*too large"),
        held(str(folder), print),
    ):
        pass
    assert not folder.exists()


def test_a_folder_that_cannot_be_looked_into_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with (
        pytest.raises(ConfigError, match=r"cannot write to the run's folder .*symbolic links"),
        held(str(tmp_path / "loop" / "run"), print),
    ):
        pass


def test_an_owner_elsewhere_holds_the_folder_until_its_beat_is_old(tmp_path: Path) -> None:
    owner = Owner("t", "elsewhere", "another machine", 1, 1, time.time() - 30)
    (tmp_path / LOCK).write_text(
        json.dumps({name: getattr(owner, name) for name in Owner.__slots__})
    )
    with (
        pytest.raises(
            ConfigError, match=r"in use by process 1 on elsewhere, last heard of 3\d s ago"
        ),
        held(str(tmp_path), print),
    ):
        pass
    (tmp_path / LOCK).write_text(
        (tmp_path / LOCK).read_text().replace(str(owner.beat), str(owner.beat - 60))
    )
    with held(str(tmp_path), print):
        pass


def test_of_two_that_find_one_owner_gone_one_takes_its_place(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", hold(tmp_path / "run")
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    other.kill()
    other.wait(10)
    said: list[str] = []

    def say(text: str) -> None:
        # the first has found the owner gone, and the second comes before it has the lock
        said.append(text)
        with (
            pytest.raises(ConfigError, match="is being taken by another driver"),
            held(str(folder), said.append),
        ):
            pass

    with held(str(folder), say) as mine:
        assert mine is not None and len(said) == 1
        assert mine.token.endswith(json.loads((folder / LOCK).read_text())["token"])
    assert not list(folder.iterdir())


OWNER = {"token": "x", "host": "h", "machine": "m", "pid": 7, "started": 1}


@pytest.mark.parametrize("lock", ["{", "7", json.dumps(OWNER), json.dumps({**OWNER, "beat": "?"})])
def test_a_damaged_lock_holds_nothing(tmp_path: Path, lock: str) -> None:
    (tmp_path / LOCK).write_text(lock)
    with held(str(tmp_path), print):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_a_driver_that_lost_its_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "BEAT_S", 0.05)
    with held(str(tmp_path), print) as folder:
        assert folder is not None
        folder.check()
        (tmp_path / LOCK).write_text(json.dumps({**OWNER, "beat": time.time()}))
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                folder.check()
            except RayrecError as error:
                assert "taken over by process 7 on h" in str(error)
                break
            time.sleep(0.02)
        else:
            raise AssertionError("the thief was not noticed")
    assert (tmp_path / LOCK).exists(), "another driver's lock is left alone"


def test_no_path_holds_nothing() -> None:
    with held(None, print) as folder:
        assert folder is None


def test_a_folder_that_is_another_on_this_host_is_in_trouble(tmp_path: Path) -> None:
    assert "does not see what the driver wrote" in folder_trouble(str(tmp_path), "token")
    assert "does not see" in missing_file([(str(tmp_path / "none"), 3)])
    (tmp_path / "data").write_text("four")
    assert "with 4 bytes, the driver with 3" in missing_file([(str(tmp_path / "data"), 3)])
    assert missing_file([(str(tmp_path / "data"), 4)]) == ""


def test_an_output_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    probe_output("x", str(tmp_path / "new" / "below" / "out.json"))
    assert not list(tmp_path.iterdir()), "a probe leaves no folder"
    write_whole("x", str(tmp_path / "new" / "out.json"), "{}")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out.json"]
    for bad in (tmp_path / "new", tmp_path / "new" / "out.json" / "below"):
        with pytest.raises(ConfigError, match="cannot write x to"):
            probe_output("x", str(bad))
        with pytest.raises(SaveError):
            write_whole("x", str(bad), "{}")
    with pytest.raises(ConfigError, match="name too long"):
        probe_output("x", str(tmp_path / ("x" * 300)))
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out.json"]


def test_a_file_that_is_there_is_not_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "below" / "fact.json"
    assert write_new("x", str(path), "first") and not write_new("x", str(path), "second")
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]
    write_whole("x", str(tmp_path / "other"), "")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(SaveError, match="cannot write x to"):
        write_new("x", str(path / "below"), "third")
