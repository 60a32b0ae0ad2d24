"""deploy/kuberay against what KubeRay's resource definitions say, and against cluster.yaml;
deploy/serving against Kubernetes' types, and against the server.

`kuberay_facts.json` has the fields with their types, and where they were read.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import train_dlrm
from rayrec.runs.run_file import RunFile

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kuberay"
FACTS = json.loads((Path(__file__).parent / "kuberay_facts.json").read_text())
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
PRIMITIVE: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "any": lambda value: isinstance(value, dict),
    "strings": lambda value: (
        isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    ),
    "quantity": lambda value: QUANTITY.fullmatch(str(value)) is not None,
    "quantities": lambda value: (
        isinstance(value, dict) and all(PRIMITIVE["quantity"](each) for each in value.values())
    ),
}


def manifest(name: str) -> dict[str, Any]:
    """One of our files."""
    import yaml

    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def troubles(value: Any, kind: str, path: str) -> Iterator[str]:
    """What of a value is not as its type, a word of the facts, says."""
    if kind.startswith("["):
        if not isinstance(value, list):
            yield f"{path} is no list"
            return
        for number, each in enumerate(value):
            yield from troubles(each, kind[1:-1], f"{path}[{number}]")
    elif kind in PRIMITIVE:
        if not PRIMITIVE[kind](value):
            yield f"{path} is {value!r} and no {kind}"
    elif not isinstance(value, dict):
        yield f"{path} is {value!r} and no {kind}"
    else:
        fields = FACTS["shapes"][kind]
        for missing in set(FACTS["required"].get(kind, ())) - set(value):
            yield f"{path} has no {missing}"
        for name, each in value.items():
            where, known = f"{path}.{name}", FACTS["enumerations"].get(f"{kind}.{name}")
            if name not in fields:
                yield f"{where} is unknown"
                continue
            yield from troubles(each, fields[name], where)
            if known is not None and each not in known:
                yield f"{where} is {each!r} and none of {known}"


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    """The RayCluster."""
    return manifest("raycluster.yaml")


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    """The RayJob."""
    return manifest("rayjob.yaml")


@pytest.fixture(scope="module")
def machines() -> dict[str, Any]:
    """cluster.yaml."""
    import yaml

    loaded: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return loaded


def groups(cluster: dict[str, Any]) -> dict[str, Any]:
    """The groups of workers by name."""
    return {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}


def container(group: dict[str, Any]) -> dict[str, Any]:
    """The one container of a group's pods."""
    (only,) = group["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_the_schema_knows_every_field(cluster, job):
    for loaded in (cluster, job):
        assert loaded["apiVersion"] == "ray.io/v1"
        assert list(troubles(loaded, loaded["kind"], loaded["kind"])) == []


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        (lambda spec: spec.update(rayversion="2"), "rayversion is unknown"),
        (lambda spec: spec.update(enableInTreeAutoscaling="yes"), "no boolean"),
        (lambda spec: spec.pop("headGroupSpec"), "has no headGroupSpec"),
        (lambda spec: spec["autoscalerOptions"].update(upscalingMode="Fast"), "none of"),
        (lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}), "strings"),
        (lambda spec: spec["workerGroupSpecs"][0].update(maxReplicas="4"), "no integer"),
        (lambda spec: spec["workerGroupSpecs"][1].pop("minReplicas"), "has no minReplicas"),
        (
            lambda spec: container(spec["headGroupSpec"])["resources"]["limits"].update(cpu="8 C"),
            "no quantities",
        ),
    ],
)
def test_a_mistake_would_be_found(cluster, change, trouble):
    wrong = copy.deepcopy(cluster)
    change(wrong["spec"])
    assert any(trouble in told for told in troubles(wrong, "RayCluster", "RayCluster"))


def test_the_facts_say_where_each_shape_was_read():
    read = {shape for source in FACTS["sources"] for shape in source["shapes"]}
    assert read == set(FACTS["shapes"])
    assert all(re.fullmatch("[0-9a-f]{40}", source["commit"]) for source in FACTS["sources"])


def test_the_job_starts_the_same_cluster(cluster, job):
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]


def test_the_head_has_no_ranks_and_stays(cluster):
    head = cluster["spec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "tolerations" not in head["template"]["spec"]


def test_only_spot_groups_tolerate_spot_nodes_and_none_of_these_stays(cluster, machines):
    for name, group in groups(cluster).items():
        tolerates = "tolerations" in group["template"]["spec"]
        assert tolerates == name.endswith("-spot")
        if tolerates:
            assert group["minReplicas"] == group["replicas"] == 0
    spot = [name for name in machines["available_node_types"] if name.endswith("_spot")]
    assert [name.replace("_", "-") for name in spot] == [
        name for name in groups(cluster) if name.endswith("-spot")
    ]


def test_groups_offer_what_the_node_types_of_the_same_name_offer(cluster, machines):
    types = machines["available_node_types"]
    assert {name.replace("-", "_") for name in groups(cluster)} == set(types) - {"head"}
    for name, group in groups(cluster).items():
        node, limits = types[name.replace("-", "_")], container(group)["resources"]["limits"]
        assert group["minReplicas"] == node["min_workers"] <= group["replicas"]
        assert group["maxReplicas"] == node["max_workers"] >= group["replicas"]
        assert int(group["rayStartParams"]["num-cpus"]) == node["resources"]["CPU"]
        assert int(limits["cpu"]) <= node["resources"]["CPU"]
        gpus = node["resources"].get("GPU", 0)
        assert int(group["rayStartParams"].get("num-gpus", 0)) == gpus
        assert limits.get("nvidia.com/gpu", 0) == gpus
    minutes = machines["idle_timeout_minutes"]
    assert cluster["spec"]["autoscalerOptions"]["idleTimeoutSeconds"] == 60 * minutes


def test_versions_are_those_of_the_project_and_of_cluster_yaml(cluster, machines):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        pin.replace("[default]", "").split("==") for pin in project["dependencies"] if "==" in pin
    )
    assert cluster["spec"]["rayVersion"] == pins["ray"]
    pods = [cluster["spec"]["headGroupSpec"], *groups(cluster).values()]
    for pod in pods:
        gpu = "nvidia.com/gpu" in container(pod)["resources"]["limits"]
        tag = f"{project['version']}-ray{pins['ray']}-{'gpu' if gpu else 'cpu'}"
        assert container(pod)["image"].partition(":")[2] == tag
    recipe = (FOLDER / "Dockerfile").read_text()
    assert f"ARG BASE={machines['docker']['image']}" in recipe
    gpu_image = machines["available_node_types"]["gpu_ranks"]["docker"]["worker_image"]
    assert f"--build-arg BASE={gpu_image} --build-arg EXTRA=cuda" in recipe
    assert f"ARG TORCH=torch=={pins['torch']}\n" in recipe
    for kind in ("cpu", "gpu"):
        assert f":{project['version']}-ray{pins['ray']}-{kind}" in recipe


def test_pods_live_long_enough_to_hear_that_they_end(cluster):
    for pod in [cluster["spec"]["headGroupSpec"], *groups(cluster).values()]:
        values = {each["name"]: each["value"] for each in container(pod)["env"]}
        drain_s = float(values["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert 30 <= drain_s < pod["template"]["spec"]["terminationGracePeriodSeconds"]
        assert values["RAY_AUTH_MODE"] == "disabled"


def test_the_job_is_one_that_goes_on_by_itself(job, tmp_path, capsys):
    words = job["spec"]["entrypoint"].split()
    assert words[:3] == ["python", "-m", "jobs.train_dlrm"]
    assert train_dlrm.main([*words[3:], "--print-config"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    run = RunFile.read(str(tmp_path / "run.toml"))
    assert run.run.resume_from == "auto" and run.run.failure.max_failures == -1
    assert run.run.checkpoint.every_n_steps and run.scaling.use_gpu
    assert str(run.run.storage_path).startswith("s3://BUCKET/")
    least, most = run.scaling.num_workers
    gpus = [int(g["rayStartParams"].get("num-gpus", 0)) for g in _gpu_groups(job)]
    assert least == gpus[0] and least < most <= sum(
        group["maxReplicas"] * count for group, count in zip(_gpu_groups(job), gpus, strict=True)
    )
    per_pod = int(_gpu_groups(job)[0]["rayStartParams"]["num-cpus"])
    assert run.scaling.cpus_per_worker * gpus[0] <= per_pod
    assert job["spec"]["backoffLimit"] > 0 and job["spec"]["shutdownAfterJobFinishes"]


def _gpu_groups(job: dict[str, Any]) -> list[dict[str, Any]]:
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return [group for group in workers if "num-gpus" in group["rayStartParams"]]


@pytest.fixture(scope="module")
def serving() -> dict[str, dict[str, Any]]:
    """What deploy/serving/kubernetes.yaml holds, by kind."""
    import yaml

    text = (FOLDER.parent / "serving" / "kubernetes.yaml").read_text()
    return {loaded["kind"]: loaded for loaded in yaml.safe_load_all(text)}


def test_kubernetes_knows_every_field_of_the_server(serving):
    versions = {"Deployment": "apps/v1", "Service": "v1", "PodDisruptionBudget": "policy/v1"}
    assert {kind: loaded["apiVersion"] for kind, loaded in serving.items()} == versions
    for kind, loaded in serving.items():
        assert list(troubles(loaded, kind, kind)) == []
    wrong = copy.deepcopy(serving["Deployment"])
    container(wrong["spec"])["readinessProbe"]["grpc"] = {"service": "x"}
    assert list(troubles(wrong, "Deployment", "D")) == [
        "D.spec.template.spec.containers[0].readinessProbe.grpc has no port"
    ]


def test_pods_of_the_server_end_after_their_last_answer(serving):
    from rayrec.cli.serve import command
    from rayrec.serve.server.pulse import SILENT_S

    spec = serving["Deployment"]["spec"]
    pod, only = spec["template"]["spec"], container(spec)
    assert only["command"][:2] == ["rayrec", "serve"]
    # refuses what the command does not take
    given = command.make_context("serve", list(only["command"][2:])).params
    assert given["artifact"].startswith(only["volumeMounts"][0]["mountPath"] + "/")
    assert given["host"] == "0.0.0.0", "other pods ask"
    end_s = given["lame_duck_s"] + given["drain_s"]
    assert pod["terminationGracePeriodSeconds"] > end_s + 5, (
        "the server waits five more for replicas"
    )
    ready, live = only["readinessProbe"], only["livenessProbe"]
    assert 2 * ready["periodSeconds"] * ready["failureThreshold"] < given["lame_duck_s"]
    assert live["periodSeconds"] * live["failureThreshold"] > 3 * SILENT_S, (
        "a replica hangs: not all"
    )
    ports = {"grpc": given["port"], "http": given["http_port"]}
    assert {each["name"]: each["containerPort"] for each in only["ports"]} == ports
    assert ready["grpc"]["port"] == only["startupProbe"]["grpc"]["port"] == ports["grpc"]
    assert (live["httpGet"]["port"], live["httpGet"]["path"]) == (ports["http"], "/health")
    service = serving["Service"]["spec"]
    assert {each["name"]: each["targetPort"] for each in service["ports"]} == ports
    labels = spec["template"]["metadata"]["labels"]
    budget = serving["PodDisruptionBudget"]["spec"]
    assert labels == spec["selector"]["matchLabels"] == service["selector"]
    assert labels == budget["selector"]["matchLabels"]
    assert budget["minAvailable"] < spec["replicas"]


def test_the_image_of_the_server_is_that_of_this_version(serving, cluster):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    image = container(serving["Deployment"]["spec"])["image"]
    assert image.endswith(f":{project['version']}-ray{cluster['spec']['rayVersion']}-serve")
    text = (FOLDER.parent / "serving" / "kubernetes.yaml").read_text()
    assert "EXTRA=cpu,serve" in text and "serve" in project["optional-dependencies"]
