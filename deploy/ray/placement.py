"""What each role asks of Ray: bundles of a placement group, never more than it uses. Pure."""

from dataclasses import dataclass

from protocol.auth import is_local_only
from protocol.config import Config
from protocol.errors import UserError

PINNED = 0.001
"""Share of `node:IP`, the resource that every Ray node has of its own name."""


@dataclass(frozen=True)
class Cluster:
    """What is known of the Ray cluster.

    Attributes:
        home: address of the node that holds the run folder.
        num_machines: machines with different addresses.
        cpus, gpus: of all nodes together.
    """

    home: str
    num_machines: int
    cpus: float
    gpus: float


def resources_of(config: Config, role: str, *, cluster: Cluster) -> dict[str, float]:
    """The one bundle of a role's placement group.

    Coordinator and trainer keep their state in the run folder and so stay on the node that holds it.
    """
    on_gpu = cluster.gpus > 0
    home = {f"node:{cluster.home}": PINNED}
    if role == "coordinator":
        return {"CPU": 1.0, **home}
    if role == "rewardd":
        code = config.rewardd.code.num_workers if config.rewardd.code.enabled else 0
        return {"CPU": float(config.rewardd.math.num_workers + code)}
    section = config.trainer if role == "trainer" else config.generators
    wants_gpu = section.device == "cuda" or (section.device == "auto" and on_gpu)
    if role == "trainer":
        ranks = config.trainer.num_ranks
        per_rank = config.trainer.threads_per_rank or 1
        gpus = {"GPU": float(ranks)} if wants_gpu else {}
        return {"CPU": float(ranks * (1 if wants_gpu else per_rank)), **gpus, **home}
    parallel = config.generators.tensor_parallel_size
    gpus = {"GPU": float(parallel)} if wants_gpu and config.generators.backend == "vllm" else {}
    return {"CPU": float(parallel if gpus else config.generators.threads or 1), **gpus}


def check_cluster(config: Config, *, cluster: Cluster) -> None:
    """Raise UserError for a configuration that cannot run on this cluster."""
    if config.trainer.num_nodes > 1:
        raise UserError(
            "trainer.num_nodes above 1 is for systemd units and Slurm: on Ray the trainer is one actor on one machine"
        )
    if cluster.num_machines > 1 and is_local_only(config.coordinator.advertise or config.coordinator.listen):
        raise UserError(
            f"coordinator.listen = {config.coordinator.listen} reaches only one machine and this Ray cluster has "
            f"{cluster.num_machines}: set coordinator.listen, coordinator.advertise (here: tcp://{cluster.home}:PORT), "
            "rewardd.listen, weights.listen, weights.store_host and transport.curve_dir"
        )
    counts = {"coordinator": 1, "trainer": 1, "rewardd": config.rewardd.num, "generator": config.generators.num}
    for resource, there in (("CPU", cluster.cpus), ("GPU", cluster.gpus)):
        wanted = sum(
            count * resources_of(config, role, cluster=cluster).get(resource, 0.0) for role, count in counts.items()
        )
        if wanted > there:
            raise UserError(
                f"the roles want {wanted:g} {resource}s and the Ray cluster has {there:g}: add nodes, or lower "
                "generators.num, generators.threads, rewardd.code.num_workers or trainer.num_ranks"
            )
