"""Promise: the statistics of a group are over chains. How many segments a summary made of a chain changes no advantage."""

from __future__ import annotations

import pytest
from sample_fakes import rollout, task

from etude.algorithms.advantages import ALGORITHMS
from etude.base.records import Rollout
from etude.orchestration.reconciler import Slot
from etude.orchestration.samples import OpenGroup


def chain(attempt: int, reward: float, segments: int) -> Rollout:
    """The sampled tokens of all its segments but the last are a summary's too."""
    single = rollout(Slot(task(0), attempt, 0), (0, 0), reward=reward)
    parts = [single.segments[0].model_copy(update={"end": "summary"})] * (segments - 1) + [single.segments[0]]
    return single.model_copy(update={"segments": tuple(parts)})


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_advantages_are_one_a_chain_and_blind_to_the_number_of_segments(name: str) -> None:
    rewards = (1.0, 1.0, 0.0)
    made = []
    for segments in ((1, 1, 1), (1, 5, 2)):
        rollouts = {i: chain(i, reward, count) for i, (reward, count) in enumerate(zip(rewards, segments, strict=True))}
        made.append(OpenGroup(task(0), 0, rollouts).complete(ALGORITHMS[name].advantages).advantages)
    assert made[0] == made[1] == tuple(ALGORITHMS[name].advantages(rewards))
