"""Remembers what the latest tasks' originals did, for all their episodes."""

import functools
import json
from typing import Any

from composer_jax.tasks.repository import task_set


@functools.lru_cache(maxsize=256)
def _known(task_id: str, image: str, solution: str) -> dict[Any, Any]:
  del task_id, image, solution
  return {}


def of(task: task_set.RepositoryTask) -> dict[Any, Any]:
  """Facts about a task's original by name; whoever finds one adds it."""
  solution = json.dumps(task.solution, sort_keys=True)
  return _known(task.task_id, task.image, solution)
