"""How likely a policy writes the bodies that were deleted.

Passes are rare or absent in few episodes; the probability of the body that was
there, at temperature 1, tells how far a policy is from one. Other bodies may
pass too, so this is below the chance of passing.
"""

import pathlib
from typing import Any

import jax
import numpy as np

from composer_jax import wiring
from composer_jax.core import batches
from composer_jax.models import decoder
from composer_jax.pipeline import stages
from composer_jax.tasks.deletion import edit
from composer_jax.tasks.practice import bodies
from composer_jax.tasks.repository import environment
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train import lm_loss
from composer_jax.train.checkpoints import export

Chance = dict[str, float | int]


def row_of(tokens_T: np.ndarray, mask_T: np.ndarray, seq_len: int) -> Any:
  """Returns a batch of one episode with loss on the letters of the body."""
  (begin,) = np.flatnonzero(np.diff(mask_T.astype(int)) == 1)[:1] + 1
  stop = begin + int(np.argmin(mask_T[begin:]))
  row = lambda dtype: np.zeros((1, seq_len), dtype)
  tokens_BT, segments_BT = row(np.int32), row(np.int32)
  positions_BT, weights_BT = row(np.int32), row(np.float32)
  tokens_BT[0, :stop] = tokens_T[:stop]
  segments_BT[0, :stop] = 1
  positions_BT[0, :stop] = np.arange(stop)
  weights_BT[0, begin:stop] = 1
  batch: Any = batches.LMBatch
  return batch(
    tokens_BT=tokens_BT,
    segment_ids_BT=segments_BT,
    positions_BT=positions_BT,
    loss_weights_BT=weights_BT,
  )


def of_policy(
  fields: dict[str, Any], workdir: pathlib.Path, policy: str
) -> dict[str, list[Chance]]:
  """Measures the call that restores each task's body, by split.

  Args:
    fields: config of the run.
    policy: 'sft' or 'rl', a finished stage.

  Returns:
    Of each task its id, the log-probability of the call in nats, and its
    number of tokens.
  """
  spec = wiring.spec_of(fields)
  family = wiring.systems_of(spec).family
  tokenizer = tokenizers.Tokenizer.load(workdir / 'tokenizer.json')
  options = spec.systems['tasks'].repository
  like = decoder.without_base(stages.served_like(spec))
  variables = export.load(workdir, policy, like)
  sums = jax.jit(lm_loss.heldout_sums(spec.lm_model, plan=None))
  measured: dict[str, list[Chance]] = {}
  for split in ('train', *family.axes):
    measured[split] = []
    for task in family.of_split(split):
      place = environment.missing_body(task)
      if place is None:
        continue
      path, _, name = place
      text = edit.fill(place[1], name, edit.body(task.solution[path], name))
      window = bodies.episode(text, name, options, tokenizer)
      if len(window[0]) > spec.episode.max_tokens:
        continue
      total, count = sums(variables, row_of(*window, spec.episode.max_tokens))
      measured[split].append(
        {
          'task_id': task.task_id,
          'logprob': -float(total),
          'tokens': int(count),
        }
      )
  return measured
