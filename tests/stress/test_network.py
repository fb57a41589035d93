"""The server as another machine sees it: a network namespace that a pair of virtual devices connects with this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stress.test_files import make_run

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
NAMESPACE, HERE, THERE = "xformer-test", "xf-here", "xf-there"
ADDRESS, OTHER_ADDRESS = "10.231.17.1", "10.231.17.2"
TOKEN = "a-long-secret"

# Prints the status of a request, or the name of the error.
REQUEST = """
import http.client, sys
host, port, token = sys.argv[1:]
connection = http.client.HTTPConnection(host, int(port), timeout=10)
try:
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {token}"} if token else {})
    print(connection.getresponse().status)
except OSError as error:
    print(type(error).__name__)
"""


def ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def other_machine() -> Iterator[list[str]]:
    """Return the command that runs a program in the other namespace."""
    if shutil.which("ip") is None or os.geteuid() != 0 or not ip("netns", "add", NAMESPACE):
        pytest.skip("network namespaces need Linux, iproute2 and root")
    try:
        if not ip("link", "add", HERE, "type", "veth", "peer", "name", THERE, "netns", NAMESPACE):
            pytest.skip("this kernel has no virtual network devices")
        assert ip("addr", "add", f"{ADDRESS}/24", "dev", HERE)
        assert ip("link", "set", HERE, "up")
        assert ip("-n", NAMESPACE, "addr", "add", f"{OTHER_ADDRESS}/24", "dev", THERE)
        assert ip("-n", NAMESPACE, "link", "set", THERE, "up")
        yield ["ip", "netns", "exec", NAMESPACE]
    finally:
        ip("link", "del", HERE)
        ip("netns", "del", NAMESPACE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("network")
    make_run(path)
    return path / "run"


class Server:
    """`xformer serve` with some options."""

    def __init__(self, run: Path, *options: str) -> None:
        command = [sys.executable, "-m", "xformer", "serve", "--model", str(run), "--port", "0", *options]
        self._process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        line = next(line for line in self._process.stderr if "http://" in line)
        self.port = line.split("http://")[1].split(":")[1].split("/")[0].strip()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)

    def request(self, host: str, token: str = "", prefix: list[str] | None = None) -> str:
        command = [*(prefix or []), sys.executable, "-c", REQUEST, host, self.port, token]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_only_this_machine_reaches_a_server_without_options(run, other_machine):
    with Server(run) as server:
        assert server.request("127.0.0.1") == "200"
        assert server.request(ADDRESS) == "ConnectionRefusedError"
        assert server.request(ADDRESS, prefix=other_machine) == "ConnectionRefusedError"


@pytest.mark.parametrize("host", ["0.0.0.0", ADDRESS])
def test_other_machines_need_the_token(run, other_machine, host):
    with Server(run, "--host", host, "--token", TOKEN) as server:
        for prefix in ([], other_machine):
            assert server.request(ADDRESS, prefix=prefix) == "401"
            assert server.request(ADDRESS, "a-wrong-secret", prefix) == "401"
            assert server.request(ADDRESS, TOKEN, prefix) == "200"


def test_a_host_without_a_token_is_refused(run):
    command = [sys.executable, "-m", "xformer", "serve", "--model", str(run), "--host", "0.0.0.0"]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "which other machines can reach; expected a token (--token auto)" in result.stderr
