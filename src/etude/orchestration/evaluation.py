"""``etude eval``: a checkpoint against held-out tasks, on an engine of its own."""

from __future__ import annotations

from etude.agents.demonstrator import DemonstratorConfig
from etude.base.records import Rollout
from etude.base.telemetry import RunDirectory
from etude.orchestration.checkpoints import resolve
from etude.orchestration.cluster import Cluster
from etude.orchestration.config import EvalRunConfig
from etude.orchestration.evaluate import evaluate
from etude.orchestration.lifetime import run_until_done
from etude.orchestration.progress import StageProgress
from etude.orchestration.services import Services
from etude.orchestration.stages import with_services
from etude.tasks.synth import generate


def run_eval(config: EvalRunConfig, run: RunDirectory) -> None:
    """Evaluate ``config.init`` and append the summary to the run."""

    async def body(services: Services, cluster: Cluster, progress: StageProgress) -> None:
        checkpoint = resolve(config.init)
        tasks = generate("heldout", config.tasks.held_out, 0)
        environments = await services.environments()
        engine = await services.engine(checkpoint, "", config.rollouts.engine, name="engine")
        executor = cluster.executor(config.rollouts, DemonstratorConfig(), environments, checkpoint)
        done: list[bool] = []
        progress.begin("evaluation", min(config.evals.tasks, len(tasks)) * config.evals.samples)

        def on_done(rollout: Rollout) -> None:
            done.append(bool(rollout.passed))
            progress.update("evaluation", len(done), f"pass@1 {sum(done) / len(done):.3f}")

        await evaluate(
            executor, engine.address, tasks, config.evals, run, stage="eval", step=0, seed=config.seed,
            concurrency=config.rollouts.concurrency, on_done=on_done,
        )  # fmt: skip

    run_until_done(with_services(run, config.rollouts.ray_address, body))
