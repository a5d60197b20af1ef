"""Records, files and trees that every package may use, and the axis letters.

A name such as `logprobs_BT` says which axes the array has and in which order.
Suffixes are logical axes, never shards; scalars and ragged lists have none.

  B  batch row                        E  experts
  T  token (query) position           A  active experts per token
  S  key position, cache slot         M  MoE layer
  D  embedding                        L  decoder layer
  F  ffw hidden                       Z  flattened tokens, B times T
  V  vocabulary                       Y  routed copies, Z times A
  N  query heads                      P  prompts
  K  key/value heads                  R  rollouts per prompt
  G  query heads per key/value head   U  turns
  H  head dim                         C  MLA compressed key/value
  J  MLA rotated head dim             Q  MLA compressed query
  W  MLA value dim                    X  axes that are explained beside it
"""
