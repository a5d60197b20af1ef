"""Scripts play as written, and the right solution passes through the tools."""

import os

import numpy as np
import pytest

from composer_jax.agent import episode, summarize
from composer_jax.core import turns as turns_lib
from composer_jax.sandbox import base
from composer_jax.sandbox import open as open_lib
from composer_jax.tasks.repository import (
  environment as repository_tools,
)
from composer_jax.tasks.repository import (
  schemas,
  scripts,
  task_set,
)
from composer_jax.text import tokenizer as tokenizer_lib
from tests.tasks import small_package

# A folder of `experiments.make_tasks`, whose tasks the slow test solves.
TASK_SET = 'COMPOSER_TASK_SET'
NUM_TASKS = 24
OPTIONS = episode.EpisodeOptions(
  max_tokens=400_000,
  max_turns=200,
  max_call_tokens=200_000,
  max_sampled_tokens=100_000,
)


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train(small_package.FILES.values(), 500)


def _environment(task, sandbox, **options):
  made = repository_tools.RepositoryOptions(**options)
  return repository_tools.RepositoryEnvironment(task, sandbox, made)


def _play(task, sandbox, policy, tokenizer, summary=summarize.OFF, **options):
  return episode.run(
    _environment(task, sandbox, **options),
    policy,
    tokenizer,
    OPTIONS,
    group=0,
    member=0,
    seed=0,
    summary=summary,
  )


@pytest.mark.parametrize('tier', task_set.TIERS)
@pytest.mark.parametrize('means', ['edit', 'write'])
def test_the_gold_calls_restore_what_was_there(larder_sandbox, tier, means):
  (task,) = (t for t in small_package.tasks() if t.tier == tier)
  tools = ('list', 'read', 'search', 'todo', means, 'finish')
  if (tier, means) == ('file', 'edit'):
    with pytest.raises(ValueError, match='needs the tool "write"'):
      list(scripts.gold_calls(task, tools))
    return
  environment = _environment(task, larder_sandbox, tools=tools)
  for text in scripts.gold_calls(task, tools):
    result = environment.call(text)
    assert result.outcome == turns_lib.OK
  assert result.is_final and environment.open_todos == 0
  for path, text in task.solution.items():
    assert environment.box.read(path, 1 << 20).decode() == text
  environment.close()


def test_the_gold_policy_passes_through_an_episode(larder_sandbox, tokenizer):
  (task,) = (t for t in small_package.tasks() if t.tier == 'symbol')
  policy = scripts.ScriptedCalls(tokenizer, scripts.gold_calls(task))
  rollout = _play(task, larder_sandbox, policy, tokenizer)
  assert rollout.verdict.passed and rollout.flags == ()
  assert rollout.num_invalid == 0
  calls = [t['text'] for t in episode.turns(rollout, tokenizer)]
  assert calls[1::2] == list(scripts.gold_calls(task))
  assert {*rollout.tools, 'write'} == set(schemas.TOOLS)
  assert [t.outcome for t in rollout.turns].count(turns_lib.FAILED) == 1


def test_a_script_goes_on_after_a_summary(larder_sandbox, tokenizer):
  task = small_package.tasks()[0]
  script = [
    '{"tool": "read", "arguments": {"path": "larder/shelf.py"}}',
    '{"tool": "list"}',
    '{"tool": "finish"}',
  ]
  policy = scripts.ScriptedCalls(tokenizer, script, summary='All is well.')
  environment = _environment(
    task, larder_sandbox, tools=('read', 'list', 'finish')
  )
  size = len(tokenizer.encode(environment.prompt))
  rollout = episode.run(
    environment,
    policy,
    tokenizer,
    episode.EpisodeOptions(max_tokens=9000, max_call_tokens=60),
    group=0,
    member=0,
    seed=0,
    summary=summarize.SummaryOptions(trigger=size + 330, max_tokens=40),
  )
  assert len(rollout.trajectories) > 1
  assert rollout.tools == ('read', 'list', 'finish')
  written = [
    tokenizer.decode(
      rollout.trajectories[t.trajectory].tokens_T[t.start : t.stop - 1]
    )
    for t in rollout.turns
    if t.outcome == turns_lib.SUMMARY
  ]
  assert written and set(written) == {'All is well.'}


def test_a_script_that_is_over_says_so(larder_sandbox, tokenizer):
  task = small_package.tasks()[0]
  policy = scripts.ScriptedCalls(tokenizer, ['no call'])
  with pytest.raises(ValueError, match='has no more calls'):
    _play(task, larder_sandbox, policy, tokenizer)


def test_a_solution_needs_a_tool_that_changes_files():
  with pytest.raises(ValueError, match='needs the tool "write"'):
    list(scripts.gold_calls(small_package.tasks()[0], ('read', 'finish')))


@pytest.mark.slow
def test_the_gold_policy_solves_real_tasks_through_the_tools(larder, tokenizer):
  folder = os.environ.get(TASK_SET)
  tasks = task_set.load(folder) if folder else larder
  limits = base.Limits(
    wall_s=120.0,
    cpu_s=100.0,
    memory_bytes=2 << 30,
    processes=64,
    file_bytes=64 << 20,
    output_bytes=8 << 20,
  )
  chosen = _spread(tasks.tasks, NUM_TASKS)
  sandbox = open_lib.open_sandbox(
    'auto', limits, images=tasks.root, packages=('pytest',)
  )
  try:
    for task in chosen:
      policy = scripts.ScriptedCalls(tokenizer, scripts.gold_calls(task))
      rollout = _play(task, sandbox, policy, tokenizer)
      print(task.task_id, rollout.verdict.detail, rollout.num_turns)
      assert rollout.verdict.passed, (task.task_id, rollout.verdict)
      assert rollout.flags == (), (task.task_id, rollout.flags)
      assert rollout.num_invalid == 0
  finally:
    sandbox.close()
  assert len(chosen) == min(NUM_TASKS, len(tasks.tasks))


def _spread(tasks, count):
  """Chooses tasks from as many packages and tiers as possible."""
  draw = np.random.default_rng(0)
  order = [tasks[i] for i in draw.permutation(len(tasks))]
  kinds: dict[tuple[str, str], int] = {}
  ranked = []
  for task in order:
    kind = task.package, task.tier
    kinds[kind] = kinds.get(kind, 0) + 1
    ranked.append((kinds[kind], len(ranked), task))
  return [task for _, _, task in sorted(ranked, key=lambda r: r[:2])[:count]]
