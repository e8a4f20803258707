"""What prompts are judged by: fetched from the coordinator in batches, kept in a cache bounded in bytes."""

from collections import OrderedDict
from collections.abc import Iterable

from protocol.messages import GroundTruth
from rewardd.routing import Routed, route

MAX_BATCH = 256


class GroundTruthCache:
    """Least recently used prompts leave when the payloads exceed `max_bytes`.

    Use: `get`; when it is None, `want` the id; send `next_request`; give the answer to `store`, which returns the ids
    the coordinator did not know.
    """

    def __init__(self, *, overrides: dict[str, str], max_bytes: int = 256 * 2**20) -> None:
        self._overrides = overrides
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items: OrderedDict[str, Routed] = OrderedDict()
        self._wanted: dict[str, None] = {}
        self._asked: set[str] = set()

    def get(self, prompt_id: str) -> Routed | None:
        routed = self._items.get(prompt_id)
        if routed is not None:
            self._items.move_to_end(prompt_id)
        return routed

    def want(self, prompt_id: str) -> None:
        """Ask for a prompt with the next request, unless it is being asked for."""
        if prompt_id not in self._asked:
            self._wanted[prompt_id] = None

    def next_request(self) -> list[str]:
        """Up to 256 wanted ids, now being asked for."""
        batch = list(self._wanted)[:MAX_BATCH]
        for prompt_id in batch:
            del self._wanted[prompt_id]
        self._asked.update(batch)
        return batch

    def store(self, asked: Iterable[str], items: Iterable[GroundTruth]) -> list[str]:
        """Take an answer; returns the ids that are not in it."""
        missing = set(asked)
        self._asked -= missing
        for item in items:
            missing.discard(item.prompt_id)
            routed = route(item, overrides=self._overrides)
            old = self._items.pop(item.prompt_id, None)
            self._num_bytes += routed.num_bytes - (old.num_bytes if old else 0)
            self._items[item.prompt_id] = routed
        while self._num_bytes > self._max_bytes and len(self._items) > 1:
            self._num_bytes -= self._items.popitem(last=False)[1].num_bytes
        return sorted(missing)

    def ask_again(self, asked: Iterable[str]) -> None:
        """A request failed: its ids are wanted once more."""
        for prompt_id in asked:
            self._asked.discard(prompt_id)
            self._wanted[prompt_id] = None
