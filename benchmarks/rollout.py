"""The rollout engine beside other samplers, and beside what bounds it.

  python -m benchmarks.rollout [--quick] [--tunix-python=PATH] [--gpu] [CASE]

Random weights of two shapes, MoE of 8 experts and 2 active each: 8.1M (256
wide, tied table of 4,096) and 17.6M (512 hidden units, untied, 8,192); prompts
of 40 tokens and 128 new ones; float32. Cases:
  'generate': tokens/s of whole requests, prompt included, with as many tokens a
    dispatch as RL of tiny.py samples, and with 32; against `generate` of
    Hugging Face transformers, the fastest of its variants at each batch, with
    MKL's fast path unlocked and not (`rollout_peers`, `peer_process`).
  'tunix': the same at 32 against the sampler of google-tunix, which needs an
    environment of its own (Python 3.12); without it there is no peer.
  'large': a model of four times the last-level cache, where decoding is
    reading; the peer reads the same bytes and does nothing else.
  'first': requests/s of one token each, the reciprocal of the time to it, of
    the engine of 'generate'.
  'prefill': context tokens/s, against the trainer's forward pass.
  'routes': the engine that records routes against one that does not.
  'replay': steps of RL, Adam included, with routes to replay against without.
  'numerics': batch-invariant numerics against fast ones.
The limit of 'generate' is the smaller of two rates: reading a step's bytes (the
experts that were chosen, all other weights, the cache) at the speed of a plain
read from a working set of that size, and useful arithmetic at the speed of
XLA's matrix product. `--quick` runs 'generate' of the smaller shape unless
cases are named. `--gpu` runs 'gpu' alone: 7B parameters, 1B active, at batch 1,
64 and 256 against reading and against transformers on the same device; not
measured on a GPU. `--gpu --tiny` runs the same code at a size whose figures
mean nothing.
"""

import argparse
import functools
import itertools
import os
import statistics
from typing import Any

from benchmarks import (
  interleaved,
  peer_process,
  rollout_model,
  rollout_peers,
)

_SHAPES = {
  '8.1M': dict(ffw_dim=256, vocab_size=4096, tie=True),
  '17.6M': dict(ffw_dim=512, vocab_size=8192, tie=False),
}
# Goals for the ratio to transformers by batch, for both shapes, with as many
# tokens a dispatch as RL takes.
_GOALS = {1: 5.0, 8: 3.0, 64: 2.5}
_MANY = 32  # tokens a dispatch where nothing comes in between


def _limits(engine, new: int, peak: float, rounds: int) -> tuple[float, float]:
  """Returns tokens/s by reading alone, and by arithmetic alone."""
  from composer_jax.models import flops

  total, step = rollout_model.step_bytes(engine, new)
  read = rollout_peers.plain_read(total, step)
  speed = statistics.median(interleaved.rates(read, read, rounds)[0])
  length = rollout_model.PROMPT + new // 2
  return (
    engine.options.num_slots * speed / step,
    peak / flops.forward_per_token(engine.config, length),
  )


def _rl_steps() -> int:
  """Returns how many tokens a dispatch of RL samples in the main job."""
  from configs.composer import tiny

  return tiny.get_config().rollout.decode_steps


def _goal(least: float) -> dict[str, Any]:
  return {
    'goal': f'ratio >= {least:g}',
    'met': lambda ours, ratio: ratio >= least,
  }


_NONE: dict[str, Any] = {'goal': 'none', 'met': lambda ours, ratio: True}


def generate(run) -> None:
  shapes = list(_SHAPES)[: 1 if run.quick else None]
  for shape, batch in itertools.product(shapes, _GOALS):
    config = rollout_model.config(**_SHAPES[shape])
    engines = {
      steps: rollout_model.engine(config, batch, decode_steps=steps)
      for steps in (_rl_steps(), _MANY)
    }
    task = rollout_peers.task(
      config, batch, rollout_model.PROMPT, rollout_model.NEW
    )
    limit = min(_limits(engines[_MANY], rollout_model.NEW, run.peak, 2))
    for name, peer in rollout_peers.transformers(task, 2):
      for steps, engine in engines.items():
        has_goal = steps == _rl_steps() and 'as shipped' not in name
        run.report(
          f'generate {shape}, batch {batch}, {steps} tokens a dispatch',
          peer_process.in_turns(
            lambda e=engine: rollout_model.tokens(e, rollout_model.NEW),
            peer.rate,
            run.rounds,
          ),
          against=name,
          limit=limit,
          **(_goal(_GOALS[batch]) if has_goal else _NONE),
        )


def tunix(run) -> None:
  config = rollout_model.config(**_SHAPES['8.1M'])
  engine = rollout_model.engine(config, 8)
  ours = functools.partial(rollout_model.tokens, engine, rollout_model.NEW)
  goal: dict[str, Any] = {'against': '', **_NONE}
  if run.tunix_python:
    goal = {'against': 'google-tunix 0.1.7', **_goal(2.5)}
    task = rollout_peers.task(
      config, 8, rollout_model.PROMPT, rollout_model.NEW
    )
    peer = rollout_peers.tunix(run.tunix_python, task)
    rates = peer_process.in_turns(ours, peer.rate, run.rounds)
    peer.close()
  else:
    rates = (interleaved.rates(ours, ours, run.rounds)[0], [])
  run.report(
    'generate 8.1M, batch 8',
    rates,
    limit=min(_limits(engine, rollout_model.NEW, run.peak, 2)),
    **goal,
  )


def large(run) -> None:
  """Measures a model of four times the last-level cache, or of 2 GB."""
  layer = 4 * (8 * 3 * 512 * 512 + 3 * 512 * 512)
  num_bytes = min(4 * rollout_peers.last_level_cache(), 2 << 30)
  config = rollout_model.config(
    ffw_dim=512,
    vocab_size=4096,
    tie=True,
    embed_dim=512,
    num_layers=-(-num_bytes // layer),
  )
  new = rollout_model.NEW
  for batch in (1, 8):
    # Contexts have one token, since this case measures decoding.
    engine = rollout_model.engine(config, batch)
    total, step = rollout_model.step_bytes(engine, new)
    read = rollout_peers.plain_read(total, step)
    rates = interleaved.rates(
      lambda e=engine: rollout_model.decoded(e, new),
      lambda r=read, s=step / batch: r() / s,
      run.rounds,
    )
    run.report(
      f'large ({total >> 20} MiB): batch {batch}',
      rates,
      against='a plain read of the bytes of a step',
      limit=statistics.median(rates[1]),
      **_goal(0.5),
    )


def first(run) -> None:
  config = rollout_model.config(**_SHAPES['8.1M'])
  engine = rollout_model.engine(config, 1)
  repeats = 20
  task = rollout_peers.task(config, 1, rollout_model.PROMPT, 1, repeats)

  def ours() -> float:
    return sum(rollout_model.tokens(engine, 1) for _ in range(repeats))

  for name, peer in rollout_peers.transformers(task, 2):
    run.report(
      'first token of 8.1M, batch 1',
      peer_process.in_turns(ours, peer.rate, run.rounds),
      against=name,
      limit=None,
      **_NONE,
      unit='requests/s',
    )


def _prefiller(config):
  rows, length = 8, 256
  engine = rollout_model.engine(
    config, rows, max_len=length + 2, prefill_chunk=64, decode_steps=1
  )

  def run() -> float:
    rollout_model.sample(engine, 1, prompt=length + 1)
    return float(rows * length)

  return run, rows, length


def prefill(run) -> None:
  config = rollout_model.config(**_SHAPES['8.1M'])
  ours, rows, length = _prefiller(config)
  peer = rollout_model.forward_pass(config, rows, length)
  from composer_jax.models import flops

  useful = flops.forward_per_token(config, length, causal=True)
  run.report(
    f'prefill 8.1M, {rows} x {length}',
    interleaved.rates(ours, peer, run.rounds),
    against='the forward pass of training',
    limit=run.peak / useful,
    **_goal(0.8),
  )


def routes(run) -> None:
  config = rollout_model.config(**_SHAPES['8.1M'])
  for batch in (8, 64):
    engines = [
      rollout_model.engine(config, batch, record_routes=on)
      for on in (True, False)
    ]
    run.report(
      f'routes recorded, 8.1M: batch {batch}',
      against='routes not recorded',
      rates=interleaved.rates(
        functools.partial(rollout_model.tokens, engines[0], rollout_model.NEW),
        functools.partial(rollout_model.tokens, engines[1], rollout_model.NEW),
        2 * run.rounds,
      ),
      limit=None,
      **_goal(0.98),
    )


def replay(run) -> None:
  config = rollout_model.config(**_SHAPES['8.1M'])
  run.report(
    'steps of RL with routes replayed, 8.1M, 8 x 256',
    against='tokens routed afresh',
    rates=interleaved.rates(
      *rollout_model.train_steps(config, 8, 256), 2 * run.rounds
    ),
    limit=None,
    **_goal(0.99),
  )


def numerics(run) -> None:
  """Measures what batch-invariant numerics cost; there is no goal."""
  pair = [
    rollout_model.config(**_SHAPES['8.1M'], numerics=name)
    for name in ('batch_invariant', 'fast')
  ]
  engines = [rollout_model.engine(config, 8) for config in pair]
  cases = {
    'decode, batch 8': [
      functools.partial(rollout_model.tokens, e, rollout_model.NEW)
      for e in engines
    ],
    'prefill, 8 x 256': [_prefiller(config)[0] for config in pair],
    'forward of training, 8 x 256': [
      rollout_model.forward_pass(config, 8, 256) for config in pair
    ],
  }
  for name, (ours, peer) in cases.items():
    run.report(
      f'batch-invariant numerics, 8.1M: {name}',
      interleaved.rates(ours, peer, run.rounds),
      against='fast numerics',
      limit=None,
      **_NONE,
    )


def gpu(run) -> None:
  """Measures the shape of OLMoE-7B-A1B in bfloat16, contexts of one token."""
  name, batches, new = '7B-A1B', (1, 64, 256), rollout_model.NEW
  shape: dict[str, Any] = dict(
    ffw_dim=1024,
    vocab_size=50304,
    embed_dim=2048,
    num_layers=16,
    num_experts=64,
    num_active=8,
  )
  if run.tiny:
    name, batches, new = 'tiny', (1, 4), 8
    shape = dict(
      ffw_dim=128,
      vocab_size=512,
      embed_dim=128,
      num_layers=2,
      num_experts=4,
      num_active=2,
    )
  config = rollout_model.config(**shape, tie=False, compute_dtype='bfloat16')
  for batch in batches:
    engine = rollout_model.engine(config, batch)
    ours = functools.partial(rollout_model.decoded, engine, new)
    total, step = rollout_model.step_bytes(engine, new)
    read = rollout_peers.plain_read(total, step)
    rates = interleaved.rates(
      ours, lambda r=read, s=step / batch: r() / s, run.rounds
    )
    limit = statistics.median(rates[1])
    run.report(
      f'gpu, decode {name}, batch {batch}',
      rates,
      against='a plain read of the bytes of a step',
      limit=limit,
      **_goal(0.6),
    )
    task = rollout_peers.task(config, batch, 1, new)
    for peer_name, peer in rollout_peers.transformers(task, 1):
      run.report(
        f'gpu, decode {name}, batch {batch}',
        peer_process.in_turns(
          ours, peer.rate, run.rounds, clock=interleaved.clock()
        ),
        against=peer_name,
        limit=limit,
        **_NONE,
      )


_CASES = (
  generate,
  tunix,
  large,
  first,
  prefill,
  routes,
  replay,
  numerics,
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='under a minute')
  parser.add_argument(
    '--tunix-python', help='Python of an environment with Tunix'
  )
  parser.add_argument(
    '--gpu', action='store_true', help='run the case gpu alone'
  )
  parser.add_argument(
    '--tiny', action='store_true', help='small numbers for --gpu, on any device'
  )
  parser.add_argument('cases', nargs='*', help='default: all cases')
  run: Any = parser.parse_args()
  if run.gpu:
    # The rest of the device is for the peer's process.
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.6')
  else:
    interleaved.set_allocator()
    interleaved.pin_to_one_core()
  known = {case.__name__: case for case in _CASES}
  if unknown := set(run.cases) - set(known):
    parser.error(
      f'{sorted(unknown)} are unknown cases; known are {sorted(known)}.'
    )
  run.rounds = 2 if run.quick else 7
  run.report = functools.partial(interleaved.report, 'rollout')
  if run.gpu:
    interleaved.need_accelerator('rollout --gpu', is_tiny=run.tiny)
    gpu(run)
    return
  run.peak = interleaved.peak()
  for name in run.cases or (['generate'] if run.quick else known):
    known[name](run)


if __name__ == '__main__':
  main()
