"""Ground truths as the data sets store them, turned into test sets without executing anything."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from typing import Any, Final, Literal

Kind = Literal["stdin", "function", "assert"]

_SHAPES: Final = "inputs/outputs, assert_case, test_code or LiveCodeBench's public_test_cases/private_test_cases"
_MAX_UNPACKED_BYTES: Final = 1 << 30


class _DataUnpickler(pickle.Unpickler):
    """Builds plain data only: every global, and so every call, is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"the pickled tests refer to {module}.{name}; only plain data is read")


def unpickle_data(blob: bytes) -> Any:
    """Plain data (str, numbers, list, tuple, dict) from a pickle; nothing in it is imported or called.

    Raises:
        ValueError: the pickle is damaged or names a global.
    """
    try:
        return _DataUnpickler(io.BytesIO(blob)).load()
    except ValueError:
        raise
    except Exception as fault:  # the unpickler raises nearly any class on damaged data
        raise ValueError(f"damaged test pickle: {type(fault).__name__}") from None


def _unpack_private(text: str) -> Any:
    """LiveCodeBench private tests: JSON, or base64 of zlib of a pickled JSON string."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        engine = zlib.decompressobj()
        blob = engine.decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED_BYTES)
    except (ValueError, zlib.error):
        raise ValueError("private_test_cases is neither JSON nor packed tests") from None
    if engine.unconsumed_tail:
        raise ValueError(f"private_test_cases unpack to more than {_MAX_UNPACKED_BYTES} bytes")
    data = unpickle_data(blob)
    return json.loads(data) if isinstance(data, str | bytes) else data


def _from_livecodebench(truth: Mapping[str, Any]) -> tuple[Kind, dict[str, Any]]:
    cases: list[Mapping[str, Any]] = []
    for name in ("public_test_cases", "private_test_cases"):
        given = truth.get(name) or []
        listed = _unpack_private(given) if isinstance(given, str) else given
        if not isinstance(listed, list) or not all(isinstance(case, Mapping) for case in listed):
            raise ValueError(f"{name} is not a list of test cases")
        cases += listed
    metadata = truth.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    try:
        tests: dict[str, Any] = {
            "inputs": [case["input"] for case in cases],
            "outputs": [case["output"] for case in cases],
        }
    except KeyError as fault:
        raise ValueError(f"a test case lacks {fault}") from None
    function = metadata.get("func_name") or truth.get("fn_name")
    if function:
        return "function", {**tests, "fn_name": function}
    return "stdin", tests


def decode_tests(ground_truth: object) -> tuple[Kind, dict[str, Any]]:
    """Kind and test set of a ground truth: a mapping or its JSON text, with None entries dropped.

    Raises:
        ValueError: not one of the known shapes.
    """
    truth = ground_truth
    if isinstance(truth, bytes):
        truth = truth.decode()
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            raise ValueError("ground truth is text but not JSON") from None
    if isinstance(truth, list) and len(truth) == 1:
        truth = truth[0]
        if isinstance(truth, str):
            return decode_tests(truth)
    if isinstance(truth, list) and truth and all(isinstance(item, str) for item in truth):
        truth = {"assert_case": truth}
    if not isinstance(truth, Mapping):
        raise ValueError(f"ground truth is {type(truth).__name__}, not a mapping with {_SHAPES}")
    tests = {str(key): value for key, value in truth.items() if value is not None}
    if "public_test_cases" in tests or "private_test_cases" in tests:
        return _from_livecodebench(tests)
    # The order of the data sets' own grader: a LeetCode row may carry the inputs of its examples as well.
    if "test_code" in tests or "import_prefix" in tests or "assert_case" in tests:
        return "assert", tests
    if "inputs" in tests or "outputs" in tests:
        return ("function" if tests.get("fn_name") else "stdin"), tests
    raise ValueError(f"ground truth has {sorted(tests)}; expected {_SHAPES}")
