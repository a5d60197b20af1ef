"""How a program joins a run of which it has a store's URL and a key."""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

from absl import flags

from composer_jax.fleet import joining
from experiments import start

_WRITES = flags.DEFINE_string(
  'writes', '', 'Store to write to, behind a --store that can only be read.'
)
_KEY = flags.DEFINE_string('key', '', "File of the run's key.")
_RUN = flags.DEFINE_string('run', 'policy', 'Name of the run in the store.')
_FOLDER = flags.DEFINE_string(
  'folder', '', 'Folder for what the worker keeps; "" for a temporary one.'
)
_INITIAL = flags.DEFINE_string(
  'initial', '', "Folder of the run's import; where it lies here."
)
_TASKS = flags.DEFINE_string(
  'tasks', '', "Folder of the run's task set; where it lies here."
)
_BOXES = flags.DEFINE_integer(
  'boxes', 0, "Sandboxes at a time; 0 for as many as the run's config says.", 0
)
_DRAIN = flags.DEFINE_float(
  'drain_s',
  60.0,
  'Seconds after SIGTERM in which episodes may end; the others go to others.',
)
_WITHIN = flags.DEFINE_float('within_s', 600.0, 'Seconds to wait for the run.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedRun:
  """A run that this process may join, and what it is made of.

  Attributes:
    spec: spec of the run, as it is here.
    systems: systems that the spec names.
    joined: the run in its store.
  """

  spec: Any
  systems: Any
  joined: joining.Joined

  def leases(self, capacity: int, name: str = '') -> Any:
    """Returns the door to the fleet of a worker, which joins with `start`.

    Args:
      name: name that no worker had; '' for one of its own.
    """
    from composer_jax import wiring

    name = name or joining.free_name()
    rules = wiring.rules_of(self.spec)
    return self.joined.leases(name, _DRAIN.value, capacity, rules)


@contextlib.contextmanager
def folder() -> Iterator[pathlib.Path]:
  """Yields the folder for what this process keeps of a run."""
  with contextlib.ExitStack() as stack:
    name = _FOLDER.value
    if not name:
      name = stack.enter_context(tempfile.TemporaryDirectory())
    yield pathlib.Path(name)


def join(store: str, folder: pathlib.Path) -> JoinedRun:
  """Joins the run that the flags name.

  Args:
    store: folder or URL of the run's store.

  Raises:
    ValueError: there is no such run, or this process may not join it.
  """
  key = pathlib.Path(_KEY.value)
  if not (store and _KEY.value and key.is_file()):
    raise ValueError(
      f'--store={store} and --key={_KEY.value} must name the store of a run '
      'and a copy of the file delta.key in its workdir.'
    )
  docs = joining.open_documents(store, key, _RUN.value, _WRITES.value)
  joined = joining.join(docs, key, folder, within_s=_WITHIN.value)
  config = joined.config
  config['delta']['store'] = store
  config['initial'] = _INITIAL.value or config['initial']
  config['tasks']['folder'] = _TASKS.value or config['tasks']['folder']
  config['sandbox']['workers'] = _BOXES.value or config['sandbox']['workers']
  start.emulate_devices(config['rollout']['devices'])
  # After the flags: this import loads jax.
  from composer_jax import wiring

  spec = wiring.spec_of(config)
  joined.check(wiring.content_of(spec))
  return JoinedRun(spec=spec, systems=wiring.systems_of(spec), joined=joined)
