"""Environments of their own for packages that tests here cannot share."""

import hashlib
import os
import pathlib
import subprocess
import sys

# The folder keeps environments between runs; else they end with the session.
KEPT = 'COMPOSER_JAX_TEST_ENVIRONMENTS'


def python(packages, tmp_path_factory, interpreter=sys.executable) -> str:
  """Returns the interpreter of an environment that has the packages."""
  name = ' '.join([str(interpreter), *sorted(packages)])
  key = hashlib.sha256(name.encode()).hexdigest()[:12]
  kept = os.environ.get(KEPT)
  root = pathlib.Path(kept or tmp_path_factory.getbasetemp() / 'environments')
  folder = root / f'{sorted(packages)[0]}-{key}'
  path = folder / 'bin' / 'python'
  if not (folder / 'complete').exists():
    run = lambda *command: subprocess.run(
      command, check=True, timeout=900, stdout=subprocess.DEVNULL
    )
    # Without this interpreter's own environment, which may be one itself.
    base = getattr(sys, '_base_executable', sys.executable)
    is_own = str(interpreter) == sys.executable
    run(base if is_own else str(interpreter), '-m', 'venv', str(folder))
    run(str(path), '-m', 'pip', 'install', '-q', *packages)
    (folder / 'complete').touch()
  return str(path)
