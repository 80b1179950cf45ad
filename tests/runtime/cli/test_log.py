"""`tinkerbus log` on data folders and brokers, without a service."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bus.broker_folder import find_running
from bus.codec import JSON, encode
from bus.embedded import EmbeddedBroker
from bus.events import Failed, OptimStepDone
from runtime.cli.main import app
from tests.runtime import written_log
from tests.runtime.written_log import CREATE_FULL, STEP, answer, append, server


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """On the data folder `tmp_path / "data"`, as a running service has it, with the written log."""
    with EmbeddedBroker(tmp_path / "data" / "nats", sync_interval="2m") as started:

        async def fill() -> None:
            async with server(started) as bus:
                await written_log.write(bus)

        asyncio.run(fill())
        yield started


@pytest.fixture
def data(broker: EmbeddedBroker) -> str:
    return str(broker.data_dir.parent)


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["log", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refused(*arguments: str, code: int = 1) -> str:
    """The one line of an error."""
    result = CliRunner().invoke(app, ["log", *arguments])
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("tinkerbus: ")
    return line.removeprefix("tinkerbus: ")


def test_help_names_the_three() -> None:
    assert all(word in said("--help") for word in ("models", "show", "follow"))


def test_models_are_a_table(data: str) -> None:
    rows = [line.split() for line in said("models", "--data", data).splitlines() if line.strip()]
    assert rows[0] == [
        *("model", "tenant", "status", "base", "model"),
        *("first", "last", "entries", "bytes", "last", "result", "trimmed", "below"),
    ]
    size = str(len(encode(CREATE_FULL, JSON)) + len(encode(written_log.UnloadModel())))
    assert [row[:7] for row in rows[2:]] == [
        ["run:0", "demo", "live", "tiny", "1", "5", "4"],
        ["b", "other", "-", "small", "2", "6", "2"],
        ["c", "other", "creating", "-", "-", "-", "0"],
    ]
    assert rows[3][7:] == [size, "0", "0"]


def test_models_are_json_lines(data: str) -> None:
    rows = [json.loads(line) for line in said("models", "--json", "--data", data).splitlines()]
    assert [(row["model_id"], row["entries"], row["last_result"]) for row in rows] == [
        ("run:0", 4, 3),
        ("b", 2, 0),
        ("c", 0, None),
    ]


def test_an_operation_is_a_list_of_fields(data: str) -> None:
    rows = dict(
        re.split(r"\s{2,}", line, maxsplit=1)
        for line in said("show", "run:0", "1", "--data", data).splitlines()
    )
    assert rows["position"] == "3"
    assert rows["op.data[1].model_input"] == "int32 [2]"
    assert rows["op.data[0].loss_fn_inputs.weights"] == "float32 [3]"
    assert rows["ledger.outcome"] == "done"
    assert rows["result.loss_fn_outputs[0].logprobs"] == "float32 [3]"
    assert rows["result.metrics.loss:sum"] == "4.5"


def test_what_is_not_there_yet_is_said(data: str) -> None:
    out = said("show", "run:0", "2", "--data", data)
    assert re.search(r"^ledger +none: not settled yet$", out, re.MULTILINE)
    assert re.search(r"^result +none: not there yet, or expired$", out, re.MULTILINE)


def test_an_operation_is_one_json_object(data: str) -> None:
    (line,) = said("show", "b", "end", "--json", "--data", data).splitlines()
    found = json.loads(line)
    assert (found["seq_id"], found["position"], found["op"]) == (None, 6, {"type": "unload_model"})


def test_a_broker_of_ones_own_is_named_by_its_url(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, password = broker.credentials.user, broker.credentials.password
    file = tmp_path / "settings.toml"
    file.write_text(f'[nats]\nuser = "{user}"\npassword = "{password}"\n')
    assert "run:0" in said("models", "--nats", broker.url, "--config", str(file))
    assert "refuses a connection without credentials" in refused("models", "--nats", broker.url)
    monkeypatch.setenv("TINKERBUS_NATS__USER", user)
    monkeypatch.setenv("TINKERBUS_NATS__PASSWORD", password)
    assert "run:0" in said("models", "--nats", broker.url)


def test_a_service_that_does_not_run_is_looked_into_all_the_same(broker: EmbeddedBroker, data: str) -> None:
    broker.stop()
    assert "run:0" in said("models", "--data", data)
    assert "hash-1" in said("show", "run:0", "1", "--data", data)
    assert find_running(broker.data_dir) is None
    assert refused("follow", "run:0", "--data", data) == (
        f"no service runs on {data}: there is nothing to wait for"
    )


def test_a_folder_without_a_log_is_named_and_left_as_it_was(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert refused("models", "--data", str(folder)).startswith(f"{folder} holds no log")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_log_is_said_to_be_empty(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "nats", sync_interval="2m") as broker:
        assert "no stream TINKER_OPS" in refused("models", "--data", str(tmp_path))

        async def streams_alone() -> None:
            async with server(broker):
                pass

        asyncio.run(streams_alone())
        assert refused("models", "--data", str(tmp_path)) == "the log is empty: no model has been created"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "run:7", "1"], "there is no model 'run:7': did you mean 'run:0'?"),
        (["show", "run:0", "9"], "model 'run:0' has no operation 9: its numbers go from 0 to 3"),
        (["show", "run:0", "x"], "SEQ is 'x': expected a number of 0 or more, or \"end\" for unload_model"),
        (["show", "run:0", "-1"], "SEQ is '-1': expected a number of 0 or more, or \"end\" for unload_model"),
        (["show", "run:0", "²"], "SEQ is '²': expected a number of 0 or more, or \"end\" for unload_model"),
        (["show", "", "1"], "MODEL is '': expected a model's id"),
        (["follow", "nobody"], "there is no model 'nobody': `tinkerbus log models` lists them"),
        (["follow", "run:0", "--from", "0"], "--from is '0': expected a number of 1 or more"),
        (["follow", "run:0", "--from", "ten"], "--from is 'ten': expected a number of 1 or more"),
    ],
)
def test_bad_input_is_named_in_a_line(data: str, arguments: list[str], says: str) -> None:
    assert refused(*arguments, "--data", data) == says


def test_a_number_of_any_length_is_refused() -> None:
    assert refused("show", "m", str(2**63)).startswith(f"SEQ is '{2**63}'")
    assert refused("show", "m", "9" * 5000).startswith("SEQ is '999")


def test_bad_settings_are_named_in_a_line() -> None:
    assert refused("models", "--config", "none.toml", code=2).startswith(
        "config file none.toml cannot be read"
    )
    assert "is no broker address" in refused("models", "--nats", "http://x")


def test_following_prints_a_line_each_until_ctrl_c(broker: EmbeddedBroker, data: str) -> None:
    with _following("run:0", "--from", "4", "--data", data) as process:
        assert process.stdout is not None
        first = {process.stdout.readline() for _ in range(3)}
        step, refusal = len(encode(STEP)), len(encode(written_log.REFUSED))
        assert {line for line in first if "->" not in line} == {
            f"       4  run:0#2  optim_step  {step} bytes  learning_rate=0.001\n",
            f"       5  run:0#3  refused  {refusal} bytes  no such loss (field loss.name)\n",
        }

        async def go_on() -> None:
            async with server(broker) as bus:
                await append(bus, "demo", "run:0", 4, STEP)
                await answer(bus, "demo", "run:0", 4, OptimStepDone(metrics={"grad_norm": 0.5}))

        asyncio.run(go_on())
        assert process.stdout.readline().split()[:3] == ["7", "run:0#4", "optim_step"]
        result = process.stdout.readline().split()
        assert (result[:3], result[-1]) == (["->", "run:0#4", "optim_step_done"], "grad_norm=0.5")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 0


def test_following_as_json(broker: EmbeddedBroker, data: str) -> None:
    with _following("run:0", "--from", "5", "--json", "--data", data) as process:
        assert process.stdout is not None
        entry, result = json.loads(process.stdout.readline()), json.loads(process.stdout.readline())
        assert (entry["kind"], entry["position"], entry["seq_id"]) == ("entry", 5, 3)
        assert (result["kind"], result["seq_id"], result["type"]) == ("result", 3, "failed")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 0


def test_what_a_client_wrote_cannot_act_on_the_terminal(broker: EmbeddedBroker, data: str) -> None:
    async def write() -> None:
        async with server(broker) as bus:
            await append(bus, "demo", "\x1b[2J[red]", 1, STEP)
            await answer(bus, "demo", "\x1b[2J[red]", 1, Failed(error="a\nb\x9b", category="user"))

    asyncio.run(write())
    assert "\\x1b[2J[red]" in said("models", "--data", data)
    out = said("show", "\x1b[2J[red]", "1", "--data", data)
    assert re.search(r"^result\.error +a\\nb\\x9b$", out, re.MULTILINE)
    assert "\x1b" not in out


def _following(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "runtime.cli.main", "log", "follow", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
