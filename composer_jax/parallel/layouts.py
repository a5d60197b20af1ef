"""Tables from logical axes to mesh axes, one pair per layout.

Parameters with the logical axis 'expert' use the `expert` table, all others the
`dense` table. An axis that is missing from its table is an error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Entry of an expert table for a dimension that takes the mesh axes by which the
# number of experts does not divide. The first such dimension that divides by
# all of them takes them.
REST = 'rest'


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
  """The sharding of parameters and tokens; compared by identity.

  Attributes:
    dense: tuple of mesh axes, or None, for each logical axis. A parameter's
      first dimension with a mesh axis takes it.
    partial: logical axes of `dense` that take the largest product of their
      mesh axes that divides the dimension.
    expert: table of expert parameters. 'expert' takes the largest product of
      its mesh axes that divides the number of experts; see REST for the others.
    batch: mesh axes of B.
    sequence: mesh axes of T.
  """

  name: str
  dense: Mapping[str, Any]
  partial: tuple[str, ...]
  expert: Mapping[str, Any]
  batch: tuple[str, ...]
  sequence: tuple[str, ...]


# Dense weights are sharded inside a replica, experts over all devices.
TRAIN = Layout(
  name='hsdp',
  dense={
    'layer': None,
    'embed': ('fsdp', 'context'),
    'joined': None,
    'norm': None,
    'route': None,
    'heads': None,
    'kv_heads': None,
    'head_dim': None,
    # Without effect beside the dimension 'embed', which takes these axes.
    'q_lora': ('fsdp', 'context'),
    'kv_lora': ('fsdp', 'context'),
    'gate_up': None,
    'ffw': None,
    'vocab': None,
    'rank': ('fsdp', 'context'),
  },
  # A few hundred wide, too few to divide over thousands of devices.
  partial=('q_lora', 'kv_lora', 'rank'),
  expert={
    'layer': None,
    'expert': ('replica', 'fsdp', 'context'),
    'embed': REST,
    'ffw': REST,
    'gate_up': None,
    'rank': None,
  },
  batch=('replica', 'fsdp'),
  sequence=('context',),
)

# Every device holds all parameters: for small policies and for rollout engines
# of one device.
REPLICATED = Layout(
  name='data_parallel',
  dense=dict.fromkeys(TRAIN.dense),
  partial=(),
  expert=dict.fromkeys(TRAIN.expert),
  batch=('replica', 'fsdp'),
  sequence=('context',),
)

_ALL = ('replica', 'fsdp', 'context')

# For rollouts: every device sees all tokens and holds a share of the heads,
# hidden units, vocabulary and experts. No weight is gathered; devices exchange
# sums, one row per token and layer. Replicas of a policy are separate engines
# on meshes of their own.
DECODE = Layout(
  name='decode',
  dense={
    **dict.fromkeys(TRAIN.dense),
    'heads': _ALL,
    'kv_heads': _ALL,
    'ffw': _ALL,
    'vocab': _ALL,
  },
  # Several devices keep the same key head if heads are fewer than devices. The
  # size of a vocabulary need not divide.
  partial=('heads', 'kv_heads', 'ffw', 'vocab'),
  expert={**TRAIN.expert, 'expert': _ALL, 'embed': None, 'ffw': REST},
  batch=(),
  sequence=(),
)

# Layouts that pretraining and fine-tuning may choose.
BY_NAME = {layout.name: layout for layout in (TRAIN, REPLICATED)}
