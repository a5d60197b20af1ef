"""Deletion tasks, exported, are Harbor tasks whose gold passes."""

import pathlib
import tomllib

import pytest

from composer_jax import wiring
from composer_jax.agent import episode
from composer_jax.tasks.harbor import export, manifest
from composer_jax.text import tokenizer as tokenizers
from configs.composer import deletion
from tests.tasks.harbor import conftest


@pytest.fixture(scope='module')
def exported(larder, tmp_path_factory):
  out = tmp_path_factory.mktemp('harbor')
  export.export(larder, larder.tasks, out)
  return out


@pytest.fixture(scope='module')
def family(exported):
  config = deletion.get_config()
  config.tasks.family = 'harbor'
  config.tasks.folder = str(exported)
  config.tasks.repository.tools = ('read', 'write', 'run', 'finish')
  config.tasks.harbor = {'bases': conftest.BASES}
  spec = wiring.spec_of(config.to_dict())
  return wiring.family_of(spec)


def test_directories_say_what_the_tasks_are(larder, exported):
  for task in larder.tasks:
    folder = exported / export._name(task)
    fields = tomllib.loads((folder / 'task.toml').read_text())
    assert fields['metadata']['task_id'] == task.task_id
    read = manifest.read(folder, conftest.BASES)
    (step,) = read.steps
    assert step.instruction.startswith(task.prompt[:40])
    assert step.is_separate and read.environment.workdir == ('app',)
    assert 'pytest' in read.packages
    # The agent gets the view without the feature, and no hidden test.
    view = task.view()
    for path, data in read.environment.files.items():
      name = path.removeprefix('app/')
      assert name in view and view[name] == data or name not in view
    assert not {f'app/{p}' for p, d in view.items() if d is None} & set(
      read.environment.files
    )
    for path, text in task.solution.items():
      assert step.solution[f'files/{path}'] == text.encode()


@pytest.mark.parametrize(
  'count', [1, pytest.param(None, marks=pytest.mark.slow)]
)
def test_gold_passes_and_nothing_fails(family, exported, harbor_sandbox, count):
  tokenizer = tokenizers.Tokenizer.train(family.texts(), 400)
  limits = episode.EpisodeOptions(
    max_tokens=1 << 22,
    max_call_tokens=1 << 20,
    max_sampled_tokens=1 << 22,
    max_turns=8,
  )
  tasks = [manifest.read(p, conftest.BASES) for p in sorted(exported.iterdir())]
  assert len(tasks) > 2
  for index, task in enumerate(tasks[:count]):
    played = [
      episode.run(
        family.environment(task, harbor_sandbox),
        policy,
        tokenizer,
        limits,
        group=index,
        member=0,
        seed=0,
      ).verdict
      for policy in (family.gold(task, tokenizer), _Nothing(family, tokenizer))
    ]
    assert [v.passed for v in played] == [True, False], played
    assert 'feature 1; guards 1; reward 1' in played[0].detail
    assert 'feature 0' in played[1].detail


def _Nothing(family, tokenizer):
  from composer_jax.tasks.repository import scripts

  return scripts.ScriptedCalls(tokenizer, [family.finish_call])


def test_a_family_of_a_folder(family, exported):
  assert family.requirements() == ['pytest']
  assert set(family.root_folders()) == {'app', 'logs', 'solution', 'tests'}
  train = [t.task_id for t in family._of_split('train')]
  held_out = [t.task_id for t in family._of_split('held_out')]
  names = [p.name for p in exported.iterdir()]
  assert not set(train) & set(held_out)
  assert len(train) + len(held_out) == len(names)
  identity = family.identity()
  (pathlib.Path(exported) / names[0] / 'instruction.md').write_text('other')
  assert family.identity() != identity
