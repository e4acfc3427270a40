"""Promises: an edit document's answer follows from what it shows and asks; what may not be trained on is never drawn."""

from __future__ import annotations

import random
import re

from etude.data.chat import ChatCodec
from etude.data.edit_documents import edit_document, states
from etude.data.mixture import EditSource
from etude.data.tokenizer import train_tokenizer

FUNCTIONS = [
    "def scale(value):\n    # value times 7\n    return value * 7",
    "def total(items):\n    # the sum of items\n    out = 0\n    for item in items:\n        out += item\n    return out",
    "def first(names):\n    return names[0]",
]
TOOLS = {"read": ("path",), "edit": ("path", "change"), "finish": ("message",)}


def documents(count: int) -> list[tuple[str, str, str]]:
    """(request, shown, edited) of ``count`` documents."""
    rng, found = random.Random(0), []
    while len(found) < count:
        messages = edit_document(FUNCTIONS, rng)
        if messages is not None:
            found.append((messages[0].content, *states(messages)))
    return found


def test_states_are_the_shown_file_and_the_file_after_the_edits() -> None:
    for request, shown, edited in documents(300):
        asked = request.startswith(("which", "what", "on which"))
        assert asked or shown.startswith("def ")
        assert (shown == edited) == asked
        if found := re.match(r"in (\w+), add (.*) after (.*)", request):
            before, after = shown.split("\n"), edited.rstrip("\n").split("\n")
            number = next(i for i, line in enumerate(after) if before[i : i + 1] != [line])
            assert [*before[:number], after[number], *before[number:]] == after
            assert (after[number].strip(), after[number - 1].strip()) in ((found[2], found[3]), (found[3], found[3]))


def test_a_repair_gives_back_a_function_that_was_there() -> None:
    repairs = [(shown, edited) for request, shown, edited in documents(600) if re.search(r"\bfix\b|is wrong", request)]
    assert len(repairs) > 50
    bare = {re.sub(r"    #.*\n", "", function) for function in FUNCTIONS}
    for shown, edited in repairs:
        blocks = {re.sub(r"    #.*\n", "", block) for block in edited.rstrip("\n").split("\n\n")}
        assert shown != edited
        assert blocks <= bare


def test_a_swap_puts_the_one_word_in_place_of_the_other() -> None:
    seen = 0
    for request, shown, edited in documents(600):
        if found := re.search(r"(?:use )?(\w+) instead of (\w+)$|replace (\w+) by (\w+)$", request):
            new, old = (found[1], found[2]) if found[1] else (found[4], found[3])
            changed = [(a, b) for a, b in zip(shown.split("\n"), edited.split("\n"), strict=False) if a != b]
            assert changed == [(line, re.sub(rf"\b{old}\b", new, line)) for line, _ in changed]
            assert len(changed) == 1
            seen += 1
    assert seen > 50


def test_a_written_function_has_the_head_and_does_what_the_request_says() -> None:
    written = {}
    for request, shown, edited in documents(600):
        if found := re.search(r"(?:add|a function) (\w+)\(.*: (.*)$", request):
            assert f"def {found[1]}(" not in shown
            written[found[1]] = edited.split("\n\n")[-1].rstrip("\n")
    assert written == {
        "scale": "def scale(value):\n    return value * 7",
        "total": FUNCTIONS[1].replace("    # the sum of items\n", ""),
    }


def test_what_is_not_allowed_is_never_drawn_even_when_an_edit_makes_it() -> None:
    codec = ChatCodec(train_tokenizer(FUNCTIONS * 10, 320), TOOLS)
    free = EditSource(FUNCTIONS, codec, 400)
    strict = EditSource(FUNCTIONS, codec, 400, allowed=lambda text: "names[1]" not in text)
    texts = [[codec.decode(s.draw(random.Random(i))[0]) for i in range(200)] for s in (free, strict)]
    assert any("names[1]" in text for text in texts[0])
    assert not any("names[1]" in text for text in texts[1])
