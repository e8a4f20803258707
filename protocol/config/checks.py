"""Cross-role checks, run before anything starts: what cannot work is refused with names, numbers and a value that fits.

`check_config` looks at the configuration alone; `check_machine` (protocol.config.machine) at files, ports and disk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from protocol import auth
from protocol.config.dead_knobs import dead_knobs
from protocol.config.load import Loaded
from protocol.config.tree import Config
from protocol.errors import UserError

Level = Literal["error", "warning"]

MAX_TEMPERATURE = 2.0
"""What engines accept; above it nearly every token is drawn from the tail."""

WEIGHTED_LOSSES = ("decoupled_ppo", "gspo", "reinforce")
"""Losses corrected by the behaviour weight; the others take their ratio against the behaviour policy itself."""


@dataclass(frozen=True)
class Finding:
    """One result of a check: an error stops the start, a warning is shown."""

    level: Level
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.key}: {self.message}"


def error(key: str, message: str) -> Finding:
    """A finding that stops the start."""
    return Finding("error", key, message)


def warning(key: str, message: str) -> Finding:
    """A finding that is only shown."""
    return Finding("warning", key, message)


def check_config(loaded: Loaded) -> list[Finding]:
    """All findings about the configuration itself, errors first."""
    found: list[Finding] = []
    for rule in RULES:
        found += rule(loaded.config)
    found += [error(key, reason) for key, reason in dead_knobs(loaded)]
    return sorted(found, key=lambda f: f.level)


def raise_on_errors(findings: list[Finding]) -> None:
    """Raise one UserError that holds every error among the findings (nothing for warnings)."""
    errors = [f"{f.key}: {f.message}" for f in findings if f.level == "error"]
    if errors:
        raise UserError("; ".join(errors) if len(errors) == 1 else "configuration refused:\n  " + "\n  ".join(errors))


def max_response_tokens(config: Config) -> int:
    """Longest answer over all stages."""
    return max([config.sampling.max_response_tokens, *(s.max_response_tokens or 0 for s in config.stages)])


def _batch(config: Config) -> Iterator[Finding]:
    learner, trainer = config.learner, config.trainer
    num_ranks = trainer.num_ranks * trainer.num_nodes
    groups, parts = learner.groups_per_batch, learner.mini_batches
    if groups % parts:
        fits = [d for d in range(1, groups + 1) if groups % d == 0]
        nearest = min(fits, key=lambda d: abs(d - parts))
        yield error(
            "learner.mini_batches",
            f"{parts} does not divide learner.groups_per_batch = {groups}: "
            f"use mini_batches = {nearest}, or groups_per_batch = {-(-groups // parts) * parts}",
        )
    if num_ranks % learner.sequence_parallel:
        whole = -(-trainer.num_ranks // learner.sequence_parallel)
        yield error(
            "learner.sequence_parallel",
            f"{learner.sequence_parallel} does not divide the trainer's {num_ranks} ranks (trainer.num_ranks * "
            f"num_nodes): use num_ranks = {whole * learner.sequence_parallel}",
        )
    answers, ranks = groups // parts * learner.group_size, num_ranks // learner.sequence_parallel
    if answers < ranks:
        yield error(
            "trainer.num_ranks",
            f"{ranks} data-parallel ranks share mini-batches of {answers} answers "
            f"(groups_per_batch / mini_batches * group_size): use at most {answers} ranks",
        )
    needs_group = ("grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "reinforce_pp_baseline")
    if learner.group_size < 2 and config.algorithm.advantage in needs_group:
        yield error(
            "learner.group_size",
            f"1 with algorithm.advantage = {config.algorithm.advantage}, whose baseline is the group: "
            "use at least 2, or advantage = reinforce_pp or gae",
        )
    if config.algorithm.advantage == "remax":
        yield error(
            "algorithm.advantage",
            "remax needs the reward of each prompt's greedy answer, which the coordinator does not sample: use rloo",
        )
    if config.algorithm.passk_k > learner.group_size:
        yield error(
            "algorithm.passk_k", f"{config.algorithm.passk_k} is above learner.group_size = {learner.group_size}"
        )


def _lengths(config: Config) -> Iterator[Finding]:
    longest = config.data.max_prompt_tokens + max_response_tokens(config)
    cap = config.learner.micro_batch_tokens
    if cap < longest:
        yield error(
            "learner.max_tokens_per_micro_batch",
            f"{config.learner.max_tokens_per_micro_batch} cannot hold the longest sequence of {longest} tokens "
            f"(data.max_prompt_tokens {config.data.max_prompt_tokens} + sampling.max_response_tokens "
            f"{max_response_tokens(config)}): use at least {-(-longest // config.learner.sequence_parallel)}",
        )
    generators = config.generators
    if not generators.enable_chunked_prefill and generators.max_num_batched_tokens < longest:
        yield error(
            "generators.max_num_batched_tokens",
            f"{generators.max_num_batched_tokens} is below the longest sequence of {longest} tokens without chunked "
            f"prefill: use at least {longest}, or enable_chunked_prefill = true",
        )
    if generators.max_num_batched_tokens < generators.max_num_seqs:
        yield error(
            "generators.max_num_batched_tokens",
            f"{generators.max_num_batched_tokens} is below generators.max_num_seqs = {generators.max_num_seqs}: "
            f"use at least {generators.max_num_seqs}",
        )
    sampling = config.sampling
    if config.algorithm.overlong == "soft_penalty" and not (
        0 < config.algorithm.overlong_buffer_tokens <= sampling.max_response_tokens
    ):
        yield error(
            "algorithm.overlong_buffer_tokens",
            f"{config.algorithm.overlong_buffer_tokens} must be between 1 and sampling.max_response_tokens = "
            f"{sampling.max_response_tokens} with overlong = soft_penalty",
        )


def _sampling(config: Config) -> Iterator[Finding]:
    for key, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0), ("min_response_tokens", 0)):
        value = getattr(config.sampling, key)
        if value != off:
            yield error(
                f"sampling.{key}",
                f"{value} changes the distribution that answers are drawn from, so recorded log-probs would not be "
                f"the policy's: use {off}",
            )
    temperatures = {"sampling.temperature": config.sampling.temperature}
    temperatures |= {f"stages.{i}.temperature": s.temperature for i, s in enumerate(config.stages) if s.temperature}
    for key, value in temperatures.items():
        if value > MAX_TEMPERATURE:
            yield error(key, f"{value:g} makes answers noise: use at most {MAX_TEMPERATURE:g} (1 is usual)")
    starts = [stage.from_update for stage in config.stages]
    if starts != sorted(set(starts)):
        yield error("stages", f"from_update values {starts} must rise from stage to stage")


def _correction(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.max_staleness > 0 and algorithm.loss in WEIGHTED_LOSSES and algorithm.behaviour.level == "off":
        yield error(
            "algorithm.behaviour.level",
            f"off with algorithm.max_staleness = {algorithm.max_staleness} and loss {algorithm.loss} trains stale "
            "tokens without correction: use token, sequence or geometric, or max_staleness = 0",
        )
    if algorithm.behaviour.low >= algorithm.behaviour.high:
        yield error(
            "algorithm.behaviour.low",
            f"{algorithm.behaviour.low} must be below algorithm.behaviour.high = {algorithm.behaviour.high}",
        )
    if algorithm.clip_low > 1:
        yield error(
            "algorithm.clip_low", f"{algorithm.clip_low} puts the lower clip 1 - clip_low below 0: use at most 1"
        )
    if 0 < algorithm.clip_dual <= 1 + algorithm.clip_high:
        yield error(
            "algorithm.clip_dual",
            f"{algorithm.clip_dual} must be above 1 + clip_high = {1 + algorithm.clip_high}, or 0 to turn it off",
        )
    if algorithm.kl.where != "off" and algorithm.kl.coef == 0:
        yield error(
            "algorithm.kl.coef",
            f"0 with algorithm.kl.where = {algorithm.kl.where}: the reference model would be computed for nothing; "
            "use where = off or a coefficient above 0",
        )
    entropy = algorithm.entropy
    if entropy.controller == "adaptive" and entropy.coef > entropy.max_coef:
        yield error(
            "algorithm.entropy.coef", f"{entropy.coef} is above algorithm.entropy.max_coef = {entropy.max_coef}"
        )


def _addresses(config: Config) -> Iterator[Finding]:
    has_keys = config.transport.curve_dir is not None
    listeners = {
        "coordinator.listen": config.coordinator.listen,
        "rewardd.listen": config.rewardd.listen,
        "weights.listen": config.weights.listen,
    }
    for key, address in listeners.items():
        yield from _user_errors(key, partial(auth.check_listen, address, setting=key, has_keys=has_keys))
    advertise = config.coordinator.advertise
    if advertise is not None:
        yield from _user_errors(
            "coordinator.advertise", partial(auth.check_advertised, advertise, setting="coordinator.advertise")
        )
        if auth.is_local_only(advertise) and not auth.is_local_only(config.coordinator.listen):
            yield error(
                "coordinator.advertise",
                f"{advertise} reaches only this machine while coordinator.listen = {config.coordinator.listen} serves "
                "others: name this machine's own address",
            )
    elif auth.is_wildcard(config.coordinator.listen):
        yield error(
            "coordinator.advertise",
            f"needed with coordinator.listen = {config.coordinator.listen}: name the address other machines use",
        )
    for key, host in (("weights.store_host", config.weights.store_host),):
        if host in ("0.0.0.0", "*", "::"):
            yield error(key, f"{host} is no address to connect to: name this machine's own address")
        elif not auth.is_local_only(config.weights.listen) and auth.is_local_only(f"tcp://{host}:0"):
            yield error(
                key,
                f"{host} reaches only this machine while weights.listen = {config.weights.listen} serves others: "
                "name this machine's own address",
            )
    if config.transport.curve_dir and not (Path(config.transport.curve_dir) / "server.key").is_file():
        yield error(
            "transport.curve_dir",
            f"{config.transport.curve_dir} holds no server.key: run `slipstream keys {config.transport.curve_dir}`",
        )


def _user_errors(key: str, check: Callable[[], None]) -> Iterator[Finding]:
    try:
        check()
    except UserError as problem:
        yield error(key, str(problem).removeprefix(f"{key} = "))


def _deadlines(config: Config) -> Iterator[Finding]:
    pairs = (
        (
            "transport.heartbeat_s",
            config.transport.heartbeat_s,
            "transport.peer_timeout_s",
            config.transport.peer_timeout_s,
            2,
        ),
        ("deploy.backoff_s", config.deploy.backoff_s, "deploy.max_backoff_s", config.deploy.max_backoff_s, 1),
        (
            "coordinator.lease_deadline_s",
            config.coordinator.lease_deadline_s,
            "coordinator.lease_max_s",
            config.coordinator.lease_max_s,
            1,
        ),
        (
            "rewardd.code.time_limit_s",
            config.rewardd.code.time_limit_s,
            "rewardd.code.total_limit_s",
            config.rewardd.code.total_limit_s,
            1,
        ),
    )
    for low_key, low, high_key, high, factor in pairs:
        if low * factor > high:
            yield error(high_key, f"{high:g} is too short for {low_key} = {low:g}: use at least {low * factor:g}")
    if config.generators.drain_s > config.deploy.stop_grace_s:
        yield error(
            "generators.drain_s",
            f"{config.generators.drain_s:g} s of draining do not fit in deploy.stop_grace_s = "
            f"{config.deploy.stop_grace_s:g}: use at most {config.deploy.stop_grace_s:g}",
        )


def _machines(config: Config) -> Iterator[Finding]:
    trainer = config.trainer
    if trainer.num_nodes == 1:
        return
    if not trainer.master_port:
        yield error("trainer.master_port", "0 with trainer.num_nodes > 1: all machines must know it, such as 29500")
    if auth.is_local_only(f"tcp://{trainer.master_addr}:0"):
        yield error(
            "trainer.master_addr",
            f"{trainer.master_addr} reaches only one machine with trainer.num_nodes = {trainer.num_nodes}: name the "
            "first machine's own address",
        )


def _devices(config: Config) -> Iterator[Finding]:
    trainer, generators = config.trainer, config.generators
    if trainer.devices and len(trainer.devices) != trainer.num_ranks:
        yield error(
            "trainer.devices", f"names {len(trainer.devices)} devices for trainer.num_ranks = {trainer.num_ranks}"
        )
    needed = generators.num * generators.tensor_parallel_size
    if generators.devices and len(generators.devices) != needed:
        yield error(
            "generators.devices",
            f"names {len(generators.devices)} devices, {needed} are needed "
            f"(generators.num {generators.num} * tensor_parallel_size {generators.tensor_parallel_size})",
        )
    if generators.device == "cpu" and generators.tensor_parallel_size > 1:
        yield error("generators.tensor_parallel_size", "more than 1 is for GPUs: use 1 with device = cpu")
    if generators.backend == "openai" and not generators.openai_url:
        yield error("generators.openai_url", "needed with generators.backend = openai")
    shared = sorted(set(trainer.devices) & set(generators.devices))
    if shared and config.weights.transport == "nccl":
        yield error(
            "weights.transport",
            f"nccl cannot have trainer and generator on one GPU ({shared} are shared): use ipc, or other devices",
        )


def _sinks(config: Config) -> Iterator[Finding]:
    names = config.sinks.names
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield error("sinks.names", f"{name} is named more than once")
    for name in config.sinks.options.keys() - set(names):
        yield error(f"sinks.options.{name}", f"sinks.names does not name {name}: nothing would use these options")


RULES: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    _batch,
    _lengths,
    _sampling,
    _correction,
    _addresses,
    _deadlines,
    _machines,
    _devices,
    _sinks,
)
