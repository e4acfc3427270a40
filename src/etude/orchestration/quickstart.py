"""``etude quickstart``: the whole life of a small model on one machine, in about ten minutes on two cores.

    base ─> continued pretraining ─> long context ─> SFT with MTP ─> asynchronous RL
              demonstrations, base evaluation (beside it)     evaluation          evaluation

Pretraining takes one core; meanwhile the harness makes the demonstrations and the base is evaluated on the other.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil

from etude.base.records import Rollout, Segment
from etude.base.telemetry import RunDirectory
from etude.evals.records import EvalSummary
from etude.orchestration.checkpoints import ASSETS, resolve
from etude.orchestration.cluster import Cluster, Executor
from etude.orchestration.config import EvalConfig, QuickstartConfig
from etude.orchestration.evaluate import evaluate
from etude.orchestration.lifetime import run_until_done
from etude.orchestration.progress import StageProgress
from etude.orchestration.rl import rl_stage
from etude.orchestration.services import Services
from etude.orchestration.stages import demonstrations, finetuning, pretraining, with_services
from etude.tasks.synth import corpus, generate

CORPUS_TEXTS = 2000
RECIPE = ASSETS / "quickstart.toml"
"""What `etude quickstart` runs when no recipe is given."""


class Quickstart:
    """One quickstart run."""

    def __init__(
        self, config: QuickstartConfig, run: RunDirectory, services: Services, cluster: Cluster, progress: StageProgress
    ) -> None:
        self.config, self.run, self.services, self.cluster, self.progress = config, run, services, cluster, progress
        self.held_out = generate("heldout", config.tasks.held_out, 0)

    async def go(self) -> None:
        config, run = self.config, self.run
        base = resolve("base")
        memory = asyncio.create_task(_watch_memory(run))
        environments = await self.services.environments()
        executor = self.cluster.executor(config.rollouts, config.demonstrator, environments, base)
        long_context, segments = await asyncio.gather(self._pretrain(base), self._beside(executor, base))
        tuned = await finetuning(
            self.cluster, run, config.sft, init=long_context, segments=segments, progress=self.progress
        )
        await self._evaluate(executor, tuned, "sft", config.evals)
        rl = config.rl.model_copy(
            update={"init": str(tuned), "seed": config.seed, "rollouts": config.rollouts, "tasks": config.tasks}
        )
        final, engine = await rl_stage(rl, run, self.services, self.cluster, executor, self.progress, resume=False)
        await engine.release()
        await self._evaluate(executor, final, "rl", config.evals, step=rl.steps)
        memory.cancel()

    async def _pretrain(self, base: Path) -> Path:
        """Continued pretraining, then the long-context phase."""
        texts = corpus("train", CORPUS_TEXTS, self.config.seed)
        held_out = corpus("heldout", 400, self.config.seed)
        first = await pretraining(
            self.cluster, self.run, self.config.pretrain, name="pretrain", title="continued pretraining", init=base,
            texts=texts, held_out_texts=held_out, progress=self.progress,
        )  # fmt: skip
        return await pretraining(
            self.cluster, self.run, self.config.extend, name="extend", title="long context", init=first, texts=texts,
            held_out_texts=held_out, progress=self.progress,
        )  # fmt: skip

    async def _beside(self, executor: Executor, base: Path) -> list[Segment]:
        """What the other core does meanwhile."""
        segments = await demonstrations(
            executor, self.run, self.config.tasks, seed=self.config.seed,
            concurrency=self.config.rollouts.concurrency // 2 or 1, progress=self.progress,
        )  # fmt: skip
        await self._evaluate(executor, base, "base", self.config.base_evals)
        return segments

    async def _evaluate(
        self, executor: Executor, checkpoint: Path, stage: str, config: EvalConfig, step: int = 0
    ) -> EvalSummary:
        """Held-out evaluation on an engine of its own."""
        title = f"evaluation ({stage})"
        engine = await self.services.engine(checkpoint, "", self.config.rollouts.engine, name=f"eval-{stage}")
        self.progress.begin(title, min(config.tasks, len(self.held_out)) * config.samples)
        done: list[bool] = []

        def on_done(rollout: Rollout) -> None:
            done.append(bool(rollout.passed))
            self.progress.update(title, len(done), f"pass@1 {sum(done) / len(done):.3f}")

        try:
            return await evaluate(
                executor, engine.address, self.held_out, config, self.run, stage=stage, step=step,
                seed=self.config.seed, concurrency=self.config.rollouts.concurrency, on_done=on_done,
            )  # fmt: skip
        finally:
            await engine.release()


async def _watch_memory(run: RunDirectory, every: float = 5.0) -> None:
    """Log the memory of all processes of the run (proportional set size, so that shared pages count once), in MiB."""
    peak = 0.0
    step = 0
    while True:
        total = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except (psutil.Error, AttributeError):
                continue
        peak = max(peak, total / 2**20)
        step += 1
        run.metrics("memory", step, mib=total / 2**20, peak_mib=peak)
        await asyncio.sleep(every)


def run_quickstart(config: QuickstartConfig, run: RunDirectory) -> None:
    """Run every stage; the caller prints the table and writes the report."""

    async def body(services: Services, cluster: Cluster, progress: StageProgress) -> None:
        await Quickstart(config, run, services, cluster, progress).go()

    run_until_done(with_services(run, config.rollouts.ray_address, body))
