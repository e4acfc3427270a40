"""Edit documents made from real functions: the same view, edit and question forms that the harness uses.

Bases of today see commits and issues beside plain files; these documents are the small, offline form of that. Each takes
one to three real functions, shows them with line numbers as the ``read`` tool does, and asks for a change that is known by
construction: a mutated line put right, a word of a line replaced, a name replaced everywhere, a line taken out put back, a
docstring added, a function written from its comment, or a question about the text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from etude.base.edits import apply_edit
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
        *(_repair, _repair, _swap, _swap, _write, _write, _comment, _comment),
        *(_question, _question, _rename, _restore, _new_line),
    ]
    return rng.choice(makers)(lines, name, rng)


def numbered(lines: Sequence[str]) -> str:
    """The view of the ``read`` tool: ``7:    return total``."""
    return "\n".join(f"{number}:{line}" for number, line in enumerate(lines, 1))


def states(messages: Sequence[Message]) -> list[str]:
    """The file of an edit document as it was shown, and after its edits."""
    shown = "\n".join(
        line.partition(":")[2] for message in messages if message.role == "tool" for line in message.content.split("\n")
    )
    edited = shown
    for call in (call for message in messages for call in message.calls if call.name == "edit"):
        edited = apply_edit(edited, call.arguments["at"], call.arguments["text"])
    return [shown, edited]


def _view(lines: Sequence[str], name: str, request: str, *answer: ToolCall) -> list[Message]:
    """Request, the read of the file, then one assistant message a call."""
    read = Message(role="assistant", calls=(ToolCall(name="read", arguments={"path": name}),))
    shown = Message(role="tool", content=numbered(lines))
    answers = [Message(role="assistant", calls=(call,)) for call in answer]
    return [Message(role="user", content=request), read, shown, *answers]


def _edit(name: str, at: str, text: str) -> ToolCall:
    return ToolCall(name="edit", arguments={"path": name, "at": at, "text": text})


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
            shown, index = [*shown[:comment], *shown[comment + 1 :]], index - 1
            return _view(shown, name, rng.choice(requests), _edit(name, str(index + 1), lines[index + 1]))
        return _view(shown, name, rng.choice(requests), _edit(name, str(index + 1), lines[index]))
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
    return _view(lines, name, request, _edit(name, str(index + 1), text))


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
    text = "\n".join(["", wanted[0], *wanted[2:]])
    return _view(shown, name, request, _edit(name, f"{len(shown)}+", text))


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
    calls = [_edit(name, str(i + 1), re.sub(rf"\b{old}\b", new, lines[i])) for i in uses[old]]
    return _view(lines, name, rng.choice((f"rename {old} to {new} in {name}", f"call {old} {new} instead")), *calls)


def _restore(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    candidates = [i for i in _code_lines(lines) if i > 0 and len(lines[i].strip()) < 40]
    if not candidates:
        return None
    index = rng.choice(candidates)
    shown = [*lines[:index], *lines[index + 1 :]]
    request = f"add {lines[index].strip()} after line {index} of {name}"
    return _view(shown, name, request, _edit(name, f"{index}+", lines[index]))


def _new_line(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    candidates = [i for i in _code_lines(lines) if len(lines[i].strip()) < 40]
    if len(candidates) < 2:
        return None
    index, source = rng.sample(candidates, 2)
    indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
    text = indent + lines[source].strip()
    return _view(lines, name, f"set line {index + 1} of {name} to {text.strip()}", _edit(name, str(index + 1), text))


def _comment(lines: list[str], name: str, rng: random.Random) -> list[Message] | None:
    heads = [i for i, line in enumerate(lines) if _DEF.search(line) and line.rstrip().endswith(":")]
    words = [w for line in lines for w in _NAMES.findall(line) if len(w) > 2 and w not in _KEYWORDS]
    if not heads or len(words) < 4:
        return None
    index = rng.choice(heads)
    text = " ".join(rng.choice(words) for _ in range(rng.randint(2, 4)))
    indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())] + "    "
    where = _function_of(lines, index)
    request = f'add the docstring "{text}" to {where} in {name}'
    return _view(lines, name, request, _edit(name, f"{index + 1}+", f'{indent}"""{text}"""'))


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
            (f"which line of {name} has {word}?", str(index + 1)),
            (
                f"what follows {word} on line {index + 1} of {name}?",
                lines[index].split(word, 1)[1].strip() or "nothing",
            ),
        )
    )
    return _view(lines, name, question, ToolCall(name="finish", arguments={"message": answer}))
