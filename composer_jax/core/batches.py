"""Device batches: what crosses `jit`.

These are `PyTreeNode`s, so they may hold arrays, tracers, shapes or shardings,
and are therefore never checked in their constructors. Every per-token array is
indexed by the token it is about, exactly as in `core.records`; the one shift by
a token happens in `models.head`.
"""

import flax.struct
import jax


class LMBatch(flax.struct.PyTreeNode, kw_only=True):
  """A packed batch of documents.

  Attributes:
    tokens_BT: int32.
    segment_ids_BT: int32; 0 marks padding, documents count from 1 per row.
    positions_BT: int32, position within the document, from 0.
    loss_weights_BT: float32 weight of predicting that token from those before
      it; 0 on padding and on the first token of each document.
  """

  tokens_BT: jax.Array
  segment_ids_BT: jax.Array
  positions_BT: jax.Array
  loss_weights_BT: jax.Array


class RLBatch(LMBatch, kw_only=True):
  """A packed batch of trajectories, and what the policy gradient needs.

  A token's loss weight is 1 where the policy sampled it, else 0.

  Attributes:
    rollout_logprobs_BT: float32 under the policy that sampled the token.
    advantages_BT: float32, the trajectory's advantage at each of its tokens.
    temperatures_BT: float32, 1 on padding.
    expert_ids_MBTA: uint16 recorded routes, NO_ROUTE where there is none; None
      to route every token afresh.
  """

  rollout_logprobs_BT: jax.Array
  advantages_BT: jax.Array
  temperatures_BT: jax.Array
  expert_ids_MBTA: jax.Array | None = None


class HintBatch(flax.struct.PyTreeNode, kw_only=True):
  """Hinted turns: as the student wrote them, and as a teacher reads them.

  The same tokens stand at other places of other rows. Which belong together is
  said by slots: the token with slot n of the student is that with slot n of the
  teacher. Slots count from 1 in each group of rows that devices share; 0 marks
  the tokens that take no part, the hints among them.

  Attributes:
    student: windows up to their last hinted turn, with recorded routes. A
      token's loss weight is 1 over its turn's length, 0 without a slot; nothing
      has an advantage.
    teacher: for each hint, the window up to its turn with the hint inside. No
      routes: its context is another, so its routes are its own.
    student_slots_BT: int32.
    teacher_slots_BT: int32.
  """

  student: RLBatch
  teacher: LMBatch
  student_slots_BT: jax.Array
  teacher_slots_BT: jax.Array


class RouteStats(flax.struct.PyTreeNode, kw_only=True):
  """What the routers of all MoE layers did; returned, never sown.

  Attributes:
    load_ME: int32 tokens sent to each expert, padding excluded.
    aux_loss_M: float32 load-balancing loss of each layer, before its weight.
    z_loss_M: float32 mean squared log-sum-exp of the logits, before its weight.
    replay_agreement_M: float32 share of replayed tokens whose own top-k equals
      the recorded set; 1 where nothing was replayed.
    replay_replaced_M: float32 share of recorded expert ids that the filter of
      plausibility (`MoEConfig.replay_alpha`) put others in place of.
    no_route_M: float32 share of tokens, padding excluded, that a replay had no
      record of and were routed afresh; 0 without a replay.
  """

  load_ME: jax.Array
  aux_loss_M: jax.Array
  z_loss_M: jax.Array
  replay_agreement_M: jax.Array
  replay_replaced_M: jax.Array
  no_route_M: jax.Array
