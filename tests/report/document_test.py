"""The report shows whatever a workdir holds and runs nothing of it."""

import html.parser
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree

import numpy as np
import pytest

from composer_jax.core import files
from composer_jax.report import document, figures, run_data
from composer_jax.telemetry import intervals, machine, writer
from tests import programs

INJECTION = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


class Tags(html.parser.HTMLParser):
  """Collects the tags that a browser would see, and the text between them."""

  VOID = ('meta', 'img', 'br')

  def __init__(self, text: str):
    super().__init__()
    self.tags: list[tuple[str, dict]] = []
    self.words: list[str] = []
    self.open: list[str] = []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.words.append(data)

  @property
  def text(self) -> str:
    return ' '.join(' '.join(self.words).split())


def pictures_of(page: str) -> list[str]:
  return re.findall(r'(?s)<svg .*?</svg>', page)


def titles_of(page: str) -> set[str | None]:
  return {a.get('aria-label') for tag, a in Tags(page).tags if tag == 'svg'}


def write_evaluation(out, step, name, passed, episodes, **more):
  low, high = intervals.wilson(passed, episodes)
  out.write(
    'eval',
    step,
    name=name,
    pass_rate=passed / episodes,
    pass_low=low,
    pass_high=high,
    episodes=episodes,
    passed=passed,
    **{'unfinished_rate': 0.05, 'infrastructure': 2} | more,
  )


def episode(step, *, passed, status='graded', text='read stats.py', **more):
  return more | {
    'step': step,
    'task_id': f'task-{step}',
    'reward': float(passed),
    'verdict': {
      'passed': passed,
      'num_passed': 4 if passed else 1,
      'num_tests': 4,
      'status': status,
      'sandbox_level': 'unshare',
      'detail': text,
    },
    'turns': [
      {'role': 'user', 'text': 'write total'},
      {'role': 'call', 'text': text},
      {'role': 'tool', 'text': text},
    ],
  }


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A small workdir with every file, whose texts attack the page."""
  folder = tmp_path_factory.mktemp('made_up_run')
  with writer.Writer(folder, tensorboard=False) as out:
    for step in range(1, 12):
      out.write(
        'cpt',
        step,
        loss=5.0 / step,
        heldout_loss=6.0 / step,
        tokens_per_s=1000.0,
        mfu=0.25,
        expert_load=[[1, 3], [2, 2]],
      )
      out.write(
        'rl',
        step,
        reward=step / 20 if step != 5 else float('nan'),
        pass_rate=step / 20,
        entropy=0.5,
        mismatch_kl=1e-7,
        mismatch_kl_no_replay=1e-4,
        sandbox_ms=12.0,
        passed=step,
        failed=11 - step,
        unfinished=4,
        infrastructure=step % 2,
      )
      out.write(
        'delta',
        step,
        target_id='a' * 64,
        kind='delta' if step % 2 else INJECTION,
        bytes=1000,
        full_bytes=50_000,
        changed=0.02,
      )
    write_evaluation(out, 0, 'sft', 80, 400)
    write_evaluation(out, 11, 'rl', 240, 400)
    write_evaluation(out, 12, INJECTION, 1, 4)
  rows = [
    episode(1, passed=True, text=INJECTION),
    episode(2, passed=False),
    episode(3, passed=False, status='unfinished'),
    episode(4, passed=False, status=INJECTION),
    episode(0, passed=True, stage='sft'),
  ]
  rows[-1]['verdict']['sandbox_level'] = 'trusted'
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  (folder / 'episodes.jsonl').write_text(text + '{"torn')
  files.write_json(
    folder / 'corpus' / 'manifest.json',
    {
      'documents': [
        {
          'package': INJECTION,
          'split': 'train',
          'licence': 'MIT',
          'num_bytes': 1234,
        }
      ],
      'dropped': [{'reason': 'near duplicate'}, {'reason': 'minified'}],
    },
  )
  files.write_json(
    folder / 'config.json', {'rl': {'steps': 11, 'x': INJECTION}}
  )
  files.write_json(
    folder / 'run.json',
    {'machine': machine.describe(), 'sandbox_level': 'unshare'},
  )
  files.write_json(
    folder / 'stages.json',
    {'cpt': 170.0, 'rl': 290.0, 'sft': 60, 'eval_rl': 31.0, 'corpus': 9.6},
  )
  return folder


@pytest.fixture(scope='module')
def whole(workdir) -> str:
  path = document.write_report(workdir)
  assert path == workdir / 'report.html'
  return path.read_text()


def test_nothing_written_by_a_policy_becomes_markup(whole):
  tags = Tags(whole)
  assert tags.open == []
  assert 'script' not in {tag for tag, _ in tags.tags}
  for _, attributes in tags.tags:
    assert not [name for name in attributes if name.startswith('on')]
  # It is there to be read: as a turn, a verdict, a config value, a package.
  assert tags.text.count(INJECTION) >= 6


def test_the_page_is_self_contained_and_forbids_scripts(whole):
  tags = Tags(whole)
  for _, attributes in tags.tags:
    for name in ('src', 'href', 'xlink:href'):
      source = attributes.get(name, '#')
      # Parts of this page, and the pixels of a heat map.
      assert source.startswith(('#', 'data:image/png;base64,')), source
  policy = [
    a for _, a in tags.tags if 'content-security-policy' in str(a).lower()
  ]
  assert "default-src 'none'" in policy[0]['content']
  assert 'script-src' not in policy[0]['content']


def test_the_page_shows_every_part_of_a_whole_run(whole):
  text = Tags(whole).text
  for words in (
    '20.0 %',
    '60.0 %',
    '95 % interval 16.4 to 24.2 %',
    '+40.0 points',
    'Sandbox: unshare',
    'near duplicate',
    'rl.steps',
    'task-1',
    'numpy',
  ):
    assert words in text, words
  assert {'Continued pretraining: loss', 'Reward', 'Entropy'} <= titles_of(
    whole
  )
  # SFT and a few metrics are not there.
  assert 'Supervised fine-tuning: loss: not yet.' in text
  assert 'Staleness: not yet.' in text


def test_figures_are_valid_svg_and_their_ids_are_unique(whole):
  pictures = pictures_of(whole)
  assert len(pictures) == 11
  for picture in pictures:
    tree = xml.etree.ElementTree.fromstring(picture)
    assert tree.tag.endswith('svg')
  ids = re.findall(r' id="(.*?)"', whole)
  assert len(ids) == len(set(ids)) > 20
  # What a drawing refers to is in the same drawing.
  for picture in pictures:
    for name in re.findall(r'(?:href="|url\()#(\w+)', picture):
      assert f'id="{name}"' in picture


def test_an_empty_workdir_has_a_report(tmp_path):
  text = Tags(document.write_report(tmp_path).read_text()).text
  for part in ('Reward', 'Episodes', 'Manifest', 'Wall time', 'Configuration'):
    assert f'{part}: not yet.' in text


def test_each_axis_is_a_line_and_the_first_alone_a_card(tmp_path):
  with writer.Writer(tmp_path, tensorboard=False) as out:
    for name, axis, passed in (
      ('sft', 'unseen_compositions', 100),
      ('sft_unseen_names', 'unseen_names', 37),
      ('rl_unseen_names', 'unseen_names', 77),
    ):
      more = {'axis': axis, 'first_edit_rate': 0.125}
      write_evaluation(out, 0, name, passed, 200, **more)
  page = document.write_report(tmp_path).read_text()
  lines = rows_of(page, 'By what of the tasks training never saw')
  low, high = intervals.difference((37, 200), (77, 200))
  change, shares = [f'{100 * low:+.1f} to {100 * high:+.1f}'], ['12.5', '5.0']
  assert lines == [
    ['unseen_compositions', 'sft', '50.0', '43.1 to 56.9', *('', ''), *shares],
    ['unseen_names', 'sft', '18.5', '13.7 to 24.5', *('', ''), *shares],
    ['unseen_names', 'rl', '38.5', '32.0 to 45.4', '+20.0', *change, *shares],
  ]
  assert page.count('class="card"') == 2  # Before and after.
  assert page.count('First edit right in 12.5 %') == 1


def test_a_policy_that_leaves_too_much_unfinished_is_flagged(tmp_path):
  for share, count in ((0.05, 0), (0.0501, 1), (0.28, 1)):
    workdir = tmp_path / str(share)
    with writer.Writer(workdir, tensorboard=False) as out:
      axis = 'unseen_names'
      write_evaluation(out, 0, 'sft', 1, 9, axis='any', unfinished_rate=0.0)
      write_evaluation(
        out, 9, 'rl_unseen_names', 1, 9, axis=axis, unfinished_rate=share
      )
      write_evaluation(out, 9, 'rl', 1, 9, axis='any', unfinished_rate=share)
    page = document.write_report(workdir).read_text()
    text = Tags(page).text
    assert text.count('unfinished: too many') == count
    assert text.count('rewards.unfinished_penalty') == count
    assert 'demonstrations.cut_short' not in text
    # Both axes of the table.
    chips = re.findall(r'number"><span class="chip warn">(.*?)<', page)
    assert chips == [f'{100 * share:.1f}'] * 2 * count


def test_an_episode_that_a_monitor_flagged_did_not_pass(tmp_path):
  row = episode(1, passed=True, stage='rl', flags=['reads_cache'])
  (tmp_path / 'episodes.jsonl').write_text(json.dumps(row) + '\n')
  page = document.write_report(tmp_path).read_text()
  text = Tags(page).text
  assert 'reads_cache' in text and 'Passed None recorded.' in text


def test_no_workdir_is_an_error_that_names_it(tmp_path):
  with pytest.raises(ValueError, match=r'nowhere is not a directory'):
    document.write_report(tmp_path / 'nowhere')


def test_damaged_files_are_named_in_the_report(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"stage": "cpt"}\nhello\n{}\n')
  (tmp_path / 'config.json').write_text('{')
  (tmp_path / 'run.json').write_text('[]')
  (tmp_path / 'stages.json').write_text('{"cpt": "long", "rl": 7}')
  (tmp_path / 'episodes.jsonl').write_text('{"verdict": 3, "turns": "x"}\n7\n')
  text = Tags(document.write_report(tmp_path).read_text()).text
  assert 'metrics.jsonl, line 2 is not JSON' in text
  assert 'config.json is not valid JSON' in text
  assert 'run.json holds a list, not an object.' in text
  assert 'not judged' in text


def test_text_that_no_file_can_hold_is_replaced(tmp_path):
  odd = 'half \ud800 a pair'
  verdict = {'status': 'graded', 'passed': False, 'detail': odd}
  verdict |= {'num_passed': 0, 'num_tests': 1, 'sandbox_level': odd}
  turn = {'kind': 'tool', 'tool': odd, 'text': odd, 'outcome': 'ok'}
  episode = {'stage': 'rl', 'step': 1, 'task_id': odd, 'reward': 0.0}
  episode |= {'flags': [odd], 'verdict': verdict, 'turns': [turn]}
  received = {'stage': 'received', 'step': 1, 'time': 0.0, 'route': [odd]}
  with writer.Writer(tmp_path, tensorboard=False) as out:
    out.write('rl', 1, reward=0.5, flag_kinds=[[odd, 1]], scores=[[odd, 0.5]])
    out.write('fleet', 1, workers=1, fates=[['trained', odd, 1]], lost=[])
  for name, row in (
    ('episodes.jsonl', episode),
    (writer.RECEIVED, received | {'worker': odd}),
  ):
    (tmp_path / name).write_text(json.dumps(row) + '\n')
  text = document.write_report(tmp_path).read_text(encoding='utf-8')
  assert text.count('half ? a pair') > 3


def rows_of(text, heading):
  """Returns the cells of the first table after a heading, row by row."""
  table = text[text.index(f'>{heading}<') :]
  table = table[: table.index('</table>')]
  rows = re.findall(r'(?s)<tr.*?>(.*?)</tr>', table)
  cells = [re.findall(r'<td.*?>(.*?)</td>', row) for row in rows]
  return [row for row in cells if row]


def test_wall_time_is_what_was_measured_in_order_and_adds_up(whole):
  assert rows_of(whole, 'Wall time') == [
    ['Corpus', '10s'],
    ['Continued pretraining', '2m50s'],
    ['Supervised fine-tuning', '1m00s'],
    ['Reinforcement learning', '4m50s'],
    ['Evaluation after RL', '31s'],
    ['The three trainings', '8m40s'],
    ['Sum', '9m21s'],
  ]
  assert 'Continued pretraining: step 11, 2m50s' in whole


def test_muon_is_shown_where_it_was_used(tmp_path, whole):
  # That run had none of it.
  assert 'Muon' not in whole and 'Largest attention logit' not in whole
  lines = {
    0: dict(
      heldout_loss=6.0,
      muon_matrices=30,
      muon_groups=3,
      muon_flops=2_000_000,
      muon_flops_ideal=2.5e6,
      muon_bytes=12_000,
    ),
    1: dict(loss=5.0, max_logit=7.0),
    2: dict(loss=4.0, max_logit=6.0),
  }
  with writer.Writer(tmp_path, tensorboard=False) as out:
    for step, metrics in lines.items():
      out.write('sft', step, **metrics)
  text = document.write_report(tmp_path).read_text()
  assert rows_of(text, 'Muon, by its plan of a step') == [
    ['Supervised fine-tuning', '30', '3', '2M', '2.5M', '12k']
  ]
  assert 'Largest attention logit' in titles_of(text)


def test_demonstrations_are_shown_apart(whole):
  assert 'trusted' not in whole
  assert 'Sandbox: unshare<' in whole
  scripted = whole[whole.index('>Scripted, for SFT to imitate<') :]
  assert 'task-0' in scripted and 'task-1' not in scripted
  assert whole.count('task-0') == 1


def test_a_killed_run_has_a_report_by_command(tmp_path):
  program = (
    'import itertools, sys, time\n'
    'from composer_jax.telemetry import stage_times, writer\n'
    'times = stage_times.StageTimes(sys.argv[1])\n'
    'out = writer.Writer(sys.argv[1], tensorboard=False)\n'
    'with times.stage("rl"):\n'
    '  out.write("rl", 3, reward=1.0)\n'
    '  print("go", flush=True)\n'
    '  time.sleep(60)\n'
  )
  with subprocess.Popen(
    [sys.executable, '-c', program, str(tmp_path)], stdout=subprocess.PIPE
  ) as process:
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()

  done = programs.run_fresh('experiments.report', f'--workdir={tmp_path}')
  assert done.returncode == 0, done.stderr
  assert done.stdout == f'Report: {tmp_path / "report.html"}\n'
  assert (
    'Reinforcement learning: step 3, 0s'
    in (tmp_path / 'report.html').read_text()
  )
  nowhere = tmp_path / 'nowhere'
  done = programs.run('experiments.report', f'--workdir={nowhere}')
  assert done.returncode == 1
  assert done.stderr.startswith('error: ') and 'nowhere is not a' in done.stderr


def test_series_keep_gaps_and_evaluations_the_latest(workdir):
  run = run_data.load(workdir)
  steps, values = run.series('rl', 'reward')
  assert steps == list(range(1, 12))
  assert np.isnan(values[4])
  assert np.isfinite(values).sum() == 10
  assert list(run.evaluations()) == ['sft', 'rl', INJECTION]


def test_equal_figures_are_equal_text():
  line = figures.Curve(label='', steps=[1, 2, 3], values=[0.0, -1.0, 5.0])
  texts = {figures.curves('title', [line], is_log=True) for _ in range(2)}
  assert len(texts) == 1


def test_curves_that_lie_on_each_other_are_all_seen():
  lines = [
    figures.Curve(label=f'curve {n}', steps=range(20), values=np.ones(20))
    for n in range(len(figures.COLORS))
  ]
  svg = figures.curves('title', lines).svg
  for over, color in enumerate(figures.COLORS):
    (curve,) = re.findall(rf'clip-path.*?style="(.*?stroke: {color}.*?)"', svg)
    # The lowest is whole; through the gaps of each other one it is seen.
    assert ('stroke-dasharray' in curve) == (over > 0)
  styles = re.findall(r'clip-path.*?stroke-dasharray: (.*?);', svg)
  assert len(set(styles)) == len(lines) - 1


def test_tooltips_tell_what_was_measured_at_a_step_or_nearest_to_it():
  lines = [
    figures.Curve(label='a<b', steps=range(1000), values=np.arange(1000) / 7),
    figures.Curve(
      label='c', steps=[0, 990], values=[0.123456, math.nan], has_marks=True
    ),
  ]
  svg = figures.curves('title', lines).svg
  texts = re.findall(r'(?s)<title>(.*?)</title>', svg)
  assert 50 <= len(texts) <= 62
  assert texts[0] == 'step 0\na&lt;b: 0\nc: 0.1235'
  assert texts[-1] == 'step 999\na&lt;b: 142.7\nc: 0.1235 (step 0)'
  strips = re.findall(r'<rect x="([\d.]+)" width="(.*?)"', svg)
  ends = [float(x) + float(width) for x, width in strips]
  starts = [float(x) for x, _ in strips]
  # No gap between them, where a pointer would find nothing.
  np.testing.assert_allclose(ends[:-1], starts[1:], atol=0.11)


def make_run(folder, *, rate, seed):
  with writer.Writer(folder, tensorboard=False) as out:
    for step in range(3):
      out.write('rl', step, reward=rate)
    write_evaluation(out, 0, 'rl', int(100 * rate), 100, axis='unseen_names')
  files.write_json(folder / 'config.json', {'seed': seed, 'rl': {'steps': 3}})
  return folder


def test_runs_are_compared_on_one_page(tmp_path):
  first = make_run(tmp_path / 'a', rate=0.5, seed=0)
  second = make_run(tmp_path / '_$x$ <script>', rate=0.75, seed=1)
  # A comma in a name separates runs, so the command is given another one.
  page = document.write_comparison(first, [second]).read_text()
  assert not (first / 'report.html').exists()
  tags = Tags(page)
  assert tags.open == [] and 'script' not in {tag for tag, _ in tags.tags}
  (reward,) = (p for p in pictures_of(page) if 'aria-label="Reward"' in p)
  for name in ('a', '_$x$ &lt;script&gt;'):
    assert re.search(rf'<text [^>]*>{re.escape(name)}</text>', reward)
    assert f'{name}: 0.' in reward
  assert [row[:4] for row in rows_of(page, HEADING)] == [
    ['unseen_names', 'rl', 'a', '50.0'],
    ['unseen_names', 'rl', '_$x$ &lt;script&gt;', '75.0'],
  ]
  differences = rows_of(page, 'Differences of the configurations')
  assert differences == [['seed', '0', '1']]


HEADING = 'Held-out tasks, by what of them training never saw'


def test_what_cannot_be_compared_is_refused_before_anything_is_written(
  tmp_path,
):
  first = make_run(tmp_path / 'a', rate=0.5, seed=0)
  other = make_run(tmp_path / 'deeper' / 'a', rate=0.5, seed=0)
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'damaged').mkdir()
  (tmp_path / 'damaged' / 'metrics.jsonl').write_text('hello\n')
  for others, message in (
    ([tmp_path / 'empty'], 'empty has no lines in metrics.jsonl .* of runs.$'),
    ([tmp_path / 'damaged'], 'no lines .* line 1 is not JSON'),
    ([tmp_path / 'nowhere'], 'nowhere is not a directory'),
    ([other, tmp_path / 'a'], 'Each run must be named once'),
    ([other] * 6, 'At most 6 runs can be compared; got 7'),
  ):
    with pytest.raises(ValueError, match=message):
      document.write_comparison(first, others)
  with pytest.raises(ValueError, match='empty has no lines'):
    document.write_comparison(tmp_path / 'empty', [first])
  assert not list(tmp_path.rglob('*.html'))
  # Two runs of one name are told apart by their paths.
  done = programs.run(
    'experiments.report', f'--workdir={first}', f'--compare={other}'
  )
  assert done.stdout == f'Comparison: {first / "comparison.html"}\n', (
    done.stderr
  )
  cells = rows_of((first / 'comparison.html').read_text(), HEADING)
  assert [row[2] for row in cells] == [str(first), str(other)]
