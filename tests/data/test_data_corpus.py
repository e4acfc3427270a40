"""Promises: the corpus is split by content, edit documents are correct by construction, the same seed gives the same stream."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from etude.base.edits import split_change
from etude.base.errors import UserError
from etude.data.chat import ChatCodec
from etude.data.corpus import SourceFile, functions, source_files
from etude.data.edit_documents import edit_document
from etude.data.mixture import CodeSource, EditSource, mixture
from etude.data.mutate import mutate_line
from etude.data.tokenizer import train_tokenizer

TOOLS = {
    "list": (),
    "read": ("path",),
    "edit": ("path", "change"),
    "run": ("command",),
    "finish": ("message",),
}
MODULE = '''
import os

def total(items, start=0):
    """Sum."""
    result = start
    for item in items:
        result += item
    return result

class Shop:
    def price(self, count):
        if count > 10:
            return count * self.rate
        return count * self.base
'''


def test_functions_are_dedented_and_lose_their_docstring() -> None:
    first, second = sorted(functions(MODULE))
    assert first.startswith("def price(self, count):\n    if count > 10:")
    assert '"""' not in second
    assert "result = start" in second


def test_files_are_deduplicated_and_held_out_by_content(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"m{i}.py").write_text(f"VALUE = {i}\n" + "x = 1\n" * 60)
        (tmp_path / f"copy{i}.py").write_text(f"VALUE = {i}\n" + "x = 1\n" * 60)
    files = source_files([tmp_path])
    assert len(files) == 200
    assert 0 < sum(file.held_out for file in files) < 20
    with pytest.raises(UserError, match="no Python files"):
        source_files([tmp_path / "empty"])


def test_an_edit_document_is_answered_by_its_own_text() -> None:
    """What an edit quotes was shown, and it changes something."""
    rng, originals = random.Random(0), list(functions(MODULE))
    seen = 0
    for _ in range(300):
        messages = edit_document(originals, rng)
        if messages is None:
            continue
        for call in (call for message in messages[3:] for call in message.calls if call.name == "edit"):
            seen += 1
            old, new = split_change(call.arguments["change"])
            assert old != new
            assert "rename" in messages[0].content or "\n".join(old) in messages[2].content
    assert seen > 100


def test_mutations_change_exactly_one_line() -> None:
    rng = random.Random(1)
    lines = ["    return a + b", "    if count > 10:", "    return min(left, right)", "    total -= 1"]
    for line in lines * 10:
        broken = mutate_line(line, rng)
        assert broken is not None
        assert broken != line
        assert "\n" not in broken


def test_the_stream_is_a_function_of_its_seed() -> None:
    codec = ChatCodec(train_tokenizer([MODULE] * 10, 320), TOOLS)
    files = [SourceFile("a.py", MODULE, False), SourceFile("b.py", MODULE.replace("Shop", "Cart"), False)]
    sources = [(0.5, CodeSource(files, codec, 100)), (0.5, EditSource(list(functions(MODULE)), codec, 400))]
    streams = [[t.tolist() for t, _ in itertools.islice(mixture(sources, seed), 30)] for seed in (3, 3, 4)]
    assert streams[0] == streams[1] != streams[2]
