"""Pass rates on a config's tasks, of scripted policies or of an endpoint.

Nothing is trained and no engine runs: each episode is a thread that talks to
the policy, in the environment of training. A row is kept of each finished
episode, so that a killed evaluation resumes. `stages.evaluate` evaluates the
policies of a run.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.agent import episode, summarize
from composer_jax.core import checks, files, records, seams
from composer_jax.pipeline import spec as specs
from composer_jax.rl import behaviour, collect
from composer_jax.tasks.repository import scripts
from composer_jax.telemetry import append, intervals, progress
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train import workdir as workdirs

EPISODES, SUMMARY = 'episodes.jsonl', 'summary.json'
SCRIPTED = ('gold', 'null')
POLICIES = (*SCRIPTED, 'chat', 'tokens')
_BROKEN = records.INFRASTRUCTURE
_SCRIPT_BYTES, _SCRIPT_TURNS = 1 << 24, 1000
# Length of limits in bytes, for episodes whose tokens are bytes.
_BYTES_PER_TOKEN = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
  """The policy and the episodes of an evaluation.

  Attributes:
    policy: 'gold' restores what was deleted, through the tools; 'null' calls
      finish at once; 'chat' and 'tokens' ask an endpoint, for text or for
      tokens (`serve.client`).
    split: 'train' or one of the family's axes; '' for the first axis.
    tasks: number of tasks, the first ones in the order of the seed; 0 for all
      of a folder.
    samples: episodes per task.
    threads: episodes at a time.
    url: address of the endpoint, up to /v1.
    model: name by which the endpoint knows the model.
    api_key: key of the endpoint.
    native_tools: true to have a chat endpoint call tools by its own means.
    tokenizer: file of a run's or an import's tokenizer; '' for one whose tokens
      are bytes, which 'tokens' cannot use.
  """

  policy: str
  split: str
  tasks: int
  samples: int
  threads: int
  url: str = ''
  model: str = ''
  api_key: str = ''
  native_tools: bool = False
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


# (tokenizer, functions for a chat endpoint to call) -> policy of an endpoint.
Remote = Callable[[Any, Sequence[Any]], environments.Policy]


def limits_of(
  spec: specs.Spec, options: EvaluationOptions
) -> tuple[episode.EpisodeOptions, summarize.SummaryOptions]:
  """Returns the config's limits, longer ones where a token is a byte.

  A scripted policy has no context to overflow: its limits stop endless ones.
  """
  limits, summary = spec.episode, spec.summary
  is_scripted = options.policy in SCRIPTED
  if is_scripted:
    summary = summarize.OFF
  if options.tokenizer:
    return limits, summary
  names = ('max_tokens', 'max_call_tokens', 'max_sampled_tokens')
  if is_scripted:
    longer = dict.fromkeys(names, _SCRIPT_BYTES)
    limits = dataclasses.replace(limits, max_turns=_SCRIPT_TURNS, **longer)
    return limits, summary
  of_summary = ('trigger', 'max_tokens', 'plan_tokens')
  return _in_bytes(limits, names), _in_bytes(summary, of_summary)


def _in_bytes(options: Any, names: Sequence[str]) -> Any:
  longer = {n: _BYTES_PER_TOKEN * getattr(options, n) for n in names}
  return dataclasses.replace(options, **longer)


def policy_of(
  family: Any,
  tokenizer: Any,
  options: EvaluationOptions,
  remote: Remote | None,
) -> Callable[[Any], environments.Policy]:
  """Returns a function of a task, which gives the policy of one episode."""
  if options.policy == 'null':
    return lambda task: scripts.ScriptedCalls(tokenizer, [family.finish_call])
  if options.policy == 'gold':
    return lambda task: family.gold(task, tokenizer)
  assert remote is not None
  shared = remote(tokenizer, family.functions() if options.native_tools else ())
  return lambda task: shared


def evaluate(
  spec: specs.Spec,
  systems: seams.Systems,
  options: EvaluationOptions,
  out: pathlib.Path,
  remote: Remote | None = None,
) -> dict[str, Any]:
  """Plays the missing episodes and summarises all of them; blocks.

  Args:
    out: folder of the results; bound to this evaluation by a workdir's claim.
    remote: maker of the policies 'chat' and 'tokens'.

  Returns:
    The contents of `summary.json`, see `summarise`.

  Raises:
    ValueError: `out` holds another evaluation, or there are too few tasks.
    http_policy.EndpointError: the endpoint failed; finished episodes are kept.
  """
  family = systems.family
  options = dataclasses.replace(options, split=options.split or family.axes[0])
  if options.split not in ('train', *family.axes):
    raise ValueError(
      f'--split must be one of {("train", *family.axes)} for this task family; '
      f'got {options.split!r}.'
    )
  tasks = family.listed(options.split, options.tasks)
  limits, summary_options = limits_of(spec, options)
  fields: dict[str, Any] = dataclasses.asdict(options)
  # Results depend neither on speed nor on a secret.
  del fields['threads'], fields['api_key']
  claimed = {
    'evaluation': fields,
    'tasks': family.identity() or dataclasses.asdict(spec.systems['tasks']),
    'episode': dataclasses.asdict(limits),
    'rewards': dataclasses.asdict(spec.rewards),
    'summary': dataclasses.asdict(summary_options),
    'sandbox': dataclasses.asdict(spec.systems['sandbox']),
    'seed': spec.seed,
  }
  with files.alone(out):
    workdirs.claim(out, claimed)
    level = systems.settle_judge(out)
    if options.tokenizer:
      tokenizer = systems.load_tokenizer(pathlib.Path(options.tokenizer))
    else:
      size = tokenizers.MIN_VOCAB_SIZE
      tokenizer = tokenizers.Tokenizer.train(['bytes'], size)
    with systems.open_runner(level) as runner:
      play = collect.episode_player(
        tokenizer,
        lambda task: family.environment(task, runner),
        limits,
        reward_of_group=lambda group: spec.rewards,
        summary=summary_options,
      )
      choose = policy_of(family, tokenizer, options, remote)
      _play_missing(tasks, options, play, choose, spec.seed, out)
    summary = summarise(list(read(out).values()), options.samples)
    files.write_json(out / SUMMARY, summary)
  return summary


def _play_missing(tasks, options, play, choose, seed, out) -> None:
  """Appends a row for each episode that has none with a verdict."""
  lock = threading.Lock()
  with (
    # Closed after the threads, so that episodes that finish after an error in
    # another one are kept as well.
    contextlib.closing(
      append.AppendFile(out / EPISODES, 'an episode')
    ) as lines,
    futures.ThreadPoolExecutor(options.threads, 'episode') as threads,
  ):
    lines.cut_torn_line()
    # An episode whose sandbox failed is played again.
    judged = {k for k, row in read(out).items() if row['status'] != _BROKEN}
    missing = [
      (index, sample)
      for index, task in enumerate(tasks)
      for sample in range(options.samples)
      if (task.task_id, sample) not in judged
    ]
    total = len(tasks) * options.samples
    start = total - len(missing)
    counts = itertools.count(start + 1)
    bar = progress.Progress('eval', total, start=start)

    def play_one(index: int, sample: int) -> None:
      task = tasks[index]
      rollout = play(task, choose(task), group=index, member=sample, seed=seed)
      with lock:
        lines.append((json.dumps(row_of(task, rollout)) + '\n').encode())
        bar.update(next(counts))

    with bar:
      waiting = [threads.submit(play_one, *which) for which in missing]
      try:
        for future in futures.as_completed(waiting):
          future.result()
      finally:
        threads.shutdown(cancel_futures=True)


def row_of(task: Any, rollout: records.Rollout) -> dict[str, Any]:
  """Returns the row of one episode."""
  verdict = rollout.verdict
  of_verdict = ('status', 'num_passed', 'num_tests', 'detail', 'sandbox_level')
  of_rollout = ('reward', 'num_turns', 'num_invalid', 'sandbox_seconds')
  return {
    'task_id': rollout.task_id,
    'sample': rollout.member,
    'package': task.package,
    'tier': getattr(task, 'tier', ''),
    'passed': behaviour.passed(rollout),
    **{name: getattr(verdict, name) for name in of_verdict},
    **{name: getattr(rollout, name) for name in of_rollout},
    'flags': list(rollout.flags),
    'reward_terms': dict(rollout.reward_terms),
    'tools': list(rollout.tools),
    'windows': len(rollout.trajectories),
  }


def read(out: pathlib.Path) -> dict[tuple[str, int], dict[str, Any]]:
  """Returns the last row of each task id and sample."""
  rows = map(json.loads, (out / EPISODES).read_text().splitlines())
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
    unfinished, infrastructure, invalid_rate and turns.
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
  }
