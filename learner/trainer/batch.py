"""What one update consumes and reports, and how trajectories become packed micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from learner.trainer.attention import PackedLayout, plan_layout
from protocol.messages import BatchItem, BatchPlan


@dataclass(frozen=True)
class TrajectoryArrays:
    """Arrays of one trajectory, as recorded by the generator (P prompt tokens, R response tokens).

    ``token_ids`` int32 ``[P + R]``; ``logp_behaviour`` float32 ``[R]``; ``versions`` int32 ``[R]``; ``loss_mask``
    uint8 ``[R]`` (0 for tokens the policy did not sample).
    """

    token_ids: np.ndarray
    logp_behaviour: np.ndarray
    versions: np.ndarray
    loss_mask: np.ndarray

    def check(self, item: BatchItem) -> None:
        """Raises ValueError, naming the trajectory, when lengths disagree or a sampled token's log-prob is missing."""
        name = f"trajectory {item.group_id}/{item.slot} ({item.prompt_id})"
        num_response = item.num_response_tokens
        if len(self.token_ids) != item.num_prompt_tokens + num_response:
            raise ValueError(
                f"{name} has {len(self.token_ids)} tokens, its record says {item.num_prompt_tokens + num_response}"
            )
        for field_name in ("logp_behaviour", "versions", "loss_mask"):
            if len(getattr(self, field_name)) != num_response:
                raise ValueError(
                    f"{name}: {field_name} has {len(getattr(self, field_name))} entries for {num_response} tokens"
                )
        if item.num_prompt_tokens < 1:
            raise ValueError(f"{name} has no prompt token to predict its first answer token from")
        if not np.isfinite(self.logp_behaviour[self.loss_mask != 0]).all():
            raise ValueError(f"{name}: a sampled token has no finite behaviour log-prob")


@dataclass(frozen=True)
class TrainBatch:
    """A planned batch and the arrays of this rank's own trajectories, by index into ``plan.items``.

    ``advantages [S]`` over the items, where they are given instead of estimated from the scores.
    """

    plan: BatchPlan
    arrays: Mapping[int, TrajectoryArrays]
    advantages: np.ndarray | None = None


@dataclass(frozen=True)
class UpdateResult:
    """What an update did. ``num_applied`` and ``num_skipped`` count optimizer steps; ``policy_version`` is the version
    afterwards; token counts are over all ranks, those of trained tokens also by age (``trained_ages``);
    ``num_skipped_in_a_row`` counts skipped steps since the last applied.
    """

    policy_version: int
    num_applied: int
    num_skipped: int
    num_skipped_in_a_row: int
    num_trained_tokens: int
    num_stale_tokens: int
    max_token_staleness: int
    trained_ages: dict[int, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class MicroBatch:
    """Packed sequences (N tokens, T response tokens in order of sequences); all tensors on the engine's device.

    ``predict_T`` is the row of the hidden states that predicts each response token; ``seq_id_T`` (0..S-1) indexes
    ``indices``, which index ``plan.items``; ``sampled_T`` is True for tokens the policy sampled and ``mask_T`` for
    those of them that count in the loss (``update.prepare`` applies the staleness bound). A dummy has no indices and
    no token that counts.
    """

    indices: tuple[int, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: PackedLayout
    predict_T: torch.Tensor
    token_T: torch.Tensor
    temperature_T: torch.Tensor
    logp_behaviour_T: torch.Tensor
    version_T: torch.Tensor
    mask_T: torch.Tensor
    sampled_T: torch.Tensor
    seq_id_T: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]


def split_mini_batches(plan: BatchPlan, *, num_mini_batches: int) -> list[list[list[list[int]]]]:
    """``result[m][rank]`` lists mini-batch m's micro-batches, equal counts on all ranks (empty ones are dummies).

    Mini-batch m holds the m-th of equal runs of groups in plan order. A micro-batch that spans several mini-batches is
    split, so every plan within the token cap stays within it.

    Raises ValueError when the ranks' counts differ, an item is missing or the groups do not divide evenly.
    """
    counts = {len(rank) for rank in plan.micro_batches}
    if len(counts) != 1:
        raise ValueError(f"batch {plan.batch_id}: ranks have different numbers of micro-batches: {sorted(counts)}")
    planned = sorted(i for rank in plan.micro_batches for micro_batch in rank for i in micro_batch)
    if planned != list(range(len(plan.items))):
        raise ValueError(
            f"batch {plan.batch_id}: its micro-batches do not hold each of its {len(plan.items)} items once"
        )
    groups = list(dict.fromkeys(item.group_id for item in plan.items))
    if len(groups) % num_mini_batches:
        raise ValueError(
            f"batch {plan.batch_id}: {len(groups)} groups do not divide into {num_mini_batches} mini-batches "
            "(learner.mini_batches must divide learner.groups_per_batch)"
        )
    per_mini = len(groups) // num_mini_batches
    mini_of_group = {group: index // per_mini for index, group in enumerate(groups)}
    mini_of_item = [mini_of_group[item.group_id] for item in plan.items]
    result: list[list[list[list[int]]]] = [[[] for _ in plan.micro_batches] for _ in range(num_mini_batches)]
    for slot in zip(*plan.micro_batches, strict=True):
        for mini in range(num_mini_batches):
            parts = [[i for i in micro_batch if mini_of_item[i] == mini] for micro_batch in slot]
            if any(parts):
                for rank, part in enumerate(parts):
                    result[mini][rank].append(part)
    return result


def build_micro_batch(
    indices: Sequence[int],
    *,
    items: Sequence[BatchItem],
    arrays: Mapping[int, TrajectoryArrays],
    excluded: frozenset[int] = frozenset(),
    kernel: str,
    device: torch.device,
    multiple_of: int = 1,
) -> MicroBatch:
    """Packs these items. All tokens of ``excluded`` items stay in the sequence and leave ``mask_T``.

    Masks come from the recorded lengths alone; token ids never decide what is trained. With kernel "sdpa" answers to
    the same prompt share its tokens, which changes nothing but the work: under a causal mask a prompt does not see
    its answers. A document of padding makes the number of tokens a multiple of ``multiple_of``.
    """
    if not indices:
        return _dummy(kernel=kernel, device=device, multiple_of=multiple_of)
    tokens, positions, predict, temperature, seq_id, response = [], [], [], [], [], []
    documents: list[np.ndarray] = []
    prompts: dict[tuple[int, bytes], np.ndarray] = {}
    offset = 0
    for sequence, i in enumerate(indices):
        item, ids = items[i], arrays[i].token_ids
        num_prompt, num_response = item.num_prompt_tokens, item.num_response_tokens
        key = (item.group_id, ids[:num_prompt].tobytes())
        shared = prompts.get(key, np.empty(0, np.int64)) if kernel == "sdpa" else np.empty(0, np.int64)
        num_new = len(ids) - len(shared)
        document = np.concatenate([shared, offset + np.arange(num_new)])
        prompts[key] = document[:num_prompt]
        documents.append(document)
        tokens.append(ids[len(shared) :])
        positions.append(np.arange(len(shared), len(ids)))
        predict.append(document[num_prompt - 1 : num_prompt - 1 + num_response])
        response.append(ids[num_prompt:])
        temperature.append(np.full(num_response, item.temperature, np.float32))
        seq_id.append(np.full(num_response, sequence, np.int64))
        offset += num_new
    if num_padding := -offset % multiple_of:
        documents.append(offset + np.arange(num_padding))
        tokens.append(np.zeros(num_padding, np.int32))
        positions.append(np.arange(num_padding))
    version_T = np.concatenate([arrays[i].versions for i in indices]).astype(np.int64)
    sampled_T = np.concatenate([arrays[i].loss_mask for i in indices]) != 0

    included_T = np.concatenate([np.full(items[i].num_response_tokens, i not in excluded) for i in indices])

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        indices=tuple(indices),
        input_ids=put(np.concatenate(tokens).astype(np.int64))[None],
        position_ids=put(np.concatenate(positions))[None],
        layout=plan_layout(documents, kernel=kernel, device=device),
        predict_T=put(np.concatenate(predict)),
        token_T=put(np.concatenate(response).astype(np.int64)),
        temperature_T=put(np.concatenate(temperature)),
        logp_behaviour_T=put(np.concatenate([arrays[i].logp_behaviour for i in indices]).astype(np.float32)),
        version_T=put(version_T),
        mask_T=put(sampled_T & included_T),
        sampled_T=put(sampled_T),
        seq_id_T=put(np.concatenate(seq_id)),
    )


def _dummy(*, kernel: str, device: torch.device, multiple_of: int) -> MicroBatch:
    """A few tokens of which none counts: the rank joins the slot's collectives and contributes nothing."""
    num_tokens = max(2, multiple_of)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    off = torch.zeros(1, dtype=torch.bool, device=device)
    return MicroBatch(
        indices=(),
        input_ids=torch.zeros(1, num_tokens, dtype=torch.int64, device=device),
        position_ids=torch.arange(num_tokens, device=device)[None],
        layout=plan_layout([np.arange(num_tokens)], kernel=kernel, device=device),
        predict_T=zero,
        token_T=zero,
        temperature_T=torch.ones(1, device=device),
        logp_behaviour_T=torch.zeros(1, device=device),
        version_T=zero,
        mask_T=off,
        sampled_T=off,
        seq_id_T=zero,
    )
