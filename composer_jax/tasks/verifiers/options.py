"""What a run says of environments of verifiers."""

import dataclasses
import json

from composer_jax.core import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiersOptions:
  """Environments of verifiers as tasks.

  Attributes:
    python: Python that has verifiers and the taskset; mostly one of an
      environment of their own.
    renderer: JSON of the renderer's config, such as {"name": "qwen3"}; '' is
      that of the chat template, which calls no tools.
    max_windows: most windows of an episode: a harness that rewrites its history
      begins new ones.
    pass_reward: least reward of a task that counts as solved.
    timeout_s: most seconds of an episode.
  """

  python: str = ''
  renderer: str = ''
  max_windows: int = 8
  pass_reward: float = 1.0
  timeout_s: float = 3600.0

  def __post_init__(self):
    checks.at_least(self, 1, 'max_windows')
    checks.positive(self, 'timeout_s')
    try:
      renderer = json.loads(self.renderer or '{"name": ""}')
    except (ValueError, TypeError):
      renderer = None
    is_named = isinstance(renderer, dict) and 'name' in renderer
    checks.require(self, 'renderer', is_named, 'be JSON with a "name"')
