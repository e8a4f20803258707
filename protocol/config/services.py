"""Configuration of the services: coordinator, generators, rewardd, weights, transport, deployment."""

from typing import Literal

from pydantic import Field

from protocol.config.base import Section


class CoordinatorSection(Section):
    """`coordinator`: ledger, journal, leases."""

    listen: str = Field("tcp://127.0.0.1:5600", description="Address the coordinator binds; the one all roles know.")
    advertise: str | None = Field(None, description="Address other machines use, when it differs from `listen`.")
    lease_deadline_s: float = Field(120.0, gt=0, description="A lease without progress for this long is moved.")
    lease_max_s: float = Field(3600.0, gt=0, description="Longest life of one attempt, with progress or not.")
    max_attempts: int = Field(5, ge=1, description="Attempts at a slot before its group is retired.")
    commit_interval_ms: float = Field(5.0, gt=0, description="Group commit: longest wait of an acknowledgement.")
    segment_mb: int = Field(256, ge=1, description="Size of a journal segment.")
    journal_keep_all: bool = Field(False, description="Keep all journal segments (needed by `slipstream replay`).")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port; 0 = off.")


class EnvironmentSection(Section):
    """`generators.environment`: multi-turn answers."""

    name: str = Field(
        "", description="package.module:Class, or an entry point of slipstream.environments (code_tool); empty: none."
    )
    options: dict[str, str | int | float | bool] = Field(default_factory=dict, description="Arguments of its class.")
    max_turns: int = Field(4, ge=1, description="Turns of the policy in one answer.")
    deadline_s: float = Field(30.0, gt=0, description="One turn of the environment; past it the answer is tried again.")


class GeneratorsSection(Section):
    """`generators`: the vLLM services."""

    num: int = Field(1, ge=0, description="Generators the local supervisor starts; any number may join or leave.")
    backend: Literal["vllm", "openai", "scripted"] = Field(
        "vllm", description="scripted: no model, for tests and benchmarks."
    )
    openai_url: str | None = Field(None, description="backend openai: base URL of the server.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda when there is one.")
    devices: list[int] = Field(
        default_factory=list, description="GPU index per generator (times TP); empty: after the trainer's."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs per engine.")
    max_num_seqs: int = Field(64, ge=1, description="Requests decoded at once.")
    max_num_batched_tokens: int = Field(8192, ge=1, description="Tokens of one engine step.")
    gpu_memory_utilization: float = Field(0.90, gt=0, le=1, description="Share of the GPU's memory the engine may use.")
    cpu_kv_cache_gb: int = Field(1, ge=1, description="KV cache on CPUs.")
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0 = share the cores with the trainer.")
    enforce_eager: bool = Field(False, description="No graph capture; always on for CPUs.")
    enable_prefix_caching: bool = Field(True, description="Within a policy version, never across.")
    enable_chunked_prefill: bool = Field(True, description="Mix prefill and decode in one step.")
    load_format: str = Field("auto", description="vLLM's load_format (dummy: random weights).")
    engine_args: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="More engine arguments, by vLLM's names."
    )
    environment: EnvironmentSection = EnvironmentSection()
    engine_start_s: float = Field(600.0, gt=0, description="Deadline of the engine's start.")
    no_token_s: float = Field(120.0, gt=0, description="No token for this long with work pending: unhealthy, exit.")
    drain_s: float = Field(30.0, ge=0, description="On SIGTERM: time to finish answers before handing them back.")
    memory_limit_gb: float = Field(0.0, ge=0, description="Drain and restart above this resident size; 0 = off.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port of the first generator; 0 = off.")


class MathSection(Section):
    """`rewardd.math`: the math verifier."""

    profile: Literal["strict", "or1-compat"] = Field("strict", description="Which rules decide.")
    require_box: bool = Field(False, description="Only a boxed answer counts.")
    deadline_s: float = Field(2.0, gt=0, description="From the start of execution; then the worker is killed.")
    num_workers: int = Field(1, ge=1, description="Worker processes.")


class CodeSection(Section):
    """`rewardd.code`: the sandboxed code executor."""

    enabled: bool = Field(True, description="Score code at all.")
    isolation: Literal["auto", "namespaces", "seccomp", "rlimits"] = Field(
        "auto",
        description="auto takes the strongest that works, never rlimits alone: that must be asked for by name.",
    )
    num_workers: int = Field(1, ge=1, description="Programs run at once.")
    time_limit_s: float = Field(6.0, gt=0, description="Wall time per test.")
    total_limit_s: float = Field(60.0, gt=0, description="Wall time per program, all tests.")
    memory_mb: int = Field(512, ge=64, description="Memory of a program and its children.")
    max_processes: int = Field(32, ge=1, description="Processes and threads of a program.")
    reward: Literal["binary", "fraction"] = Field("binary", description="Score of partly passed tests.")


class RewardModelSection(Section):
    """`rewardd.reward_model`: the scorer `reward_model`, which asks a model behind an HTTP endpoint."""

    url: str = Field("", description="Base URL of a vLLM or OpenAI-compatible server, such as http://127.0.0.1:8000.")
    api: Literal["score", "classify", "pooling"] = Field(
        "classify",
        description="score: prompt against answer (cross-encoder); classify, pooling: the conversation as one text.",
    )
    model: str = Field("", description="Name the server knows the model by; empty: its only one.")
    template: str = Field(
        "{prompt}\n\n{response}",
        description="Text of a conversation for classify and pooling, as the model expects it.",
    )
    label: int = Field(-1, description="Class or last dimension whose value is the score; -1 = the last.")
    low: float = Field(0.0, description="The model's value that gives a score of 0.")
    high: float = Field(1.0, description="The model's value that gives a score of 1; between them it is linear.")
    max_batch_tokens: int = Field(16_384, ge=1, description="Tokens of one request, estimated as a third of its bytes.")
    max_batch: int = Field(64, ge=1, description="Answers of one request.")
    deadline_s: float = Field(30.0, gt=0, description="One request; past it its answers are tried again.")
    num_workers: int = Field(1, ge=1, description="Requests under way at once.")
    api_key_env: str = Field("", description="Environment variable that holds the key of the server.")


class ShapingSection(Section):
    """`rewardd.shaping`: parts of the score besides correctness; logged apart."""

    correct: float = Field(1.0, description="Score of a correct answer.")
    wrong: float = Field(0.0, description="Score of a wrong answer.")
    format_bonus: float = Field(0.0, description="Added when the answer has the required final-answer form.")
    length_penalty: float = Field(0.0, ge=0, description="Subtracted at `length_to` response tokens and beyond.")
    length_from: int = Field(0, ge=0, description="Response tokens up to which nothing is subtracted; then linearly.")
    length_to: int = Field(0, ge=0, description="Response tokens of the full penalty; 0 = no penalty.")


class RewarddSection(Section):
    """`rewardd`: the reward daemons."""

    num: int = Field(1, ge=0, description="Daemons the local supervisor starts.")
    listen: str = Field(
        "tcp://127.0.0.1:0", description="Address to bind; port 0 = any free port (told to the coordinator)."
    )
    max_queue: int = Field(1024, ge=1, description="Trajectories held; above it senders are told to wait.")
    max_retries: int = Field(3, ge=0, description="Retries of an unjudged trajectory before it is dropped as unjudged.")
    breaker_failures: int = Field(
        8, ge=0, description="Tasks in a row that a scorer could not judge before it is left alone a while; 0 = never."
    )
    breaker_hold_s: float = Field(
        20.0,
        ge=0,
        description="A task held back meanwhile ends as unjudged after this; below transport.ack_deadline_s.",
    )
    canary_s: float = Field(300.0, gt=0, description="Interval of the known pairs scored while serving.")
    scorers: dict[str, str] = Field(
        default_factory=dict, description="data_source or ability -> scorer name (entry points of slipstream.scorers)."
    )
    cache_entries: int = Field(10_000, ge=0, description="Verdict cache of pure scorers.")
    math: MathSection = MathSection()
    code: CodeSection = CodeSection()
    reward_model: RewardModelSection = RewardModelSection()
    shaping: ShapingSection = ShapingSection()
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port of the first daemon; 0 = off.")


class WeightsSection(Section):
    """`weights`: bringing new versions to the generators."""

    transport: Literal["auto", "nccl", "ipc", "gloo", "file"] = Field(
        "auto", description="auto: nccl between GPUs, ipc on one GPU, gloo on CPUs."
    )
    listen: str = Field(
        "tcp://127.0.0.1:0", description="Control address of the publisher (told through the coordinator)."
    )
    store_host: str = Field("127.0.0.1", description="Host of the rendezvous store, as generators reach it.")
    bucket_mb: int = Field(256, ge=1, description="Size of a packed bucket.")
    deadline_s: float = Field(120.0, gt=0, description="A member that has not staged a version by then is fenced.")
    join_deadline_s: float = Field(60.0, gt=0, description="Forming a new epoch.")
    kv_on_update: Literal["keep", "recompute"] = Field(
        "keep", description="Running requests' keys and values after an update."
    )
    snapshot: Literal["auto", "host", "device"] = Field("auto", description="Where the snapshot lives.")
    wait_for_generators: bool = Field(
        False, description="Trainer waits until a version is served everywhere (eta = 0 implies it)."
    )


class SinksSection(Section):
    """`sinks`: where metrics go beside metrics.jsonl; a slow, blocking or failing one never slows or stops the run."""

    names: list[str] = Field(
        default_factory=list, description="tensorboard, wandb, trackio, or entry points of slipstream.metric_sinks."
    )
    options: dict[str, dict[str, str | int | float | bool]] = Field(
        default_factory=dict, description="Arguments by name of the sink, such as {wandb: {project: maths}}."
    )
    queue_records: int = Field(1000, ge=1, description="Records a sink may be behind; later ones are dropped for it.")
    close_s: float = Field(
        5.0, gt=0, description="At the end of the coordinator: time for all sinks to finish writing."
    )


class TransportSection(Section):
    """`transport`: sockets."""

    heartbeat_s: float = Field(1.0, gt=0, description="Interval of heartbeats, both ways.")
    peer_timeout_s: float = Field(10.0, gt=0, description="A silent peer is taken for gone after this.")
    connect_deadline_s: float = Field(60.0, gt=0, description="First contact with a peer.")
    request_deadline_s: float = Field(30.0, gt=0, description="One request and its answer.")
    ack_deadline_s: float = Field(
        30.0, gt=0, description="A trajectory not acknowledged by then goes to another daemon."
    )
    max_message_mb: int = Field(256, ge=1, description="Largest message; larger ones are refused by the sender.")
    outbox_messages: int = Field(1024, ge=1, description="Messages held for one peer before it is taken for frozen.")
    curve_dir: str | None = Field(None, description="Folder of CURVE keys (slipstream keys); needed off loopback.")


class DeploySection(Section):
    """`deploy`: the local supervisor."""

    backoff_s: float = Field(1.0, gt=0, description="First delay before a restart; doubles up to max_backoff_s.")
    max_backoff_s: float = Field(60.0, gt=0, description="Longest delay before a restart.")
    stop_grace_s: float = Field(60.0, gt=0, description="From SIGTERM to SIGKILL.")
    watchdog_s: float = Field(
        120.0,
        ge=0,
        description="A role that showed no progress for this long, once ready, is killed and restarted; 0 = never. "
        "Long operations are announced and get their own time.",
    )
    log_mb: int = Field(64, ge=1, description="Size of a log file before it is rotated (3 kept).")
    min_free_gb: float = Field(0.5, ge=0, description="Alarm below this much free disk.")
