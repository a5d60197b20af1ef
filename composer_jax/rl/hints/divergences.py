"""How far a student's distribution over words is from a teacher's."""

import jax
import jax.numpy as jnp

# KL(student || teacher), KL(teacher || student), and the generalised
# Jensen-Shannon divergence between them.
KINDS = ('reverse', 'forward', 'jsd')


def divergence(
  student_logits_ZV: jax.Array,
  teacher_logits_ZV: jax.Array,
  kind: str,
  *,
  jsd_mix: float = 0.5,
  top_k: int = 0,
) -> jax.Array:
  """Returns the divergence D_Z in nats, with a gradient of the student's.

  With M the mixture of which the teacher has the share b, 'jsd' is
  (1 - b) KL(student || M) + b KL(teacher || M).

  Args:
    student_logits_ZV: float32.
    teacher_logits_ZV: float32.
    kind: of `KINDS`.
    jsd_mix: b.
    top_k: words of the teacher that are told apart, with one bucket for all
      others, which makes no divergence larger; 0 tells all apart.
  """
  student_ZV = jax.nn.log_softmax(student_logits_ZV)
  teacher_ZV = jax.nn.log_softmax(teacher_logits_ZV)
  if top_k:
    student_ZV, teacher_ZV = _bucketed(student_ZV, teacher_ZV, top_k)
  teacher_ZV = jax.lax.stop_gradient(teacher_ZV)
  fixed_ZV = jax.lax.stop_gradient(student_ZV)
  if kind == 'forward':
    value_Z = _kl(teacher_ZV, fixed_ZV)
    slope_ZV = jnp.exp(fixed_ZV) - jnp.exp(teacher_ZV)
  elif kind == 'reverse':
    value_Z = _kl(fixed_ZV, teacher_ZV)
    slope_ZV = jnp.exp(fixed_ZV) * (fixed_ZV - teacher_ZV)
  else:
    mixture_ZV = jnp.logaddexp(
      fixed_ZV + jnp.log1p(-jsd_mix), teacher_ZV + jnp.log(jsd_mix)
    )
    value_Z = (1 - jsd_mix) * _kl(fixed_ZV, mixture_ZV)
    value_Z += jsd_mix * _kl(teacher_ZV, mixture_ZV)
    slope_ZV = (1 - jsd_mix) * jnp.exp(fixed_ZV) * (fixed_ZV - mixture_ZV)
  # By the log-probabilities, without what adds up to nothing because those sum
  # to 1: so it is exactly 0 where student and teacher are the same.
  moving_Z = (slope_ZV * student_ZV).sum(-1)
  return value_Z + moving_Z - jax.lax.stop_gradient(moving_Z)


def _kl(left_ZV: jax.Array, right_ZV: jax.Array) -> jax.Array:
  return (jnp.exp(left_ZV) * (left_ZV - right_ZV)).sum(-1)


def _bucketed(student_ZV, teacher_ZV, top_k):
  """Returns log-probabilities of the teacher's best words, and of the rest.

  The words are the teacher's: which they are does not depend on what is
  trained.
  """
  num_words = teacher_ZV.shape[-1]
  if top_k >= num_words:
    raise ValueError(
      f'top_k ({top_k}) must be below the size of the vocabulary '
      f'({num_words}); 0 tells all words apart.'
    )
  _, ids_ZX = jax.lax.top_k(teacher_ZV, top_k)
  is_best_ZV = jax.nn.one_hot(ids_ZX, num_words, dtype=bool).any(-2)

  def merged(logprobs_ZV):
    best_ZX = jnp.take_along_axis(logprobs_ZV, ids_ZX, axis=-1)
    # Not log(1 - sum of the best), which cancels where they have it all.
    rest_ZV = jnp.where(is_best_ZV, -jnp.inf, logprobs_ZV)
    rest_Z1 = jax.nn.logsumexp(rest_ZV, axis=-1, keepdims=True)
    return jnp.concatenate([best_ZX, rest_Z1], axis=-1)

  return merged(student_ZV), merged(teacher_ZV)
