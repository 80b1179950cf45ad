"""`tinkerbus up`: start all of it in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer


def up(
    model: Annotated[
        str | None, typer.Option(help='"tiny", or the folder of a Hugging Face model.', metavar="tiny|DIR")
    ] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel replicas.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that share out a model's experts.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the HTTP API; 0 for any free one.")] = None,
    nats: Annotated[
        str | None, typer.Option(help="A broker of your own instead of the embedded one.", metavar="URL")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings as TOML.", metavar="FILE")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Folder of log, snapshots and keys; goes on where it was.", metavar="DIR"),
    ] = None,
) -> None:
    """Serve the Tinker API. Prints one line `ready http=… nats=… metrics=…` when it does.

    Options win over TINKERBUS_<SECTION>__<KEY> in the environment, which wins over --config.
    """
    from runtime.config import load
    from runtime.settings_reader import SettingsError

    given: dict[str, Any] = {
        "model": model,
        "data": data,
        "layout.dp": dp,
        "layout.tp": tp,
        "layout.pp": pp,
        "layout.ep": ep,
        "http.host": host,
        "http.port": port,
        "nats.url": nats,
    }
    try:
        settings = load(config, overrides={name: value for name, value in given.items() if value is not None})
    except SettingsError as error:
        typer.echo(f"tinkerbus: {error}", err=True)
        raise typer.Exit(2) from None

    from runtime import base_model

    try:
        base_model.check(settings)
    except ValueError as error:
        typer.echo(f"tinkerbus: {error}", err=True)
        raise typer.Exit(2) from None

    from loss_hub import left_out

    for sentence in left_out():
        typer.echo(f"tinkerbus: {sentence}", err=True)

    from bus.connection import BrokerError
    from runtime.keys import KeyFileError
    from runtime.service import Endpoints, StartFailed, run

    out, err = sys.stdout, sys.stderr

    def say(word: str) -> None:
        print(f"tinkerbus: {word} …", file=err, flush=True)

    def ready(endpoints: Endpoints) -> None:
        for tenant in settings.tenant_names:
            if not (tenant in settings.tenants and settings.tenants[tenant].api_keys):
                print(f"api key of tenant {tenant!r}: {endpoints.keys.api_key(tenant)}", file=err, flush=True)
        print(endpoints.ready_line(), file=out, flush=True)

    try:
        with _libraries_into(Path(settings.data) / "logs" / "up.log"):
            run(settings, say, ready)
    except (BrokerError, KeyFileError, StartFailed) as error:
        typer.echo(f"tinkerbus: {error}", err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _libraries_into(file: Path) -> Iterator[None]:
    """What Ray and Serve print in this process goes into a file; the screen is for us."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with (
        file.open("a", buffering=1) as sink,
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
    ):
        yield
