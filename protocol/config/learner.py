"""Configuration of the learner: algorithm, optimizer, batch, checkpoints, trainer processes."""

from typing import Literal

from pydantic import Field

from protocol.config.base import Section


class KLSection(Section):
    """`algorithm.kl`: KL to the reference model (the initial policy)."""

    where: Literal["off", "loss", "reward"] = Field("off", description="Where the reference KL enters.")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator (Schulman 2020).")
    coef: float = Field(0.001, ge=0, description="Coefficient (initial one when adaptive).")
    controller: Literal["fixed", "adaptive"] = Field("fixed", description="Adaptive: Ziegler et al. 2019.")
    target: float = Field(0.1, gt=0, description="Adaptive only: KL to hold, nats per token.")
    horizon: int = Field(10_000, ge=1, description="Adaptive only: horizon in sequences.")


class EntropySection(Section):
    """`algorithm.entropy`: entropy bonus."""

    coef: float = Field(0.0, ge=0, description="Coefficient (initial one when adaptive).")
    controller: Literal["fixed", "adaptive"] = Field("fixed", description="Adaptive: Skywork-OR1.")
    target: float = Field(0.2, gt=0, description="Adaptive only: entropy to hold, nats per token.")
    delta: float = Field(1e-4, gt=0, description="Adaptive only: step of the coefficient per update.")
    max_coef: float = Field(0.005, gt=0, description="Adaptive only: upper bound of the coefficient.")


class BehaviourSection(Section):
    """`algorithm.behaviour`: importance weight of the behaviour policy; bounds are on rho = pi_prox / pi_behaviour."""

    level: Literal["token", "sequence", "geometric", "off"] = Field("token", description="Level of the ratio.")
    mode: Literal["truncate", "mask"] = Field(
        "truncate", description="Truncate at `high`, or reject outside the bounds."
    )
    high: float = Field(2.0, gt=0, description="Upper bound on rho.")
    low: float = Field(0.0, ge=0, description="Lower bound on rho (mask only).")


class AlgorithmSection(Section):
    """`algorithm`: staleness bound, advantages, loss."""

    max_staleness: int = Field(1, ge=0, description="eta: a token trained at version v was sampled at >= v - eta.")
    advantage: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo", "remax", "grpo_passk", "gae"
    ] = Field("grpo", description="Advantage estimator.")
    loss: Literal["decoupled_ppo", "ppo_clip", "gspo", "cispo", "topr", "reinforce"] = Field(
        "decoupled_ppo", description="Policy loss."
    )
    proximal: Literal["recompute", "loglinear"] = Field("recompute", description="Proximal log-probs.")
    clip_low: float = Field(0.2, ge=0, description="Lower clip: ratio >= 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="Upper clip: ratio <= 1 + clip_high.")
    clip_dual: float = Field(3.0, ge=0, description="Dual clip for negative advantages; 0 = off.")
    behaviour: BehaviourSection = BehaviourSection()
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_sum_over_constant"] = Field(
        "token_mean", description="Loss aggregation over the whole batch and all ranks."
    )
    whiten_advantages: bool = Field(False, description="Whiten advantages over the batch.")
    gamma: float = Field(1.0, gt=0, le=1, description="GAE discount.")
    lam: float = Field(1.0, ge=0, le=1, description="GAE lambda.")
    vtrace: bool = Field(False, description="V-trace value targets (gae only).")
    passk_k: int = Field(0, ge=0, description="grpo_passk: k; 0 = group size.")
    kl: KLSection = KLSection()
    entropy: EntropySection = EntropySection()
    filter_groups: Literal["none", "equal_rewards"] = Field(
        "none", description="equal_rewards: whole groups without signal are filtered and refilled."
    )
    max_filtered_in_a_row: int = Field(
        1000,
        ge=1,
        description="With a filter: this many groups filtered in a row is an alarm and the next groups are trained.",
    )
    overlong: Literal["none", "filter", "soft_penalty"] = Field("none", description="Answers cut by the length limit.")
    overlong_buffer_tokens: int = Field(0, ge=0, description="soft_penalty: length of the ramp before the limit.")
    overlong_penalty: float = Field(1.0, ge=0, description="soft_penalty: penalty at the limit.")


class OptimSection(Section):
    """`learner.optim`: AdamW."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    beta1: float = Field(0.9, gt=0, lt=1, description="AdamW beta1.")
    beta2: float = Field(0.95, gt=0, lt=1, description="AdamW beta2.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    grad_clip: float = Field(1.0, gt=0, description="Global gradient norm limit.")
    warmup_updates: int = Field(0, ge=0, description="Linear warm-up; the first update never has lr 0.")
    schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="After the warm-up.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Floor of cosine/linear as a share of lr.")


class CriticSection(Section):
    """`learner.critic`: used with algorithm.advantage = gae."""

    path: str | None = Field(None, description="Model folder of the critic; default: model.path with a value head.")
    lr: float = Field(1e-5, gt=0, description="Learning rate of the critic.")
    value_clip: float = Field(0.5, gt=0, description="Clip of the value change.")
    warmup_updates: int = Field(0, ge=0, description="Train only the critic in the first updates.")


class ZeroSection(Section):
    """`learner.zero`: DeepSpeed ZeRO-3."""

    offload_optimizer: Literal["none", "cpu"] = Field("none", description="Where the optimizer state lives.")
    offload_param: Literal["none", "cpu"] = Field("none", description="Where the parameters live.")
    reduce_bucket_elements: int = Field(50_000_000, ge=1, description="reduce_bucket_size.")
    prefetch_bucket_elements: int = Field(50_000_000, ge=0, description="stage3_prefetch_bucket_size.")
    persistence_threshold_elements: int = Field(100_000, ge=0, description="stage3_param_persistence_threshold.")
    max_live_elements: int = Field(1_000_000_000, ge=1, description="stage3_max_live_parameters.")


class CheckpointSection(Section):
    """`learner.checkpoint`: crash-safe checkpoints."""

    every_updates: int = Field(10, ge=1, description="Save after this many updates.")
    keep: int = Field(2, ge=1, description="Committed checkpoints kept.")
    in_background: bool = Field(True, description="Snapshot, then write while training goes on.")
    min_free_gb: float = Field(1.0, ge=0, description="Refuse to begin a save below this (beyond the save's own size).")
    resume: Literal["auto", "never"] = Field("auto", description="Resume from the newest committed checkpoint.")
    resume_from: str | None = Field(None, description="Resume from this checkpoint folder (later steps are abandoned).")


class LearnerSection(Section):
    """`learner`: batch and update."""

    groups_per_batch: int = Field(8, ge=1, description="B: groups in a batch.")
    group_size: int = Field(8, ge=1, description="n: answers per prompt.")
    mini_batches: int = Field(
        1, ge=1, description="Optimizer steps per batch (off-policy within the batch); divides B."
    )
    max_tokens_per_micro_batch: int = Field(8192, ge=1, description="Hard cap of a packed micro-batch, per rank.")
    logprob_chunk_tokens: int = Field(1024, ge=1, description="Tokens whose logits exist at one time.")
    liger: bool = Field(False, description="Liger kernels (GPU).")
    sequence_parallel: int = Field(1, ge=1, description="Ulysses sequence-parallel size.")
    optim: OptimSection = OptimSection()
    critic: CriticSection = CriticSection()
    zero: ZeroSection = ZeroSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a packed micro-batch: the cap per rank times the ranks that share one."""
        return self.max_tokens_per_micro_batch * self.sequence_parallel


class SftSection(Section):
    """`sft`: supervised warm start (`slipstream sft`), with the learner's engine and the sections model and learner."""

    files: list[str] = Field(default_factory=list, description="Parquet or JSON lines with a column `messages`.")
    epochs: int = Field(1, ge=1, description="Passes over the data.")
    sequences_per_batch: int = Field(32, ge=1, description="Conversations per optimizer step.")
    optim: OptimSection = OptimSection(lr=1e-5)


class TrainerSection(Section):
    """`trainer`: the processes."""

    num_ranks: int = Field(1, ge=1, description="Trainer ranks on each machine.")
    num_nodes: int = Field(1, ge=1, description="Machines with trainer ranks; the world is num_nodes * num_ranks.")
    master_addr: str = Field("127.0.0.1", description="Address of the first trainer machine, where all ranks meet.")
    master_port: int = Field(
        0, ge=0, le=65535, description="Port where all ranks meet; 0 = a free one (one machine only)."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda when there is one.")
    devices: list[int] = Field(default_factory=list, description="GPU index per rank; empty: 0 .. num_ranks - 1.")
    threads_per_rank: int = Field(0, ge=0, description="CPU threads; 0 = share the cores with the generators.")
    collective_timeout_s: float = Field(600.0, gt=0, description="Deadline of a collective between ranks.")
    memory_limit_gb: float = Field(
        0.0, ge=0, description="Save and restart above this resident size of a rank; 0 = off."
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port of the first rank; 0 = off.")
    batch_wait_s: float = Field(
        10.0, gt=0, description="One wait for a batch at the coordinator (repeated, with status)."
    )


class AlarmSection(Section):
    """`alarms`: collapse detection and what to do about it."""

    action: Literal["alert", "pause", "stop"] = Field("alert", description="On an alarm.")
    min_entropy: float = Field(0.01, ge=0, description="Nats per token.")
    max_kl_behaviour: float = Field(1.0, gt=0, description="Nats per token.")
    min_ess_fraction: float = Field(0.1, ge=0, le=1, description="Effective sample size over sample count.")
    flat_reward_updates: int = Field(20, ge=1, description="Mean reward exactly 0 or 1 for this many updates.")
