"""What environments say where no tool answers: a bad call, a failed sandbox."""

from composer_jax.agent import environment as environment_lib
from composer_jax.core import records


class InvalidCall(Exception):
  """A call that cannot be carried out; its message goes to the policy."""

  def __init__(self, outcome: str, message: str):
    super().__init__(message)
    self.outcome = outcome


def broken_verdict(
  environment: environment_lib.Environment, detail: str
) -> records.Verdict:
  """Says that the sandbox failed, and so nothing about the policy."""
  return records.Verdict(
    passed=False,
    num_passed=0,
    num_tests=environment.num_tests,
    status=records.INFRASTRUCTURE,
    sandbox_level=environment.sandbox_level,
    detail=detail,
  )
