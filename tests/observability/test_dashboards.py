"""Dashboards and deployment files against the catalogue, and against a real Prometheus."""

from __future__ import annotations

import asyncio
import http
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import observability
from observability import CONTENT_TYPE, METRICS, Exporter, MetricsPublisher, Recorder
from observability.catalogue import SAMPLES
from tests.observability.scraping import sample, serve_requests, train

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((Path(observability.__file__).parent / "dashboards" / "training.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
NAME = re.compile(r"\btinkerbus_[a-z0-9_]+")


def test_the_training_dashboard_has_its_five_rows_and_two_variables() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Gradients", "Rollout/train gap", "Throughput", "Queue and recovery", "Sampling"]
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == [
        "datasource",
        "group",
        "model",
    ]


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells


@pytest.mark.parametrize("expr", TARGETS)
def test_a_query_asks_for_metrics_and_labels_of_the_catalogue(expr) -> None:
    names = NAME.findall(expr)
    assert names
    for name, selector in re.findall(r"(tinkerbus_[a-z0-9_]+)(?:\{([^}]*)\})?", expr):
        assert name in SAMPLES
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert labels <= set(SAMPLES[name].labels)
        assert {"group", "model"} & set(SAMPLES[name].labels) <= labels, "the variables must act"
    for grouped in re.findall(r"by \(([^)]*)\)", expr):
        known = {label for name in names for label in SAMPLES[name].labels} | {"le"}
        assert {label.strip() for label in grouped.split(",")} <= known


def test_counters_are_asked_for_their_rate_and_gauges_are_not() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            rated = {
                name
                for inner in re.findall(r"rate\(([^[]*)\[", target["expr"])
                for name in NAME.findall(inner)
            }
            for name in NAME.findall(target["expr"]):
                if SAMPLES[name].kind == "gauge":
                    assert name not in rated
                elif panel["type"] == "timeseries" and panel["title"] != "Finalizations per step":
                    assert name in rated


def test_variables_and_legends_use_labels_of_the_catalogue() -> None:
    for variable in DASHBOARD["templating"]["list"][1:]:
        form = r"label_values\((tinkerbus_\w+)(?:\{.*\})?, (\w+)\)"
        asked = re.fullmatch(form, variable["definition"])
        assert asked
        assert asked[2] in METRICS[asked[1]].labels
    for panel in PANELS:
        for target in panel["targets"]:
            shown = {label for name in NAME.findall(target["expr"]) for label in SAMPLES[name].labels}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= shown


def test_every_metric_is_on_a_panel() -> None:
    shown = {
        SAMPLES[name].name
        for panel in PANELS
        for target in panel["targets"]
        for name in NAME.findall(target["expr"])
    }
    assert shown == set(METRICS)


def test_prometheus_accepts_the_configuration_we_ship() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    config = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    checked = subprocess.run(
        [promtool, "check", "config", str(config)], capture_output=True, text=True, check=False, timeout=30
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "SUCCESS" in checked.stdout


def test_grafana_is_provisioned_with_the_data_source_the_dashboard_names() -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    sources = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    default = next(v for v in DASHBOARD["templating"]["list"] if v["name"] == "datasource")["current"]
    assert [source["uid"] for source in sources] == [default["value"]]
    (provider,) = yaml.safe_load((folder / "dashboards" / "tinkerbus.yml").read_text())["providers"]
    assert provider["type"] == "file"


# ---- a real Prometheus


class Prometheus:
    """One that scrapes `/metrics` of a port every half second."""

    def __init__(self, folder: Path, target_port: int) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            pytest.skip("prometheus is not installed (Debian: prometheus)")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
        config = config.replace("127.0.0.1:8000", f"127.0.0.1:{target_port}").replace("5s", "500ms")
        (folder / "prometheus.yml").write_text(config)
        self.process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--log.level=error",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)

    def query(self, expr: str) -> list[dict[str, object]]:
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:  # it listens before it can be asked
                return []
            pytest.fail(f"{expr}: {error.read().decode()}")
        except OSError:  # not up yet
            return []


@pytest.fixture
def served() -> Iterator[tuple[int, list[bytes]]]:
    """An HTTP server for one page, which the test fills in."""
    page = [b""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.end_headers()
            self.wfile.write(page[0])

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port, page
    server.shutdown()
    server.server_close()
    thread.join()


async def test_every_query_finds_data_after_one_training_step(bus, served, tmp_path) -> None:
    port, page = served
    recorder, ingress = Recorder("dispatcher", group="tiny"), Recorder("ingress")
    recorder.begin(model="m")
    ingress.begin(route="/api/v1/forward_backward")
    prometheus = Prometheus(tmp_path, port)
    try:
        async with Exporter(bus) as exporter:

            async def publish() -> None:
                for one in (recorder, ingress):
                    await MetricsPublisher(bus, one).publish()
                await bus.nc.flush()
                await asyncio.sleep(0.1)
                page[0] = exporter.render()

            await publish()
            await found(prometheus, ["tinkerbus_steps_total"])
            train(recorder, "m")
            sample(recorder)
            serve_requests(ingress)
            await publish()
            expressions = [filled_in(target["expr"]) for panel in PANELS for target in panel["targets"]]
            await found(prometheus, expressions)
            (per_step,) = await asyncio.to_thread(
                prometheus.query, "tinkerbus_finalizations_total / tinkerbus_steps_total"
            )
            assert per_step["value"][1] == "1"
    finally:
        prometheus.stop()


def filled_in(expr: str) -> str:
    return expr.replace("$__rate_interval", "1m").replace("$group", ".*").replace("$model", ".*")


async def found(prometheus: Prometheus, expressions: list[str], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    for expr in expressions:
        while not await asyncio.to_thread(prometheus.query, expr):
            assert time.monotonic() < deadline, f"no data for {expr}"
            await asyncio.sleep(0.1)
