"""run.sh lists its commands, names unknown ones and installs once."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def run(*args, cwd=ROOT, **env) -> subprocess.CompletedProcess:
  return subprocess.run(
    ['bash', './run.sh', *args],
    cwd=cwd,
    env=os.environ | env,
    capture_output=True,
    text=True,
    timeout=60,
  )


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
  """A copy of the files that run.sh reads; its main prints the flags."""
  for name in ('run.sh', 'setup.py', 'constraints.txt'):
    shutil.copy(ROOT / name, tmp_path / name)
  experiments = tmp_path / 'experiments'
  experiments.mkdir()
  (tmp_path / 'configs').mkdir()
  shutil.copy(ROOT / 'configs' / 'hardware.py', tmp_path / 'configs')
  for name in ('composer', 'other'):
    (experiments / f'{name}.py').write_text('import sys; print(*sys.argv[1:])')
  return tmp_path


def pretend_installed(checkout: pathlib.Path, marker: str, what: str) -> None:
  """Makes an environment of this interpreter that looks installed."""
  (checkout / '.venv' / 'bin').mkdir(parents=True)
  (checkout / '.venv' / 'bin' / 'python').symlink_to(sys.executable)
  key = subprocess.run(
    'cat setup.py constraints.txt | cksum',
    shell=True,
    cwd=checkout,
    capture_output=True,
    text=True,
    check=True,
  ).stdout.strip()
  (checkout / '.venv' / f'composer_jax.{marker}').write_text(f'{what} {key}')


def test_scripts_are_bash():
  for script in ('run.sh', '.ci/run'):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(['bash', '-n', ROOT / script], check=True, timeout=60)


@pytest.mark.parametrize('flag', ['help', '--help', '-h'])
def test_help_names_the_commands(flag):
  result = run(flag)
  assert result.returncode == 0
  for word in (
    './run.sh test',
    './run.sh bench',
    '--config',
    '--workdir',
    'constraints.txt',
  ):
    assert word in result.stdout


def test_unknown_experiment_is_named_with_those_there_are(checkout):
  result = run('compser', cwd=checkout)
  assert result.returncode == 1
  assert "'compser'" in result.stderr
  assert 'composer other' in result.stderr
  assert not (checkout / '.venv').exists()


def test_main_job_gets_defaults_that_flags_replace(checkout):
  pretend_installed(checkout, 'base', '.[tasks]')
  tiny = '--config=configs/composer/tiny.py'
  cases = {
    (): f'{tiny} --workdir=runs/tiny',
    ('composer', '--config.a=1'): f'{tiny} --workdir=runs/tiny --config.a=1',
    ('--workdir=x y',): f'{tiny} --workdir=x y',
    ('--workdir', 'x'): f'{tiny} --workdir x',
    ('--config=c/gpu.py:smoke',): (
      '--workdir=runs/gpu_smoke --config=c/gpu.py:smoke'
    ),
    ('--config', 'a.py', '--workdir=b'): '--config a.py --workdir=b',
    ('other', '--flag'): '--flag',
  }
  for args, flags in cases.items():
    result = run(*args, cwd=checkout)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == flags


def test_bench_hands_its_arguments_to_the_benchmarks(checkout):
  pretend_installed(checkout, 'test', '.[test]')
  (checkout / 'benchmarks').mkdir()
  main = checkout / 'benchmarks' / '__main__.py'
  main.write_text('import sys; print(*sys.argv[1:])')
  result = run('bench', 'delta', '--quick', cwd=checkout)
  assert result.stdout.strip() == 'delta --quick', result.stderr


def test_a_day_with_a_gpu_needs_a_folder_before_anything_is_installed(checkout):
  result = run('gpu_day', cwd=checkout)
  assert result.returncode != 0 and '--out=DIR' in result.stderr
  assert not (checkout / '.venv').exists()
  pretend_installed(checkout, 'test', '.[test]')
  (checkout / 'benchmarks').mkdir()
  main = checkout / 'benchmarks' / 'gpu_day.py'
  main.write_text('import sys; print(*sys.argv[1:])')
  result = run('gpu_day', '--out=x', '--tiny', cwd=checkout)
  assert result.stdout.strip() == '--out=x --tiny', result.stderr


def test_old_python_is_refused_by_name(checkout):
  old = checkout / 'old'
  old.write_text('#!/bin/sh\nexit 1\n')
  old.chmod(0o755)
  result = run(cwd=checkout, PYTHON=str(old))
  assert result.returncode != 0
  assert f'PYTHON={old} is not Python >= 3.11' in result.stderr


def test_no_python_at_all_is_explained(checkout):
  tools = checkout / 'tools'
  tools.mkdir()
  for name in ('bash', 'cat', 'cksum', 'dirname', 'basename'):
    (tools / name).symlink_to(shutil.which(name))
  result = run(cwd=checkout, PATH=str(tools), PYTHON='')
  assert result.returncode != 0
  assert 'No Python >= 3.11 found' in result.stderr


def with_card(folder: pathlib.Path, driver: str, capability: str) -> str:
  """Makes tools that say that a card is here; returns a PATH with them."""
  tools = folder / 'card'
  tools.mkdir()
  row = f'NVIDIA X, 80 MiB, {driver}, {capability}'
  for name, line in (('nvidia-smi', f'echo "{row}"'), ('uv', 'echo "uv $*"')):
    (tools / name).write_text(f'#!/bin/sh\n{line}\n')
    (tools / name).chmod(0o755)
  return f'{tools}:{os.environ["PATH"]}'


@pytest.mark.parametrize(
  'driver, capability, what, words',
  [
    ('580.65.06', '9.0', '.[tasks,gpu,kernels]', ''),
    ('550.54', '9.0', '.[tasks,gpu_cuda12,kernels]', ''),
    # CUDA 13 has left Volta behind.
    ('590.1', '7.0', '.[tasks,gpu_cuda12,kernels]', ''),
    ('470.1', '8.0', '.[tasks]', 'NVIDIA X, 80 MiB, driver 470.1 stays unused'),
    ('580.1', '5.0', '.[tasks]', 'and 5.0: hide that card by'),
  ],
)
def test_jax_for_the_card_is_installed(
  checkout, driver, capability, what, words
):
  path = with_card(checkout, driver, capability)
  pretend_installed(checkout, 'other', '')  # There is an environment.
  result = run('--config.a=1', cwd=checkout, PATH=path, JAX_PLATFORMS='')
  assert result.returncode == 0, result.stderr
  assert f'-e {what}\n' in result.stdout
  assert words in result.stderr if words else not result.stderr
  assert result.stdout.endswith('--config.a=1\n')


def test_an_installation_without_the_card_is_not_enough(checkout):
  path = with_card(checkout, '580.1', '9.0')
  pretend_installed(checkout, 'test', '.[test]')
  for platforms, count in (('cpu', 0), ('', 1)):
    result = run(cwd=checkout, PATH=path, JAX_PLATFORMS=platforms)
    assert result.stdout.count('.[tasks,gpu,kernels]\n') == count
