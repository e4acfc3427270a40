"""The tools of the harness over the Pod Protocol; each returns the text that the model reads.

A call the model got wrong is answered with an error it can act on and counted as ``malformed_call``; it is never discarded.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from etude.base.edits import apply_edit, split_lines
from etude.base.errors import PathEscape
from etude.base.protocols import Pod
from etude.base.records import Task, ToolCall

TOOL_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "list": (),
    "read": ("path",),
    "search": ("text",),
    "edit": ("path", "change"),
    "reset": (),
    "run": ("command",),
    "finish": ("message",),
}
"""Tool name -> argument names in wire order, as ``data.chat.ChatCodec`` wants them."""

_REQUIRED: dict[str, tuple[str, ...]] = {"read": ("path",), "search": ("text",), "edit": ("path", "change")}

MAX_PATHS = 40
MAX_READ_LINES = 60
MAX_LINE_CHARS = 200
MAX_MATCHES = 12
MAX_OUTPUT_CHARS = 400


@dataclass
class Workbench:
    """What the tools of one rollout share."""

    task: Task
    pod: Pod
    originals: dict[str, str | None] = field(default_factory=dict)
    """Paths edited so far -> their content before; None where there was no file."""
    events: list[str] = field(default_factory=list)
    """See ``Rollout.events``: malformed_call, failed_edit, tests_passed, tests_failed, own_command."""

    async def changed(self) -> bool:
        """Whether the workspace was edited, be it with a command of the model's own. Raises EnvironmentFault."""
        if self.originals or "own_command" not in self.events:
            return bool(self.originals)
        try:
            return any([await self.pod.read(path) != content for path, content in self.task.files.items()])
        except PathEscape:  # a file became a link that leads out
            return True


async def call_tool(bench: Workbench, call: ToolCall) -> str:
    """Run one call (``finish`` excepted) and return what the model reads. Raises EnvironmentFault only."""
    missing = [name for name in _REQUIRED.get(call.name, ()) if not call.arguments.get(name)]
    problem = call.error or (f"{call.name} needs {missing[0]}" if missing else None)
    if problem is None:
        try:
            return await _TOOLS[call.name](bench, call.arguments)
        except PathEscape:
            problem = "path outside the workspace"
    bench.events.append("malformed_call")
    return f"error: {problem}"


def visible(paths: Sequence[str]) -> list[str]:
    """Paths without a hidden component."""
    return [path for path in paths if not any(part.startswith(".") for part in path.split("/"))]


def _capped(lines: Sequence[str], limit: int) -> str:
    note = [f"... {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join([*lines[:limit], *note])


async def _list(bench: Workbench, arguments: dict[str, str]) -> str:
    return _capped(visible(await bench.pod.list()), MAX_PATHS) or "no files"


async def _read(bench: Workbench, arguments: dict[str, str]) -> str:
    content = await bench.pod.read(arguments["path"])
    if content is None:
        return f"error: no file {arguments['path']}"
    return _capped([line[:MAX_LINE_CHARS] for line in split_lines(content)], MAX_READ_LINES) or "empty"


async def _search(bench: Workbench, arguments: dict[str, str]) -> str:
    found: list[str] = []
    for path in visible(await bench.pod.list()):
        lines = [line[:MAX_LINE_CHARS] for line in split_lines(await bench.pod.read(path) or "")]
        found += [f"{path}:{number}:{line}" for number, line in enumerate(lines, 1) if arguments["text"] in line]
    return _capped(found, MAX_MATCHES) or "nothing"


async def _edit(bench: Workbench, arguments: dict[str, str]) -> str:
    path = arguments["path"]
    before = await bench.pod.read(path)
    try:
        content = apply_edit(before, arguments["change"])
    except ValueError as error:
        bench.events.append("failed_edit")
        return f"error: {error}"
    await bench.pod.write({path: content})
    bench.originals.setdefault(path, before)
    return "ok"


async def _reset(bench: Workbench, arguments: dict[str, str]) -> str:
    """Take back all edits, so that the files are again as they were read first."""
    if not bench.originals:
        return "nothing to reset"
    await bench.pod.write({path: content for path, content in bench.originals.items() if content is not None})
    created = [shlex.quote(f"./{path}") for path, content in bench.originals.items() if content is None]
    if created:
        await bench.pod.exec(f"rm -f -- {' '.join(created)}")
    bench.originals.clear()
    return "ok"


async def _run(bench: Workbench, arguments: dict[str, str]) -> str:
    own = arguments.get("command", "")
    command = own or bench.task.test_command
    if not command:
        return "error: run needs a command"
    result = await bench.pod.exec(command)
    passed = result.exit_code == 0
    bench.events.append("own_command" if own else "tests_passed" if passed else "tests_failed")
    output = result.output.strip()
    if len(output) > MAX_OUTPUT_CHARS:
        half = MAX_OUTPUT_CHARS // 2
        output = f"{output[:half]}\n...\n{output[-half:]}"
    if result.timed_out:
        return f"{output}\ntimed out".lstrip()
    if not output or not (passed or "fail" in output.lower()):
        output = f"{output}\nexit {result.exit_code}".lstrip()
    return output


_TOOLS: dict[str, Callable[[Workbench, dict[str, str]], Awaitable[str]]] = {
    "list": _list,
    "read": _read,
    "search": _search,
    "edit": _edit,
    "reset": _reset,
    "run": _run,
}
