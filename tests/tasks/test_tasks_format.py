"""Promises of the task formats: both give back the same records, and a bad set is refused with the file named."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.base.errors import UserError
from etude.base.records import AnswerVerifier, Category, Message, Task, ToolCall
from etude.tasks.format import load_folder, load_folders, load_jsonl, save_folder, save_folders, save_jsonl
from etude.tasks.synth import generate


def small_task(instruction: str = "fix it", files: dict[str, str] | None = None, name: str = "t-1") -> Task:
    solution = (Message(role="assistant", calls=(ToolCall(name="finish", arguments={"message": "é\n"}),)),)
    return Task(
        id=name, category=Category.UNDERSTAND, instruction=instruction, files=files or {},
        verifier=AnswerVerifier(accepted=("a",)), solution=solution, tags=("x",),
    )  # fmt: skip


def test_generated_tasks_come_back(tmp_path: Path) -> None:
    tasks = sorted(generate("train", 40, 5), key=lambda task: task.id)
    save_jsonl(tmp_path / "set.jsonl", tasks)
    assert load_jsonl(tmp_path / "set.jsonl") == tasks
    save_folders(tmp_path / "set", tasks)
    assert load_folders(tmp_path / "set") == tasks


def test_a_folder_reads_as_documented(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, small_task(files={"lib.py": "a = 1\n", ".hidden/run.py": "x"}))
    assert (folder / "instruction.md").read_text() == "fix it\n"
    assert (folder / "workspace/lib.py").read_text() == "a = 1\n"
    assert (folder / "workspace/.hidden/run.py").read_text() == "x"
    assert {"instruction", "files"}.isdisjoint(json.loads((folder / "task.json").read_text()))
    (folder / "instruction.md").write_text("edited by hand, no line end")
    assert load_folder(folder).instruction == "edited by hand, no line end"


TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
NAMES = st.sampled_from(["a.py", "b/c.txt", ".etude/run.py", "d/e/f", "name with space", "é"])


@settings(max_examples=60, deadline=None)
@given(instruction=TEXT, files=st.dictionaries(NAMES, TEXT))
def test_any_text_survives_both_forms(instruction: str, files: dict[str, str]) -> None:
    task = small_task(instruction, files)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_jsonl(root / "set.jsonl", [task])
        assert load_jsonl(root / "set.jsonl") == [task]
        assert load_folder(save_folder(root / "set", task)) == task


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ""])
def test_no_file_is_written_outside_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match="leaves its folder"):
        save_folder(tmp_path / "set", small_task(files={path: "x"}))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_no_id_names_another_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError):
        save_folder(tmp_path / "set", small_task(name=name))


def test_links_in_a_workspace_are_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, small_task(files={"a.py": "x"}))
    (folder / "workspace/link").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="may not hold links"):
        load_folder(folder)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    line = small_task().model_dump_json()
    bad = tmp_path / "set.jsonl"
    for text, message in (
        (f"{line}\n{line}\n", "t-1 occurs twice"),
        (f"{line}\n{{}}\n", r"set.jsonl:2: id: "),
        (line.replace("tags", "tgas"), "set.jsonl:1: tgas: "),
        ("not json", "set.jsonl:1"),
    ):
        bad.write_text(text)
        with pytest.raises(UserError, match=message):
            load_jsonl(bad)
    with pytest.raises(UserError, match="cannot be read"):
        load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no such folder"):
        load_folders(tmp_path / "none")
    folder = save_folder(tmp_path, small_task())
    with pytest.raises(UserError, match="already exists"):
        save_folder(tmp_path, small_task())
    (folder / "instruction.md").unlink()
    with pytest.raises(UserError, match=r"instruction.md: cannot be read"):
        load_folder(folder)
    (folder / "task.json").write_text("[]")
    with pytest.raises(UserError, match="expected an object"):
        load_folder(folder)
