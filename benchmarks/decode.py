"""Tokens per second of the rollout engine, beside doing without its cache.

  python -m benchmarks.decode [--quick]

Two cases of the tiny model with 64 sessions open:
  'decode': plain sampling. The peer is the same model without a cache: a full
    forward pass over everything so far for each token, timed at the mean
    length of the run.
  'turns': sessions of four turns, a tool's output before each. The peer is the
    same engine without shared prefixes, where each turn is a new session that
    consumes the whole context. All tokens of an episode count, sampled or not.
The limit counts the useful operations of a forward pass (`models.flops`) at the
measured speed of a dense product.
"""

import argparse
import dataclasses
import functools
from typing import Any

import numpy as np

from benchmarks import interleaved

_SLOTS, _MAX_LEN = 64, 384
_CONTEXT, _NEW = 96, 128
_IDS = 256  # ids of the contexts, which every vocabulary here has
# One episode of 'turns': prompt, then four times a call and a tool's output.
_PROMPT, _TURNS, _CALL, _OUTPUT = 120, 4, 20, 40


def _request(session, context_T, new):
  from composer_jax.core import records

  return records.SampleRequest(
    session=session,
    context_T=context_T,
    max_new_tokens=new,
    stop_tokens=(),
    seed=(0, int(session)),
  )


def _drain(engine):
  while engine.num_unfinished:
    yield from engine.step()


def _context(length, seed):
  rng = np.random.default_rng(seed)
  return rng.integers(0, _IDS, length).astype(np.int32)


def _decode_tokens(engine) -> float:
  """Samples for all sessions after their context; returns tokens sampled."""
  for i in range(_SLOTS):
    engine.submit(_request(f'{i}', _context(1, i), _NEW))
  return float(sum(len(c.tokens_T) for c in _drain(engine)))


def _open_sessions(engine) -> None:
  for i in range(_SLOTS):
    if engine.is_open(f'{i}'):
      engine.close(f'{i}')
    engine.submit(_request(f'{i}', _context(_CONTEXT, i), 1))
  for _ in _drain(engine):
    pass


def _play_turns(engine, keep: bool) -> float:
  """Plays every session's turns; returns the tokens of their windows."""
  windows = {f'{i}': _context(_PROMPT, i) for i in range(_SLOTS)}
  turns = dict.fromkeys(windows, 0)
  for name, window_T in windows.items():
    engine.submit(_request(name, window_T, _CALL))
  while engine.num_unfinished:
    for completion in engine.step():
      name = completion.session
      turns[name] += 1
      output_T = _context(_OUTPUT, turns[name])
      windows[name] = np.concatenate(
        [windows[name], completion.tokens_T, output_T]
      )
      if turns[name] == _TURNS or not keep:
        engine.close(name)
      if turns[name] < _TURNS:
        context_T = output_T if keep else windows[name]
        engine.submit(_request(name, context_T, _CALL))
  return float(sum(len(window_T) for window_T in windows.values()))


def _uncached(config, variables, length: int):
  """Returns a function that recomputes everything for one token per row."""
  import jax
  import jax.numpy as jnp

  from composer_jax.models import decoder, head

  tokens_BT = jnp.asarray(
    np.stack([_context(length, i) for i in range(_SLOTS)])
  )
  positions_BT = jnp.broadcast_to(jnp.arange(length), tokens_BT.shape)

  @jax.jit
  def next_tokens(variables):
    output: Any = decoder.Decoder(config).apply(
      variables, tokens_BT, jnp.ones_like(tokens_BT), positions_BT
    )
    last_B1D = output.hidden_BTD[:, -1:]
    return head.logits(variables, last_B1D, config).argmax(-1)

  def run() -> float:
    jax.block_until_ready(next_tokens(variables))
    return float(_SLOTS)

  return run


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='under a minute')
  quick = parser.parse_args().quick
  interleaved.pin_to_one_core()

  import jax
  import jax.numpy as jnp

  from composer_jax.models import config as config_lib
  from composer_jax.models import decoder, flops
  from composer_jax.rollout import engine as engines
  from configs.models import tiny

  config = config_lib.ModelConfig.from_dict(tiny.get_config().to_dict())
  init = jax.jit(functools.partial(decoder.init, config))
  variables = decoder.policy(init(jax.random.key(0)))
  widened = jax.tree.map(lambda x: x.astype(jnp.float32), variables)
  options = engines.EngineOptions(
    num_slots=_SLOTS, max_len=_MAX_LEN, prefill_chunk=16, decode_steps=8
  )
  engine = engines.Engine(config, variables, 0, options)
  peak = interleaved.peak()

  length = _CONTEXT + _NEW // 2
  interleaved.report(
    'decode',
    f'decode, {_SLOTS} sessions, {_CONTEXT} + {_NEW} tokens',
    interleaved.rates(
      lambda: _decode_tokens(engine),
      _uncached(config, widened, length),
      2 if quick else 7,
      # This case measures decoding, so contexts are consumed off the clock.
      before=lambda: _open_sessions(engine),
    ),
    against='a forward pass over all tokens before',
    limit=peak / flops.forward_per_token(config, length),
    goal='>= 5000 tokens/s',
    met=lambda rate, ratio: rate >= 5000,
  )
  for i in range(_SLOTS):
    engine.close(f'{i}')
  # Shared prefixes would save the peer the work that this case measures.
  without = dataclasses.replace(options, share_prefixes=False)
  forgetful = engines.Engine(config, variables, 0, without)
  total = _PROMPT + _TURNS * (_CALL + _OUTPUT)
  interleaved.report(
    'decode',
    f'turns, {_SLOTS} sessions of {_TURNS} turns, {total} tokens',
    interleaved.rates(
      lambda: _play_turns(engine, keep=True),
      lambda: _play_turns(forgetful, keep=False),
      2 if quick else 5,
    ),
    against='a new session for each turn',
    limit=peak / flops.forward_per_token(config, total, causal=True),
    goal='ratio >= 1.5',
    met=lambda rate, ratio: ratio >= 1.5,
  )


if __name__ == '__main__':
  main()
