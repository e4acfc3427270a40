"""The rollout executor: a Ray actor that runs many rollouts at once against the services it is told about.

It makes no decision about samples: it is handed orders and returns rollouts; the reconciler (or an evaluation) owns them.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from etude.agents.demonstrator import Demonstrator, DemonstratorConfig
from etude.agents.loop import RolloutRunner
from etude.agents.scripted import NoopAgent, OracleAgent, Policy, ScriptedSampler
from etude.agents.tools import TOOL_ARGUMENTS
from etude.algorithms.length_penalty import concave_penalty
from etude.base.protocols import Sampler
from etude.base.records import Rollout, Task
from etude.data.chat import ChatCodec
from etude.data.tokenizer import load_tokenizer
from etude.environments.client import EnvironmentsClient
from etude.inference.client import InferenceClient
from etude.orchestration.config import RolloutsConfig
from etude.orchestration.services import Address
from etude.rewards.terms import score
from etude.rewards.verifiers import verify

Who = Literal["model", "demonstrator", "oracle", "noop"]


@dataclass(frozen=True)
class Order:
    """One rollout to run."""

    task: Task
    rollout_id: str
    seed: int
    who: Who = "model"
    engine: Address | None = None
    """Needed by ``model``."""
    temperature: float | None = None
    """None takes the harness's own."""


class RolloutExecutor:
    """Runs orders concurrently; one HTTP connection pool per service."""

    def __init__(
        self, config: RolloutsConfig, demonstrator: DemonstratorConfig, environments: Address, tokenizer: Path
    ) -> None:
        self.config, self.demonstrator = config, demonstrator
        self.codec = ChatCodec(load_tokenizer(tokenizer), TOOL_ARGUMENTS)
        self.pods = EnvironmentsClient(environments.url, environments.key)
        self._engines: dict[Address, InferenceClient] = {}

    async def run(self, order: Order) -> Rollout:
        """Never raises for a fault of a service: that is the rollout's outcome."""
        harness = self.config.harness
        if order.temperature is not None:
            harness = harness.model_copy(update={"temperature": order.temperature})
        runner = RolloutRunner(
            self._sampler(order),
            self.pods,
            self.codec,
            harness,
            verify=verify,
            score=functools.partial(score, config=self.config.reward, penalty=concave_penalty),
            pod_limits=self.config.pod,
        )
        return await runner.run(order.task, rollout_id=order.rollout_id, seed=order.seed)

    def _sampler(self, order: Order) -> Sampler:
        if order.who == "model":
            assert order.engine is not None
            if order.engine not in self._engines:
                self._engines[order.engine] = InferenceClient(order.engine.url, order.engine.key)
            return self._engines[order.engine]
        policy: Policy
        if order.who == "demonstrator":
            policy = Demonstrator(order.task, random.Random(order.seed), self.demonstrator)
        else:
            policy = OracleAgent(order.task) if order.who == "oracle" else NoopAgent()
        return ScriptedSampler(policy, self.codec)
