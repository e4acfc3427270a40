"""Edit documents made from real functions: the same view, edit and question forms that the harness uses.

Bases of today see commits and issues beside plain files; these documents are the small, offline form of that. Each takes
one to three real functions, shows them as the ``read`` tool does, and asks for a change that is known by construction: a
mutated line put right, a word of a line replaced, a name replaced everywhere, a line taken out put back, a docstring added, a
body replaced, a function written from its comment, or a question about the text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from etude.base.edits import apply_edit, change_lines
from etude.base.records import Message, ToolCall
from etude.data.mutate import KEYWORDS, mutate_line

_NAMES = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_WORDS = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|\d+")
_DEF = re.compile(r"def (\w+)\((.*)\)")
_FILES = (
    "lib.py",
    "stats.py",
    "text.py",
    "core.py",
    "util.py",
    "shop.py",
    "data.py",
    "tools.py",
    "main.py",
    "base.py",
)
_KEYWORDS = KEYWORDS | {
    "False",
    "None",
    "True",
    "as",
    "class",
    "except",
    "from",
    "pass",
    "print",
    "raise",
    "self",
    "try",
    "with",
    "yield",
}


def edit_document(functions: Sequence[str], rng: random.Random) -> list[Message] | None:
    """A conversation about ``functions`` (a user request, a file view, the answer), or None when they do not lend themselves."""
    lines = "\n\n".join(functions).split("\n")
    name = rng.choice(_FILES)
    makers: list[Callable[[list[str], str, random.Random], list[Message] | None]] = [
        *(_repair, _repair, _repair, _swap, _swap, _write, _write, _comment, _comment),
        *(_question, _where, _rename, _restore, _new_line, _new_body),
    ]
    return rng.choice(makers)(lines, name, rng)


def states(messages: Sequence[Message]) -> list[str]:
    """The file of an edit document as it was shown, and after its edits."""
    shown = "\n".join(message.content for message in messages if message.role == "tool")
    edited = shown
    for call in (call for message in messages for call in message.calls if call.name == "edit"):
        edited = apply_edit(edited, call.arguments["change"])
    return [shown, edited]


def _view(lines: Sequence[str], name: str, request: str, *answer: ToolCall) -> list[Message]:
    """Request, the read of the file, then one assistant message a call."""
    return _seen(request, ToolCall(name="read", arguments={"path": name}), "\n".join(lines), *answer)


def _seen(request: str, look: ToolCall, shown: str, *answer: ToolCall) -> list[Message]:
    calls = [Message(role="assistant", calls=(call,)) for call in (look, *answer)]
    return [Message(role="user", content=request), calls[0], Message(role="tool", content=shown), *calls[1:]]


def _edit(name: str, lines: Sequence[str], first: int, last: int, new: Sequence[str]) -> ToolCall:
    """``new`` in place of ``lines[first:last]``."""
    return ToolCall(name="edit", arguments={"path": name, "change": change_lines(lines, first, last, new)})


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _code_lines(lines: Sequence[str]) -> list[int]:
    return [i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith(("#", "@", "def "))]


def _function_of(lines: Sequence[str], index: int) -> str | None:
    for line in reversed(lines[: index + 1]):
        if found := _DEF.search(line):
            return found.group(1)
    return None


def _repair(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    candidates = _code_lines(lines)
    rng.shuffle(candidates)
    for index in candidates[:4]:
        broken = mutate_line(lines[index], rng)
        where = _function_of(lines, index)
        if broken is None or where is None:
            continue
        requests = [f"fix {where} in {name}", f"{where} in {name} is wrong, fix it", f"fix the bug in {where}"]
        shown = [*lines[:index], broken, *lines[index + 1 :]]
        comment = next((i for i in range(index, 0, -1) if _DEF.search(lines[i - 1])), 0)
        wish = lines[comment].strip()
        if wish.startswith("# ") and rng.random() < 0.5:  # the request says what the comment would have said
            requests = [f"{where} is wrong: it should be {wish[2:]}", f"fix {where}: it should return {wish[2:]}"]
            shown = [*shown[:comment], *shown[comment + 1 :]]
            edit = _edit(name, shown, index - 1, index, [lines[index]])
        else:
            edit = _edit(name, shown, index, index + 1, [lines[index]])
        return _view(shown, name, rng.choice(requests), edit)
    return None


def _swap(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    """A word or number of one line becomes another one: the request names the function and both words."""
    index = rng.choice(_code_lines(lines) or [0])
    where, words = _function_of(lines, index), _WORDS.findall(lines[index])
    others = [w for line in lines for w in _WORDS.findall(line) if w not in words and w not in _KEYWORDS]
    once = [word for word in words if words.count(word) == 1 and word not in _KEYWORDS]
    if where is None or not once or not others:
        return None
    old = rng.choice(once)
    new = str(rng.randint(2, 12)) if old.isdigit() else rng.choice(others)
    if new == old:
        return None
    text = re.sub(rf"\b{old}\b", new, lines[index])
    wish = rng.choice((f"use {new} instead of {old}", f"{new} instead of {old}", f"replace {old} by {new}"))
    request = rng.choice((f"change {where} in {name}: {wish}", f"{where} in {name}: {wish}"))
    return _view(lines, name, request, _edit(name, lines, index, index + 1, [text]))


def _write(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    """A function with a comment under its head is taken out, and written again at the end from head and comment."""
    blocks = [block.split("\n") for block in "\n".join(lines).split("\n\n")]
    fitting = [b for b in blocks if len(b) > 2 and _DEF.match(b[0]) and b[1].lstrip().startswith("# ")]
    if not fitting or len(blocks) < 2:
        return None
    wanted = rng.choice(fitting)
    shown = "\n\n".join("\n".join(block) for block in blocks if block is not wanted).split("\n")
    head, wish = wanted[0].removeprefix("def ").removesuffix(":"), wanted[1].strip(" #")
    request = rng.choice((f"add {head} to {name}: {wish}", f"{name} needs a function {head}: {wish}"))
    return _view(shown, name, request, _edit(name, shown, len(shown), len(shown), ["", wanted[0], *wanted[2:]]))


def _rename(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    words = [w for line in lines for w in _NAMES.findall(line) if w not in _KEYWORDS and len(w) > 2]
    uses = {w: [i for i, line in enumerate(lines) if re.search(rf"\b{w}\b", line)] for w in set(words)}
    fitting = sorted(w for w, found in uses.items() if 1 <= len(found) <= 4)
    if len(fitting) < 2:
        return None
    old, other = rng.sample(fitting, 2)
    new = rng.choice((other + "_" + old, "new_" + old, old + "s", rng.choice(words)))
    if new in uses:
        return None
    request, now, calls = rng.choice((f"rename {old} to {new} in {name}", f"call {old} {new} instead")), list(lines), []
    for i in uses[old]:
        text = re.sub(rf"\b{old}\b", new, now[i])
        calls.append(_edit(name, now, i, i + 1, [text]))
        now[i] = text
    return _view(lines, name, request, *calls)


def _restore(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    candidates = [i for i in _code_lines(lines) if i > 0 and max(len(lines[i].strip()), len(lines[i - 1].strip())) < 40]
    if not candidates:
        return None
    index = rng.choice(candidates)
    shown = [*lines[:index], *lines[index + 1 :]]
    where = _function_of(lines, index)
    request = f"in {where}, add {lines[index].strip()} after {lines[index - 1].strip()}"
    return _view(shown, name, request, _edit(name, shown, index, index, [lines[index]]))


def _new_line(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    candidates = [i for i in _code_lines(lines) if len(lines[i].strip()) < 40]
    if len(candidates) < 2:
        return None
    index, source = rng.sample(candidates, 2)
    text = lines[source].strip()
    where, edit = _function_of(lines, index), _edit(name, lines, index, index + 1, [_indent(lines[index]) + text])
    return _view(lines, name, f"in {where}, {text} instead of {lines[index].strip()}", edit)


def _new_body(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    """All of a function below its head gives way to one line."""
    heads = [i for i, line in enumerate(lines) if _DEF.match(line) and line.rstrip().endswith(":")]
    ends = {i: next((j for j in range(i, len(lines)) if not lines[j].strip()), len(lines)) for i in heads}
    heads = [i for i in heads if 2 <= ends[i] - i - 1 <= 6]
    if not heads:
        return None
    head = rng.choice(heads)
    where, text = _function_of(lines, head), lines[rng.choice(_code_lines(lines) or [head])].strip()
    edit = _edit(name, lines, head + 1, ends[head], [f"    {text}"])
    return _view(lines, name, rng.choice((f"{where} in {name} should only {text}", f"just {text} in {where}")), edit)


def _comment(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    heads = [i for i, line in enumerate(lines) if _DEF.search(line) and line.rstrip().endswith(":")]
    words = [w for line in lines for w in _NAMES.findall(line) if len(w) > 2 and w not in _KEYWORDS]
    if not heads or len(words) < 4:
        return None
    index = rng.choice(heads)
    text = " ".join(rng.choice(words) for _ in range(rng.randint(2, 4)))
    edit = _edit(name, lines, index + 1, index + 1, [f'{_indent(lines[index])}    """{text}"""'])
    return _view(lines, name, f'add the docstring "{text}" to {_function_of(lines, index)} in {name}', edit)


def _question(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    candidates = _code_lines(lines)
    if not candidates:
        return None
    index = rng.choice(candidates)
    where = _function_of(lines, index)
    words = [w for w in _NAMES.findall(lines[index]) if w not in _KEYWORDS and len(w) > 2]
    if where is None or not words:
        return None
    word = rng.choice(words)
    if sum(bool(re.search(rf"\b{word}\b", line)) for line in lines) != 1:
        return None
    question, answer = rng.choice(
        (
            (f"which function of {name} uses {word}?", where),
            (f"what follows {word} in {name}?", lines[index].split(word, 1)[1].strip() or "nothing"),
        )
    )
    return _view(lines, name, question, _finish(answer))


def _where(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    """A question that one search answers."""
    words = sorted({w for line in lines for w in _NAMES.findall(line) if w not in _KEYWORDS and len(w) > 2})
    if not words:
        return None
    word = rng.choice(words)
    index = next(i for i, line in enumerate(lines) if word in line)
    number = index + rng.randint(1, 40)
    requests = (f"on which line of {name} is {word}?", f"which file has {word}?")
    request, answer = rng.choice(list(zip(requests, (str(number), name), strict=True)))
    look = ToolCall(name="search", arguments={"text": word})
    return _seen(request, look, f"{name}:{number}:{lines[index]}", _finish(answer))


def _finish(answer: str) -> ToolCall:
    return ToolCall(name="finish", arguments={"message": answer})
