"""A small tokenizer shared by the tests of this room."""

from __future__ import annotations

import pytest

from etude.agents.tools import TOOL_ARGUMENTS
from etude.data.chat import ChatCodec
from etude.data.tokenizer import train_tokenizer

TEXTS = [
    "def total(items):\n    return sum(items)\n",
    "1:def f(a, b):\n2:    return a + b\n3:    for item in items:\n4:        result += item\n",
    "coding agent. tools: list, read path, search text, edit path old ==== new, reset, run, finish message",
    "sum up: seen, done, next edit, next run; summary 1, turn 3: edited: lib.py, test_lib.py",
    "read\nlib.py edit\nlib.py\n3+ finish\nfixed total FAIL test_total: total(1, 2) == 3 got -1 1 failed 2 passed",
] * 20


@pytest.fixture(scope="session")
def codec() -> ChatCodec:
    return ChatCodec(train_tokenizer(TEXTS, 600), TOOL_ARGUMENTS)
