"""Reads and writes the rotary positions of a Hugging Face `config.json`.

Files of transformers v4 have `rope_theta` beside `rope_scaling`; files of v5
have both in `rope_parameters`. The type is `rope_type` or `type`. All are read,
and two that disagree are refused.

YaRN follows `_compute_yarn_parameters` of transformers. The ratio of `mscale`
and `mscale_all_dim` scales cos and sin, and the square of the second scales the
softmax (MLA only). `attention_factor` is accepted if it equals the value that
these imply. One of the two without the other is refused, since transformers and
DeepSeek's own code then disagree.
"""

import math
from typing import Any

from composer_jax.hf.architecture import keys
from composer_jax.models import config as model_config
from composer_jax.models import rope as model_rope

_DEFAULT_THETA = 1e4  # transformers' value for an absent key
_KEYS = {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor'}
# Keys of YaRN in the file, and their fields in YarnConfig.
_YARN_FIELDS = {
  'factor': 'factor',
  'original_max_position_embeddings': 'original_max_len',
  'beta_fast': 'beta_fast',
  'beta_slow': 'beta_slow',
  'mscale': 'mscale',
  'mscale_all_dim': 'mscale_all_dim',
  'truncate': 'truncate',
}
_YARN_KEYS = {'attention_factor', *_YARN_FIELDS}
# Keys that may also stand outside of the rope parameters.
_OUTSIDE = {
  *('rope_theta', 'partial_rotary_factor', 'original_max_position_embeddings')
}


def from_fields(
  fields: dict[str, Any], *, interleaved: bool, is_mla: bool
) -> model_config.RopeConfig:
  """Reads the rotary positions of a parsed `config.json`.

  Args:
    interleaved: true if neighbouring dimensions rotate as a pair.
    is_mla: true if transformers scales the softmax by `mscale_all_dim`.
  """
  given = _parameters(fields)
  types = {
    keys.take(given, key, str) for key in ('rope_type', 'type') if key in given
  }
  if len(types) > 1:
    raise ValueError(
      f"'rope_type' and 'type' of {given} contradict each other."
    )
  kind = types.pop() if types else 'default'
  if kind not in ('default', 'yarn'):
    raise ValueError(
      f"rope type {kind!r} is not supported; 'default' and 'yarn' are."
    )
  unknown = set(given) - _KEYS - (_YARN_KEYS if kind == 'yarn' else set())
  if unknown:
    raise ValueError(
      f'{sorted(unknown)} are unknown for rope type {kind!r}: {given}.'
    )
  for key in _OUTSIDE & {k for k in fields if fields[k] is not None}:
    if given.setdefault(key, fields[key]) != fields[key]:
      raise ValueError(
        f'{key!r} is {fields[key]}, but {given[key]} in the rope parameters; '
        'remove one.'
      )
  keys.check_only(given, {'partial_rotary_factor': 1})
  return model_config.RopeConfig(
    theta=keys.take(given, 'rope_theta', float, _DEFAULT_THETA),
    interleaved=interleaved,
    yarn=_yarn(fields, given, is_mla) if kind == 'yarn' else None,
  )


def _parameters(fields: dict[str, Any]) -> dict[str, Any]:
  given = fields.get('rope_parameters') or fields.get('rope_scaling') or {}
  other = fields.get('rope_scaling') or given
  if given != other:
    raise ValueError(
      f"'rope_parameters' ({given}) and 'rope_scaling' ({other}) differ; "
      'remove one.'
    )
  if not isinstance(given, dict) or any(
    isinstance(value, dict) for value in given.values()
  ):
    raise ValueError(
      f'rope parameters must be one flat object for all layers, not {given!r}.'
    )
  return {key: value for key, value in given.items() if value is not None}


def _yarn(
  fields: dict[str, Any], given: dict[str, Any], is_mla: bool
) -> model_config.YarnConfig:
  original = keys.take(given, 'original_max_position_embeddings', int, None)
  if original is None:  # The default of transformers is the whole context.
    original = keys.take(fields, 'max_position_embeddings', int)
  yarn = model_config.YarnConfig(
    factor=keys.take(given, 'factor', float),
    original_max_len=original,
    # transformers takes zero for absent.
    beta_fast=keys.take(given, 'beta_fast', float, 32.0) or 32.0,
    beta_slow=keys.take(given, 'beta_slow', float, 1.0) or 1.0,
    mscale=keys.take(given, 'mscale', float, None),
    mscale_all_dim=keys.take(given, 'mscale_all_dim', float, None),
    truncate=keys.take(given, 'truncate', bool, True),
  )
  if yarn.mscale_all_dim and not is_mla:
    raise ValueError(
      f'mscale_all_dim ({yarn.mscale_all_dim}) of YaRN needs multi-head latent '
      'attention: transformers scales the softmax by it there alone.'
    )
  implied = model_rope.rotation_scale(yarn)
  stated = keys.take(given, 'attention_factor', float, implied)
  if not math.isclose(stated, implied, rel_tol=1e-6):
    raise ValueError(
      f"'attention_factor' ({stated}) must be what 'factor', 'mscale' and "
      f"'mscale_all_dim' imply ({implied}); another one is not implemented."
    )
  return yarn


def to_fields(rope: model_config.RopeConfig) -> dict[str, Any]:
  """Returns `rope_theta` and `rope_scaling`, which both v4 and v5 read."""
  scaling = None
  if rope.yarn is not None:
    values = {k: getattr(rope.yarn, name) for k, name in _YARN_FIELDS.items()}
    given = {k: v for k, v in values.items() if v is not None}
    scaling = {'rope_type': 'yarn', **given}
  return {'rope_theta': rope.theta, 'rope_scaling': scaling}
