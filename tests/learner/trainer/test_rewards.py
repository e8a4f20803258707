"""Rewards from the batch table: the overlong penalty goes by the limit of the answer's own stage."""

from pathlib import Path

import msgspec

from learner.trainer.rewards import rewards
from protocol.config import Config
from tests.support.training import make_items, tiny_config


def test_the_soft_penalty_ramps_to_the_limit_of_each_answers_stage():
    base = tiny_config(Path("model"), Path("run"), algorithm={"overlong": "soft_penalty", "overlong_buffer_tokens": 8})
    stages = [{"from_update": 5, "max_response_tokens": 64}]
    config = Config.model_validate(base.model_dump() | {"stages": stages})
    first, second = make_items(num_groups=1)
    items = [
        msgspec.structs.replace(first, num_response_tokens=28, score=1.0, stage=0),
        msgspec.structs.replace(second, num_response_tokens=28, score=1.0, stage=1),
        msgspec.structs.replace(second, num_response_tokens=60, score=1.0, stage=1),
    ]
    assert rewards(items, config=config).tolist() == [0.5, 1.0, 0.5]
