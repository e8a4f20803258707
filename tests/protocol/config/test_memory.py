"""Memory estimates: known parameter counts, what each setting saves, and advice that fits."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.config import Config
from protocol.config.memory import GIB, ModelFacts, advise, kv_sequences, trainer_memory, with_settings
from protocol.errors import UserError

QWEN_1_5B = ModelFacts(
    num_layers=28,
    hidden_size=1536,
    intermediate_size=8960,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    vocab_size=151_936,
    tied=True,
)
LLAMA_7B = ModelFacts(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=11_008,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    vocab_size=32_000,
    tied=False,
)


def config_of(**sections: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train_files": []}, **sections})


@pytest.mark.parametrize(("facts", "published"), [(QWEN_1_5B, 1_543_714_304), (LLAMA_7B, 6_738_415_616)])
def test_parameters_are_those_published(facts: ModelFacts, published: int) -> None:
    assert facts.num_params == pytest.approx(published, rel=1e-3)


def test_sharded_state_is_18_bytes_per_parameter_over_all_ranks() -> None:
    for ranks in (1, 8):
        parts = trainer_memory(LLAMA_7B, config_of(trainer={"num_ranks": ranks})).parts
        state = parts["weights"] + parts["gradients"] + parts["optimizer"]
        assert state * ranks == pytest.approx(18 * LLAMA_7B.num_params)


def test_offloading_moves_bytes_to_the_host() -> None:
    plain = trainer_memory(LLAMA_7B, config_of())
    offloaded = trainer_memory(LLAMA_7B, config_of(learner={"zero": {"offload_optimizer": "cpu"}}))
    assert plain.total - offloaded.total >= 16 * LLAMA_7B.num_params
    assert offloaded.host - plain.host == pytest.approx(16 * LLAMA_7B.num_params)


@given(
    share=st.floats(0.0, 1.0),
    tokens=st.integers(2048, 65_536),
    ranks=st.sampled_from([1, 2, 8]),
    more=st.integers(1, 4096),
)
def test_more_work_at_a_time_never_needs_less(share: float, tokens: int, ranks: int, more: int) -> None:
    base = config_of(trainer={"num_ranks": ranks})
    here = trainer_memory(QWEN_1_5B, with_settings(base, share=share, offload=False, tokens=tokens))
    longer = trainer_memory(QWEN_1_5B, with_settings(base, share=share, offload=False, tokens=tokens + more))
    recomputed = trainer_memory(QWEN_1_5B, with_settings(base, share=1.0, offload=False, tokens=tokens))
    assert here.total <= longer.total
    assert recomputed.total <= here.total + QWEN_1_5B.activation_bytes(width=2) * tokens


def test_advice_fits_and_gives_up_no_more_than_it_must() -> None:
    config = config_of(learner={"max_tokens_per_micro_batch": 16_384})
    roomy = advise(QWEN_1_5B, config, device_bytes=139 * GIB)
    tight = advise(QWEN_1_5B, config, device_bytes=48 * GIB)
    assert roomy is not None and tight is not None
    assert roomy.estimate.fits(139 * GIB) and tight.estimate.fits(48 * GIB)
    assert roomy.checkpoint_share < tight.checkpoint_share and not tight.offload_optimizer
    assert roomy.max_tokens_per_micro_batch == 16_384
    applied = with_settings(
        config,
        share=tight.checkpoint_share,
        offload=tight.offload_optimizer,
        tokens=tight.max_tokens_per_micro_batch,
    )
    assert trainer_memory(QWEN_1_5B, applied) == tight.estimate
    assert "model.gradient_checkpointing=true" in tight.overrides()


def test_advice_offloads_when_nothing_else_fits_and_says_when_nothing_does() -> None:
    config = config_of()
    offloaded = advise(LLAMA_7B, config, device_bytes=80 * GIB)
    assert offloaded is not None and offloaded.offload_optimizer
    assert advise(LLAMA_7B, config, device_bytes=12 * GIB) is None


def test_kv_cache_holds_fewer_long_sequences() -> None:
    short, long = (config_of(sampling={"max_response_tokens": n}) for n in (1024, 15_360))
    assert kv_sequences(QWEN_1_5B, short, device_bytes=80 * GIB) > 7 * kv_sequences(
        QWEN_1_5B, long, device_bytes=80 * GIB
    )
    assert kv_sequences(LLAMA_7B, short, device_bytes=8 * GIB) == 0


def test_unknown_architectures_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    with pytest.raises(UserError, match="num_hidden_layers"):
        ModelFacts.of_folder(tmp_path)
    with pytest.raises(UserError, match=r"config\.json"):
        ModelFacts.of_folder(tmp_path / "absent")
