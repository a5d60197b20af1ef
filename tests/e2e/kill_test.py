"""Killed at any moment and started again, the job ends bit for bit the same.

A watcher outside the job waits for a file, kills with SIGKILL, and starts the
same command again; so for one moment after another, in one workdir. At
staleness 0 the result must equal that of an undisturbed run.
"""

import dataclasses
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import time

import numpy as np
import pytest

from composer_jax import wiring
from tests import programs
from tests.e2e import jobs


def exists(pattern):
  return lambda workdir: next(workdir.glob(pattern), None) is not None


def reached(stage, step):
  return lambda workdir: max(jobs.steps(workdir, stage), default=0) >= step


def published(version):
  """Is due when the pointer names this version or a later one."""

  def is_due(workdir: pathlib.Path):
    try:
      text = (workdir / 'store/refs/policy/latest').read_text()
    except FileNotFoundError:
      return False
    _, _, body = text.partition(
      '\n'
    )  # The signature precedes the pointer's text.
    return json.loads(body)['version'] >= version

  return is_due


def after(wait_s):
  """Is due so many seconds after it was first called."""
  started = []

  def is_due(_):
    started.append(time.monotonic())
    return started[-1] - started[0] > wait_s

  return is_due


# Where uploads of groups are.
GROUPS = 'store/fleet/policy/groups'

# In the order in which a run reaches them.
STRIKES = (
  jobs.Strike('corpus written', exists('corpus/texts.bin')),
  jobs.Strike('corpus encoded', exists('corpus/tokens-*-train.npy')),
  jobs.Strike(
    'first checkpoint of pretraining half written',
    exists('checkpoints/cpt/*.orbax-checkpoint-tmp'),
  ),
  jobs.Strike('export half written', exists('exports/cpt/*tmp')),
  jobs.Strike('demonstrations played', exists('demonstrations.json')),
  jobs.Strike('SFT step 3', reached('sft', 3)),
  jobs.Strike('SFT exported', exists('exports/sft/[0-9]')),
  # The worker still imports at this moment.
  jobs.Strike('first policy published', published(0)),
  jobs.Strike('first group finished', exists(f'{GROUPS}/[0-9]*')),
  jobs.Strike('only the worker', reached('rl', 1), worker=True),
  jobs.Strike('policy 2 published', published(2)),
  jobs.Strike('RL exported', exists('exports/rl/[0-9]')),
)


def run_through(
  zygote, workdir, log, strikes, *more, after_hit=lambda moment: None
):
  """Runs and kills until a run ends by itself; returns the moments hit."""
  hit = []
  waiting = list(strikes)
  while True:
    pid = jobs.start(zygote, workdir, log, *more)
    ended = False
    while waiting and not ended:
      moment = waiting.pop(0)
      began = time.monotonic()
      struck = jobs.strike(pid, workdir, moment)
      if struck:
        hit.append(moment.name)
        after_hit(moment)
        print(f'{moment.name}: killed after {time.monotonic() - began:.1f} s')
      ended = not struck or not moment.worker
    code = zygote.exit_code()
    if code == 0:
      return hit
    assert code == -9, log.read_text()[-3000:]


def assert_same(workdir, straight):
  actual, expected = jobs.metrics(workdir), jobs.metrics(straight)
  assert actual == expected
  for stage in ('cpt', 'sft', 'rl'):
    weights, expected_weights = (
      jobs.weights(workdir, stage),
      jobs.weights(straight, stage),
    )
    assert weights.keys() == expected_weights.keys()
    for name, array in expected_weights.items():
      np.testing.assert_array_equal(weights[name], array, err_msg=name)
  for name in ('evaluation_sft.json', 'evaluation_rl.json', 'tokenizer.json'):
    assert (workdir / name).read_bytes() == (straight / name).read_bytes()
  assert jobs.episodes(workdir) == jobs.episodes(straight)
  assert not jobs.mentioning(workdir)


@pytest.fixture(scope='module')
def zygote():
  with programs.zygote() as started:
    yield started


@pytest.mark.slow
def test_a_job_killed_at_many_moments_ends_bit_for_bit_the_same(
  tmp_path, zygote, request
):
  workdir = tmp_path / 'killed'
  hit = run_through(zygote, workdir, tmp_path / 'log.txt', STRIKES)
  print((tmp_path / 'log.txt').read_text())
  assert hit == [moment.name for moment in STRIKES]
  # Waited for only now, so that the undisturbed run could use the other core.
  assert_same(workdir, request.getfixturevalue('straight'))


# The only checkpoint is that of step 5: at the second strike no policy but the
# first has one, and at the third no policy after version 5.
STALE = (
  jobs.Strike('only the worker', reached('rl', 2), worker=True),
  jobs.Strike('a group of step 4 finished', exists(f'{GROUPS}/00000008.*')),
  jobs.Strike('RL step 7', reached('rl', 7)),
)


def newest_versions(workdir):
  """Returns the newest version that sampled each finished group on disk."""
  return [
    max(
      int(t.policy_version_T.max())
      for r in group.rollouts
      for t in r.trajectories
    )
    for group in wiring.kept_groups(workdir)
  ]


@pytest.mark.slow
def test_above_staleness_0_kills_neither_lose_nor_repeat_a_group(
  tmp_path, zygote, request
):
  workdir, log = tmp_path / 'stale', tmp_path / 'log.txt'
  jobs.copy_before_rl(request.getfixturevalue('straight'), workdir)
  options = ('--config.rl.max_staleness=1', '--config.rl.steps=8')
  options += ('--config.rl.checkpoint_every=5',)
  finished = []

  def remember(moment):
    if not moment.worker:
      finished.append(newest_versions(workdir))

  hit = run_through(zygote, workdir, log, STALE, *options, after_hit=remember)
  text = log.read_text()
  print(text)
  assert hit == [moment.name for moment in STALE]
  # Groups sampled by a policy without a checkpoint are void; others are kept.
  resumed = re.findall(
    r'going on from step (\d+); (\d+) finished groups kept, (\d+) ', text
  )
  for counts, versions in zip(resumed, finished, strict=True):
    step, kept, dropped = map(int, counts)
    assert step in (0, 5)
    assert kept == sum(v <= step for v in versions)
    assert dropped == sum(v > step for v in versions)
  # The second strike makes policies 1 to 3 void, so groups must be dropped.
  assert int(resumed[0][2]) > 0
  rows = [r for r in jobs.metrics(workdir) if r['stage'] == 'rl']
  assert [r['step'] for r in rows] == list(range(1, 9))
  # Two prompts a step: every group was trained once, in order.
  assert [g for r in rows for g in r['groups']] == list(range(16))
  assert {r['staleness'] for r in rows} == {0, 1}
  assert not jobs.mentioning(workdir)


@dataclasses.dataclass(frozen=True)
class SmallDisk:
  """A small file system, mounted in a user namespace without root.

  Attributes:
    zygote: process in the namespace that has the disk mounted.
    inside: path of the disk for the zygote and its runs.
    outside: path of the disk for all other processes.
  """

  zygote: programs.Zygote
  inside: pathlib.Path
  outside: pathlib.Path

  def resize(self, num_bytes: int) -> None:
    enter = ['nsenter', f'--target={self.zygote.pid}', '--mount', '--user']
    enter += ['--preserve-credentials']
    # With the source named, `mount` repeats no earlier options, such as the
    # owner, who has another number in the namespace.
    mount = ['mount', '-o', f'remount,size={num_bytes}', 'tmpfs']
    mount += [str(self.inside)]
    subprocess.run([*enter, *mount], check=True, timeout=60)


@pytest.fixture
def small_disk(tmp_path):
  """A disk of 4 MB."""
  folder = tmp_path / 'disk'
  folder.mkdir()
  become = ['unshare', '--map-root-user', '--mount']
  refused = subprocess.run(
    [*become, 'true'], capture_output=True, text=True, check=False
  )
  if refused.returncode:
    pytest.skip(f'no namespaces: {refused.stderr.strip()}')
  mount = f'mount -t tmpfs -o size=4m tmpfs {shlex.quote(str(folder))}'
  script = f'{mount} && exec "$@"'
  with programs.zygote(*become, 'sh', '-c', script, 'sh') as zygote:
    outside = pathlib.Path(f'/proc/{zygote.pid}/root{folder}')
    deadline = time.monotonic() + 60
    while not outside.is_mount() and time.monotonic() < deadline:
      time.sleep(0.01)
    assert outside.is_mount()
    yield SmallDisk(zygote, folder, outside)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_more_room_lets_it_go_on(
  tmp_path, small_disk, request
):
  zygote, run = small_disk.zygote, small_disk.inside / 'run'
  workdir, log = small_disk.outside / 'run', tmp_path / 'log.txt'
  jobs.start(zygote, run, log)
  assert zygote.exit_code() == 1
  error = log.read_text().splitlines()[-1]
  assert error.startswith('error: [Errno 28]') and 'Checkpoint' in error
  assert 'Traceback' not in log.read_text()
  # Earlier files are intact, and the next run builds on them.
  assert jobs.steps(workdir, 'cpt') == [1, 2]
  corpus = (workdir / 'corpus' / 'manifest.json').read_bytes()
  small_disk.resize(256 << 20)
  pid = jobs.start(zygote, run, log)
  pretraining_over = jobs.Strike(
    'pretraining over', exists('demonstrations.json')
  )
  assert jobs.strike(pid, workdir, pretraining_over)
  assert zygote.exit_code() == -9
  assert (workdir / 'corpus' / 'manifest.json').read_bytes() == corpus
  expected = jobs.metrics(request.getfixturevalue('straight'))
  assert [r for r in jobs.metrics(workdir) if r['stage'] == 'cpt'] == [
    r for r in expected if r['stage'] == 'cpt'
  ]


@pytest.mark.slow
def test_a_disk_that_fills_up_in_rl_loses_nothing(
  tmp_path, small_disk, request
):
  zygote, run = small_disk.zygote, small_disk.inside / 'run'
  workdir, log = small_disk.outside / 'run', tmp_path / 'log.txt'
  straight = request.getfixturevalue('straight')
  small_disk.resize(256 << 20)
  jobs.copy_before_rl(straight, workdir)
  usage = shutil.disk_usage(small_disk.outside)
  # Space for the first policy and some groups, not for the whole stage.
  small_disk.resize(usage.used + (600 << 10))
  jobs.start(zygote, run, log)
  assert zygote.exit_code() == 1
  text = log.read_text()
  print(text)
  assert text.splitlines()[-1].startswith('error: ')
  assert 'Errno 28' in text and 'Traceback' not in text
  small_disk.resize(256 << 20)
  jobs.start(zygote, run, log)
  assert zygote.exit_code() == 0

  def of_rl(path):
    return [r for r in jobs.metrics(path) if r['stage'] == 'rl']

  assert of_rl(workdir) == of_rl(straight)
  actual, expected = jobs.weights(workdir, 'rl'), jobs.weights(straight, 'rl')
  for name, array in expected.items():
    np.testing.assert_array_equal(actual[name], array, err_msg=name)


@pytest.mark.slow
def test_a_job_killed_every_few_seconds_ends_bit_for_bit_the_same(
  tmp_path, zygote, request
):
  workdir = tmp_path / 'killed'
  rng = np.random.default_rng(0)
  strikes = [
    jobs.Strike(f'after {wait_s:.1f} s', after(wait_s))
    for wait_s in rng.uniform(0.5, 12, size=30)
  ]
  hit = run_through(zygote, workdir, tmp_path / 'log.txt', strikes)
  assert len(hit) >= 5
  assert_same(workdir, request.getfixturevalue('straight'))
