"""The command line: instant help, one line an error, arguments that mean what they say."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.base.config import Config
from etude.base.errors import CheckpointError, ConfigError, ServiceError, UserError
from etude.cli.commands import COMMANDS
from etude.cli.failures import guarded
from etude.cli.launch import begin, configure, reopen, split_arguments
from etude.cli.main import main

SOURCE = Path(__file__).parents[2] / "src"


class Inner(Config):
    steps: int = 1


class Outer(Config):
    seed: int = 0
    name: str = "a"
    stage: Inner = Inner()


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter that sees this source tree."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def raiser(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def test_help_is_instant_and_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from etude.cli.main import main; code = main(['--help'])\n"
        "heavy = {'torch', 'ray', 'numpy', 'pydantic', 'typer', 'transformers'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        done = fresh(code)
        times.append(time.perf_counter() - begun)
        assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert min(times) < 1.0
    for name, command in COMMANDS.items():
        assert f"{name} " in done.stdout
        assert command.help in done.stdout


def test_report_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from etude.cli.main import main; code = main(['report', '--help'])\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = fresh(code)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "Example: etude report" in done.stdout


def test_every_command_of_the_table_has_its_file_with_an_example() -> None:
    for name, command in COMMANDS.items():
        path = SOURCE / (command.module.replace(".", "/") + ".py")
        assert f"Example: etude {name}" in path.read_text()


@pytest.mark.parametrize("arguments", [[], ["-h"], ["help"]])
def test_no_command_shows_the_overview(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: etude COMMAND" in capsys.readouterr().out


def test_an_unknown_command_is_one_line_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reprot"]) == 2
    assert capsys.readouterr().err == "error: unknown command reprot; did you mean report?\n"
    assert main(["xyzzy"]) == 2
    assert "known: quickstart, pretrain" in capsys.readouterr().err


def test_report_writes_and_prints_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evals.jsonl").write_text(
        json.dumps({"stage": "sft", "pass_at_1": 0.25, "low": 0.2, "high": 0.3}) + "\n"
    )
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "After SFT" in out
    assert "25.0% (20.0 to 30.0)" in out
    assert f"report: {tmp_path / 'report.html'}" in out
    assert (tmp_path / "report.html").exists()


def test_report_of_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: run directory {tmp_path / 'none'}: holds none of")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("recipe r.toml: unknown key x"), 2, "error: recipe r.toml: unknown key x"),
        (CheckpointError("checkpoint c: no config.json\nmore"), 2, "error: checkpoint c: no config.json"),
        (ServiceError("inference is gone"), 1, "error: inference is gone"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/runs/a"),
            2,
            "error: no space left on the disk of /runs/a; free some",
        ),
        (OSError(errno.EADDRINUSE, "Address already in use"), 2, "error: address already in use"),
        (
            ModuleNotFoundError("No module named 'obstore'", name="obstore.store"),
            2,
            "error: dependency obstore is missing; `pip install obstore`",
        ),
    ],
)
def test_each_known_failure_is_one_line_with_its_exit_code(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(raiser(error)) == code
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_an_error_of_ours_that_came_through_ray_is_told_as_ours(capsys: pytest.CaptureFixture[str]) -> None:
    class RemoteError(CheckpointError):
        """Like the class Ray makes: a subclass of the cause whose text is a traceback."""

        cause = CheckpointError("checkpoint c: torn")

    assert guarded(raiser(RemoteError("\x1b[36mray::worker()\x1b[39m\n  File ..."))) == 2
    assert capsys.readouterr().err == "error: checkpoint c: torn\n"


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raiser(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_an_unexpected_error_says_where_its_traceback_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raiser(ZeroDivisionError("by zero"))) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: unexpected ZeroDivisionError: by zero"
    path = Path(second.removeprefix("traceback: "))
    assert "ZeroDivisionError: by zero" in path.read_text()
    path.unlink()


def test_a_missing_module_of_etude_itself_is_a_bug_not_a_dependency(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raiser(ModuleNotFoundError("No module named 'etude.x'", name="etude.x"))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "pip install" not in lines[0]
    Path(lines[1].removeprefix("traceback: ")).unlink()


def test_debugging_prints_the_traceback() -> None:
    code = "from etude.cli.failures import guarded\nimport sys\nsys.exit(guarded(lambda: 1 / 0))"
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "ETUDE_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "error: unexpected ZeroDivisionError" in done.stderr


def test_arguments_split_into_recipe_and_overrides() -> None:
    found = split_arguments(["recipes/a=b/r.toml", "stage.steps=3"], ["seed=1"])
    assert found == (Path("recipes/a=b/r.toml"), ["stage.steps=3", "seed=1"])
    assert split_arguments(None, None) == (None, [])
    with pytest.raises(ConfigError, match=r"more than one recipe: a\.toml, b\.toml"):
        split_arguments(["a.toml", "b.toml"], None)


def test_overrides_win_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("seed = 1\n[stage]\nsteps = 2\n")
    config = configure(Outer, [str(recipe), "stage.steps=3"], ["name=b c"])
    assert config == Outer(seed=1, name="b c", stage=Inner(steps=3))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["stage.stepz=3"], r"stage\.stepz"),
        (["stage.steps=many"], r"stage\.steps"),
        (["missing.toml"], r"missing\.toml"),
    ],
)
def test_a_bad_recipe_names_its_key(arguments: list[str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        configure(Outer, arguments, None)


def test_a_new_run_keeps_its_resolved_recipe_and_is_not_started_twice(tmp_path: Path) -> None:
    config, directory = begin(Outer, "rl", ["seed=4"], None, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "recipe.json").read_text()) == config.model_dump(mode="json")
    assert directory.path == tmp_path / "run"
    with pytest.raises(UserError, match="already in use"):
        begin(Outer, "rl", None, None, tmp_path / "run")


def test_a_bad_recipe_leaves_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        begin(Outer, "rl", ["sed=4"], None, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_has_its_own_recipe(tmp_path: Path) -> None:
    begin(Outer, "rl", ["seed=4", "stage.steps=7"], None, tmp_path / "run")
    config, _ = reopen(Outer, ["stage.steps=9"], None, tmp_path / "run")
    assert config == Outer(seed=4, stage=Inner(steps=9))
    assert reopen(Outer, None, None, tmp_path / "run")[0] == config
    with pytest.raises(ConfigError, match="keeps its own"):
        reopen(Outer, ["other.toml"], None, tmp_path / "run")
    with pytest.raises(UserError, match="nothing to resume"):
        reopen(Outer, None, None, tmp_path / "none")


def test_a_torn_recipe_of_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(UserError, match=r"recipe .*recipe\.json: cannot be read"):
        reopen(Outer, None, None, tmp_path)
