"""Seeded generation of tasks and of plain sources, split by the functions they show."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence

from etude.base.records import Category, Limits, Task
from etude.tasks.check import replay
from etude.tasks.synth.categories import MAKERS
from etude.tasks.synth.draft import Draft
from etude.tasks.synth.functions import examples
from etude.tasks.synth.library import LIBRARY
from etude.tasks.synth.repository import (
    RUNNER_PATH,
    TEST_COMMAND,
    cases,
    draw_repository,
    module_text,
    runner,
    tests_text,
)
from etude.tasks.synth.split import Split, definitions, in_split

LIMITS = Limits(max_turns=12, max_sampled_tokens=500, wall_seconds=180.0)


def generate(split: Split, count: int, seed: int, categories: Sequence[Category] = tuple(MAKERS)) -> list[Task]:
    """``count`` distinct tasks, balanced over ``categories``; the same arguments give the same tasks.

    No function that a held-out task shows or asks for, with its names and constants, occurs in a training task of any seed
    or category, nor in the training :func:`corpus`; and the reverse.
    """
    rng = random.Random(f"{split}-{seed}")
    made: dict[str, Task] = {}
    while len(made) < count:
        category = categories[len(made) % len(categories)]
        maker, templates = MAKERS[category]
        draft = maker(rng, draw_repository(rng, rng.choice(templates), split))
        if draft is not None and _belongs(draft, split):
            task = _task(category, draft)
            made.setdefault(task.id, task)
    return list(made.values())


def corpus(split: Split, count: int, seed: int) -> list[str]:
    """``count`` plain source texts of the family (a module and its tests) for continued pretraining."""
    rng = random.Random(f"corpus-{split}-{seed}")
    texts: list[str] = []
    while len(texts) < count:
        repository = draw_repository(rng, rng.choice(LIBRARY), split)
        module = module_text([f.source(comment=rng.random() < 0.8) for f in repository.functions])
        tested = [c for f in repository.functions for c in cases(f, examples(f, f.source(), rng, 2) or [])]
        texts.append(
            f"# {repository.path}\n{module}\n# {repository.test_path}\n{tests_text(repository.module, tested)}"
        )
    return texts


def _belongs(draft: Draft, split: Split) -> bool:
    """Whether the functions that were changed (the bug, the wish, the caller) lie in ``split`` as well, before and after."""
    after, _, _ = replay(draft.files, draft.solution)
    return in_split(split, definitions(draft.files)) and in_split(split, definitions(after))


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
