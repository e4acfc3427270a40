"""Promises of the environments service over HTTP: leases, forks, snapshots, keys; no orphan, however it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from etude.base.errors import EnvironmentFault, PathEscape
from etude.base.records import PodLimits
from etude.environments.client import EnvironmentsClient
from etude.environments.namespaces import NamespaceBackend
from etude.environments.service import KEY_VARIABLE, PodService
from etude.orchestration.process import free_port

KEY = "secret-key"


@contextmanager
def running() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A service process and its address."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "etude.environments.service", str(port)],
        env={**os.environ, KEY_VARIABLE: KEY},
        stderr=subprocess.PIPE,
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait(10)


def with_client(url: str, body: Callable[[EnvironmentsClient], Awaitable[None]], key: str = KEY) -> None:
    async def main() -> None:
        client = EnvironmentsClient(url, key, timeout=20.0)
        deadline = time.monotonic() + 20.0
        while True:
            try:
                await client.health()
                break
            except EnvironmentFault as error:
                if "key" in str(error) or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.05)
        try:
            await body(client)
        finally:
            await client.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running() as (address, _):
        yield address


def test_a_pod_over_http(url: str) -> None:
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
        await pod.destroy()
        await pod.destroy()
        restored = await client.restore(snapshot)
        assert await restored.list() == ["hello.py", "x"]
        with pytest.raises(EnvironmentFault, match="no pod"):
            await pod.exec("true")
        await restored.destroy()
        await fork.destroy()

    with_client(url, body)


def test_creation_is_idempotent_by_key(url: str) -> None:
    async def body(client: EnvironmentsClient) -> None:
        answers = await asyncio.gather(*(client.call("POST", "/pods", {"files": {}, "key": "k1"}) for _ in range(4)))
        assert len({answer["id"] for answer in answers}) == 1
        await client.call("DELETE", f"/pods/{answers[0]['id']}")

    with_client(url, body)


def test_a_wrong_key_and_bad_bodies_are_refused(url: str) -> None:
    async def wrong(client: EnvironmentsClient) -> None:
        with pytest.raises(EnvironmentFault, match="missing or wrong key"):
            await client.create({})

    async def bad(client: EnvironmentsClient) -> None:
        for body in ({"files": 3}, {"files": {}, "limits": {"memory": 1}}):
            with pytest.raises(EnvironmentFault, match=r"bad_request|Error"):
                await client.call("POST", "/pods", body)

    with_client(url, wrong, key="other")
    with_client(url, bad)


def test_an_unreachable_service_is_a_fault_that_names_it() -> None:
    async def main() -> None:
        client = EnvironmentsClient(f"http://127.0.0.1:{free_port()}", KEY, timeout=2.0)
        with pytest.raises(EnvironmentFault, match=r"environments at http://127\.0\.0\.1"):
            await client.create({})
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_orphan_is_left(how: signal.Signals) -> None:
    with running() as (address, process):
        launchers: list[psutil.Process] = []

        async def body(client: EnvironmentsClient) -> None:
            pods = [await client.create({}) for _ in range(3)]
            launchers.extend(psutil.Process(process.pid).children(recursive=True))
            busy = asyncio.create_task(pods[0].exec("sleep 100", timeout=100.0))
            await asyncio.sleep(0.3)
            process.send_signal(how)
            with pytest.raises(EnvironmentFault):
                await busy

        with_client(address, body)
        process.wait(10)
        assert len(launchers) >= 6, "two processes a pod"
        _, alive = psutil.wait_procs(launchers, timeout=5.0)
        assert not alive


def test_a_lease_that_nobody_renews_ends() -> None:
    async def main() -> None:
        service = PodService(NamespaceBackend(), lease_seconds=0.2, max_pods=2)
        first = await service.create(b"", PodLimits())
        await service.create(b"", PodLimits())
        with pytest.raises(EnvironmentFault, match="2 pods are alive"):
            await service.create(b"", PodLimits())
        sweeper = asyncio.create_task(service.sweep())
        deadline = time.monotonic() + 20.0
        while service.leases and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        with pytest.raises(EnvironmentFault, match="lease"):
            service.pod(first)
        sweeper.cancel()
        await service.close()

    asyncio.run(main())
