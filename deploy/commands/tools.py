"""`bench`: the benchmarks of tests/benchmarks."""

import contextlib
import importlib
import importlib.util
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from deploy.commands.options import JsonOption
from protocol.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def register(app: typer.Typer) -> None:
    """Add `bench` (only where the benchmarks are there, as in a checkout)."""
    if (ROOT / "tests" / "benchmarks").is_dir():
        app.command("bench")(bench)


def bench(
    name: Annotated[str, typer.Argument(help="Name of the benchmark, or `list`.")],
    as_json: JsonOption = False,
    quick: Annotated[bool, typer.Option(help="Few repetitions, for a look.")] = False,
) -> None:
    """Run one benchmark and print its figures."""
    names = sorted(path.stem.removeprefix("bench_") for path in (ROOT / "tests" / "benchmarks").glob("bench_*.py"))
    if name == "list":
        typer.echo("\n".join(names))
        return
    if name not in names:
        raise UserError(f"no benchmark named {name!r}; there are: {', '.join(names)}")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    module = importlib.import_module(f"tests.benchmarks.bench_{name}")
    with contextlib.redirect_stdout(sys.stderr):
        figures = module.run(quick)
    result = {"bench": name, "commit": commit(), "machine": machine(), "figures": figures}
    if as_json:
        typer.echo(json.dumps(result))
        return
    for key, figure in figures.items():
        value, low, high = (_shown(item) for item in (figure["value"], *figure["spread"]))
        typer.echo(f"{key:40} {value} {figure['unit']}  [{low}, {high}] in {figure['num_runs']} runs")


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def commit() -> str:
    """The checkout's commit, "" outside one."""
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "num_cpus": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
