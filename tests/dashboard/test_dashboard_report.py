"""The report: complete for a whole run, honest for an unfinished one, inert whatever the texts in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import build_synthetic_run

from etude.base.errors import UserError
from etude.base.telemetry import RunDirectory
from etude.dashboard.report import SOURCES, embed, write_report
from etude.dashboard.text import text_table

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--<script>\u2028'\"&amp;{{ 7*7 }}"

OUR_TAGS = """
html head meta title style body header p h1 h2 dl div dt dd nav a main section table thead tbody tr th td span b i u
small figure figcaption form label select input output ol article details summary pre footer noscript script
"""


@dataclass
class Page(HTMLParser):
    """What a browser's parser would see: tags with attributes, and the text of each script element."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: dict[str, str] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    _script: str | None = None

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = (dict(attrs).get("id") or f"code-{len(self.scripts)}") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text.append(data)
        else:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data

    def data(self, name: str) -> Any:
        return json.loads(self.scripts[name])


def parsed(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(build_synthetic_run(tmp_path_factory.mktemp("runs") / "whole"))


def test_a_whole_run_fills_every_section(whole: Path) -> None:
    page = parsed(whole)
    titles = {chart["title"] for chart in page.data("charts-data")}
    assert titles >= {
        "Held-out success over RL",
        "pass@1 by category",
        "Continued pretraining",
        "Long-context extension",
        "Supervised fine-tuning",
        "Multi-token prediction",
        "Reward",
        "Sampled tokens per rollout",
        "Where the tokens go",
        "Turns and calls",
        "Staleness of trained tokens",
        "Trainer against engine logprobs",
        "Effective sample size",
        "KL to the reference",
        "Activity over the run",
    }
    assert "yet" not in " ".join(text for text in page.text if "No " in text)
    figures = [attributes["data-chart"] for tag, attributes in page.tags if tag == "figure"]
    assert figures == [str(i) for i in range(len(page.data("charts-data")))]


def test_every_chart_has_as_many_values_as_steps(whole: Path) -> None:
    for chart in parsed(whole).data("charts-data"):
        for line in chart["series"]:
            assert len(line["x"]) == len(line["y"]) > 0
            assert line["x"] == sorted(line["x"])
            for edge in ("low", "high"):
                assert line[edge] is None or len(line[edge]) == len(line["x"])


def test_the_number_of_embedded_rollouts_is_bounded_and_stated(whole: Path) -> None:
    page = parsed(whole)
    assert len(page.data("rollouts-data")) == 300
    assert "300 of 400 recorded rollouts" in " ".join(page.text)


def test_a_report_stays_light(whole: Path) -> None:
    assert whole.stat().st_size < 2_000_000


def test_the_page_loads_nothing(whole: Path) -> None:
    page = parsed(whole)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert set(re.findall(r"https?://[^\s\"'<]+", whole.read_text())) <= {"http://www.w3.org/2000/svg"}


def test_scripts_never_parse_text_as_markup(whole: Path) -> None:
    code = "".join(text for name, text in parsed(whole).scripts.items() if name.startswith("code-"))
    assert "textContent" in code
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert danger not in code


def test_hostile_text_is_shown_and_not_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "<b>run")
    run.write_recipe({"note": HOSTILE})
    run.append("metrics.jsonl", {"stage": HOSTILE, "step": 1, "train_loss": 2.0})
    run.append("spans.jsonl", {"component": HOSTILE, "start": 0.0, "seconds": 1.0})
    run.append("evals.jsonl", {"stage": HOSTILE, "step": 0, "pass_at_1": 0.5, "by_category": {HOSTILE: 0.5}})
    turn = {
        "message": {
            "role": "assistant",
            "content": HOSTILE,
            "calls": [{"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}],
        }
    }
    turn |= {"results": [{"role": "tool", "content": HOSTILE}]}
    body = {"id": HOSTILE, "task_id": HOSTILE, "category": HOSTILE, "turns": [turn], "verifier_output": HOSTILE}
    run.append("rollouts.jsonl", {"phase": HOSTILE, "step": 1, "rollout": body})
    run.close()
    page = parsed(write_report(run.path))
    assert sum(tag == "script" for tag, _ in page.tags) == 5
    assert {tag for tag, _ in page.tags} <= set(OUR_TAGS.split())
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    shown = page.data("rollouts-data")[0]["rollout"]
    assert shown["turns"][0]["message"]["content"] == HOSTILE
    assert shown["turns"][0]["message"]["calls"][0]["arguments"] == {HOSTILE: HOSTILE}
    assert any(HOSTILE in text for text in page.text)  # the component and the stage, as text
    assert "<b>run" in "".join(page.text)
    assert "49" not in "".join(text for text in page.text if "7*7" in text)


@pytest.mark.parametrize("only", SOURCES)
def test_any_single_file_is_enough_and_the_rest_is_said_to_be_missing(only: str, whole: Path, tmp_path: Path) -> None:
    (tmp_path / only).write_bytes((whole.parent / only).read_bytes())
    page = " ".join(parsed(write_report(tmp_path)).text)
    missing = {
        "evals.jsonl": "No evaluations yet",
        "metrics.jsonl": "No losses yet",
        "spans.jsonl": "No spans yet",
        "rollouts.jsonl": "No rollouts yet",
        "recipe.json": "recipe.json is missing",
    }
    for name, sentence in missing.items():
        assert (sentence in page) == (name != only)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds none of recipe\.json"):
        write_report(tmp_path / "nowhere")


def test_torn_and_odd_lines_do_not_stop_a_report(tmp_path: Path) -> None:
    rows = [
        '{"stage": "rl", "step": 1, "reward": NaN, "kl": Infinity}',
        '{"stage": "rl", "step": 2, "reward": 0.5, "kl": "high", "ess": null}',
        "[1, 2]",
        '{"stage": "rl", "step": 3, "rew',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    (tmp_path / "rollouts.jsonl").write_text('{"phase": "rl"}\n{"rollout": {}}\n{"phase": "rl", "st')
    (tmp_path / "evals.jsonl").write_text('{"stage": "sft"}\n{}\n')
    page = parsed(write_report(tmp_path))
    reward = next(chart for chart in page.data("charts-data") if chart["title"] == "Reward")
    assert reward["series"][0]["y"] == [0.5]
    assert len(page.data("rollouts-data")) == 1


def test_writing_again_replaces_the_report_whole(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert write_report(whole.parent, out) == out
    out.write_text("old")
    write_report(whole.parent, out)
    assert out.read_text().rstrip().endswith("</html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_an_unwritable_target_is_named(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"page\.html: cannot be written"):
        write_report(whole.parent, tmp_path / "no" / "such" / "page.html")


@pytest.mark.parametrize("value", [HOSTILE, {"a": [1.5, None, True]}, float("nan"), "\ud800"])
def test_embedded_json_round_trips_and_has_no_markup(value: Any) -> None:
    text = str(embed([value]))
    assert not set("<>&") & set(text)
    back = json.loads(text)[0]
    assert back == value or (value != value and back is None)


def test_the_text_table_holds_what_the_page_shows(whole: Path) -> None:
    table = text_table(whole.parent)
    assert "| After RL   | 54.0% (50.5 to 57.5) | 80.0% (75.5 to 84.5) |" in table
    assert "+18.0 points; the 95% intervals do not overlap" in table
    assert len({len(line) for line in table.splitlines()[:5]}) == 1
    assert text_table(whole.parent / "nowhere") == ""
