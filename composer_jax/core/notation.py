"""The axis letters that array names end in.

A name such as `logprobs_BT` says which axes the array has and in which order.
Suffixes are logical axes, never shards; scalars and ragged lists have none.
"""

AXES = {
  'B': 'batch row',
  'T': 'token (query) position',
  'S': 'key position, cache slot',
  'D': 'embedding',
  'F': 'ffw hidden',
  'V': 'vocabulary',
  'W': 'MLA value dim',
  'X': 'axes joined or split for one step, said where it is used',
  'N': 'query heads',
  'K': 'key/value heads',
  'G': 'query heads per key/value head',
  'H': 'head dim',
  'J': 'MLA rotated head dim',
  'C': 'MLA compressed key/value',
  'Q': 'MLA compressed query',
  'P': 'prompts',
  'R': 'rollouts per prompt',
  'E': 'experts',
  'A': 'active experts per token',
  'M': 'MoE layer',
  'L': 'decoder layer',
  'Z': 'flattened tokens, B times T',
  'Y': 'routed copies, Z times A',
  'U': 'turns',
}
