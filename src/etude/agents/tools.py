"""The tools of the harness over the Pod Protocol; each returns the text that the model reads.

A call the model got wrong is answered with an error it can act on and counted as ``malformed_call``; it is never discarded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from etude.base.edits import apply_edit
from etude.base.errors import PathEscape
from etude.base.protocols import Pod
from etude.base.records import Task, ToolCall

TOOL_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "list": (),
    "read": ("path",),
    "search": ("text",),
    "edit": ("path", "at", "text"),
    "run": ("command",),
    "finish": ("message",),
}
"""Tool name -> argument names in wire order, as ``data.chat.ChatCodec`` wants them."""

MAX_READ_LINES = 60
MAX_MATCHES = 12
MAX_OUTPUT_CHARS = 400


@dataclass
class Workbench:
    """What the tools of one rollout share."""

    task: Task
    pod: Pod
    edited: set[str] = field(default_factory=set)
    """Paths edited so far."""
    events: list[str] = field(default_factory=list)


async def call_tool(bench: Workbench, call: ToolCall) -> str:
    """Run one call (``finish`` excepted) and return what the model reads. Raises EnvironmentFault only."""
    if call.error is not None:
        bench.events.append("malformed_call")
        return f"error: {call.error}"
    required = TOOL_ARGUMENTS[call.name] if call.name != "run" else ()
    missing = [name for name in required[:2] if not call.arguments.get(name)]
    if missing:
        bench.events.append("malformed_call")
        return f"error: {call.name} needs {missing[0]}"
    try:
        return await _TOOLS[call.name](bench, call)
    except PathEscape:
        bench.events.append("malformed_call")
        return "error: path outside the workspace"


def visible(paths: list[str]) -> list[str]:
    """Paths without a hidden component."""
    return [path for path in paths if not any(part.startswith(".") for part in path.split("/"))]


async def _list(bench: Workbench, call: ToolCall) -> str:
    return "\n".join(visible(await bench.pod.list())) or "no files"


async def _read(bench: Workbench, call: ToolCall) -> str:
    content = await bench.pod.read(call.arguments["path"])
    if content is None:
        return f"error: no file {call.arguments['path']}"
    lines = content.split("\n")
    if lines[-1] == "":
        lines.pop()
    shown = [f"{number}:{line}" for number, line in enumerate(lines[:MAX_READ_LINES], 1)]
    if len(lines) > MAX_READ_LINES:
        shown.append(f"... {len(lines) - MAX_READ_LINES} more lines")
    return "\n".join(shown) or "empty"


async def _search(bench: Workbench, call: ToolCall) -> str:
    text, found = call.arguments["text"], []
    for path in visible(await bench.pod.list()):
        for number, line in enumerate((await bench.pod.read(path) or "").split("\n"), 1):
            if text in line:
                found.append(f"{path}:{number}:{line}")
    shown = found[:MAX_MATCHES]
    return "\n".join(shown + ([f"... {len(found) - MAX_MATCHES} more"] if len(found) > MAX_MATCHES else [])) or "nothing"


async def _edit(bench: Workbench, call: ToolCall) -> str:
    path, at = call.arguments["path"], call.arguments["at"]
    try:
        content = apply_edit(await bench.pod.read(path), at, call.arguments.get("text", ""))
    except ValueError as error:
        bench.events.append("failed_edit")
        return f"error: {error}"
    await bench.pod.write({path: content})
    bench.edited.add(path)
    return "ok"


async def _run(bench: Workbench, call: ToolCall) -> str:
    command = call.arguments.get("command") or bench.task.test_command
    if not command:
        return "error: run needs a command"
    result = await bench.pod.exec(command)
    output = result.output.strip()
    if len(output) > MAX_OUTPUT_CHARS:
        half = MAX_OUTPUT_CHARS // 2
        output = f"{output[:half]}\n...\n{output[-half:]}"
    if not call.arguments.get("command"):
        bench.events.append("tests_passed" if result.exit_code == 0 else "tests_failed")
    if result.timed_out:
        output += "\ntimed out"
    return output or f"exit {result.exit_code}"


_TOOLS: dict[str, Callable[[Workbench, ToolCall], Awaitable[str]]] = {
    "list": _list,
    "read": _read,
    "search": _search,
    "edit": _edit,
    "run": _run,
}
