"""Promises about the machine under the pods: building, probing, control groups, users without root, interpreters elsewhere."""

from __future__ import annotations

import asyncio
import os
import pickle
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.base.errors import EnvironmentFault, UserError
from etude.base.records import PodLimits
from etude.environments import build, cgroups
from etude.environments.namespaces import NamespaceBackend, probe, remedy
from etude.environments.pods import NamespacePod, Packed

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read; pytest's own are the owner's alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_the_launcher_is_built_once(tmp_path: Path) -> None:
    first = build.launcher(tmp_path)
    written = first.stat().st_mtime_ns
    assert build.launcher(tmp_path, search_path="/nowhere") == first
    assert first.stat().st_mtime_ns == written
    assert [file.name for file in tmp_path.iterdir()] == [first.name], "nothing is left of the build"


def test_a_missing_compiler_and_an_unusable_cache_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no C compiler found; install one"):
        build.launcher(tmp_path, search_path=str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"XDG_CACHE_HOME"):
        build.launcher(tmp_path / "file" / "cache")


class RefusingBackend(NamespaceBackend):
    """A kernel that refuses namespaces."""

    async def create(self, packed: Packed, limits: PodLimits) -> NamespacePod:
        raise EnvironmentFault("pod ended: pod: unshare: Operation not permitted")


def test_a_failed_probe_says_what_to_do() -> None:
    backend = RefusingBackend()
    with pytest.raises(UserError, match=r"pods cannot start here: .*unshare: Operation not permitted\. \w+"):
        asyncio.run(probe(backend))
    backend.close()


@pytest.mark.parametrize(
    ("switch", "value", "command"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces="),
    ],
)
def test_the_remedy_names_the_switch_that_is_off(tmp_path: Path, switch: str, value: str, command: str) -> None:
    file = tmp_path / switch
    file.parent.mkdir()
    file.write_text(value + "\n")
    assert f"sudo sysctl -w {command}" in remedy(settings=tmp_path, as_root=False)
    file.write_text("7\n")
    assert "sysctl" not in remedy(settings=tmp_path, as_root=False)


def test_groups_that_a_killed_service_left_are_removed_and_others_are_not(tmp_path: Path) -> None:
    """On a tree of plain folders in the form of version 1; a folder can be removed when it is empty, as a group can."""
    for controller in ("memory", "pids"):
        (tmp_path / controller / "etude-99999999" / "pod-3").mkdir(parents=True)
        (tmp_path / controller / f"etude-{os.getppid()}").mkdir()
        (tmp_path / controller / "of-somebody-else").mkdir()
        (tmp_path / controller / "cgroup.procs").touch()
    layout = cgroups.detect(tmp_path)
    assert layout is not None
    assert layout.version == 1
    for controller in ("memory", "pids"):
        folders = {folder.name for folder in (tmp_path / controller).iterdir() if folder.is_dir()}
        assert folders == {f"etude-{os.getppid()}", f"etude-{os.getpid()}", "of-somebody-else"}


def test_version_2_groups_get_both_limits(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    layout = cgroups.detect(tmp_path)
    assert layout is not None
    (group,) = layout.create("pod-1", PodLimits(memory_mb=3, processes=7))
    assert (Path(group) / "memory.max").read_text() == str(3 << 20)
    assert (Path(group) / "pids.max").read_text() == "7"
    assert "+memory +pids" in (Path(group).parent / "cgroup.subtree_control").read_text()


def test_an_interpreter_outside_usr_is_shown_read_only() -> None:
    prefix = Path(sys.base_prefix).resolve()
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"

    async def main() -> None:
        backend = NamespaceBackend(interpreter=prefix)
        pod = await backend.create([], PodLimits())
        answer = await pod.exec(
            f"{prefix}/bin/{name} -I -S -c 'import sys; print(sys.base_prefix)'; touch {prefix}/evil"
        )
        assert str(prefix) in answer.output
        assert "Read-only" in answer.output
        assert str(prefix / "bin") in (await pod.exec("echo $PATH")).output
        backend.destroy(pod)
        while backend.reap():
            await asyncio.sleep(0.01)
        backend.close()

    asyncio.run(main())


def test_an_ordinary_user_gets_confined_pods_or_is_told_what_to_change(open_folder: Path) -> None:
    """In a forked process that has given up root, if it had it."""
    build.launcher(open_folder / "etude")
    (open_folder / "etude").chmod(0o755)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer: dict[str, str] = {"crash": "the child did not come to its end"}
        try:
            os.environ["XDG_CACHE_HOME"] = str(open_folder)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            answer = asyncio.run(_as_ordinary_user())
        except UserError as error:
            answer = {"refused": str(error)}
        except BaseException as error:
            answer = {"crash": repr(error)}
        finally:
            os.write(writer, pickle.dumps(answer))
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    assert "crash" not in answer, answer
    if "refused" in answer:
        assert "sysctl -w" in answer["refused"] or "In a container" in answer["refused"]
        return
    fields = dict(line.split(":\t", 1) for line in answer["status"].splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["1000"] * 4
    assert [int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")] == [0] * 4
    assert fields["Seccomp"].strip() == "2"
    assert "Read-only" in answer["system"]
    assert "MemoryError" in answer["memory"]
    assert "per process" in answer["bounds"]
    if tuple(map(int, platform.release().split(".")[:2])) >= (
        5,
        14,
    ):  # before, such a limit counts all the user's processes
        assert int(answer["processes"]) <= 32, answer["processes"]


async def _as_ordinary_user() -> dict[str, str]:
    backend = NamespaceBackend()
    await probe(backend)
    pod = await backend.create([], PodLimits(processes=32, memory_mb=64))
    answer = {
        "status": (await pod.exec("cat /proc/self/status")).output,
        "system": (await pod.exec("touch /usr/evil")).output,
        "memory": (await pod.exec("python3 -I -S -c 'bytearray(100 << 20)'")).output,
        "processes": (await pod.exec(f"python3 -I -S -c '{COUNT}'")).output,
        "bounds": str(backend.bounds()),
    }
    backend.destroy(pod)
    while backend.reap():
        await asyncio.sleep(0.01)
    return answer


COUNT = """
import os, time
n = 0
try:
    while n < 200:
        if os.fork() == 0:
            time.sleep(30)
        n += 1
except OSError:
    pass
print(n)
"""
