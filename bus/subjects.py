"""Names on the broker: subjects, streams, tables. Ids become subject tokens by a reversible escape.

tinker.v1.submit.<tenant>.<model_id>              event clients publish here
tinker.v1.ops.<group>.<model_id>.<seq_id>         the log; the last token is "end" for unload_model
tinker.v1.blobs.<group>.<model_id>.<seq_id>.<ref>.<piece>   bodies of the log that are too large for one message
tinker.v1.results.<tenant>.<model_id>.<seq_id>    one result per operation
tinker.v1.results.<tenant>.<model_id>.<seq_id>.<ref>.<piece>   a result that is too large for one message
tinker.v1.stored.ops|results.…                    headers of what was just stored on the two subjects above
tinker.v1.metrics.<process>                       metric snapshots, not stored
tinker.v1.sample.<group>                          sampling requests, to whichever sampler process takes them; not stored
tinker.v1.sample.<group>.<process>                what one sampler process alone is asked; not stored
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

PREFIX = "tinker.v1"

SUBMIT_STREAM = "TINKER_SUBMIT"
OPS_STREAM = "TINKER_OPS"
RESULTS_STREAM = "TINKER_RESULTS"
BLOB_STREAM = "TINKER_BLOBS"

END = "end"

LONGEST_SUBJECT = 3000
"""Above 4 KB of protocol line the broker hangs up, on everything that the connection carries."""
LONGEST_ID = 1000
"""Of an id as one token, so that no subject that names it is too long."""

_SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def escape(name: str) -> str:
    """`name` as one subject token: bytes outside [A-Za-z0-9-_] become `=XX`, which key-value keys allow too.

    >>> escape("run:train:0")
    'run=3Atrain=3A0'
    """
    if not name:
        raise ValueError("an id must not be empty")
    return "".join(chr(b) if chr(b) in _SAFE else f"={b:02X}" for b in name.encode())


def unescape(token: str) -> str:
    """The inverse of `escape`. Raises ValueError for a token `escape` cannot have made."""
    out = bytearray()
    i = 0
    while i < len(token):
        if token[i] == "=":
            out.append(int(token[i + 1 : i + 3], 16))
            i += 3
        else:
            out += token[i].encode()
            i += 1
    name = out.decode()
    if escape(name) != token:
        raise ValueError(f"subject token {token!r} is not an escaped id")
    return name


def fits(name: str) -> bool:
    """Whether an id is short enough for every subject that has to name it."""
    return len(escape(name)) <= LONGEST_ID


def seq_token(seq_id: int | None) -> str:
    return END if seq_id is None else str(seq_id)


def parse_seq_token(token: str) -> int | None:
    return None if token == END else int(token)


def submit(tenant: str, model_id: str) -> str:
    return f"{PREFIX}.submit.{escape(tenant)}.{escape(model_id)}"


def numbers(subjects: Iterable[str]) -> set[int | None]:
    """The numbers at the end of operations' or results' subjects; what is none is left out."""
    found = set()
    for subject in subjects:
        with contextlib.suppress(ValueError):
            found.add(parse_seq_token(subject.rpartition(".")[2]))
    return found


def ops(group: str, model_id: str, seq_id: int | None) -> str:
    return f"{PREFIX}.ops.{escape(group)}.{escape(model_id)}.{seq_token(seq_id)}"


def blobs(group: str, model_id: str | None = None) -> str:
    """All bodies of a group's operations, or of a model's."""
    whose = "" if model_id is None else f"{escape(model_id)}."
    return f"{PREFIX}.blobs.{escape(group)}.{whose}>"


def blob(group: str, model_id: str, seq_id: int | None) -> str:
    """What the subjects of one operation's body begin with."""
    return f"{PREFIX}.blobs.{escape(group)}.{escape(model_id)}.{seq_token(seq_id)}"


def results(tenant: str, model_id: str, seq_id: int | None) -> str:
    return f"{PREFIX}.results.{escape(tenant)}.{escape(model_id)}.{seq_token(seq_id)}"


def results_of(tenant: str, model_id: str) -> str:
    """All results of one model, as a pattern."""
    return f"{PREFIX}.results.{escape(tenant)}.{escape(model_id)}.*"


def stored(subject: str) -> str:
    """Where the broker announces, headers only, a message it has stored on `subject`."""
    return f"{PREFIX}.stored{subject.removeprefix(PREFIX)}"


def metrics(process: str) -> str:
    return f"{PREFIX}.metrics.{escape(process)}"


def sample(group: str) -> str:
    return f"{PREFIX}.sample.{escape(group)}"


def sampler_process(group: str, process: str) -> str:
    return f"{PREFIX}.sample.{escape(group)}.{escape(process)}"


def split(subject: str) -> list[str]:
    """The tokens after the prefix, unescaped except the first (the kind) and a sequence token."""
    head, _, rest = subject.partition(f"{PREFIX}.")
    if head or not rest:
        raise ValueError(f"subject {subject!r} does not start with {PREFIX}.")
    kind, *tokens = rest.split(".")
    return [kind, *(unescape(t) for t in tokens)]
