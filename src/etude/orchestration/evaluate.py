"""Held-out evaluation of one checkpoint: attempts on a pinned engine, statistics, rows of ``evals.jsonl``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from etude.base.records import Rollout, Task
from etude.base.telemetry import RunDirectory
from etude.evals.records import EvalRow, EvalSummary
from etude.evals.stats import summarise
from etude.orchestration.cluster import Executor
from etude.orchestration.config import EvalConfig
from etude.orchestration.executor import Order
from etude.orchestration.services import Address

INFRASTRUCTURE_RETRIES = 2


async def attempts(
    executor: Executor,
    orders: Sequence[Order],
    *,
    concurrency: int,
    on_done: Callable[[Rollout], None] = lambda rollout: None,
) -> list[Rollout]:
    """Run orders, at most ``concurrency`` at once; an attempt that hit a fault is repeated, never counted as a zero."""
    gate = asyncio.Semaphore(concurrency)

    async def one(order: Order) -> Rollout:
        async with gate:
            for _ in range(INFRASTRUCTURE_RETRIES + 1):
                rollout = await executor.run(order)
                if rollout.outcome.trainable:
                    break
            on_done(rollout)
            return rollout

    return list(await asyncio.gather(*(one(order) for order in orders)))


async def evaluate(
    executor: Executor,
    engine: Address,
    tasks: Sequence[Task],
    config: EvalConfig,
    run: RunDirectory,
    *,
    stage: str,
    step: int,
    seed: int,
    concurrency: int,
    on_done: Callable[[Rollout], None] = lambda rollout: None,
) -> EvalSummary:
    """Evaluate what ``engine`` serves and append the summary to ``evals.jsonl``, the rollouts as phase ``eval-STAGE``."""
    chosen = tasks[: config.tasks]
    orders = [
        Order(
            task=task,
            rollout_id=f"eval-{stage}-{step}-{task.id}-{sample}",
            seed=seed * 7919 + sample,
            engine=engine,
            temperature=config.temperature,
        )
        for task in chosen
        for sample in range(config.samples)
    ]
    instructions = {task.id: task.instruction for task in chosen}
    with run.span("evaluation", stage=stage):
        rollouts = await attempts(executor, orders, concurrency=concurrency, on_done=on_done)
    for rollout in rollouts[:: max(1, config.samples // 2)]:
        run.rollout(f"eval-{stage}", step, rollout, instructions[rollout.task_id])
    summary = summarise([EvalRow.from_rollout(rollout) for rollout in rollouts], stage=stage, step=step)
    run.append("evals.jsonl", summary.model_dump(mode="json"))
    return summary
