"""A server's counters, in Prometheus's format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hgpo_jax.serving.engine import Engine

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ServerMetrics:
    """Counters of one server; `text()` is the page."""

    def __init__(self, engine: Engine):
        self._registry = at = CollectorRegistry()
        self.requests = Counter("hgpo_requests", "answered requests", ["path", "status"], registry=at)
        self.tokens = Counter("hgpo_tokens", "tokens of prompts, and sampled ones that were told", ["kind"], registry=at)
        self.cancelled = Counter("hgpo_cancelled", "requests whose client left, or that failed or took too long", registry=at)
        self.first_token = Histogram("hgpo_first_token_seconds", "until a request's first tokens", buckets=SECONDS, registry=at)
        self.duration = Histogram("hgpo_request_seconds", "until a request's last token", buckets=SECONDS, registry=at)
        for name, meaning, value in (
            ("hgpo_active", "responses that have a slot", lambda: engine.active),
            ("hgpo_waiting", "responses that wait for a slot", lambda: engine.waiting),
            ("hgpo_slots", "responses that can have one", lambda: engine.slots),
        ):
            Gauge(name, meaning, registry=at).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)
