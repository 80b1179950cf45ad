"""URLs that carry their own permission: for one file, of one checkpoint as it is now, for a while.

What is signed names the checkpoint's folder, which no other checkpoint ever had: once it is replaced the URL is void.
"""

from __future__ import annotations

import hashlib
import hmac


def signature(secret: bytes, folder: str, file: str, expires: int) -> str:
    """`expires` is in seconds since 1970. Every server with the same secret gives the same."""
    said = "\0".join(("download", folder, file, str(expires)))
    return hmac.new(secret, said.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def right(secret: bytes, folder: str, file: str, expires: int, given: str) -> bool:
    """Takes the same time whatever is given."""
    wanted = signature(secret, folder, file, expires)
    return hmac.compare_digest(wanted.encode(), given.encode("utf-8", "surrogatepass"))
