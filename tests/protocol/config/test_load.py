"""Loading: overrides, origins, unknown keys, values out of range."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from protocol.config.explain import explain, reference_markdown
from protocol.config.keys import leaf_fields
from protocol.config.load import Loaded, load_config, origin_of, save_effective
from protocol.errors import ExitStatus, UserError

MINIMAL = {"model": {"path": "m"}, "data": {"train_files": ["t.parquet"]}}


@pytest.fixture
def load(tmp_path: Path):
    def _load(values: dict | None = None, *overrides: str) -> Loaded:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({**MINIMAL, **(values or {})}))
        return load_config(path, overrides=overrides)

    return _load


def test_overrides_win_and_every_origin_is_known(load) -> None:
    loaded = load({"learner": {"optim": {"lr": 1e-5}, "group_size": 4}}, "learner.optim.lr=1e-6", "run.name=x")
    assert loaded.config.learner.optim.lr == 1e-6
    assert loaded.config.run.name == "x"
    assert origin_of(loaded, "learner.optim.lr") == "command line"
    assert origin_of(loaded, "learner.group_size") == "run.yaml"
    assert origin_of(loaded, "learner.optim.beta1") == "default"


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("1E3", 1000.0), ("-2", -2), ("true", True), ("off", "off"), ("a1e5", "a1e5")]
)
def test_override_values_are_yaml_with_ordinary_numbers(load, text: str, value: object) -> None:
    assert load(None, f"generators.engine_args.x={text}").config.generators.engine_args["x"] == value


def test_b74_unknown_key_names_the_nearest_and_where_it_was_set(load) -> None:
    with pytest.raises(UserError, match=r"learner\.optim\.learning_rte.*run\.yaml.*did you mean"):
        load({"learner": {"optim": {"learning_rte": 1}}})
    with pytest.raises(UserError, match=r"'learner\.goup_size' \(command line\): did you mean 'learner\.group_size'"):
        load(None, "learner.goup_size=4")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.max_staleness", "algorithm.max_staleness"),
        ("learner.lr", "learner.optim.lr"),
        ("generators.temperature", "sampling.temperature"),
        ("lerner.group_size", "learner.group_size"),
    ],
)
def test_b74_a_key_of_another_section_is_pointed_to(load, wrong: str, right: str) -> None:
    with pytest.raises(UserError, match=f"did you mean '{right}'"):
        load(None, f"{wrong}=1")


def test_unknown_key_in_a_stage(load) -> None:
    with pytest.raises(UserError, match=r"stages\.1\.temprature"):
        load({"stages": [{"from_update": 0}, {"from_update": 5, "temprature": 1}]})


def test_values_out_of_range_are_named_with_value_and_origin(load) -> None:
    with pytest.raises(
        UserError, match=r"learner\.group_size = 0 \(command line\).*greater than or equal to 1"
    ) as info:
        load(None, "learner.group_size=0")
    assert info.value.status == ExitStatus.CONFIG
    assert "\n" not in str(info.value)


def test_missing_required_section_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {train_files: [a]}\n")
    with pytest.raises(UserError, match=r"model is missing in run\.yaml.*the policy to train"):
        load_config(path)


@pytest.mark.parametrize("text", ["a: [", "- 1", ""])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"run\.yaml"):
        load_config(path)
    with pytest.raises(UserError, match="cannot read"):
        load_config(tmp_path / "absent.yaml")


def test_b74_effective_configuration_is_saved_with_origins_and_loads_back(load, tmp_path: Path) -> None:
    loaded = load({"sampling": {"temperature": 0.5}}, "run.seed=3")
    path = save_effective(loaded, tmp_path / "run")
    assert json.loads((path.parent / "config_origins.json").read_text())["run.seed"] == "command line"
    again = load_config(path)
    assert again.config == loaded.config
    assert again.origins == loaded.origins


def test_explain_shows_meaning_default_and_value_in_use(load) -> None:
    text = explain("learner.group_size", loaded=load(None, "learner.group_size=4"))
    assert "answers per prompt" in text and "default: 8" in text and "in use: 4 (from command line)" in text
    assert "algorithm.kl.coef" in explain("algorithm.kl")
    with pytest.raises(UserError, match=r"did you mean 'learner\.group_size'"):
        explain("learner.groupsize")


def test_reference_lists_every_setting() -> None:
    text = reference_markdown()
    assert all(f"`{key}`" in text for key, _ in leaf_fields())


def test_every_setting_is_described() -> None:
    assert [key for key, field in leaf_fields() if not field.description] == []


def test_loading_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, protocol.config.load, protocol.config.checks; sys.exit(bool({'torch','vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
