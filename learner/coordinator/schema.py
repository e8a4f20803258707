"""The coordinator's database: one SQLite file in WAL mode on a local disk, and the conservation query."""

import sqlite3
from pathlib import Path

import psutil

from protocol.errors import UserError

SCHEMA_VERSION = 1
NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "lustre", "gpfs", "ceph", "beegfs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "glusterfs", "fuse.juicefs"}
)

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY,
    purpose TEXT NOT NULL,             -- train | eval
    prompt_id TEXT NOT NULL,
    pass INTEGER NOT NULL,             -- pass over the data; for eval the evaluation round
    position INTEGER NOT NULL,         -- position in the pass
    num_slots INTEGER NOT NULL,
    stage INTEGER NOT NULL,
    variant TEXT NOT NULL,             -- sampled | greedy
    state TEXT NOT NULL,               -- in_flight | trained | filtered | retired | quarantined | evaluated
    reason TEXT NOT NULL DEFAULT '',
    batch_id INTEGER,
    created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS groups_in_flight ON groups (group_id) WHERE state = 'in_flight';
CREATE INDEX IF NOT EXISTS groups_of_batch ON groups (batch_id) WHERE batch_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS slots (
    group_id INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    purpose TEXT NOT NULL,
    state TEXT NOT NULL,               -- open | leased | answered, then the end state of its group
    attempt INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    holder TEXT NOT NULL DEFAULT '',   -- name/incarnation of the generator that holds the lease
    version INTEGER NOT NULL DEFAULT -1,
    PRIMARY KEY (group_id, slot)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trajectories (
    group_id INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    segment INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    facts BLOB NOT NULL,               -- MessagePack of learner.coordinator.records.Answer
    PRIMARY KEY (group_id, slot)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS partials (
    group_id INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    segment INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (group_id, slot)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
    batch_id INTEGER PRIMARY KEY,
    policy_version INTEGER NOT NULL,   -- the version the batch trains
    plan BLOB NOT NULL,                -- MessagePack of BatchPlan
    state TEXT NOT NULL,               -- planned | trained
    attempt INTEGER NOT NULL DEFAULT 0,
    num_applied INTEGER NOT NULL DEFAULT 0,
    new_version INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS sampled_tokens (
    batch_id INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    version INTEGER NOT NULL,          -- the policy version that sampled them
    num_tokens INTEGER NOT NULL,
    PRIMARY KEY (batch_id, group_id, slot, version)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trained_tokens (
    batch_id INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    age INTEGER NOT NULL,              -- versions behind the one trained, as the trainer counted them
    num_tokens INTEGER NOT NULL,       -- tokens that counted in the loss
    PRIMARY KEY (batch_id, attempt, age)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checkpoints (
    batch_id INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, path TEXT NOT NULL, time REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS prompts (
    prompt_id TEXT PRIMARY KEY,
    failures INTEGER NOT NULL DEFAULT 0,
    solved_in_a_row INTEGER NOT NULL DEFAULT 0,
    quarantined INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS redraws (
    id INTEGER PRIMARY KEY, pass INTEGER NOT NULL, position INTEGER NOT NULL, prompt_id TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS evaluations (
    round INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, trigger TEXT NOT NULL, state TEXT NOT NULL
);
"""

CONSERVATION = """
SELECT (SELECT COALESCE(SUM(value), 0) FROM counters WHERE name = 'issued') AS issued,
       COALESCE(SUM(state = 'trained'), 0) AS trained,
       COALESCE(SUM(state = 'filtered'), 0) AS filtered,
       COALESCE(SUM(state = 'retired'), 0) AS retired,
       COALESCE(SUM(state = 'quarantined'), 0) AS quarantined,
       COALESCE(SUM(MAX(attempt - 1, 0)), 0) AS reissued,
       COALESCE(SUM(state IN ('open', 'leased', 'answered')), 0) AS in_flight
FROM slots WHERE purpose = 'train'
"""


def open_database(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Opens (and creates) the database; every commit is durable when it returns (synchronous=FULL).

    Raises UserError when the folder is on a network file system, can't be written, or holds another schema.
    """
    if read_only:
        if not path.is_file():
            raise UserError(f"{path} does not exist: is this the folder of a run?")
        return sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    refuse_network_filesystem(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, isolation_level=None, cached_statements=512)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.executescript(_TABLES)
        found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        if found is None:
            connection.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
    except (sqlite3.Error, OSError) as error:
        raise UserError(f"cannot write the ledger {path}: {error}; run.dir must be a writable local folder") from error
    if found is not None and int(found[0]) != SCHEMA_VERSION:
        raise UserError(f"{path} has ledger schema {found[0]}, this version needs {SCHEMA_VERSION}; use a new run.dir")
    return connection


def refuse_network_filesystem(folder: Path) -> None:
    """Raises UserError when `folder` is (or would be created) on a network file system, where WAL is unsafe."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    existing = existing.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if existing.is_relative_to(p.mountpoint)]
    if mounts:
        mount = max(mounts, key=lambda p: len(p.mountpoint))
        if mount.fstype.lower() in NETWORK_FILESYSTEMS:
            raise UserError(
                f"run.dir {folder} is on a network file system ({mount.fstype} at {mount.mountpoint}); "
                "the ledger needs a local disk: set run.dir to one"
            )


def ledger_summary(source: sqlite3.Connection | Path) -> dict[str, int | bool]:
    """The conservation equation of a run, in slots: issued = trained + filtered + retired + quarantined + in_flight.

    `source`: an open connection or the path of ledger.sqlite. `reissued` counts further attempts at the same slots.
    """
    connection = open_database(source, read_only=True) if isinstance(source, Path) else source
    try:
        cursor = connection.execute(CONSERVATION)
        names = [column[0] for column in cursor.description]
        summary: dict[str, int | bool] = dict(zip(names, cursor.fetchone(), strict=True))
    finally:
        if isinstance(source, Path):
            connection.close()
    ended = sum(int(summary[k]) for k in ("trained", "filtered", "retired", "quarantined", "in_flight"))
    summary["balanced"] = ended == summary["issued"]
    return summary
