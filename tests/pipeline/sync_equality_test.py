"""At staleness 0 the pipeline computes what the synchronous loop computes.

Trainer and engine take turns here (`colocated`); policies still pass through
the store as bundles, and groups through files. `tests/e2e/composer_test.py`
tests the same law for the `processes` placement.
"""

import contextlib
import dataclasses
import json
import re
import shutil
import threading
import time
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.core import trees
from composer_jax.delta import transport as receivers
from composer_jax.delta.store import folder
from composer_jax.fleet.leases import ledger as ledgers
from composer_jax.models import decoder
from composer_jax.pipeline import reinforce, stages
from composer_jax.rl import mismatch, sync_loop
from composer_jax.rollout import options as rollout_options
from composer_jax.tasks.list_functions import family
from composer_jax.telemetry import writer as writers
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train.checkpoints import export, manager
from configs.composer import tiny
from tests.delta import identities
from tests.fleet import uploaded
from tests.pipeline import runs, workers

CLOCKS = ('time', 'sandbox_ms', 'wait_s', 'train_s', 'publish_s')


@pytest.fixture(scope='module')
def tokenizer():
  texts = [
    text
    for index in range(5)
    for text in family.generate(index, 'train').files.values()
  ]
  return tokenizers.Tokenizer.train(texts, 300)


@pytest.fixture(scope='module')
def spec(tokenizer):
  config = tiny.get_config('smoke')
  # With some seeds a step has no group with a gradient.
  config.seed = 1
  config.mesh = dict(replica=1, fsdp=1, context=1)
  config.model.vocab_size = tokenizer.vocab_size
  config.sandbox.level = 'static'  # no policy here gets that far
  config.rl.placement = 'colocated'
  config.rl.steps = 3
  config.rl.learning_rate = 5e-3
  config.episode.max_turns = 30
  # Calls are long enough that some contain END by chance. So episodes differ in
  # their number of invalid calls, and groups have a gradient.
  config.episode.max_call_tokens = 64
  config.episode.max_tokens = 288
  config.rl.seq_len = 288
  config.sft.seq_len = 288
  return wiring.spec_of(config.to_dict())


def random_policy(config):
  """Returns weights so wide that some tokens are likely and calls end early."""
  rng = np.random.default_rng(5)
  shapes, _ = decoder.abstract(config)
  return jax.tree.map(
    lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32),
    shapes,
  )


@contextlib.contextmanager
def opened(workdir, spec, tokenizer):
  """A job after SFT, with a random policy and the test's tokenizer."""
  if export.finished_step(workdir, 'sft') is None:
    export.save(workdir, 'sft', 1, random_policy(spec.model))
  with writers.Writer(workdir, tensorboard=False) as writer:
    job = runs.job(spec, workdir, writer)
    # Set the cached property, which would train a tokenizer on a corpus.
    vars(job)['tokenizer'] = tokenizer
    yield job


@pytest.fixture(scope='module')
def synchronous(spec, tokenizer, tmp_path_factory):
  """Final variables and metrics of every step of the synchronous loop."""
  workdir = tmp_path_factory.mktemp('synchronous')
  checkpoints = manager.Checkpoints(workdir / 'checkpoints' / 'rl', keep=1)
  with opened(workdir, spec, tokenizer) as job, job.runner() as runner:
    with contextlib.closing(checkpoints):
      start = reinforce.prepare(job, checkpoints)
    state, history = sync_loop.run(
      start.state,
      start.functions,
      runs.collector(spec, tokenizer, runner, split='train'),
      lambda values, version: stages.make_engine(spec, values, version),
      spec.update_options(),
      spec.batch_shape(),
      num_steps=spec.rl.steps,
      teacher=start.teacher,
    )
  return trees.flatten_names(state.variables()), history


@pytest.fixture(scope='module')
def colocated(spec, tokenizer, tmp_path_factory):
  """Workdir and final variables of the pipeline."""
  workdir = tmp_path_factory.mktemp('colocated')
  with opened(workdir, spec, tokenizer) as job:
    reinforce.reinforce(job)
    return workdir, trees.flatten_names(
      stages.load_variables(job, 'rl', job.single)
    )


def test_colocated_pipeline_equals_the_synchronous_loop(colocated, synchronous):
  workdir, colocated_variables = colocated
  variables, history = synchronous
  rows = [r for r in writers.read(workdir) if r['stage'] == 'rl']
  assert [r['step'] for r in rows] == [1, 2, 3]
  for row, metrics in zip(rows, history, strict=True):
    for name in sorted(set(metrics) - set(CLOCKS)):
      assert row[name] == metrics[name], (row['step'], name)
  for name, array in variables.items():
    np.testing.assert_array_equal(
      colocated_variables[name], array, err_msg=name
    )


def test_the_compared_runs_did_learn(spec, synchronous):
  variables, history = synchronous
  before = trees.flatten_names(random_policy(spec.model))
  assert all(m['grad_norm'] > 0 and m['staleness'] == 0 for m in history)
  moved = [n for n in before if not np.array_equal(before[n], variables[n])]
  assert set(moved) == {n for n in before if n.startswith('params/')}


def test_policies_reach_the_engine_through_bundles(spec, colocated):
  workdir, _ = colocated
  policy = receivers.Receiver(workdir, spec.model).poll()
  assert policy.version == spec.rl.steps
  lines = (workdir / 'episodes.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  # Only version v - 1 sampled the episodes of step v.
  assert {(r['step'], *r['versions']) for r in rows} == {(1, 0), (2, 1)}


def test_trainer_receiver_and_groups_name_the_same_weights(spec, colocated):
  workdir, variables = colocated
  published, received = (
    {r['step']: r for r in writers.read(path) if r['stage'] == stage}
    for path, stage in (
      (workdir, 'delta'),
      (workdir / 'received.jsonl', 'received'),
    )
  )
  # The last version samples nothing.
  assert sorted(published) == [0, 1, 2, 3] and sorted(received) == [0, 1, 2]
  for version, line in received.items():
    assert line['target_id'] == published[version]['target_id']
  kept = wiring.kept_groups(workdir)
  assert [group.group for group in kept] == [4, 5]
  for group in kept:
    assert group.policies == {2: published[2]['target_id']}
  # The bundle holds the bfloat16 cast of the trainer's masters, as hashed here
  # without bundles or stores.
  final = {
    name: np.asarray(leaf).astype(ml_dtypes.bfloat16)
    if name.startswith('params/')
    else np.asarray(leaf)
    for name, leaf in variables.items()
  }
  assert identities.target_id(final) == published[3]['target_id']
  kinds = [published[v]['kind'] for v in range(4)]
  assert kinds == ['key', 'delta', 'delta', 'delta']
  assert [received[v]['route'] for v in range(3)] == [
    ['key 0'],
    ['delta 0-1'],
    ['delta 1-2'],
  ]
  assert 'swap_s' not in received[0] and received[1]['swap_s'] > 0


def test_colocated_sides_wait_while_the_other_works(colocated):
  workdir, _ = colocated
  rows = writers.read(workdir) + writers.read(workdir / writers.RECEIVED)
  by_key = {(row['stage'], row['step']): row for row in rows}
  for step in (1, 2):
    trainer, rollouts = by_key['rl', step], by_key['received', step]
    assert rollouts['wait_s'] >= trainer['train_s'] > 0
    assert trainer['wait_s'] >= rollouts['sample_s'] > 0


@pytest.mark.parametrize(
  'count, members',
  [
    pytest.param(1, 0, marks=pytest.mark.slow),
    pytest.param(2, 0, marks=pytest.mark.slow),
    pytest.param(2, 3, marks=pytest.mark.slow),
    pytest.param(3, 1, marks=pytest.mark.slow),
  ],
)
def test_any_number_of_workers_equals_the_synchronous_loop(
  spec, tokenizer, colocated, synchronous, tmp_path, count, members
):
  """Each plays some members of each group, on an engine of its own."""
  shared = workers.spec_of(spec, members=members)
  with (
    opened(tmp_path, shared, tokenizer) as job,
    workers.running(shared, tmp_path, tokenizer, count) as fleet,
  ):
    reinforce.reinforce(job)
    variables = trees.flatten_names(
      stages.load_variables(job, 'rl', job.single)
    )
  assert count == 1 or all(worker.groups for worker in fleet)
  played = sorted(share for worker in fleet for share in worker.groups)
  size, R = members or 4, spec.rl.rollouts_per_prompt
  assert played == [(g, m) for g in range(6) for m in range(0, R, size)]
  rows = [r for r in writers.read(tmp_path) if r['stage'] == 'rl']
  for row, metrics in zip(rows, synchronous[1], strict=True):
    for name in sorted(set(metrics) - set(CLOCKS)):
      assert row[name] == metrics[name], (row['step'], name)
  for name, array in synchronous[0].items():
    np.testing.assert_array_equal(variables[name], array, err_msg=name)


class Trouble:
  """Lets requests of the fleet fail, half of them after they were done."""

  def __init__(self, seed, share):
    self.is_on = False
    self._rng, self._share = np.random.default_rng(seed), share
    self._lock = threading.Lock()

  def befalls(self, method):
    def request(backend, key, *arguments, **options):
      with self._lock:
        fails, is_done = self._rng.random(2) < (self._share, 0.5)
      fails = fails and self.is_on and key.startswith('fleet/')
      if fails and not is_done:
        raise ConnectionError('the store does not answer')
      answer = method(backend, key, *arguments, **options)
      if fails:
        raise ConnectionError('the answer was lost')
      return answer

    return request


@pytest.fixture
def trouble(monkeypatch, seed):
  trouble = Trouble(seed, 0.03)
  for name in ('put', 'read', 'swap', 'read_tagged'):
    method = getattr(folder.FolderBackend, name)
    monkeypatch.setattr(folder.FolderBackend, name, trouble.befalls(method))
  return trouble


@pytest.mark.parametrize(
  'seed', [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 6))]
)
def test_a_hang_a_notice_and_a_newcomer_change_no_bit(
  spec,
  tokenizer,
  synchronous,
  tmp_path,
  trouble,
  seed,
):
  shared = workers.spec_of(spec, members=2, lease_s=2.0)
  crew, end_of_hang = [], threading.Event()

  def start(name):
    crew.append(workers.Worker(shared, tmp_path, tokenizer, name, act=act))

  def act(worker, group):
    trouble.is_on = True
    if worker.name == 'hangs' and not worker.leases._stopping.is_set():
      worker.hang()
      start('joins')
      end_of_hang.wait(60)
    elif worker.name == 'leaves' and group >= 2:
      worker.leases.leave()
    elif group >= 4:
      end_of_hang.set()

  with opened(tmp_path, shared, tokenizer) as job:
    start('hangs')
    start('leaves')
    reinforce.reinforce(job)
    trouble.is_on = False
    variables = trees.flatten_names(
      stages.load_variables(job, 'rl', job.single)
    )
  end_of_hang.set()
  for worker in crew:
    worker.end()
    assert worker.failure is None, worker.failure
  docs = wiring._documents('', tmp_path)
  ledger = ledgers.from_json(docs.read_ledger()[0])
  assert ledger.totals() == {'trained': {'list_functions': 6}}
  assert ledger.lost['silent'] > 0
  for name, array in synchronous[0].items():
    np.testing.assert_array_equal(variables[name], array, err_msg=name)


class Stopped(Exception):
  """A run ended between the metrics of a step and its checkpoint."""


class StoppingWriter(writers.Writer):
  def write(self, stage, step, **metrics):
    super().write(stage, step, **metrics)
    if (stage, step) == ('fleet', 2):
      raise Stopped


def taken(workdir):
  """Returns the groups of each step."""
  rows = [r for r in writers.read(workdir) if r['stage'] == 'fleet']
  assert [r['step'] for r in rows] == list(range(1, len(rows) + 1))
  return [r['taken'] for r in rows]


def test_a_slow_group_is_overtaken_and_a_resumed_run_trains_each_once(
  spec, tokenizer, tmp_path
):
  shared = workers.spec_of(spec, members=0)
  changes = dict(max_staleness=2, overtake=2, checkpoint_every=1)
  rl = dataclasses.replace(shared.rl, **changes)
  shared = dataclasses.replace(shared, rl=rl)

  def act(_, group):
    while group == 0 and not any(
      r['stage'] == 'fleet' for r in writers.read(tmp_path)
    ):
      time.sleep(0.01)

  with opened(tmp_path, shared, tokenizer):
    pass
  with StoppingWriter(tmp_path, tensorboard=False) as writer:
    job = runs.job(shared, tmp_path, writer)
    vars(job)['tokenizer'] = tokenizer
    worker = workers.Worker(shared, tmp_path, tokenizer, 'w', act=act)
    with pytest.raises(Stopped):
      reinforce.reinforce(job)
  while worker.version < 2:  # Which the run goes back from.
    assert worker.failure is None, worker.failure
    time.sleep(0.01)
  before = taken(tmp_path)
  # Group 0 was waited for by step 1, as far as it may be overtaken.
  assert 0 not in before[0] and before[1][0] == 0
  with opened(tmp_path, shared, tokenizer) as job:
    reinforce.reinforce(job)
  worker.end()
  assert worker.failure is None, worker.failure
  # It joined again, with the same engine.
  assert worker.leases.name == 'w0'
  after = taken(tmp_path)
  assert after[0] == before[0] and sorted(sum(after, [])) == list(range(6))
  rows = lines_of_rl(tmp_path)
  assert [rows[step]['groups'] for step in (1, 2, 3)] == after
  assert all(row['staleness'] <= 2 for row in rows.values())
  ledger = ledgers.from_json(wiring._documents('', tmp_path).read_ledger()[0])
  assert ledger.totals() == {'trained': {'list_functions': 6}}
  # Without its metrics nobody knows what was trained.
  shutil.rmtree(tmp_path / 'exports' / 'rl')
  (tmp_path / writers.METRICS).unlink()
  with opened(tmp_path, shared, tokenizer) as job:
    with pytest.raises(ValueError, match='which groups step 0 took'):
      reinforce.reinforce(job)


def leave_in_mid_episode(worker):
  """Has a worker leave once an episode of its has several turns and no end."""
  while (
    not worker.leases
    or worker.leases._report.results
    or not any(
      len(turns) > 2
      for kept in [*worker.leases._kept.values()]
      for turns in kept.turns().turns.values()
    )
  ):
    time.sleep(0.001)
  worker.leases.leave()


@pytest.mark.slow
@pytest.mark.parametrize(
  'numerics, staleness', [('batch_invariant', 0), ('fast', 1)]
)
def test_episodes_that_go_on_elsewhere_change_no_bit_at_staleness_0(
  spec, tokenizer, tmp_path, numerics, staleness
):
  """Two workers leave in mid-episode, one after another."""
  model = dataclasses.replace(spec.model, numerics=numerics)
  rl = dataclasses.replace(spec.rl, max_staleness=staleness)
  spec, alone = dataclasses.replace(spec, model=model, rl=rl), {}
  if not staleness:
    with opened(tmp_path / 'alone', spec, tokenizer) as job:
      reinforce.reinforce(job)
      alone = trees.flatten_names(stages.load_variables(job, 'rl', job.single))
  shared = workers.spec_of(spec, members=2)
  crew, tmp_path = [], tmp_path / 'fleet'

  def relay():
    for name in ('first', 'second', 'last'):
      crew.append(workers.Worker(shared, tmp_path, tokenizer, name))
      if name != 'last':
        leave_in_mid_episode(crew[-1])

  with opened(tmp_path, shared, tokenizer) as job:
    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    reinforce.reinforce(job)
    variables = trees.flatten_names(
      stages.load_variables(job, 'rl', job.single)
    )
  thread.join(60)
  for worker in crew:
    worker.end()
    assert worker.failure is None, worker.failure
  docs = wiring._documents('', tmp_path)
  ledger = ledgers.from_json(docs.read_ledger()[0])
  assert ledger.totals() == {'trained': {'list_functions': 6}}
  assert ledger.lost.keys() == {'left'}
  rows = writers.read(tmp_path / writers.RECEIVED)
  assert sum(row.get('resumed', 0) for row in rows) > 0
  assert sum(row.get('anew', 0) for row in rows) == 0
  for name, array in alone.items():
    np.testing.assert_array_equal(variables[name], array, err_msg=name)


@pytest.mark.slow
def test_speculation_changes_no_bit_of_a_run(spec, tokenizer, tmp_path):
  """Nor any measure of it, such as that of sampler and trainer differing."""
  model = dataclasses.replace(spec.model, numerics='batch_invariant')
  finals, rows = [], []
  for drafter in ('none', 'ngrams'):
    speculation = rollout_options.Speculation(drafter=drafter)
    rollout = dataclasses.replace(spec.rollout, speculation=speculation)
    run = dataclasses.replace(spec, model=model, rollout=rollout)
    with opened(tmp_path / drafter, run, tokenizer) as job:
      reinforce.reinforce(job)
      values = stages.load_variables(job, 'rl', job.single)
    finals.append(trees.flatten_names(values))
    rows.append(
      [r for r in writers.read(tmp_path / drafter) if r['stage'] == 'rl']
    )
  for plain, drafted in zip(*rows, strict=True):
    assert drafted['mismatch_max'] == 0
    for name in sorted(set(plain) - set(CLOCKS)):
      assert drafted[name] == plain[name], (plain['step'], name)
  for name, array in finals[0].items():
    np.testing.assert_array_equal(finals[1][name], array, err_msg=name)


@pytest.mark.slow
def test_evaluating_sft_after_rl_keeps_the_line_of_rl(
  spec, tokenizer, colocated
):
  workdir, _ = colocated
  evaluated = []
  with opened(workdir, spec, tokenizer) as job:
    for stage in ('rl', 'sft'):
      stages.evaluate(job, stage)
    # As after a kill just before the run noted that it was done.
    (workdir / 'evaluation_sft.json').unlink()
    stages.evaluate(job, 'sft')
    evaluated = [r for r in writers.read(workdir) if r['stage'] == 'eval']
  lines = [(r['name'], r['step'], r['axis']) for r in evaluated]
  axes = job.systems.family.axes
  others = [
    (f'{stage}_{axis}', step, axis)
    for stage, step in (('rl', spec.rl.steps), ('sft', 0))
    for axis in axes[1:]
  ]
  first = [('rl', spec.rl.steps, axes[0]), ('sft', 0, axes[0])]
  assert [row for row in lines if row[-1] == axes[0]] == first
  assert [row for row in lines if row[-1] != axes[0]] == others


def test_a_damaged_policy_ends_a_colocated_run_by_name(
  spec, tokenizer, colocated, tmp_path
):
  """Waiting would not repair it, and an older policy may not replace it."""
  workdir, _ = colocated
  shutil.copytree(workdir / 'store', tmp_path / 'store')
  shutil.copy(workdir / receivers.KEY, tmp_path)
  with opened(tmp_path, spec, tokenizer) as job:
    transport = job.systems.transport(tmp_path)
    groups = job.systems.groups(tmp_path, 'static')
    groups.begin(0, 0)
    published = types.SimpleNamespace(wait=lambda: None)
    source = reinforce._Source(job, groups, published, None)
    with reinforce._colocated(job, transport, source, None) as wait:
      pointer = tmp_path / 'store' / 'refs' / 'policy' / 'latest'
      pointer.write_bytes(b'rot')
      with pytest.raises(ValueError, match='refs/policy/latest: '):
        wait(0)


def renumbered(group):
  """Returns the group with its routes' experts renumbered."""
  rollouts = []
  for rollout in group.rollouts:
    (t,) = rollout.trajectories
    ids_TMA = t.expert_ids_TMA.copy()
    ids_TMA[:-1] = 3 - ids_TMA[:-1]  # of 4; the last token has none
    moved = dataclasses.replace(t, expert_ids_TMA=ids_TMA)
    rollouts.append(dataclasses.replace(rollout, trajectories=(moved,)))
  return dataclasses.replace(group, rollouts=tuple(rollouts))


@pytest.fixture
def corrupted(colocated, tmp_path):
  """A run that was killed after step 2, with false groups for step 3."""
  workdir, _ = colocated
  copy = shutil.copytree(workdir, tmp_path / 'copy')
  shutil.rmtree(copy / 'exports' / 'rl')
  shutil.rmtree(copy / 'checkpoints' / 'rl' / '3')
  for group in wiring.kept_groups(copy):
    uploaded.replace(copy, renumbered(group))
  return copy


def lines_of_rl(workdir):
  return {r['step']: r for r in writers.read(workdir) if r['stage'] == 'rl'}


def test_the_gate_stops_a_run_and_groups_sampled_anew_heal_it(
  spec, tokenizer, colocated, corrupted
):
  """The stopped run stays intact: resumed, it equals an undisturbed run."""
  workdir = corrupted
  with opened(workdir, spec, tokenizer) as job:
    with pytest.raises(
      mismatch.OutOfBand,
      match=r'rl step 3: mismatch_kl_exact is .*, its band is at most 1e-09.*'
      r'Of its groups, [45] is the worst',
    ):
      reinforce.reinforce(job)
  line = lines_of_rl(workdir)[3]
  assert line['gate_breaches'] == len(line['gate']) > 0
  # Nothing of the step was applied, kept or published.
  assert 'grad_norm' not in line
  assert export.finished_step(workdir, 'rl') is None
  assert receivers.Receiver(workdir, spec.model).poll().version == 2
  for path in uploaded.files_of(workdir):
    path.unlink()
  with opened(workdir, spec, tokenizer) as job:
    reinforce.reinforce(job)
    healed = trees.flatten_names(stages.load_variables(job, 'rl', job.single))
  untouched, variables = colocated
  for name, array in variables.items():
    np.testing.assert_array_equal(healed[name], array, err_msg=name)
  actual, expected = lines_of_rl(workdir)[3], lines_of_rl(untouched)[3]
  assert actual.keys() == expected.keys()
  assert not [n for n in actual if n not in CLOCKS and actual[n] != expected[n]]


@pytest.fixture
def mistaken(colocated, tmp_path):
  """A run that was killed after step 2; group 5 names weights of nobody."""
  workdir, _ = colocated
  copy = shutil.copytree(workdir, tmp_path / 'copy')
  shutil.rmtree(copy / 'exports' / 'rl')
  shutil.rmtree(copy / 'checkpoints' / 'rl' / '3')
  group = wiring.kept_groups(copy)[1]
  uploaded.replace(copy, dataclasses.replace(group, policies={2: 64 * '0'}))
  return copy


@pytest.mark.parametrize(
  'damage, message',
  [
    (
      lambda workdir: None,
      'Group 5 was sampled with weights 000000.* as version 2.*sampled anew',
    ),
    (lambda workdir: uploaded.files_of(workdir)[1].unlink(), '.*'),
    pytest.param(
      lambda workdir: shutil.rmtree(workdir / 'store'),
      '.*',
      marks=pytest.mark.slow,
    ),
  ],
)
def test_groups_that_are_wrong_or_gone_are_sampled_anew(
  spec, tokenizer, colocated, mistaken, damage, message, capsys
):
  """Without an end of the run, and with the weights of one undisturbed.

  The store may be deleted as a whole, though later pointers are remembered.
  """
  damage(mistaken)
  with opened(mistaken, spec, tokenizer) as job:
    reinforce.reinforce(job)
    again = trees.flatten_names(stages.load_variables(job, 'rl', job.single))
  assert re.search(message, capsys.readouterr().out)
  for name, array in colocated[1].items():
    np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_a_flag_is_said_and_written_and_the_run_goes_on(
  spec, tokenizer, corrupted, capsys
):
  workdir = corrupted
  gate = dataclasses.replace(spec.rl.gate, action='flag')
  flagging = dataclasses.replace(
    spec, rl=dataclasses.replace(spec.rl, gate=gate)
  )
  with opened(workdir, flagging, tokenizer) as job:
    reinforce.reinforce(job)
  assert export.finished_step(workdir, 'rl') == 3
  line = lines_of_rl(workdir)[3]
  assert line['grad_norm'] > 0 and line['gate']
  assert (
    f'step 3: out of its band: {line["gate"][0]}' in capsys.readouterr().out
  )
  assert all(lines_of_rl(workdir)[step]['gate'] == [] for step in (1, 2))
