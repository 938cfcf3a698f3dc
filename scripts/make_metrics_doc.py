"""Write docs/metrics.md from the table of metrics: `python scripts/make_metrics_doc.py`. A test keeps it current."""

from pathlib import Path

from glm_dcp_jax.serve.metric_table import DEFAULT_PREFIX, OURS, SECTIONS, Described
from glm_dcp_jax.serve.metrics import FINISH_REASONS, QUEUE_LIMITS

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"
VALUES = {"finished_reason": FINISH_REASONS, "reason": QUEUE_LIMITS}
"""Of labels whose values the sentences do not name."""

OPENING = f"""# Metrics

<!-- Written by scripts/make_metrics_doc.py from glm_dcp_jax/serve/metric_table.py; do not edit. -->

`/metrics` gives them in Prometheus' format. What vLLM has too has its name, kind, labels and buckets, behind
`{DEFAULT_PREFIX}`: dashboards that were made for vLLM work. `--metrics-prefix` puts something else before these names.
What only this server has is always behind `{OURS}`.

- Every sample has the labels `model_name` (the first of `--served-model-name`) and `engine` (always `0`); a label of a
  metric's own stands behind its name.
- A histogram comes as `_bucket`, `_sum` and `_count`. All other names are given in full.
- What runs and waits is counted in outputs: a request with `n` 3 counts three times. The queue's limits count requests.
- Histograms of a request's tokens have buckets 1, 2, 5, 10, ... up to the model's length.
- Times are taken by the server as it sees tokens; only the beginning of a request's computation is noted by the engine.
  Requests that were refused are in no histogram, and those that ended without a token only in those that need none.
- Values of the engine are as of its last step.
- `process_` and `python_` metrics of the server's process, collected by prometheus_client, have no such labels and no
  prefix. There are no `_created` series.
- `nixl_` names are vLLM's, and count whatever the transport is.

[grafana/glm_dcp_jax.json](grafana/glm_dcp_jax.json) is a dashboard of them for Grafana, and `GET /` on the server a
page that shows the most important ones: [server.md](server.md).
"""


def row(metric: Described) -> tuple[str, ...]:
    """A metric: its name in Prometheus, its own label, its kind, what it says."""
    name = f"`{metric.exported(DEFAULT_PREFIX)}{metric.ending}`"
    label = f" `{{{metric.label}}}`" if metric.label else ""
    named = "`" in metric.text or metric.label not in VALUES
    values = "" if named else ": " + ", ".join(f"`{value}`" for value in VALUES[metric.label])
    return name + label, metric.kind, metric.text + values


def document() -> str:
    """All of docs/metrics.md."""
    parts = [OPENING]
    for section in SECTIONS:
        when = f"Only {section.when}.\n\n" if section.when else ""
        rows = [("metric", "kind", "what it says"), ("---",) * 3, *map(row, section.metrics)]
        lines = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
        parts.append(f"\n## {section.title}\n\n{when}{lines}")
    return "".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
