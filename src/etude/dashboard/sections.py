"""The sections of the report: which charts there are, and what they say.

Each function takes rows of a run's files and returns a :class:`Section`; one without data keeps its place on the page
and says which file or metric it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.dashboard.charts import Chart, ChartSpec, Key, Row, finite, line_charts, series

STAGE_TITLES = {
    "pretrain": "Continued pretraining",
    "extend": "Long-context extension",
    "sft": "Supervised fine-tuning",
}
"""Titles of the stages that have a language-model loss; another name is shown as it is."""

OUTCOME_CHARTS = (
    ChartSpec(
        "Reward",
        (Key("reward", "total reward"), Key("pass_rate", "pass rate")),
        note="Mean over the rollouts that trained at each step.",
    ),
    ChartSpec(
        "Rollouts that count",
        (Key("outcome_rate", "completed"), Key("trainable_rate", "can reach the gradient")),
        note="Share of rollouts by how they ended; faults of a service never become a reward.",
        unit="percent",
    ),
    ChartSpec("Effort penalty", (Key("effort_penalty", "penalty"),), note="Concave length penalty, mean per rollout."),
    ChartSpec("Gradient norm", (Key("grad_norm", "norm"),), note="Before clipping."),
    ChartSpec("Groups per step", (Key("groups", "groups"),), unit="count"),
    ChartSpec("Faults", (Key("faults", "faults"),), note="Faults of a service, per step.", unit="count"),
)

EFFORT_CHARTS = (
    ChartSpec("Sampled tokens per rollout", (Key("length_tokens", "tokens"),), unit="tokens"),
    ChartSpec(
        "Where the tokens go",
        (
            Key("thinking_tokens", "thinking"),
            Key("call_tokens", "tool calls"),
            Key("output_tokens", "tool results read"),
            Key("message_tokens", "final message"),
        ),
        unit="tokens",
        note="Mean per rollout.",
    ),
    ChartSpec(
        "Turns and calls",
        (Key("turns", "turns"), Key("calls", "tool calls")),
        unit="count",
        note="Mean per rollout.",
    ),
    ChartSpec(
        "Tokens trained per step", (Key("sampled_tokens", "tokens"), Key("trained_tokens", "trained")), unit="tokens"
    ),
)

POLICY_CHARTS = (
    ChartSpec(
        "Staleness of trained tokens",
        (Key("staleness_mean", "mean", low="staleness_min", high="staleness_max"),),
        note="Policy versions between sampling and training. Band: oldest and, where recorded, newest token.",
        smooth=False,
    ),
    ChartSpec(
        "Trainer against engine logprobs",
        (
            Key("logprob_gap_p99", "99th percentile"),
            Key("logprob_gap_mean", "mean"),
            Key("offpolicy_gap_mean", "mean, stale tokens included"),
        ),
        unit="nats",
        log=True,
        note="|log p (trainer) - log p (engine)| of sampled tokens; on the same version it measures numerics alone.",
    ),
    ChartSpec(
        "Effective sample size",
        (Key("ess", "ESS"),),
        unit="percent",
        note="(Σw)² / (N Σw²) of the importance weights: 100% is on-policy.",
    ),
    ChartSpec("KL to the reference", (Key("kl", "KL"),), unit="nats", note="Mean per sampled token."),
    ChartSpec("Entropy", (Key("entropy", "entropy"),), unit="nats", note="Of the policy at sampled positions."),
    ChartSpec(
        "Router replay",
        (Key("replay_kept", "kept"),),
        unit="percent",
        zero=False,
        note="Share of the engine's expert choices that passed the plausibility filter.",
    ),
)

WEIGHT_CHARTS = (
    ChartSpec(
        "Weights changed by a step",
        (Key("changed_fraction", "changed"),),
        unit="percent",
        note="Share of stored elements that a delta carries.",
    ),
    ChartSpec("Time to publish a version", (Key("publish_seconds", "seconds"),), unit="seconds"),
)


@dataclass(frozen=True)
class Section:
    """A heading with charts under it."""

    id: str
    title: str
    lead: str
    charts: tuple[Chart, ...]
    missing: str
    """Said in place of charts when there are none."""


def loss_section(metrics: Sequence[Row]) -> Section:
    """Training and held-out losses of every stage that has one, in the order of their first row."""
    stages = [stage for stage in dict.fromkeys(str(row.get("stage", "")) for row in metrics) if stage != "rl"]
    by_title = {STAGE_TITLES.get(s, s): [row for row in metrics if str(row.get("stage", "")) == s] for s in stages}
    charts = [_stage_chart(rows, title) for title, rows in by_title.items()]
    charts.append(_agreement_chart(by_title))
    return Section(
        "losses",
        "Losses by stage",
        "Cross-entropy in nats per token. Held-out losses are over files and demonstrations never trained on.",
        tuple(chart for chart in charts if chart is not None),
        "No losses yet: metrics.jsonl has no row of a pretraining or fine-tuning stage.",
    )


def _stage_chart(rows: Sequence[Row], title: str) -> Chart | None:
    parts = sorted({name for row in rows for name in row if name.startswith("heldout_") and name.endswith("_loss")})
    parts = [name for name in parts if name != "heldout_loss"] or ["heldout_loss"]
    lines = [series(rows, Key("train_loss", "train"), smooth=True)]
    for name in parts:
        label = name.removeprefix("heldout_").removesuffix("loss").strip("_").replace("_", " ")
        lines.append(series(rows, Key(name, f"held out: {label}" if label else "held out"), points=True))
    lines.append(series(rows, Key("mtp_loss", "MTP"), smooth=True))
    kept = tuple(line for line in lines if line is not None)
    return Chart(title, note=_stage_note(rows), unit="nats", zero=False, series=kept) if kept else None


def _agreement_chart(rows_by_title: dict[str, list[Row]]) -> Chart | None:
    lines = [series(rows, Key("mtp_agreement", title), smooth=True) for title, rows in rows_by_title.items()]
    kept = tuple(line for line in lines if line is not None)
    note = "How often the first choice of the MTP depth is that of the main head."
    return Chart("Multi-token prediction", note=note, unit="percent", series=kept) if kept else None


def _stage_note(rows: Sequence[Row]) -> str:
    tokens = sum(finite(row.get("tokens")) or 0.0 for row in rows)
    seconds = sum(finite(row.get("seconds")) or 0.0 for row in rows)
    steps = max((finite(row.get("step")) or 0.0 for row in rows), default=0.0)
    note = f"{steps:,.0f} steps"
    if tokens:
        note += f", {tokens:,.0f} tokens"
    if seconds:
        note += f", {seconds:,.0f} s of training"
    return note


def rl_sections(metrics: Sequence[Row], effort: Sequence[Row]) -> list[Section]:
    """Reward, effort, off-policyness and weights over RL steps.

    ``effort`` holds means over the recorded rollouts by step, for what ``metrics`` does not carry.
    """
    rows = [row for row in metrics if row.get("stage") == "rl"]
    carried = {name for row in rows for name in row}
    extra = [{k: v for k, v in row.items() if k == "step" or k not in carried} for row in effort]
    waits = "No RL steps yet: metrics.jsonl has no row of stage rl with these metrics."
    return [
        Section(
            "reward",
            "Reward and updates",
            "What the trained rollouts earned, and the steps taken on it.",
            tuple(line_charts(rows, OUTCOME_CHARTS)),
            waits,
        ),
        Section(
            "effort",
            "Effort",
            "What the agent spends on a task.",
            tuple(line_charts([*rows, *extra], EFFORT_CHARTS)),
            "No effort yet: neither metrics.jsonl nor rollouts.jsonl has a row of phase rl.",
        ),
        Section(
            "policy",
            "Asynchrony and numerics",
            "Trainer and rollouts run at once: how old the trained tokens are, and how well both sides agree.",
            tuple(line_charts(rows, POLICY_CHARTS)),
            waits,
        ),
        Section(
            "weights", "Weight versions", "What each step publishes.", tuple(line_charts(rows, WEIGHT_CHARTS)), waits
        ),
    ]
