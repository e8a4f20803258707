"""Journal, schema and order: what must hold on disk and across restarts."""

import os
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.coordinator import schema
from learner.coordinator.journal import Journal, JournalDamaged
from learner.coordinator.order import PromptOrder, pass_order
from protocol.errors import UserError


def arrays_of(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        "token_ids": generator.integers(0, 1000, size=seed % 7 * 11, dtype="<i4"),
        "logp_behaviour": generator.standard_normal(seed % 5).astype("<f4"),
        "loss_mask": np.ones(seed % 3, "|u1"),
    }


@settings(max_examples=40, deadline=None)
@given(number=st.integers(1, 8), cut=st.integers(1, 200), data=st.data())
def test_a_torn_tail_is_cut_and_whole_records_stay(tmp_path_factory, number, cut, data):
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder, segment_bytes=1 << 20)
    locations = [journal.append(arrays_of(i)) for i in range(number)]
    journal.close()
    path = folder / "00000000.seg"
    size = path.stat().st_size
    os.truncate(path, max(0, size - cut))
    if data.draw(st.booleans()):
        with path.open("ab") as file:
            file.write(os.urandom(cut))
    journal = Journal(folder, segment_bytes=1 << 20)
    ends = [location.offset for location in locations[1:]] + [size]
    whole = [i for i, end in enumerate(ends) if end <= size - cut]
    for i in whole:
        found = journal.read(locations[i])
        assert {name: array.tolist() for name, array in found.items()} == {
            name: array.tolist() for name, array in arrays_of(i).items()
        }
    after = journal.append(arrays_of(99))
    assert journal.read(after)["token_ids"].tolist() == arrays_of(99)["token_ids"].tolist()
    journal.close()


def test_a_flipped_bit_is_noticed(tmp_path):
    journal = Journal(tmp_path, segment_bytes=1 << 20)
    location = journal.append({"versions": np.arange(10, dtype="<i4")})
    journal.sync()
    with (tmp_path / "00000000.seg").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(struct.pack("B", 77))
    with pytest.raises(JournalDamaged, match="checksum"):
        journal.read(location)


def test_segments_rotate_and_only_unneeded_ones_are_deleted(tmp_path):
    journal = Journal(tmp_path, segment_bytes=1000)
    locations = [journal.append({"versions": np.zeros(200, "<i4")}) for _ in range(6)]
    assert len({location.segment for location in locations}) == len(journal.segments()) == 3
    kept = locations[1].segment
    journal.delete_except([kept])
    assert journal.segments() == [kept, journal.active_segment]
    assert len(journal.read(locations[1])["versions"]) == 200
    with pytest.raises(JournalDamaged):
        journal.read(locations[2])
    journal.close()


def test_a_network_file_system_is_refused_with_the_fix(tmp_path, monkeypatch):
    mounts = {"/": "ext4", str(tmp_path): "nfs4"}
    partitions = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in mounts.items()]
    monkeypatch.setattr(schema.psutil, "disk_partitions", lambda all: partitions)
    with pytest.raises(UserError, match=r"network file system \(nfs4.*local disk"):
        schema.open_database(tmp_path / "run" / "ledger.sqlite")


def test_an_unwritable_run_folder_is_one_clear_line(tmp_path):
    (tmp_path / "run").write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"run\.dir must be a writable"):
        schema.open_database(tmp_path / "run" / "ledger.sqlite")


def test_a_second_coordinator_on_one_run_folder_is_refused(tmp_path):
    from learner.coordinator.startup import lock_run_folder

    with lock_run_folder(tmp_path), pytest.raises(UserError, match=f"pid {os.getpid()}"):
        lock_run_folder(tmp_path)


def test_ledger_summary_of_a_folder_without_a_run_is_a_clear_error():
    with pytest.raises(UserError, match="folder of a run"):
        schema.ledger_summary(Path("/nonexistent/ledger.sqlite"))


@given(seed=st.integers(0, 5), number=st.integers(1, 40), stop=st.integers(0, 100))
def test_order_goes_on_exactly_after_any_stop(seed, number, stop):
    def order(position=(0, 0)):
        return PromptOrder(number, seed=seed, shuffle=True, max_passes=3, position=position)

    whole = order()
    everything = []
    while (draw := whole.next()) is not None:
        everything.append(draw)
    assert len(everything) == 3 * number
    for number_of_pass in range(3):
        assert sorted(d.row for d in everything if d.pass_number == number_of_pass) == list(range(number))
    first = order()
    head = [first.next() for _ in range(min(stop, len(everything)))]
    second = order(first.position)
    tail = []
    while (draw := second.next()) is not None:
        tail.append(draw)
    assert head + tail == everything and second.done


def test_source_weights_repeat_and_thin_out_prompts():
    rows = pass_order(4000, seed=1, pass_number=0, shuffle=True, weights=[2.0] * 1000 + [0.5] * 2000 + [0.0] * 1000)
    counts = np.bincount(rows, minlength=4000)
    assert (counts[:1000] == 2).all() and (counts[3000:] == 0).all()
    assert 900 < counts[1000:3000].sum() < 1100


def test_order_ends_when_every_prompt_is_skipped():
    assert PromptOrder(3, seed=0, shuffle=True, max_passes=10**6, skip=lambda row: True).next() is None


def test_b79_changed_data_is_refused_or_restarts_the_pass(build, tmp_path):
    from tests.learner.coordinator.harness import make_config, prompt_set, rows

    h = build(6)
    h.lease(h.join("generator", "g"), 4)
    h.train = prompt_set(tmp_path, rows(6, start=3))
    with pytest.raises(UserError, match=r"training data changed.*data\.on_change=restart_pass"):
        h.crash()
    h.config = make_config(tmp_path, **{"data.on_change": "restart_pass"})
    h.crash()
    h.turn()
    assert h.coordinator.pool.position == (0, 0)
    assert h.summary()["balanced"]
    h.config = make_config(tmp_path, **{"run.seed": 7})
    with pytest.raises(UserError, match=r"run\.seed"):
        h.crash()


def test_prompts_solved_in_a_row_are_skipped(build):
    from tests.learner.coordinator.harness import answer

    h = build(2, **{"data.skip_after_solved": 1, "run.max_updates": 50, "run.max_passes": 50})
    generator, rewardd, trainer = h.join("generator", "g"), h.join("rewardd", "r"), h.join("trainer", "t")
    for lease in h.lease(generator):
        for slot in lease.slots:
            h.ask(rewardd, *answer(lease, slot))
    h.update(trainer, version=0)
    h.crash()
    generator = h.join("generator", "g")
    assert h.lease(generator, version=1) == []
