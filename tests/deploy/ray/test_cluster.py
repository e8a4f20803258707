"""A whole run on Ray's own multi-node test cluster: scaled while it runs, a node killed, ended right."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import run
from deploy.ray import control
from tests.support.roles import ROOT
from tests.support.stack import load, write_config
from tests.support.wait import wait_until

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'slipstream-rl[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(600)]

START_S = 240.0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 6, "include_dashboard": False})
    try:
        yield made
    finally:
        if ray.is_initialized():
            ray.shutdown()
        made.shutdown()


def test_a_run_on_ray_is_scaled_survives_a_node_and_ends_right(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = cluster.add_node(num_cpus=4)
    config_path = write_config(
        tmp_path,
        run__name="on-ray",
        run__max_updates=7,
        data__max_prompt_tokens=64,
        generators__max_num_seqs=4,
        generators__engine_args={"tokens_per_s": 5.0, "length": "constant", "mean_tokens": 14},
        trainer__device="cpu",
        trainer__threads_per_rank=1,
        learner__checkpoint={"every_updates": 1000, "min_free_gb": 0.0},
        deploy__min_free_gb=0.0,
    )
    run_dir = Path(load(config_path).run.dir)
    assert run(["up", "--config", str(config_path), "--on", "ray", "--address", cluster.address]) == 0
    ray.init(address=cluster.address, namespace=control.NAMESPACE, log_to_driver=False)

    def generators() -> list[dict[str, Any]]:
        roles = control.call(run_dir, "snapshot")["roles"]
        return [r for r in roles if r["role"] == "generator" and r["state"] == "running" and r["ready"]]

    def num_trained() -> int:
        path = run_dir / "metrics.jsonl"
        rows = path.read_text().splitlines() if path.is_file() else []
        return len({json.loads(row)["batch_id"] for row in rows})  # a batch replayed by another trainer counts once

    try:
        wait_until(lambda: num_trained() >= 1, deadline_s=START_S, what="the first update")
        for count in (4, 2):
            assert run(["scale", f"generators={count}", "--run-dir", str(run_dir)]) == 0
            wait_until(lambda count=count: len(generators()) == count, deadline_s=START_S, what=f"{count} generators")
        assert num_trained() < 7

        cluster.remove_node(second, allow_graceful=False)
        wait_until(lambda: control.call(run_dir, "snapshot")["over"], deadline_s=START_S, what="the end of the run")
        assert control.call(run_dir, "snapshot")["finished"]
        capsys.readouterr()
    finally:
        logs = {path.name: path.read_text()[-1500:] for path in (run_dir / "logs").glob("*.log")}
        print(control.call(run_dir, "snapshot"), logs)
        control.call(run_dir, "stop")
    assert run(["ledger", str(run_dir)]) == 0
    assert num_trained() == 7 and (run_dir / "export" / "model.safetensors").is_file()
