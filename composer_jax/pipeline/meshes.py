"""The meshes of a run: of pretraining and SFT, of RL, of held-out episodes."""

import dataclasses

import jax
from jax.sharding import Mesh

from composer_jax.parallel import layouts, topology
from composer_jax.pipeline import sections
from composer_jax.pipeline import spec as specs
from composer_jax.train import placement as placements


def language_model(spec: specs.Spec) -> placements.Placement:
  """Of pretraining and SFT: all devices."""
  stage = spec.cpt
  return placements.build(
    spec.lm_model,
    mesh=_mesh(spec.mesh, may_leave=False),
    layout=layouts.BY_NAME[spec.layout],
    options=spec.parallel,
    num_tokens=stage.batch_size // stage.accumulate * stage.seq_len,
  )


def reinforcement(spec: specs.Spec) -> placements.Placement:
  """Of RL's trainer: the first devices; an engine may have the others."""
  return placements.build(
    spec.model,
    mesh=_mesh(spec.rl.mesh, may_leave=True),
    layout=layouts.BY_NAME[spec.layout],
    options=spec.parallel,
    num_tokens=spec.rl.rows * spec.rl.seq_len,
  )


def single(spec: specs.Spec) -> placements.Placement:
  """The first device, which holds everything."""
  mesh = topology.make_mesh(devices=jax.devices()[:1])
  return placements.build(spec.model, mesh=mesh, layout=layouts.REPLICATED)


def _mesh(axes: sections.Mesh, *, may_leave: bool) -> Mesh:
  """Makes a mesh of the first devices.

  Args:
    axes: of it.
    may_leave: whether devices may be left over. Emulated ones always may: there
      are as many as the largest mesh of a run needs.
  """
  devices = jax.devices()
  if may_leave or devices[0].platform == 'cpu':
    devices = devices[: axes.size]
  return topology.make_mesh(**dataclasses.asdict(axes), devices=devices)
