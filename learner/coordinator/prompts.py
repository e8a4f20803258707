"""The prompts of a run by id, the order they are drawn in, and what survives of both across restarts."""

import hashlib
import logging
from collections.abc import Callable

from learner.coordinator.order import PromptOrder
from learner.coordinator.store import Store
from learner.data import Prompt, PromptSet
from protocol.config import Config
from protocol.errors import UserError
from protocol.logs import event
from protocol.messages import GroundTruth

log = logging.getLogger(__name__)


class PromptPool:
    """Draws prompts in order; prompts to be drawn again (of abandoned groups) come first.

    Args:
        is_quarantined: asked at each draw.

    `exhausted` is True once the last pass has been drawn.

    Raises:
        UserError: the data, its order or the seed changed since the run began and data.on_change is "refuse" (B79).
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        train: PromptSet,
        evaluation: PromptSet | None,
        *,
        is_quarantined: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._prompts = train.prompts
        self._is_quarantined = is_quarantined
        self._skip_after_solved = config.data.skip_after_solved
        held_out = evaluation.prompts if evaluation is not None else []
        limit = config.evaluation.num_prompts
        self.evaluation: list[Prompt] = held_out[:limit] if limit else held_out
        self._by_id = {p.prompt_id: p for p in self._prompts} | {p.prompt_id: p for p in self.evaluation}
        self._solved: dict[str, int] = dict(
            store.connection.execute("SELECT prompt_id, solved_in_a_row FROM prompts WHERE solved_in_a_row > 0")
        )
        self._redraws: list[tuple[int, int, int, str]] = store.connection.execute(
            "SELECT pass, position, id, prompt_id FROM redraws ORDER BY id DESC"
        ).fetchall()
        position = self._resume_position(config, train.content_hash)
        weights = [config.data.source_weights.get(p.data_source, 1.0) for p in self._prompts]
        self._order = PromptOrder(
            len(self._prompts),
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            max_passes=config.run.max_passes,
            weights=weights if config.data.source_weights else None,
            skip=self._skips,
            position=position,
        )
        self.exhausted = self._order.done and not self._redraws

    def __getitem__(self, prompt_id: str) -> Prompt:
        return self._by_id[prompt_id]

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._by_id

    @property
    def position(self) -> tuple[int, int]:
        """(pass, position) of the next draw."""
        return self._order.position

    def draw(self) -> tuple[Prompt, int, int] | None:
        """The next prompt with its pass and position, or None when the last pass is over."""
        while self._redraws:
            pass_number, position, row, prompt_id = self._redraws.pop()
            self.exhausted = self._order.done and not self._redraws
            self._store.execute("DELETE FROM redraws WHERE id = ?", (row,))
            if prompt_id in self._by_id and not self._is_quarantined(prompt_id):
                return self._by_id[prompt_id], pass_number, position
        drawn = self._order.next()
        self._store.put("order_position", list(self._order.position))
        self.exhausted = drawn is None or self._order.done
        if drawn is None:
            return None
        return self._prompts[drawn.row], drawn.pass_number, drawn.position

    def draw_again(self, prompt_id: str, *, pass_number: int, position: int) -> None:
        """Puts a prompt back that was drawn but is not trained on in the surviving lineage."""
        cursor = self._store.execute(
            "INSERT INTO redraws (pass, position, prompt_id) VALUES (?, ?, ?)", (pass_number, position, prompt_id)
        )
        assert cursor.lastrowid is not None
        self.exhausted = False
        self._redraws.insert(0, (pass_number, position, cursor.lastrowid, prompt_id))

    def solved(self, prompt_id: str, *, fully: bool) -> None:
        """Counts how often in a row a prompt was solved by its whole group."""
        if not self._skip_after_solved:
            return
        times = self._solved.get(prompt_id, 0) + 1 if fully else 0
        if times != self._solved.get(prompt_id, 0):
            self._solved[prompt_id] = times
            self._store.execute(
                "INSERT INTO prompts (prompt_id, solved_in_a_row) VALUES (?, ?) ON CONFLICT DO UPDATE "
                "SET solved_in_a_row = excluded.solved_in_a_row",
                (prompt_id, times),
            )

    def ground_truths(self, prompt_ids: list[str]) -> list[GroundTruth]:
        """What scoring these prompts needs; unknown ids are left out."""
        found = [self._by_id[i] for i in prompt_ids if i in self._by_id]
        return [
            GroundTruth(prompt_id=p.prompt_id, data_source=p.data_source, ability=p.ability, payload=p.payload)
            for p in found
        ]

    def _skips(self, index: int) -> bool:
        prompt_id = self._prompts[index].prompt_id
        if self._is_quarantined(prompt_id):
            return True
        if self._skip_after_solved and self._solved.get(prompt_id, 0) >= self._skip_after_solved:
            self._store.count("skipped_solved")
            return True
        return False

    def _resume_position(self, config: Config, content_hash: str) -> tuple[int, int]:
        settings = repr((config.run.seed, config.data.shuffle, sorted(config.data.source_weights.items())))
        fingerprint = {"data": content_hash, "order": hashlib.sha256(settings.encode()).hexdigest()[:16]}
        before = self._store.get("data_fingerprint")
        pass_number, position = self._store.get("order_position", [0, 0])
        if before is not None and before != fingerprint:
            changed = "the training data" if before["data"] != content_hash else "run.seed or the order settings"
            if config.data.on_change == "refuse":
                raise UserError(
                    f"{changed} changed since this run began (was {before}, is {fingerprint}); restore it, set "
                    "data.on_change=restart_pass to begin the pass anew, or use a new run.dir"
                )
            event(log, logging.WARNING, "data changed: the pass begins anew", pass_number=pass_number, was=before)
            position = 0
            self._store.execute("DELETE FROM redraws")
            self._redraws.clear()
            self._store.put("order_position", [pass_number, 0])
        self._store.put("data_fingerprint", fingerprint)
        return int(pass_number), int(position)
