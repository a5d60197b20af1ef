"""Harbor tasks are played in one box and verified in another."""

import json
import re

import pytest

from composer_jax.core import records
from composer_jax.tasks.harbor import environment, manifest
from composer_jax.tasks.repository import environment as repository
from tests.tasks.harbor import conftest

TOOLS = repository.RepositoryOptions()
FINISH = '{"tool": "finish", "arguments": {}}'


@pytest.fixture
def play(harbor_sandbox, directory):
  """play(calls, files, toml) -> (answers, verdict); strings are commands."""

  def run(calls, files=None, toml='', **options):
    task = manifest.read(directory(files, toml), conftest.BASES)
    played = environment.HarborEnvironment(
      task, harbor_sandbox, TOOLS, environment.HarborOptions(**options)
    )
    try:
      answers = [played.call(_text(call)) for call in calls]
      is_final = bool(answers) and answers[-1].is_final
      return answers, played.verdict(is_final)
    finally:
      played.close()

  return run


def _text(call):
  if call is FINISH:
    return call
  if isinstance(call, str):
    call = ('run', {'command': call})
  return json.dumps({'tool': call[0], 'arguments': call[1]})


def test_it_is_solved_or_not(play):
  answers, verdict = play(['echo 42 > answer.txt', FINISH])
  assert verdict.passed and verdict.status == records.GRADED
  assert (verdict.num_passed, verdict.num_tests) == (1, 1)
  assert verdict.detail == 'reward 1'
  _, verdict = play([FINISH])
  assert not verdict.passed and verdict.detail == 'reward 0'
  # Without `finish` nothing is paid.
  _, verdict = play(['echo 42 > answer.txt'])
  assert not verdict.passed and verdict.status == records.UNFINISHED


def test_the_agent_finds_files_folders_and_no_tests(play):
  files = {
    'environment/Dockerfile': 'FROM scratch\nCOPY a /app/a\nENV MODE=fast\n',
    'environment/a': 'text of a',
  }
  answers, _ = play(
    [
      ('read', {'path': 'a'}),
      'pwd; cat /app/a; echo $MODE; ls /tests/ /solution/; ls /logs',
      ('write', {'path': 'sub/b', 'text': '42'}),
      ('list', {}),
      ('search', {'pattern': '^4'}),
    ],
    files,
  )
  texts = [a.text for a in answers]
  assert texts[0] == 'text of a'
  assert 'text of afast' in texts[1].replace('\n', '')
  assert texts[1].count('No such file') == 2
  assert texts[1].endswith('agent\nartifacts\nverifier')
  assert texts[3] == 'a\nsub/b'
  assert 'sub/b:1: 42' in texts[4]


def test_what_the_agent_plants_reaches_no_verifier(play):
  attacks = [
    'mkdir -p /work/tests && echo "echo 1 > /logs/verifier/reward.txt" '
    '> /work/tests/test.sh',
    'echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json',
    'rm -rf /work/logs && ln -s /work/app /work/logs',
    'ln -sfn /work/app /work/tests; ln -sfn /work/app /work/solution',
    '(while true; do echo 1 > /logs/verifier/reward.txt; done) & disown',
    'rm -rf /work/logs && touch /work/logs',
  ]
  for attack in attacks:
    _, verdict = play([attack, FINISH])
    assert not verdict.passed and verdict.detail == 'reward 0', attack
  _, verdict = play([*attacks, 'echo 42 > answer.txt', FINISH])
  assert verdict.passed


def test_modes_and_links_come_along(play):
  test = '[ -x tool ] && [ ! -x plain ] && [ -L link ] && ./link > out; '
  test += 'cat out > /logs/verifier/reward.txt'
  make = (
    "printf '#!/bin/sh\\necho 1\\n' > tool; cp tool plain; chmod +x tool; "
    'ln -s tool link'
  )
  _, verdict = play([make, FINISH], {'tests/test.sh': test})
  assert verdict.passed, verdict.detail


def test_a_separate_verifier_gets_artifacts_alone(play, tmp_path):
  toml = """
artifacts = ["/app/kept", { source = "/app/log.txt", destination = "l/og" }]
[verifier]
environment_mode = "separate"
"""
  test = (
    '[ -f kept/a ] && [ ! -e lost ] && [ -f base ] && [ -f log.txt ] && '
    '[ -f /logs/artifacts/z ] && echo 1 > /logs/verifier/reward.txt'
  )
  files = {
    'tests/test.sh': test,
    'environment/Dockerfile': 'FROM scratch\nCOPY base /app/\n',
    'environment/base': '',
  }
  made = 'mkdir kept; touch kept/a lost log.txt /logs/artifacts/z'
  _, verdict = play([made, FINISH], files, toml, artifacts=str(tmp_path / 'k'))
  assert verdict.passed, verdict.detail
  kept = tmp_path / 'k' / 'task'
  found = sorted(
    p.relative_to(kept).as_posix() for p in kept.rglob('*') if p.is_file()
  )
  assert found == ['app/kept/a', 'l/og', 'logs/artifacts/z']


STEPS = """
[[steps]]
name = "one"
min_reward = 0.5
[[steps]]
name = "two"
"""
STEP_FILES = {
  'steps/one/instruction.md': 'Make one.',
  'steps/two/instruction.md': 'Make two.',
  'steps/one/tests/test.sh': (
    '[ -f one ]; echo $((1 - $?)) > /logs/verifier/reward.txt'
  ),
  'steps/two/tests/test.sh': (
    '[ -f one ] && [ -f two ]; '
    'echo "{\\"reward\\": $((1 - $?)), \\"more\\": 3}" > '
    '/logs/verifier/reward.json'
  ),
}


def test_steps_follow_each_other_as_long_as_rewards_suffice(play):
  answers, verdict = play(
    ['touch one', FINISH, 'touch two', FINISH], STEP_FILES, STEPS
  )
  assert [a.is_final for a in answers] == [False, False, False, True]
  assert answers[1].text == 'Make two.'
  assert verdict.passed and verdict.num_passed == verdict.num_tests == 2
  assert verdict.detail == 'reward 1; more 1.5'
  answers, verdict = play([FINISH], STEP_FILES, STEPS)
  assert answers[0].is_final and not verdict.passed
  assert verdict.detail == 'reward 0'
  answers, verdict = play(['touch one', FINISH, FINISH], STEP_FILES, STEPS)
  assert not verdict.passed and verdict.num_passed == 1
  assert verdict.detail == 'reward 0.5; more 1.5'
  # A step that was not reached earns nothing.
  test = 'echo 0.4 > /logs/verifier/reward.txt'
  files = {**STEP_FILES, 'steps/one/tests/test.sh': test}
  assert play([FINISH], files, STEPS)[1].detail == 'reward 0.2'
  toml = f'multi_step_reward_strategy = "final"\n{STEPS}'
  _, verdict = play(['touch two', FINISH], STEP_FILES, toml)
  assert not verdict.passed


@pytest.mark.parametrize(
  'test, words',
  [
    ('true', 'neither reward.json nor reward.txt'),
    ('exit 3', 'neither reward.json'),
    ('echo nan > /logs/verifier/reward.txt', 'no number'),
    ('ln -s /etc/passwd /logs/verifier/reward.txt', 'neither'),
    ('mkfifo /logs/verifier/reward.json', 'neither'),
    (
      'head -c 2000000 /dev/zero > /logs/verifier/reward.json',
      'cannot be read',
    ),
    ('rm -r /work/logs', 'no folder'),
    ('kill -9 $$', 'SIGKILL|neither'),
  ],
)
def test_a_verifier_without_rewards_pays_nothing(play, test, words):
  _, verdict = play([FINISH], {'tests/test.sh': test})
  assert not verdict.passed and verdict.status == records.GRADED
  assert re.search(words, verdict.detail), verdict.detail


def test_a_reward_that_is_not_whole_needs_its_own_threshold(play):
  files = {'tests/test.sh': 'echo 0.6 > /logs/verifier/reward.txt'}
  assert not play([FINISH], files)[1].passed
  assert play([FINISH], files, pass_reward=0.5)[1].passed


def test_large_files_and_many_links_do_not_break_the_episode(play):
  attack = (
    'for i in $(seq 300); do ln -s $i l$i; done; '
    'echo 42 > answer.txt; '
    "touch $'line\\nfeed' \"$(printf 'a\\377b')\" -- '-n'"
  )
  _, verdict = play([attack, FINISH])
  assert verdict.passed, verdict.detail
  # Who leaves no room for the tests has not passed them.
  _, verdict = play([attack, 'head -c 17000000 /dev/zero > big', FINISH])
  assert verdict.status == records.GRADED and not verdict.passed
