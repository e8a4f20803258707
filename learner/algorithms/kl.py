"""KL to the reference policy: estimators (Schulman 2020, "Approximating KL divergence") and coefficient controllers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from learner.algorithms.tensors import bounded_log_ratio

Estimator = Literal["k1", "k2", "k3"]
MAX_K3 = 10.0


def kl_estimate(
    *,
    logp_T: Tensor,
    ref_logp_T: Tensor,
    mask_T: Tensor,
    estimator: Estimator,
    straight_through: bool = False,
) -> Tensor:
    """Estimate of KL(policy, reference) per token from tokens of the policy, ``[T]`` nats; 0 at masked positions.

    ``d = logp - ref_logp`` cut to +-20; ``k1 = d``, ``k2 = d^2 / 2``, ``k3 = exp(-d) - 1 + d`` cut to 10. With
    ``straight_through`` the value is the estimator's and the gradient that of k2, which is unbiased for the KL's.
    """
    d_T = bounded_log_ratio(logp_T, ref_logp_T, mask_T)
    if estimator == "k1":
        kl_T = d_T
    elif estimator == "k2":
        kl_T = d_T.square() / 2
    elif estimator == "k3":
        kl_T = ((-d_T).exp() - 1 + d_T).clamp(max=MAX_K3)
    else:
        raise ValueError(f"KL estimator must be k1, k2 or k3, got {estimator!r}")
    if straight_through:
        k2_T = d_T.square() / 2
        return k2_T - k2_T.detach() + kl_T.detach()
    return kl_T


@dataclass
class FixedKL:
    """A coefficient that stays."""

    value: float

    def update(self, *, kl: float, num_seqs: int) -> float:
        return self.value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


@dataclass
class AdaptiveKL:
    """Proportional controller of Ziegler et al. 2019 (arXiv 1909.08593).

    ``value *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_seqs / horizon``, where ``num_seqs`` is the number of
    sequences in the batch and ``kl`` the batch's mean in nats per token. ``horizon`` is in sequences; it is no window.
    """

    value: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.value < 0 or self.target <= 0 or self.horizon <= 0:
            raise ValueError(
                "adaptive KL needs coef >= 0, target > 0 and horizon > 0, "
                f"got {self.value}, {self.target} and {self.horizon}"
            )

    def update(self, *, kl: float, num_seqs: int) -> float:
        """Take a batch's KL in and return the coefficient for the next batch."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= max(0.0, 1 + error * num_seqs / self.horizon)
        return self.value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])
