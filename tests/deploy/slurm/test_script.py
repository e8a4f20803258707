"""The Slurm script with stand-ins for scontrol, srun and slipstream."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.roles import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "slipstream.sbatch"
SRUN = """#!/usr/bin/env bash
for argument; do
  case $argument in --nodelist=*) node=${argument#--nodelist=};; --*) ;; *) break;; esac
  shift
done
NODE=$node exec "$@"
"""
SLIPSTREAM = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([os.environ["NODE"], *sys.argv[1:]]) + "\\n")
first = os.path.join(os.environ["MARKS"], sys.argv[5])
if sys.argv[1] == "generator" and not os.path.exists(first):
    open(first, "w").close()
    sys.exit(70)
"""


def launch(tmp_path: Path, *, nodes: list[str], **environment: str) -> list[list[str]]:
    """Runs the script on stand-ins; returns [node, role, arguments...] of every start."""
    tools = tmp_path / "bin"
    tools.mkdir()
    scontrol = "#!/bin/sh\n" + "".join(f"echo {node}\n" for node in nodes)
    for name, text in {"scontrol": scontrol, "srun": SRUN, "slipstream": SLIPSTREAM}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment |= {"CALLS": str(calls), "MARKS": str(tmp_path), "SLURM_JOB_NODELIST": "x"}
    environment["PATH"] = f"{tools}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(SCRIPT), "run.yaml", "learner.optim.lr=2e-6"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_roles_start_on_their_nodes_share_one_rendezvous_and_failed_ones_are_restarted(tmp_path: Path) -> None:
    calls = launch(tmp_path, nodes=["n0", "n1", "n2", "n3"], TRAINER_NODES="2", KEYS="/keys", GENERATORS_PER_NODE="2")
    started = sorted((node, role) for node, role, *_ in calls)
    generators = [(node, "generator") for node in ("n2", "n3") for _ in range(4)]  # each failed once
    assert started == sorted(
        [("n0", "coordinator"), ("n0", "rewardd"), ("n0", "trainer"), ("n1", "trainer"), *generators]
    )
    for _, role, *arguments in calls:
        assert "learner.optim.lr=2e-6" in arguments and "coordinator.advertise=tcp://n0:5600" in arguments
        assert {"trainer.num_nodes=2", "trainer.master_addr=n0", "trainer.master_port=5601"} <= set(arguments), role
    ranks = [arguments[arguments.index("--node-rank") + 1] for _, role, *arguments in calls if role == "trainer"]
    assert sorted(ranks) == ["0", "1"]


def test_one_node_runs_everything_and_needs_no_keys(tmp_path: Path) -> None:
    calls = launch(tmp_path, nodes=["n0"])
    assert {node for node, *_ in calls} == {"n0"}
    assert {role for _, role, *_ in calls} == {"coordinator", "rewardd", "trainer", "generator"}
    assert not any("curve" in argument for call in calls for argument in call)


def test_several_nodes_without_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="slipstream keys DIR"):
        launch(tmp_path, nodes=["n0", "n1"])
