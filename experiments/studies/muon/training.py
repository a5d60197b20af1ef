"""One training run of the study, cut into turns, and its cost.

Everything but the optimizer is the same in both arms: the corpus, the batches
of a seed and their order, the initial weights of a seed, the schedule's shape,
weight decay and clipping.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np
import optax

from composer_jax.core import batches
from composer_jax.corpus import build as corpora
from composer_jax.corpus import tokens
from composer_jax.data import stream as streams
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups, roles
from composer_jax.train import lm_loss
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step
from configs.models import tiny

ROWS, SEQ_LEN = 16, 128
STEPS = 400
TURN = 40  # steps between changes of turn, and between held-out losses
HELDOUT_BATCHES = 24
BIAS_RATE = 1e-3

Record = dict[str, Any]
Turns = Generator[None, None, Record]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """One run.

  Attributes:
    optimizer: 'adam' (AdamW for all) or 'muon' (matrices on Muon).
    learning_rate: peak rate of every parameter; Muon's update is scaled to an
      RMS of 0.2 (Moonlight), so that both optimizers may share it.
    seed: seed of initial weights and of the order of batches.
    steps: optimizer steps.
    rest_rate: peak rate of the parameters that Muon leaves to AdamW (embedding,
      routers, norms), in either arm; None is `learning_rate`.
  """

  optimizer: str
  learning_rate: float
  seed: int
  steps: int
  rest_rate: float | None = None

  @property
  def key(self) -> tuple[str, float, int, int]:
    """Identifies the arm within a stage, like `analyze.key`."""
    return self.optimizer, self.learning_rate, self.seed, self.steps

  def options(self) -> groups.OptimizerOptions:
    """Options: warm-up over 1/20 of the steps, decay over the last third."""
    return groups.OptimizerOptions(
      name=self.optimizer,
      learning_rate=self.learning_rate,
      adam_learning_rate=self.rest_rate or self.learning_rate,
      warmup_steps=self.steps // 20,
      decay_steps=self.steps // 3,
      final_ratio=0.1,
      weight_decay=0.1,
      grad_clip=1.0,
    )


def model() -> model_config.ModelConfig:
  """Returns a narrower tiny model, whose step takes less than a second."""
  c = tiny.get_config()
  c.embed_dim = 96
  c.num_layers = 3
  c.dense_ffw_dim = 288
  c.attention.head_dim = 24
  c.moe.ffw_dim = 96
  return model_config.ModelConfig.from_dict(c.to_dict())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """Rows to learn and held-out rows, the latter as batches."""

  fingerprint: str
  learnt: list[np.ndarray]
  heldout: tuple[batches.LMBatch, ...]

  def stream(self, seed: int) -> streams.LMStream:
    return streams.lm_stream(
      self.learnt, batch_size=ROWS, seq_len=SEQ_LEN, seed=seed
    )


def _windows(documents: tokens.Documents) -> list[np.ndarray]:
  """Cuts documents into rows, which a stream then draws in random order.

  A stream that lays documents end to end would fill such a small batch with one
  document. Tokens that do not fill a row are left out.
  """
  return [
    document[start : start + SEQ_LEN]
    for document in documents
    for start in range(0, len(document) - SEQ_LEN + 1, SEQ_LEN)
  ]


def data(workdir: str, sources: Sequence[str], max_bytes: int) -> Data:
  """Builds or opens the corpus, its tokenizer and its tokens."""
  corpus = corpora.build(
    sources,
    workdir=workdir,
    options=corpora.CorpusOptions(max_bytes=max_bytes, heldout_share=0.05),
  )
  tokenizer = tokens.train_tokenizer(corpus, model().vocab_size)
  documents = tokens.tokenise(corpus, tokenizer)
  heldout = streams.lm_stream(
    _windows(documents[corpora.HELDOUT]),
    batch_size=ROWS,
    seq_len=SEQ_LEN,
    seed=0,
    num_epochs=1,
  )
  return Data(
    fingerprint=corpus.fingerprint,
    learnt=_windows(documents[corpora.TRAIN]),
    heldout=tuple(itertools.islice(heldout, HELDOUT_BATCHES)),
  )


def describe(data: Data) -> Record:
  """Returns what all runs share."""
  shapes, _ = decoder.abstract(model())
  arm = Arm(optimizer='muon', learning_rate=1.0, seed=0, steps=STEPS)
  options = dataclasses.asdict(arm.options()).items()
  return {
    'rows': ROWS,
    'seq_len': SEQ_LEN,
    'parameters': sum(x.size for x in jax.tree.leaves(shapes['params'])),
    'corpus': data.fingerprint,
    'tokens_to_learn': SEQ_LEN * len(data.learnt),
    'tokens_held_out': int(sum(b.loss_weights_BT.sum() for b in data.heldout)),
    'muon': {k: v for k, v in options if not k.endswith('learning_rate')},
    'model': dataclasses.asdict(model()),
  }


def _transform(arm: Arm) -> optax.GradientTransformation:
  shapes, axes = decoder.abstract(model())
  transform = groups.optimizer(
    arm.options(),
    params=shapes['params'],
    axes=axes['params'],
    total_steps=arm.steps,
  )
  if arm.optimizer == 'muon' or arm.rest_rate is None:
    return transform
  # AdamW's update, decay included, is proportional to the rate.
  role_tree = roles.tree(shapes['params'], axes['params'])
  rest_scale = optax.scale(arm.rest_rate / arm.learning_rate)
  return optax.chain(
    transform,
    optax.partition(
      {roles.ADAM: rest_scale, 'matrix': optax.identity()},
      jax.tree.map(lambda r: r if r == roles.ADAM else 'matrix', role_tree),
    ),
  )


@functools.cache
def _init() -> Callable[[jax.Array], decoder.Variables]:
  return jax.jit(functools.partial(decoder.init, model()))


@functools.cache
def _step(arm: Arm) -> Callable[..., Any]:
  """Returns a step compiled once for all seeds; call this with seed 0."""
  step = train_step.make(
    model(), _transform(arm), plan=None, bias_rate=BIAS_RATE
  )
  return jax.jit(step, donate_argnums=0)


@functools.cache
def _held_out_sums() -> lm_loss.SumFunction:
  return jax.jit(lm_loss.heldout_sums(model(), plan=None))


def _first_state(arm: Arm) -> train_state.TrainState:
  variables = _init()(jax.random.key(arm.seed))
  return jax.block_until_ready(train_state.create(variables, _transform(arm)))


def turns(arm: Arm, data: Data) -> Turns:
  """Trains, yielding every `TURN` steps and once before the first.

  Returns:
    Line of the run: held-out and training losses by step (training losses are
    means since the step before), and the CPU seconds of training steps until
    then, without compiling, filling batches and held-out losses.
  """
  program = _step(dataclasses.replace(arm, seed=0))
  # Compiles, off the clock, with another state, since the step donates it.
  program(_first_state(arm), next(data.stream(arm.seed)))
  state, stream = _first_state(arm), data.stream(arm.seed)

  def held_out() -> float:
    variables = state.variables()
    return lm_loss.mean_loss(_held_out_sums(), variables, data.heldout)

  steps = [0]
  cpu_s, heldout_loss, train_loss = [0.0], [held_out()], []
  while steps[-1] < arm.steps:
    yield
    count = min(TURN, arm.steps - steps[-1])
    ready, losses = list(itertools.islice(stream, count)), []
    start = time.process_time()
    for batch in ready:
      state, metrics = program(state, batch)
      losses.append(metrics.loss.loss)
    jax.block_until_ready((state, losses))
    cpu_s.append(cpu_s[-1] + time.process_time() - start)
    steps.append(steps[-1] + count)
    heldout_loss.append(held_out())
    train_loss.append(float(np.mean(losses)))
  return {
    'optimizer': arm.optimizer,
    'learning_rate': arm.learning_rate,
    'seed': arm.seed,
    **({} if arm.rest_rate is None else {'rest_rate': arm.rest_rate}),
    'tokens': arm.steps * ROWS * SEQ_LEN,
    'eval_steps': steps,
    'heldout_loss': [round(v, 5) for v in heldout_loss],
    'train_loss': [round(v, 5) for v in train_loss],
    'cpu_s': [round(v, 3) for v in cpu_s],
  }


def in_turns(runs: Sequence[Turns]) -> list[Record]:
  """Runs all to their ends in turns, so that a busy machine slows all alike."""
  lines: dict[int, Record] = {}
  while len(lines) < len(runs):
    for index, run in enumerate(runs):
      if index not in lines:
        try:
          next(run)
        except StopIteration as end:
          lines[index] = end.value
  return [lines[index] for index in range(len(runs))]


def costs(data: Data, *, rounds: int, repeats: int = 8) -> list[Record]:
  """CPU milliseconds of a step and of its parts, measured turn by turn.

  'gradients' is the step without its update, 'update' the optimizer alone
  (clipping, the transform, adding the result to the masters).

  Args:
    data: data from which a batch is taken.
    rounds: counted rounds; one warm-up round comes before them.
    repeats: calls a round.
  """
  batch = next(data.stream(0))
  programs: dict[tuple[str, str], Callable[[], Any]] = {}
  for name in ('adam', 'muon'):
    arm = Arm(optimizer=name, learning_rate=1e-3, seed=0, steps=STEPS)
    state, transform = _first_state(arm), _transform(arm)
    whole_step = jax.jit(
      train_step.make(model(), transform, plan=None, bias_rate=BIAS_RATE)
    )
    grad = jax.grad(lm_loss.loss, has_aux=True)
    gradients = jax.jit(functools.partial(grad, model=model(), plan=None))
    update = jax.jit(
      functools.partial(
        train_step.apply_gradients, optimizer=transform, bias_rate=BIAS_RATE
      )
    )
    values = train_state.policy_values(state.params, model())
    back = functools.partial(gradients, values, state.selection_bias, batch)
    direction, stats = back()
    programs[name, 'step'] = functools.partial(whole_step, state, batch)
    programs[name, 'gradients'] = back
    programs[name, 'update'] = functools.partial(
      update, state, direction, stats.load_ME
    )
  seconds: dict[tuple[str, str], list[float]] = {k: [] for k in programs}
  for turn in range(rounds + 1):
    for key, program in programs.items():
      start = time.process_time()
      for _ in range(repeats):
        jax.block_until_ready(program())
      if turn:
        seconds[key].append((time.process_time() - start) / repeats)
  return [
    {
      'optimizer': name,
      'part': part,
      'cpu_ms': [round(1e3 * v, 3) for v in values],
    }
    for (name, part), values in seconds.items()
  ]
