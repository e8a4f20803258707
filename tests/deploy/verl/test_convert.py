"""Every knob of the seed documents: mapped, or left out or refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import run
from deploy.verl.convert import Outcome, convert, equivalent
from deploy.verl.reading import read_script, read_settings
from protocol.config.load import build_config
from protocol.errors import ExitStatus, UserError

A, R, C = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"
REF = "actor_rollout_ref.ref"
KL = {"algorithm.use_kl_in_reward": True}
ADAPTIVE = KL | {"algorithm.kl_ctrl.type": "adaptive"}
GRPO = {"algorithm.adv_estimator": "grpo"}

Row = tuple[str, Any, dict[str, Any], dict[str, Any] | str]

MAPPED: list[Row] = [
    ("9", f"{R}.gpu_memory_utilization", 0.6, {"generators.gpu_memory_utilization": 0.6}),
    ("10", f"{R}.max_num_seqs", 256, {"generators.max_num_seqs": 256}),
    ("11", f"{R}.max_num_batched_tokens", 8192, {"generators.max_num_batched_tokens": 8192}),
    ("12", f"{R}.tensor_model_parallel_size", 2, {"generators.tensor_parallel_size": 2}),
    ("13", f"{R}.enable_chunked_prefill", True, {"generators.enable_chunked_prefill": True}),
    ("16", f"{R}.temperature", 1.0, {"sampling.temperature": 1.0}),
    ("16", f"{R}.top_p", 1.0, {"sampling.top_p": 1.0}),
    ("17", f"{R}.response_length", 256, {"sampling.max_response_tokens": 256}),
    ("17", f"{R}.prompt_length", 512, {"data.max_prompt_tokens": 512}),
    ("21", "data.train_batch_size", 256, {"learner.groups_per_batch": 256}),
    ("28", f"{A}.ppo_max_token_len_per_gpu", 16384, {"learner.max_tokens_per_micro_batch": 16384}),
    ("34", "actor_rollout_ref.model.enable_gradient_checkpointing", True, {"model.gradient_checkpointing": True}),
    ("35", f"{A}.ulysses_sequence_parallel_size", 2, {"learner.sequence_parallel": 2}),
    ("37", "actor_rollout_ref.model.use_liger", True, {"learner.liger": True}),
    ("39", f"{A}.fsdp_config.param_offload", True, {"learner.zero.offload_param": "cpu"}),
    ("39", f"{A}.fsdp_config.optimizer_offload", True, {"learner.zero.offload_optimizer": "cpu"}),
    ("42", "data.train_files", "/d/train.parquet", {"data.train_files": ["/d/train.parquet"]}),
    ("42", "data.val_files", ["/d/a.parquet"], {"data.eval_files": ["/d/a.parquet"]}),
    ("46", "data.max_prompt_length", 512, {"data.max_prompt_tokens": 512}),
    ("46", "data.max_response_length", 256, {"sampling.max_response_tokens": 256}),
    ("48", "actor_rollout_ref.model.path", "/m", {"model.path": "/m"}),
    ("48", "critic.model.path", "/m", {"learner.critic.path": "/m"}),
    ("53", f"{A}.optim.lr", 1e-6, {"learner.optim.lr": 1e-6}),
    ("54", "critic.optim.lr", 1e-5, {"learner.critic.lr": 1e-5}),
    ("55", f"{A}.optim.weight_decay", 0.01, {"learner.optim.weight_decay": 0.01}),
    ("56", f"{A}.optim.lr_warmup_steps", 7, {"learner.optim.warmup_updates": 7}),
    ("57", f"{A}.optim.warmup_style", "cosine", {"learner.optim.schedule": "cosine"}),
    ("57", f"{A}.optim.min_lr_ratio", 0.1, {"learner.optim.min_lr_ratio": 0.1}),
    ("58", f"{A}.grad_clip", 1.0, {"learner.optim.grad_clip": 1.0}),
    ("64", "algorithm.gamma", 1.0, {"algorithm.gamma": 1.0}),
    ("64", "algorithm.lam", 0.95, {"algorithm.lam": 0.95}),
    ("65", f"{A}.clip_ratio", 0.2, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}),
    ("66", f"{A}.entropy_coeff", 0.001, {"algorithm.entropy.coef": 0.001}),
    ("78", "trainer.val_before_train", False, {"evaluation.at_start": False}),
    ("80", "trainer.n_gpus_per_node", 8, {"trainer.num_ranks": 4, "generators.num": 4}),
    ("81", "trainer.save_freq", 10, {"learner.checkpoint.every_updates": 10}),
    ("81", "trainer.test_freq", -1, {"evaluation.every_updates": 0}),
    ("82", "trainer.total_epochs", 15, {"run.max_passes": 15}),
]  # fmt: skip

WITH_OTHERS: list[tuple[str, str, Any, dict[str, Any], dict[str, Any]]] = [
    ("22", f"{A}.ppo_mini_batch_size", 64, {"data.train_batch_size": 256}, {"learner.mini_batches": 4}),
    ("56", f"{A}.optim.lr_warmup_steps_ratio", 0.1, {"trainer.total_training_steps": 200},
     {"learner.optim.warmup_updates": 20}),
    ("59", "algorithm.kl_ctrl.kl_coef", 0.001, KL, {"algorithm.kl.coef": 0.001}),
    ("60", "algorithm.kl_ctrl.target_kl", 0.1, ADAPTIVE, {"algorithm.kl.target": 0.1}),
    ("61", "algorithm.kl_ctrl.horizon", 10000, ADAPTIVE, {"algorithm.kl.horizon": 10000}),
    ("59", f"{A}.kl_loss_coef", 0.01, {f"{A}.use_kl_loss": True}, {"algorithm.kl.coef": 0.01}),
]  # fmt: skip

LEFT_OUT: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("14", f"{R}.disable_log_stats", False, {}),
    ("19", f"{R}.log_prob_micro_batch_size_per_gpu", 8, {}),
    ("23", f"{A}.ppo_micro_batch_size_per_gpu", 4, {}),
    ("24", f"{C}.ppo_micro_batch_size_per_gpu", 4, {}),
    ("25", f"{REF}.log_prob_micro_batch_size_per_gpu", 4, {}),
    ("29", f"{C}.ppo_max_token_len_per_gpu", 32768, {}),
    ("30", f"{REF}.log_prob_max_token_len_per_gpu", 32768, {}),
    ("30", f"{R}.log_prob_max_token_len_per_gpu", 32768, {}),
    ("31", f"{C}.forward_micro_batch_size_per_gpu", 8, {}),
    ("31", f"{C}.forward_max_token_len_per_gpu", 32768, {}),
    ("34", "critic.model.enable_gradient_checkpointing", True, {}),
    ("38", f"{A}.fsdp_config.wrap_policy.min_num_params", 0, {}),
    ("39", f"{A}.fsdp_config.grad_offload", True, {}),
    ("48", "critic.model.tokenizer_path", "/m", {}),
    ("54", "critic.optim.lr", 1e-5, GRPO),
    ("59", "algorithm.kl_ctrl.kl_coef", 0.001, {}),
    ("60", "algorithm.kl_ctrl.target_kl", 0.1, KL),
    ("61", "algorithm.kl_ctrl.horizon", 10000, KL),
    ("77", "trainer.logger", ["console", "mlflow"], {}),
    ("85", "ray_kwargs.ray_init.num_cpus", 8, {}),
]

SAME: list[tuple[str, str, Any]] = [
    ("16", f"{R}.do_sample", True),
    ("27", f"{A}.use_dynamic_bsz", True),
    ("41", "actor_rollout_ref.model.use_remove_padding", True),
    ("43", "trainer.default_hdfs_dir", None),
    ("79", "trainer.default_hdfs_dir", "null"),
    ("80", "trainer.nnodes", 1),
]

REFUSED: list[tuple[str, str, Any, str]] = [
    ("2", f"{R}.name", "tgi", "openai"),
    ("2", f"{R}.name", "sglang", "generators run vLLM"),
    ("16", f"{R}.do_sample", False, "training answers are sampled"),
    ("22", f"{A}.ppo_mini_batch_size", 96, "must divide"),
    ("26", f"{A}.ppo_micro_batch_size", 4, "deprecated"),
    ("26", f"{C}.ppo_micro_batch_size", 4, "deprecated"),
    ("26", f"{R}.log_prob_micro_batch_size", 4, "deprecated"),
    ("12", f"{A}.strategy", "megatron", "ZeRO-3"),
    ("27", f"{A}.use_dynamic_bsz", False, "packed"),
    ("41", "actor_rollout_ref.model.use_remove_padding", False, "packed"),
    ("43", "trainer.default_hdfs_dir", "hdfs://x", "data.train_files"),
    ("56", f"{A}.optim.lr_warmup_steps_ratio", 0.1, "total_training_steps"),
    ("80", "trainer.nnodes", 4, "trainer.num_nodes"),
    ("-", "trainer.nosuch", 1, "unknown key; the nearest"),
    ("-", "data.train_files", "$NOWHERE/train.parquet", "not set"),
]


def fate_of(key: str, value: Any, others: dict[str, Any] | None = None) -> Outcome:
    """What becomes of one key among others."""
    return next(outcome for outcome in convert({**(others or {}), key: value}) if outcome.key == key)


@pytest.mark.parametrize(("row", "key", "value", "ours"), MAPPED)
def test_a_knob_maps(row: str, key: str, value: Any, ours: dict[str, Any]) -> None:
    outcome = fate_of(key, value)
    assert (outcome.fate, outcome.ours) == ("mapped", ours)
    tree = equivalent([outcome])
    tree.setdefault("model", {}).setdefault("path", "/m")
    tree.setdefault("data", {}).setdefault("train_files", [])
    build_config(tree)  # the key exists and takes the value


@pytest.mark.parametrize(("row", "key", "value", "others", "ours"), WITH_OTHERS)
def test_a_knob_maps_together_with_others(
    row: str, key: str, value: Any, others: dict[str, Any], ours: dict[str, Any]
) -> None:
    outcome = fate_of(key, value, others)
    assert (outcome.fate, outcome.ours) == ("mapped", ours)


@pytest.mark.parametrize(("row", "key", "value", "others"), LEFT_OUT)
def test_a_knob_without_effect_is_left_out_with_the_reason(
    row: str, key: str, value: Any, others: dict[str, Any]
) -> None:
    outcome = fate_of(key, value, others)
    assert outcome.fate == "left out" and not outcome.ours and len(outcome.why) > 10


@pytest.mark.parametrize(("row", "key", "value"), SAME)
def test_what_is_so_anyway_is_accepted(row: str, key: str, value: Any) -> None:
    assert fate_of(key, value).fate == "same"


@pytest.mark.parametrize(("row", "key", "value", "why"), REFUSED)
def test_what_has_no_meaning_is_refused_with_the_reason(row: str, key: str, value: Any, why: str) -> None:
    outcome = fate_of(key, value, {"data.train_batch_size": 256})
    assert outcome.fate == "refused" and why in outcome.why and not outcome.ours


def test_a_launch_script_is_read_with_its_variables() -> None:
    script = """
    export MODEL="/models/qwen"
    python3 -m verl.trainer.main_ppo data.train_batch_size=256 \\
        actor_rollout_ref.model.path=$MODEL +trainer.logger=['console'] \\
        data.train_files=${HOME}/train.parquet data.val_files=$NOWHERE/x 2>&1 | tee verl_demo.log
    """
    assert read_script(script, {"HOME": "/home/u"}) == {
        "data.train_batch_size": 256,
        "actor_rollout_ref.model.path": "/models/qwen",
        "trainer.logger": ["console"],
        "data.train_files": "/home/u/train.parquet",
        "data.val_files": "$NOWHERE/x",
    }


def test_files_and_words_are_merged_and_later_ones_win(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("defaults: [x]\ndata: {train_batch_size: 64, shuffle: true}\n")
    settings = read_settings([str(file), "data.train_batch_size=128"])
    assert settings == {"data.train_batch_size": 128, "data.shuffle": True}
    with pytest.raises(UserError, match="cannot read"):
        read_settings([str(tmp_path / "absent")])


def test_the_command_prints_yaml_and_names_what_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    good = ["actor_rollout_ref.model.path=/m", "data.train_files=/d.parquet", "algorithm.adv_estimator=grpo"]
    assert run(["import-verl", *good]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed == {
        "model": {"path": "/m"},
        "data": {"train_files": ["/d.parquet"]},
        "algorithm": {"advantage": "grpo"},
    }
    assert run(["import-verl", *good, "reward_model.enable=true"]) == ExitStatus.CONFIG
    assert "reward models are not offered" in capsys.readouterr().err
