"""Logical axis -> mesh axes, one table per layout.

A parameter with the logical axis 'expert' reads the `expert` table, any other
the `dense` one. An axis that a table does not name is an error, not a
replicated array.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# In an expert table: this dimension takes the mesh axes that the experts could
# not, because their number does not divide by them. The first such dimension
# in the table that divides takes them all.
REST = 'rest'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """Where parameters and tokens lie.

  Attributes:
    name: as configs call it.
    dense: logical axis -> mesh axes (a tuple) or None. A mesh axis goes to
      the first dimension of a parameter that wants it.
    partial: axes of `dense` that take the largest product of their mesh axes
      that divides the dimension, where all of them would not.
    expert: likewise; 'expert' takes the largest product of its mesh axes that
      divides the number of experts, and REST marks who takes the others.
    batch: mesh axes of B.
    sequence: mesh axes of T.
  """

  name: str
  dense: Mapping[str, Any]
  partial: tuple[str, ...]
  expert: Mapping[str, Any]
  batch: tuple[str, ...]
  sequence: tuple[str, ...]


# Dense weights narrow, inside a replica; experts wide, over every device.
TRAIN = Layout(
  name='hsdp',
  dense={
    'layer': None,
    'embed': ('fsdp', 'context'),
    'norm': None,
    'route': None,
    'heads': None,
    'kv_heads': None,
    'head_dim': None,
    # Where 'embed' is another dimension, that one has these axes already.
    'q_lora': ('fsdp', 'context'),
    'kv_lora': ('fsdp', 'context'),
    'gate_up': None,
    'ffw': None,
    'vocab': None,
  },
  # A few hundred wide: they do not divide over thousands of devices.
  partial=('q_lora', 'kv_lora'),
  expert={
    'layer': None,
    'expert': ('replica', 'fsdp', 'context'),
    'embed': REST,
    'ffw': REST,
    'gate_up': None,
  },
  batch=('replica', 'fsdp'),
  sequence=('context',),
)

# Every device holds everything: small policies, and rollout engines of one
# device each.
REPLICATED = Layout(
  name='data_parallel',
  dense=dict.fromkeys(TRAIN.dense),
  partial=(),
  expert=dict.fromkeys(TRAIN.expert),
  batch=('replica', 'fsdp'),
  sequence=('context',),
)

_ALL = ('replica', 'fsdp', 'context')

# For rollouts: a token is one row, so every device sees all tokens and holds a
# share of the heads, of hidden units, of the vocabulary and of the experts. No
# weight is ever gathered; what travels is one row of sums a layer. Replicas of
# a policy are engines of their own, each on its own mesh.
DECODE = Layout(
  name='decode',
  dense={
    **dict.fromkeys(TRAIN.dense),
    'heads': _ALL,
    'kv_heads': _ALL,
    'ffw': _ALL,
    'vocab': _ALL,
  },
  # Fewer key heads than devices: each is kept by several. A vocabulary is what
  # its tokenizer made it.
  partial=('heads', 'kv_heads', 'ffw', 'vocab'),
  expert={**TRAIN.expert, 'expert': _ALL, 'embed': None, 'ffw': REST},
  batch=(),
  sequence=(),
)

# What pretraining and fine-tuning may choose from.
BY_NAME = {layout.name: layout for layout in (TRAIN, REPLICATED)}
