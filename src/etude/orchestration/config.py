"""Whole-run configuration: what a recipe may hold. Composes the configs that the components own."""

from __future__ import annotations

from pydantic import Field, model_validator

from etude.agents.config import HarnessConfig
from etude.agents.demonstrator import DemonstratorConfig
from etude.base.config import Config
from etude.base.records import PodLimits
from etude.inference.engine import EngineConfig
from etude.orchestration.reconciler import ReconcilerConfig
from etude.rewards.terms import RewardConfig
from etude.training.pretrain import PretrainConfig
from etude.training.rl import RLTrainConfig
from etude.training.sft import SFTConfig


class RolloutsConfig(Config):
    """What every rollout of a run shares: harness, rewards, pods, engine."""

    harness: HarnessConfig = HarnessConfig()
    reward: RewardConfig = RewardConfig()
    pod: PodLimits = PodLimits()
    engine: EngineConfig = EngineConfig()
    concurrency: int = Field(48, ge=1)
    """Rollouts in flight at once."""
    ray_address: str = ""
    """Address of an existing Ray cluster; empty starts a local one."""


class TasksConfig(Config):
    """Which generated tasks a run uses."""

    demonstrations: int = Field(1200, ge=0)
    """Training tasks that are shown to the model in SFT (none of them is used in RL)."""
    train: int = Field(2000, ge=1)
    """Training tasks of RL."""
    held_out: int = Field(200, ge=1)
    """Tasks that share no template instance with any training task."""


class EvalConfig(Config):
    """A held-out evaluation."""

    tasks: int = Field(200, ge=1)
    samples: int = Field(8, ge=1)
    """Attempts at each task: pass@1 is their mean, best-of-k comes from the same attempts."""
    temperature: float = Field(1.0, ge=0.0)


class RLConfig(Config):
    """An asynchronous RL run."""

    seed: int = 0
    init: str = "sft"
    """Checkpoint directory to start from."""
    steps: int = Field(40, ge=1)
    groups_per_step: int = Field(8, ge=1)
    train: RLTrainConfig = RLTrainConfig()
    reconciler: ReconcilerConfig = ReconcilerConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    tasks: TasksConfig = TasksConfig()
    base_every: int = Field(25, ge=1)
    """Every so many versions the weight chain starts from a full base."""
    keep_bases: int = Field(0, ge=0)
    """Newest bases that are kept, with all that follows and whatever a registered engine needs; 0 keeps every version."""
    eval_every: int = Field(0, ge=0)
    """Evaluate every so many steps while training; 0 never."""
    evals: EvalConfig = EvalConfig(tasks=48, samples=4)
    deadline_seconds: float = Field(300.0, gt=0)
    """Bound of every wait: for groups, for a step, for a weight update."""

    @model_validator(mode="after")
    def _enough_tasks(self) -> RLConfig:
        if self.steps * self.groups_per_step > self.tasks.train:
            raise ValueError(
                f"steps * groups_per_step is {self.steps * self.groups_per_step}, but tasks.train is {self.tasks.train} "
                "and no prompt is trained twice; lower steps or raise tasks.train"
            )
        return self


class QuickstartConfig(Config):
    """The whole life of a model on one machine: ``etude quickstart``."""

    seed: int = 0
    tasks: TasksConfig = TasksConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    pretrain: PretrainConfig = PretrainConfig()
    extend: PretrainConfig = PretrainConfig()
    demonstrator: DemonstratorConfig = DemonstratorConfig()
    sft: SFTConfig = SFTConfig()
    rl: RLConfig = RLConfig()
    evals: EvalConfig = EvalConfig()
    base_evals: EvalConfig = EvalConfig(tasks=40, samples=1)
    """The base cannot use the harness yet; a small sample shows it."""


class PretrainRunConfig(PretrainConfig):
    """``etude pretrain``: PretrainConfig as a recipe of its own."""

    stage_name: str = "pretrain"
    """Stage under which the metrics are logged."""
    texts: int = Field(0, ge=0)
    """Generated repository files for the ``texts`` share of the mixture."""


class SFTRunConfig(Config):
    """``etude sft``: demonstrations made on the spot, then SFT."""

    seed: int = 0
    init: str = "base"
    tasks: TasksConfig = TasksConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    demonstrator: DemonstratorConfig = DemonstratorConfig()
    sft: SFTConfig = SFTConfig()


class EvalRunConfig(Config):
    """``etude eval``: a checkpoint against held-out tasks."""

    seed: int = 0
    init: str = "base"
    tasks: TasksConfig = TasksConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    evals: EvalConfig = EvalConfig()
