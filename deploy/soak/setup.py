"""The run a soak torments: a tokenizer of bytes, sums as prompts, short deadlines."""

import json
from pathlib import Path
from typing import Any

from deploy.prepare.tiny_model import build_tiny_tokenizer
from protocol.config import Config
from protocol.config.load import build_config, save_effective
from protocol.config.machine import free_port

SOURCE = "sums"
NUM_PROMPTS = 300


def write_run(folder: Path, *, advertise: str, listen: str, seed: int, rate: float) -> Config:
    """Tokenizer, data and FOLDER/run/config.yaml.

    Args:
        advertise: the coordinator's address as roles reach it (the toxic proxy's).
        listen: where the coordinator binds.
        rate: tokens per second of each request of a scripted generator.
    """
    model = folder / "model"
    model.mkdir(parents=True)
    build_tiny_tokenizer(model)
    (model / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    (folder / "train.jsonl").write_text("".join(json.dumps(_row(i)) + "\n" for i in range(NUM_PROMPTS)))
    values = _values(folder, advertise=advertise, listen=listen, seed=seed, rate=rate)
    loaded = build_config(values, source="soak")
    save_effective(loaded, loaded.config.run.dir)
    return loaded.config


def coordinator_port() -> int:
    """A free port of the loopback interface, so that a restarted coordinator finds its address again."""
    return free_port()


def _row(number: int) -> dict[str, Any]:
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
    }


def _values(folder: Path, *, advertise: str, listen: str, seed: int, rate: float) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder / "run"), "name": "soak", "seed": seed, "max_updates": 100_000_000},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train_files": [str(folder / "train.jsonl")], "max_prompt_failures": 1000},
        "evaluation": {"at_start": False, "at_end": False},
        "coordinator": {
            "listen": listen,
            "advertise": advertise,
            "lease_deadline_s": 4.0,
            "lease_max_s": 30.0,
            "max_attempts": 1000,
            "segment_mb": 1,
        },
        "sampling": {"max_response_tokens": 64},
        "learner": {"groups_per_batch": 4, "group_size": 4, "max_tokens_per_micro_batch": 1024},
        "algorithm": {"max_staleness": 2},
        "generators": {
            "backend": "scripted",
            "max_num_seqs": 8,
            "drain_s": 0.5,
            "engine_args": {"tokens_per_s": rate, "mean_tokens": 20, "receive": False},
        },
        "rewardd": {"scorers": {SOURCE: "passthrough"}, "code": {"enabled": False}},
        "transport": {
            "heartbeat_s": 0.3,
            "peer_timeout_s": 2.0,
            "connect_deadline_s": 15.0,
            "request_deadline_s": 4.0,
            "ack_deadline_s": 3.0,
        },
        "deploy": {"stop_grace_s": 10.0},
    }
