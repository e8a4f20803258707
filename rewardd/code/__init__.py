"""Sandboxed execution of model-written programs inside a `Sandbox`: `run_case` judges one by its tests, `run_program`
runs one for its output."""

from rewardd.code.cases import CodeResult, run_case
from rewardd.code.decode import decode_tests
from rewardd.code.extract import extract_program
from rewardd.code.limits import Limits
from rewardd.code.programs import run_program
from rewardd.code.sandbox import IsolationUnavailable, Sandbox

__all__ = [
    "CodeResult",
    "IsolationUnavailable",
    "Limits",
    "Sandbox",
    "decode_tests",
    "extract_program",
    "run_case",
    "run_program",
]
