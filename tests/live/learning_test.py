"""Cycles on a tiny model: promote, roll back, resume, withdraw, never twice."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.core import trees
from composer_jax.delta import transport as receivers
from composer_jax.live import learning, options, plans, trial
from composer_jax.models import decoder
from composer_jax.pipeline import stages
from composer_jax.report import document, run_data
from composer_jax.rl import collect
from composer_jax.telemetry import writer as writers
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train.checkpoints import export
from configs.composer import live
from experiments.studies.live import world
from tests.live.conftest import Folder
from tests.pipeline import runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def tokenizer():
  texts = [f'{k} {v} edit ask web: data:' for k, v in world.CODE.items()]
  return tokenizers.Tokenizer.train(texts, 300)


@pytest.fixture(scope='module')
def spec(tokenizer):
  config = live.get_config()
  config.model.update(vocab_size=tokenizer.vocab_size, embed_dim=32)
  config.rl.update(prompts=2, rollouts_per_prompt=4)
  config.live.update(steps=2, least_steps=2, keep_days=0.0)
  config.live.trial = dict(most_users=60, margin=0.3)
  return wiring.spec_of(config.to_dict())


@pytest.fixture(scope='module')
def windows_of(spec, tokenizer):
  """(values, version, count) -> windows that the engine samples."""
  engines = {}

  def sample(values, version, count):
    if not engines:
      engines['one'] = stages.make_engine(spec, copied(values), version)
    else:
      engines['one'].swap(copied(values), version)
    with runs.job(spec, None, None).systems.open_runner('static') as runner:
      collector = runs.collector(spec, tokenizer, runner, split='train')
      groups = collect.groups(collector, engines['one'], range(-(-count // 4)))
    made = [t for g in groups for r in g.rollouts for t in r.trajectories]
    return made[:count]

  return sample


def copied(values):
  return jax.tree.map(lambda leaf: leaf.copy(), values)


def random_policy(config):
  rng = np.random.default_rng(5)
  shapes, _ = decoder.abstract(config)
  return jax.tree.map(
    lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), shapes
  )


class Site:
  """A learner, its folder of episodes, and users who come when it waits."""

  def __init__(self, job, path, windows_of, *, candidates_please=0.9):
    self.folder, self._windows_of = Folder(path), windows_of
    self.passes, self.please = 1.0, candidates_please
    self.waits = self.played = 0
    self.job, self._users = job, 0
    ports = learning.LivePorts(
      play=self.play, wait=self.wait, now=lambda: self.folder.now
    )
    self.learner = learning.Learner(
      job, self.folder.episodes, job.spec.systems['live'], ports
    )

  def play(self, values, version, identity):
    """Pinned tasks pass by the same luck at each version, but for `passes`."""
    self.played += 1
    share = 1.0 if version == self.learner.served()['control'] else self.passes
    draw = np.random.default_rng(0)
    return {
      'all': [
        {
          'task_id': f't{i}',
          'sample': 0,
          'status': 'graded',
          'passed': bool(draw.random() < 0.8) and i < 300 * share,
          'num_invalid': 0,
          'tools': ['edit'],
        }
        for i in range(300)
      ]
    }

  def wait(self):
    """Eight users come, by the arms of the trial under way."""
    self.waits += 1
    running = trial.running(self.folder.episodes.folder)
    due = self.learner.served()
    values = self.learner._functions.policy(self.learner._state)
    for i, window in enumerate(self._windows_of(values, 0, 8)):
      user = f'user{self._users}'
      self._users += 1
      arm = trial.CONTROL
      if running is not None:
        arm = (trial.CONTROL, trial.CANDIDATE)[i % 2]
      version = due[arm]
      stamped = dataclasses.replace(
        window,
        **{
          name: np.full(len(window), version, np.int32)
          for name in ('policy_version_T', 'context_version_T')
        },
        consumed_version_T=np.full(len(window), version, np.int32),
      )
      kept = i % 3 == 0
      if running is not None:
        kept = i / 8 < (self.please if arm == trial.CANDIDATE else 0.5)
      self.folder.judged(
        kept,
        made=stamped,
        policies={version: self.identity(version)},
        user=user,
        domain=('web', 'data')[i % 2],
        arm=arm,
        trial=running.name if running else '',
      )
    self.folder.now += 200
    return self.waits < 60

  def identity(self, version):
    rows = writers.read(self.job.workdir / 'live')
    return [
      r['target_id']
      for r in rows
      if r['stage'] == receivers.PUBLISHED and r['step'] == version
    ][-1]

  def stored(self, name):
    """Version and weights that a receiver of a store gets."""
    receiver = receivers.Receiver(
      self.job.workdir,
      self.job.spec.model,
      str(self.job.workdir / 'live' / name),
    )
    policy = receivers.first(receiver, 10.0)
    return policy.version, policy.target_id


@contextlib.contextmanager
def opened(workdir, spec, tokenizer):
  workdir.mkdir(exist_ok=True)
  if export.finished_step(workdir, 'sft') is None:
    export.save(workdir, 'sft', 1, random_policy(spec.model))
  with writers.Writer(workdir, tensorboard=False) as writer:
    job = runs.job(spec, workdir, writer)
    vars(job)['tokenizer'] = tokenizer
    yield job


@pytest.fixture
def site(tmp_path, spec, tokenizer, windows_of):
  with opened(tmp_path / 'run', spec, tokenizer) as job:
    made = Site(job, tmp_path / 'record', windows_of)
    yield made
    made.learner.close()


def test_a_good_candidate_reaches_all_users_and_a_bad_one_nobody(site):
  assert site.stored('promoted')[0] == site.stored('candidates')[0] == 0
  first = site.learner.cycle(1)
  assert (first['decision'], first['version']) == (trial.PROMOTE, 2)
  assert first['trial']['decision'] == trial.PROMOTE
  promoted = site.stored('promoted')
  assert promoted == site.stored('candidates') and promoted[0] == 2
  # The next one fails a tenth of the pinned tasks: no user meets it.
  site.passes, waits = 0.9, site.waits
  second = site.learner.cycle(2)
  assert second['decision'] == trial.ROLL_BACK and second['version'] == 2
  assert 'all:' in second['reason'] and 'trial' not in second
  assert site.stored('promoted') == site.stored('candidates') == promoted
  assert site.waits - waits <= 3  # Of collecting; none of a trial.
  # One that users like less is rolled back by the trial.
  site.passes, site.please = 1.0, 0.0
  third = site.learner.cycle(3)
  assert third['decision'] == trial.ROLL_BACK and third['version'] == 2
  assert site.stored('promoted') == site.stored('candidates') == promoted
  assert trial.running(site.folder.episodes.folder) is None
  # Nothing is in two plans, and what rejected weights sampled is in none.
  known = plans.Plans(site.job.workdir / 'live' / 'cycles')
  each = [known.load(n) for n in (1, 2, 3)]
  assert len({n for p in each for n in p.terms}) == 3 * 16
  site.please = 0.9
  fourth = site.learner.cycle(4)
  assert fourth['decision'] == trial.PROMOTE
  assert fourth['left_out'][plans.VOID] > 0
  of_rejected = {
    c.episode
    for c in site.folder.episodes.claims()
    if c.trial == 'cycle-3' and c.arm == trial.CANDIDATE
  }
  fourth_plan = known.load(4)
  assert of_rejected and of_rejected <= set(fourth_plan.left_out[plans.VOID])
  page = document.build(run_data.load(site.job.workdir))
  section = page[page.index('Learning from live use') :]
  assert all(s in section for s in ('promote', 'roll_back', 'whole, s'))
  assert json.loads(json.dumps(fourth)) == fourth


def test_an_interrupted_cycle_goes_on_with_its_plan_and_weights(
  tmp_path, spec, tokenizer, windows_of
):
  class Killed(Exception):
    pass

  def run(name, dies):
    with opened(tmp_path / name, spec, tokenizer) as job:
      site = Site(job, tmp_path / f'{name}_record', windows_of)
      if dies:

        def die(*_):
          raise Killed

        site.learner._try = die
        with pytest.raises(Killed):
          site.learner.cycle(1)
        site.learner.close()
        assert site.stored('promoted')[0] == 0
        again = Site(job, tmp_path / f'{name}_record', windows_of)
        again._users, again.folder.now = site._users, site.folder.now
        site = again
      row = site.learner.cycle(1)
      plan = plans.Plans(job.workdir / 'live' / 'cycles').load(1)
      state = trees.flatten_names(site.learner._state.variables())
      arrays = {k: np.asarray(v) for k, v in state.items()}
      terms = sorted(sum(t.values()) for t in plan.terms.values())
      site.learner.close()
      return row, terms, arrays

  straight, terms, arrays = run('straight', dies=False)
  resumed, terms_again, again = run('resumed', dies=True)
  assert resumed['decision'] == straight['decision'] == trial.PROMOTE
  assert terms == terms_again
  for name, array in arrays.items():
    np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_withdrawn_after_the_plan_is_not_trained_on(site):
  plan = site.learner._collect(1)
  withdrawn = sorted(plan.terms)[:3]
  for claim in site.folder.episodes.claims():
    if claim.episode in withdrawn:
      site.folder.episodes.withdraw(claim.user)
  seen = []
  original = plans.read_step

  def read(episodes, plan, step, live_options):
    groups, known = original(episodes, plan, step, live_options)
    seen.extend(r for g in groups for r in g.rollouts)
    return groups, known

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plans, 'read_step', read)
    row = site.learner.cycle(1)
  assert row['episodes'] == 16 and len(seen) == 13


def test_a_learner_without_users_says_what_it_lacks(site):
  site.waits = 59
  with pytest.raises(learning.Starved, match='needs 16 judged episodes'):
    site.learner.cycle(1)


def test_the_section_is_in_the_config(spec):
  assert spec.systems['live'] == options.LiveOptions(
    steps=2,
    least_steps=2,
    keep_days=0.0,
    trial=trial.TrialOptions(most_users=60, margin=0.3),
  )
