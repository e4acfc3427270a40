"""What runs in training processes: the RL trainer with its publisher, and the supervised stages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from etude.agents.tools import TOOL_ARGUMENTS
from etude.base.records import RolloutGroup, Segment, WeightManifest
from etude.base.telemetry import RunDirectory
from etude.data.tokenizer import load_tokenizer
from etude.models.checkpoint import load_checkpoint
from etude.tasks.synth.split import in_training
from etude.training.pretrain import PretrainConfig, pretrain, save
from etude.training.rl import RLTrainConfig, RLTrainer
from etude.training.sft import SFTConfig, sft
from etude.weights.publisher import WeightPublisher
from etude.weights.store import Store


class TrainerProcess:
    """The RL trainer and the writer of its weight chain; one actor."""

    def __init__(self, config: RLTrainConfig, init: Path, store: str, base_every: int, keep_bases: int = 0) -> None:
        self.tokenizer = load_tokenizer(init)
        self.trainer = RLTrainer(load_checkpoint(init), config)
        self.publisher = WeightPublisher(Store(store), base_every=base_every, keep_bases=keep_bases or None)

    def resume(self, checkpoint: Path) -> tuple[int, list[str]]:
        """Load a step checkpoint; returns its version and the tasks of its last step."""
        trained = self.trainer.load(checkpoint)
        return self.trainer.version, trained

    def publish(self) -> WeightManifest:
        """Publish the current version and wait until it is in the store."""
        return self.publisher.publish(self.trainer.version, self.trainer.served_state())

    def step(self, groups: Sequence[RolloutGroup], checkpoint: Path) -> tuple[dict[str, float], WeightManifest]:
        """Train, save the step checkpoint, publish. The checkpoint comes first: it decides what a resumed run holds."""
        metrics = self.trainer.step(groups)
        clock = time.monotonic()
        self.trainer.save(checkpoint, [group.task_id for group in groups])
        metrics["checkpoint_seconds"] = time.monotonic() - clock
        clock = time.monotonic()
        manifest = self.publish()
        metrics["publish_seconds"] = time.monotonic() - clock
        metrics["changed_fraction"] = manifest.changed_fraction
        metrics["published_bytes"] = float(sum(file.num_bytes for file in manifest.files))
        return metrics, manifest

    def export(self, out: Path) -> None:
        """Write the current policy as a Hugging Face directory."""
        save(self.trainer.model, self.tokenizer, out, self.trainer.config.served_dtype)


def pretrain_stage(
    config: PretrainConfig, run: Path, out: Path, name: str, init: Path | None, texts: list[str], held_out: list[str]
) -> None:
    """A pretraining stage in a process of its own."""
    pretrain(
        config, RunDirectory(run), out, name=name, tools=TOOL_ARGUMENTS, init=init, texts=texts,
        held_out_texts=held_out, allowed=in_training,
    )  # fmt: skip


def sft_stage(config: SFTConfig, run: Path, out: Path, init: Path, segments: list[Segment]) -> None:
    """The SFT stage in a process of its own."""
    sft(config, RunDirectory(run), out, init=init, segments=segments)
