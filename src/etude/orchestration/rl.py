"""Asynchronous RL: rollouts and trainer at once, joined by the reconciler.

    rollout workers    wait for a slot      -> run a rollout         -> reconciler.finish
    trainer loop       waits for B groups   -> step, checkpoint, publish -> mark trained -> engine update -> maybe evaluate

The workers block on backpressure (the reconciler's capacity), the trainer on ready groups, each with a deadline. The engine is
updated while it generates; the content hash it then reports must be the manifest's.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.agents.demonstrator import DemonstratorConfig
from etude.algorithms.advantages import ALGORITHMS
from etude.base.errors import UserError, WeightSyncError, deadline_exceeded
from etude.base.records import Rollout, RolloutGroup, Task, WeightManifest
from etude.base.telemetry import RunDirectory
from etude.orchestration.checkpoints import StepCheckpoints, resolve
from etude.orchestration.cluster import Cluster, Executor, unwrapped
from etude.orchestration.config import RLConfig
from etude.orchestration.evaluate import evaluate
from etude.orchestration.executor import Order
from etude.orchestration.group_store import GroupStore
from etude.orchestration.ledger import Ledger
from etude.orchestration.lifetime import run_until_done
from etude.orchestration.progress import StageProgress, figures
from etude.orchestration.reconciler import Exhausted, Reconciler, Slot
from etude.orchestration.services import Engine, Services
from etude.tasks.synth import generate

NOTE = {"reward": "reward", "pass_rate": "pass", "staleness_mean": "lag", "ess": "ess", "entropy": "entropy"}


@dataclass
class RLRun:
    """Everything one RL run holds while it goes on."""

    config: RLConfig
    run: RunDirectory
    services: Services
    cluster: Cluster
    executor: Executor
    engine: Engine
    trainer: Any
    reconciler: Reconciler
    held_out: Sequence[Task]
    progress: StageProgress
    faults_logged: int = 0
    background: set[asyncio.Task[None]] = field(default_factory=set)

    async def loop(self) -> None:
        """Until the configured number of steps is trained. Raises what any of its parts raised."""
        workers = [asyncio.create_task(self._work()) for _ in range(self.config.rollouts.concurrency)]
        training = asyncio.create_task(self._train())
        try:
            pending: set[asyncio.Task[None]] = {training, *workers}
            while training in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            for task in self.background:
                await task
        finally:
            for task in (*workers, training, *self.background):
                task.cancel()
            await asyncio.gather(*workers, training, *self.background, return_exceptions=True)

    async def _work(self) -> None:
        """One rollout worker: slot after slot."""
        while (slot := await self.reconciler.next_slot()) is not None:
            seed = rollout_seed(self.config.seed, slot)
            order = Order(
                task=slot.task,
                rollout_id=f"{slot.task.id}-{slot.attempt}-{slot.tries}",
                seed=seed,
                engine=self.engine.address,
            )
            rollout = await self.executor.run(order)
            self.run.rollout("rl", self.reconciler.version, rollout, slot.task.instruction)
            await self.reconciler.finish(slot, rollout)

    async def _train(self) -> None:
        config, checkpoints = self.config, StepCheckpoints(self.run.path)
        while self.reconciler.version < config.steps:
            with self.run.span("trainer waits"):
                groups = await self.reconciler.ready_groups(config.groups_per_step, deadline=config.deadline_seconds)
            version = self.reconciler.version + 1
            with self.run.span("training", version=version):
                call = unwrapped(self.trainer.step.remote(groups, checkpoints.path(version)))
                try:
                    metrics, manifest = await asyncio.wait_for(call, config.deadline_seconds)
                except TimeoutError:
                    raise deadline_exceeded(
                        "driver", "a training step", config.deadline_seconds, version, self.reconciler.last_progress
                    ) from None
            await self.reconciler.mark_trained(groups, version)
            checkpoints.prune()
            with self.run.span("weight update", version=version):
                await self.serve(manifest)
            self._log(version, groups, metrics)
            if config.eval_every and version % config.eval_every == 0 and version < config.steps:
                task = asyncio.create_task(self._evaluate(version))
                self.background.add(task)
                task.add_done_callback(self.background.discard)

    async def serve(self, manifest: WeightManifest) -> None:
        """Hot-load a version and check what the engine then holds. Raises WeightSyncError."""
        held = await self.engine.client.update_weights(manifest.version)
        if held != manifest.content_hash:
            raise WeightSyncError(
                f"engine holds {held[:12]} after the update to version {manifest.version}, not {manifest.content_hash[:12]}"
            )
        self.reconciler.served(manifest.version)

    async def _evaluate(self, version: int) -> None:
        """A small held-out evaluation on a lease of its own, pinned to ``version``, while training goes on."""
        lease = await self.services.engine(
            resolve(self.config.init), str(self.run.file("store")), self.config.rollouts.engine, name=f"eval-{version}"
        )
        try:
            await lease.client.update_weights(version)
            await evaluate(
                self.executor, lease.address, self.held_out, self.config.evals, self.run, stage="rl",
                step=version, seed=self.config.seed, concurrency=self.config.rollouts.concurrency // 2 or 1,
            )  # fmt: skip
        finally:
            await lease.release()

    def _log(self, version: int, groups: Sequence[RolloutGroup], metrics: dict[str, float]) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        row = {**metrics, **_rollout_metrics(rollouts), "groups": float(len(groups))}
        row["no_signal_groups"] = float(sum(not any(group.advantages) for group in groups))
        row["faults"] = float(self.reconciler.faults - self.faults_logged)
        self.faults_logged = self.reconciler.faults
        row["ready_groups"] = float(self.reconciler.num_ready)
        self.run.metrics("rl", version, **row)
        self.progress.update("reinforcement learning", version, figures(row, NOTE))


def rollout_seed(seed: int, slot: Slot) -> int:
    """Sampling seed of an attempt: the same whatever else runs (31 bits)."""
    text = f"{seed}:{slot.task.id}:{slot.attempt}:{slot.tries}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over the rollouts of a step."""

    def mean(values: list[float]) -> float:
        return statistics.fmean(values) if values else 0.0

    return {
        "reward": mean([r.reward.total for r in rollouts if r.reward]),
        "effort_penalty": mean([r.reward.terms.get("length", 0.0) for r in rollouts if r.reward]),
        "pass_rate": mean([float(bool(r.passed)) for r in rollouts]),
        "turns": mean([float(r.effort.turns) for r in rollouts]),
        "calls": mean([float(r.effort.calls) for r in rollouts]),
        "sampled_tokens": mean([float(r.sampled_tokens) for r in rollouts]),
        "length_tokens": mean([float(sum(len(s.tokens) for s in r.segments)) for r in rollouts]),
        "summaries": mean([float(len(r.segments) - 1) for r in rollouts]),
        "rollout_seconds": mean([r.seconds.get("total", 0.0) for r in rollouts]),
        "inference_seconds": mean([r.seconds.get("inference", 0.0) for r in rollouts]),
        "tool_seconds": mean([r.seconds.get("tools", 0.0) for r in rollouts]),
        "verify_seconds": mean([r.seconds.get("verify", 0.0) for r in rollouts]),
    }


async def rl_stage(
    config: RLConfig,
    run: RunDirectory,
    services: Services,
    cluster: Cluster,
    executor: Executor,
    progress: StageProgress,
    *,
    resume: bool,
) -> tuple[Path, Engine]:
    """Train from ``config.init``; returns the exported checkpoint and the engine, which serves it."""
    init, store = resolve(config.init), str(run.file("store"))
    trainer = cluster.trainer(config.train, init, store, config.base_every, config.keep_bases)
    engine = await services.engine(init, store, config.rollouts.engine, name="engine")
    reconciler = Reconciler(
        config.reconciler,
        Ledger(run.file("ledger.sqlite")),
        GroupStore(run.file("groups")),
        iter(generate("train", config.tasks.train, config.seed + 1)),
        groups_per_step=config.groups_per_step,
        advantages=ALGORITHMS[config.train.algorithm].advantages,
    )
    newest = StepCheckpoints(run.path).newest() if resume else None
    if newest is not None:
        version, trained = await unwrapped(trainer.resume.remote(newest))
        reconciler.resume(trained, version)
    elif resume:
        reconciler.resume([], 0)
    if reconciler.version >= config.steps:
        raise UserError(f"run {run.path}: already trained {reconciler.version} steps; raise steps to go on")
    held_out = generate("heldout", max(config.evals.tasks, 1), 0)
    live = RLRun(config, run, services, cluster, executor, engine, trainer, reconciler, held_out, progress)
    progress.begin("reinforcement learning", config.steps)
    await live.serve(await unwrapped(trainer.publish.remote()))
    try:
        await live.loop()
    except Exhausted as error:
        progress.say(f"rl: stopped at version {reconciler.version}: {error}")
    finally:
        reconciler.ledger.close()
    out = run.file("stages") / "rl"
    await unwrapped(trainer.export.remote(out))
    return out, engine


async def _main(config: RLConfig, run: RunDirectory, resume: bool) -> None:
    services = Services(run.file("logs"))
    cluster: Cluster | None = None
    try:
        environments = await services.environments()
        cluster = Cluster(config.rollouts.ray_address)
        executor = cluster.executor(config.rollouts, DemonstratorConfig(), environments, resolve(config.init))
        with StageProgress() as progress:
            out, _ = await rl_stage(config, run, services, cluster, executor, progress, resume=resume)
            progress.say(f"checkpoint: {out}")
    finally:
        services.stop()
        if cluster is not None:
            cluster.close()
        run.close()


def run_rl(config: RLConfig, run: RunDirectory, *, resume: bool) -> None:
    """``etude rl``."""
    run_until_done(_main(config, run, resume))
