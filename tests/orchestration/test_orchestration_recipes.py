"""Promises: every shipped recipe resolves; unknown keys and bad combinations are refused with the key named."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.base.config import Config, load
from etude.base.errors import ConfigError
from etude.orchestration.config import EvalRunConfig, PretrainRunConfig, QuickstartConfig, RLConfig, SFTRunConfig

RECIPES = Path(__file__).parents[2] / "recipes"
CLASSES: dict[str, type[Config]] = {
    "base": PretrainRunConfig,
    "base2": PretrainRunConfig,
    "pretrain": PretrainRunConfig,
    "sft": SFTRunConfig,
    "rl": RLConfig,
    "rl_sync": RLConfig,
    "eval": EvalRunConfig,
    "quickstart": QuickstartConfig,
}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_resolves(path: Path) -> None:
    load(CLASSES[path.stem], path)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rl.stepz=3", r"unknown key rl\.stepz; known here: .*steps"),
        ("rl.steps=0", r"rl\.steps: .*greater than or equal to 1"),
        ("rl.steps=4000", r"rl: .*no prompt is trained twice"),
        ("rollouts.harness.context_budget=100", r"rollouts\.harness: .*context_budget must hold"),
        ("pretrain.model.num_experts_per_tok=9", r"pretrain\.model: .*n_routed_experts is 8"),
        ("seed", "expected key.sub=value"),
    ],
)
def test_bad_keys_are_refused_by_name(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(QuickstartConfig, RECIPES / "quickstart.toml", [override])


def test_a_missing_or_torn_recipe_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(RLConfig, tmp_path / "none.toml")
    (tmp_path / "torn.toml").write_text("steps = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(RLConfig, tmp_path / "torn.toml")
