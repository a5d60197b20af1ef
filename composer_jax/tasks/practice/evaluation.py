"""Pass rates on a config's tasks, of scripted policies or of an endpoint.

Nothing is trained and no engine runs: each episode is a thread that talks to
the policy, in the environment of training. A row and a transcript are kept of
each finished episode, so that a killed evaluation resumes. `stages.evaluate`
evaluates the policies of a run.
"""

import collections
import dataclasses
import itertools
import math
import pathlib
import random
import re
import threading
import time
import types
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np

from composer_jax.agent import episode, summarize
from composer_jax.core import checks, files, records, seams
from composer_jax.pipeline import spec as specs
from composer_jax.rl import behaviour, collect
from composer_jax.tasks import scoring
from composer_jax.tasks.practice import conversation, rescoring
from composer_jax.tasks.repository import scripts
from composer_jax.telemetry import append, intervals, progress, writer
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train import workdir as workdirs

EPISODES, SUMMARY = 'episodes.jsonl', 'summary.json'
TRANSCRIPTS = 'transcripts'
SCRIPTED = ('gold', 'null')
POLICIES = (*SCRIPTED, 'chat', 'tokens')
_BROKEN = records.INFRASTRUCTURE
# Fields of `ChatOptions` on which no verdict depends.
_OF_REQUESTS = (
  *('stream', 'requests_per_minute', 'patience_s', 'price_in', 'price_out'),
)
_SCRIPT_BYTES, _SCRIPT_TURNS = 1 << 24, 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
  """The policy and the episodes of an evaluation.

  Attributes:
    policy: 'gold' restores what was deleted, through the tools; 'null' calls
      finish at once; 'chat' asks any endpoint for messages, and 'tokens' this
      project's server for tokens (`serve.chat`, `serve.client`).
    split: 'train' or one of the family's axes; '' for the first axis.
    tasks: number of tasks, the first ones in the order of the seed; 0 for all
      of a folder.
    samples: episodes per task.
    threads: episodes at a time, each with at most one request.
    url: address of the endpoint, up to /v1, or a name of a policy in here.
    model: name by which the endpoint knows the model.
    api_key: key of the endpoint.
    chat: limits and requests of the policy 'chat'.
    tokenizer: file of a run's or an import's tokenizer, in which the config's
      limits are counted, also those of a script; '' for none, as for 'chat'.
  """

  policy: str
  split: str
  tasks: int
  samples: int
  threads: int
  url: str = ''
  model: str = ''
  api_key: str = ''
  chat: conversation.ChatOptions = conversation.ChatOptions()
  tokenizer: str = ''

  def __post_init__(self):
    checks.one_of(self, 'policy', POLICIES)
    checks.at_least(self, 0, 'tasks')
    checks.at_least(self, 1, 'samples', 'threads')
    if (self.policy in ('chat', 'tokens')) != bool(self.url):
      raise ValueError(
        f'--url ({self.url!r}) is needed by the policies chat and tokens, and '
        f'by no other; --policy is {self.policy!r}.'
      )
    if self.policy == 'tokens' and not self.tokenizer:
      raise ValueError(
        '--policy=tokens needs --tokenizer=FILE, the tokenizer.json of the '
        'served run: the endpoint takes and gives its ids.'
      )
    if self.policy != 'chat' and self.chat != (usual := type(self.chat)()):
      fields = vars(self.chat).items()
      raise ValueError(
        f'{", ".join(f"--{k}" for k, v in fields if v != getattr(usual, k))} '
        f'can be set for --policy=chat alone; --policy is {self.policy!r}.'
      )


# (task, its index, sample) -> row and transcript of an episode.
_Play = Callable[[Any, int, int], tuple[dict[str, Any], Any]]


def limits_of(
  spec: specs.Spec, options: EvaluationOptions
) -> tuple[episode.EpisodeOptions, summarize.SummaryOptions]:
  """Returns the config's limits; a script without tokenizer has wide ones."""
  if options.tokenizer or options.policy not in SCRIPTED:
    return spec.episode, spec.summary
  names = ('max_tokens', 'max_call_tokens', 'max_sampled_tokens')
  longer = dict.fromkeys(names, _SCRIPT_BYTES)
  limits = dataclasses.replace(spec.episode, max_turns=_SCRIPT_TURNS, **longer)
  return limits, summarize.OFF


def _player(
  spec: specs.Spec,
  systems: seams.Systems,
  runner: seams.Runner,
  options: EvaluationOptions,
  remote: Callable[[], Any] | None,
) -> _Play:
  """Returns a function that plays one episode."""
  family = systems.family
  make_environment = lambda task: family.environment(task, runner)
  shared: Any = remote() if options.url and remote else None

  def converse(task: Any, group: int, member: int) -> tuple[Any, Any]:
    env = make_environment(task)
    talk = conversation.Conversation(env, options.chat, member)
    talk.play(
      shared,
      family.functions() if options.chat.native_tools else (),
      spec.rewards,
      seed=random.Random(f'{spec.seed}/{group}/{member}').getrandbits(30),
      temperature=spec.episode.temperature,
      max_tokens=options.chat.max_answer_tokens,
    )
    return row_of(task, talk) | talk.usage(), talk.transcript

  if options.policy == 'chat':
    return converse
  if options.tokenizer:
    tokenizer = systems.load_tokenizer(pathlib.Path(options.tokenizer))
  else:
    size = tokenizers.MIN_VOCAB_SIZE
    tokenizer = tokenizers.Tokenizer.train(['bytes'], size)
  limits, summary = limits_of(spec, options)
  sample = collect.episode_player(
    tokenizer,
    make_environment,
    limits,
    reward_of_group=lambda group: spec.rewards,
    summary=summary,
  )

  def play(task: Any, group: int, member: int) -> tuple[Any, Any]:
    policy = shared
    if options.policy == 'gold':
      policy = family.gold(task, tokenizer)
    elif options.policy == 'null':
      policy = scripts.ScriptedCalls(tokenizer, [family.finish_call])
    try:
      rollout = sample(task, policy, group=group, member=member, seed=spec.seed)
    except conversation.EndpointError as error:
      broken = types.SimpleNamespace(
        task_id=task.task_id,
        member=member,
        verdict=records.broken(0, '', str(error)),
        flags=(),
      )
      return row_of(task, broken) | {'ended': 'endpoint'}, ()
    of_windows = {
      'windows': len(rollout.trajectories),
      'turns': [[t.tool, t.outcome] for t in rollout.turns],
      'tokens_out': rollout.num_sampled,
    }
    return row_of(task, rollout) | of_windows, episode.turns(rollout, tokenizer)

  return play


def evaluate(
  spec: specs.Spec,
  systems: seams.Systems,
  options: EvaluationOptions,
  out: pathlib.Path,
  remote: Callable[[], Any] | None = None,
) -> dict[str, Any]:
  """Plays the missing episodes and summarises all of them; blocks.

  Args:
    out: folder of the results; bound to this evaluation by a workdir's claim.
    remote: maker of the policies 'chat' (a `conversation.Ask`) and 'tokens'.

  Returns:
    The contents of `summary.json`, see `summarise`.

  Raises:
    ValueError: `out` holds another evaluation, or there are too few tasks.
  """
  family = systems.family
  options = dataclasses.replace(options, split=options.split or family.axes[0])
  if options.split not in ('train', *family.axes):
    raise ValueError(
      f'--split must be one of {("train", *family.axes)} for this task family; '
      f'got {options.split!r}.'
    )
  if options.chat.native_tools and not family.functions():
    raise ValueError(
      '--native_tools needs tools that take JSON, and those of family '
      f'{spec.systems["tasks"].family!r} take text: leave it out.'
    )
  tasks = family.listed(options.split, options.tasks)
  limits, summary_options = limits_of(spec, options)
  fields: dict[str, Any] = dataclasses.asdict(options)
  # Results depend neither on speed nor on a secret.
  del fields['threads'], fields['api_key']
  fields['chat'] = {
    k: v for k, v in fields['chat'].items() if k not in _OF_REQUESTS
  }
  # An evaluation may be scored by another rubric later.
  tasks_options = dataclasses.replace(
    spec.systems['tasks'], rubric=scoring.RubricOptions()
  )
  claimed = {
    'evaluation': fields,
    'tasks': family.identity() or dataclasses.asdict(tasks_options),
    'episode': dataclasses.asdict(limits),
    'rewards': dataclasses.asdict(
      dataclasses.replace(spec.rewards, judged_reward=0.0)
    ),
    'summary': dataclasses.asdict(summary_options),
    'sandbox': dataclasses.asdict(spec.systems['sandbox']),
    'seed': spec.seed,
  }
  scorer = spec.systems['tasks'].rubric.scorer()
  with files.alone(out):
    workdirs.claim(out, claimed)
    level = systems.settle_judge(out)
    with systems.open_runner(level) as runner:
      play = _player(spec, systems, runner, options, remote)
      _play_missing(tasks, options.samples, options.threads, play, out)
    if scorer is not None:
      scorer.remember(out)
      price, threads = spec.rewards.judged_reward, options.threads
      _score_missing(
        lambda row, said: rescoring.scored(row, said, scorer, price),
        scorer,
        threads,
        out,
      )
    summary = summarise(list(read(out).values()), options.samples)
    files.write_json(out / SUMMARY, summary)
  return summary


def transcript_of(task_id: str, sample: int) -> str:
  """Returns the path of a transcript in the folder, of a bounded length."""
  plain = re.sub(r'[^\w.-]+', '-', task_id, flags=re.A)[:100]
  digest = files.sha256(task_id.encode())[:12]
  return f'{TRANSCRIPTS}/{plain}-{digest}-{sample}.json'


def _play_missing(tasks, samples, threads, play: _Play, out) -> None:
  """Appends a row for each episode that has none with a verdict."""
  lock = threading.Lock()
  (out / TRANSCRIPTS).mkdir(exist_ok=True)
  with (
    # Closed after the threads, so that episodes that finish after an error in
    # another one are kept as well.
    append.AppendFile(out / EPISODES, 'an episode') as lines,
    futures.ThreadPoolExecutor(threads, 'episode') as pool,
  ):
    lines.cut_torn_line()
    # An episode whose sandbox or endpoint failed is played again.
    judged = {k for k, row in read(out).items() if row['status'] != _BROKEN}
    missing = [
      (index, sample)
      for index, task in enumerate(tasks)
      for sample in range(samples)
      if (task.task_id, sample) not in judged
    ]
    total = len(tasks) * samples
    start = total - len(missing)
    counts = itertools.count(start + 1)
    bar = progress.Progress('eval', total, start=start)

    def play_one(index: int, sample: int) -> None:
      task = tasks[index]
      begin = time.monotonic()
      row, transcript = play(task, index, sample)
      row = {**row, 'seconds': round(time.monotonic() - begin, 3)}
      path = transcript_of(task.task_id, sample)
      files.write_json(out / path, {**row, 'transcript': list(transcript)})
      with lock:
        lines.add({**row, 'transcript': path})
        bar.update(next(counts))

    with bar:
      waiting = [pool.submit(play_one, *which) for which in missing]
      try:
        for future in futures.as_completed(waiting):
          future.result()
      finally:
        pool.shutdown(cancel_futures=True)


def _score_missing(score, scorer: scoring.Scorer, threads: int, out) -> None:
  """Appends a row for each episode without scores of this rubric.

  Nothing is played: a folder can be scored by another rubric. An episode of
  which a model gave no valid answer is asked again by the next call.
  """
  rows = [
    row
    for row in read(out).values()
    if row['status'] != _BROKEN and row.get('rubric') != scorer.identity
  ]
  with (
    append.AppendFile(out / EPISODES, 'an episode') as lines,
    futures.ThreadPoolExecutor(threads, 'judge') as pool,
    progress.Progress('rubric', len(rows)) as bar,
  ):
    kept = (files.read_json(out / r['transcript'])['transcript'] for r in rows)
    for count, row in enumerate(pool.map(score, rows, kept), 1):
      lines.add(row)
      bar.update(count)


def row_of(task: Any, played: Any) -> dict[str, Any]:
  """Returns the row of a Rollout or Conversation; absent fields are 0."""
  verdict = played.verdict
  of_verdict = ('status', 'num_passed', 'num_tests', 'detail', 'sandbox_level')
  of_played = (
    *('reward', 'num_turns', 'num_invalid', 'sandbox_seconds', 'open_todos'),
  )
  return {
    'task_id': played.task_id,
    'sample': played.member,
    'package': getattr(task, 'package', ''),
    'tier': getattr(task, 'tier', ''),
    'passed': behaviour.passed(played),
    **{name: getattr(verdict, name) for name in of_verdict},
    **{name: getattr(played, name, 0) for name in of_played},
    'flags': list(played.flags),
    'reward_terms': dict(getattr(played, 'reward_terms', {})),
    'tools': list(getattr(played, 'tools', ())),
  }


def read(out: pathlib.Path) -> dict[tuple[str, int], dict[str, Any]]:
  """Returns the last row of each task id and sample."""
  rows = writer.read(out / EPISODES)
  return {(row['task_id'], row['sample']): row for row in rows}


def summarise(rows: list[dict[str, Any]], samples: int) -> dict[str, Any]:
  """Returns rates of all episodes, and by tier and package.

  Args:
    rows: rows of `row_of`.
    samples: number of episodes per task.

  Returns:
    overall, by_tier and by_package, each with episodes (judged ones), passed,
    pass_rate with its 95 % Wilson interval, pass_at_k (means over tasks whose
    samples were all judged; k = 1, 2, 4, ... and `samples`), flags by kind,
    unfinished, infrastructure, invalid_rate and turns; with a rubric the mean
    scores by criterion; of chat models also what `_chat_rates` names.
  """

  def rates_by(field: str) -> dict[str, Any]:
    parts = collections.defaultdict(list)
    for row in rows:
      if row[field]:
        parts[row[field]].append(row)
    return {key: _rates(parts[key], samples) for key in sorted(parts)}

  return {
    'overall': _rates(rows, samples),
    'by_tier': rates_by('tier'),
    'by_package': rates_by('package'),
  }


def pass_at_k(samples: int, passed: int, k: int) -> float:
  """Estimates without bias the chance that one of k samples passes.

  1 - C(n - c, k) / C(n, k) for `passed` = c of `samples` = n of one task (Chen
  et al. 2021).
  """
  return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def _rates(rows: list[dict[str, Any]], samples: int) -> dict[str, Any]:
  judged = [r for r in rows if r['status'] != _BROKEN]
  passed = sum(r['passed'] for r in judged)
  low, high = intervals.wilson(passed, len(judged))
  by_task = collections.defaultdict(list)
  for row in judged:
    by_task[row['task_id']].append(row['passed'])
  # Numbers of passes of the tasks whose samples were all judged.
  counts = [sum(v) for v in by_task.values() if len(v) == samples]
  powers = {1 << i for i in range(samples.bit_length())}
  ks = sorted(k for k in {*powers, samples} if k <= samples)
  turns = sum(r['num_turns'] for r in judged)
  return {
    'tasks': len({r['task_id'] for r in rows}),
    'episodes': len(judged),
    'passed': passed,
    'pass_rate': passed / max(len(judged), 1),
    'low': low,
    'high': high,
    'pass_at_k': {
      str(k): sum(pass_at_k(samples, c, k) for c in counts)
      / max(len(counts), 1)
      for k in ks
    },
    'flags': dict(collections.Counter(f for r in judged for f in r['flags'])),
    'unfinished': sum(r['status'] == records.UNFINISHED for r in judged),
    'infrastructure': len(rows) - len(judged),
    'invalid_rate': sum(r['num_invalid'] for r in judged) / max(turns, 1),
    'turns': turns / max(len(judged), 1),
    **_scores(judged),
    **_chat_rates([r for r in rows if 'ended' in r], len(judged)),
  }


def _scores(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """Returns the mean scores of a rubric, and how a model agrees with itself."""
  failed = sum('not_judged' in r for r in rows)
  rows = [r for r in rows if 'scores' in r]
  if not rows:
    return {'not_judged': failed} if failed else {}
  names = sorted({name for r in rows for name in r['scores']})
  same = [r['agreement'] for r in rows if r['agreement'] is not None]
  own = lambda name: [r['scores'][name] for r in rows if name in r['scores']]
  return {
    'scored': len(rows),
    'not_judged': failed,
    'scores': {n: float(np.mean(own(n))) for n in names},
    **({'agreement': float(np.mean(same))} if same else {}),
  }


def _chat_rates(rows: list[dict[str, Any]], judged: int) -> dict[str, Any]:
  """Returns why conversations ended, and sums and quantiles of their costs."""
  if not rows:
    return {}
  of_answers = [s for r in rows for s in r.get('answer_s', ())] or [0.0]
  total = lambda name: sum(r.get(name, 0) for r in rows)
  return {
    'ended': dict(collections.Counter(r['ended'] for r in rows)),
    'tokens_in': total('tokens_in'),
    'tokens_out': total('tokens_out'),
    'cost_usd': total('cost_usd'),
    'cost_usd_per_episode': total('cost_usd') / max(judged, 1),
    'answer_s_p50': float(np.quantile(of_answers, 0.5)),
    'answer_s_p95': float(np.quantile(of_answers, 0.95)),
    'attempts': total('attempts'),
    'answers': sum(len(r.get('answer_s', ())) for r in rows),
    'cut': total('cut'),
  }
