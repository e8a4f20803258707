"""The example environment: programs of the policy run in the real sandbox."""

import asyncio

import pytest

from generators.environments import Episode, Observation, Turn
from generators.environments.code_tool import CodeTool


def ask(tool: CodeTool, text: str) -> Observation | None:
    turns = (Turn(by="policy", text=text),)
    return asyncio.run(tool.respond(Episode(prompt_id="p", prompt="", turns=turns, stop_reason="")))


@pytest.fixture(scope="module")
def tool():
    tool = CodeTool(time_limit_s=2.0)
    yield tool
    asyncio.run(tool.close())


def test_the_program_of_a_turn_is_run_and_its_output_said(tool: CodeTool) -> None:
    said = ask(tool, "Let me compute.\n```python\nprint(6 * 7)\n```\n")
    assert said == Observation(text="```output\n42\n```", role="user")


@pytest.mark.parametrize(
    ("program", "status"),
    [("1 / 0", "runtime_error"), ("while True: pass", "timeout"), ("def", "compile_error")],
)
def test_how_a_program_failed_is_said(tool: CodeTool, program: str, status: str) -> None:
    said = ask(tool, f"```python\nprint('before')\n{program}\n```\n")
    assert said is not None and f"[{status}]" in said.text


def test_programs_cannot_reach_the_network_or_other_files(tool: CodeTool) -> None:
    said = ask(tool, "```python\nimport socket\nsocket.create_connection(('127.0.0.1', 22), timeout=1)\n```")
    assert said is not None and "runtime_error" in said.text
    said = ask(tool, "```python\nprint(open('/etc/shadow').read())\n```")
    assert said is not None and "runtime_error" in said.text and "root:" not in said.text


def test_a_turn_without_a_program_ends_the_answer(tool: CodeTool) -> None:
    assert ask(tool, "The answer is 42.") is None


def test_long_output_is_cut(tool: CodeTool) -> None:
    said = ask(tool, "```python\nprint('x' * 100000)\n```")
    assert said is not None and len(said.text) < 5000 and "[output cut]" in said.text


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="memory_mb"):
        CodeTool(memory_mb=1)
