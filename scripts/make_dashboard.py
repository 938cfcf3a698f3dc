"""Write docs/grafana/glm_dcp_jax.json, the dashboard: `python scripts/make_dashboard.py`. A test keeps it current.

Of vLLM's metrics a name is written `~name`: the dashboard's variable `prefix` stands before it.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from glm_dcp_jax.serve.metric_table import DEFAULT_PREFIX

DOCUMENT = Path(__file__).parent.parent / "docs" / "grafana" / "glm_dcp_jax.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ALL = 'model_name=~"$model_name"'
COLUMNS = 24
PERCENTILES = (50, 90, 99)


class Panel(NamedTuple):
    """A graph, or with `single` one number. lines: (PromQL, legend). most: top of the axis, if it is known."""

    title: str
    lines: list[tuple[str, str]]
    unit: str = "short"
    width: int = 8
    single: bool = False
    most: float | None = None
    text: str = ""


def total(name: str, by: str = "", labels: str = ALL) -> str:
    """A gauge, or its parts by a label, over all servers."""
    return f"sum{f' by ({by})' if by else ''} ({name}{{{labels}}})"


def rate(name: str, by: str = "") -> str:
    """A counter's growth a second."""
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{ALL}}}[$__rate_interval]))"


def percentiles(name: str) -> list[tuple[str, str]]:
    """Of a histogram, and its mean."""
    buckets = rate(f"{name}_bucket", "le")
    lines = [(f"histogram_quantile({p / 100}, {buckets})", f"P{p}") for p in PERCENTILES]
    return [*lines, (f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}", "mean")]


ROWS: dict[str, list[Panel]] = {
    "Now": [
        Panel("Running", [(total("~num_requests_running"), "")], width=4, single=True),
        Panel("Waiting", [(total("~num_requests_waiting"), "")], width=4, single=True),
        Panel("Generated tokens/s", [(rate("~generation_tokens_total"), "")], "short", 4, True),
        Panel(
            "TTFT, P50",
            [(f"histogram_quantile(0.5, {rate('~time_to_first_token_seconds_bucket', 'le')})", "")],
            "s",
            4,
            True,
        ),
        Panel("Cache in use", [(f"max (~kv_cache_usage_perc{{{ALL}}})", "")], "percentunit", 4, True, 1),
        Panel(
            "Must be 0",
            [
                (total("glm_dcp:compiles_after_warm_up_total"), "compiled while serving"),
                (total("glm_dcp:dcp_selections_diverged_total"), "steps whose devices disagreed"),
            ],
            width=4,
            single=True,
            text="Programs compiled while serving make steps slow; devices that disagree make tokens wrong.",
        ),
    ],
    "Load": [
        Panel(
            "Requests",
            [
                (total("~num_requests_running"), "running"),
                (total("~num_requests_waiting_by_reason", "reason"), "waiting: {{reason}}"),
            ],
            text="In outputs: a request with n 3 counts three times.",
        ),
        Panel(
            "Ended and refused",
            [
                (rate("~request_success_total", "finished_reason"), "{{finished_reason}}"),
                (rate("~admission_rejections_total", "reason"), "refused: {{reason}}"),
            ],
            "reqps",
        ),
        Panel(
            "Tokens",
            [(rate("~prompt_tokens_total"), "prompt"), (rate("~generation_tokens_total"), "generation")],
        ),
        Panel("Prompt lengths", percentiles("~request_prompt_tokens")),
        Panel("Output lengths", percentiles("~request_generation_tokens")),
        Panel("Tokens of a step", percentiles("~iteration_tokens_total")),
    ],
    "Latency": [
        Panel("Time to first token", percentiles("~time_to_first_token_seconds"), "s"),
        Panel("Inter-token latency", percentiles("~inter_token_latency_seconds"), "s"),
        Panel("End to end", percentiles("~e2e_request_latency_seconds"), "s"),
        Panel("In the queue", percentiles("~request_queue_time_seconds"), "s"),
        Panel("Prefill", percentiles("~request_prefill_time_seconds"), "s"),
        Panel("Decode", percentiles("~request_decode_time_seconds"), "s"),
    ],
    "Cache": [
        Panel("Pages in use", [(f"~kv_cache_usage_perc{{{ALL}}}", "{{instance}}")], "percentunit", most=1),
        Panel(
            "Prefix cache",
            [
                (f"{rate('~prefix_cache_hits_total')} / {rate('~prefix_cache_queries_total')}", "hit rate"),
                (
                    f"{rate('~prompt_tokens_cached_total')} / {rate('~prompt_tokens_total')}",
                    "cached of prompts",
                ),
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Pages taken back",
            [
                (rate("~num_preemptions_total"), "preemptions"),
                (rate("glm_dcp:prefix_cache_evictions_total"), "evictions"),
            ],
            "cps",
        ),
    ],
    "Decoding": [
        Panel("Decode steps by path", [(rate("glm_dcp:dcp_decode_steps_total", "path"), "{{path}}")], "cps"),
        Panel(
            "Expected to be received by each device",
            [
                (
                    f"{rate('glm_dcp:dcp_received_bytes_total')} / {rate('glm_dcp:dcp_decode_steps_total')}",
                    "bytes a step",
                )
            ],
            "bytes",
        ),
        Panel(
            "Records",
            [
                (
                    f"{rate('glm_dcp:dcp_records_total')} / {rate('glm_dcp:dcp_selected_entries_total')}",
                    "unique",
                ),
                (
                    f"{rate('glm_dcp:dcp_overflows_total')} / {rate('glm_dcp:dcp_decode_steps_total')}",
                    "overflows a step",
                ),
            ],
            text="Records that travel for each selected entry, and share groups whose records did not fit.",
        ),
        Panel(
            "Draft acceptance by position",
            [
                (
                    f"{rate('~spec_decode_num_accepted_tokens_per_pos_total', 'position')} / ignoring(position) "
                    f"group_left {rate('~spec_decode_num_drafts_total')}",
                    "{{position}}",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Tokens a round",
            [
                (
                    f"1 + {rate('~spec_decode_num_accepted_tokens_total')} / {rate('~spec_decode_num_drafts_total')}",
                    "mean",
                )
            ],
        ),
        Panel(
            "Drafts",
            [
                (rate("~spec_decode_num_draft_tokens_total"), "verified"),
                (rate("~spec_decode_num_accepted_tokens_total"), "accepted"),
            ],
            "cps",
        ),
    ],
    "Transfers": [
        Panel("Bringing a cache", percentiles("~nixl_xfer_time_seconds"), "s"),
        Panel(
            "Bytes",
            [
                (rate("~nixl_bytes_transferred_sum"), "received"),
                (rate("glm_dcp:kv_transfer_sent_bytes_total"), "sent"),
                (rate("glm_dcp:kv_transfer_wasted_bytes_total"), "wasted"),
            ],
            "Bps",
        ),
        Panel(
            "Failures",
            [
                (rate("glm_dcp:kv_transfer_failures_total", "kind"), "{{kind}}"),
                (rate("~nixl_num_kv_expired_reqs_total"), "leases that ended"),
                (rate("~nixl_num_failed_notifications_total"), "unheard messages"),
            ],
            "cps",
        ),
        Panel("Held for consumers", [(total("glm_dcp:kv_transfer_held_requests"), "requests")]),
        Panel(
            "Where a transfer's time goes",
            [(rate("glm_dcp:kv_transfer_phase_seconds_total", "phase"), "{{phase}}")],
            "s",
        ),
        Panel(
            "Ends of offers", [(rate("glm_dcp:kv_transfer_offers_total", "outcome"), "{{outcome}}")], "cps"
        ),
    ],
}


def target(number: int, expression: str, legend: str) -> dict[str, Any]:
    return {
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": with_prefix(expression),
        "legendFormat": legend or "__auto",
        "range": True,
        "refId": chr(ord("A") + number),
    }


def with_prefix(expression: str) -> str:
    """`=~` is an operator; before a name it stands for the prefix."""
    return expression.replace("=~", "\0").replace("~", "${prefix:raw}").replace("\0", "=~")


def drawn(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """A panel as Grafana stores it."""
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "color": {"mode": "palette-classic"}}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.single:
        defaults["color"] = {"mode": "thresholds"}
        defaults["thresholds"] = {"mode": "absolute", "steps": thresholds(panel)}
    else:
        defaults["custom"] = {"fillOpacity": 8, "lineWidth": 2, "showPoints": "never", "spanNulls": True}
    options = (
        {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
        if panel.single
        else {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    )
    return {
        "id": number,
        "type": "stat" if panel.single else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"h": 4 if panel.single else 8, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [target(at, *line) for at, line in enumerate(panel.lines)],
    }


def thresholds(panel: Panel) -> list[dict[str, Any]]:
    if panel.title == "Must be 0":
        return [{"color": "green", "value": None}, {"color": "red", "value": 1}]
    if panel.most == 1:
        return [{"color": "green", "value": None}, {"color": "orange", "value": 0.9}]
    return [{"color": "blue", "value": None}]


def panels() -> list[dict[str, Any]]:
    """All rows and their panels, from the left to the right and from the top to the bottom."""
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + made[-1]["gridPos"]["h"]
            made.append(drawn(panel, len(made) + 1, x, y))
            x += panel.width
        y += made[-1]["gridPos"]["h"]
    return made


def variables() -> list[dict[str, Any]]:
    """What whoever looks chooses: where the data comes from, which models, and the prefix of vLLM's names."""
    models = with_prefix("label_values(~num_requests_running, model_name)")
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "prefix",
            "label": "--metrics-prefix",
            "type": "textbox",
            "query": DEFAULT_PREFIX,
            "current": {"text": DEFAULT_PREFIX, "value": DEFAULT_PREFIX},
            "options": [{"selected": True, "text": DEFAULT_PREFIX, "value": DEFAULT_PREFIX}],
        },
        {
            "name": "model_name",
            "label": "Model",
            "type": "query",
            "datasource": SOURCE,
            "definition": models,
            "query": {"qryType": 1, "query": models, "refId": "models"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def document() -> str:
    """All of the dashboard's file."""
    dashboard = {
        "uid": "glm-dcp-jax",
        "title": "glm_dcp_jax",
        "description": "Load, latency, cache, decode paths, drafts and transfers of glm_dcp_jax servers.",
        "tags": ["glm_dcp_jax", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables()},
        "panels": panels(),
    }
    return json.dumps(dashboard, indent=2) + "\n"


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
