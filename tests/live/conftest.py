"""A folder of episodes with a clock, and answers to put into it."""

import itertools

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.live import episodes, events, tokens

WINDOWS = events.WindowOptions(
  edit_kept_s=100.0,
  follow_up_s=50.0,
  thumb_s=50.0,
  tool_call_s=10.0,
  kept_after_s=60.0,
)


def window(prompt=(1, 2, 3), answer=(7, 8), version=0, logprob=-0.5):
  """Returns a window: a prompt, and an answer that was sampled."""
  length = len(prompt) + len(answer)
  versions_T = np.full(length, version, np.int32)
  mask_T = np.arange(length) >= len(prompt)
  ids_TMA = np.tile(np.arange(2, dtype=np.uint16), (length, 1, 1))
  ids_TMA[-1] = records.NO_ROUTE
  return records.Trajectory(
    tokens_T=np.array([*prompt, *answer], np.int32),
    loss_mask_T=mask_T,
    logprobs_T=np.where(mask_T, logprob, 0).astype(np.float32),
    expert_ids_TMA=ids_TMA,
    policy_version_T=versions_T,
    context_version_T=versions_T,
    consumed_version_T=versions_T,
    temperature=1.0,
  )


class Folder:
  """Episodes, and a clock that stands still."""

  def __init__(self, path):
    self.episodes = episodes.Episodes(path, WINDOWS)
    self.now, self._count = 1000.0, itertools.count()

  def open(self, user='ann', domain='web', **fields):
    claim = tokens.Claim(
      episode=f'episode{next(self._count):04d}',
      user=self.episodes.tokens.pseudonym(user),
      domain=domain,
      arm=fields.pop('arm', 'control'),
      **fields,
    )
    self.episodes.open(claim)
    return claim

  def answer(self, claim, made=None, policies=None, seconds=1.0):
    made = window() if made is None else made
    versions = {int(v) for v in made.policy_version_T}
    return self.episodes.keep(
      claim,
      made,
      dict.fromkeys(versions, 'a' * 8) if policies is None else policies,
      seconds=seconds,
      now=self.now,
    )

  def tell(self, claim, kind, name='', **body):
    fields = {'id': name or kind, 'kind': kind, **body}
    return self.episodes.note(claim, events.parse(fields, self.now))

  def judged(self, kept=True, made=None, policies=None, **opened):
    """Records an episode whose edit was kept or not."""
    claim = self.open(**opened)
    self.answer(claim, made, policies)
    self.tell(claim, 'tool_call', tool='edit')
    self.now += 70
    self.tell(claim, 'edit_kept', value=float(kept), after_s=65.0)
    self.now -= 70
    return claim


@pytest.fixture
def folder(tmp_path):
  return Folder(tmp_path / 'record')
