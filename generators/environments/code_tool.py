"""A Python interpreter as the policy's tool: the last code block of a turn is run in the reward daemons' sandbox."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from generators.environments.base import Episode, Observation
from rewardd.code import IsolationUnavailable, Limits, Sandbox, extract_program, run_program
from rewardd.code.sandbox import Level

_MAX_OUTPUT = 4000


class CodeTool:
    """Runs what the policy writes in a fenced code block and shows it what the program printed.

    Each turn is a program of its own: no state is kept between turns. A turn without a code block ends the answer.

    Args:
        time_limit_s: wall time of one program.
        memory_mb: memory of one program and its children.
        num_slots: programs run at once by this generator.
        isolation: as `rewardd.code.isolation`.
        role: the chat role in which the output is said.

    Raises:
        ValueError: the isolation cannot be had here, or a limit is out of range.
    """

    def __init__(
        self,
        *,
        time_limit_s: float = 5.0,
        memory_mb: int = 512,
        num_slots: int = 1,
        isolation: Level = "auto",
        role: str = "user",
    ) -> None:
        self._limits = Limits(time_limit_s=time_limit_s, total_s=time_limit_s, memory_mb=memory_mb)
        self._role = role
        try:
            self._sandbox = Sandbox(isolation, num_slots=num_slots)
        except IsolationUnavailable as error:
            raise ValueError(f"no sandbox for the code tool: {error}") from error
        self._threads = ThreadPoolExecutor(num_slots, thread_name_prefix="code-tool")

    async def respond(self, episode: Episode) -> Observation | None:
        program = extract_program(episode.turns[-1].text) if "```" in episode.turns[-1].text else None
        if program is None:
            return None
        loop = asyncio.get_running_loop()
        run = await loop.run_in_executor(
            self._threads, lambda: run_program(self._sandbox, program=program, limits=self._limits)
        )
        text = run.output.decode(errors="replace")
        shown = text if len(text) <= _MAX_OUTPUT else text[:_MAX_OUTPUT] + "\n[output cut]"
        status = "" if run.failure is None else f"\n[{run.failure}]"
        return Observation(text=f"```output\n{shown.rstrip()}{status}\n```", role=self._role)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._sandbox.close)
