"""What each metric of `metrics.jsonl` means; checked against a run.

By stage, as `telemetry.writer` writes them. A line tells of the one step that
it names. In RL metrics are of all the step's rollouts, but for those marked *:
these cover only what the step trains on, the trajectories with an advantage, or
all where none has one.

cpt, sft
  loss: mean over weighted tokens, nats
  heldout_loss: same, on documents that training skips
  aux_loss: load balancing, before its weight, summed over MoE layers
  z_loss: mean squared log-sum-exp of the router's logits, before its weight,
      summed over MoE layers
  grad_norm: global, before clipping
  update_norm: global, of what was added to the masters
  lr: learning rate of the step
  tokens_per_s: real tokens, padding excluded, since the line before; no
      compilation
  mfu: share of peak FLOP/s, attention unmasked (every query meets the whole
      row); absent where no peak is known. On a CPU the peak is an estimate of
      idle cores (`telemetry.mfu`), so that other work on them lowers it
  max_logit: largest attention logit of the batch; QK-clip scales a head above
      muon.qk_clip down to it; absent if that is 0
  max_logit_layers: same, of each layer
  muon_matrices: that Muon orthogonalises; this and the next four, of its plan,
      at step 0 only
  muon_groups: of matrices of one shape and placement
  muon_flops: of Newton-Schulz, of a device and step
  muon_flops_ideal: an even share of it by the standard method
  muon_bytes: received by a device in a step
  expert_load: tokens per expert, a list for each MoE layer
  expert_load_max: busiest expert over the mean, worst layer
  mesh: text: its axes, at step 0 only
  transport: text: of tokens to experts, likewise; absent if no devices share
      the experts
  shard_load_max: rows of the busiest expert shard over the mean, worst layer:
      what the others wait for
  needed_rows: that an expert shard needed room for, of the fullest layer
  received_rows: that it had room for
  retry: text, on a line of its own: a step that overflowed and was repeated
  retry_needed_rows: that it needed
  retry_capacity: that it had
  executed_share: rows that the experts' kernel computed over routed ones;
      absent with accumulate or where it does not know

rl
  groups: their ids
  reward: mean, penalties of invalid calls included
  pass_rate: share of judged rollouts that passed
  passed: rollouts whose hidden tests all passed
  failed: rollouts graded of which a test failed
  unfinished: rollouts that never called finish
  infrastructure: rollouts not judged: the sandbox failed
  informative_groups: share of groups with an advantage
  turns: tool calls per rollout
  invalid_rate: invalid tool calls over all calls
  tokens: per rollout, the harness's included
  flags: rollouts in which monitors found anything
  flag_kinds: list of [alarm, rollouts with it]
  reward_success: what rollouts earned by passing, mean; this and the next seven
      are the terms of reward
  reward_flagged: taken from those that a monitor flagged, mean
  reward_invalid: lost by invalid calls, mean
  reward_effort: lost by tokens and turns, mean
  reward_failed_edit: lost by edits that changed nothing
  reward_open_todo: lost by to-dos left open
  reward_unfinished: lost by not calling finish
  reward_shell_only: lost by doing all by the shell
  reward_version: newest version of the prices that the rollouts were paid by
  reward_versions: how many versions there are
  windows: per rollout
  summaries: per rollout
  failed_edits: of all calls
  difficulty: mean weight that the tasks were drawn with; this and the next
      absent without a curriculum
  solved_labels: kinds of tasks held to be solved
  sandbox_ms: wall time in the sandbox per rollout
  staleness: trainer version minus the oldest that sampled in a trajectory,
      largest
  staleness_mean: same, mean over trajectories
  sampled_tokens: * of the policy, which the loss is of
  microbatches: * packed
  loss: * policy gradient's, per rollout of the step; its value says little, its
      gradient is what counts
  grad_norm: global, before clipping
  entropy: * of the sampled distribution, nats a token
  mismatch_kl: * mean k3 of rollout against training log-probs in float64, nats,
      as trained on: replayed if rl.replay
  mismatch_p99: * same, its 99th percentile over tokens
  mismatch_max: * largest difference of a log-prob
  mismatch_large: * share of tokens that one side finds twice as likely or more
  fresh_tokens: * sampled by the very version that is trained
      (`rl.mismatch.ages`); the next four are of these, absent where there are
      none
  mismatch_kl_fresh: * as mismatch_kl
  mismatch_p99_fresh: * as mismatch_p99
  mismatch_max_fresh: * as mismatch_max
  mismatch_large_fresh: * as mismatch_large
  truncated: * share of tokens whose ratio met a bound of rl.loss
  dropped: * share of tokens whose gradient rl.loss took away
  mismatch_kl_replay: * every rl.mismatch_every steps: as mismatch_kl, routes
      replayed
  mismatch_p99_replay: * same, as mismatch_p99
  mismatch_max_replay: * same, as mismatch_max
  mismatch_large_replay: * same, as mismatch_large
  mismatch_kl_no_replay: * the same batch, every token routed afresh
  mismatch_p99_no_replay: * same, as mismatch_p99
  mismatch_max_no_replay: * same, as mismatch_max
  mismatch_large_no_replay: * same, as mismatch_large
  route_agreement: * every rl.mismatch_every steps: share of tokens whose
      recorded experts are those of the trainer, all routed afresh; lowest layer
  route_agreement_layers: * same, of each MoE layer
  routed_differently: * share of tokens that differ in at least one layer
  replay_agreement: * share of recorded routes that the trainer would choose
      after replayed ones, lowest layer; this and the next three of a replay
  replay_agreement_layers: * same, of each MoE layer
  replay_replaced: * share of recorded experts that model.moe.replay_alpha
      replaced, highest layer
  replay_no_route: * share of tokens without a record, highest layer; the last
      of a trajectory never has
  hints: faulty turns that a hinted teacher scored; this and the next seven
      absent where hints.loss.weight is 0
  hint_tokens: of those turns
  hints_dropped: that fit no row
  hint_loss: per rollout of the step; this and the next four absent without
      hints
  hint_divergence: of policy and teacher, nats a token
  hint_gap: log-probability of what was written, the teacher's minus the
      policy's
  hint_truncated: share of tokens at the cap of the importance ratio
  gate_breaches: measures out of their bands; absent if rl.gate is off
  gate: list of texts: which they are, and what to look at
  expert_load: * as above
  expert_load_max: * as above
  repeated_microbatches: * whose buffers overflowed; absent if none
  wait_s: for the step's groups
  train_s: in the update
  publish_s: handing over the policy, the one before awaited if still under way

delta
  target_id: text: Merkle root of the policy that is published under the step as
      version
  kind: text: 'delta' to the version before, or 'key', which stands alone
  bytes: of the bundle, its manifest included
  full_bytes: of the whole policy
  changed: share of elements that differ from the version before
  cut_bytes: exchanged to complete chunks that lie across shards
  keyframe_bytes: of a keyframe made beside the delta, for receivers that join
      late
  skip_bytes: of deltas to versions further back
  encode_s: in the background: encoding, decoding again and comparing
  upload_s: same, writing to the store

eval
  name: text: which policy, 'sft' or 'rl'
  episodes: held-out ones that were judged
  passed: of these
  pass_rate: their share
  pass_low: end of its 95 % interval (`telemetry.intervals`)
  pass_high: the other end
  infrastructure: episodes not judged: the sandbox failed
  unfinished_rate: share that never called finish
  invalid_rate: invalid tool calls over all calls
  valid_episodes: finished, without an invalid call
  passed_valid: of these, passed
  temperature: that the policy sampled at
"""

import functools
import re


@functools.cache
def meanings() -> dict[tuple[str, str], str]:
  """Returns {(stage, name of a metric): what it means}."""
  told: dict[tuple[str, str], str] = {}
  stages: list[str] = []
  keys: list[tuple[str, str]] = []
  for line in (__doc__ or '').splitlines():
    if re.fullmatch(r'\w+(, \w+)*', line):
      stages = line.split(', ')
    elif entry := re.match(r'  (\w+): (.*)', line):
      keys = [(stage, entry[1]) for stage in stages]
      told |= dict.fromkeys(keys, entry[2])
    elif line.startswith('      '):
      told |= {key: f'{told[key]} {line.strip()}' for key in keys}
  return told
