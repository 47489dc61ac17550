"""ACL users for a run, one per role, each with the least rights that let it do its work.

A script runs with the rights of its caller, command by command and key by key: the right to run scripts gives nothing
by itself. Rights are selectors (Redis 7.0): a command on some keys. So a generator may append to `groups` and do
nothing else to it, and only the learner may take, settle or delete a group.
"""

from __future__ import annotations

from typing import Literal, get_args

from broker.keys import Keys

Role = Literal["broker", "generator", "learner", "reader", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)

# What connecting takes; in a cluster the client asks where the slots are, and what kind of key each command has.
_CONNECT = "+ping +hello +info +time +client|setinfo +client|setname"
_CLUSTER = "+cluster|slots +cluster|myid +command +asking"

# Commands, then keys they may be used on.
_Right = tuple[str, str]

_MEMBER: tuple[_Right, ...] = (
    ("xgroup|create", "prompts eval"),
    ("hset hgetall", "members"),
    ("hget", "state drains"),
    ("hlen", "answers"),
)
_LEDGER: tuple[_Right, ...] = (("xlen", "prompts groups"), ("zcard", "outstanding unsettled"), ("hgetall", "ledger"))

_READER: tuple[_Right, ...] = (
    *_LEDGER,
    ("xpending", "prompts groups"),
    ("xlen xrevrange", "dead"),
    ("hget", "state"),
    ("hgetall", "members rounds expiries"),
    ("hlen", "answers"),
    ("zrange", "outstanding unsettled"),
    ("hget", "arrived"),
    ("xrange", "prompts groups"),
    ("memory|usage", "groups"),
    ("hget", "elastic"),
    ("xrange", "trace"),
)

_RIGHTS: dict[Role, tuple[_Right, ...]] = {
    "broker": (
        *_MEMBER,
        *_LEDGER,
        ("hdel", "members drains"),
        ("hset", "drains"),  # `headrace drain`
        ("hset hget", "elastic"),
        ("xadd xack xdel xrange xpending xinfo|consumers xgroup|delconsumer", "prompts eval"),
        ("hincrby", "ledger state"),
        ("zadd", "outstanding"),
        ("zremrangebyscore", "closed"),
        ("xread", "events"),
        ("xadd xread xrange", "trace"),
        ("hset hget hmget hdel hgetall", "rounds"),
        ("hgetall del", "answers"),
        ("xpending xrange xrevrange memory|usage", "groups"),
        ("zrange", "outstanding unsettled"),
        ("hget", "arrived"),
        ("hgetall", "expiries"),
        ("xlen xrevrange", "dead"),
    ),
    "generator": (
        *_MEMBER,
        ("hdel", "members drains"),
        ("xreadgroup xclaim xack xdel xpending", "prompts eval"),
        ("xadd xrange", "prompts"),
        ("xadd memory|usage", "groups"),
        ("hget hset hdel memory|usage", "partial"),
        ("xadd", "dead events trace"),
        ("hincrby", "ledger"),
        ("zadd zscore", "closed"),
        ("hset hget", "arrived"),
        ("exists", "contained partial"),
        ("zrem", "outstanding contained"),
        ("zscore", "outstanding"),
        ("hdel", "expiries"),
        ("hget hmget", "rounds"),
        ("hsetnx hget hexists", "answers"),
        ("xread xrevrange", "control"),
        ("xadd xrevrange", "acks"),
    ),
    "learner": (
        *_MEMBER,
        *_LEDGER,
        ("xreadgroup xack xdel xrange xgroup|create xgroup|destroy", "groups"),
        ("xadd", "prompts dead events trace"),
        ("hincrby", "ledger state"),
        ("hset hdel", "state"),
        ("hget hmget hdel hlen", "arrived"),
        ("hincrby hdel", "expiries"),
        ("zadd zrem zscore zmscore zcount zunionstore", "outstanding unsettled"),
        ("del", "unsettled"),
        ("zadd zremrangebyscore", "contained"),
        ("hget", "elastic"),
        ("xadd xrevrange", "control"),
        ("xread xrevrange", "acks"),
    ),
    "reader": _READER,
    "operator": (  # a reader that may drain, resize, and put dead letters back
        *_READER,
        ("hset", "drains elastic"),
        ("zscore zadd", "closed"),
        ("xdel", "dead"),
        ("xadd", "prompts"),
        ("zadd", "outstanding"),
        ("hincrby", "ledger"),
    ),
}


def user_name(role: Role) -> str:
    return f"headrace-{role}"


def rules(run_id: str, role: Role, cluster: bool = False) -> list[str]:
    """What ACL SETUSER takes after the user's name, but for the password and `on`.

    Args:
        run_id: the run, or a glob pattern over run ids.
        role: whose rights.
        cluster: the server is a node of a cluster.
    """
    keys = Keys(run_id)
    connect = " ".join([_CONNECT, *([_CLUSTER] if cluster else [])])
    scripts = f"(+evalsha +eval ~{keys.prefix}*)"
    rights = [
        f"({' '.join(f'+{each}' for each in commands.split())} "
        f"{' '.join(f'~{keys.prefix}{name}' for name in names.split())})"
        for commands, names in _RIGHTS[role]
    ]
    return ["reset", "-@all", *connect.split(), scripts, *rights]


def lines(run_id: str, cluster: bool = False) -> list[str]:
    """An ACL SETUSER line for each role, with a placeholder for the password, as valkey-cli takes it."""
    found = []
    for role in ROLES:
        words = " ".join(f'"{rule}"' if " " in rule else rule for rule in rules(run_id, role, cluster))
        found.append(f"ACL SETUSER {user_name(role)} {words} on >PASSWORD-OF-{role.upper()}")
    return found
