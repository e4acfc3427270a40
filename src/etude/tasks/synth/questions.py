"""The understand category: questions about a repository with a short exact answer."""

from __future__ import annotations

import random

from etude.base.records import AnswerVerifier, Message
from etude.tasks.synth.draft import Draft
from etude.tasks.synth.functions import FAILED, call_text, draw_function, evaluate
from etude.tasks.synth.library import FUNCTIONS, MODULES
from etude.tasks.synth.repository import Repository, call, caller_of, line_number, module_text


def understand(rng: random.Random, repository: Repository) -> Draft | None:
    question = rng.choice((_who_calls, _which_line, _first_argument, _which_file, _what_value))
    return question(rng, repository)


def _question(text: str, files: dict[str, str], look: Message, answer: str, instance: str) -> Draft:
    solution = [look, call("finish", message=answer)]
    return Draft(text, files, solution, AnswerVerifier(accepted=(answer,)), f"understand:{instance}:{text}")


def _who_calls(rng: random.Random, repository: Repository) -> Draft | None:
    function, path = repository.function, repository.path
    user = rng.choice([name for name in FUNCTIONS if name not in {f.name for f in repository.functions}])
    files = {path: module_text([*repository.sources(rng), caller_of(function, user)])}
    text = f"which function of {path} calls {function.name}?"
    return _question(text, files, call("read", path=path), user, function.instance)


def _which_line(rng: random.Random, repository: Repository) -> Draft | None:
    function, path = repository.function, repository.path
    files = {path: module_text(repository.sources(rng))}
    text = f"on which line of {path} does {function.name} start?"
    answer = str(line_number(files[path], function.head))
    return _question(text, files, call("search", text=f"def {function.name}"), answer, function.instance)


def _first_argument(rng: random.Random, repository: Repository) -> Draft | None:
    function, path = repository.function, repository.path
    files = {path: module_text(repository.sources(rng))}
    text = f"what is the first argument of {function.name} in {path} called?"
    return _question(text, files, call("read", path=path), function.parameters[0], function.instance)


def _which_file(rng: random.Random, repository: Repository) -> Draft | None:
    used = {f.name for f in repository.functions}
    other = rng.choice([module for module in MODULES if module != repository.module])
    elsewhere = [draw_function(rng, used, repository.split) for _ in range(2)]
    files = {
        repository.path: module_text(repository.sources(rng)),
        f"{other}.py": module_text([f.source() for f in elsewhere]),
    }
    target, answer = rng.choice([(repository.function, repository.path), (elsewhere[0], f"{other}.py")])
    look = call("search", text=f"def {target.name}")
    return _question(f"which file defines {target.name}?", files, look, answer, repository.function.instance)


def _what_value(rng: random.Random, repository: Repository) -> Draft | None:
    function, path = repository.function, repository.path
    arguments = function.arguments(rng)
    value = evaluate(function.source(), function.name, arguments)
    if function.template.kinds not in ("i", "ii") or value is FAILED:
        return None
    files = {path: module_text(repository.sources(rng))}
    text = f"what does {call_text(function.name, arguments)} in {path} return?"
    return _question(text, files, call("read", path=path), repr(value), function.instance)
