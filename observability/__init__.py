"""What the service measures: one catalogue, one exporter, dashboards checked against both.

Processes record into a `Recorder`, a `MetricsPublisher` sends its state over the bus once a second, an
`Exporter` anywhere merges all of them for Prometheus. What is listed here is the public face.
"""

from observability.catalogue import METRICS, NotInCatalogue
from observability.exporter import CONTENT_TYPE, Exporter
from observability.publisher import MetricsPublisher
from observability.recorder import Recorder
from observability.training import record_forward_backward, record_optim_step

__all__ = [
    "CONTENT_TYPE",
    "METRICS",
    "Exporter",
    "MetricsPublisher",
    "NotInCatalogue",
    "Recorder",
    "record_forward_backward",
    "record_optim_step",
]
