"""One maker per category of the report: a repository, a request, hidden checks and a reference solution.

A maker returns None when the drawn repository does not lend itself to a checkable task; the caller draws again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from etude.base.records import Category, Message, MutantsVerifier, TestsVerifier
from etude.tasks.synth.draft import Draft, Maker
from etude.tasks.synth.functions import Function, call_text, examples
from etude.tasks.synth.library import FUNCTIONS, LIBRARY, Template
from etude.tasks.synth.questions import understand
from etude.tasks.synth.repository import (
    RUNNER_PATH,
    TEST_COMMAND,
    Repository,
    call,
    caller_of,
    cases,
    edit,
    equals,
    line_number,
    module_text,
    other_cases,
    runner,
    tests_text,
)
from etude.tasks.synth.split import in_split, split_of


def _tests(path: str, text: str) -> TestsVerifier:
    return TestsVerifier(command=TEST_COMMAND, files={path: text, RUNNER_PATH: runner()})


def _solution(path: str, edits: Sequence[Message], message: str) -> list[Message]:
    """Read, edit, run, finish."""
    return [call("read", path=path), *edits, call("run"), call("finish", message=message)]


def debugging(rng: random.Random, repository: Repository) -> Draft | None:
    function = repository.function
    line, bug = rng.choice(function.template.bugs)
    broken, good = function.with_line(line, bug), function.body[line]
    wrong = broken[line + 1]
    shown = examples(function, function.source(), rng, 2, [broken])
    hidden = examples(function, function.source(), rng, 3)
    if wrong == good or shown is None or hidden is None:
        return None
    sources = repository.sources(rng)
    explained = rng.random() < 0.7
    sources[repository.subject] = [broken[0], *([f"    # {function.intention}"] if explained else []), *broken[1:]]
    text = module_text(sources)
    visible = (other_cases(repository, rng) if rng.random() < 0.5 else []) + cases(function, shown)
    name, path = function.name, repository.path
    instruction = rng.choice(
        (
            f"fix {name} in {path}",
            f"test_{name} fails, fix it",
            f"{name} in {path} should return {function.intention}, but it does not",
            f"{name} is wrong: it should return {function.intention}",
        )
    )
    at = line_number(text, wrong, line_number(text, function.head))
    return Draft(
        instruction,
        {path: text, repository.test_path: tests_text(repository.module, visible)},
        _solution(path, [edit(path, text, at, at, [good])], f"fixed {name}"),
        _tests(repository.test_path, tests_text(repository.module, visible + cases(function, hidden))),
        f"debugging:{function.instance}:{line}:{function.fill(bug).strip()}",
    )


def new_feature(rng: random.Random, repository: Repository) -> Draft | None:
    function = repository.function
    shown, hidden = examples(function, function.source(), rng, 2), examples(function, function.source(), rng, 3)
    if not repository.others or shown is None or hidden is None:
        return None
    text = module_text([s for i, s in enumerate(repository.sources(rng)) if i != repository.subject])
    path, visible = repository.path, cases(function, shown)
    instruction = rng.choice(
        (
            f"add {function.signature} to {path}: return {function.intention}",
            f"{path} needs a function {function.signature} that returns {function.intention}",
        )
    )
    end = text.count("\n")
    hidden_text = tests_text(repository.module, visible + cases(function, hidden) + other_cases(repository, rng))
    return Draft(
        instruction,
        {path: text, repository.test_path: tests_text(repository.module, visible)},
        _solution(path, [edit(path, text, end + 1, end, ["", *function.source()])], f"added {function.name}"),
        _tests(repository.test_path, hidden_text),
        f"new_feature:{function.instance}",
    )


def iterate(rng: random.Random, repository: Repository) -> Draft | None:
    function = repository.function
    wish, line, new = rng.choice(function.template.changes)
    wanted, old = function.with_line(line, new), function.body[line]
    shown, hidden = examples(function, wanted, rng, 2, [function.source()]), examples(function, wanted, rng, 3)
    if wanted[line + 1] == old or shown is None or hidden is None:
        return None
    text = module_text(repository.sources(rng))
    name, path, wish = function.name, repository.path, function.fill(wish)
    instruction = rng.choice((f"{name} in {path}: {wish}", f"change {name} in {path}: {wish}", f"in {name}, {wish}"))
    at = line_number(text, old, line_number(text, function.head))
    visible = cases(function, shown)
    return Draft(
        instruction,
        {path: text, repository.test_path: tests_text(repository.module, visible)},
        _solution(path, [edit(path, text, at, at, [wanted[line + 1]])], f"changed {name}"),
        _tests(repository.test_path, tests_text(repository.module, visible + cases(function, hidden))),
        f"iterate:{function.instance}:{line}:{function.fill(new).strip()}",
    )


def refactor(rng: random.Random, repository: Repository) -> Draft | None:
    function = repository.function
    names = _renaming(rng, repository)
    if names is None:
        return None
    new, user = names
    caller, renamed = caller_of(function, user), Function(function.template, new, function.slots)
    arguments = ", ".join(function.parameters)
    text = module_text([*repository.sources(rng), caller])
    shown = examples(renamed, renamed.source(), rng, 1)
    if shown is None:
        return None
    module, path = repository.module, repository.path
    (arguments_shown, value) = shown[0]
    tests = (
        f"import {module}\n\n\ndef test_{new}():\n    assert {module}.{equals(renamed, shown[0])}\n"
        f"    assert {module}.{call_text(user, arguments_shown)} == {value!r}\n"
        f"    assert not hasattr({module}, '{function.name}')\n"
    )
    instruction = rng.choice(
        (f"rename {function.name} to {new} in {path}", f"call {function.name} {new} instead, in {path}")
    )
    head, use = line_number(text, function.head), line_number(text, caller[1])
    edits = [
        edit(path, text, head, head, [renamed.head]),
        edit(path, text, use, use, [f"    return {new}({arguments})"]),
    ]
    return Draft(
        instruction,
        {path: text, repository.test_path: tests},
        _solution(path, edits, f"renamed {function.name} to {new}"),
        _tests(repository.test_path, tests),
        f"refactor:{function.instance}:{new}",
    )


def _renaming(rng: random.Random, repository: Repository) -> tuple[str, str] | None:
    """(new name, name of a caller) such that the definitions before and after lie on the repository's side of the split."""
    function, split = repository.function, repository.split
    taken = {f.name for f in repository.functions} | {str(value) for value in function.slots.values()}
    free = [name for name in FUNCTIONS if name not in taken]
    for new in rng.sample(free, len(free)):
        renamed = Function(function.template, new, function.slots)
        if split_of(renamed.source()) == split:
            for user in rng.sample(free, len(free)):
                if user != new and in_split(split, [caller_of(function, user), caller_of(renamed, user)]):
                    return new, user
    return None


def testing(rng: random.Random, repository: Repository) -> Draft | None:
    function = repository.function
    faulty = [function.with_line(line, bug) for line, bug in function.template.bugs]
    faulty = [source for source in faulty if source != function.source()]
    shown = examples(function, function.source(), rng, 1, faulty)
    if not faulty or shown is None:
        return None
    originals = [f.source() for f in repository.functions]
    text, path, test_path = module_text(originals), repository.path, repository.test_path
    mutants = [module_text([m if i == repository.subject else s for i, s in enumerate(originals)]) for m in faulty]
    example = call_text(function.name, shown[0][0])
    instruction = rng.choice(
        (
            f"write {test_path} for {function.name} in {path}, e.g. {example} is {shown[0][1]!r}",
            f"test that {example} in {path} is {shown[0][1]!r}, in {test_path}",
        )
    )
    head = [f"from {repository.module} import {function.name}", "", "", f"def test_{function.name}():"]
    solution = [
        edit(test_path, "", 1, 0, [*head, f"    assert {equals(function, shown[0])}"]),
        call("run"),
        call("finish", message=f"tested {function.name}"),
    ]
    verifier = MutantsVerifier(command=TEST_COMMAND, path=path, original=text, mutants=tuple(mutants))
    return Draft(instruction, {path: text}, solution, verifier, f"testing:{function.instance}:{example}")


def documentation(rng: random.Random, repository: Repository) -> Draft | None:
    function = repository.function
    shown = examples(function, function.source(), rng, 1)
    if shown is None:
        return None
    text, module, path = module_text(repository.sources(rng)), repository.module, repository.path
    wanted = function.intention
    tests = (
        f"import {module}\n\n\ndef test_{function.name}():\n    assert {module}.{function.name}.__doc__ == {wanted!r}\n"
        f"    assert {module}.{equals(function, shown[0])}\n"
    )
    instruction = rng.choice(
        (f"add the docstring '{wanted}' to {function.name} in {path}", f"document {function.name} in {path}: {wanted}")
    )
    head = line_number(text, function.head)
    return Draft(
        instruction,
        {path: text, repository.test_path: tests},
        _solution(path, [edit(path, text, head + 1, head, [f'    """{wanted}"""'])], f"documented {function.name}"),
        _tests(repository.test_path, tests),
        f"documentation:{function.instance}",
    )


def optimise(rng: random.Random, repository: Repository) -> Draft | None:
    function = repository.function
    shown = examples(function, function.source(), rng, 2)
    if shown is None:
        return None
    sources = repository.sources(rng)
    sources[repository.subject] = function.source()
    text, path = module_text(sources), repository.path
    tests = (
        f"import ast\nfrom {repository.module} import {function.name}\n\n\ndef test_{function.name}():\n"
        + "".join(f"    assert {equals(function, example)}\n" for example in shown)
        + f"\n\ndef test_no_loop():\n    tree = ast.parse(open('{path}').read())\n"
        + f"    f = next(n for n in tree.body if getattr(n, 'name', '') == '{function.name}')\n"
        + "    assert not [n for n in ast.walk(f) if isinstance(n, (ast.For, ast.While))]\n"
    )
    name, head = function.name, line_number(text, function.head)
    instruction = rng.choice(
        (f"{name} in {path} needs no loop, use a builtin", f"make {name} in {path} faster with a builtin, no loop")
    )
    simple = edit(path, text, head + 1, head + len(function.body), ["    " + function.fill(function.template.simple)])
    return Draft(
        instruction,
        {path: text, repository.test_path: tests},
        _solution(path, [simple], f"simplified {name}"),
        _tests(repository.test_path, tests),
        f"optimise:{function.instance}",
    )


def _any(template: Template) -> bool:
    return True


def _changeable(template: Template) -> bool:
    return bool(template.changes)


def _loops(template: Template) -> bool:
    return bool(template.simple)


MAKERS: dict[Category, tuple[Maker, list[Template]]] = {
    category: (maker, [template for template in LIBRARY if fits(template)])
    for category, maker, fits in (
        (Category.DEBUGGING, debugging, _any),
        (Category.NEW_FEATURE, new_feature, _any),
        (Category.ITERATE, iterate, _changeable),
        (Category.REFACTOR, refactor, _any),
        (Category.TESTING, testing, _any),
        (Category.UNDERSTAND, understand, _any),
        (Category.DOCUMENTATION, documentation, _any),
        (Category.OPTIMISE, optimise, _loops),
    )
}
"""Category -> its maker and the templates it can be made from."""
