"""The monitor's part of the OpenAPI document."""

from __future__ import annotations

from triglot.protocols.api_operation import (
    JSON,
    OBJECT,
    STRING,
    TEXT,
    ApiOperation,
    Schema,
    array,
    json_body,
    query,
    record,
    ref,
)

HTML = "text/html"
SCHEMAS: dict[str, Schema] = {
    "Alive": record({"status": STRING}),
    "ModelDetails": record(
        {
            "name": STRING,
            "labels": OBJECT,
            "error": STRING,
            "serves": {"type": ["object", "null"]},
            "server": OBJECT,
        }
    ),
    "Overview": record({"server": OBJECT}),
    "Series": record({"label": STRING, "data": array({})}),
}
METRICS = ApiOperation(
    "Metrics of the server and its models",
    {TEXT: STRING, "application/openmetrics-text": STRING},
    description="Prometheus' text, or OpenMetrics where the client accepts it.",
)
SERIES = ApiOperation(
    "The points of one metric",
    {JSON: ref("Series"), TEXT: STRING},
    description="Without such a metric, the text `key not found`.",
    parameters=[query("name", STRING, "Name of the metric")],
)
PAGE = ApiOperation("The monitor page", {HTML: STRING})
ROOT = ApiOperation(
    "The monitor page for browsers, liveness for others (KServe V1)", {HTML: STRING} | json_body(ref("Alive"))
)
OVERVIEW = ApiOperation("The numbers of the monitor page", json_body(ref("Overview")))
MODEL = ApiOperation(
    "One model, as the monitor page shows it",
    json_body(ref("ModelDetails")),
    description="Labels, signatures with samples, configuration; why it does not serve, if so.",
    parameters=[query("name", STRING, "Name of the model"), query("version", STRING, "Without one, the default")],
)
