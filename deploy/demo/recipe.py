"""The demo's configuration: recipe, this machine, and the options of the command."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.local.specs import num_gpus
from deploy.prepare.data import make_data
from deploy.prepare.model import prepare_demo_model
from protocol.config.load import Loaded, build_config
from protocol.config.machine import free_port

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
NUM_TRAIN, NUM_EVAL = 512, 96
SHORT = {
    "run": {"max_updates": 3},
    "learner": {"checkpoint": {"every_updates": 3}},
    "evaluation": {"num_prompts": 24},
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of `slipstream demo`."""

    run_dir: Path
    short: bool = False
    seed: int = 0
    overrides: tuple[str, ...] = ()


def demo_config(options: DemoOptions, *, model: Path, train: Path, held_out: Path, on_gpu: bool) -> Loaded:
    """The configuration of a demo run; overrides win over everything."""
    values = _read("demo.yaml")
    if on_gpu:
        values = merge(values, _read("demo-gpu.yaml"))
    if options.short:
        values = merge(values, SHORT)
    machine = {
        "run": {"dir": str(options.run_dir), "seed": options.seed},
        "model": {"path": str(model)},
        "data": {"train_files": [str(train)], "eval_files": [str(held_out)]},
        "coordinator": {"listen": f"tcp://127.0.0.1:{free_port()}"},
    }
    return build_config(merge(values, machine), overrides=options.overrides, source="demo.yaml")


def prepare_demo(options: DemoOptions) -> Loaded:
    """Make the model and data where absent and return the demo's configuration.

    Raises:
        UserError: the model's or the data's package is not installed.
    """
    model = prepare_demo_model()
    data = options.run_dir / "data"
    train, held_out = data / "train.parquet", data / "eval.parquet"
    if not (train.is_file() and held_out.is_file()):
        make_data("arithmetic", data, num_train=NUM_TRAIN, num_eval=NUM_EVAL, seed=options.seed)
    return demo_config(options, model=model, train=train, held_out=held_out, on_gpu=has_cuda())


def has_cuda() -> bool:
    """Whether torch can use a GPU here (asked in a process of its own, and only where there is one)."""
    if not num_gpus():
        return False
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings merged; `over` wins."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[key] = merge(inner, value)
        else:
            merged[key] = value
    return merged


def _read(name: str) -> dict[str, Any]:
    values = yaml.safe_load((RECIPES / name).read_text())
    assert isinstance(values, dict)
    return values


def describe(loaded: Loaded) -> list[str]:
    """What is about to run, a line each."""
    config = loaded.config
    return [
        f"model    {config.model.path}",
        f"data     {config.data.train_files[0]} ({NUM_TRAIN} prompts), {NUM_EVAL} held out",
        f"run      {config.run.dir}: {config.run.max_updates} updates of {config.learner.groups_per_batch} groups x "
        f"{config.learner.group_size} answers, staleness bound {config.algorithm.max_staleness}",
    ]
