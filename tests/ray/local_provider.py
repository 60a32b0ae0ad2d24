"""A node provider for `ray up` whose nodes are raylets of this machine: bash in place of ssh.

Every node has a loopback address of its own, by which Ray's autoscaler knows it. What its commands
start was born with the node's mark in its environment, and ends when the node is terminated.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from ray.autoscaler.command_runner import CommandRunnerInterface
from ray.autoscaler.node_provider import NodeProvider

from tests.leftovers import processes_with

MARK = "RAYREC_LOCAL_NODE"
LOCK = threading.RLock()


class LocalProvider(NodeProvider):
    """Its nodes stand in the file `state` of the provider's options, for `ray up` and the head."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._file = Path(provider_config["state"])

    def _nodes(self) -> dict[str, dict[str, str]]:
        nodes: dict[str, dict[str, str]] = {}
        if self._file.exists():
            nodes = json.loads(self._file.read_text())
        return nodes

    def _write(self, nodes: dict[str, dict[str, str]]) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(nodes))
        new.replace(self._file)

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """The nodes with these tags."""
        with LOCK:
            nodes = self._nodes()
        return [name for name, tags in nodes.items() if tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        """Whether it was made and not terminated."""
        return node_id in self._nodes()

    def is_terminated(self, node_id: str) -> bool:
        """Whether it is gone."""
        return node_id not in self._nodes()

    def node_tags(self, node_id: str) -> dict[str, str]:
        """What was noted of it."""
        return self._nodes().get(node_id, {})

    def internal_ip(self, node_id: str) -> str:
        """Its loopback address."""
        return node_id

    external_ip = internal_ip

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """Make nodes; nothing runs on them until their commands do."""
        with LOCK:
            nodes = self._nodes()
            used = [int(name.rpartition(".")[2]) for name in nodes]
            for number in range(count):
                nodes[f"127.0.0.{max(used, default=0) + 1 + number}"] = dict(tags)
            self._write(nodes)

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        """Note more of it."""
        with LOCK:
            nodes = self._nodes()
            nodes[node_id] = {**nodes.get(node_id, {}), **tags}
            self._write(nodes)

    def terminate_node(self, node_id: str) -> None:
        """End what runs on it."""
        with LOCK:
            nodes = self._nodes()
            nodes.pop(node_id, None)
            self._write(nodes)
        for pid in processes_with(f"{MARK}={node_id}"):
            os.kill(pid, signal.SIGTERM)

    def get_command_runner(self, log_prefix: str, node_id: str, *_: Any, **__: Any) -> Bash:
        """What runs the node's commands."""
        return Bash(node_id)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Nothing is to be made before the first node."""
        return cluster_config


class Bash(CommandRunnerInterface):
    """Runs a node's commands in bash on this machine."""

    def __init__(self, node_id: str) -> None:
        self._node = node_id

    def run(
        self,
        cmd: str | None = None,
        timeout: int = 120,
        exit_on_fail: bool = False,
        port_forward: Any = None,
        with_output: bool = False,
        environment_variables: dict[str, Any] | None = None,
        *_: Any,
        **__: Any,
    ) -> str:
        """Run a command; its output where that is wanted."""
        given = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in (environment_variables or {}).items()
        }
        env = {**os.environ, **given, MARK: self._node, "RAYREC_NODE_IP": self._node}
        # a daemon of Ray would keep a pipe open
        done = subprocess.run(
            ["bash", "-c", cmd or "true"],
            env=env,
            check=True,
            timeout=timeout,
            stdout=subprocess.PIPE if with_output else None,
        )
        return done.stdout.decode() if with_output else ""

    def run_rsync_up(self, source: str, target: str, options: Any = None) -> None:
        """Copy files to the node, but for those that the options name."""
        source, target = os.path.expanduser(source), os.path.expanduser(target)
        if os.path.realpath(source) == os.path.realpath(target):
            return
        left_out = [name.strip("/") for name in (options or {}).get("rsync_exclude", [])]
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(source):
            ignore = shutil.ignore_patterns(*left_out, "__pycache__")
            shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)

    def run_rsync_down(self, source: str, target: str, options: Any = None) -> None:
        """Copy files from the node."""
        self.run_rsync_up(source, target, options)

    def remote_shell_command_str(self) -> str:
        """What a user would type."""
        return "bash"

    def run_init(self, *_: Any, **__: Any) -> bool | None:
        """There is no container to start."""
        return None
