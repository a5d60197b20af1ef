"""The section `sandbox` of a run's config."""

import dataclasses

from composer_jax.sandbox import base

LEVELS = ('auto', *base.LEVELS, *base.OUTER_LEVELS, 'static')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxOptions:
  """Isolation of code that the policy wrote, and the limits of each call.

  Attributes:
    level: isolation: 'auto' for 'unshare', or 'rlimits' where that is allowed;
      'microvm' or 'ray' for a machine of its own; or 'static', which executes
      nothing.
    allow_unsafe: true to accept 'rlimits', which isolates nothing: for trusted
      code only.
    workers: number of calls at a time.
    packages: distributions that programs in a workspace can import; 'pytest'
      for tasks that have test suites.
    wall_s: seconds until everything that a call started is killed.
    cpu_s: seconds of processor time of one process.
    memory_bytes: memory of all processes and files of a call together.
    processes: processes and threads that may exist at once.
    file_bytes: size of one file, and growth of a workspace.
    output_bytes: printed bytes that are kept, and size of the largest result.
  """

  level: str = 'auto'
  allow_unsafe: bool = False
  workers: int = 2
  packages: tuple[str, ...] = ()
  wall_s: float = 2.0
  cpu_s: float = 1.0
  memory_bytes: int = 256 << 20
  processes: int = 8
  file_bytes: int = 1 << 20
  output_bytes: int = 1 << 16

  def __post_init__(self):
    if self.level not in LEVELS:
      raise ValueError(
        f'--config.sandbox.level must be one of {LEVELS}, not {self.level!r}.'
      )
    if self.workers < 1:
      raise ValueError(
        f'--config.sandbox.workers must be at least 1, not {self.workers}.'
      )
    self.limits()

  def limits(self) -> base.Limits:
    names = [f.name for f in dataclasses.fields(base.Limits)]
    return base.Limits(**{name: getattr(self, name) for name in names})
