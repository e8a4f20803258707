"""`plan`: generators, reward daemons, staleness bound and memory settings, predicted from measured rates."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.commands.options import JsonOption, load_run
from protocol.config.load import load_config
from protocol.errors import UserError


def register(app: typer.Typer) -> None:
    """Add `plan`."""
    app.command("plan")(plan)


def plan(
    run_dir: Annotated[Path | None, typer.Option("--run-dir", "-r", help="Measure this run's rates.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Plan this configuration.")] = None,
    tokens_per_s: Annotated[float, typer.Option(help="Sampled tokens/s of one generator, all slots running.")] = 0.0,
    update_s: Annotated[float, typer.Option(help="Seconds of one update.")] = 0.0,
    mean_tokens: Annotated[float, typer.Option(help="Mean answer length in tokens.")] = 0.0,
    reward_per_s: Annotated[float, typer.Option(help="Answers/s of one reward daemon; 0: never waits for it.")] = 0.0,
    publish_s: Annotated[float, typer.Option(help="Seconds from update to new weights in use.")] = 1.0,
    fixed_share: Annotated[
        float, typer.Option(help="Part of an engine's step that does not depend on the number of running answers.")
    ] = -1.0,
    max_generators: Annotated[int, typer.Option(help="Look at no more generators; 0: as many as help.")] = 0,
    gpu_gb: Annotated[float, typer.Option(help="Memory of a GPU in GiB, for the memory settings.")] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """How many generators and reward daemons, which staleness bound, which memory settings.

    With --run-dir the rates come from that run, and the prediction for its own settings is shown beside what it took.
    With --config they are given by options. The fleet is simulated with the coordinator's own rules.
    """
    from deploy.local.specs import num_gpus
    from deploy.planning import FIXED_SHARE, NEEDED, fleet, given_workload, lines_of, memory
    from learner.planning.measured import measure
    from protocol.config.memory import GIB

    if run_dir is None and config is None:
        raise UserError("name a run (--run-dir) or a configuration (--config) to plan")
    loaded = load_run(run_dir).config if run_dir else load_config(config).config  # type: ignore[arg-type]
    if fixed_share < 0.0:
        fixed_share = FIXED_SHARE["cuda" if num_gpus() and loaded.generators.device != "cpu" else "cpu"]
    measured = measure(run_dir, loaded, fixed_share=fixed_share, publish_s=publish_s) if run_dir else None
    workload = measured.workload if measured else given_workload(loaded, tokens_per_s, update_s, mean_tokens)
    result: dict[str, Any] = {}
    if workload is not None:
        workload = dataclasses.replace(
            workload, publish_s=publish_s, rewardd_answers_per_s=reward_per_s, fixed_share=fixed_share
        )
        result |= fleet(workload, loaded, measured, max_generators=max_generators)
    if gpu_gb:
        result["memory"] = memory(loaded, device_bytes=gpu_gb * GIB)
    if not result:
        raise UserError(f"nothing to plan from: give {', '.join(NEEDED)} for the fleet, --gpu-gb for memory settings")
    typer.echo(json.dumps(result) if as_json else "\n".join(lines_of(result)))
