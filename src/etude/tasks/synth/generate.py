"""Seeded generation of tasks and of plain sources, split by template instance."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Literal

from etude.base.records import Category, Limits, Task
from etude.tasks.synth.categories import MAKERS, Draft
from etude.tasks.synth.functions import examples
from etude.tasks.synth.repository import (
    RUNNER_PATH,
    TEST_COMMAND,
    cases,
    draw_repository,
    module_text,
    runner,
    tests_text,
)

Split = Literal["train", "heldout"]
HELD_OUT_SHARE = 5
"""One template instance in this many is held out, whatever the seed."""
LIMITS = Limits(max_turns=10, max_sampled_tokens=400, wall_seconds=180.0)


def generate(split: Split, count: int, seed: int, categories: Sequence[Category] = tuple(MAKERS)) -> list[Task]:
    """``count`` distinct tasks, balanced over ``categories``; the same arguments give the same tasks.

    A held-out task shares no template instance (template with its names, constants and change) with any training task.
    """
    rng = random.Random(f"{split}-{seed}")
    made: dict[str, Task] = {}
    while len(made) < count:
        category = categories[len(made) % len(categories)]
        maker, templates = MAKERS[category]
        draft = maker(rng, draw_repository(rng, rng.choice(templates)))
        if draft is not None and _split(draft.instance) == split:
            task = _task(category, draft)
            made.setdefault(task.id, task)
    return list(made.values())


def corpus(split: Split, count: int, seed: int) -> list[str]:
    """``count`` plain source texts of the family (a module and its tests) for continued pretraining."""
    rng = random.Random(f"corpus-{split}-{seed}")
    _, templates = MAKERS[Category.DEBUGGING]
    texts: list[str] = []
    while len(texts) < count:
        repository = draw_repository(rng, rng.choice(templates))
        if any(_split(f"{key}:{f.instance}") != split for f in repository.functions for key in ("new_feature",)):
            continue
        module = module_text([f.source(comment=rng.random() < 0.8) for f in repository.functions])
        tested = [c for f in repository.functions for c in cases(f, examples(f, f.source(), rng, 2) or [])]
        texts.append(
            f"# {repository.path}\n{module}\n# {repository.test_path}\n{tests_text(repository.module, tested)}"
        )
    return texts


def _split(instance: str) -> Split:
    digest = hashlib.sha256(instance.encode()).digest()
    return "heldout" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def _task(category: Category, draft: Draft) -> Task:
    files = {**draft.files, RUNNER_PATH: runner()}
    body = json.dumps([category, draft.instruction, draft.files], sort_keys=True)
    return Task(
        id=f"{category.value}-{hashlib.sha256(body.encode()).hexdigest()[:12]}",
        category=category,
        instruction=draft.instruction,
        files=files,
        verifier=draft.verifier,
        solution=tuple(draft.solution),
        test_command=TEST_COMMAND,
        limits=LIMITS,
        template=draft.instance,
    )
