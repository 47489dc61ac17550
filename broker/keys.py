"""The one place that owns the names of everything a run keeps in Redis.

Every key starts with `headrace:{run_id}:`; the braces make the run a hash tag, so that all keys of a run live in one
slot and one script may touch several of them.

| key       | type   | holds |
|-----------|--------|-------|
| prompts   | stream | `g` group id, `p` prompt, `t` ms of its release: unanswered; an entry id is a fencing token |
| groups    | stream | `g`, `t`, `p` group, `q` its prompt, `c` its generator: not durable; one reader group per epoch |
| dead      | stream | the fields of what died, and `error`, `kind`, `by`: dead letters, the newest 1000 or so |
| ledger    | hash   | counters of what happened; see `broker.records.Ledger` |
| state     | hash   | position, version, epoch, finished |
| arrived   | hash   | group id -> "entry-id-in-groups entry-id-of-lease", for every group that came through a lease |
| outstanding | zset | group id scored by the version it was released at: released, and neither trained nor ended |
| unsettled | zset   | the same of groups that were trained and are in no durable checkpoint yet |
| expiries  | hash   | group id -> how often it expired and went back, until it ends |
| contained | zset   | group id: in a checkpoint, but this server knew nothing of it when the learner resumed |
| closed    | zset   | "entry-id outcome" of leases and dead letters that just ended: sent twice counts once |
| partial   | hash   | group id -> what was sampled of it so far, until its lease ends for good |
| elastic   | hash   | `store` where the learner's nodes meet, `ranks` how many ranks the learner is wished to have |
| members   | hash   | member id -> "milliseconds packed-member", the time being the server's |
| drains    | hash   | member id -> "pid@host" of the process that was asked to leave |
| eval      | stream | `r` version of the round, `i` index, `p` prompt: evaluation prompts not yet answered |
| answers   | hash   | index -> packed answers of the open evaluation round; gone when it ends |
| rounds    | hash   | open evaluation round: `round`, `prompts`, `started`; `last` one begun or skipped, `result` |
| control, acks | stream | weight-update messages and their acknowledgements, capped |
| trace     | stream | `g` group id, `e` event, `m` member, `v` version, `d` more: of sampled prompts, capped |
| events    | stream | a line whenever budget was freed or the version changed, capped: what the feeder blocks on |
"""

from __future__ import annotations

GENERATORS = "generators"
LEARNER = "learner"


def learner_group(epoch: int) -> str:
    """The consumer group of one incarnation of the learner. `begin` destroys the one before, which fences it."""
    return f"{LEARNER}-{epoch}"


class Keys:
    """The keys of one run."""

    def __init__(self, run_id: str) -> None:
        self.prefix = f"headrace:{{{run_id}}}:"
        self.prompts = self.prefix + "prompts"
        self.groups = self.prefix + "groups"
        self.dead = self.prefix + "dead"
        self.ledger = self.prefix + "ledger"
        self.state = self.prefix + "state"
        self.arrived = self.prefix + "arrived"
        self.outstanding = self.prefix + "outstanding"
        self.unsettled = self.prefix + "unsettled"
        self.expiries = self.prefix + "expiries"
        self.contained = self.prefix + "contained"
        self.closed = self.prefix + "closed"
        self.partial = self.prefix + "partial"
        self.elastic = self.prefix + "elastic"
        self.members = self.prefix + "members"
        self.drains = self.prefix + "drains"
        self.eval = self.prefix + "eval"
        self.answers = self.prefix + "answers"
        self.rounds = self.prefix + "rounds"
        self.control = self.prefix + "control"
        self.acks = self.prefix + "acks"
        self.trace = self.prefix + "trace"
        self.events = self.prefix + "events"
