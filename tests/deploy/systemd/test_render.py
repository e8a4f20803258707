"""Units as systemd reads them."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import run
from deploy.systemd.binding import consumers, cpu_shares, cpus_near_gpus, format_cpu_list, parse_cpu_list
from deploy.systemd.render import UnitSettings, memory_max, render_units, start_deadline_s
from protocol.config import Config
from protocol.config.load import load_config
from protocol.errors import ExitStatus
from tests.support.stack import write_config


def make_config(**sections: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "t", "dir": "/srv/100% run"},
        "model": {"path": "/srv/model"},
        "data": {"train_files": []},
    }
    return Config.model_validate(tree | sections)


def make_settings(**changes: Any) -> UnitSettings:
    return UnitSettings(**{"config_path": Path("/srv/run.yaml"), "user": "nobody", **changes})


def lines_of(text: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}=")]


def test_every_role_has_a_unit_and_the_target_wants_each_instance() -> None:
    config = make_config(generators={"num": 3}, rewardd={"num": 2})
    units = render_units(config, make_settings())
    assert sorted(units) == [
        "slipstream-t-coordinator.service",
        "slipstream-t-generator@.service",
        "slipstream-t-rewardd@.service",
        "slipstream-t-trainer.service",
        "slipstream-t.target",
    ]
    (wants,) = lines_of(units["slipstream-t.target"], "Wants")
    assert wants.split() == [
        "slipstream-t-coordinator.service",
        *[f"slipstream-t-rewardd@{i}.service" for i in range(2)],
        "slipstream-t-trainer.service",
        *[f"slipstream-t-generator@{i}.service" for i in range(3)],
    ]


@pytest.mark.parametrize("role", ["coordinator", "trainer", "rewardd@", "generator@"])
def test_b54_only_status_0_is_not_restarted_and_nothing_ends_the_restarts(role: str) -> None:
    unit = render_units(make_config(), make_settings())[f"slipstream-t-{role}.service"]
    for key, value in {
        "Type": "notify",
        "Restart": "always",
        "RestartPreventExitStatus": "0",
        "StartLimitIntervalSec": "0",
        "RestartSteps": "6",
        "RestartMaxDelaySec": "60",
        "KillMode": "mixed",
        "TimeoutStopSec": "75",
        "User": "nobody",
    }.items():
        assert lines_of(unit, key) == [value], key
    assert float(lines_of(unit, "WatchdogSec")[0]) >= 120
    old = render_units(make_config(), make_settings(systemd_version=252))[f"slipstream-t-{role}.service"]
    assert not lines_of(old, "RestartSteps") and lines_of(old, "RestartSec") == ["1"]


def test_paths_with_spaces_and_percent_signs_are_escaped() -> None:
    unit = render_units(make_config(), make_settings())["slipstream-t-coordinator.service"]
    assert lines_of(unit, "WorkingDirectory") == ['"/srv/100%% run"']


def test_the_sandbox_keeps_what_it_is_built_from() -> None:
    units = render_units(make_config(), make_settings())
    for key in ("RestrictNamespaces", "ProtectHostname", "ProtectKernelTunables", "SystemCallFilter", "PrivateDevices"):
        assert not lines_of(units["slipstream-t-rewardd@.service"], key)
        assert lines_of(units["slipstream-t-coordinator.service"], key)
    assert lines_of(units["slipstream-t-rewardd@.service"], "OOMPolicy") == ["continue"]
    assert lines_of(units["slipstream-t-rewardd@.service"], "Delegate") == ["memory pids"]


def test_generators_are_bound_to_their_gpus_and_cpus() -> None:
    config = make_config(generators={"num": 2, "tensor_parallel_size": 2}, trainer={"num_ranks": 4})
    gpus = consumers(config, num_devices=8)
    assert gpus == {"trainer": [0, 1, 2, 3], "generator-0": [4, 5], "generator-1": [6, 7]}
    near = {gpu: range(0, 16) if gpu < 4 else range(16, 32) for gpu in range(8)}
    shares = cpu_shares(config, cpus=range(32), num_devices=8, near=near)
    assert shares["trainer"] == list(range(16))
    assert shares["generator-0"] == list(range(16, 24)) and shares["generator-1"] == list(range(24, 32))
    units = render_units(config, make_settings(gpus=gpus, cpu_shares=shares, has_gpu=True))
    drop_in = units["slipstream-t-generator@1.service.d/binding.conf"]
    assert drop_in == "[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=6,7\nCPUAffinity=24-31\n"
    assert lines_of(units["slipstream-t-trainer.service"], "CPUAffinity") == ["0-15"]
    assert "char-nvidia* rw" in lines_of(units["slipstream-t-trainer.service"], "DeviceAllow")
    assert lines_of(units["slipstream-t-coordinator.service"], "PrivateDevices") == ["yes"]
    assert cpu_shares(config, cpus=range(4), num_devices=0, near={}) == {}  # too few to divide


def test_cpus_near_a_gpu_are_read_from_the_driver_and_sysfs(tmp_path: Path) -> None:
    driver = tmp_path / "proc/driver/nvidia/gpus/0000:3B:00.0"
    driver.mkdir(parents=True)
    (driver / "information").write_text("Model: X\nDevice Minor: \t 2\n")
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text("0-2,8\n")
    assert cpus_near_gpus(tmp_path) == {2: [0, 1, 2, 8]}
    assert format_cpu_list(parse_cpu_list("0-2,8")) == "0-2 8"
    assert cpus_near_gpus(tmp_path / "none") == {}


def test_trainer_units_of_several_machines_share_one_rendezvous() -> None:
    nodes = {"num_nodes": 2, "num_ranks": 4, "master_addr": "10.0.0.1", "master_port": 29500}
    config = make_config(trainer=nodes)
    for node_rank in (0, 1):
        unit = render_units(config, make_settings(roles=("trainer",), node_rank=node_rank))
        (command,) = lines_of(unit["slipstream-t-trainer.service"], "ExecStart")
        assert command.endswith(f"--node-rank {node_rank}")
        assert lines_of(unit["slipstream-t-trainer.service"], "After") == ["network-online.target"]
        assert lines_of(unit["slipstream-t.target"], "Wants") == ["slipstream-t-trainer.service"]


def test_limits_leave_room_above_the_orderly_ones() -> None:
    assert memory_max(make_config(generators={"memory_limit_gb": 10.0}), "generator") == "12500M"
    assert memory_max(make_config(), "trainer") == "90%"
    code = {"num_workers": 4, "memory_mb": 512}
    assert memory_max(make_config(rewardd={"code": code, "math": {"num_workers": 2}}), "rewardd") == "6144M"
    assert start_deadline_s(make_config(), "generator") > make_config().generators.engine_start_s


def test_systemd_verifies_every_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    config = write_config(tmp_path, data__max_prompt_tokens=64, run__name="verify", generators__num=2)
    out = tmp_path / "units"
    assert run(["units", "--config", str(config), "--out", str(out), "--no-private-tmp", "--env", "A=b c"]) == 0
    names = sorted(path.name for path in out.iterdir() if path.is_file())
    assert len(names) == 5
    for name in names:
        instance = out / name.replace("@.", "@0.")
        if not instance.exists():
            instance.symlink_to(name)
        done = subprocess.run(["systemd-analyze", "verify", str(instance)], capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr.strip(), f"{name}: {done.stderr}"
    assert load_config(tmp_path / "run" / "config.yaml").config.run.name == "verify"


def test_mistakes_are_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, data__max_prompt_tokens=64)
    arguments = ["units", "--config", str(config), "--out", str(tmp_path / "units")]
    assert run([*arguments, "--no-private-tmp", "--roles", "coordinator,nope"]) == ExitStatus.CONFIG
    assert "no role named 'nope'" in capsys.readouterr().err
    assert run([*arguments, "--no-private-tmp", "--env", "nope"]) == ExitStatus.CONFIG
    assert "KEY=VALUE" in capsys.readouterr().err
    if str(tmp_path).startswith("/tmp/"):
        assert run(arguments) == ExitStatus.CONFIG
        assert "hidden from the roles" in capsys.readouterr().err
