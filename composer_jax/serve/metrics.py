"""Metrics that Prometheus scrapes: counts, latencies, and the engine's own."""

from collections.abc import Iterator

import prometheus_client as prometheus
from prometheus_client import core as families
from prometheus_client import registry

from composer_jax.serve import service as services

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics(registry.Collector):
  """The metrics of one server; a process may have several servers."""

  def __init__(self, service: services.Service):
    self._service = service
    self._registry = prometheus.CollectorRegistry()
    self._registry.register(self)
    self.requests = prometheus.Counter(
      'composer_requests',
      'Requests by route and status; 499 is a client that left.',
      ['route', 'status'],
      registry=self._registry,
    )
    self.prompt_tokens = prometheus.Counter(
      'composer_prompt_tokens',
      'Context tokens of accepted requests.',
      registry=self._registry,
    )
    self.sampled_tokens = prometheus.Counter(
      'composer_sampled_tokens',
      'Tokens given to clients.',
      registry=self._registry,
    )
    self.first_token_s = prometheus.Histogram(
      'composer_time_to_first_token_seconds',
      'Time from the request to the first token of its first choice.',
      buckets=_FIRST_S,
      registry=self._registry,
    )
    self.token_s = prometheus.Histogram(
      'composer_time_per_token_seconds',
      'Time between tokens of a choice, after its first ones.',
      buckets=_TOKEN_S,
      registry=self._registry,
    )

  def collect(self) -> Iterator[families.Metric]:
    """Reads the service when it is scraped."""
    service = self._service
    figures: dict[str, tuple[float, str]] = {
      'policy_version': (service.version, 'Policy version of the next step.'),
      'open_choices': (service.num_open, 'Choices running or waiting.'),
      'queue_depth': (
        max(0, service.num_open - service.engine_options.num_slots),
        'Choices beyond the slots of the engine.',
      ),
      'draining': (
        service.state != services.SERVING,
        '1 if it refuses requests.',
      ),
      'healthy': (not service.unhealthy(), '1 if /health says so.'),
    }
    for name, value in service.stats.items():
      figures[f'engine_{name}'] = (value, 'A figure of the engine.')
    for name, (value, text) in figures.items():
      yield families.GaugeMetricFamily(f'composer_{name}', text, float(value))

  def text(self) -> bytes:
    return prometheus.generate_latest(self._registry)
