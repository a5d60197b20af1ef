"""Bad input ends in a clear error or one failed episode, and loses no data."""

import contextlib
import shutil
import sys

import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.agent import episode
from composer_jax.core import records
from composer_jax.delta import publisher as bundles
from composer_jax.delta import transport
from composer_jax.delta import transport as receivers
from composer_jax.models import decoder
from composer_jax.pipeline import stages
from composer_jax.tasks.list_functions import environment, family
from composer_jax.train.checkpoints import manager
from configs.composer import tiny
from tests import programs
from tests.agent import episode_test
from tests.e2e import composer_test, jobs


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--config.rl.stepz=3'], 'stepz'),
    (['--config.rl.steps=many'], 'many'),
    (['--confg=x'], 'confg'),
    (['--config=configs/composer/huge.py'], 'huge.py'),
    (['--config=configs/composer/tiny.py:hug'], "'smoke', not 'hug'"),
    (['train'], "Unknown arguments ['train']"),
  ],
)
def test_a_wrong_flag_is_named(tmp_path, flags, message):
  process = programs.run(
    'experiments.composer',
    f'--workdir={tmp_path / "run"}',
    *flags,
    env=jobs.environment(),
  )
  assert process.returncode
  assert message in process.stderr + process.stdout
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--config.sandbox.level=microvm'], 'qemu'),
    (['--config.delta.store=http://127.0.0.1:1/a'], 'can only be read'),
    (
      ['--config.delta.store=/proc/none'],
      '/proc/none cannot be written (No such file',
    ),
    (['--config.data.sources=("none",)'], 'none'),
  ],
)
def test_a_start_that_fails_leaves_nothing(
  tmp_path, flags, message, monkeypatch
):
  # No QEMU, wherever it is installed.
  monkeypatch.setenv('PATH', f'{tmp_path}')
  process = jobs.run(tmp_path / 'run', *flags)
  assert process.returncode == 1
  assert message in process.stderr, process.stderr
  assert not (tmp_path / 'run').exists()
  # What was there before stays.
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'mine').write_text('kept')
  assert jobs.run(tmp_path / 'run', *flags).returncode == 1
  assert [p.name for p in (tmp_path / 'run').iterdir()] == ['mine']


def test_the_store_of_another_run_is_refused_before_training(tmp_path):
  store = tmp_path / 'store'
  with bundles.Publisher(
    store, tmp_path / 'key', transport.RUN_ID
  ) as publisher:
    publisher.publish({'w': np.zeros(3, np.float32)}, 0)
  process = jobs.run(tmp_path / 'run', f'--config.delta.store={store}')
  assert process.returncode == 1
  assert 'has the policies of another run' in process.stderr
  assert not (tmp_path / 'run').exists()


def test_a_wrong_value_ends_the_command_without_a_traceback(tmp_path):
  process = jobs.run(tmp_path / 'run', '--config.rl.placement=nowhere')
  assert process.returncode == 1
  assert process.stderr.splitlines()[-1] == (
    "error: --config.rl.placement must be one of ('processes', 'colocated'); "
    "got 'nowhere'."
  )
  assert 'Traceback' not in process.stderr
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'override, message',
  [
    ('--config.rl.rollouts_per_prompt=1', 'a group of one has no baseline'),
    ('--config.episode.max_tokens=900', r'max_tokens \(900\) must not exceed'),
    ('--config.layout=diagonal', "'diagonal'"),
    ('--config.rl.loss.ratio_cap=0.5', 'ratio_cap must be at least 1'),
    ('--config.rl.reward=random', r"'shuffled'\); got 'random'"),
    ('--config.cpt.steps=0', 'steps must be at least 1, not 0'),
    ('--config.sandbox.level=none', 'none'),
    ('--config.rl.gate.action=halt', "rl.gate.*action must be one of .*'halt'"),
    ('--config.rl.gate.max_kl=-1', 'rl.gate.*max_kl must be.*at least 0'),
    ('--config.rollout.record_routes=False', 'rl.replay needs the routes'),
    ('--config.rollout.on_swap=drop', "on_swap must be one of.*'drop'"),
    (
      '--config.rollout.page_size=0',
      'page_size must be an integer of at least 1',
    ),
    ('--config.delta.tier=tiny', "config.delta: tier .*'tiny'"),
    ('--config.delta.poll_s=0', 'delta.poll_s must be positive, not 0'),
    ('--config.delta.store=direct:', 'single process: set .*colocated'),
  ],
)
def test_a_value_out_of_range_is_named(override, message):
  with pytest.raises(ValueError, match=message):
    spec = composer_test.make_spec(override)
    spec.update_options()
    level = spec.systems['sandbox'].level
    with wiring.systems_of(spec).open_runner(level):
      pass


def _with_file(folder, data=b'', target=None):
  """Makes a folder with one module: these bytes, or a link to `target`."""
  folder.mkdir()
  if target:
    (folder / 'a.py').symlink_to(target)
  else:
    (folder / 'a.py').write_bytes(data)


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda path: path.mkdir(), 'code.*holds no Python file'),
    (lambda path: None, 'code.*does not exist'),
    (
      lambda path: _with_file(path, data=b'\xff\0' * 4000),
      r"code.*none was kept \({'not utf-8': 1}\)",
    ),
    pytest.param(
      # Linux lets no process read this file, not even root's.
      lambda path: _with_file(path, target='/sys/bus/platform/uevent'),
      r"code.*none was kept \({'unreadable \(Permission denied\)': 1}\)",
      marks=pytest.mark.skipif(sys.platform != 'linux', reason='no QEMU'),
    ),
  ],
  ids=['empty', 'absent', 'binary', 'unreadable'],
)
def test_a_corpus_without_text_is_refused_by_its_path(tmp_path, make, message):
  make(tmp_path / 'code')
  config = tiny.get_config('smoke')
  config.data.sources = (str(tmp_path / 'code'),)
  spec = wiring.spec_of(config.to_dict())
  with pytest.raises(ValueError, match=message):
    wiring.systems_of(spec).corpus(tmp_path / 'run')


def _flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 16
  path.write_bytes(data)


def _largest(folder):
  files = [p for p in folder.rglob('*') if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


# Without --slow: train/checkpoints/manager_test.py.
@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_with_its_place_and_the_cure(
  straight, tmp_path
):
  copy = shutil.copytree(straight, tmp_path / 'copy')
  shutil.rmtree(copy / 'exports' / 'cpt')
  *_, earlier, latest = sorted(
    int(p.name) for p in (copy / 'checkpoints' / 'cpt').iterdir()
  )
  folder = copy / 'checkpoints' / 'cpt' / f'{latest}'
  _flip(_largest(folder / 'state'))
  process = jobs.run(copy)
  assert process.returncode == 1 and 'Traceback' not in process.stderr
  line = process.stderr.splitlines()[-1]
  assert line.startswith(
    f'error: Checkpoint of step {latest} in {folder} is dam'
  )
  assert 'Delete that folder and run the same command' in line
  assert f'continues from step {earlier}' in line
  # The traceback is kept in a file.
  assert line.endswith(f' (traceback: {copy / "error.txt"})')
  assert 'DamagedCheckpoint' in (copy / 'error.txt').read_text()


def test_a_damaged_export_is_refused_with_its_place_and_the_cure(
  straight, tmp_path
):
  copy = shutil.copytree(straight, tmp_path / 'copy')
  _flip(_largest(copy / 'exports' / 'sft' / '6' / 'state'))
  with composer_test.opened(copy, composer_test.make_spec()) as job:
    with pytest.raises(
      manager.DamagedCheckpoint,
      match=r'(?s)exports/sft/6 is damaged.*Delete that folder.*'
      'continues from the last checkpoint of the stage, in checkpoints/sft',
    ):
      stages.load_variables(job, 'sft', job.single)


def test_a_damaged_bundle_is_not_served_and_a_resumed_trainer_heals_it(
  straight, tmp_path
):
  copy = shutil.copytree(straight, tmp_path / 'copy')
  spec = composer_test.make_spec()
  receiver = receivers.Receiver(copy, spec.model)
  # Every chain to version 4: its delta, the keyframe before it.
  for path in (copy / 'store' / 'objects').iterdir():
    _flip(path)
  assert receiver.poll() is None
  assert 'objects' in receiver.problem and 'damaged' in receiver.problem
  # A resumed trainer publishes the version that it resumes from, as a keyframe.
  with composer_test.opened(copy, spec) as job:
    variables = stages.load_variables(job, 'rl', job.single)
    sender = bundles.Publisher(
      receiver.store,
      copy / receivers.KEY,
      receivers.RUN_ID,
      spec.systems['delta'],
    )
    with contextlib.closing(sender):
      published = transport.Publication(sender, job.writer, copy, 4, spec.model)
      sender.publish(decoder.policy(variables), 4)
      published.wait()
  policy = receiver.poll()
  assert policy.version == 4 and receiver.problem is None


@pytest.mark.parametrize(
  'body, wall_s, cpu_s',
  [
    ('while True: pass', 25, 1),
    ('__import__("time").sleep(99)', 0.5, 25),
  ],
  ids=['computes', 'waits'],
)
def test_a_function_that_never_returns_is_a_failed_episode(
  straight, body, wall_s, cpu_s
):
  """The sandbox ends a function that hangs, and the run goes on."""
  task = family.generate(3, 'train')
  spec = composer_test.make_spec(
    f'--config.sandbox.wall_s={wall_s}', f'--config.sandbox.cpu_s={cpu_s}'
  )
  with composer_test.opened(straight, spec) as job, job.runner() as runner:
    tokenizer = job.tokenizer
    calls = [
      f'read {task.path}',
      f'edit {task.path} {task.function}\n{body}',
      'finish',
    ]
    rollout = episode.run(
      environment.FunctionEnvironment(task, runner),
      episode_test.TapePolicy(tokenizer, calls),
      tokenizer,
      episode.EpisodeOptions(
        max_tokens=2000,
        max_turns=9,
        max_call_tokens=200,
      ),
      group=0,
      member=0,
      seed=0,
    )
    after = runner.call({'ok.py': 'def f():\n  return 1\n'}, 'ok', 'f', [[]])
  assert rollout.verdict.status == records.GRADED
  assert not rollout.verdict.passed and rollout.reward == 0
  assert after.value == [['ok', 1]]
