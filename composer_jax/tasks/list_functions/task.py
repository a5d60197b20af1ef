"""One programming task: a package with a hole, and the tests that judge it."""

import dataclasses
from typing import Any

# Positional arguments and the value they must give. JSON values only, so that
# the comparison happens outside whatever ran the code.
Example = tuple[tuple[Any, ...], Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
  """A package in which the body of one function has been deleted.

  Attributes:
    task_id: names the task for good: the family can rebuild it from this.
    family: module of `composer_jax.tasks` that generated it.
    prompt: what the user says.
    files: path from the folder that holds the package -> text.
    path: the file to restore, relative to the package (what tools call it).
    module: dotted name of that file.
    function: whose body is missing.
    visible: examples that the `test` tool runs.
    hidden: examples that decide; no argument of them is visible.
    reference: a right body, unindented.
    held_out: true when training must never see the reference.
  """

  task_id: str
  family: str
  prompt: str
  files: dict[str, str]
  path: str
  module: str
  function: str
  visible: tuple[Example, ...]
  hidden: tuple[Example, ...]
  reference: str
  held_out: bool

  def __post_init__(self):
    if f'{self.package}/{self.path}' not in self.files:
      raise ValueError(
        f'Task {self.task_id!r}: path {self.path!r} of package '
        f'{self.package!r} is not among its files {sorted(self.files)}.'
      )
    if not self.visible or not self.hidden:
      raise ValueError(
        f'Task {self.task_id!r} needs visible and hidden examples; it has '
        f'{len(self.visible)} and {len(self.hidden)}.'
      )

  @property
  def package(self) -> str:
    return self.module.split('.')[0]
