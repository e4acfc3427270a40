"""Task sets on disk: one JSONL file, or a folder per task that people can read and edit.

A task's folder::

    instruction.md    what the user asks
    task.json         the rest of the record: id, category, verifier, reference solution, limits ...
    workspace/...     the files the agent starts from, hidden ones included

Both forms give back the same records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from etude.base.errors import UserError
from etude.base.records import Task
from etude.base.telemetry import full_disk_named

INSTRUCTION, RECORD, WORKSPACE = "instruction.md", "task.json", "workspace"


def save_jsonl(path: Path, tasks: Sequence[Task]) -> None:
    """One task a line. Raises DiskFullError."""
    with full_disk_named(path), path.open("w", encoding="utf-8", newline="") as handle:
        handle.writelines(task.model_dump_json() + "\n" for task in tasks)


def load_jsonl(path: Path) -> list[Task]:
    """Raises UserError that names the line when one is not a task, or when two tasks have one id."""
    tasks = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            tasks.append(_task(f"{path}:{number}", line))
    return _distinct(path, tasks)


def save_folder(root: Path, task: Task) -> Path:
    """Write ``task`` to ``root/<id>``, which must not exist, and return that. Raises UserError, DiskFullError."""
    if "/" in task.id:
        raise UserError(f"task {task.id!r}: an id with a slash cannot name a folder")
    folder = root / _inside(task.id, "id", task.id)
    if folder.exists():
        raise UserError(f"{folder}: already exists; choose an empty folder for the task set")
    body = task.model_dump(mode="json", exclude={"instruction", "files"})
    files = {
        INSTRUCTION: task.instruction + "\n",
        RECORD: json.dumps(body, indent=2, ensure_ascii=False) + "\n",
        **{f"{WORKSPACE}/{_inside(path, 'file', task.id)}": text for path, text in task.files.items()},
    }
    with full_disk_named(folder):
        (folder / WORKSPACE).mkdir(parents=True)
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", newline="")
    return folder


def load_folder(folder: Path) -> Task:
    """The task in ``folder``. Raises UserError that names the file which is missing or wrong."""
    try:
        body: Any = json.loads(_text(folder / RECORD))
    except json.JSONDecodeError as error:
        raise UserError(f"{folder / RECORD}: not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise UserError(f"{folder / RECORD}: expected an object")
    body["instruction"] = _text(folder / INSTRUCTION).removesuffix("\n")
    body["files"] = _workspace(folder / WORKSPACE)
    return _task(str(folder / RECORD), json.dumps(body))


def save_folders(root: Path, tasks: Sequence[Task]) -> None:
    """Each task in a folder named by its id."""
    for task in tasks:
        save_folder(root, task)


def load_folders(root: Path) -> list[Task]:
    """All tasks of ``root`` in the order of their folders' names."""
    if not root.is_dir():
        raise UserError(f"task folder {root}: no such folder")
    return _distinct(root, [load_folder(folder) for folder in sorted(root.iterdir()) if (folder / RECORD).is_file()])


def _workspace(root: Path) -> dict[str, str]:
    """Files below ``root`` by path. A link is refused: it could carry a file from elsewhere into the task."""
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            raise UserError(f"{path}: a workspace may not hold links")
        if path.is_file():
            files[path.relative_to(root).as_posix()] = _text(path)
    return files


def _inside(path: str, what: str, task_id: str) -> str:
    """``path`` when it stays below the folder it is relative to."""
    if not path or path.startswith("/") or ".." in PurePosixPath(path).parts or "\0" in path:
        raise UserError(f"task {task_id!r}: {what} {path!r} leaves its folder")
    return path


def _text(path: Path) -> str:
    """UTF-8 text with its line ends as they are."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None


def _task(where: str, text: str) -> Task:
    try:
        return Task.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"]) or "line"
        raise UserError(f"{where}: {key}: {problem['msg']}") from None


def _distinct(path: Path, tasks: list[Task]) -> list[Task]:
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise UserError(f"{path}: task id {task.id} occurs twice")
        seen.add(task.id)
    return tasks
