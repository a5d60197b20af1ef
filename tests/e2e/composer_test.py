"""The main job through the real command line, every stage at its smallest."""

import contextlib
import os
import re
import shutil

import ml_dtypes
import numpy as np
import psutil
import pytest
from absl import flags
from ml_collections import config_flags

from composer_jax import wiring
from composer_jax.core import files
from composer_jax.delta import transport as receivers
from composer_jax.pipeline import reinforce, stages
from composer_jax.pipeline import spec as specs
from composer_jax.report import metrics
from composer_jax.rl import sync_loop
from composer_jax.telemetry import writer as writers
from composer_jax.train.checkpoints import manager
from tests import programs
from tests.e2e import jobs
from tests.pipeline import runs

EXPECTED_METRICS = {
  'cpt': 'loss heldout_loss grad_norm tokens_per_s lr expert_load_max',
  'sft': 'loss heldout_loss grad_norm tokens_per_s lr expert_load_max',
  'rl': 'reward pass_rate entropy staleness invalid_rate mismatch_kl '
  'mismatch_kl_no_replay grad_norm turns expert_load_max sandbox_ms',
  'delta': 'target_id kind bytes full_bytes changed cut_bytes keyframe_bytes '
  'encode_s upload_s',
  'eval': 'name pass_rate pass_low pass_high episodes',
}


def make_spec(*overrides: str) -> specs.Spec:
  """Returns the spec that the command line makes of the smoke config."""
  path = f'--config={jobs.ROOT / jobs.CONFIG}'
  arguments = ['test', path, *jobs.OVERRIDES, *overrides]
  values = flags.FlagValues()
  config = config_flags.DEFINE_config_file(
    'config',
    flag_values=values,
    sys_argv=arguments,
    lock_config=False,
    accept_new_attributes=True,
  )
  values(arguments)
  return wiring.spec_of(config.value.to_dict())


def test_flags_of_every_type_are_read_as_the_command_line_does():
  spec = make_spec(
    '--config.telemetry.tensorboard=False', '--config.rl.learning_rate=1e-5'
  )
  assert spec.telemetry.tensorboard is False
  assert spec.rl.learning_rate == 1e-5


@pytest.fixture
def copy(straight, tmp_path):
  """A copy of the finished workdir, which a test may change."""
  return shutil.copytree(straight, tmp_path / 'copy')


@contextlib.contextmanager
def opened(workdir, spec):
  """A Job in this process on the workdir of an earlier run."""
  level = files.read_json(workdir / 'sandbox.json')['level']
  assert wiring.systems_of(spec).settle_judge(workdir) == level
  with writers.Writer(workdir, tensorboard=False) as writer:
    yield runs.job(runs.changed(spec, 'sandbox', level=level), workdir, writer)


def test_ends_by_naming_the_report(straight):
  lines = (straight.parent / 'straight.txt').read_text().splitlines()
  assert lines[-1] == f'Report: {straight / "report.html"}'
  page = (straight / 'report.html').read_text()
  for title in ('Pass rate on held-out tasks', 'Episodes', 'Corpus'):
    assert title in page
  assert '<svg ' in page and 'src="http' not in page


@pytest.mark.parametrize('stage', EXPECTED_METRICS)
def test_every_stage_measures_what_the_report_shows(straight, stage):
  rows = [r for r in writers.read(straight) if r['stage'] == stage]
  names = {name for row in rows for name in row}
  assert set(EXPECTED_METRICS[stage].split()) <= names


# Metrics of meshes that shard experts, which is not the case in this run.
ELSEWHERE = {
  'cpt': (
    'transport shard_load_max exchange_rounds '
    'mtp_loss mtp_agreement mtp_grad_norm'
  ),
  'rl': ('difficulty solved_labels mismatch_kl_afresh mtp_loss mtp_agreement'),
}
ELSEWHERE['sft'] = ELSEWHERE['cpt']


def test_every_metric_is_explained_and_every_explained_one_is_there(straight):
  explained = set(metrics.meanings())
  rows = writers.read(straight) + writers.read(straight / writers.RECEIVED)
  measured = {(row['stage'], name) for row in rows for name in row}
  row_keys = {
    (row['stage'], n) for row in rows for n in ('stage', 'step', 'time')
  }
  elsewhere = {
    (s, name) for s, names in ELSEWHERE.items() for name in names.split()
  }
  assert elsewhere <= explained
  assert measured - row_keys == explained - elsewhere


def test_rollouts_wait_for_every_policy_at_no_staleness(straight):
  lines = writers.read(straight / writers.RECEIVED)
  assert len(lines) > 2 and 'wait_s' not in lines[0]
  assert all(line['wait_s'] > 0 < line['sample_s'] for line in lines[1:])
  last = (straight.parent / 'straight.txt').read_text().split('[rl]')[-1]
  told = re.match(r' time spent .*: trainer (.*) % .*, rollouts (.*) % ', last)
  assert told and all(0 < float(share) < 100 for share in told.groups())


def test_every_stage_was_timed(straight):
  seconds = files.read_json(straight / 'stages.json')
  assert seconds.keys() == {
    *('corpus', 'tokenizer', 'cpt', 'demonstrations', 'sft', 'eval_sft'),
    *('rl', 'eval_rl'),
  }
  assert all(s > 0 for s in seconds.values())
  rows = [r['time'] for r in writers.read(straight) if r['stage'] == 'rl']
  assert seconds['rl'] > rows[-1] - rows[0]


def test_both_policies_were_judged_on_the_same_held_out_tasks(straight):
  played = []
  for stage in ('sft', 'rl'):
    assert (
      files.read_json(straight / f'evaluation_{stage}.json')['episodes'] == 8
    )
    rows = writers.read(straight / f'evaluation_{stage}_episodes.jsonl')
    played.append([r['task_id'] for r in rows])
  assert played[0] == played[1] and len(set(played[0])) == 8


def test_every_group_is_trained_exactly_once_and_has_a_gradient(straight):
  rows = [r for r in writers.read(straight) if r['stage'] == 'rl']
  assert [r['step'] for r in rows] == [1, 2, 3, 4]
  assert [g for r in rows for g in r['groups']] == list(range(8))
  assert all(r['staleness'] == 0 and r['grad_norm'] > 0 for r in rows)
  # With replay the mismatch is only rounding.
  assert all(0 <= r['mismatch_kl'] < 1e-10 for r in rows)
  before, after = (jobs.weights(straight, s) for s in ('sft', 'rl'))
  assert any(not np.array_equal(before[n], after[n]) for n in after)


def test_the_chain_of_bundles_ends_at_the_exported_policy(straight):
  receiver = receivers.Receiver(straight, make_spec().model)
  policy = receiver.poll()
  assert receiver.problem is None and policy.version == 4
  published = jobs.named(policy.variables)
  masters = jobs.weights(straight, 'rl')
  assert published.keys() == masters.keys()
  for name, array in masters.items():
    if name.startswith('params/'):
      array = array.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(published[name], array, err_msg=name)


def test_both_processes_name_the_same_weights(straight):
  published = {
    r['step']: r for r in writers.read(straight) if r['stage'] == 'delta'
  }
  assert sorted(published) == [0, 1, 2, 3, 4]
  assert [published[v]['kind'] for v in range(5)] == ['key', *['delta'] * 4]
  # The config asks for these beside the delta.
  assert [v for v in published if published[v]['keyframe_bytes']] == [3]
  rows = writers.read(straight / 'received.jsonl')
  # At staleness 0 every version but the last samples.
  assert {r['step'] for r in rows} >= {0, 1, 2, 3}
  for row in rows:
    assert row['target_id'] == published[row['step']]['target_id']
    # A receiver that never lags reads only deltas of one version.
    version = row['step']
    bundles = [f'delta {version - 1}-{version}'] if version else ['key 0']
    assert row['route'] == bundles


def sandbox_processes() -> dict[psutil.Process, int]:
  """Returns running sandbox processes, with the process id of their host."""
  hosts = {}
  for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):
      match = re.search(r'"host_pid": (\d+),', ' '.join(process.cmdline()))
      if match:
        hosts[process] = int(match[1])
  return hosts


def test_nothing_survives_the_job(straight):
  assert not jobs.mentioning(straight)
  # Sandboxes name their host, since other jobs of the machine may run some too.
  open_runner = wiring.systems_of(make_spec()).open_runner
  with open_runner('auto'):
    assert os.getpid() in sandbox_processes().values()
  orphans = [
    process
    for process, host in sandbox_processes().items()
    if not psutil.pid_exists(host)
  ]
  jobs.assert_gone(orphans)


def test_finished_stages_are_not_repeated(copy):
  before = {
    p: p.read_bytes()
    for p in copy.rglob('*')
    if p.is_file()
    and p.name not in ('report.html', 'run.json')
    # Left by a process that ended during a write; the next run removes it.
    and p.suffix != '.tmp'
  }
  process = jobs.run(copy)
  assert process.returncode == 0, process.stderr
  assert process.stdout.splitlines() == [f'Report: {copy / "report.html"}']
  for path, data in before.items():
    assert path.read_bytes() == data, path


def test_a_workdir_of_another_config_is_refused_by_the_key(copy):
  with pytest.raises(ValueError, match=r'rl\.steps is 4 there and 5 now'):
    with runs.open_run(make_spec('--config.rl.steps=5'), copy):
      pass


def synchronous(workdir):
  """Runs RL by the synchronous loop, from the SFT policy of a finished run.

  Writes `sync.npz` and `sync.json` into the workdir. The test below calls it in
  a process with as many devices as the main job: on a CPU their number decides
  how XLA divides loops, and so the last bits.
  """
  spec = make_spec()
  checkpoints = manager.Checkpoints(workdir / 'checkpoints' / 'sync', keep=1)
  with opened(workdir, spec) as job, contextlib.closing(checkpoints):
    start = reinforce.prepare(job, checkpoints)
    with job.runner() as runner:
      state, history = sync_loop.run(
        start.state,
        start.functions,
        runs.collector(spec, job.tokenizer, runner, split='train'),
        lambda values, version: stages.make_engine(spec, values, version),
        spec.update_options(),
        spec.batch_shape(),
        num_steps=spec.rl.steps,
        teacher=start.teacher,
      )
  np.savez(workdir / 'sync.npz', **jobs.named(state.variables()))
  files.write_json(workdir / 'sync.json', history)


# By default tests/pipeline/sync_equality_test.py has this law for one process.
@pytest.mark.slow
def test_rl_in_two_processes_equals_the_synchronous_loop(straight, copy):
  code = (
    'import pathlib, sys; from tests.e2e import composer_test; '
    'composer_test.synchronous(pathlib.Path(sys.argv[1]))'
  )
  environment = jobs.environment()
  environment['XLA_FLAGS'] += (
    ' --xla_force_host_platform_device_count=2'
    ' --xla_cpu_multi_thread_eigen=false'
  )
  process = programs.run_code(
    code, str(copy), env=environment, timeout_s=jobs.TIMEOUT_S
  )
  assert process.returncode == 0, process.stderr
  rows = [r for r in writers.read(straight) if r['stage'] == 'rl']
  history = files.read_json(copy / 'sync.json')
  for row, expected in zip(rows, history, strict=True):
    for name in sorted(set(expected) - set(jobs.UNCERTAIN)):
      assert row[name] == expected[name], (row['step'], name)
  with np.load(copy / 'sync.npz') as arrays:
    for name, array in jobs.weights(straight, 'rl').items():
      np.testing.assert_array_equal(arrays[name], array, err_msg=name)
