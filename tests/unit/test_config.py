"""job.toml: what is wrong is said with file, line, key and the nearest key that is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.config import JobConfig, load_job
from elastictrain.config.find import example_jobs
from elastictrain.config.locate import find_line
from elastictrain.errors import ConfigError, MissingInputError

GOOD = """\
task = "task:MyTask"

[train]
max_steps = 5
micro_batch_size = 2
"""


def write(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    return str(path)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(write(folder, text), overrides)
    assert caught.value.exit_code == 78
    return str(caught.value)


def test_a_good_job(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, GOOD))
    assert job.config.name == tmp_path.name, "the folder names the job"
    assert job.module_dir == tmp_path
    assert job.config.train.precision == "fp32"
    assert load_job(str(tmp_path)) == job, "the folder is as good as the file"


def test_a_file_of_another_name_names_the_job(tmp_path: Path) -> None:
    (tmp_path / "large.toml").write_text(GOOD)
    assert load_job(str(tmp_path / "large.toml")).config.name == "large"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD + "max_step = 7\n", [":6: unknown key train.max_step; did you mean max_steps?"]),
        (GOOD + "\n[trian]\nx = 1\n", [":7: unknown key trian; did you mean train?"]),
        (GOOD + "momentum = 0.9\n", [":6: unknown key train.momentum; did you mean optimizer.momentum?"]),
        (GOOD + "zzz = 1\n", [":6: unknown key train.zzz; valid here: max_steps,"]),
        ("lr = 0.1\n" + GOOD, [":1: unknown key lr; did you mean optimizer.lr?"]),
        (GOOD.replace("= 5", "= 0"), [":4: train.max_steps: input should be greater than 0, got 0"]),
        (GOOD.replace("= 5", '= "five"'), [":4: train.max_steps: input should be a valid integer", "got 'five'"]),
        (GOOD.replace("max_steps = 5\n", ""), [":3: train: needs max_steps or max_epochs"]),
        (GOOD.replace("micro_batch_size = 2\n", ""), [":3: missing key train.micro_batch_size"]),
        (GOOD.replace('task = "task:MyTask"\n', ""), ["missing key task"]),
        (GOOD.replace("task:MyTask", "task.MyTask"), [':1: task: must be "package.module:Class"', "got 'task.MyTask'"]),
        ("name = 'a/b'\n" + GOOD, [":1: name: must be usable as a folder name"]),
        ("seed = 18446744073709551616\n" + GOOD, ["seed: must fit in 64 bits"]),
        ("seed = -1\n" + GOOD, [":1: seed: input should be greater than or equal to 0, got -1"]),
        (GOOD + 'precision = "fp8"\n', [":6: train.precision: input should be 'fp32', 'bf16' or 'fp16', got 'fp8'"]),
        (GOOD + "global_batch_size = 4\naccumulation_steps = 2\n", ["global_batch_size or accumulation_steps"]),
        (GOOD + "clip_norm = inf\n", [":6: train.clip_norm: input should be a finite number"]),
        (GOOD + '[data]\nepoch_tail = "dropp"\n', [":7: data.epoch_tail: input should be 'continue', 'partial' or"]),
        (GOOD + "[optimizer]\nbetas = [0.9, 1.5]\n", [":7: optimizer.betas: input should be less than 1, got 1.5"]),
        (GOOD + "[params]\nx = nan\n", ["x is not a finite number"]),
        (GOOD + '[params]\n"a b" = 1\n', ["'a b' cannot be a keyword argument"]),
        ("train = 3\ntask = 'a:B'\n", [":1: train: input should be a valid"]),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, expected: list[str]) -> None:
    message = refusal(tmp_path, text)
    assert str(tmp_path / "job.toml") in message
    for part in expected:
        assert part in message
    assert "config schema" in message


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, GOOD.replace("= 5", "= 0") + "max_step = 7\n[ddp]\nbucket_cap_mb = 0\n")
    assert ":4: " in message
    assert ":6: " in message
    assert ":8: " in message


def test_not_toml(tmp_path: Path) -> None:
    assert "not valid TOML" in refusal(tmp_path, "task = task:MyTask\n")
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_job(str(tmp_path))


# ---- --set


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.max_steps=7", "train", "max_steps", 7),
        ("train.precision=bf16", "train", "precision", "bf16"),
        ('train.precision="bf16"', "train", "precision", "bf16"),
        ("optimizer.lr=1e-4", "optimizer", "lr", 1e-4),
        ("optimizer.betas=[0.8, 0.9]", "optimizer", "betas", (0.8, 0.9)),
        (" data . shuffle = false", "data", "shuffle", False),
        ("params.path=/a=b", "params", "path", "/a=b"),
    ],
)
def test_set(tmp_path: Path, override: str, section: str, key: str, value: Any) -> None:
    part = getattr(load_job(write(tmp_path, GOOD), [override]).config, section)
    assert (part[key] if isinstance(part, dict) else getattr(part, key)) == value


def test_the_last_set_wins(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, GOOD), ["train.max_steps=7", "train.max_steps=8"])
    assert job.config.train.max_steps == 8


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_steps", "--set train.max_steps: not of the form key.path=value"),
        ("=3", "not of the form"),
        ("train..x=3", "not of the form"),
        ("train.max_step=3", "--set: unknown key train.max_step; did you mean max_steps?"),
        ("train.max_steps=-1", "--set: train.max_steps: input should be greater than 0, got -1"),
        ("train.max_steps.x=1", "train.max_steps is a value, not a table"),
    ],
)
def test_a_set_that_is_wrong_is_named(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in refusal(tmp_path, GOOD, override)


# ---- finding


def test_examples_are_found_by_name() -> None:
    assert {"stdlib-lm", "digits"} <= set(example_jobs())
    for name in example_jobs():
        job = load_job(name)
        assert job.config.name == name
        assert job.module_dir is None, "an example comes from the package, not from a folder"


def test_jobs_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="Did you mean digits"):
        load_job("digit")
    with pytest.raises(MissingInputError, match=r"has no job\.toml"):
        load_job(str(tmp_path))
    with pytest.raises(MissingInputError, match="no file") as caught:
        load_job(str(tmp_path / "none.toml"))
    assert caught.value.exit_code == 66


# ---- lines


def test_lines_are_found_where_people_write_them() -> None:
    text = 'a = 1\n[ b ] # note\n"c" = 2\n[b.d]\ne = 3\nx.y = 4\n'
    assert find_line(text, ["a"]) == 1
    assert find_line(text, ["b"]) == 2
    assert find_line(text, ["b", "c"]) == 3
    assert find_line(text, ["b", "d", "e"]) == 5
    assert find_line(text, ["b", "d", "x", "y"]) == 6
    assert find_line(text, ["b", "unknown"]) == 2, "the nearest enclosing line"
    assert find_line(text, ["nothing"]) is None


@given(text=st.text(max_size=200), path=st.lists(st.text(max_size=5), max_size=3))
def test_looking_for_a_line_never_fails(text: str, path: list[str]) -> None:
    line = find_line(text, path)
    assert line is None or 1 <= line <= max(1, len(text.splitlines()))


# ---- schema


def test_every_key_is_documented() -> None:
    schema = JobConfig.model_json_schema()
    for section in [schema, *schema["$defs"].values()]:
        for key, field in section.get("properties", {}).items():
            reference = "$ref" in field or "allOf" in field
            assert reference or field.get("description"), f"{section['title']}.{key} has no docstring"


def test_a_loaded_job_cannot_change(tmp_path: Path) -> None:
    config = load_job(write(tmp_path, GOOD)).config
    with pytest.raises(ValueError, match="frozen"):
        config.train.max_steps = 3


@pytest.mark.parametrize(
    "override", ['checkpoint.storage_options="key=HUSH"', "checkpoint.url=['s3://HUSH@x']", "checkpoint.url.x=HUSH"]
)
def test_what_is_wrong_about_a_store_is_told_without_its_secrets(tmp_path: Path, override: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'task = "x:Y"\n[train]\nmax_steps = 1\nglobal_batch_size = 1\nmicro_batch_size = 1\n[checkpoint]\nurl = "a"\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_job(str(path), [override])
    assert "checkpoint" in str(caught.value)
    assert "HUSH" not in str(caught.value)
