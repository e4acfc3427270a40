"""One whole miniature run through the command line: every stage, all four services, then resume, ledger and report.

Promises: the quickstart goes through and leaves what it says; trainer and engine agree to 1e-5 on the same version and routing;
transformers loads the final checkpoint and generates; a stopped RL run is resumed and the ledger balances;
Ctrl-C leaves no orphan.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

SMALL = [
    *("tasks.demonstrations=40", "tasks.held_out=8", "tasks.train=64", "rollouts.concurrency=12"),
    *("pretrain.data.max_files=60", "extend.data.max_files=60", "pretrain.eval_batches=1", "extend.eval_batches=1"),
    *("pretrain.stage.steps=3", "extend.stage.steps=2", "sft.stage.steps=4", "extend.stage.rows_per_step=1"),
    *("pretrain.stage.rows_per_step=4", "sft.stage.rows_per_step=4", "evals.tasks=8", "evals.samples=2"),
    *("base_evals.tasks=2", "base_evals.samples=1", "rl.steps=2", "rl.groups_per_step=2", "rl.reconciler.group_size=2"),
]


def etude(arguments: Sequence[str], folder: Path, timeout: float = 170.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "etude.cli.main", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    done = etude(["quickstart", "--run", "first", *SMALL], folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "report.html" in done.stdout
    return folder / "first"


@pytest.mark.timeout(180)
def test_every_stage_left_its_figures(run: Path) -> None:
    metrics = rows(run / "metrics.jsonl")
    stages = {row["stage"] for row in metrics}
    assert {"pretrain", "extend", "demonstrations", "sft", "rl", "memory"} <= stages
    assert [row["stage"] for row in rows(run / "evals.jsonl")] == ["base", "sft", "rl"]
    assert (run / "report.html").stat().st_size > 20_000
    phases = {row["phase"] for row in rows(run / "rollouts.jsonl")}
    assert {"demonstrations", "eval-base", "eval-sft", "rl", "eval-rl"} <= phases


def test_trainer_and_engine_agree(run: Path) -> None:
    steps = [row for row in rows(run / "metrics.jsonl") if row["stage"] == "rl"]
    assert [row["step"] for row in steps] == [1, 2]
    gaps = [float(str(row["logprob_gap_mean"])) for row in steps if "logprob_gap_mean" in row]
    assert gaps, "some segment was sampled by the trainer's own version"
    assert max(gaps) < 1e-5
    assert max(float(str(row["staleness_max"])) for row in steps if "staleness_max" in row) <= 2


def test_transformers_generates_from_the_final_checkpoint(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = run / "stages" / "rl"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "fix total in lib.py"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > prompt["input_ids"].shape[1]


def test_the_ledger_balances(run: Path) -> None:
    done = etude(["ledger", str(run)], run.parent)
    assert done.returncode == 0, done.stderr
    assert "4 trained once" in done.stdout
    assert "balances" in done.stdout


def rl(run: Path, *extra: str) -> list[str]:
    return [
        *("rl", f"init={run / 'stages' / 'sft'}", "steps=30", "groups_per_step=2", "reconciler.group_size=2"),
        *("tasks.train=64", "rollouts.concurrency=8", *extra),
    ]


def wait_for_step(path: Path, step: int, process: subprocess.Popen[bytes], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended by itself"
        if path.exists() and any(row["stage"] == "rl" and int(str(row["step"])) >= step for row in rows(path)):
            return
        time.sleep(0.2)
    pytest.fail(f"no step {step} within {seconds:.0f}s")


@pytest.mark.timeout(240)
def test_ctrl_c_leaves_nothing_and_resume_goes_on(run: Path) -> None:
    folder = run.parent
    process = subprocess.Popen(
        [sys.executable, "-m", "etude.cli.main", *rl(run, "--run", "second")], cwd=folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    wait_for_step(folder / "second" / "metrics.jsonl", 2, process)
    started = psutil.Process(process.pid).children(recursive=True)
    clock = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == 130
    assert time.monotonic() - clock < 5.0
    _, alive = psutil.wait_procs(started, timeout=5.0)
    assert [p.name() for p in alive] == []
    before = max(int(str(row["step"])) for row in rows(folder / "second" / "metrics.jsonl") if row["stage"] == "rl")
    done = etude(["rl", "--resume", "second", f"steps={before + 2}"], folder)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    steps = [int(str(row["step"])) for row in rows(folder / "second" / "metrics.jsonl") if row["stage"] == "rl"]
    assert steps[-1] == before + 2
    assert etude(["ledger", "second"], folder).returncode == 0


def test_bad_input_is_one_line_and_exit_code_2(run: Path) -> None:
    cases = {
        "already in use": ["quickstart", "--run", str(run)],
        "unknown key rl.stepz": ["quickstart", "rl.stepz=1", "--run", "third"],
        "no such file": ["rl", "missing.toml", "--run", "third"],
        "no config.json": ["rl", "init=nowhere", "--run", "fourth"],
        "nothing to resume": ["rl", "--resume", "fifth"],
    }
    for expected, arguments in cases.items():
        done = etude(arguments, run.parent)
        assert done.returncode == 2, (arguments, done.stderr)
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1, done.stderr
        assert expected in lines[0]
