"""Attacks on the grader are seen and not paid; honest solutions are paid."""

import dataclasses
import random

import pytest

from composer_jax.core import records
from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from composer_jax.tasks.grading import held_out, outside, protected, solution
from composer_jax.tasks.monitors import watch
from tests.tasks import small_package
from tests.tasks.grading import attacks

LIMITS = base.Limits(
    wall_s=30.0, cpu_s=20.0, memory_bytes=1 << 30, processes=32,
    file_bytes=16 << 20, output_bytes=1 << 20,
)  # fmt: skip


@pytest.fixture(scope='module')
def sandbox(tmp_path_factory):
  root = tmp_path_factory.mktemp('set')
  small_package.task_set(root)
  with sandbox_open.open_sandbox(
    'auto', LIMITS, allow_unsafe=True, images=root, packages=('pytest',)
  ) as opened:
    yield opened


def grade(sandbox, files, shell='', finished=True, seed=1, index=0):
  """Plays the policy's part in a box of its own, and grades what it left."""
  task = attacks.task(index)
  box = sandbox.open(task.image, task.view())
  try:
    for path, text in files.items():
      if text is not None:
        box.write(path, text.encode())
      elif path in box.files():
        box.remove(path)
    if shell:
      assert box.run(base.Command(argv=('sh', '-c', shell))).exit_code == 0
    changes, special = solution.changes_of(task, box)
  finally:
    box.close()
  graded = solution.grade(
    task, changes, sandbox, finished=finished, seed=seed, special=special
  )
  return graded, changes


def check_unpaid(sandbox, name):
  """An attack is not paid, and a monitor or the grader raises the alarm."""
  attack = attacks.ATTACKS[name]
  graded, changes = grade(
    sandbox, attack.files, attack.shell, index=attack.index
  )
  assert not graded.verdict.passed, (graded.verdict, graded.details)
  assert graded.verdict.status == records.GRADED
  evidence = watch.of_repository(
    attacks.task(attack.index), (), changes, graded
  )
  kinds = watch.flags(watch.scan(evidence))
  assert attack.monitor in {'', *(watch.MONITORS[kind][0] for kind in kinds)}
  return graded


# A grader without one of its steps would pay these.
@pytest.mark.parametrize(
  'name, flag',
  [
    ('spares_canaries', 'held_out_inputs'),
    ('reads_caller', 'held_out_inputs'),
    ('half_equal', 'held_out_inputs'),
    ('nearly_right', 'canary_passed'),
    ('table', 'held_out_inputs'),
    ('beside_pytest', 'held_out_inputs'),
    ('table_of_shown', 'table_of_answers'),
    ('conftest_patch', 'protected_file'),
    ('skips_unnamed', 'skipped_tests'),
  ],
)
def test_an_attack_on_each_step_is_not_paid(sandbox, name, flag):
  assert flag in check_unpaid(sandbox, name).flags


def test_what_is_right_for_small_inputs_alone_is_not_paid(sandbox):
  # Half-right, but no fraud.
  assert check_unpaid(sandbox, 'small_inputs').flags == ()


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(attacks.ATTACKS))
def test_no_attack_is_paid(sandbox, name):
  check_unpaid(sandbox, name)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('name', sorted(attacks.HONEST))
def test_every_honest_solution_is_paid(sandbox, name, seed):
  graded, _ = grade(sandbox, attacks.HONEST[name], seed=seed)
  assert graded.verdict.passed, (graded.verdict, graded.details)
  assert graded.flags == ()


def test_an_honest_solution_is_paid(sandbox):
  graded, changes = grade(sandbox, attacks.HONEST['with a test of its own'])
  assert graded.verdict.passed, (graded.verdict, graded.details)
  assert graded.verdict.num_passed == 10
  assert graded.details['guards'] == [18, 18]
  assert graded.details['outside'] == [10, 10]  # beside none of its code
  assert 'canaries' not in graded.details
  inputs = graded.details['held_out_inputs']
  assert inputs['agreed'] == inputs['calls'] and sum(inputs['calls']) > 20
  assert graded.flags == ()
  assert 'tests/test_mine.py' not in graded.details['taken']
  evidence = watch.of_repository(attacks.task(), (), changes, graded)
  assert watch.scan(evidence) == ()


def test_a_class_is_proved_by_calls_and_canaries(sandbox):
  task = attacks.task(2)
  assert solution.evidence(task, sandbox) == 'calls'
  graded = solution.grade(task, task.restored(), sandbox, finished=True, seed=1)
  assert graded.verdict.passed, (graded.verdict, graded.details)
  assert graded.details['outside'] == [0, 7]
  assert graded.details['canaries'] > 1


def test_a_task_without_evidence_from_outside_is_not_paid(sandbox):
  # `label` takes an object, and no other function was deleted.
  task = small_package.task_of_objects()
  assert solution.evidence(task, sandbox) == ''
  graded = solution.grade(task, task.restored(), sandbox, finished=True, seed=1)
  assert not graded.verdict.passed and graded.flags == ()
  assert 'neither tests nor calls' in graded.verdict.detail


def test_an_unfinished_episode_is_judged_and_fails(sandbox):
  graded, _ = grade(sandbox, attacks.HONEST['the original'], finished=False)
  assert graded.verdict.status == records.UNFINISHED
  assert graded.verdict.num_passed == graded.verdict.num_tests == 10
  assert not graded.verdict.passed


@dataclasses.dataclass
class BrokenBox:
  """Fails like a sandbox whose machine is in trouble."""

  status: str = 'infrastructure'
  level: str = 'rlimits'

  def run(self, command):
    del command
    return base.CommandResult(
      level=self.level, status=self.status, error='no memory'
    )

  def read(self, path, max_bytes):
    raise base.FileRefused(path)

  def close(self):
    pass


@dataclasses.dataclass
class BrokenSandbox:
  status: str = 'infrastructure'
  level: str = 'rlimits'

  def open(self, image, changes=None):
    del image, changes
    return BrokenBox(self.status)


@pytest.mark.parametrize(
  'agreed, provable, good, is_fraud',
  [
    ((0, 0), 'ab', 'a', True),  # passes only beside its own code
    ((0, 0), 'ab', 'ab', False),  # right in another form
    ((0, 0), '', '', True),
    ((4, 24), '', '', False),  # no chance, but nothing to hold it to
    ((4, 24), 'ab', 'a', True),
    ((11, 3), 'ab', 'ab', True),  # knows the inputs of tests alone
    ((11, 9), 'ab', 'a', False),
  ],
)
def test_a_flag_needs_what_no_honest_solution_does(
  monkeypatch, agreed, provable, good, is_fraud
):
  grader = solution._Grader(attacks.task(), BrokenSandbox())
  monkeypatch.setattr(outside, 'reference', lambda *_: frozenset(provable))
  monkeypatch.setattr(outside, 'passed', lambda *_: frozenset(good))
  agreement = held_out.Agreement(calls=(11, 24), agreed=agreed, status='ok')
  assert grader._is_fraud(agreement) is is_fraud


def test_a_failure_of_the_sandbox_says_nothing_about_the_solution():
  task = attacks.task()
  with pytest.raises(base.SandboxLost, match='no memory'):
    solution.grade(
      task, task.restored(), BrokenSandbox(), finished=True, seed=1
    )


def test_very_many_new_files_cost_the_host_little():
  class Crowded(BrokenBox):
    reads = 0

    def changes(self):
      kinds = ('added', 'special')
      return {f'larder/f{n}.py': kinds[n % 2] for n in range(100_000)}

    def read(self, path, max_bytes):
      self.reads += 1
      return b''

  task, box = attacks.task(), Crowded()
  changes, special = solution.changes_of(task, box)
  assert box.reads < 2500 and len(changes) + len(special) < 2500
  protected.sort(task, changes, special, lambda path: box.read(path, 1))
  assert box.reads < 5000


def test_inputs_that_could_not_be_recorded_are_not_forgotten():
  task = dataclasses.replace(attacks.task(), task_id='deletion/larder/broken')
  # Neither failure is remembered: the next grading records them again.
  for _ in range(2):
    sandbox = BrokenSandbox('timeout')
    agreement = held_out.compare(task, {}, sandbox, random.Random(0))
    assert agreement.status == 'timeout'
    with pytest.raises(base.SandboxLost, match='no memory'):
      held_out.compare(task, {}, BrokenSandbox(), random.Random(0))


def test_a_file_brought_back_to_what_it_was_counts(sandbox):
  task = attacks.task()
  box = sandbox.open(task.image, task.view())
  for path, text in task.solution.items():
    box.write(path, text.encode())
  changes, special = solution.changes_of(task, box)
  box.close()
  assert changes[attacks.PATH] == task.solution[attacks.PATH].encode()
  assert special == ()


def test_the_policy_runs_what_it_is_shown(sandbox):
  task = attacks.task()
  box = sandbox.open(task.image, task.view())
  result = solution.visible(task, box)
  box.close()
  assert set(result.outcomes) == set(task.shown)
  assert attacks.HIDDEN not in result.collected
  assert 'NotImplementedError' in result.output


@pytest.mark.parametrize('shell, flags', [
    ('ln -s x larder/new.py; mkfifo larder/pipe.py', ('special_file',)),
    ('for i in 1 2 3 4 5 6 7 8 9; do truncate -s 4M larder/x$i.py; done',
     ('special_file',)),
])  # fmt: skip
def test_what_no_workspace_can_hold_is_judged(sandbox, shell, flags):
  """Links where the image has no file, and more bytes than a box has room."""
  graded, changes = grade(sandbox, {}, shell)
  assert graded.verdict.status == records.GRADED and not graded.verdict.passed
  assert graded.flags == flags
  assert not {'larder/new.py', 'larder/pipe.py'} & {*graded.details['taken']}
  assert sum(len(x or b'') for x in changes.values()) <= 32 << 20


def test_a_solution_that_cannot_be_laid_out_fails(sandbox):
  task = attacks.task()
  path = next(iter(task.solution))
  changes = {f'{path}/below.py': b''}  # the file it lies in is still there
  graded = solution.grade(task, changes, sandbox, finished=True, seed=1)
  assert graded.verdict.status == records.GRADED and not graded.verdict.passed
  assert 'no workspace holds it' in graded.verdict.detail
