"""Picks the strongest sandbox that works here, and says why others do not."""

import concurrent.futures
import logging
import shutil
import sys

from composer_jax.sandbox import base, zygotes

_PROBE_LIMITS = base.Limits(
    wall_s=2.0, cpu_s=1.0, memory_bytes=256 << 20, processes=8,
    file_bytes=1 << 20, output_bytes=1 << 16,
)  # fmt: skip


def probe() -> list[tuple[str, bool, str]]:
  """Tries each level for real.

  Returns:
    (level, available, one line: what it gives, or why it does not work),
    strongest first.
  """
  with concurrent.futures.ThreadPoolExecutor(len(base.LEVELS)) as threads:
    found = threads.map(_try, base.LEVELS)
    return [(level, *one) for level, one in zip(base.LEVELS, found)]


def _try(level: str) -> tuple[bool, str]:
  missing = _missing(level)
  if missing:
    return False, missing
  try:
    with zygotes.ZygotePool(level, _PROBE_LIMITS, 1) as sandbox:
      result = sandbox.call({'m.py': 'def f(x): return x'}, 'm', 'f', [[1]])
  except (zygotes.ZygoteError, OSError) as error:
    return False, f'refused here: {error}'
  if result.status != 'ok':
    return False, f'refused here: {result.error}'
  about = sandbox.about
  uid = 'uid unchanged' if about['uid'] is None else f'uid {about["uid"]}'
  return True, (
    f'seccomp {about["seccomp"]}, cgroup {about["cgroup"]}, {uid}'
    + (', NO namespaces: trusted code only' if level == 'rlimits' else '')
  )


def _missing(level: str) -> str:
  if level == 'rlimits':
    return ''
  if sys.platform != 'linux':
    return f'namespaces do not exist on {sys.platform}'
  if level == 'bwrap' and not shutil.which('bwrap'):
    return 'no program `bwrap` on PATH; the package is called bubblewrap'
  return ''


def open_sandbox(
  preference: str,
  limits: base.Limits,
  *,
  allow_unsafe: bool = False,
  size: int = 1,
) -> zygotes.ZygotePool:
  """Opens a sandbox.

  Args:
    preference: 'auto' for the strongest level that works, or one of
      `base.LEVELS`.
    limits: of each call.
    allow_unsafe: accept 'rlimits', which keeps the code away from neither
      files nor processes of this user; for code that is trusted.
    size: zygotes, that is calls at a time.

  Raises:
    ValueError: for an unknown preference, an unsafe level that was not
      allowed, or none that works, with the reasons.
  """
  if preference not in ('auto', *base.LEVELS):
    raise ValueError(
      f"sandbox {preference!r} is not 'auto' or one of {base.LEVELS}."
    )
  if size < 1:
    raise ValueError(f'sandbox size ({size}) must be at least 1.')
  reasons = []
  for level in base.LEVELS if preference == 'auto' else (preference,):
    if level == 'rlimits' and not allow_unsafe:
      reasons.append('rlimits: no isolation, refused for untrusted code')
      continue
    missing = _missing(level)
    if missing:
      reasons.append(f'{level}: {missing}')
      continue
    try:
      sandbox = zygotes.ZygotePool(level, limits, size)
    except (zygotes.ZygoteError, OSError) as error:
      reasons.append(str(error))
      continue
    return _checked(sandbox)
  raise ValueError(
    f'no sandbox {preference!r} works here ({"; ".join(reasons)}). Install '
    'bubblewrap, allow user namespaces, or train on tasks that execute no '
    'generated code; allow_unsafe=True is for trusted code only.'
  )


def _checked(sandbox: zygotes.ZygotePool) -> zygotes.ZygotePool:
  if sandbox.about['seccomp'] != 'on':
    logging.warning(
        'Sandbox %s without seccomp: %s.',
        sandbox.level, sandbox.about['seccomp'],
    )  # fmt: skip
  return sandbox
