"""A made-up run directory for tests of the report: smooth curves with noise, invented rollouts, no training at all."""

from __future__ import annotations

import math
import random
from pathlib import Path

from etude.base.records import Category, Effort, Message, Outcome, RewardBreakdown, Rollout, ToolCall, Turn
from etude.base.telemetry import RunDirectory

CATEGORIES = (
    Category.ITERATE,
    Category.DEBUGGING,
    Category.NEW_FEATURE,
    Category.REFACTOR,
    Category.UNDERSTAND,
    Category.TESTING,
)
START = 1_700_000_000.0


def build_synthetic_run(path: Path, *, rollouts: int = 400, rl_steps: int = 120, seed: int = 0) -> Path:
    """Fill ``path`` with all the files a report reads. Everything in them is invented."""
    rng = random.Random(seed)
    run = RunDirectory.create(path)
    run.write_recipe({"synthetic": True, "seed": seed, "rl": {"group_size": 8, "max_staleness": 4}})
    clock = _losses(run, rng)
    _rl_metrics(run, rng, rl_steps, clock)
    _evals(run, rl_steps)
    _spans(run, rng)
    for index in range(rollouts):
        rollout = synthetic_rollout(rng, index, index / max(rollouts, 1))
        run.rollout("rl", index * rl_steps // max(rollouts, 1), rollout, f"fix task {rollout.task_id}")
    run.close()
    return path


def _losses(run: RunDirectory, rng: random.Random) -> float:
    clock = START
    for stage, steps, start, end in (("pretrain", 200, 3.1, 2.2), ("extend", 60, 2.4, 2.15), ("sft", 80, 1.6, 0.35)):
        for step in range(1, steps + 1):
            clock += 0.6
            level = end + (start - end) * math.exp(-4 * step / steps)
            row: dict[str, float] = {
                "train_loss": level + rng.gauss(0, 0.06),
                "lr": 3e-3,
                "tokens": 6144,
                "seconds": 0.55,
                "grad_norm": 1 + rng.random(),
            }
            if stage != "pretrain":
                row["mtp_loss"] = 0.4 + 2 * math.exp(-5 * step / steps) + rng.gauss(0, 0.05)
                row["mtp_agreement"] = 0.8 - 0.5 * math.exp(-4 * step / steps)
            if step % 20 == 0:
                row["heldout_loss"] = level + 0.08
                if stage == "pretrain":
                    row |= {"heldout_code_loss": level + 0.08, "heldout_edits_loss": level - 0.6}
            run.append("metrics.jsonl", {"time": clock, "stage": stage, "step": step, **row})
    return clock


def _rl_metrics(run: RunDirectory, rng: random.Random, steps: int, clock: float) -> None:
    for step in range(1, steps + 1):
        part = step / steps
        lag = min(4.0, 0.8 + rng.random() * 1.4)
        row = {
            "reward": 0.3 + 0.22 * part + rng.gauss(0, 0.05),
            "pass_rate": 0.38 + 0.2 * part + rng.gauss(0, 0.05),
            "outcome_rate": 0.97,
            "groups": 8,
            "staleness_mean": lag,
            "staleness_max": math.ceil(lag + 1),
            "staleness_min": 0,
            "logprob_gap_mean": 4e-7 * (1 + rng.random()),
            "logprob_gap_p99": 3e-6 * (1 + rng.random()),
            "offpolicy_gap_mean": 0.02 * (1 + rng.random()),
            "ess": 0.98 - 0.05 * part - 0.02 * rng.random(),
            "kl": 0.03 * part + 0.002 * rng.random(),
            "grad_norm": 0.6 + 0.3 * rng.random(),
            "length_tokens": 150 - 40 * part + rng.gauss(0, 6),
            "turns": 4.1 - 0.7 * part + rng.gauss(0, 0.15),
            "sampled_tokens": 64 * (150 - 40 * part),
            "effort_penalty": -0.08 + 0.02 * part,
            "entropy": 0.62 - 0.2 * part,
            "replay_kept": 0.995 - 0.004 * rng.random(),
            "faults": int(rng.random() < 0.06),
            "publish_seconds": 0.08 + 0.03 * rng.random(),
            "changed_fraction": 0.04 + 0.02 * rng.random(),
        }
        run.append("metrics.jsonl", {"time": clock + 2.5 * step, "stage": "rl", "step": step, **row})


def _evals(run: RunDirectory, rl_steps: int) -> None:
    rows = [("base", 0, 0.04, 0.15), ("sft", 0, 0.36, 0.74)]
    rows += [
        ("rl", step, 0.36 + 0.18 * step / rl_steps, 0.74 + 0.06 * step / rl_steps)
        for step in range(0, rl_steps + 1, 30)
    ]
    for stage, step, first, best in rows:
        by_category = {
            str(category): {
                "pass_at_1": max(0.0, min(1.0, first + 0.09 * (i - 2.5))),
                "low": max(0.0, first + 0.09 * (i - 2.5) - 0.08),
                "high": max(0.02, min(1.0, first + 0.09 * (i - 2.5) + 0.08)),
                "num_tasks": 66,
                "num_samples": 528,
            }
            for i, category in enumerate(CATEGORIES)
        }
        row = {"stage": stage, "step": step, "pass_at_1": first, "low": max(0.0, first - 0.035), "high": first + 0.035}
        row |= {"best_of_8": best, "best_low": best - 0.045, "best_high": best + 0.045, "by_category": by_category}
        row |= {"turns": 4.2 - first, "tokens": 160 - 60 * first, "seconds": 2.1, "num_tasks": 400}
        run.append("evals.jsonl", row | {"num_samples": 3200, "num_infrastructure": 3, "num_invalid": 0})


def _spans(run: RunDirectory, rng: random.Random) -> None:
    def span(component: str, start: float, seconds: float) -> None:
        run.append("spans.jsonl", {"component": component, "start": START + start, "seconds": seconds})

    span("pretrain", 0, 120)
    span("extend", 122, 40)
    span("demonstrations", 162, 25)
    span("sft", 187, 50)
    for start in (238, 330, 420, 530):
        span("evaluation", start, 18)
    for index in range(300):
        span("rollouts", 256 + index, 2 + 3 * rng.random())
    for index in range(120):
        span("trainer step", 258 + 2.5 * index, 1.7)
        span("publish weights", 259.7 + 2.5 * index, 0.1)


def synthetic_rollout(rng: random.Random, index: int, progress: float) -> Rollout:
    """One invented rollout with a tool call of each kind, and now and then a fault or a summary."""
    passed = rng.random() < 0.35 + 0.3 * progress
    outcome = Outcome.COMPLETED
    if rng.random() < 0.06:
        outcome, passed = rng.choice([Outcome.MODEL_FAULT, Outcome.ENVIRONMENT_FAULT, Outcome.VERIFIER_FAULT]), False
    category = rng.choice(CATEGORIES)
    code = "def total(items):\n    result = 0\n    for item in items:\n        result += item.price\n    return result"
    read = ToolCall(name="read", arguments={"path": "shop/cart.py"})
    edit = ToolCall(name="edit", arguments={"path": "shop/cart.py", "change": f"====\n{code}"})
    broken = ToolCall(name="run", arguments={}, error="unknown tool argument: quick")
    turns = [
        Turn(
            message=Message(
                role="assistant", thinking="The total ignores the price. I read the file first.", calls=(read,)
            ),
            results=(
                Message(role="tool", content=f"1 | import decimal\n2 |\n3 | {code.splitlines()[0]}\n4 |     return 0"),
            ),
        ),
        Turn(
            message=Message(role="assistant", content="Summary: cart.py has a wrong total; next: edit it."),
            segment=0,
            is_summary=True,
        ),
        Turn(
            message=Message(role="assistant", calls=(edit,)), results=(Message(role="tool", content="ok"),), segment=1
        ),
        Turn(
            message=Message(role="assistant", calls=(broken,)),
            results=(Message(role="tool", content="error"),),
            segment=1,
        ),
        Turn(message=Message(role="assistant", content="The total adds up the prices now."), segment=1),
    ]
    if index % 3:
        del turns[1]
    trainable = outcome.trainable
    return Rollout(
        id=f"rollout-{index:05d}",
        task_id=f"{category}-{rng.getrandbits(32):08x}",
        category=category,
        segments=(),
        turns=tuple(turns),
        effort=Effort(
            thinking_tokens=rng.randint(10, 40),
            call_tokens=rng.randint(60, 140),
            output_tokens=rng.randint(80, 200),
            message_tokens=rng.randint(5, 15),
            calls=3,
            turns=len(turns),
        ),
        outcome=outcome,
        detail="" if trainable else "the service did not answer within 20 s",
        passed=passed if trainable else None,
        reward=RewardBreakdown(terms={"outcome": float(passed), "length": -0.12, "broken_calls": -0.05})
        if trainable
        else None,
        verifier_output="1 passed in 0.02s"
        if passed
        else "FAILED tests/test_cart.py::test_total - assert 0 == 30\n1 failed in 0.03s",
        events=("malformed_call",),
        seconds={"inference": 1.21, "tools": 0.34, "verify": 0.22, "total": 1.91},
    )
