"""The process of one trainer rank: signals, threads, connections; the work is in `session` and `engine`."""

from __future__ import annotations

import logging
import os

import torch

from learner.trainer.coordination import Coordination
from learner.trainer.engine import TrainerEngine, choose_device
from learner.trainer.session import Session
from learner.trainer.status import TrainerStatus
from learner.trainer.stop import StopSignal
from learner.weights.publisher import Publisher
from protocol.config import Config
from protocol.endpoint import MetricsEndpoint
from protocol.errors import ExitStatus
from protocol.logs import event, setup_logging
from protocol.messages import VersionPublished
from protocol.versions import tokenizer_hash

log = logging.getLogger(__name__)

CLOSE_S = 5.0


def run(config: Config, *, name: str) -> ExitStatus:
    """Runs this rank (RANK and WORLD_SIZE of the environment) until the run ends or a stop signal.

    The first SIGTERM or SIGINT ends it at the next batch boundary, with a checkpoint; the second at once. Raises
    UserError for what a person has to mend, ValueError for settings the engine refuses.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    setup_logging("trainer", name if num_ranks == 1 else f"{name}/{rank}")
    stop = StopSignal()
    stop.install()
    device = choose_device(config, rank=rank)
    if device.type == "cpu":
        torch.set_num_threads(num_threads(config))
    port = config.trainer.metrics_port if rank == 0 else 0
    endpoint = MetricsEndpoint(port, role="trainer", name=name, setting="trainer.metrics_port")
    status = TrainerStatus(longest_s=2 * config.trainer.collective_timeout_s, endpoint=endpoint)
    hash_of_tokenizer = tokenizer_hash(config.model.tokenizer_path or config.model.path)
    coordination: list[Coordination] = []

    def on_published(published: VersionPublished) -> None:
        if coordination:
            coordination[0].tell(published)

    publisher = None
    if rank == 0:
        publisher = Publisher(config, tokenizer_hash=hash_of_tokenizer, on_published=on_published)
    try:
        coordination.append(
            Coordination(
                config,
                name=name if rank == 0 else f"{name}.rank{rank}",
                stop=stop,
                tokenizer_hash=hash_of_tokenizer,
                heartbeat=status.heartbeat,
                attributes={"weights_address": publisher.address} if publisher else {"rank": rank},
            )
        )
        coordination[0].start()
        engine = TrainerEngine(config, rank=rank, num_ranks=num_ranks, device=device)
        event(log, logging.INFO, "engine ready", device=str(device), threads=torch.get_num_threads())
        session = Session(
            config,
            engine=engine,
            coordination=coordination[0],
            publisher=publisher,
            status=status,
            stop=stop,
        )
        result = session.run()
        event(log, logging.INFO, "trainer ends", status=result.name.lower(), policy_version=engine.policy_version)
        return result
    finally:
        endpoint.close()
        if publisher is not None:
            publisher.close(CLOSE_S)
        if coordination:
            coordination[0].close(deadline_s=CLOSE_S, reason="trainer ends")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def num_threads(config: Config) -> int:
    """CPU threads of a rank: as configured, or the cores shared evenly with the generators of this machine."""
    if config.trainer.threads_per_rank:
        return config.trainer.threads_per_rank
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // max(1, config.trainer.num_ranks + config.generators.num))
