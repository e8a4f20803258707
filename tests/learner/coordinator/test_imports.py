"""The coordinator imports neither torch, nor vLLM, nor DeepSpeed, at import or while it tokenises."""

import subprocess
import sys

SCRIPT = """
import sys
import learner.coordinator.main, learner.coordinator.simulation, learner.data
from learner.data.tokenization import PromptTokenizer
PromptTokenizer(sys.argv[1]).encode(["1 + 1 = ?"])
loaded = {"torch", "vllm", "deepspeed", "jax", "tensorflow"} & set(sys.modules)
assert not loaded, loaded
"""


def test_no_heavy_package_is_loaded(tmp_path):
    from tests.learner.coordinator.harness import tokenizer_folder

    folder = tokenizer_folder(tmp_path / "model")
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
