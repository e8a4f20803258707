"""The run itself: name, folder, seed, length; and what is trained on."""

from typing import Literal

from pydantic import Field

from protocol.config.base import Section


class RunSection(Section):
    """`run`: identity and length of the run."""

    name: str = Field("run", description="Name shown by status and in reports.", pattern=r"^[A-Za-z0-9._-]+$")
    dir: str = Field("runs/run", description="Run folder: journal, checkpoints, logs, report. Must be a local disk.")
    seed: int = Field(0, ge=0, description="Seed of the data order, sampling seeds and initialisation.")
    max_updates: int = Field(100, ge=1, description="The run is finished after this many trained batches.")
    max_passes: int = Field(1_000_000, ge=1, description="The run is finished after this many passes over the data.")
    max_skipped_updates: int = Field(5, ge=1, description="This many skipped updates in a row end the trainer.")
    when_peers_missing: Literal["wait", "exit"] = Field(
        "wait", description="What the trainer does when generators or rewardd are gone: wait (saying so), or exit."
    )
    peers_missing_deadline_s: float = Field(3600.0, gt=0, description="With `exit`: after this many seconds.")


class ModelSection(Section):
    """`model`: the policy to train."""

    path: str = Field(description="Hugging Face model folder (config, safetensors, tokenizer).")
    tokenizer_path: str | None = Field(None, description="Tokenizer folder; default: model.path.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Computing type of learner and engine.")
    gradient_checkpointing: bool = Field(True, description="Recompute activations in the backward pass.")
    checkpoint_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="gradient_checkpointing: share of the layers that recompute; lower it as memory allows.",
    )
    attention: Literal["auto", "flash", "varlen", "sdpa"] = Field("auto", description="Packed attention kernel.")
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Extra arguments of the chat template."
    )


class DataSection(Section):
    """`data`: prompts to train on and to evaluate with."""

    train_files: list[str] = Field(description="Parquet or JSON-lines files (local or any pyarrow.fs address).")
    eval_files: list[str] = Field(default_factory=list, description="Held-out files, same columns.")
    max_prompt_tokens: int = Field(
        1024, ge=1, description="Longer prompts (after the chat template) are left out and listed."
    )
    shuffle: bool = Field(True, description="Order each pass by a permutation drawn from run.seed.")
    source_weights: dict[str, float] = Field(
        default_factory=dict, description="Sampling weight per data_source; absent means 1."
    )
    skip_after_solved: int = Field(
        0, ge=0, description="Skip a prompt solved fully this many times in a row; 0 = never."
    )
    max_eval_overlap: float = Field(
        0.01, ge=0, le=1, description="Refuse to start above this share of eval prompts in the training data."
    )
    on_change: Literal["refuse", "restart_pass"] = Field("refuse", description="When the data changed between resumes.")
    max_prompt_failures: int = Field(3, ge=1, description="A prompt is quarantined after this many failed groups.")


class SamplingSection(Section):
    """`sampling`: how answers are sampled; the only source of sampling parameters."""

    temperature: float = Field(1.0, gt=0, description="Log-probs are recorded and trained at this temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Must be 1 for training: log-probs would be renormalised.")
    top_k: int = Field(-1, ge=-1, description="Must be -1 for training.")
    min_p: float = Field(0.0, ge=0, le=1, description="Must be 0 for training.")
    max_response_tokens: int = Field(1024, ge=1, description="Longest answer.")
    min_response_tokens: int = Field(0, ge=0, description="Shortest answer.")
    stop: list[str] = Field(default_factory=list, description="Stop strings (end-of-sequence ids are always stops).")
    seeded: bool = Field(False, description="Derive a seed per slot from run.seed (slower in some engines).")


class Stage(Section):
    """One stage of a multi-stage run; unset values keep the previous stage's."""

    from_update: int = Field(ge=0, description="First update of the stage.")
    max_response_tokens: int | None = Field(None, ge=1, description="Longest answer from here on.")
    temperature: float | None = Field(None, gt=0, description="Sampling temperature from here on.")
    filter_groups: Literal["none", "equal_rewards"] | None = Field(
        None, description="algorithm.filter_groups from here on."
    )
    when_metric: str = Field(
        "", description="Start earlier when this metric crosses `above`, e.g. rollout/truncated_fraction."
    )
    above: float = Field(0.0, description="Threshold of `when_metric`.")


class EvaluationSection(Section):
    """`evaluation`: held-out evaluation through the same generators and reward daemons."""

    at_start: bool = Field(True, description="Evaluate version 0.")
    at_end: bool = Field(True, description="Evaluate the last version.")
    every_updates: int = Field(0, ge=0, description="Also every this many updates; 0 = never.")
    num_prompts: int = Field(0, ge=0, description="Use the first N held-out prompts; 0 = all.")
    samples: int = Field(4, ge=1, description="k of avg@k, sampled at `temperature`.")
    temperature: float | None = Field(None, gt=0, description="Default: sampling.temperature.")
    greedy: bool = Field(True, description="Also one greedy answer per prompt.")
