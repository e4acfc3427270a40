"""The supervised stages as parts of a run: pretraining, demonstrations, SFT; and their commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from etude.base.records import Rollout, Segment, Task
from etude.base.telemetry import RunDirectory
from etude.orchestration.checkpoints import resolve
from etude.orchestration.cluster import Cluster, Executor
from etude.orchestration.config import PretrainRunConfig, SFTRunConfig, TasksConfig
from etude.orchestration.evaluate import attempts
from etude.orchestration.executor import Order
from etude.orchestration.lifetime import run_until_done
from etude.orchestration.progress import StageProgress, figures
from etude.orchestration.services import Services
from etude.orchestration.trainer import pretrain_stage, sft_stage
from etude.tasks.synth import corpus, generate
from etude.training.pretrain import PretrainConfig
from etude.training.sft import SFTConfig

T = TypeVar("T")
NOTE = {"train_loss": "loss", "heldout_loss": "held-out", "mtp_agreement": "mtp agrees"}


class MetricsTail:
    """Reads what a stage in another process appends to metrics.jsonl."""

    def __init__(self, run: RunDirectory, stage: str) -> None:
        self._path, self._stage, self._at = run.file("metrics.jsonl"), stage, 0
        self.latest: dict[str, Any] = {}

    def poll(self) -> dict[str, Any]:
        """The newest values by name of the stage's rows so far."""
        if self._path.exists():
            with self._path.open("rb") as handle:
                handle.seek(self._at)
                block = handle.read()
            whole = block[: block.rfind(b"\n") + 1]
            self._at += len(whole)
            for line in whole.splitlines():
                row = json.loads(line)
                if row["stage"] == self._stage:
                    self.latest.update({key: value for key, value in row.items() if value is not None})
        return self.latest


async def watched(
    work: Awaitable[T], run: RunDirectory, stage: str, title: str, steps: int, progress: StageProgress
) -> T:
    """Await a stage while its bar follows its metrics."""
    tail = MetricsTail(run, stage)
    progress.begin(title, steps)
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=0.5)
            row = tail.poll()
            progress.update(title, row.get("step", 0), figures(row, NOTE))
        return task.result()
    finally:
        task.cancel()


async def pretraining(
    cluster: Cluster,
    run: RunDirectory,
    config: PretrainConfig,
    *,
    name: str,
    title: str,
    init: Path | None,
    texts: list[str],
    held_out_texts: list[str],
    progress: StageProgress,
) -> Path:
    """One pretraining stage; returns its checkpoint."""
    out = run.file("stages") / name
    work = cluster.run(pretrain_stage, config, run.path, out, name, init, texts, held_out_texts)
    with run.span(title):
        await watched(work, run, name, title, config.stage.steps, progress)
    return out


async def demonstrations(
    executor: Executor,
    run: RunDirectory,
    tasks: TasksConfig,
    *,
    seed: int,
    concurrency: int,
    progress: StageProgress,
) -> list[Segment]:
    """Segments of demonstrations that the harness itself produced, with real tool results."""
    chosen = demonstration_tasks(tasks, seed)
    orders = [
        Order(task=task, rollout_id=f"demo-{task.id}", seed=seed + index, who="demonstrator")
        for index, task in enumerate(chosen)
    ]
    title = "demonstrations"
    progress.begin(title, len(orders))
    done: list[Rollout] = []

    def on_done(rollout: Rollout) -> None:
        done.append(rollout)
        solved = sum(bool(r.passed) for r in done) / len(done)
        progress.update(title, len(done), f"solved {solved:.2f}")

    with run.span(title):
        rollouts = await attempts(executor, orders, concurrency=concurrency, on_done=on_done)
    for task, rollout in list(zip(chosen, rollouts, strict=True))[:40]:
        run.rollout("demonstrations", 0, rollout, task.instruction)
    solved = sum(bool(rollout.passed) for rollout in rollouts) / max(len(rollouts), 1)
    run.metrics("demonstrations", 0, count=len(rollouts), solved=solved)
    return [segment for rollout in rollouts if rollout.outcome.trainable for segment in rollout.segments]


def demonstration_tasks(config: TasksConfig, seed: int) -> Sequence[Task]:
    """Training tasks that are none of those that RL draws with the same seed."""
    used = {task.id for task in generate("train", config.train, seed + 1)}
    drawn = generate("train", config.demonstrations + 200, seed + 2)
    return [task for task in drawn if task.id not in used][: config.demonstrations]


async def finetuning(
    cluster: Cluster,
    run: RunDirectory,
    config: SFTConfig,
    *,
    init: Path,
    segments: list[Segment],
    progress: StageProgress,
) -> Path:
    """The SFT stage; returns its checkpoint."""
    out = run.file("stages") / "sft"
    work = cluster.run(sft_stage, config, run.path, out, init, segments)
    with run.span("supervised fine-tuning"):
        await watched(work, run, "sft", "supervised fine-tuning", config.stage.steps, progress)
    return out


async def with_services(
    run: RunDirectory,
    ray_address: str,
    body: Callable[[Services, Cluster, StageProgress], Awaitable[None]],
) -> None:
    """Run ``body`` with a cluster and a home for services; everything is stopped afterwards."""
    services = Services(run.file("logs"))
    cluster: Cluster | None = None
    try:
        cluster = Cluster(ray_address)
        with StageProgress() as progress:
            await body(services, cluster, progress)
    finally:
        services.stop()
        if cluster is not None:
            cluster.close()
        run.close()


def run_pretrain(config: PretrainRunConfig, run: RunDirectory) -> None:
    """``etude pretrain``: one pretraining stage by recipe."""

    async def body(services: Services, cluster: Cluster, progress: StageProgress) -> None:
        stage = PretrainConfig.model_validate(config.model_dump(exclude={"stage_name", "texts"}))
        init = resolve(config.init) if config.init else None
        texts = corpus("train", config.texts, config.seed)
        held = corpus("heldout", min(config.texts, 200), config.seed)
        out = await pretraining(
            cluster, run, stage, name=config.stage_name, title=config.stage_name, init=init, texts=texts,
            held_out_texts=held, progress=progress,
        )  # fmt: skip
        progress.say(f"checkpoint: {out}")

    run_until_done(with_services(run, "", body))


def run_sft(config: SFTRunConfig, run: RunDirectory) -> None:
    """``etude sft``: demonstrations made on the spot, then SFT."""

    async def body(services: Services, cluster: Cluster, progress: StageProgress) -> None:
        init = resolve(config.init)
        environments = await services.environments()
        executor = cluster.executor(config.rollouts, config.demonstrator, environments, init)
        segments = await demonstrations(
            executor, run, config.tasks, seed=config.seed, concurrency=config.rollouts.concurrency, progress=progress
        )
        out = await finetuning(cluster, run, config.sft, init=init, segments=segments, progress=progress)
        progress.say(f"checkpoint: {out}")

    run_until_done(with_services(run, config.rollouts.ray_address, body))
