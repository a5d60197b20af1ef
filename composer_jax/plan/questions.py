"""The questions that a plan answers.

jax is imported only with the answer, after `topologies.prepare` has kept it off
accelerators.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from composer_jax.plan import topologies

QUESTIONS = ('params', 'muon', 'compile')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanQuestion:
  """The flags of `experiments.plan`, which explains each."""

  what: str
  topology: str
  mesh: str
  layout: str
  dtype: str
  batch: int
  seq_len: int
  accumulate: int
  transport: str
  bucket: float
  remat_saves: Sequence[str] | None
  optimizer: str
  until: str
  libtpu: str


def answer(fields: dict[str, Any], q: PlanQuestion) -> list[Any]:
  """Returns the tables (`plan.report.Table`) that answer a question.

  Args:
    fields: fields of a model's config, or of a run's.
    q: question and machines.

  Raises:
    ValueError: a value is unknown, or does not fit the model or the machines.
    RuntimeError: a compiler failed, but not for want of device memory.
  """
  topologies.prepare()
  from composer_jax.plan import case as cases
  from composer_jax.plan import muon, params

  if q.what not in QUESTIONS:
    raise ValueError(f'--what {q.what!r} is not one of {sorted(QUESTIONS)}.')
  case = cases.make(
    fields,
    topology_name=q.topology,
    mesh=q.mesh,
    layout=q.layout,
    dtype=q.dtype,
  )
  if q.what == 'params':
    return params.tables(case)
  if q.what == 'muon':
    return muon.tables(case)
  from composer_jax.plan import aot, aot_process, compiled
  from composer_jax.train import placement

  options = aot.StepOptions(
    batch_size=q.batch,
    seq_len=q.seq_len,
    accumulate=q.accumulate,
    optimizer=q.optimizer,
    bucket=q.bucket,
    remat_saves=None if q.remat_saves is None else tuple(q.remat_saves),
    parallel=placement.ParallelOptions(transport=q.transport),
  )
  task = aot_process.CompileTask(
    case=case, options=options, topology_name=q.topology, libtpu=q.libtpu
  )
  made = aot_process.compile_step(task, q.until)
  return compiled.tables(case, made, q.seq_len)
