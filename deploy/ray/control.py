"""What the command line does on Ray: join the cluster, start a run's supervisor, and talk to it.

State file RUN_DIR/state/ray.json: {"address", "actor"}; it says that this run is on Ray and where.
"""

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.local.control import STATE_FILE
from deploy.ray.placement import Cluster, check_cluster
from protocol.config import Config
from protocol.errors import ExitStatus, UserError

RAY_STATE = STATE_FILE.with_name("ray.json")
NAMESPACE = "slipstream"
DEADLINE_S = 60.0


@contextlib.contextmanager
def joined(address: str) -> Iterator[Any]:
    """The ray module, connected to an existing cluster; disconnected afterwards unless it was connected before.

    Raises:
        UserError: Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed: pip install 'slipstream-rl[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster at {address!r} ({str(error).splitlines()[0]}): start one with `ray start --head`, or name "
            "its address with --address",
            status=ExitStatus.LOST_DEPENDENCY,
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def cluster_of(ray: Any) -> Cluster:
    """What the cluster has, seen from this machine, which holds the run folder.

    Raises:
        UserError: this machine is no node of the cluster.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    addresses = {node["NodeManagerAddress"] for node in nodes}
    home = ray.util.get_node_ip_address()
    if home not in addresses:
        raise UserError(
            f"this machine ({socket.gethostname()}, {home}) is no node of the Ray cluster: run `slipstream up --on "
            "ray` on a node, as the run folder lies where it is run"
        )
    total = ray.cluster_resources()
    return Cluster(home=home, num_machines=len(addresses), cpus=total.get("CPU", 0.0), gpus=total.get("GPU", 0.0))


def start(config: Config, *, address: str) -> None:
    """Start the supervisor of a prepared run; it places the roles.

    Raises:
        UserError: the run is up already, or the configuration cannot run on this cluster.
    """
    with joined(address) as ray:
        from deploy.ray.supervisor import RaySupervisor

        cluster = cluster_of(ray)
        check_cluster(config, cluster=cluster)
        name = config.run.name
        with contextlib.suppress(ValueError):
            earlier = ray.get_actor(name, namespace=NAMESPACE)
            if not ray.get(earlier.snapshot.remote(), timeout=DEADLINE_S)["over"]:
                raise UserError(f"run {name!r} is up on this cluster: `slipstream down {config.run.dir}` first")
            ray.kill(earlier)
        actor = ray.remote(RaySupervisor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            resources={f"node:{cluster.home}": 0.001},
            max_restarts=-1,
            max_concurrency=8,
            runtime_env={"env_vars": {"PYTHONUNBUFFERED": "1"}},
        )
        handle = actor.remote(values=config.model_dump(mode="json"), cluster=cluster)
        ray.get(handle.snapshot.remote(), timeout=DEADLINE_S)
        path = Path(config.run.dir) / RAY_STATE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"address": ray.get_runtime_context().gcs_address, "actor": name}))


def is_on_ray(run_dir: Path) -> bool:
    """Whether the run was last started on Ray."""
    return (run_dir / RAY_STATE).is_file()


def call(run_dir: Path, method: str, *arguments: Any) -> Any:
    """Ask the supervisor of a run on Ray.

    Raises:
        UserError: it is not there, does not answer, or refuses.
    """
    state = json.loads((run_dir / RAY_STATE).read_text())
    with joined(state["address"]) as ray:
        try:
            actor = ray.get_actor(state["actor"], namespace=NAMESPACE)
            return ray.get(getattr(actor, method).remote(*arguments), timeout=DEADLINE_S)
        except ray.exceptions.RayTaskError as refused:
            raise UserError(str(refused.cause)) from None
        except (ValueError, ray.exceptions.RayError) as error:
            raise UserError(
                f"the supervisor of {run_dir} does not answer on the Ray cluster {state['address']}: {error}",
                status=ExitStatus.LOST_DEPENDENCY,
            ) from None


def forget(run_dir: Path) -> None:
    """End the supervisor of a run that is over, and the note that it is on Ray."""
    path = run_dir / RAY_STATE
    state = json.loads(path.read_text())
    with joined(state["address"]) as ray, contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(state["actor"], namespace=NAMESPACE))
    path.unlink()
