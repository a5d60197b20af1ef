"""Tasks of each family, their splits, and choices made during a run."""

import dataclasses
import json
import logging
import types

import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.agent import rewards
from composer_jax.core import records
from composer_jax.pipeline import stages
from composer_jax.rl.hints import distill
from composer_jax.sandbox import base
from composer_jax.tasks import curriculum, judging
from composer_jax.tasks.list_functions import family, runners
from composer_jax.tasks.repository import scripts, task_set
from composer_jax.telemetry import writer as writers
from composer_jax.text import tokenizer as tokenizers
from configs.composer import deletion, tiny
from tests.pipeline import runs
from tests.tasks import small_package


@pytest.fixture(scope='module')
def tokenizer():
  task = family.generate(0, 'train')
  return tokenizers.Tokenizer.train([task.prompt, *task.files.values()], 300)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Five tasks to train on, and two of a package that is held out."""
  root = tmp_path_factory.mktemp('set')
  saved = small_package.task_set(root)
  package = dataclasses.replace(
    saved.packages[small_package.NAME],
    name='cellar',
    held_out=True,
    facts={'requires': ['attrs']},
  )
  kept_back = [
    dataclasses.replace(
      task,
      task_id=f'deletion/cellar/{i}',
      package='cellar',
      held_out=True,
    )
    for i, task in enumerate(saved.tasks[:2])
  ]
  for task in kept_back:
    task_set.save_task(root, task)
  task_set.save_package(root, package)
  return root


def deletion_spec(folder, **changes):
  config = deletion.get_config(f'{folder},smoke')
  config.update_from_flattened_dict(changes)
  return wiring.spec_of(config.to_dict())


def family_of(spec):
  return wiring.systems_of(spec).family


def ids_of(source, count, name='of_group'):
  return [getattr(source, name)(g).task_id for g in range(count)]


def test_demonstrated_trained_and_held_out_tasks_have_nothing_in_common(
  folder, tokenizer
):
  changes = {'rl.steps': 3, 'evaluation.episodes': 2}
  spec = deletion_spec(folder, **changes)
  shown = [t.task_id for t in family_of(spec)._divided()[1]]
  train = ids_of(runs.tasks(spec, tokenizer, split='train', seed=1), 3)
  held_out = ids_of(runs.tasks(spec, tokenizer, split='held_out', seed=1), 2)
  assert len({*shown, *train, *held_out}) == 2 + 3 + 2
  assert sorted(held_out) == ['deletion/cellar/0', 'deletion/cellar/1']
  # The tokenizer learns from the demonstrated tasks' texts alone.
  texts = family_of(spec).texts()
  assert len(texts) == 2 and '"tool": "finish"' in texts[0]


@pytest.mark.parametrize(
  'changes, split, message',
  [
    ({'rl.steps': 4}, 'train', r'3 train tasks .*steps x prompts needs 4'),
    (
      {'evaluation.episodes': 3},
      'held_out',
      r'2 held_out tasks .*evaluation\.episodes needs 3',
    ),
    ({'demonstrations.count': 5}, 'train', r'count \(5\) of the 5 tasks'),
    # 3 of the 5 are of these tiers, and two are demonstrated.
    (
      {'tasks.tiers': ('body', 'symbol', 'class')},
      'train',
      r'has 1 train tasks for this run \(1 before',
    ),
  ],
)
def test_too_few_tasks_are_told_with_what_to_lower(
  folder, tokenizer, changes, split, message
):
  with pytest.raises(ValueError, match=message):
    runs.tasks(deletion_spec(folder, **changes), tokenizer, split=split, seed=1)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'rl.steps': 4}, r'3 train tasks beside the 2 of .*count, .* needs 4'),
    ({'evaluation.episodes': 3}, r'2 held_out tasks, .*episodes needs 3'),
    ({'demonstrations.count': 5}, r'count \(5\) of the 5 tasks'),
  ],
)
def test_too_few_tasks_are_told_before_a_workdir_is_bound(
  folder, tmp_path, changes, message
):
  with pytest.raises(ValueError, match=message):
    with runs.open_run(deletion_spec(folder, **changes), tmp_path):
      pass
  assert not (tmp_path / 'config.json').exists()
  family_of(deletion_spec(folder)).check_files()


def test_prompts_without_room_are_left_out_and_counted(
  folder, tokenizer, caplog
):
  spec = deletion_spec(
    folder,
    **{
      'episode.max_tokens': 500,
      'summary.trigger': 0,
      'sft.seq_len': 512,
      'rl.seq_len': 512,
    },
  )
  with caplog.at_level(logging.WARNING):
    with pytest.raises(ValueError, match=r'0 train tasks .*\(3 before those'):
      runs.tasks(spec, tokenizer, split='train', seed=1)
  assert '3 of 3 train tasks are left out' in caplog.text


def test_a_workdir_is_bound_to_the_tasks_and_not_to_their_folder(
  folder, tmp_path
):
  spec = deletion_spec(folder)
  before = family_of(spec).identity()
  moved = runs.changed(spec, 'tasks', folder=str(tmp_path / 'm'))
  small_package.task_set(tmp_path / 'm')
  other = family_of(moved).identity()
  assert len(before) == len(other) == 64 and before != other
  assert family_of(wiring.spec_of(tiny.get_config().to_dict())).identity() == ''


def test_packages_of_tasks_are_kept_out_of_the_corpus_and_in_the_sandbox(
  folder,
):
  spec = deletion_spec(folder)
  assert family_of(spec).held_out_packages() == ('cellar', small_package.NAME)
  assert family_of(spec).requirements() == ['attrs']


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'sandbox.level': 'static'}, "'static' executes nothing"),
    ({'sandbox.packages': ()}, r"packages must name 'pytest'.*\(\)"),
  ],
)
def test_a_family_that_executes_needs_a_sandbox_that_can(
  folder, changes, message
):
  with pytest.raises(ValueError, match=message):
    deletion_spec(folder, **changes)


def test_deletion_tasks_are_refused_where_nothing_isolates(
  folder, tmp_path, monkeypatch
):
  spec = deletion_spec(folder)

  def refuse(*_, **__):
    raise base.NoSandbox('no sandbox works here (unshare: not here).')

  monkeypatch.setattr(judging.sandboxes, 'open_sandbox', refuse)
  with pytest.raises(ValueError, match='execute code .*unshare: '):
    wiring.systems_of(spec).settle_judge(tmp_path)
  assert not (tmp_path / 'sandbox.json').exists()


# Generated tasks, played by a script.


@pytest.fixture
def spec():
  config = tiny.get_config('smoke')
  config.rl.prompts = 2
  config.rl.max_staleness = 0
  config.curriculum.enabled = True
  return wiring.spec_of(config.to_dict())


class Orders(dict):
  """Orders as the trainer of a run in `workdir` makes them, when asked."""

  def __init__(self, spec, tokenizer, workdir):
    super().__init__()
    with writers.Writer(workdir, tensorboard=False) as writer:
      job = runs.job(spec, workdir, writer)
      vars(job)['tokenizer'] = tokenizer
      self._order, _ = stages.training_orders(job)

  def __missing__(self, group):
    return self.setdefault(group, self._order(group))


def collector(spec, tokenizer, workdir):
  orders = Orders(spec, tokenizer, workdir)
  return runs.collector(
    spec, tokenizer, runners.StaticRunner(), split='train', orders=orders
  )


def play(player, tokenizer, group, member=0, calls=('read nothing', 'finish')):
  return player.play(
    player.task_of_group(group),
    scripts.ScriptedCalls(tokenizer, calls),
    group=group,
    member=member,
    seed=player.seed,
  )


def test_prices_change_between_groups_and_every_sample_names_them(
  spec, tokenizer, tmp_path, capsys
):
  player = collector(spec, tokenizer, tmp_path)
  before = play(player, tokenizer, 0)
  fields = {'version': 1, 'invalid_penalty': 0.4, 'effort_coefficient': 0.0}
  (tmp_path / rewards.FILE).write_text(json.dumps(fields))
  late = play(player, tokenizer, 0, member=1)
  after = play(player, tokenizer, 1)
  assert [r.reward_version for r in (before, late, after)] == [0, 0, 1]
  assert late.reward == before.reward
  assert after.reward_terms == {'success': 0.0, 'invalid': -0.4}
  assert after.reward == -0.4
  assert 'version 1 are in force' in capsys.readouterr().out
  # A restarted trainer has the same prices.
  again = play(collector(spec, tokenizer, tmp_path), tokenizer, 1)
  assert again.reward == after.reward and again.reward_version == 1


def test_hints_are_of_training_and_of_nothing_else(spec, tokenizer, tmp_path):
  hinted = play(collector(spec, tokenizer, tmp_path), tokenizer, 0)
  assert [h.kind for h in hinted.hints] == ['bad_arguments']
  evaluated = runs.collector(
    spec, tokenizer, runners.StaticRunner(), split='unseen_all'
  )
  assert not play(evaluated, tokenizer, 0).hints


@pytest.mark.parametrize('share', [0.0, 0.5, 1.0])
def test_a_share_of_transcripts_carries_loss_on_all_tokens(
  spec, tokenizer, tmp_path, share
):
  chosen = runs.changed(
    spec, 'demonstrations', count=24, context_loss=share, functions=3
  )
  chosen = runs.changed(chosen, 'hints', loss=distill.OFF)
  with writers.Writer(tmp_path, tensorboard=False) as writer:
    opened = runs.job(chosen, tmp_path, writer)
    vars(opened)['tokenizer'] = tokenizer
    learnt, held_out = opened.systems.family.demonstrations(opened)
  # Finished functions come first, without masks, if they fit a row.
  texts = [tokens_T for tokens_T in learnt if isinstance(tokens_T, np.ndarray)]
  learnt = learnt[len(texts) :]
  seq_len = spec.sft.seq_len
  shown = [family.finished_function(i, spec.seed) for i in range(3)]
  assert [tokenizer.decode(t[1:-1]) for t in texts] == [
    text for text in shown if len(tokenizer.encode(text)) + 2 <= seq_len
  ]
  whole = sum(bool(mask_T.all()) for _, mask_T in learnt)
  assert (whole > 0) == (share > 0) and (whole < len(learnt)) == (share < 1)
  # The others, held-out ones among them, have it on calls, and thus on some.
  calls = [m.any() and not m.all() for _, m in (*learnt, *held_out)]
  assert sum(calls) == len(calls) - whole


def test_advice_longer_than_a_row_is_left_out_and_counted(
  spec, tokenizer, tmp_path
):
  """A longer document would end the run, since rows hold documents whole."""
  long = dataclasses.replace(
    spec,
    # Room for every call in the tokens of an untrained tokenizer.
    episode=dataclasses.replace(
      spec.episode, max_tokens=400, max_call_tokens=150
    ),
    sft=dataclasses.replace(spec.sft, seq_len=400),
    rl=dataclasses.replace(spec.rl, seq_len=400),
  )
  long = runs.changed(
    long, 'demonstrations', count=24, wrong_tool=0.3, functions=0
  )
  for words, counted in (('no', 'advised'), ('no ' * 500, 'advice_too_long')):
    spoken = runs.changed(long, 'hints', templates=(('unknown_tool', words),))
    with writers.Writer(tmp_path, tensorboard=False) as writer:
      opened = runs.job(spoken, tmp_path, writer)
      vars(opened)['tokenizer'] = tokenizer
      learnt, _ = opened.systems.family.demonstrations(opened)
    assert max(len(tokens_T) for tokens_T, _ in learnt) <= long.sft.seq_len
    rates = json.loads((tmp_path / 'demonstrations.json').read_text())
    names = ('advised', 'advice_too_long')
    assert [n for n in names if rates[n]] == [counted]


def test_a_curriculum_draws_by_what_the_trainer_put_down(
  spec, tokenizer, tmp_path
):
  seed = spec.seed + stages.RL_SEED
  tasks = runs.tasks(spec, tokenizer, split='train', seed=seed)
  plan = wiring.systems_of(spec).curriculum(tasks, tmp_path, seed)
  player = collector(spec, tokenizer, tmp_path)
  first = [player.task_of_group(g).task_id for g in (0, 1)]
  assert first == [plan.task_of(0), plan.task_of(1)]
  with pytest.raises(ValueError, match=r'000000\.json is missing'):
    player.task_of_group(2)
  plan.record(0, [group_of(player, tokenizer, g) for g in (0, 1)])
  second = [player.task_of_group(g).task_id for g in (2, 3)]
  assert len({*first, *second}) == 4
  # A restarted worker and the trainer draw the same tasks.
  again = collector(spec, tokenizer, tmp_path)
  assert ids_of(again, 4, 'task_of_group') == [*first, *second]
  assert [plan.task_of(g) for g in (2, 3)] == second
  rows = curriculum.Ledger(tmp_path / curriculum.LEDGER).get(0)
  assert [(r.judged, r.passed, r.turns) for r in rows] == [(4, 0, 8)] * 2


def group_of(player, tokenizer, group):
  rollouts = tuple(play(player, tokenizer, group, m) for m in range(4))
  return records.Group(
    group=group, task_id=rollouts[0].task_id, rollouts=rollouts
  )


def test_labels_are_the_kinds_of_the_task_that_is_made():
  for index in range(20):
    task_id, kinds = family.kinds_of(index, 'train', 7)
    task = family.generate(index, 'train', 7)
    assert task.task_id == task_id
    assert family.composition_of(task).kinds == kinds


def test_held_out_tasks_are_played_as_often_as_asked(folder, tokenizer):
  spec = deletion_spec(folder, **{'evaluation.samples': 3})
  counts = {
    split: runs.collector(spec, tokenizer, None, split=split).rollouts_per_group
    for split in ('train', 'held_out')
  }
  assert counts == {'train': spec.rl.rollouts_per_prompt, 'held_out': 3}


def test_practice_needs_the_tools_that_it_shows(folder):
  changes = {'demonstrations.practice': 9}
  with pytest.raises(ValueError, match=r"practice \(9\).*\('body', 'finish'\)"):
    family_of(deletion_spec(folder, **changes)).check()
  changes['tasks.repository.tools'] = ('body', 'finish')
  family_of(deletion_spec(folder, **changes)).check()


def test_a_set_without_held_out_tasks_says_how_to_hold_some_out(tmp_path):
  small_package.task_set(tmp_path)
  with pytest.raises(
    ValueError, match='0 held_out tasks.*--held_out or --only'
  ):
    family_of(deletion_spec(tmp_path)).check_files()


def test_practice_is_of_the_corpus_and_fits_a_window(folder, tokenizer):
  texts = [f'def f{i}():\n  return {i}\n' for i in range(5)]
  texts.append(f'def long():\n  return "{"x" * 9000}"\n')
  rows = [
    np.array([tokenizer.BOS, *tokenizer.encode(t), tokenizer.EOD])
    for t in texts
  ]
  changes = {
    'demonstrations.practice': 9,
    'demonstrations.context_loss': 1.0,
    'tasks.repository.tools': ('body', 'finish'),
    'tasks.repository.lines_around': 2,
  }
  family = family_of(deletion_spec(folder, **changes))
  job = types.SimpleNamespace(
    spec=family._spec, tokenizer=tokenizer, documents=(rows, [])
  )
  windows = family._practice(job)
  assert len(windows) == 5
  shown = {tokenizer.decode(tokens_T) for tokens_T, _ in windows}
  assert len(shown) == 5 and not any('long' in text for text in shown)
  assert all(mask_T.all() for _, mask_T in windows)
