"""Pass rates of a scripted policy, or of one behind a URL, on a config's tasks.

  python -m experiments.evaluate --policy=gold --split=train --tasks=20 \\
      --config=configs/composer/deletion.py --out=runs/eval_gold
  python -m experiments.evaluate --policy=chat --model=NAME --native_tools \\
      --url=http://localhost:8001/v1 --threads=8 --out=runs/eval_chat \\
      --config=configs/composer/deletion.py:runs/deletion_tasks
  ./run.sh serve --source=runs/tiny &
  python -m experiments.evaluate --policy=tokens --tasks=100 \\
      --url=http://localhost:8000/v1 --tokenizer=runs/tiny/tokenizer.json \\
      --config=configs/composer/tiny.py --out=runs/eval_tiny

  ./run.sh evaluate --follow=runs/tiny --suites=configs/suites/tiny.toml \\
      --out=runs/follow_tiny
  ./run.sh evaluate --follow=s3://bucket/run --key=delta.key \
      --suites=configs/suites/tiny.toml --out=runs/follow

The config gives the tasks, the sandbox and rewards, and to all policies but
chat the limits of an episode and summaries; the key is COMPOSER_JAX_TOKEN. The
same command on the same folder resumes after a kill. --out gets report.html,
episodes.jsonl, a line an episode, transcripts/, a file an episode, and
summary.json: pass rates with 95 % intervals by tier and package, pass@k, what
monitors found, and of a chat model why episodes ended, their tokens, cost and
latency.

--follow plays pinned suites with each policy version that a run publishes, of
which it needs the store and the key, or the workdir, and has its own page:
docs/how_to/follow.md.
"""

import contextlib
import os
import pathlib
import tempfile

from absl import flags, logging

from composer_jax.tasks.practice import conversation
from experiments import following, start

_CONFIG = start.define_config(
  'configs/composer/deletion.py', 'Config file of a run; see above.'
)
_OUT = flags.DEFINE_string('out', 'runs/evaluation', 'Folder of the results.')
_POLICY = flags.DEFINE_string(
  'policy',
  'gold',
  'gold: restores what was deleted, through the tools. null: calls finish at '
  "once. chat: an OpenAI-compatible endpoint. tokens: this project's server.",
)
_SPLIT = flags.DEFINE_string(
  'split', '', "train, or an axis of the task family; '' for its first."
)
_TASKS = flags.DEFINE_integer('tasks', 0, 'Number of tasks; 0 takes all.')
_SAMPLES = flags.DEFINE_integer('samples', 1, 'Episodes of each task.')
_THREADS = flags.DEFINE_integer('threads', 2, 'Episodes at a time.')
_URL = flags.DEFINE_string('url', '', 'URL of the endpoint, up to /v1.')
_MODEL = flags.DEFINE_string('model', '', 'Name of the model at the endpoint.')
_CHAT = start.define_fields(conversation.ChatOptions, 'With --policy=chat: ')
_TOKENIZER = flags.DEFINE_string(
  'tokenizer', '', 'tokenizer.json of a run, for --policy=tokens.'
)


_FOLLOW = flags.DEFINE_string(
  'follow',
  '',
  'Store of a run, as a folder or URL, or its workdir; plays --suites with the '
  'versions that the run publishes.',
)
_KEY = flags.DEFINE_string(
  'key', '', 'With --follow=STORE: copy of delta.key in the workdir of the run.'
)
_SUITES = flags.DEFINE_string('suites', '', 'With --follow: file of suites.')
_STORE = flags.DEFINE_string(
  'store', '', "With --follow=WORKDIR: URL of a cache; '' for the run's store."
)
_VERSIONS = flags.DEFINE_integer(
  'versions', 0, 'With --follow: number of versions to play; 0 for no end.'
)


def _follow() -> None:
  if not _SUITES.value:
    raise ValueError('--follow needs --suites=FILE, the suites to play.')
  with contextlib.ExitStack() as stack:
    source, store = pathlib.Path(_FOLLOW.value).absolute(), _STORE.value
    if not following.is_workdir(_FOLLOW.value):
      if store:
        raise ValueError(
          f'--follow={_FOLLOW.value} is no workdir of a run (it has no '
          'config.json); name the store by --follow alone, or the workdir.'
        )
      store = _FOLLOW.value
      # Of this process alone: it holds the key.
      source = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
      following.take_run(store, pathlib.Path(_KEY.value), source)
    following.follow(
      source,
      suites=_SUITES.value,
      store=store,
      out=pathlib.Path(_OUT.value).absolute(),
      versions=_VERSIONS.value,
      threads=_THREADS.value,
    )


def _rates(name, rates):
  best = ', '.join(f'{k}: {v:.3f}' for k, v in rates['pass_at_k'].items())
  return (
    f'{name:<20}{rates["passed"]:>5} of {rates["episodes"]:<5} = '
    f'{rates["pass_rate"]:.3f} [{rates["low"]:.3f}, {rates["high"]:.3f}]  '
    f'pass@k {{{best}}}  flagged {sum(rates["flags"].values())}, unfinished '
    f'{rates["unfinished"]}, infrastructure {rates["infrastructure"]}'
    + (
      f'  ended {rates["ended"]}, {rates["cost_usd"]:.4g} USD, answers '
      f'{rates["answer_s_p50"]:.1f} s (p95 {rates["answer_s_p95"]:.1f} s)'
      if 'ended' in rates
      else ''
    )
    + ''.join(f'  {k} {v:.3f}' for k, v in rates.get('scores', {}).items())
  )


def run() -> None:
  logging.set_verbosity(logging.WARNING)
  fields = start.config_fields(_CONFIG)
  start.emulate_devices(1)
  if _FOLLOW.value:
    return _follow()
  if _SUITES.value or _STORE.value or _VERSIONS.value or _KEY.value:
    raise ValueError(
      '--suites, --store, --key and --versions need --follow; add it.'
    )
  # After the flags: this import loads jax.
  from composer_jax import wiring
  from composer_jax.report import evaluation as page
  from composer_jax.tasks.practice import evaluation

  options = evaluation.EvaluationOptions(
    policy=_POLICY.value,
    split=_SPLIT.value,
    tasks=_TASKS.value,
    samples=_SAMPLES.value,
    threads=_THREADS.value,
    url=_URL.value,
    model=_MODEL.value,
    api_key=os.environ.get('COMPOSER_JAX_TOKEN', '').strip(),
    chat=conversation.ChatOptions(**{n: f.value for n, f in _CHAT.items()}),
    tokenizer=_TOKENIZER.value,
  )

  out = pathlib.Path(_OUT.value).absolute()
  spec = wiring.spec_of(fields)
  summary = evaluation.evaluate(
    spec,
    wiring.systems_of(spec),
    options,
    out,
    remote=lambda: following.asked(options),
  )
  print(_rates('all', summary['overall']))
  for part in ('by_tier', 'by_package'):
    for name, rates in summary[part].items():
      print(_rates(name, rates))
  print(f'{out / evaluation.SUMMARY}')
  print(f'{page.write(out)}')


if __name__ == '__main__':
  start.run(run, errors=(ValueError, OSError, RuntimeError))
