"""What has to be the same on all nodes of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastictrain import __version__
from elastictrain.cli import agreement
from elastictrain.cli.agreement import OTHER_CODE, digest_of_code, must_agree
from elastictrain.config import JobConfig, LoadedJob

CODE = "from helper import SCALE"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "train.py", CODE)
    write(tmp_path, "helper.py", "SCALE = 1")
    write(tmp_path, "models/__init__.py", "")
    write(tmp_path, "models/deep/net.py", "WIDTH = 3")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def load(folder: Path, task: str = "train:T", **elastic: object) -> LoadedJob:
    config = JobConfig.model_validate(
        {
            "name": "agreed",
            "task": task,
            "train": {"max_steps": 5, "global_batch_size": 4, "micro_batch_size": 2},
            "elastic": elastic,
        }
    )
    return LoadedJob(config, folder / "job.toml", folder)


def agreed(folder: Path) -> dict[str, str]:
    return must_agree(load(folder), folder / "state")


@pytest.mark.parametrize("name", ["train.py", "helper.py", "models/__init__.py", "models/deep/net.py"])
def test_a_file_that_can_be_imported_must_agree_and_is_named(folder: Path, name: str) -> None:
    before = agreed(folder)
    write(folder, name, "SCALE = 2")
    after = agreed(folder)
    assert {key for key in before | after if before.get(key) != after.get(key)} == {name}


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "not-a-module.py",
        ".hidden/module.py",
        "data/train/class_1/module.py",
        "checkpoints/agreed/module.py",
        "state/module.py",
        "models/__pycache__/net.py",
    ],
)
def test_what_is_no_code_of_the_job_need_not(folder: Path, name: str) -> None:
    before = agreed(folder)
    write(folder, name, "SCALE = 2")
    assert agreed(folder) == before


@pytest.mark.parametrize("mark", ["job.json", "pyvenv.cfg"])
def test_environments_and_state_directories_of_other_jobs_are_left_out(folder: Path, mark: str) -> None:
    before = agreed(folder)
    write(folder, f"other/{mark}", "")
    write(folder, "other/module.py", "")
    write(folder, "other/below/module.py", "")
    assert agreed(folder) == before


def test_a_link_in_a_circle_is_followed_once(folder: Path) -> None:
    before = agreed(folder)
    (folder / "models" / "again").symlink_to(folder)
    assert agreed(folder) == before


def test_two_folders_with_the_same_files_agree(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    for file in sorted(folder.rglob("*.py"), reverse=True):
        write(other, str(file.relative_to(folder)), file.read_text())
    assert agreed(other) == agreed(folder)


def test_beyond_the_named_files_all_others_count_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "NAMED_FILES", 2)
    before = agreed(folder)
    assert set(digest_of_code(load(folder), folder / "state")) == {"train.py", "helper.py", OTHER_CODE}
    write(folder, "models/deep/net.py", "WIDTH = 4")
    after = agreed(folder)
    assert {key for key in before if before[key] != after[key]} == {OTHER_CODE}


def test_no_more_siblings_than_the_limit_and_the_nearest_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_SIBLINGS", 1)
    assert set(digest_of_code(load(folder), folder / "state")) == {"train.py", "helper.py", OTHER_CODE}
    # Those of the task's own package always count.
    own = digest_of_code(load(folder, "models.deep.net:T"), folder / "state")
    assert set(own) == {"models/__init__.py", "models/deep/net.py", "helper.py", OTHER_CODE}


def test_the_version_stands_for_a_task_of_ours(folder: Path) -> None:
    job = load(folder)
    assert digest_of_code(LoadedJob(job.config, job.path, None), folder) == {OTHER_CODE: __version__}


def test_settings_of_a_node_may_differ_and_those_of_the_job_may_not(folder: Path) -> None:
    def of(job: LoadedJob) -> str:
        return must_agree(job, folder / "state")["job file"]

    assert of(load(folder)) == of(load(folder, nproc_per_node=3, threads_per_rank=2))
    assert of(load(folder)) != of(load(folder, node_timeout_s=7))
    assert of(load(folder, reduction="tree")) != of(load(folder, reduction="tree", threads_per_rank=2))
