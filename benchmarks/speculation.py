"""Speculation beside plain decoding of the same engine, and beside its bound.

  python -m benchmarks.speculation [--quick] [--workdir=runs/tiny] [CASE]

Both engines sample the same tokens, tokens per CPU second count, prompts
included. Cases, each at several batches, with 4 drafts a pass:
  'repeated': 8.1M random weights (`benchmarks.rollout`), 40 + 128 tokens. The
    table of n-grams has seen each session, so that nearly all drafts are right.
  'unseen': the same with other seeds, no draft is right, and the engine chooses
    how many there are. The goal is to lose no more than 2 %.
  'policy': the policy of a finished run of `configs/composer/tiny.py` on turns
    of episodes that the run still has, contexts and outputs of tools as they
    were; each round has other tasks. `--workdir` names the run.
  'invariant': the same in batch-invariant numerics.
The limit is what the measured right drafts give if passes cost what they cost
with drafts that are wrong, and prompts what they cost without speculation.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import interleaved, rollout_model

_BATCHES = (1, 4, 8, 64)
_DEPTH = 4
_NEW = 128
_COST_NEW = 48  # tokens of a session where passes are timed
_TURN = 64  # most tokens of a turn
_names = itertools.count()


def _wrong(table, history_BS, positions_B, depth):
  """Drafts a token that is hardly ever sampled."""
  import jax.numpy as jnp

  del table, history_BS
  return jnp.zeros((len(positions_B), depth), jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Task:
  """A model, and work for its engine.

  Attributes:
    play: (engine, round, most tokens of a turn) -> tokens sampled.
  """

  config: Any
  variables: Any
  options: dict[str, Any]
  play: Callable[[Any, int, int], int]

  def engine(self, depths: tuple[int, ...] = (), **over: Any) -> Any:
    """Makes a plain engine, or one that drafts by n-grams at some depths."""
    from composer_jax.rollout import controller, options
    from composer_jax.rollout import engine as engines

    speculation = options.Speculation(drafter='ngrams' if depths else 'none')
    made = engines.Engine(
      self.config,
      self.variables,
      0,
      engines.EngineOptions(
        **self.options,
        # Engines meet one prompt at different times.
        share_prefixes=False,
        speculation=speculation,
      ),
      **over,
    )
    if depths:
      made.controller = controller.Controller(depths)
    return made


def _sample(engine: Any, seed: int, prompt: int, new: int) -> int:
  """Serves a request per slot, of a session of its own."""
  import numpy as np

  from composer_jax.core import records

  names = [f'{next(_names)}' for _ in range(engine.options.num_slots)]
  for i, name in enumerate(names):
    rng = np.random.default_rng((seed, i))
    context_T = rng.integers(1, engine.config.vocab_size, prompt)
    engine.submit(
      records.SampleRequest(
        session=name,
        context_T=context_T.astype(np.int32),
        max_new_tokens=new,
        stop_tokens=(),
        seed=(seed, i),
      )
    )
  count = 0
  while engine.num_unfinished:
    count += sum(len(c.tokens_T) for c in engine.step())
  for name in names:
    engine.close(name)
  return count


def _random(batch: int, is_repeated: bool) -> _Task:
  config = rollout_model.config(ffw_dim=256, vocab_size=4096, tie=True)
  return _Task(
    config,
    rollout_model.variables(config),
    dict(
      num_slots=batch,
      max_len=rollout_model.PROMPT + _NEW,
      prefill_chunk=64 if batch == 1 else 16,
      prefill_rows=min(batch, 8),
      decode_steps=4,
    ),
    lambda engine, turn, most: _sample(
      engine, 0 if is_repeated else turn, rollout_model.PROMPT, min(most, _NEW)
    ),
  )


def _policy(workdir: str, batch: int, numerics: str) -> _Task:
  from composer_jax import wiring
  from composer_jax.core import files
  from composer_jax.serve import lifetime
  from composer_jax.train import workdir as workdirs

  folder = pathlib.Path(workdir)
  served = lifetime.load(folder, stage='rl', overrides={'numerics': numerics})
  limits = files.read_json(folder / workdirs.CONFIG)['episode']
  windows = [
    t
    for group in wiring.kept_groups(folder)
    for r in group.rollouts
    for t in r.trajectories
  ]
  if not windows:
    raise SystemExit(f'{workdir} keeps no groups; name a finished run.')
  options = dict(
    num_slots=batch,
    max_len=limits['max_tokens'],
    prefill_chunk=32,
    prefill_rows=min(batch, 8),
    decode_steps=4,
  )
  play = functools.partial(_turns, windows, served.stop_tokens)
  return _Task(served.model, served.variables, options, play)


def _turns(windows, stop_tokens, engine, turn: int, most: int) -> int:
  """Plays the turns of some windows again, each sampled afresh."""
  import numpy as np

  from composer_jax.core import records

  count = max(8, 2 * engine.options.num_slots)
  places = [(turn * count + i) % len(windows) for i in range(count)]
  waiting: dict[str, list[np.ndarray]] = {}
  lengths: dict[str, int] = {}

  def submit(name):
    if not waiting[name]:
      return engine.close(name)
    context_T = waiting[name].pop(0)
    lengths[name] += len(context_T)
    if lengths[name] + 1 >= engine.options.max_len:
      return engine.close(name)
    engine.submit(
      records.SampleRequest(
        session=name,
        context_T=context_T,
        max_new_tokens=min(most, _TURN),
        stop_tokens=stop_tokens,
        seed=(turn, int(name)),
      )
    )

  for place in places:
    name, window = f'{next(_names)}', windows[place]
    edges = np.flatnonzero(np.diff(window.loss_mask_T, prepend=0, append=0))
    ends = [0, *edges[1::2]]
    pairs = zip(ends, edges[::2], strict=False)
    waiting[name] = [window.tokens_T[end:start] for end, start in pairs]
    lengths[name] = 0
    submit(name)
  sampled = 0
  while engine.num_unfinished:
    for completion in engine.step():
      sampled += len(completion.tokens_T)
      lengths[completion.session] += len(completion.tokens_T)
      submit(completion.session)
  return sampled


def _seconds(
  function: Callable[..., int], *arguments: Any
) -> tuple[int, float]:
  """Returns what the function returns, and the seconds that it took."""
  now = interleaved.clock()
  start = now()
  return function(*arguments), now() - start


def _measure(run, name: str, task: _Task, depths, goal) -> None:
  """Reports speculation at some depths against none."""
  ours, plain = task.engine(depths), task.engine()
  chooses = ours.controller
  for depth in depths:  # Else some would be compiled while time is taken.
    ours.controller = type(chooses)((depth,))
    task.play(ours, 0, 2**30)
  ours.controller = chooses
  wrong = task.engine(depths[-1:], draft=_wrong)
  rates: tuple[list[float], list[float]] = ([], [])
  limits, costs = [], []
  for turn in range(run.rounds + 1):
    ours.swap(task.variables, turn)  # Gives the device what was learnt.
    first = _seconds(task.play, plain, turn, 1)[1]
    before = ours.controller.kept_X.copy()
    pairs = [_seconds(task.play, e, turn, 2**30) for e in (ours, plain)]
    passes_X = ours.controller.kept_X - before
    cost, step = (
      _seconds(_sample, engine, turn, 1, _COST_NEW)[1]
      for engine in (wrong, plain)
    )
    if not turn:
      continue
    for (tokens, seconds), into in zip(pairs, rates, strict=True):
      into.append(tokens / seconds)
    tokens, seconds = pairs[1]
    kept = sum((i + 1) * n for i, n in enumerate(passes_X))
    # Where the engine drafted nothing, a pass gave a token.
    a_pass = kept / passes_X.sum() if kept else 1.0
    costs.append((a_pass, cost / step))
    decode = max(0.0, seconds - first) * max(cost / step / a_pass, 1e-9)
    limits.append(tokens / (first + decode))
  a_pass, cost = (statistics.median(x) for x in zip(*costs, strict=True))
  limit = statistics.median(limits)
  if goal == 'limit':
    words, least = '>= 0.85 of the limit', 0.85 * limit
    met: Any = lambda ours, ratio: ours >= least
  else:
    words, met = 'ratio >= 0.98', lambda ours, ratio: ratio >= 0.98
  run.report(
    name,
    rates,
    against='plain decoding',
    limit=limit,
    goal=words,
    met=met,
    note=f'{a_pass:.2f} tokens a pass, which costs {cost:.2f} steps',
  )


def repeated(run) -> None:
  for batch in run.batches:
    case = f'repeated 8.1M: batch {batch}'
    _measure(run, case, _random(batch, True), (_DEPTH,), 'limit')


def unseen(run) -> None:
  for batch in run.batches:
    case = f'unseen 8.1M: batch {batch}'
    _measure(run, case, _random(batch, False), (0, 2, _DEPTH), 'plain')


def policy(run, numerics: str = 'fast') -> None:
  if not run.workdir:
    print('policy and invariant need --workdir=RUN.', file=sys.stderr)
    return
  word = 'policy' if numerics == 'fast' else 'invariant policy'
  for batch in run.batches:
    task = _policy(run.workdir, batch, numerics)
    _measure(run, f'{word}: batch {batch}', task, (_DEPTH,), 'limit')


def invariant(run) -> None:
  policy(run, 'batch_invariant')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='batch 1 and 8')
  parser.add_argument('--workdir', default='', help='a finished run')
  parser.add_argument('cases', nargs='*', help='default: all cases')
  run: Any = parser.parse_args()
  interleaved.set_allocator()
  interleaved.pin_to_one_core()
  known = {c.__name__: c for c in (repeated, unseen, policy, invariant)}
  if unknown := set(run.cases) - set(known):
    parser.error(
      f'{sorted(unknown)} are unknown cases; known are {sorted(known)}.'
    )
  run.rounds = 2 if run.quick else 3
  run.batches = (1, 8) if run.quick else _BATCHES
  run.report = functools.partial(interleaved.report, 'speculation')
  for name in run.cases or known:
    known[name](run)


if __name__ == '__main__':
  main()
