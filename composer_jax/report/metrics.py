"""What each metric of a run means; checked against a run.

By stage, as `telemetry.writer` writes them to `metrics.jsonl`, and those of the
stage `received` to `received.jsonl`. A line of the file tells of the one
step that it names. Metrics of RL cover all rollouts of the step, but for those
marked *: these cover only what the step trains on, which is the trajectories
with an advantage, or all of them where none has one.

cpt, sft
  loss: mean loss over weighted tokens, nats
  heldout_loss: mean loss on documents that training skips, nats
  aux_loss: load-balancing loss, before its weight, summed over MoE layers
  z_loss: mean squared log-sum-exp of the router's logits, before its weight,
      summed over MoE layers
  grad_norm: global norm of the gradient, before clipping
  update_norm: global norm of the change of the master weights
  lr: learning rate of the step
  tokens_per_s: real tokens per second, padding excluded, since the line before;
      compilation is left out
  mfu: share of peak FLOP/s, attention counted unmasked (every query meets the
      whole row); absent where no peak is known. On a CPU the peak is an
      estimate for idle cores (`telemetry.mfu`), which other work lowers
  max_logit: largest attention logit of the batch; QK-clip scales a head above
      muon.qk_clip down to it; absent if that is 0
  max_logit_layers: largest attention logit of each layer
  muon_matrices: number of matrices that Muon orthogonalises; like all muon_
      metrics from the plan of a step, and only at step 0
  muon_groups: number of groups of matrices of one shape and placement
  muon_flops: FLOPs of Newton-Schulz on one device in one step
  muon_flops_ideal: FLOPs of an even share by the standard method
  muon_bytes: bytes that one device receives in one step
  expert_load: tokens sent to each expert, one list for each MoE layer
  expert_load_max: tokens of the busiest expert over the mean, worst layer
  mtp_loss: loss of each head for multi-token prediction, nats per weighted
      token; absent, like all mtp_ metrics, where none is trained
  mtp_agreement: share of predicted tokens, by weight, for which a head's
      likeliest word is the main head's, of each head
  mtp_grad_norm: global norm of the heads' gradient, before clipping
  mesh: text: axes of the mesh, only at step 0
  transport: text: exchange that brings tokens to experts, only at step 0;
      absent if no devices share the experts
  shard_load_max: rows of the busiest expert shard over the mean, worst layer,
      which is how long the other shards wait
  exchange_rounds: rounds in which copies reached their experts, layer with most

rl
  groups: ids of the step's groups
  reward: mean reward, penalties of invalid calls included
  pass_rate: share of judged rollouts that passed
  passed: number of rollouts whose hidden tests all passed
  failed: number of graded rollouts of which a test failed
  unfinished: number of rollouts that never called finish
  infrastructure: number of rollouts not judged because the sandbox failed
  informative_groups: share of groups with an advantage
  turns: tool calls per rollout
  invalid_rate: invalid tool calls over all calls
  tokens: tokens per rollout, the harness's included
  flags: number of rollouts in which monitors found anything
  flag_kinds: list of [alarm, number of rollouts with it]
  scores: list of [criterion, mean score from 0 to 1] by the run's rubric
  reward_success: mean reward for passing; like the next eight a term of reward
  reward_judged: mean reward for the score by the rubric
  reward_flagged: mean reward taken from rollouts that a monitor flagged
  reward_invalid: mean reward lost by invalid calls
  reward_effort: mean reward lost by tokens and turns
  reward_failed_edit: mean reward lost by edits that changed nothing
  reward_open_todo: mean reward lost by to-dos left open
  reward_unfinished: mean reward lost by not calling finish
  reward_shell_only: mean reward lost by doing everything in the shell
  reward_version: newest version of the prices that rollouts were paid by
  reward_versions: number of different versions of the prices
  windows: context windows per rollout
  summaries: summaries that the policy wrote, per rollout
  failed_edits: edits that changed nothing, over all calls
  difficulty: mean weight that the tasks were drawn with; absent without a
      curriculum
  solved_labels: kinds of tasks taken as solved; absent without a curriculum
  sandbox_ms: wall milliseconds in the sandbox per rollout
  staleness: largest staleness of a trajectory: trainer version minus the oldest
      policy version that sampled in it
  staleness_mean: mean staleness of the trajectories
  ages: list of [staleness, number of trajectories]
  lengths: list of [power of two, number of rollouts]: of those with at most so
      many sampled tokens, and more than half
  sampled_tokens: * tokens that the policy sampled, which the loss covers
  microbatches: * number of packed microbatches
  loss: * loss of the policy gradient, per rollout of the step; its value says
      little, only its gradient matters
  grad_norm: global norm of the gradient, before clipping
  entropy: * entropy of the sampled distribution, nats a token
  mismatch_kl: * mean k3 of rollout against training log-probabilities in
      float64, nats, as trained on: with routes replayed if rl.replay
  mismatch_p99: * 99th percentile of k3 over tokens, nats
  mismatch_max: * largest difference of a log-probability
  mismatch_large: * share of tokens that one side finds twice as likely or more
  tokens_exact: * tokens scored by the very weights that sampled them, with
      their routes replayed (`gate.audit`); the next two metrics cover these
  mismatch_kl_exact: * mismatch_kl of tokens scored exactly
  exact_agreement: * share of recorded routes of their trajectories that the
      weights which made them choose again
  tokens_afresh: * tokens scored by the weights that sampled them but routed
      afresh: without replay, or if a refresh replaced their routes; the next
      metric covers these
  mismatch_kl_afresh: * mismatch_kl of tokens scored afresh
  tokens_unscorable: * tokens of policies from before a restart, which no kept
      policy can score
  unrecorded: share of consumed tokens without a route; absent without a replay
  mismatch_kl_hints: mismatch_kl of hinted turns, in float32
  truncated: * share of tokens whose ratio met a bound of rl.loss
  dropped: * share of tokens whose gradient rl.loss took away
  mismatch_kl_replay: * mismatch_kl with routes replayed; this and the metrics
      down to routed_differently come every rl.mismatch_every steps
  mismatch_p99_replay: * mismatch_p99 with routes replayed
  mismatch_max_replay: * mismatch_max with routes replayed
  mismatch_large_replay: * mismatch_large with routes replayed
  mismatch_kl_no_replay: * mismatch_kl of the same batch, every token routed
      afresh
  mismatch_p99_no_replay: * mismatch_p99 with every token routed afresh
  mismatch_max_no_replay: * mismatch_max with every token routed afresh
  mismatch_large_no_replay: * mismatch_large with every token routed afresh
  route_agreement: * share of tokens whose recorded experts are those that the
      trainer chooses with all tokens routed afresh, lowest layer
  route_agreement_layers: * route_agreement of each MoE layer
  routed_differently: * share of tokens that differ in at least one layer
  replay_agreement: * share of recorded routes that the trainer would choose
      after replayed ones, lowest layer; absent without a replay, like all
      replay_ metrics
  replay_agreement_layers: * replay_agreement of each MoE layer
  replay_replaced: * share of recorded experts that model.moe.replay_alpha
      replaced, highest layer
  hints: number of faulty turns that a hinted teacher scored; absent, like all
      hint metrics, where hints.loss.weight is 0
  hint_tokens: number of tokens of those turns
  hints_dropped: number of hints that fit no row
  hint_loss: loss of the hints per rollout of the step; this and the next three
      are absent without hints
  hint_divergence: divergence of policy and teacher, nats a token
  hint_gap: log-probability of the written text under the teacher minus that
      under the policy
  hint_truncated: share of tokens at the cap of the importance ratio
  mtp_loss: * loss of each head for multi-token prediction on sampled tokens,
      nats a token; absent, like mtp_agreement, where none is trained
  mtp_agreement: * share of sampled tokens for which a head's likeliest word is
      the main head's, of each head
  gate_breaches: number of measures out of their bands; absent if rl.gate is off
  gate: list of texts: the measures out of their bands, and where to look
  expert_load: * tokens sent to each expert, one list for each MoE layer
  expert_load_max: * tokens of the busiest expert over the mean, worst layer
  wait_s: seconds of waiting for the step's groups; colocated, of sampling them
  train_s: seconds of the update
  publish_s: seconds of handing over the policy, which waits for the one before
      if that is still under way

delta
  target_id: text: Merkle root of the published policy, whose version is `step`
  kind: text: 'delta' to the version before, or 'key', which stands alone
  bytes: bytes of the bundle, its manifest included
  full_bytes: bytes of the whole policy
  changed: share of elements that differ from the version before
  cut_bytes: bytes exchanged to complete chunks that lie across shards
  keyframe_bytes: bytes of a keyframe made beside the delta, for receivers that
      join late
  encode_s: background seconds of encoding, decoding again and comparing
  upload_s: background seconds of writing to the store

received
  worker: text: name of the rollout worker that received it
  target_id: text: Merkle root that the receiver computed of the weights it has,
      whose version is `step`
  route: list of the bundles that it came by, from what was held
  bytes: bytes moved for it
  wall_s: seconds from the pointer to verified weights on the host
  transfer_s: seconds to arrays on the device
  place_s: seconds to where the engine serves them; the engine steps meanwhile,
      as during all of the above if it is in a process of its own
  swap_s: seconds between two decode steps, to the new weights; this and the
      next two are absent for the first policy of a process
  tokens: tokens sampled since the policy before; this and the next two are
      absent for the first policy of a process, too
  drafted: such tokens that a draft foresaw
  occupancy: mean share of the engine's slots that an episode had meanwhile
  sample_s: seconds since the policy before with an episode open, be it only the
      last one of many
  wait_s: seconds since the policy before without: all groups that it admitted
      were finished, and the rollouts waited for this one to be trained,
      published and received. Colocated, these are the trainer's turns
  lease_wait_s: seconds since the policy before without an episode or a lease
  resumed: episodes since the policy before that went on from turns which
      another worker had finished
  anew: such episodes that had to begin anew, since a tool answered otherwise

fleet
  workers: number of rollout workers that report
  taken: ids of the groups that the step took, those given up included
  fates: list of [fate, task family, number of groups] so far; see
      docs/concepts/fleet.md
  lost: list of [reason, number] of leases so far that brought nothing
  late: number of results since the start that came after their lease

eval
  name: text: evaluated policy, 'import', 'sft' or 'rl', and the axis unless
      it is the first
  axis: text: held-out split: what of its tasks training never saw
  episodes: number of held-out episodes that were judged
  passed: number of these that passed
  pass_rate: share of these that passed
  pass_low: lower end of the 95 % interval (`telemetry.intervals`)
  pass_high: upper end of the interval
  infrastructure: number of episodes not judged because the sandbox failed
  unfinished_rate: share of episodes that never called finish
  first_edit_rate: share of episodes whose first edit was right; a right body of
      another form than the reference counts as wrong
  invalid_rate: invalid tool calls over all calls
  valid_episodes: number of finished episodes without an invalid call
  passed_valid: number of these that passed
  temperature: temperature that the policy sampled at
"""

import functools
import re


@functools.cache
def meanings() -> dict[tuple[str, str], str]:
  """Returns {(stage, name of a metric): its meaning}."""
  by_key: dict[tuple[str, str], str] = {}
  stages: list[str] = []
  keys: list[tuple[str, str]] = []
  for line in (__doc__ or '').splitlines():
    if re.fullmatch(r'\w+(, \w+)*', line):
      stages = line.split(', ')
    elif entry := re.match(r'  (\w+): (.*)', line):
      keys = [(stage, entry[1]) for stage in stages]
      by_key |= dict.fromkeys(keys, entry[2])
    elif line.startswith('      '):
      by_key |= {key: f'{by_key[key]} {line.strip()}' for key in keys}
  return by_key
