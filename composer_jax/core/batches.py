"""Batches on devices, as arguments and results of jitted functions.

They may hold arrays, tracers, shapes or shardings, and are therefore not
checked when made. Per-token arrays are indexed by the token they are about, as
in `core.records`; the only shift by a token happens in `models.head`.
"""

import flax.struct
import jax


class LMBatch(flax.struct.PyTreeNode, kw_only=True):
  """A packed batch of documents.

  Attributes:
    tokens_BT: int32 token ids.
    segment_ids_BT: int32 number of the document in its row, from 1; 0 marks
      padding.
    positions_BT: int32 position within the document, from 0.
    loss_weights_BT: float32 weight of predicting that token from those before
      it; 0 on padding and on the first token of each document.
  """

  tokens_BT: jax.Array
  segment_ids_BT: jax.Array
  positions_BT: jax.Array
  loss_weights_BT: jax.Array


class RLBatch(LMBatch, kw_only=True):
  """A packed batch of trajectories for the policy gradient.

  A token's loss weight is 1 where the policy sampled it, else 0.

  Attributes:
    rollout_logprobs_BT: float32 log-probability under the sampling policy.
    advantages_BT: float32 advantage of the token's trajectory.
    temperatures_BT: float32 sampling temperature; 1 on padding.
    expert_ids_MBTA: uint16 recorded routes, NO_ROUTE where there is none; None
      routes every token afresh.
    own_BT: true for the tokens of a pass of a chain (`gate.audit`), or None.
  """

  rollout_logprobs_BT: jax.Array
  advantages_BT: jax.Array
  temperatures_BT: jax.Array
  expert_ids_MBTA: jax.Array | None = None
  own_BT: jax.Array | None = None


class HintBatch(flax.struct.PyTreeNode, kw_only=True):
  """Hinted turns as the student wrote them and as a teacher reads them.

  A turn's tokens have other places in the teacher's rows. Slots match them: the
  token of slot n of the student is that of slot n of the teacher. Slots count
  from 1 within the rows that one group of devices shares; tokens without a
  match, such as those of hints, have 0.

  Attributes:
    student: windows up to their last hinted turn, with recorded routes. A
      token's loss weight is 1 over its turn's length, 0 without a slot, and its
      advantage is 0.
    teacher: for each hint, the window up to its turn with the hint inserted.
      It has no recorded routes, since its context differs.
    student_slots_BT, teacher_slots_BT: int32 slots of the tokens.
  """

  student: RLBatch
  teacher: LMBatch
  student_slots_BT: jax.Array
  teacher_slots_BT: jax.Array


class RouteStats(flax.struct.PyTreeNode, kw_only=True):
  """Statistics of the routers of all MoE layers.

  Attributes:
    load_ME: int32 number of tokens sent to each expert, padding excluded.
    aux_loss_M: float32 load-balancing loss of each layer, before its weight.
    z_loss_M: float32 mean squared log-sum-exp of the logits, before its weight.
    replay_agreement_M: float32 share of replayed tokens whose own top-k equals
      the recorded set; 1 where nothing was replayed.
    replay_replaced_M: float32 share of recorded expert ids that were replaced
      as implausible (`MoEConfig.replay_alpha`).
  """

  load_ME: jax.Array
  aux_loss_M: jax.Array
  z_loss_M: jax.Array
  replay_agreement_M: jax.Array
  replay_replaced_M: jax.Array
