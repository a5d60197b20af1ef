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
    only_here = {'namespace': 'composer', 'registry': self._registry}
    self.requests = prometheus.Counter(
      'requests',
      'Requests by route and status; 499 is a client that left.',
      ['route', 'status'],
      **only_here,
    )
    self.prompt_tokens = prometheus.Counter(
      'prompt_tokens', 'Context tokens of accepted requests.', **only_here
    )
    self.sampled_tokens = prometheus.Counter(
      'sampled_tokens', 'Tokens given to clients.', **only_here
    )
    self.first_token_s = prometheus.Histogram(
      'time_to_first_token_seconds',
      'Time from the request to the first token of its first choice.',
      buckets=_FIRST_S,
      **only_here,
    )
    self.token_s = prometheus.Histogram(
      'time_per_token_seconds',
      'Time between tokens of a choice, after its first ones.',
      buckets=_TOKEN_S,
      **only_here,
    )

  def collect(self) -> Iterator[families.Metric]:
    service = self._service
    figures: dict[str, tuple[float, str]] = {
      'policy_version': (service.version, 'Policy version of the next step.'),
      'open_choices': (service.num_open, 'Choices running or waiting.'),
      'queue_depth': (
        max(0, service.num_open - service.engine_options.num_slots),
        'Choices beyond the slots of the engine.',
      ),
      'healthy': (not service.unhealthy(), '1 if /health says so.'),
    }
    for name, value in service.stats.items():
      figures[f'engine_{name}'] = (value, 'A figure of the engine.')
    for name, (value, text) in figures.items():
      yield families.GaugeMetricFamily(f'composer_{name}', text, float(value))

  def text(self) -> bytes:
    return prometheus.generate_latest(self._registry)
