"""How long serving stops for new weights, beside a memcpy of the policy.

A real engine has open sessions in the middle of their answers. The next weights
are placed already (`Engine.place`, during which serving goes on). The weights
before stay held, as in a receiver that can roll back: dropping the last
reference would free the memory within the pause. The pause is what the engine
itself measures of `Engine.switch`, from when it stops dispatching.
"""

import time
from typing import Any

import numpy as np

from benchmarks import interleaved, rollout_model

SLOTS, STEPS = 8, 4  # number of sessions; tokens decoded in a turn
# 53 million parameters: more than caches hold.
SHAPE: dict[str, Any] = dict(
  ffw_dim=1024, vocab_size=8192, tie=True, embed_dim=512
)
QUICK: dict[str, Any] = dict(ffw_dim=256, vocab_size=1024, tie=True)


def measure(rounds: int, *, quick: bool) -> None:
  import jax

  from composer_jax.core import records, trees
  from composer_jax.models import decoder

  config = rollout_model.config(**(QUICK if quick else SHAPE))
  init = jax.jit(lambda key: decoder.policy(decoder.init(config, key)))
  policies = [init(jax.random.key(seed)) for seed in (0, 1)]
  engine = rollout_model.engine(config, SLOTS, decode_steps=1)
  for slot in range(SLOTS):
    engine.submit(
      records.SampleRequest(
        session=f'pause{slot}',
        context_T=np.arange(8, dtype=np.int32),
        max_new_tokens=120,
        stop_tokens=(),
        seed=(0, slot),
      )
    )
  arrays = [np.array(a) for a in trees.flatten_names(policies[0]).values()]
  into = [np.empty_like(a) for a in arrays]
  pauses, copies, plain, swapping = [], [], [], []
  held: list[object] = []

  def run(count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
      engine.step()
    return time.perf_counter() - start

  for turn in range(rounds + 2):
    placed = engine.place(policies[turn % 2], turn + 1)
    held = [*held[-1:], placed]
    without = run(STEPS)
    start = time.perf_counter()
    run(STEPS // 2)
    engine.switch(placed)
    run(STEPS - STEPS // 2)
    with_swap = time.perf_counter() - start
    start = time.perf_counter()
    for to, array in zip(into, arrays, strict=True):
      np.copyto(to, array)
    copied = time.perf_counter() - start
    if turn > 1:  # Warm up: compile the programs and touch the pages of memory.
      pauses.append(engine.stats().swap_s)
      copies.append(copied)
      plain.append(without)
      swapping.append(with_swap)
  assert engine.stats().running == SLOTS, 'the sessions must still be decoding'
  size = sum(a.nbytes for a in arrays) / 1e6
  goal_share = 1.0 if quick else 0.01
  interleaved.report(
    'delta',
    f'pause of an engine with {SLOTS} sessions for {size:.0f} MB of weights',
    ([1e6 * s for s in pauses], [1e6 * s for s in copies]),
    against='one memcpy of the weights',
    limit=None,
    # A swap has a fixed cost, which is a larger share of a small policy.
    goal=f'ratio <= {goal_share}',
    met=lambda _, ratio: ratio <= goal_share,
    unit='us',
  )
  interleaved.report(
    'delta',
    f'{STEPS} decode steps of that engine with a swap among them',
    ([1e6 * s for s in swapping], [1e6 * s for s in plain]),
    against='as many steps without a swap',
    limit=None,
    goal='none',
    met=lambda *_: True,
    unit='us',
  )
