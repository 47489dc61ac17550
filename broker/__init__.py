"""Everything that talks to Redis: streams, leases, the release budget, the ledger, membership, control messages."""

from broker.pressure import BrokerFullError, until_taken
from broker.records import DeadLetter, Delivery, EvalLease, Lease, Ledger, Member, Queues
from broker.server import Server
from broker.sources import Counts, Source, Sourced, open_source
from broker.store import Broker

__all__ = [
    "Broker",
    "BrokerFullError",
    "Counts",
    "DeadLetter",
    "Delivery",
    "EvalLease",
    "Lease",
    "Ledger",
    "Member",
    "Queues",
    "Server",
    "Source",
    "Sourced",
    "open_source",
    "until_taken",
]
