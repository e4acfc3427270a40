"""Ray: a local instance by default, an existing cluster by address. The only file that imports it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import ray

from etude.agents.demonstrator import DemonstratorConfig
from etude.base.errors import EtudeError, ServiceError, UserError
from etude.base.records import Rollout
from etude.orchestration.config import RolloutsConfig
from etude.orchestration.executor import Order, RolloutExecutor
from etude.orchestration.services import Address
from etude.orchestration.trainer import TrainerProcess
from etude.training.rl import RLTrainConfig

T = TypeVar("T")


class Cluster:
    """Starts (or joins) Ray and makes the actors of a run."""

    def __init__(self, address: str = "") -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # the trainer must not starve behind the engine
        warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address:
                ray.init(address=address, **options)
            else:
                ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=256 << 20, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"ray: cannot start or join {address or 'a local instance'}: {error}") from None

    def executor(
        self, config: RolloutsConfig, demonstrator: DemonstratorConfig, environments: Address, tokenizer: Path
    ) -> Executor:
        actor = ray.remote(RolloutExecutor).options(num_cpus=0.5, max_concurrency=max(config.concurrency, 1) * 2)
        return Executor(actor.remote(config, demonstrator, environments, tokenizer))

    def trainer(self, config: RLTrainConfig, init: Path, store: str, base_every: int, keep_bases: int) -> Any:
        """Handle of a TrainerProcess actor."""
        return ray.remote(TrainerProcess).options(num_cpus=1).remote(config, init, store, base_every, keep_bases)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a process of its own, which ends with it, and wait. Its EtudeErrors come through as they are."""
        remote = ray.remote(num_cpus=1, max_retries=0, max_calls=1)(function)
        result: T = await unwrapped(remote.remote(*arguments))
        return result

    def close(self) -> None:
        ray.shutdown()


class Executor:
    """Typed face of a RolloutExecutor actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def run(self, order: Order) -> Rollout:
        result: Rollout = await unwrapped(self._actor.run.remote(order))
        return result


async def unwrapped(reference: Any) -> Any:
    """Await a Ray result; an EtudeError of the remote side is raised as itself, a dead process as ServiceError."""
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(getattr(error, "cause", None), EtudeError) else None
        if cause is not None:
            raise cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise ServiceError(f"a process of the run died: {str(error).splitlines()[0]}") from None
