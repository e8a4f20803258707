"""Metrics of generators, reward daemons and trainers in their heartbeats and at their own Prometheus ports."""

from protocol.metrics.base import Metric

GENERATOR = (
    Metric(
        "generator/running",
        "requests",
        "Answers being sampled",
        "near generator/slots",
        "docs/tuning.md: paced by staleness, or KV cache too small",
    ),
    Metric("generator/slots", "requests", "Answers that it may sample at once", "generators.max_num_seqs", ""),
    Metric(
        "generator/kv_demand",
        "share",
        "KV blocks that the running requests want over those there are; shared prompts count for each",
        "0.4 to 1",
        "above 1 requests wait or are computed again: lower "
        "generators.max_num_seqs, raise generators.gpu_memory_utilization or generators.cpu_kv_cache_gb; low with "
        "all slots running: raise generators.max_num_seqs",
    ),
    Metric("generator/finished", "answers", "Answers finished", "growing", "", counter=True),
    Metric("generator/tokens", "tokens", "Tokens sampled", "growing", "", counter=True),
    Metric(
        "generator/handed_back",
        "answers",
        "Answers handed back unfinished",
        "near 0",
        "cancelled as too slow, or drained",
        counter=True,
    ),
    Metric(
        "generator/undelivered",
        "answers",
        "Finished answers that nobody acknowledged yet",
        "near 0",
        "rewardd or the coordinator is slow or away",
    ),
    Metric(
        "generator/resent",
        "answers",
        "Deliveries repeated to another daemon",
        "near 0",
        "raise transport.ack_deadline_s, or slipstream scale rewardd=K",
        counter=True,
    ),
    Metric("generator/weight_updates", "versions", "Versions taken over", "growing", "", counter=True),
    Metric(
        "generator/update_pause_s",
        "s",
        "Time without a token at the last version",
        "below 1",
        "weights.kv_on_update = keep",
    ),
    Metric(
        "generator/update_s",
        "s",
        "Last version from first byte to use",
        "below perf/update_seconds",
        "the transport: slipstream status, weights section of docs/configuration.md",
    ),
)

TRAINER = (
    Metric("resident_mb", "MB", "Resident memory of the trainer's first rank", "level", "as learner/resident_mb"),
)

LANES = (
    Metric(
        "rewardd/<lane>/workers",
        "processes",
        "Workers of a lane that serve",
        "as configured",
        "0: the daemon's log says what is missing",
    ),
    Metric(
        "rewardd/<lane>/queued",
        "answers",
        "Answers that wait for a worker of the lane",
        "below 10 per worker",
        "raise rewardd.math.num_workers or rewardd.code.num_workers, or slipstream scale rewardd=K",
    ),
    Metric(
        "rewardd/<lane>/killed",
        "processes",
        "Workers killed at a deadline",
        "near 0",
        "answers that make the verifier run long; rewardd.math.deadline_s",
        counter=True,
    ),
    Metric(
        "rewardd/<lane>/died",
        "processes",
        "Workers that died by themselves",
        "0",
        "memory; the daemon's log",
        counter=True,
    ),
)

REWARDD = (
    Metric("rewardd/received", "answers", "Answers taken", "growing", "", counter=True),
    Metric(
        "rewardd/joined",
        "answers",
        "Repeats of answers that it still held",
        "near 0",
        "raise transport.ack_deadline_s",
        counter=True,
    ),
    Metric(
        "rewardd/busy",
        "answers",
        "Answers turned away as the queue was full",
        "near 0",
        "slipstream scale rewardd=K, or raise rewardd.max_queue",
        counter=True,
    ),
    Metric(
        "rewardd/resent",
        "messages",
        "Messages that the coordinator did not answer in time",
        "near 0",
        "the coordinator is away or slow",
        counter=True,
    ),
    Metric(
        "rewardd/verdict_<verdict>",
        "answers",
        "Answers by verdict",
        "unjudged and rejected near 0",
        "rewardd/reason by reason",
        counter=True,
    ),
    Metric(
        "rewardd/ack_<status>",
        "answers",
        "Acknowledgements of the coordinator",
        "accepted",
        "refused: the coordinator's log",
        counter=True,
    ),
    Metric("rewardd/reason/<reason>", "answers", "Outcomes by reason", "", "docs/operations.md, Scoring", counter=True),
    Metric(
        "rewardd/queue_depth",
        "answers",
        "Answers held: being judged, or unacknowledged",
        "below rewardd.max_queue / 2",
        "slipstream scale rewardd=K",
    ),
    Metric(
        "rewardd/queue_oldest_s",
        "s",
        "Age of the oldest answer held",
        "below transport.ack_deadline_s / 2",
        "slipstream scale rewardd=K",
    ),
    Metric("rewardd/retries", "answers", "Judgements tried again", "near 0", "the daemon's log", counter=True),
    Metric("rewardd/cached", "answers", "Outcomes from the cache", "", "", counter=True),
    Metric(
        "rewardd/parked",
        "answers",
        "Answers that wait for a scorer that is left alone",
        "0",
        "the scorer fails for everything: the daemon's log",
    ),
    Metric("rewardd/breaker/<scorer>/open", "1", "1 while a scorer is left alone", "0", "the daemon's log"),
    Metric(
        "rewardd/breaker/<scorer>/opened",
        "times",
        "How often a scorer was left alone",
        "0",
        "the daemon's log",
        counter=True,
    ),
    Metric("rewardd/wire/offered", "messages", "Messages given to the socket", "", "", counter=True),
    Metric("rewardd/wire/sent", "messages", "Messages sent", "", "", counter=True),
    Metric(
        "rewardd/wire/refused",
        "messages",
        "Messages for peers whose outbox was full",
        "0",
        "a frozen generator; transport.outbox_messages",
        counter=True,
    ),
    Metric("rewardd/wire/dropped", "messages", "Messages for peers that went", "near 0", "", counter=True),
    Metric("rewardd/wire/acked", "messages", "Answers received", "", "", counter=True),
    Metric("rewardd/wire/received", "messages", "Messages received", "", "", counter=True),
    Metric(
        "rewardd/wire/unknown",
        "messages",
        "Messages of peers without a hello",
        "near 0",
        "something else talks to this port",
        counter=True,
    ),
    Metric(
        "rewardd/wire/malformed",
        "messages",
        "Messages that could not be read",
        "0",
        "something else talks to this port; roles of different versions",
        counter=True,
    ),
)

SINKS = (
    Metric("sinks/<sink>/written", "records", "Records that a metric sink took", "growing", "", counter=True),
    Metric(
        "sinks/<sink>/dropped",
        "records",
        "Records that a sink was too slow or broken for",
        "0",
        "the coordinator's log says why; nothing is lost: metrics.jsonl has them all",
        counter=True,
    ),
)
