"""Promises: overrides land where they say, wrong ones are named; records survive their wire form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from etude.base.config import Config, load
from etude.base.errors import ConfigError, UserError
from etude.base.records import Completion, Segment
from etude.base.telemetry import RunDirectory, read_jsonl


class Inner(Config):
    rate: float = 0.5
    names: tuple[str, ...] = ()


class Outer(Config):
    inner: Inner = Inner()
    label: str = "x"


def test_overrides_are_toml_values_or_strings() -> None:
    made = load(Outer, None, ["inner.rate=2", 'inner.names=["a", "b"]', "label=plain text"])
    assert (made.inner.rate, made.inner.names, made.label) == (2.0, ("a", "b"), "plain text")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.rat=2", r"unknown key inner\.rat; known here: names, rate"),
        ("inner.rate=fast", r"inner\.rate: .*number"),
        ("label.deep=1", r"label: .*string"),
        ("=1", "expected key"),
    ],
)
def test_wrong_keys_and_values_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(Outer, None, [override])


def test_arrays_survive_json() -> None:
    experts = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    done = Completion(tokens=(1,), logprobs=(-0.5,), versions=(3,), experts=experts, stop_reason="stop")
    back = Completion.model_validate_json(done.model_dump_json())
    assert back.experts is not None
    assert back.experts.dtype == np.int16
    assert np.array_equal(back.experts, experts)


def test_a_segment_of_unequal_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="logprobs has 1 entries for 2 tokens"):
        Segment(
            tokens=np.zeros(2, np.int32), sampled=np.zeros(2, bool), logprobs=np.zeros(1, np.float32),
            versions=np.zeros(2, np.int32), end="stop",
        )  # fmt: skip


def test_a_run_directory_is_used_once_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "r")
    run.write_recipe({"a": 1})
    run.metrics("sft", 1, loss=0.5)
    with (tmp_path / "r" / "metrics.jsonl").open("a") as handle:
        handle.write('{"stage": "sft", "st')
    assert [row["loss"] for row in read_jsonl(tmp_path / "r" / "metrics.jsonl")] == [0.5]
    assert json.loads((tmp_path / "r" / "recipe.json").read_text()) == {"a": 1}
    with pytest.raises(UserError, match="already in use"):
        RunDirectory.create(tmp_path / "r")
    with pytest.raises(UserError, match="nothing to resume"):
        RunDirectory.create(tmp_path / "none", resume=True)
