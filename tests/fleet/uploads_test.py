"""What a worker uploads is that of its lease and model, or is refused."""

import dataclasses
import io
import json
import zipfile

import numpy as np
import pytest

from composer_jax.core import group_bytes, seams, turns
from composer_jax.fleet.leases import ledger as ledgers
from composer_jax.fleet.leases import uploads
from tests.fleet import groups

ORDER = seams.GroupOrder(
  group=3,
  task_id=groups.TASK.format(3),
  min_version=2,
  rewards=groups.REWARDS,
)
PART = ledgers.GroupPart(first=1, stop=3)
GROUP = groups.make_group(3, 2, range(1, 3))
WINDOW = GROUP.rollouts[0].trajectories[0]


def read(group):
  return uploads.read(group_bytes.to_bytes(group), ORDER, PART, groups.RULES)


def with_rollout(**fields):
  first, *others = GROUP.rollouts
  rollouts = (dataclasses.replace(first, **fields), *others)
  return dataclasses.replace(GROUP, rollouts=rollouts)


def with_hints(*hints):
  made = [
    turns.Hint(
      trajectory=0,
      start=start,
      stop=stop,
      at=start - 1,
      kind='k',
      tokens_T=np.array(tokens, np.int32),
    )
    for start, stop, tokens in hints
  ]
  return with_rollout(hints=tuple(made))


def with_header(change):
  """Returns bytes of GROUP whose first rollout in the header is changed."""
  with zipfile.ZipFile(io.BytesIO(group_bytes.to_bytes(GROUP))) as archive:
    arrays = {
      name.removesuffix('.npy'): np.load(io.BytesIO(archive.read(name)))
      for name in archive.namelist()
    }
  header = json.loads(arrays.pop('header').tobytes())
  change(header['rollouts'][0])
  return group_bytes.pack(header, arrays)


def at(array, index, value):
  array = array.copy()
  array[index] = value
  return array


def test_an_honest_upload_is_read_as_it_was_written():
  assert group_bytes.to_bytes(read(GROUP)) == group_bytes.to_bytes(GROUP)
  # The log-probability of a token that is certain may be rounded up.
  assert read(with_hints((2, 3, [1, 49]), (3, 4, [])))
  up = at(WINDOW.logprobs_T, 2, 1e-7)
  assert read(groups.changed(GROUP, logprobs_T=up))


@pytest.mark.parametrize(
  'group, message',
  [
    (groups.make_group(4, 2, range(1, 3)), 'group 4 .*, not 3'),
    (groups.make_group(3, 2, range(0, 2)), r'members \[0, 1\], not 1 to 2'),
    (groups.make_group(3, 2, range(1, 4)), r'members \[1, 2, 3\], not'),
    (groups.make_group(3, 1, range(1, 3)), r'versions \[1\].*below 2'),
    (dataclasses.replace(GROUP, policies=None), 'without its weights'),
    (dataclasses.replace(GROUP, policies={2: 'x'}), 'without its weights'),
    (with_rollout(reward_version=1), 'version 1, not 0'),
    (with_rollout(flags=('<script>',)), "'<script>' is no name"),
    (with_rollout(tools=('read', 'a\nb')), 'is no name of an alarm, tool'),
    (with_rollout(scores={'x' * 101: 0.5}), 'is no name'),
    (with_rollout(reward_terms={'bonus': 9.0}), "no term 'bonus'"),
    (with_rollout(reward=1e12), r'earns 1e\+12, of at most 1e\+09'),
    (with_rollout(reward_terms={'success': -1e10}), r'earns 1e\+10'),
    (
      with_rollout(
        verdict=dataclasses.replace(GROUP.rollouts[0].verdict, score=1e10)
      ),
      r'earns 1e\+10',
    ),
    (with_hints((1, 3, [1])), 'hint at token 1 is on unsampled'),
    (with_hints((2, 4, [50])), r'not all in 0\.\.49'),
    (with_hints((2, 4, [-7])), r'not all in 0\.\.49'),
    (with_hints((3, 4, [1]), (2, 3, [1])), 'order of turns'),
    (with_hints((2, 4, [1]), (3, 4, [1])), 'hints overlap'),
    (with_rollout(num_invalid=-1), 'counts -1 of 1 calls as invalid'),
    (with_rollout(num_invalid=2), 'counts 2 of 1 calls'),
    (with_rollout(num_turns=-1), 'counts 0 of -1 calls'),
    (with_rollout(open_todos=-3), '-3 to-dos as open'),
    (with_rollout(sandbox_seconds=-0.5), 'and -0.5 s'),
    (with_rollout(trajectories=(WINDOW, WINDOW)), '2 windows of at most 1'),
    (
      groups.changed(GROUP, tokens_T=at(WINDOW.tokens_T, 1, 50)),
      r'not all in 0\.\.49',
    ),
    (groups.changed(GROUP, tokens_T=at(WINDOW.tokens_T, 1, -1)), 'not all in'),
    (groups.changed(GROUP, logprobs_T=at(WINDOW.logprobs_T, 0, -1)), '0 of'),
    (groups.changed(GROUP, logprobs_T=at(WINDOW.logprobs_T, 2, 0.1)), '<= 0'),
    (
      groups.changed(GROUP, loss_mask_T=at(WINDOW.loss_mask_T, 0, True)),
      'begin with context',
    ),
    (
      groups.changed(
        GROUP,
        loss_mask_T=np.zeros_like(WINDOW.loss_mask_T),
        logprobs_T=np.zeros_like(WINDOW.logprobs_T),
      ),
      'have an answer',
    ),
    (groups.changed(GROUP, temperature=0.5), 'temperature 0.5, not 1.0'),
    (
      groups.changed(GROUP, expert_ids_TMA=WINDOW.expert_ids_TMA[:, :, :1]),
      r'\(tokens, 1 layers, 2 active',
    ),
    (
      groups.changed(
        GROUP, expert_ids_TMA=at(WINDOW.expert_ids_TMA, (0, 0), [3, 4])
      ),
      r'experts \[3, 4\]',
    ),
  ],
)
def test_what_is_not_of_the_lease_or_the_model_is_refused(group, message):
  with pytest.raises(ValueError, match=message):
    read(group)


@pytest.mark.parametrize(
  'value', [10**400, -(2**53), float('nan'), float('inf'), True, None, [1]]
)
def test_a_term_that_is_no_plain_number_is_refused(value):
  data = with_header(lambda r: r['reward_terms'].update(success=value))
  with pytest.raises(ValueError, match='reward_terms must be numbers'):
    uploads.read(data, ORDER, PART, groups.RULES)


def test_a_hint_or_turn_before_the_first_window_is_refused():
  span = {'trajectory': -1, 'start': 2, 'stop': 4}
  for name, more in (
    ('hints', {'at': 2, 'kind': 'k', 'tokens_T': [1]}),
    ('turns', {'tool': '', 'outcome': turns.OK}),
  ):
    data = with_header(lambda r, n=name, m=more: r[n].append(span | m))
    with pytest.raises(ValueError, match='lies outside windows'):
      uploads.read(data, ORDER, PART, groups.RULES)


def test_a_window_longer_than_any_is_refused():
  rules = dataclasses.replace(groups.RULES, max_tokens=3)
  with pytest.raises(ValueError, match='tokens of at most 3|may'):
    uploads.read(group_bytes.to_bytes(GROUP), ORDER, PART, rules)


def test_an_honest_upload_is_within_its_bound():
  longest = groups.make_group(3, 2)
  assert len(group_bytes.to_bytes(longest)) < groups.RULES.max_bytes(4)


def test_parts_of_one_version_and_other_weights_are_not_joined():
  parts = [
    groups.make_group(3, 2, range(0, 2)),
    groups.make_group(3, 2, range(2, 4)),
  ]
  assert uploads.join(parts).rollouts == tuple(
    r for p in parts for r in p.rollouts
  )
  parts[1] = dataclasses.replace(parts[1], policies={2: 'f' * 64})
  with pytest.raises(ValueError, match='different weights of version 2'):
    uploads.join(parts)
