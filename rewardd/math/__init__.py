"""Math verification: which answer counts and whether it equals the reference.

Importing this package loads neither sympy nor mpmath; `warm_up` loads them ahead of the first hard answer.
"""

from rewardd.math.errors import VerifierFault
from rewardd.math.gold import check_gold, decode_ground_truth
from rewardd.math.symbolic import warm_up
from rewardd.math.verdict import MathResult, exact_verdict, verify

__all__ = [
    "MathResult",
    "VerifierFault",
    "check_gold",
    "decode_ground_truth",
    "exact_verdict",
    "verify",
    "warm_up",
]
