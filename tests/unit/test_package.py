"""The package that is built from this tree, by itself: what is in it, and that it trains."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

from rayrec.version import VERSION
from tests.unit.documents import ROOT

pytestmark = pytest.mark.slow

# folders of the repository that hold no sources
LEFT_OUT = {"build", "dist", "runs", "data"}


class Package(NamedTuple):
    """What was built, and where its wheel is installed."""

    sdist: Path
    wheel: Path
    installed: Path


def call(*command: str, cwd: Path, path: Path | None = None) -> str:
    """What a command prints, in a process that sees no other copy of rayrec than that in `path`."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"HOME": str(cwd), "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    done = subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The wheel comes from the source distribution, so that lacks nothing, either."""
    folder = tmp_path_factory.mktemp("package")
    source, made, installed = (folder / name for name in ("source", "made", "installed"))
    shutil.copytree(ROOT, source, ignore=_left_out)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made)]
    call(*build, str(source), cwd=folder)
    (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    call(*pip, "--target", str(installed), str(wheel), cwd=folder)
    return Package(sdist, wheel, installed)


def _left_out(folder: str, names: list[str]) -> set[str]:
    """What is not copied from a folder of the repository, so that nothing old is built in."""
    inner = {name for name in names if name == "__pycache__" or name.endswith(".egg-info")}
    hidden = {name for name in names if name.startswith(".")} - {".rayignore"}
    return inner | hidden | (LEFT_OUT & set(names) if Path(folder) == ROOT else set())


def metadata(package: Package) -> Message:
    with zipfile.ZipFile(package.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_the_three_packages_and_nothing_else(package: Package):
    with zipfile.ZipFile(package.wheel) as wheel:
        names = set(wheel.namelist())
    modules = {name for name in names if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT))
        for top in ("rayrec", "actors", "jobs")
        for path in (ROOT / top).rglob("*.py")
    }
    of_pages = {"page.css", "curves.js", "filter.js"}
    others = {"rayrec/py.typed", "jobs/train_dlrm.toml", "jobs/train_two_tower.toml"}
    assert modules == sources | others | {f"rayrec/report/{name}" for name in of_pages}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_distribution_holds_what_the_tests_and_the_site_need(package: Package):
    with tarfile.open(package.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {"README.md", "LICENSE", "Makefile", "mkdocs.yml", "cluster.yaml", "CONTRIBUTING.md"}
    needed |= {"docs/walkthrough.md", "docs/site/hooks.py", "tests/conftest.py"}
    needed |= {"examples/own_model.py", "benchmarks/step.py"}
    needed |= {"deploy/monitoring/grafana-rayrec.json", "deploy/monitoring/alerts.yml"}
    assert needed <= names


def test_the_metadata_say_what_the_package_is(package: Package):
    said = metadata(package)
    assert (said["Name"], said["Version"]) == ("rayrec", VERSION)
    assert said["License-Expression"] == "BSD-3-Clause"
    assert said["Description-Content-Type"] == "text/markdown"
    assert "# rayrec" in str(said.get_payload())
    assert {"cpu", "cuda", "dev", "docs"} <= set(said.get_all("Provides-Extra", []))
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    assert said["Keywords"]


def test_the_installed_copy_trains_from_another_folder(package: Package, tmp_path: Path):
    rayrec = str(package.installed / "bin/rayrec")
    path = package.installed
    where = "import rayrec, actors.rank, jobs; print(rayrec.__file__)"
    printed = call(sys.executable, "-c", where, cwd=tmp_path, path=path)
    assert Path(printed.strip()).is_relative_to(path)
    assert call(sys.executable, rayrec, "--version", cwd=tmp_path, path=path) == (
        f"rayrec {VERSION}\n"
    )
    made = ["make-data", "clicks", "--rows", "4000", "--eval-rows", "500"]
    call(sys.executable, rayrec, *made, cwd=tmp_path, path=path)
    train = ["-m", "jobs.train_dlrm", "--local", "--data", "clicks"]
    train += ["--set", "run.global_batch_size=512", "--checkpoint-dir", "runs/first"]
    printed = call(sys.executable, *train, cwd=tmp_path, path=path)
    assert "done: step 8, 4000 rows" in printed
    assert (tmp_path / "runs/first/step-00000008/manifest.json").is_file()
    call(sys.executable, rayrec, "report", "runs/first", cwd=tmp_path, path=path)
    assert "const charts = " in (tmp_path / "report.html").read_text()
