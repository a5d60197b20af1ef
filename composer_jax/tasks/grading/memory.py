"""Remembers what the latest tasks' originals did, for all their episodes."""

import json
import threading
from typing import Any

from composer_jax.tasks.repository import task_set

_MOST = 256


class OfTasks:
  """Values by task; safe to use from threads."""

  def __init__(self):
    self._values: dict[Any, Any] = {}
    self._lock = threading.Lock()

  def get(self, task: task_set.RepositoryTask) -> Any:
    return self._values.get(_key(task))

  def put(self, task: task_set.RepositoryTask, value: Any) -> None:
    with self._lock:
      self._values[_key(task)] = value
      if len(self._values) > _MOST:
        del self._values[next(iter(self._values))]


def _key(task: task_set.RepositoryTask) -> tuple[str, str, str]:
  solution = json.dumps(task.solution, sort_keys=True)
  return task.task_id, task.image, solution
