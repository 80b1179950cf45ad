"""Checkpoints as files: signed URLs, and what is behind them.

Behind a URL only what the checkpoint's folder lists is sent; it needs no API key, and is void once it has expired or
its checkpoint has gone.
"""

from __future__ import annotations

import asyncio
import posixpath
import time
from collections.abc import AsyncIterator, Iterator
from email.utils import formatdate
from urllib.parse import quote, urlencode

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from bus.tables import CheckpointRow
from runtime.checkpoints import folder as checkpoint_folder
from runtime.checkpoints.paths import CheckpointPath
from runtime.ingress import signing
from runtime.ingress.answers import answer
from runtime.ingress.deps import Caller, Deps, Injected
from runtime.ingress.stored import expired, path_of, readable, timestamp

router = APIRouter(prefix="/api/v1")

VALID_S = 3600
"""How long a URL can be used to begin a download."""
ARCHIVE = ""
"""In the place of a file: all of them, as a tar."""


@router.get("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/external_weights_urls")
async def external_weights_urls(
    request: Request, run_id: str, checkpoint_id: str, tenant: Caller, deps: Injected
) -> Response:
    """A URL for each file of weights that were saved for other programs."""
    path = path_of(run_id, checkpoint_id)
    if path.kind != "external_weights":
        raise HTTPException(400, f"checkpoint {str(path)!r} is not of kind external_weights: export it first")
    row = await readable(deps, tenant, path)
    listed = await asyncio.to_thread(checkpoint_folder.files, row.url)
    expires = int(time.time()) + VALID_S
    urls = {file: _url(request, deps, path, row, file, expires) for file in listed}
    return answer({"urls": urls, "expires": timestamp(expires)})


@router.get("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/archive")
async def archive(
    request: Request, run_id: str, checkpoint_id: str, tenant: Caller, deps: Injected
) -> Response:
    """A redirection to the checkpoint as one tar, for SDKs before 0.38."""
    path = path_of(run_id, checkpoint_id)
    row = await readable(deps, tenant, path)
    expires = int(time.time()) + VALID_S
    url = _url(request, deps, path, row, ARCHIVE, expires)
    return Response(status_code=302, headers={"location": url, "expires": formatdate(expires, usegmt=True)})


@router.get("/downloads/{run_id}/{checkpoint_id:path}")
async def download(
    run_id: str, checkpoint_id: str, deps: Injected, expires: int, signature: str, file: str = ARCHIVE
) -> Response:
    """403 for a URL that we did not sign, that has expired, or whose checkpoint has gone."""
    path, now = path_of(run_id, checkpoint_id), time.time()
    found = await deps.tables.checkpoints.get(path)
    folder = "" if found is None or expired(found[0], now) else found[0].url
    signed = signing.right(deps.keys.secret, folder, file, expires, signature)
    if not folder or not signed or expires < now:
        raise HTTPException(403, "this download URL is not valid, or no longer: ask for a new one")
    listed = await asyncio.to_thread(checkpoint_folder.files, folder)
    if not listed or (file != ARCHIVE and file not in listed):
        raise HTTPException(404, f"checkpoint {str(path)!r} has no file {file!r}")
    if file == ARCHIVE:
        parts, size = checkpoint_folder.archive(folder, listed), checkpoint_folder.archive_size(listed)
        kind, name = "application/x-tar", f"{path.name}.tar"
    else:
        parts, size = checkpoint_folder.chunks(folder, file), listed[file]
        kind, name = "application/octet-stream", posixpath.basename(file)
    headers = {
        "content-length": str(size),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
    }
    return StreamingResponse(_beside(parts), media_type=kind, headers=headers)


def _url(
    request: Request, deps: Deps, path: CheckpointPath, row: CheckpointRow, file: str, expires: int
) -> str:
    """Of this server, as the client called it."""
    place = f"{quote(path.model_id, safe=':')}/{quote(path.checkpoint_id)}"
    signed = signing.signature(deps.keys.secret, row.url, file, expires)
    query = {"expires": expires, "signature": signed, **({"file": file} if file else {})}
    return f"{request.url.scheme}://{request.url.netloc}/api/v1/downloads/{place}?{urlencode(query)}"


async def _beside(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Each part read in a thread, and none before the one ahead of it was sent."""
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part
