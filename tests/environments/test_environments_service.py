"""Promises of the environments service over HTTP: leases, forks, snapshots, keys; no orphan, however it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from etude.base.errors import EnvironmentFault, PathEscape, UserError
from etude.base.process import ServiceProcess
from etude.base.records import PodLimits
from etude.environments import cgroups
from etude.environments.client import EnvironmentsClient
from etude.environments.config import EnvironmentsConfig
from etude.environments.leases import PodService
from etude.environments.namespaces import NamespaceBackend
from etude.environments.process import start_service
from etude.environments.service import KEY_VARIABLE

Body = Callable[[EnvironmentsClient], Awaitable[None]]


@contextmanager
def running(log: Path, config: EnvironmentsConfig | None = None) -> Iterator[ServiceProcess]:
    """A service process."""
    service = asyncio.run(start_service(config or EnvironmentsConfig(), log=log))
    try:
        yield service
    finally:
        service.stop()


def with_client(service: ServiceProcess, body: Body, key: str | None = None) -> None:
    async def main() -> None:
        client = EnvironmentsClient(service.base_url, key or service.key, timeout=20.0)
        try:
            await body(client)
        finally:
            await client.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running(
        tmp_path_factory.mktemp("logs") / "log", EnvironmentsConfig(max_body_mb=1, max_snapshot_mb=1)
    ) as process:
        yield process


def test_a_pod_over_http(service: ServiceProcess) -> None:
    async def body(client: EnvironmentsClient) -> None:
        pod = await client.create({"hello.py": "print('hi')"}, PodLimits(memory_mb=128))
        assert (await pod.exec("python3 -I -S hello.py")).output == "hi\n"
        await pod.write({"x": "1"})
        fork = await pod.fork()
        await fork.write({"x": "2"})
        assert (await pod.read("x"), await fork.read("x")) == ("1", "2")
        with pytest.raises(PathEscape):
            await pod.read("../../etc/passwd")
        snapshot = await pod.snapshot()
        await pod.exec("rm x")
        await pod.destroy()
        await pod.destroy()
        restored = await client.restore(snapshot)
        assert await restored.list() == ["hello.py", "x"]
        with pytest.raises(EnvironmentFault, match="no pod"):
            await pod.exec("true")
        await restored.destroy()
        await fork.destroy()

    with_client(service, body)


def test_creation_is_idempotent_by_key(service: ServiceProcess) -> None:
    async def body(client: EnvironmentsClient) -> None:
        answers = await asyncio.gather(*(client.call("POST", "/pods", {"files": {}, "key": "k1"}) for _ in range(4)))
        assert len({answer["id"] for answer in answers}) == 1
        await client.call("DELETE", f"/pods/{answers[0]['id']}")

    with_client(service, body)


def test_a_wrong_key_and_bad_bodies_are_refused(service: ServiceProcess) -> None:
    async def wrong(client: EnvironmentsClient) -> None:
        with pytest.raises(EnvironmentFault, match="missing or wrong key"):
            await client.create({})

    async def bad(client: EnvironmentsClient) -> None:
        for body in ({"files": 3}, {"files": {}, "limits": {"memory": 1}}):
            with pytest.raises(EnvironmentFault, match=r"bad_request|Error"):
                await client.call("POST", "/pods", body)

    with_client(service, wrong, key="other")
    with_client(service, bad)


def test_a_large_body_is_refused_with_and_without_an_announced_length(service: ServiceProcess) -> None:
    async def body(client: EnvironmentsClient) -> None:
        with pytest.raises(EnvironmentFault, match="body above 1048576 bytes"):
            await client.create({"big": "x" * (2 << 20)})

    with_client(service, body)

    def pieces() -> Iterator[bytes]:
        yield b'{"files": {"big": "'
        for _ in range(20):
            yield b"x" * 100_000
        yield b'"}}'

    headers = {"authorization": f"Bearer {service.key}"}
    answer = httpx.post(f"{service.base_url}/pods", content=pieces(), headers=headers, timeout=10.0)
    assert answer.status_code == 413
    assert httpx.get(f"{service.base_url}/health", headers=headers).json()["pods"] == 0


def test_snapshots_are_bounded_and_can_be_deleted(service: ServiceProcess) -> None:
    async def body(client: EnvironmentsClient) -> None:
        before = (await client.health())["snapshot_bytes"]
        pod = await client.create({"f": "x" * 700_000})
        first = await pod.snapshot()
        with pytest.raises(EnvironmentFault, match="max_snapshot_mb"):
            await pod.snapshot()
        await client.forget(first)
        await client.forget(first)
        with pytest.raises(EnvironmentFault, match="no snapshot"):
            await client.restore(first)
        await client.forget(await pod.snapshot())
        assert (await client.health())["snapshot_bytes"] == before
        await pod.destroy()

    with_client(service, body)


def test_health_tells_counts_and_what_bounds_pods(service: ServiceProcess) -> None:
    async def body(client: EnvironmentsClient) -> None:
        before = await client.health()
        pod = await client.create({})
        after = await client.health()
        assert (after["pods"], after["created"]) == (before["pods"] + 1, before["created"] + 1)
        assert after["probe"] == "passed"
        assert set(after["bounds"]) == {"memory", "processes"}
        await pod.destroy()

    with_client(service, body)


def test_what_a_model_may_write_reaches_the_pod(service: ServiceProcess) -> None:
    """Half characters are no JSON; a NUL is no command; neither is a fault of the service."""

    async def body(client: EnvironmentsClient) -> None:
        pod = await client.create({})
        await pod.write({"a": "half \ud800 é"})
        assert await pod.read("a") == "half ? é"
        assert (await pod.exec("echo \ud800\0")).exit_code == 126
        with pytest.raises(PathEscape):
            await pod.read("a\0b")
        with pytest.raises(EnvironmentFault, match="timeout"):
            await pod.exec("true", timeout=-1.0)
        await pod.destroy()

    with_client(service, body)


def test_a_wrong_configuration_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = {
            str(port): ({}, f"port {port}: Address already in use"),
            '{"leases": 3}': ({}, "unknown key leases"),
            "nonsense": ({}, "neither a port nor JSON"),
            "0": ({"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)}, "no C compiler found"),
            '{"port": 0}': ({KEY_VARIABLE: ""}, f"set {KEY_VARIABLE}"),
        }
        for argument, (variables, expected) in cases.items():
            done = subprocess.run(
                [sys.executable, "-m", "etude.environments.service", argument],
                env={**os.environ, KEY_VARIABLE: "k", **variables}, capture_output=True, text=True, timeout=30,
            )  # fmt: skip
            assert done.returncode == 2, done.stderr
            assert done.stderr.startswith("error: ")
            assert expected in done.stderr
            assert len(done.stderr.splitlines()) == 1, done.stderr
        with pytest.raises(UserError, match="already in use"):
            asyncio.run(start_service(EnvironmentsConfig(port=port), log=tmp_path / "log"))


def test_an_unreachable_service_is_a_fault_that_names_it() -> None:
    async def main() -> None:
        with socket.socket() as nobody:  # bound, but not listening
            nobody.bind(("127.0.0.1", 0))
            client = EnvironmentsClient(f"http://127.0.0.1:{nobody.getsockname()[1]}", "key", timeout=2.0)
            with pytest.raises(EnvironmentFault, match=r"environments at http://127\.0\.0\.1"):
                await client.create({})
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_orphan_is_left(how: signal.Signals, tmp_path: Path) -> None:
    with running(tmp_path / "log") as service:
        launchers: list[psutil.Process] = []

        async def body(client: EnvironmentsClient) -> None:
            pods = [await client.create({}) for _ in range(3)]
            busy = asyncio.create_task(pods[0].exec("sleep 100", timeout=100.0))
            deadline = time.monotonic() + 5.0
            while time.monotonic() < deadline and not any(process.name() == "sleep" for process in launchers):
                launchers[:] = psutil.Process(service.process.pid).children(recursive=True)
                await asyncio.sleep(0.01)
            service.process.send_signal(how)
            with pytest.raises(EnvironmentFault):
                await busy

        with_client(service, body)
        clock = time.monotonic()
        service.process.wait(10)
        assert len(launchers) >= 7, "two processes a pod, and the command"
        _, alive = psutil.wait_procs(launchers, timeout=5.0)
        assert not alive
        assert time.monotonic() - clock < 3.0
        left = [f for f in cgroups.ROOT.glob("*/etude-*") if f.name == f"etude-{service.process.pid}"]
        if how == signal.SIGKILL:  # nobody was there to remove the empty groups: the next service does
            cgroups.detect()
        assert not [folder for folder in left if folder.exists()]


def pod_service(**knobs: float) -> PodService:
    return PodService(NamespaceBackend(), EnvironmentsConfig.model_validate(knobs))


def test_a_lease_that_nobody_renews_ends() -> None:
    async def main() -> None:
        service = pod_service(lease_seconds=0.2, max_pods=2)
        first = await service.create([], PodLimits())
        await service.create([], PodLimits())
        with pytest.raises(EnvironmentFault, match="2 pods are alive"):
            await service.create([], PodLimits())
        sweeper = asyncio.create_task(service.sweep())
        deadline = time.monotonic() + 20.0
        while service.leases and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        with pytest.raises(EnvironmentFault, match="lease"), service.use(first):
            pass
        sweeper.cancel()
        await service.close()

    asyncio.run(main())


def test_a_pod_at_work_keeps_its_lease() -> None:
    async def main() -> None:
        service = pod_service(lease_seconds=0.2)
        sweeper = asyncio.create_task(service.sweep())
        name = await service.create([], PodLimits())
        with service.use(name) as pod:
            assert (await pod.exec("sleep 0.6; echo done")).output == "done\n"
        sweeper.cancel()
        await service.close()

    asyncio.run(main())


def test_the_limit_on_pods_counts_those_being_made() -> None:
    async def main() -> None:
        service = pod_service(max_pods=3)
        made = await asyncio.gather(*(service.create([], PodLimits()) for _ in range(8)), return_exceptions=True)
        assert sum(isinstance(result, str) for result in made) == 3
        assert all("3 pods" in str(result) for result in made if not isinstance(result, str))
        await service.close()

    asyncio.run(main())
