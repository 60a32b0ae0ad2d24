"""cluster.yaml passes Ray's own offline checks, and holds what a reader may rely on: bounds, no
secrets, the versions of pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
FILE = ROOT / "cluster.yaml"


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    """The file, with Ray's defaults filled in and checked against its schema."""
    import yaml
    from ray.autoscaler._private.util import prepare_config, validate_config

    config: dict[str, Any] = prepare_config(yaml.safe_load(FILE.read_text()))
    validate_config(config)
    return config


def test_ray_accepts_the_file_and_refuses_a_wrong_one(cluster):
    from ray.autoscaler._private.util import validate_config

    assert cluster["provider"]["type"] == "aws"
    with pytest.raises(Exception, match="no_such_key"):
        validate_config(cluster | {"no_such_key": 1})


def test_gpu_and_cpu_workers_have_bounds_within_the_clusters(cluster):
    workers = {
        name: node
        for name, node in cluster["available_node_types"].items()
        if name != cluster["head_node_type"]
    }
    assert any(node["resources"].get("GPU", 0) > 0 for node in workers.values())
    assert any(node["resources"].get("GPU", 0) == 0 for node in workers.values())
    for name, node in workers.items():
        assert 0 <= node["min_workers"] <= node["max_workers"], name
        assert node["max_workers"] > 0, name
    assert sum(node["max_workers"] for node in workers.values()) <= cluster["max_workers"]
    assert (
        max(node["min_workers"] for node in workers.values() if node["resources"].get("GPU")) >= 1
    )


def test_no_rank_can_land_on_the_head(cluster):
    assert cluster["available_node_types"][cluster["head_node_type"]]["resources"]["CPU"] == 0


def test_spot_nodes_are_of_types_that_say_so_and_none_of_them_stays(cluster):
    spot = set()
    for name, node in cluster["available_node_types"].items():
        market = node["node_config"].get("InstanceMarketOptions")
        if market is not None:
            assert market["MarketType"] == "spot" and node["min_workers"] == 0
            spot.add(name)
    assert spot == {name for name in cluster["available_node_types"] if name.endswith("_spot")}
    assert spot and cluster["head_node_type"] not in spot
    for name in spot:
        # a run goes on with the ranks of the type that stays
        twin = cluster["available_node_types"][name.removesuffix("_spot")]
        assert twin["resources"] == cluster["available_node_types"][name]["resources"]
        assert twin["min_workers"] >= 1


def test_workers_watch_for_the_notice_of_a_spot_machine(cluster):
    (watcher,) = cluster["worker_start_ray_commands"][2:]
    (module,) = re.findall(r"python -m (\S+)", watcher)
    assert module == "rayrec.machine.spot_notice" and watcher.endswith("&")
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_every_node_installs_the_synced_copy_with_the_fitting_extra(cluster):
    (target,) = cluster["file_mounts"]
    for name, node in cluster["available_node_types"].items():
        shared = (
            cluster["head_setup_commands"]
            if name == cluster["head_node_type"]
            else cluster["worker_setup_commands"]
        )
        commands = node.get("worker_setup_commands") or shared
        extra = "cuda" if node["resources"].get("GPU") else "cpu"
        assert any(f"{target}[{extra}]" in command for command in commands), f"{name}: {commands}"


def test_every_node_has_the_role_that_the_documents_make(cluster):
    """Ray gives a role to the head alone; ranks on workers need one to read data and to write
    checkpoints.
    """
    document = (ROOT / "docs" / "cluster.md").read_text()
    for name, node in cluster["available_node_types"].items():
        role = node["node_config"].get("IamInstanceProfile", {}).get("Name")
        assert role and f"--instance-profile-name {role} --role-name {role}" in document, name
        if node["node_config"]["ImageId"].startswith("resolve:ssm:"):
            assert "ssm:GetParameters" in document and "iam:PassRole" in document


def test_nodes_without_gpus_get_the_cpu_build_of_torch_first(cluster):
    pin = next(
        d
        for d in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if d.startswith("torch")
    )
    for commands in (cluster["head_setup_commands"], cluster["worker_setup_commands"]):
        assert f"{pin}+cpu --index-url" in commands[0] and "rayrec[cpu]" in commands[1]
    gpus = [
        node for node in cluster["available_node_types"].values() if node["resources"].get("GPU")
    ]
    assert gpus
    for gpu in gpus:
        assert not any("+cpu" in command for command in gpu["worker_setup_commands"])


def test_images_bring_the_ray_that_the_project_pins(cluster):
    wanted = next(
        d
        for d in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if d.startswith("ray")
    )
    version = wanted.partition("==")[2]
    gpu = [
        node["docker"]["worker_image"]
        for node in cluster["available_node_types"].values()
        if "worker_image" in node.get("docker", {})
    ]
    images = [cluster["docker"]["image"], *gpu]
    assert len(images) == 3
    assert all(f":{version}-py311-" in image for image in images), images


def test_a_submitted_job_and_a_new_node_get_every_product_file_and_no_environment(cluster):
    from ray._private.runtime_env.packaging import get_excludes_from_ignore_files

    left_out = get_excludes_from_ignore_files(ROOT, include_gitignore=True)

    def sent(path: Path) -> bool:
        return not any(leaves_out(path) for leaves_out in left_out)

    product = [
        path for top in ("rayrec", "actors", "jobs") for path in (ROOT / top).rglob("*.py")
    ] + [ROOT / "pyproject.toml"]
    assert len(product) > 50
    assert [path for path in product if not sent(path)] == []
    assert (
        not sent(ROOT / ".venv" / "bin")
        and not sent(ROOT / "data" / "a.parquet")
        and not sent(ROOT / ".git" / "HEAD")
    )
    folders = {part for path in product for part in path.relative_to(ROOT).parts}
    assert folders.isdisjoint(cluster["rsync_exclude"]), (
        "a pattern without a leading slash matches at any depth"
    )


SECRETS = {
    "an access key id": r"\b(AKIA|ASIA)[A-Z0-9]{12,}",
    "a private key": r"BEGIN [A-Z ]*PRIVATE KEY",
    "a key file": r"^\s*ssh_private_key\s*:|\.pem\b",
    "a credential": r"(?i)(secret|password|access_key|auth_token|api_key)\w*\s*[:=]\s*\S",
    "an account's own resource": r"\b(arn:aws:|subnet-[0-9a-f]{8}|sg-[0-9a-f]{8})",
}


def secrets(text: str) -> list[str]:
    """What in a text should not be published."""
    return [what for what, pattern in SECRETS.items() if re.search(pattern, text, re.MULTILINE)]


def test_the_file_holds_no_key_or_secret():
    assert secrets(FILE.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "aws_access_key: x",
        "  ssh_private_key: ~/a",
        "-----BEGIN RSA PRIVATE KEY",
        "RAY_AUTH_TOKEN=abc",
        "AKIAABCDEFGHIJKLMNOP",
    ],
)
def test_a_secret_would_be_found(line):
    assert secrets(line)
