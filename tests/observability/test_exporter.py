"""From recorders over a real broker to Prometheus's text."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

import pytest

from bus import subjects
from bus.connection import connect
from bus.embedded import EmbeddedBroker
from observability import METRICS, Exporter, MetricsPublisher, Recorder
from tests.observability.scraping import eventually, sample, serve_requests, train, value

M = {"group": "tiny", "model": "m"}


def dispatcher() -> Recorder:
    return Recorder("dispatcher", group="tiny")


async def test_what_processes_record_is_exposed_together(bus) -> None:
    recorder, ingress = dispatcher(), [Recorder("ingress-1"), Recorder("ingress-2")]
    async with Exporter(bus) as exporter, MetricsPublisher(bus, recorder, interval_s=0.05):
        train(recorder, "m")
        for one in ingress:
            serve_requests(one)
            await MetricsPublisher(bus, one).publish()
        await eventually(lambda: value(exporter, "tinkerbus_steps_total", **M) == 1)
        requests = {"route": "/api/v1/forward_backward", "status": "2xx"}
        assert value(exporter, "tinkerbus_ingress_requests_total", **requests) == 2
        assert value(exporter, "tinkerbus_gradient_norm", **M) == 1.25
        assert value(exporter, "tinkerbus_reporting_processes") == 3
        total = {"group": "tiny", "verb": "optim_step", "stage": "total"}
        assert value(exporter, "tinkerbus_operation_duration_seconds_bucket", **total, le="0.25") == 1
        assert value(exporter, "tinkerbus_operation_duration_seconds_bucket", **total, le="0.1") == 0


async def test_a_restarted_process_leaves_no_dead_gauge_and_no_counter_goes_back(bus) -> None:
    now = 0.0
    async with Exporter(bus, clock=lambda: now) as exporter:
        first = dispatcher()
        train(first, "m")
        first.set("tinkerbus_queue_depth", 9, model="gone")
        await MetricsPublisher(bus, first).publish()
        await eventually(lambda: value(exporter, "tinkerbus_steps_total", **M) == 1)

        now = 5.0
        second = dispatcher()  # the first was killed
        await MetricsPublisher(bus, second).publish()
        await eventually(lambda: value(exporter, "tinkerbus_recoveries_total", group="tiny") == 0)
        assert value(exporter, "tinkerbus_steps_total", **M) == 1
        train(second, "m")
        await MetricsPublisher(bus, second).publish()
        await eventually(lambda: value(exporter, "tinkerbus_steps_total", **M) == 2)

        now = 10.1
        assert value(exporter, "tinkerbus_queue_depth", group="tiny", model="gone") is None
        assert value(exporter, "tinkerbus_queue_depth", **M) == 2
        assert value(exporter, "tinkerbus_steps_total", **M) == 2


async def test_a_deleted_model_leaves_no_series(bus) -> None:
    recorder = dispatcher()
    publisher = MetricsPublisher(bus, recorder)
    async with Exporter(bus) as exporter:
        train(recorder, "m")
        train(recorder, "n")
        await publisher.publish()
        await eventually(lambda: b'model="m"' in exporter.render())
        recorder.remove(model="m")
        await publisher.publish()
        await eventually(lambda: b'model="m"' not in exporter.render())
        assert b'model="n"' in exporter.render()


async def test_stopping_a_publisher_sends_its_last_state(bus) -> None:
    recorder = dispatcher()
    async with Exporter(bus) as exporter:
        publisher = MetricsPublisher(bus, recorder, interval_s=3600)
        await publisher.start()
        await eventually(lambda: value(exporter, "tinkerbus_reporting_processes") == 1)
        recorder.inc("tinkerbus_recoveries_total")
        await publisher.stop()
        await eventually(lambda: value(exporter, "tinkerbus_recoveries_total", group="tiny") == 1)


async def test_metrics_go_on_after_the_broker_was_away(broker, bus) -> None:
    recorder = dispatcher()
    async with Exporter(bus) as exporter, MetricsPublisher(bus, recorder, interval_s=0.05):
        await eventually(lambda: value(exporter, "tinkerbus_reporting_processes") == 1)
        broker.restart(down_s=0.3)
        recorder.inc("tinkerbus_recoveries_total")
        await eventually(lambda: value(exporter, "tinkerbus_recoveries_total", group="tiny") == 1, 10)


async def test_a_message_that_is_no_snapshot_is_counted_and_harms_nothing(bus) -> None:
    async with Exporter(bus) as exporter:
        await bus.nc.publish(subjects.metrics("stranger"), b"\xc1")
        await MetricsPublisher(bus, dispatcher()).publish()
        await eventually(lambda: value(exporter, "tinkerbus_reporting_processes") == 1)
        assert value(exporter, "tinkerbus_refused_snapshots_total") == 1


async def test_a_gauge_that_cannot_be_read_is_logged_and_ends_nothing(bus, caplog) -> None:
    recorder = dispatcher()
    failures = iter([ZeroDivisionError("the queue is on fire")])

    def broken() -> None:
        for error in failures:
            raise error

    recorder.before_snapshot(broken)
    async with Exporter(bus) as exporter, MetricsPublisher(bus, recorder, interval_s=0.02):
        await eventually(lambda: value(exporter, "tinkerbus_reporting_processes") == 1)
    assert "the queue is on fire" in caplog.text


async def test_a_tenant_cannot_write_metrics(tmp_path) -> None:
    with EmbeddedBroker(tmp_path, {"demo": "secret"}) as broker:
        async with (
            await connect(broker.url, broker.credentials, name="server") as server,
            await connect(
                broker.url, broker.tenant_credentials("demo"), name="tenant", uses_jetstream=False
            ) as tenant,
            Exporter(server) as exporter,
        ):
            forged = Recorder("dispatcher", group="forged")
            await MetricsPublisher(tenant, forged).publish()
            await tenant.nc.flush()
            await MetricsPublisher(server, dispatcher()).publish()
            await eventually(lambda: value(exporter, "tinkerbus_reporting_processes") == 1)
            assert b"forged" not in exporter.render()


async def test_promtool_has_no_complaint_about_any_metric(bus) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    recorder, ingress = dispatcher(), Recorder("ingress")
    async with Exporter(bus) as exporter:
        train(recorder, "m")
        sample(recorder)
        serve_requests(ingress)
        await MetricsPublisher(bus, recorder).publish()
        await MetricsPublisher(bus, ingress).publish()
        await eventually(lambda: value(exporter, "tinkerbus_reporting_processes") == 2)
        text = exporter.render()
    for metric in METRICS.values():
        assert f"# TYPE {metric.name} {metric.kind}".encode() in text
    checked = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True, timeout=30
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
