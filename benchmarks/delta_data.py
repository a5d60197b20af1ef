"""Steps of policies: synthetic ones, and recordings of our own training.

The synthetic weights are N(0, 0.02): off the bf16 grid, as masters of a running
optimizer are. Updates have the statistics that optimizers give them and
none of a model's structure.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from benchmarks import delta_recordings

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
POLICIES = 10  # policies of a case: a catch-up over eight deltas, and one more

Policy = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """Policies of consecutive steps.

  Attributes:
    name: short name.
    label: dtype, optimizer and rate, for the lines of the benchmark.
    policies: arrays by name, one dictionary a step.
    masters: flat masters of the last two steps; None if unknown.
    is_cold: true if the masters began on the grid of bfloat16.
  """

  name: str
  label: str
  policies: list[Policy]
  masters: tuple[np.ndarray, np.ndarray] | None
  is_cold: bool = False


def adamw(
  rng: np.random.Generator, shape: tuple[int, ...], rate: float
) -> Callable[[], np.ndarray]:
  """Returns a function that draws updates of AdamW in its steady state.

  Gradients are noise of size 1 with a constant part of 0.28, so that updates
  are 0.34 of the rate, as measured on trained models. The moments start near
  where they settle, which would take sixty steps.
  """
  constant = 0.28 * rng.standard_normal(shape, np.float32)
  # The factors are deviations of running means of noise, decays 0.9 and 0.95.
  mean = constant + 0.2294 * rng.standard_normal(shape, np.float32)
  square = 1 + constant**2 + 0.2265 * rng.standard_normal(shape, np.float32)
  np.maximum(square, 0.4, out=square)

  def update() -> np.ndarray:
    nonlocal mean, square
    gradient = rng.standard_normal(shape, np.float32)
    gradient += constant
    mean += np.float32(0.1) * (gradient - mean)
    np.square(gradient, out=gradient)
    square += np.float32(0.05) * (gradient - square)
    return np.float32(-rate) * mean / np.sqrt(square)

  return update


def muon(
  rng: np.random.Generator, shape: tuple[int, ...], rms: float
) -> Callable[[], np.ndarray]:
  """Returns a function that draws updates of Muon: of one size, and persistent.

  An orthogonalised momentum of decay 0.95 has a constant root mean square, and
  its elements are nearly normal.
  """
  momentum = rng.standard_normal(shape, np.float32)

  def update() -> np.ndarray:
    nonlocal momentum
    # The variance stays 1.
    momentum *= np.float32(0.95)
    momentum += np.float32(0.3122) * rng.standard_normal(shape, np.float32)
    return np.float32(-rms) * momentum

  return update


def synthetic(
  label: str,
  make: Callable[..., Callable[[], np.ndarray]],
  size: float,
  *,
  experts: int,
  policies: int,
) -> Case:
  """Returns a case of one array, after ten steps that are not kept.

  The array holds the experts of a layer, [layer, expert, D, gate or up, F], as
  do 98 % of the weights of a large model: two chunks of 2**20 elements an
  expert.
  """
  rng = np.random.default_rng(0)
  shape = (1, experts, 1024, 2, 1024)
  masters = np.float32(0.02) * rng.standard_normal(shape, np.float32)
  update = make(rng, shape, size)
  before = masters
  policies_kept = []
  for step in range(10 + policies):
    before = masters
    masters = masters + update()
    if step >= 10:
      policies_kept.append({'moe_layers/moe/up': masters.astype(BFLOAT16)})
  return Case(
    name=label,
    label=label,
    policies=policies_kept,
    masters=(before.reshape(-1), masters.reshape(-1)),
  )


def recorded(folder: pathlib.Path) -> Iterator[Case]:
  """Yields the cases that experiments.studies.delta.record left in a folder."""
  for path in delta_recordings.names(folder):
    about = delta_recordings.about(path)
    dtypes, stage = about['dtypes'], about['stage']
    # Biases of routers are not rounded, so the law does not apply to them.
    rounded = {n: 'float32' for n, d in dtypes.items() if d == 'bfloat16'}
    masters = [
      np.concatenate([arrays[n].reshape(-1) for n in rounded])
      for arrays in delta_recordings.load(path, 'masters', rounded)
    ]
    yield Case(
      name=path.name,
      label=(
        f'bf16, {stage.upper()} of {about["parameters"] / 1e6:.1f}M, '
        f'{about["optimizer"].title()} at {about["learning_rate"]:g}'
        + (', masters from bf16' if about['is_cold'] else '')
      ),
      policies=delta_recordings.load(path, 'policy', dtypes),
      masters=(masters[0], masters[1]),
      is_cold=about['is_cold'],
    )


def cast_share(masters: tuple[np.ndarray, np.ndarray]) -> float:
  """Returns the share of bf16 codes that differ between two steps."""

  before, after = (m.astype(BFLOAT16).view(np.uint16) for m in masters)
  return float((before != after).mean())


@dataclasses.dataclass(frozen=True)
class Codes:
  """Weights in a quantised receiver: codes, and a scale a group of codes."""

  codes: np.ndarray
  scales: np.ndarray


def fp8(masters: np.ndarray, *, powers_of_two: bool, group: int = 128) -> Codes:
  """Quantises to e4m3 with a scale a group, in float32 or a power of two."""
  rows = masters[: masters.size // group * group].reshape(-1, group)
  scales = np.abs(rows).max(1, keepdims=True) / np.float32(448)
  np.maximum(scales, np.float32(2.0**-126), out=scales)
  if powers_of_two:
    scales = np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
  codes = (rows / scales).astype(ml_dtypes.float8_e4m3fn)
  return Codes(codes.view(np.uint8), scales.view(np.uint32))


def int4(masters: np.ndarray, *, group: int = 32) -> Codes:
  """Quantises to codes of -7 to 7 with a bf16 scale a group."""
  rows = masters[: masters.size // group * group].reshape(-1, group)
  scales = (np.abs(rows).max(1, keepdims=True) / np.float32(7)).astype(BFLOAT16)
  wide = np.maximum(scales.astype(np.float32), np.float32(2.0**-126))
  codes = np.clip(np.rint(rows / wide), -7, 7).astype(np.int8)
  return Codes(codes, scales.view(np.uint16))


def differing(before: Codes, after: Codes) -> tuple[float, float]:
  """Returns the shares of codes and of scales that differ."""
  return (
    float((before.codes != after.codes).mean()),
    float((before.scales != after.scales).mean()),
  )
