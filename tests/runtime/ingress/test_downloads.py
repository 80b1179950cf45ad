"""Downloads: signed URLs of this server's that need no key, name one checkpoint, and end."""

from __future__ import annotations

import io
import tarfile
import time
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit, urlunsplit

import httpx
import pytest

from runtime.ingress import downloads, signing
from tests.runtime.ingress.checkpoints import FILES, folder_of, put
from tests.runtime.ingress.conftest import Wire, client
from tests.runtime.stand_in import Service


async def urls_of(wire: Wire, model: str, name: str = "a") -> dict[str, str]:
    answer = await wire.http.get(
        f"/api/v1/training_runs/{model}/checkpoints/external_weights/{name}/external_weights_urls"
    )
    assert answer.status_code == 200, answer.text
    until = datetime.fromisoformat(answer.json()["expires"]).timestamp()
    assert 0 < until - time.time() <= downloads.VALID_S
    urls: dict[str, str] = answer.json()["urls"]
    return urls


async def fetch(url: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.get(url)


async def test_every_file_is_sent_without_a_key_by_any_replica(alice: Wire, service: Service) -> None:
    model = await alice.model()
    files = {**FILES, "deep/er é.bin": b"x" * 3_000_000, "empty": b""}
    await put(service, model, "external_weights/a", files=files)
    urls = await urls_of(alice, model)
    assert urls.keys() == files.keys()
    second = urlsplit((await service.replica()).url)
    for file, url in urls.items():
        for at in (url, urlunsplit(urlsplit(url)._replace(netloc=second.netloc))):
            answer = await fetch(at)
            assert answer.status_code == 200
            assert answer.content == files[file]
            assert answer.headers["content-length"] == str(len(files[file]))


async def test_a_url_is_good_for_its_file_its_checkpoint_and_its_time(alice: Wire, service: Service) -> None:
    model = await alice.model()
    path = await put(service, model, "external_weights/a")
    folder_of(service, path).with_name("outside").write_bytes(b"secret")
    url = (await urls_of(alice, model))["adapter_config.json"]
    changed = [
        url.replace("file=adapter_config.json", "file=adapter_model.safetensors"),
        url.replace("file=adapter_config.json", "file=..%2Foutside"),
        url.replace("expires=1", "expires=2"),
        url.replace("signature=", "signature=0"),
        url.replace("external_weights/a", "external_weights/b"),
    ]
    assert [(await fetch(one)).status_code for one in changed] == [403] * 5
    folder, past = str(folder_of(service, path)), int(time.time()) - 1
    signed = signing.signature(service.keys.secret, folder, "adapter_config.json", past)
    query = f"file=adapter_config.json&expires={past}&signature={signed}"
    assert (await fetch(f"{url.partition('?')[0]}?{query}")).status_code == 403


@pytest.mark.parametrize("file", ["../outside", "/etc/passwd", "deep/../../outside", "link"])
async def test_nothing_outside_the_folder_is_sent_even_if_it_was_signed(
    alice: Wire, service: Service, file: str
) -> None:
    model = await alice.model()
    path = await put(service, model, "external_weights/a")
    folder = folder_of(service, path)
    folder.with_name("outside").write_bytes(b"secret")
    (folder / "link").symlink_to(folder.with_name("outside"))
    url, expires = (await urls_of(alice, model))["adapter_config.json"], int(time.time()) + 60
    signed = signing.signature(service.keys.secret, str(folder), file, expires)
    async with httpx.AsyncClient(trust_env=False) as http:
        params = {"file": file, "expires": expires, "signature": signed}
        answer = await http.get(url.partition("?")[0], params=params)
    assert answer.status_code == 404
    assert "link" not in await urls_of(alice, model)


async def test_a_url_is_void_once_its_checkpoint_is_deleted_or_replaced(
    alice: Wire, service: Service
) -> None:
    model = await alice.model()
    path = await put(service, model, "external_weights/a")
    url = (await urls_of(alice, model))["adapter_config.json"]
    found = await service.tables.checkpoints.get(path)
    assert found is not None
    await put(service, model, "external_weights/a", url=f"{found[0].url}/../b")
    assert (await fetch(url)).status_code == 403
    await alice.http.delete(f"/api/v1/training_runs/{model}/checkpoints/external_weights/a")
    assert (await fetch(url)).status_code == 403


async def test_urls_are_for_exports_of_ones_own_or_public(alice: Wire, bob: Wire, service: Service) -> None:
    model = await alice.model()
    await put(service, model, "weights/a")
    await put(service, model, "external_weights/a")
    of_weights = await alice.http.get(
        f"/api/v1/training_runs/{model}/checkpoints/weights/a/external_weights_urls"
    )
    assert of_weights.status_code == 400
    assert "external_weights" in of_weights.json()["detail"]
    url = f"/api/v1/training_runs/{model}/checkpoints/external_weights/a"
    assert (await bob.http.get(f"{url}/external_weights_urls")).status_code == 404
    assert (await bob.http.get(f"{url}/archive")).status_code == 404
    await alice.http.post(f"{url}/publish")
    assert (await urls_of(bob, model)).keys() == FILES.keys()


async def test_an_archive_is_a_tar_that_python_reads(alice: Wire, service: Service) -> None:
    model = await alice.model()
    files = {**FILES, "a" * 200: b"long name", "sub/x": b"1" * 512}
    await put(service, model, "sampler_weights/a", files=files)
    answer = await alice.http.get(f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/a/archive")
    assert answer.status_code == 302
    assert parsedate_to_datetime(answer.headers["expires"]).timestamp() > time.time()
    sent = await fetch(answer.headers["location"])
    assert sent.headers["content-length"] == str(len(sent.content))
    with tarfile.open(fileobj=io.BytesIO(sent.content)) as tar:
        read = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert read == {**files, "checkpoint_complete": b""}


async def test_a_download_without_signature_is_refused(
    service: Service, ingress: object, alice: Wire
) -> None:
    async with client(str(alice.http.base_url), None) as http:
        answer = await http.get("/api/v1/downloads/m/weights/a")
    assert answer.status_code == 400
    assert "expires" in answer.json()["detail"]
