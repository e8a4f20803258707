"""Granting leases, renewing them by progress, moving slow ones with their tokens, and ending lost ones."""

from collections.abc import Callable, Mapping
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.coordinator.admission import Admission
from learner.coordinator.facts import RunFacts
from learner.coordinator.journal import Journal
from learner.coordinator.ledger import Ledger
from learner.coordinator.members import Member, Members
from learner.coordinator.prompts import PromptPool
from learner.coordinator.records import Group, Partial, Slot
from learner.coordinator.stages import SamplingRules
from learner.coordinator.store import Store
from protocol.config import Config
from protocol.messages import HandBack, Heartbeat, Lease, LeaseGrant, PartialAnswer

Arrays = Mapping[str, NDArray[np.generic]]
PARTIAL_ARRAYS = {"token_ids": "<i4", "logp_behaviour": "<f4", "versions": "<i4", "loss_mask": "|u1"}
ORDERLY_REASONS = ("", "cancelled", "draining")
SHARE_SLACK = 1.5


class Grant(NamedTuple):
    """A LeaseGrant and the arrays of the partial answers in it."""

    body: LeaseGrant
    arrays: dict[str, NDArray[np.generic]]


class LeaseDesk:
    """Decides who works on what.

    Args:
        stage_of: stage of a group that is trained at the given update (counted from 0).
        may_issue: "" when new training groups may be drawn, else what is waited for.
        eval_version: version at which the running evaluation samples.
    """

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        journal: Journal,
        ledger: Ledger,
        pool: PromptPool,
        facts: RunFacts,
        members: Members,
        rules: SamplingRules,
        stage_of: Callable[[int], int],
        may_issue: Callable[[], str],
        eval_version: Callable[[], int],
        now: float,
    ) -> None:
        self._config = config
        self._store = store
        self._journal = journal
        self._ledger = ledger
        self._pool = pool
        self._facts = facts
        self._members = members
        self._rules = rules
        self._stage_of = stage_of
        self._may_issue = may_issue
        self._eval_version = eval_version
        self._group_size = config.learner.group_size
        self.admission = Admission(config.algorithm.max_staleness, config.learner.groups_per_batch)
        self._trust_until = now + 2 * config.transport.peer_timeout_s
        self._rate_seen: dict[str, float] = {}
        self._moved_from: dict[tuple[int, int], str] = {}

    # ------------------------------------------------------------ granting

    def grant(self, member: Member, *, max_slots: int, version: int, now: float) -> Grant:
        """Leases up to `max_slots` slots: open ones first (oldest training slots, then evaluation), then new groups."""
        if self._facts.state in ("finished", "stopped"):
            return Grant(LeaseGrant(leases=[], waiting_for="finished"), {})
        if self._facts.paused:
            return Grant(LeaseGrant(leases=[], waiting_for="paused"), {})
        member.version = version
        if member.abandoned_version is not None and version != member.abandoned_version:
            member.abandoned_version = None
        if version > self._facts.policy_version or member.abandoned_version is not None:
            # weights of an abandoned lineage: the resumed version must be loaded first
            return Grant(LeaseGrant(leases=[], waiting_for="weights"), {})
        room = min(max_slots, self._quota(member) - len(self._ledger.held.get(member.key, ())))
        taken: list[tuple[Group, Slot, int]] = []
        waiting = self._take_open(member, room, version, taken)
        if not waiting:
            waiting = self._take_new(room, version, now, taken)
        for _, slot, _ in taken:
            self._lease(member, slot, version, now)
        if taken or room <= 0:
            waiting = "" if taken else "staleness"
        return self._grant_of(taken, waiting)

    def _take_open(self, member: Member, room: int, version: int, taken: list[tuple[Group, Slot, int]]) -> str:
        skipped: list[tuple[Group, Slot]] = []
        waiting = ""
        ranks: dict[int, int] | None = None
        if room > 0:
            for group, slot in self._ledger.open_slots():
                if group.purpose == "eval":
                    min_version = self._eval_version()
                else:
                    ranks = ranks or {group_id: rank for rank, group_id in enumerate(self._ledger.train)}
                    min_version = self.admission.min_version(
                        ranks[group.group_id], policy_version=self._facts.policy_version
                    )
                if version < min_version:
                    skipped.append((group, slot))
                    waiting = "weights"
                    break
                if self._must_go_elsewhere(member, slot):
                    skipped.append((group, slot))
                    continue
                taken.append((group, slot, min_version))
                if len(taken) >= room:
                    break
            self._ledger.put_back(skipped)
        return waiting

    def _take_new(self, room: int, version: int, now: float, taken: list[tuple[Group, Slot, int]]) -> str:
        while len(taken) < room:
            waiting = self._may_issue()
            if waiting:
                return waiting
            rank = len(self._ledger.train)
            if not self.admission.admits(rank):
                return "staleness"
            min_version = self.admission.min_version(rank, policy_version=self._facts.policy_version)
            if version < min_version:
                return "weights"
            drawn = self._pool.draw()
            if drawn is None:
                return "no_prompts"
            prompt, pass_number, position = drawn
            group = self._ledger.issue(
                prompt.prompt_id,
                num_slots=self._group_size,
                pass_number=pass_number,
                position=position,
                now=now,
                stage=self._stage_of(self._facts.last_batch + rank // self.admission.groups_per_batch),
            )
            taken.extend((group, slot, min_version) for slot in group.slots[: room - len(taken)])
        return ""

    def _lease(self, member: Member, slot: Slot, version: int, now: float) -> None:
        settings = self._config.coordinator
        self._ledger.lease(
            slot,
            holder=member.key,
            version=version,
            deadline=now + settings.lease_deadline_s,
            last_deadline=now + settings.lease_max_s,
        )

    def _grant_of(self, taken: list[tuple[Group, Slot, int]], waiting: str) -> Grant:
        bundles: dict[tuple[int, int, int], list[tuple[Group, Slot, int]]] = {}
        for group, slot, min_version in taken:
            own = slot.slot if self._rules.seeded else -1
            bundles.setdefault((group.group_id, slot.attempt, own), []).append((group, slot, min_version))
        leases: list[Lease] = []
        arrays: dict[str, NDArray[np.generic]] = {}
        for bundle in bundles.values():
            leases.append(self._lease_of(bundle, arrays))
        return Grant(LeaseGrant(leases=leases, waiting_for=waiting), arrays)

    def _lease_of(self, bundle: list[tuple[Group, Slot, int]], arrays: dict[str, NDArray[np.generic]]) -> Lease:
        group, first, min_version = bundle[0]
        partial: list[PartialAnswer] = []
        for _, slot, _ in bundle:
            if slot.partial is None:
                continue
            partial.append(PartialAnswer(group_id=group.group_id, slot=slot.slot, num_tokens=slot.partial.num_tokens))
            for name, array in self._journal.read(slot.partial.location).items():
                arrays[f"partial/{group.group_id}/{slot.slot}/{name}"] = array
        prompt = self._pool[group.prompt_id]
        return Lease(
            group_id=group.group_id,
            prompt_id=group.prompt_id,
            attempt=first.attempt,
            slots=[slot.slot for _, slot, _ in bundle],
            prompt_token_ids=prompt.token_ids.tolist(),
            sampling=self._rules.params(
                purpose=group.purpose,
                variant=group.variant,
                stage=group.stage,
                group_id=group.group_id,
                slot=first.slot,
            ),
            deadline_s=self._config.coordinator.lease_deadline_s,
            min_version=min_version,
            stage=group.stage,
            purpose=group.purpose,
            environment=prompt.ability,
            partial=partial,
        )

    def _quota(self, member: Member) -> int:
        """Most slots a generator may hold: its part of all admitted slots, by its rate, with slack.

        It keeps a slow generator from taking many groups that its fellows would then wait for.
        """
        everything = self.admission.max_groups * self._group_size
        if not self._members.is_slow(member):
            return everything + self._group_size * max(1, len(self._pool.evaluation)) * self._config.evaluation.samples
        return max(1, ceil(SHARE_SLACK * everything * self._members.share(member)))

    def _must_go_elsewhere(self, member: Member, slot: Slot) -> bool:
        """Whether a slot that was moved should not go to this generator: where it came from, or a slow one."""
        origin = self._moved_from.get((slot.group_id, slot.slot))
        if origin is None or len(self._members.of_role("generator")) < 2:
            return False
        return origin == member.name or self._members.is_slow(member)

    # ------------------------------------------------------------ progress and its absence

    def progress(self, member: Member, beat: Heartbeat, *, now: float) -> None:
        """Renews the leases whose slots have more tokens than before; measures the generator's rate."""
        held = self._ledger.held.get(member.key, {})
        since = self._rate_seen.get(member.key)
        sampled = running = 0
        for report in beat.progress:
            slot = held.get((report.group_id, report.slot))
            if slot is None or slot.attempt != report.attempt or report.num_tokens <= slot.num_tokens:
                continue
            if slot.num_tokens > 0:
                sampled += report.num_tokens - slot.num_tokens
                running += 1
            slot.num_tokens = report.num_tokens
            if not slot.recalled:
                slot.deadline = min(now + self._config.coordinator.lease_deadline_s, slot.last_deadline)
        if running and since is not None:
            member.sampled(sampled, running * (now - since), now=now)
        if beat.progress:
            self._rate_seen[member.key] = now

    def expire(self, *, now: float) -> list[str]:
        """Ends leases past their deadline; lets groups go by whose slots waited too long. Returns what happened."""
        happened: list[str] = []
        self._expire_unknown_holders(now)
        for slot in [s for s in self._ledger.leased() if now >= s.deadline]:
            group = self._ledger.group(slot.group_id)
            if not slot.holder or group is None:
                continue  # its group ended with an earlier slot of this list
            group.overdue = group.overdue or not slot.recalled
            holder, attempt = slot.holder, slot.attempt
            ended = self._ledger.release(slot, now=now, failed="" if slot.recalled else "expired")
            happened.append(
                f"lease {slot.group_id}/{slot.slot} attempt {attempt} of {holder} expired: {ended or 'open'}"
            )
        for group in self._ledger.train.values():
            if not group.overdue and any(s.state == "open" and now >= s.deadline for s in group.slots):
                group.overdue = True
        self._moved_from = {key: name for key, name in self._moved_from.items() if key[0] in self._ledger.train}
        return happened

    def _expire_unknown_holders(self, now: float) -> None:
        """After a restart of the coordinator: generators that do not come back in time are taken for gone."""
        if now < self._trust_until:
            return
        for holder in [holder for holder in self._ledger.held if self._members.get(holder) is None]:
            for slot in list(self._ledger.held.get(holder, {}).values()):
                if slot.holder:
                    self._ledger.release(slot, now=now, failed="generator_gone", cancel=False)
        for holder in [holder for holder in self._ledger.cancelled if self._members.get(holder) is None]:
            del self._ledger.cancelled[holder]

    def recall_slow(self, groups: list[Group], *, now: float) -> int:
        """Asks slow generators to hand back slots of these groups.

        A slot that is not handed back within the peer timeout is leased again without its tokens.
        """
        if all(self._members.is_slow(member) for member in self._members.of_role("generator")):
            return 0
        recalled = 0
        for group in groups:
            for slot in group.slots:
                holder = self._members.get(slot.holder) if slot.state == "leased" and not slot.recalled else None
                if holder is None or not self._members.is_slow(holder):
                    continue
                slot.recalled = True
                self._moved_from[slot.group_id, slot.slot] = holder.name
                slot.deadline = min(slot.deadline, now + self._config.transport.peer_timeout_s)
                self._ledger.cancel_lease(slot)
                self._store.count("moved_slots")
                recalled += 1
        return recalled

    def leave(self, member: Member, *, now: float, orderly: bool) -> int:
        """A generator is gone: its leases are open again at once. Returns how many there were."""
        slots = list(self._ledger.held.get(member.key, {}).values())
        for slot in slots:
            if slot.holder:  # else its group ended with an earlier slot of this list
                self._ledger.release(slot, now=now, failed="" if orderly else "generator_gone", cancel=False)
        self._ledger.cancelled.pop(member.key, None)
        self._rate_seen.pop(member.key, None)
        return len(slots)

    # ------------------------------------------------------------ tokens handed back

    def hand_back(self, member: Member, body: HandBack, arrays: Arrays, *, now: float) -> str:
        """Takes back unfinished slots with their tokens; returns what was counted, for the Ack.

        Any reason but the orderly ones is a failed attempt: a prompt that no engine can answer ends (B39).
        """
        failed = "" if body.reason in ORDERLY_REASONS else "handed_back"
        group = self._ledger.group(body.group_id)
        sizes = {p.slot: p.num_tokens for p in body.partial}
        kept = returned = 0
        for number in body.slots:
            slot = group.slots[number] if group is not None and 0 <= number < len(group.slots) else None
            live = self._ledger.group(body.group_id) is not None  # an earlier failed slot may have ended it
            if slot is None or not live or slot.attempt != body.attempt or slot.state == "answered":
                continue
            partial = self._partial_of(slot, sizes.get(number, 0), arrays)
            kept += partial is not None
            if slot.state == "leased" and slot.holder == member.key:
                self._ledger.release(slot, now=now, failed=failed, partial=partial, cancel=False)
                returned += 1
            elif slot.state == "open" and partial is not None:
                self._ledger.keep_partial(slot, partial)
                self._store.update_slot(slot)
        return f"{returned} slots returned, {kept} with tokens"

    def _partial_of(self, slot: Slot, num_tokens: int, arrays: Arrays) -> Partial | None:
        prefix = f"partial/{slot.group_id}/{slot.slot}/"
        found = {name: arrays.get(prefix + name) for name in PARTIAL_ARRAYS}
        whole = {
            name: array
            for name, array in found.items()
            if array is not None and array.dtype.str == PARTIAL_ARRAYS[name] and array.shape == (num_tokens,)
        }
        if num_tokens == 0 or len(whole) < len(PARTIAL_ARRAYS):
            return None
        versions = whole["versions"]
        if not np.isfinite(whole["logp_behaviour"]).all() or int(versions.max()) > self._facts.policy_version:
            self._store.count("refused/partial")
            return None
        return Partial(self._journal.append(whole), num_tokens, int(versions.min()))
