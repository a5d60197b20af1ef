"""Pass rates of any policy on a config's tasks: scripted, or behind a URL.

Beside the evaluations of the main job (`stages.evaluate`), which are of its own
policies. Nothing is trained here and no engine runs: every episode is a thread
that talks to the policy, in the environment that training has. Finished
episodes are kept as they come, so a killed evaluation goes on.
"""

import collections
import contextlib
import dataclasses
import json
import math
import pathlib
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.agent import episode, summarize
from composer_jax.core import files, records, seams
from composer_jax.pipeline import spec as specs
from composer_jax.rl import behaviour, collect
from composer_jax.tasks.list_functions import family as generated
from composer_jax.tasks.repository import scripts
from composer_jax.telemetry import append, intervals, progress
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train import workdir as workdirs

EPISODES, SUMMARY = 'episodes.jsonl', 'summary.json'
SCRIPTED = ('gold', 'null')
POLICIES = (*SCRIPTED, 'chat', 'tokens')
_SCRIPT_BYTES, _SCRIPT_TURNS = 1 << 24, 1000
# A window of a policy whose tokens are not the episode's, in bytes.
_BYTES_PER_TOKEN = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
  """What is played.

  Attributes:
    policy: 'gold' restores what was deleted, through the tools; 'null' calls
      finish at once; 'chat' and 'tokens' ask an endpoint, for text or for
      tokens (`serve.client`).
    split: 'train' or 'held_out'.
    tasks: how many, the first ones in the order of the seed; 0 for all of a
      folder.
    samples: episodes of each.
    threads: episodes at a time.
    url: of the endpoint, up to /v1.
    model: that the endpoint is asked for.
    api_key: of the endpoint.
    native_tools: has a chat endpoint call tools by its own means.
    tokenizer: file of the run or import whose tokenizer the episodes use; ''
      for one whose tokens are bytes, which 'tokens' cannot.
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
    if self.policy not in POLICIES:
      raise ValueError(
        f'--policy must be one of {POLICIES}, not {self.policy!r}.'
      )
    if self.split not in generated.SPLITS:
      raise ValueError(
        f'--split must be one of {generated.SPLITS}, not {self.split!r}.'
      )
    if self.tasks < 0 or self.samples < 1 or self.threads < 1:
      raise ValueError(
        f'--tasks ({self.tasks}) must not be negative, --samples '
        f'({self.samples}) and --threads ({self.threads}) be at least 1.'
      )
    if (self.policy in ('chat', 'tokens')) != bool(self.url):
      raise ValueError(
        f'--url ({self.url!r}) is where the policies chat and tokens ask, and '
        f'no other does; --policy is {self.policy!r}.'
      )
    if self.policy == 'tokens' and not self.tokenizer:
      raise ValueError(
        '--policy=tokens needs --tokenizer=FILE, the tokenizer.json of the run '
        'that is served: its ids are what the endpoint takes and gives.'
      )

  def identity(self) -> dict[str, Any]:
    """What results depend on: neither speed nor a secret."""
    fields = dataclasses.asdict(self)
    for name in ('threads', 'api_key'):
      del fields[name]
    return fields


# Returns the policy behind an endpoint, of a tokenizer and the functions that a
# chat endpoint calls by its own means.
Remote = Callable[[Any, Sequence[Any]], environments.Policy]


def tokenizer_of(systems: seams.Systems, options: EvaluationOptions) -> Any:
  if options.tokenizer:
    return systems.load_tokenizer(pathlib.Path(options.tokenizer))
  return tokenizers.Tokenizer.train(['bytes'], tokenizers.MIN_VOCAB_SIZE)


def limits_of(
  spec: specs.Spec, options: EvaluationOptions
) -> episode.EpisodeOptions:
  """The config's limits, for as much text where a token is a byte.

  A script has no context to overflow: its limits only end what went wrong.
  """
  if options.tokenizer:
    return spec.episode
  names = ('max_tokens', 'max_call_tokens', 'max_sampled_tokens')
  if options.policy in SCRIPTED:
    longer = dict.fromkeys(names, _SCRIPT_BYTES) | {'max_turns': _SCRIPT_TURNS}
  else:
    longer = {n: _BYTES_PER_TOKEN * getattr(spec.episode, n) for n in names}
  return dataclasses.replace(spec.episode, **longer)


def summary_of(
  spec: specs.Spec, options: EvaluationOptions
) -> summarize.SummaryOptions:
  """When windows restart, in the tokens of `limits_of`."""
  if options.policy in SCRIPTED:
    return summarize.OFF
  if options.tokenizer:
    return spec.summary
  names = ('trigger', 'max_tokens', 'plan_tokens')
  longer = {n: _BYTES_PER_TOKEN * getattr(spec.summary, n) for n in names}
  return dataclasses.replace(spec.summary, **longer)


def policy_of(
  family: Any,
  tokenizer: Any,
  options: EvaluationOptions,
  remote: Remote | None,
) -> Callable[[Any], environments.Policy]:
  """Returns task -> the policy of an episode of it."""
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
  """Plays what is not played yet, and summarises all of it; blocks.

  Args:
    spec: of the tasks, the sandbox and the limits of an episode.
    systems: what the spec names.
    options: of the evaluation.
    out: its folder, made when missing; bound to both by a workdir's claim.
    remote: makes the policies 'chat' and 'tokens'.

  Returns:
    What `summary.json` holds, see `summarise`.

  Raises:
    ValueError: `out` holds another evaluation, or there are too few tasks.
    http_policy.EndpointError: the endpoint fails; what was played is kept.
  """
  family = systems.family
  tasks = family.listed(options.split, options.tasks)
  claimed = {
    'evaluation': options.identity(),
    'tasks': family.identity() or dataclasses.asdict(spec.systems['tasks']),
    'episode': dataclasses.asdict(limits_of(spec, options)),
    'rewards': dataclasses.asdict(spec.rewards),
    'summary': dataclasses.asdict(summary_of(spec, options)),
    'sandbox': dataclasses.asdict(spec.systems['sandbox']),
    'seed': spec.seed,
  }
  with files.alone(out):
    workdirs.claim(out, claimed)
    level = systems.settle_judge(out)
    choose = policy_of(family, tokenizer_of(systems, options), options, remote)
    with systems.open_runner(level) as runner:
      _play(spec, systems, options, tasks, choose, runner, out)
    found = summarise(list(read(out).values()), options.samples)
    files.write_json(out / SUMMARY, found)
  return found


def _play(spec, systems, options, tasks, choose, runner, out) -> None:
  """Appends a line for each episode that has none that was judged."""
  tokenizer, played = tokenizer_of(systems, options), read(out)
  due = [
    (index, sample)
    for index, task in enumerate(tasks)
    for sample in range(options.samples)
    if not _was_judged(played.get((task.task_id, sample)))
  ]
  total, lock = len(tasks) * options.samples, threading.Lock()
  with (
    progress.Progress('eval', total, start=total - len(due)) as bar,
    # Closed after the threads: what is under way at an error is kept as well.
    contextlib.closing(
      append.AppendFile(out / EPISODES, 'an episode')
    ) as lines,
    futures.ThreadPoolExecutor(options.threads, 'episode') as threads,
  ):
    play = collect.episode_player(
      tokenizer,
      lambda task: systems.family.environment(task, runner),
      limits_of(spec, options),
      reward_of_group=lambda group: spec.rewards,
      summary=summary_of(spec, options),
    )

    def one(index: int, sample: int) -> None:
      task = tasks[index]
      rollout = play(
        task, choose(task), group=index, member=sample, seed=spec.seed
      )
      with lock:
        lines.append((json.dumps(row_of(task, rollout)) + '\n').encode())
        done.append(rollout)
        bar.update(total - len(due) + len(done))

    done: list[records.Rollout] = []
    waiting = [threads.submit(one, *which) for which in due]
    try:
      for future in futures.as_completed(waiting):
        future.result()
    except BaseException:
      for future in waiting:
        future.cancel()
      raise


def _was_judged(row: dict[str, Any] | None) -> bool:
  """Whether an episode is over; one that the sandbox failed is played again."""
  return row is not None and row['status'] != records.INFRASTRUCTURE


def row_of(task: Any, rollout: records.Rollout) -> dict[str, Any]:
  """One episode as a line."""
  return {
    'task_id': rollout.task_id,
    'sample': rollout.member,
    'package': task.package,
    'tier': getattr(task, 'tier', ''),
    'passed': behaviour.passed(rollout),
    'status': rollout.verdict.status,
    'num_passed': rollout.verdict.num_passed,
    'num_tests': rollout.verdict.num_tests,
    'detail': rollout.verdict.detail,
    'sandbox_level': rollout.verdict.sandbox_level,
    'flags': list(rollout.flags),
    'reward': rollout.reward,
    'reward_terms': dict(rollout.reward_terms),
    'num_turns': rollout.num_turns,
    'num_invalid': rollout.num_invalid,
    'tools': list(rollout.tools),
    'windows': len(rollout.trajectories),
    'sandbox_seconds': rollout.sandbox_seconds,
  }


def read(out: pathlib.Path) -> dict[tuple[str, int], dict[str, Any]]:
  """The last line of each task and sample; a torn one is cut off."""
  path, found = out / EPISODES, {}
  if not path.exists():
    return found
  data = path.read_bytes()
  whole = data[: data.rfind(b'\n') + 1]
  if len(whole) != len(data):
    files.write_atomic(path, whole)
  for line in whole.decode().splitlines():
    row = json.loads(line)
    found[row['task_id'], row['sample']] = row
  return found


def summarise(rows: list[dict[str, Any]], samples: int) -> dict[str, Any]:
  """Rates of all episodes, and by tier and package.

  Args:
    rows: of `row_of`.
    samples: of each task.

  Returns:
    overall, by_tier and by_package, each with episodes (judged ones), passed,
    pass_rate with its 95 % Wilson interval, pass_at_k (means over tasks whose
    samples were all judged; k = 1, 2, 4, ... and `samples`), flags by kind,
    unfinished, infrastructure, invalid_rate and turns.
  """

  def by(name):
    keys = sorted({row[name] for row in rows if row[name]})
    return {
      key: _rates([r for r in rows if r[name] == key], samples) for key in keys
    }

  return {
    'overall': _rates(rows, samples),
    'by_tier': by('tier'),
    'by_package': by('package'),
  }


def pass_at_k(samples: int, passed: int, k: int) -> float:
  """Chance that one of k samples passes, without bias (Chen et al. 2021).

  1 - C(n - c, k) / C(n, k) for `passed` = c of `samples` = n of one task.
  """
  if not 0 <= passed <= samples or not 1 <= k <= samples:
    raise ValueError(
      f'passed ({passed}) must lie in 0..samples ({samples}), and k ({k}) in '
      '1..samples.'
    )
  return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def _rates(rows: list[dict[str, Any]], samples: int) -> dict[str, Any]:
  judged = [r for r in rows if r['status'] != records.INFRASTRUCTURE]
  passed = sum(r['passed'] for r in judged)
  low, high = intervals.wilson(passed, len(judged))
  of_task = collections.defaultdict(list)
  for row in judged:
    of_task[row['task_id']].append(row['passed'])
  whole = [sum(v) for v in of_task.values() if len(v) == samples]
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
      str(k): sum(pass_at_k(samples, c, k) for c in whole) / max(len(whole), 1)
      for k in ks
    },
    'flags': dict(collections.Counter(f for r in judged for f in r['flags'])),
    'unfinished': sum(r['status'] == records.UNFINISHED for r in judged),
    'infrastructure': len(rows) - len(judged),
    'invalid_rate': sum(r['num_invalid'] for r in judged) / max(turns, 1),
    'turns': turns / max(len(judged), 1),
  }
