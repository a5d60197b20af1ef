"""The questions that a plan answers; jax is imported with the answer.

So whoever asks can first keep it from taking an accelerator.
"""

from collections.abc import Sequence
from typing import Any

from composer_jax.plan import topologies

QUESTIONS = ('params', 'muon', 'comms', 'compile')


def answer(
  fields: dict[str, Any],
  *,
  what: str,
  topology: str,
  mesh: str,
  layout: str,
  dtype: str,
  batch: int,
  seq_len: int,
  accumulate: int,
  transport: str,
  bucket: float,
  chunks: int,
  remat_saves: Sequence[str] | None,
  optimizer: str,
  until: str,
  libtpu: str,
) -> list[Any]:
  """Returns tables (`plan.report.Table`); the flags of the main say of what.

  Raises:
    ValueError: names what does not fit or is not known.
    RuntimeError: a compiler failed for another reason than memory.
  """
  topologies.prepare()
  from composer_jax.plan import case as cases
  from composer_jax.plan import comms, muon, params

  if what not in QUESTIONS:
    raise ValueError(f'--what {what!r} is not one of {sorted(QUESTIONS)}.')
  case = cases.make(
    fields, topology_name=topology, mesh=mesh, layout=layout, dtype=dtype
  )
  if what == 'params':
    return params.tables(case)
  if what == 'muon':
    return muon.tables(case)
  if what == 'comms':
    return comms.tables(
      case,
      batch_size=batch // accumulate,
      seq_len=seq_len,
      transport=transport,
      bucket=bucket or None,
      microbatches=accumulate,
    )
  from composer_jax.plan import aot, aot_process, compiled
  from composer_jax.train import placement

  options = aot.StepOptions(
    batch_size=batch,
    seq_len=seq_len,
    accumulate=accumulate,
    optimizer=optimizer,
    bucket=bucket,
    remat_saves=None if remat_saves is None else tuple(remat_saves),
    parallel=placement.ParallelOptions(transport=transport, chunks=chunks),
  )
  task = aot_process.CompileTask(
    case=case, options=options, topology_name=topology, libtpu=libtpu
  )
  made = aot_process.compile_step(task, until)
  return compiled.tables(case, made, seq_len)
