"""What the lines of `metrics.jsonl` hold; the table is checked against a run.

Metrics, by stage; a line tells of the one step that it names. In RL they are of
all the step's rollouts, but for those marked *: these cover only what the step
trains on, the trajectories with an advantage, or all where none has one.

| stage    | name                     | meaning                                |
|----------|--------------------------|----------------------------------------|
| cpt, sft | loss                     | mean over weighted tokens, nats        |
| cpt, sft | heldout_loss             | same, on documents that training skips |
| cpt, sft | aux_loss                 | load balancing, before its weight,     |
|          |                          | summed over MoE layers                 |
| cpt, sft | z_loss                   | mean squared log-sum-exp of the        |
|          |                          | router's logits, before its weight,    |
|          |                          | summed over MoE layers                 |
| cpt, sft | grad_norm                | global, before clipping                |
| cpt, sft | update_norm              | global, of what was added to the       |
|          |                          | masters                                |
| cpt, sft | lr                       | learning rate of the step              |
| cpt, sft | tokens_per_s             | real tokens, padding excluded, since   |
|          |                          | the line before; no compilation        |
| cpt, sft | mfu                      | share of peak FLOP/s, attention        |
|          |                          | unmasked (every query meets the whole  |
|          |                          | row); absent where no peak is known.   |
|          |                          | On a CPU the peak is an estimate of    |
|          |                          | idle cores (`telemetry.mfu`), so that  |
|          |                          | other work on them lowers it           |
| cpt, sft | max_logit                | largest attention logit of the batch;  |
|          |                          | QK-clip scales a head above            |
|          |                          | muon.qk_clip down to it; absent if     |
|          |                          | that is 0                              |
| cpt, sft | max_logit_layers         | same, of each layer                    |
| cpt, sft | muon_matrices            | that Muon orthogonalises; this and the |
|          |                          | next four, of its plan, at step 0 only |
| cpt, sft | muon_groups              | of matrices of one shape and placement |
| cpt, sft | muon_flops               | of Newton-Schulz, of a device and step |
| cpt, sft | muon_flops_ideal         | an even share of it by the standard    |
|          |                          | method                                 |
| cpt, sft | muon_bytes               | received by a device in a step         |
| cpt, sft | expert_load              | tokens per expert, a list for each MoE |
|          |                          | layer                                  |
| cpt, sft | expert_load_max          | busiest expert over the mean, worst    |
|          |                          | layer                                  |
| cpt, sft | mesh                     | text: its axes, at step 0 only         |
| cpt, sft | transport                | text: of tokens to experts, likewise;  |
|          |                          | absent if no devices share the experts |
| cpt, sft | shard_load_max           | rows of the busiest expert shard over  |
|          |                          | the mean, worst layer: what the others |
|          |                          | wait for                               |
| cpt, sft | needed_rows              | that an expert shard needed room for,  |
|          |                          | of the fullest layer                   |
| cpt, sft | received_rows            | that it had room for                   |
| cpt, sft | retry                    | text, on a line of its own: a step     |
|          |                          | that overflowed and was repeated       |
| cpt, sft | retry_needed_rows        | that it needed                         |
| cpt, sft | retry_capacity           | that it had                            |
| cpt, sft | executed_share           | rows that the experts' kernel computed |
|          |                          | over routed ones; absent with          |
|          |                          | accumulate or where it does not know   |
| rl       | groups                   | their ids                              |
| rl       | reward                   | mean, penalties of invalid calls       |
|          |                          | included                               |
| rl       | pass_rate                | share of judged rollouts that passed   |
| rl       | passed                   | rollouts whose hidden tests all passed |
| rl       | failed                   | rollouts graded of which a test failed |
| rl       | unfinished               | rollouts that never called finish      |
| rl       | infrastructure           | rollouts not judged: the sandbox       |
|          |                          | failed                                 |
| rl       | informative_groups       | share of groups with an advantage      |
| rl       | turns                    | tool calls per rollout                 |
| rl       | invalid_rate             | invalid tool calls over all calls      |
| rl       | tokens                   | per rollout, the harness's included    |
| rl       | flags                    | rollouts in which monitors found       |
|          |                          | anything                               |
| rl       | flag_kinds               | list of [alarm, rollouts with it]      |
| rl       | reward_success           | what rollouts earned by passing, mean; |
|          |                          | this and the next seven are the terms  |
|          |                          | of reward                              |
| rl       | reward_flagged           | taken from those that a monitor        |
|          |                          | flagged, mean                          |
| rl       | reward_invalid           | lost by invalid calls, mean            |
| rl       | reward_effort            | lost by tokens and turns, mean         |
| rl       | reward_failed_edit       | lost by edits that changed nothing     |
| rl       | reward_open_todo         | lost by to-dos left open               |
| rl       | reward_unfinished        | lost by not calling finish             |
| rl       | reward_shell_only        | lost by doing all by the shell         |
| rl       | reward_version           | newest version of the prices that the  |
|          |                          | rollouts were paid by                  |
| rl       | reward_versions          | how many versions there are            |
| rl       | windows                  | per rollout                            |
| rl       | summaries                | per rollout                            |
| rl       | failed_edits             | of all calls                           |
| rl       | difficulty               | mean weight that the tasks were drawn  |
|          |                          | with; this and the next absent without |
|          |                          | a curriculum                           |
| rl       | solved_labels            | kinds of tasks held to be solved       |
| rl       | sandbox_ms               | wall time in the sandbox per rollout   |
| rl       | staleness                | trainer version minus the oldest that  |
|          |                          | sampled in a trajectory, largest       |
| rl       | staleness_mean           | same, mean over trajectories           |
| rl       | sampled_tokens           | * of the policy, which the loss is of  |
| rl       | microbatches             | * packed                               |
| rl       | loss                     | * policy gradient's, per rollout of    |
|          |                          | the step; its value says little, its   |
|          |                          | gradient is what counts                |
| rl       | grad_norm                | global, before clipping                |
| rl       | entropy                  | * of the sampled distribution, nats a  |
|          |                          | token                                  |
| rl       | mismatch_kl              | * mean k3 of rollout against training  |
|          |                          | log-probs in float64, nats, as trained |
|          |                          | on: replayed if rl.replay              |
| rl       | mismatch_p99             | * same, its 99th percentile over       |
|          |                          | tokens                                 |
| rl       | mismatch_max             | * largest difference of a log-prob     |
| rl       | mismatch_large           | * share of tokens that one side finds  |
|          |                          | twice as likely or more                |
| rl       | fresh_tokens             | * sampled by the very version that is  |
|          |                          | trained (`rl.mismatch.ages`); the next |
|          |                          | four are of these, absent where there  |
|          |                          | are none                               |
| rl       | mismatch_kl_fresh        | * as mismatch_kl                       |
| rl       | mismatch_p99_fresh       | * as mismatch_p99                      |
| rl       | mismatch_max_fresh       | * as mismatch_max                      |
| rl       | mismatch_large_fresh     | * as mismatch_large                    |
| rl       | truncated                | * share of tokens whose ratio met a    |
|          |                          | bound of rl.loss                       |
| rl       | dropped                  | * share of tokens whose gradient       |
|          |                          | rl.loss took away                      |
| rl       | mismatch_kl_replay       | * every rl.mismatch_every steps: as    |
|          |                          | mismatch_kl, routes replayed           |
| rl       | mismatch_p99_replay      | * same, as mismatch_p99                |
| rl       | mismatch_max_replay      | * same, as mismatch_max                |
| rl       | mismatch_large_replay    | * same, as mismatch_large              |
| rl       | mismatch_kl_no_replay    | * the same batch, every token routed   |
|          |                          | afresh                                 |
| rl       | mismatch_p99_no_replay   | * same, as mismatch_p99                |
| rl       | mismatch_max_no_replay   | * same, as mismatch_max                |
| rl       | mismatch_large_no_replay | * same, as mismatch_large              |
| rl       | route_agreement          | * every rl.mismatch_every steps: share |
|          |                          | of tokens whose recorded experts are   |
|          |                          | those of the trainer, all routed       |
|          |                          | afresh; lowest layer                   |
| rl       | route_agreement_layers   | * same, of each MoE layer              |
| rl       | routed_differently       | * share of tokens that differ in at    |
|          |                          | least one layer                        |
| rl       | replay_agreement         | * share of recorded routes that the    |
|          |                          | trainer would choose after replayed    |
|          |                          | ones, lowest layer; this and the next  |
|          |                          | three of a replay                      |
| rl       | replay_agreement_layers  | * same, of each MoE layer              |
| rl       | replay_replaced          | * share of recorded experts that       |
|          |                          | model.moe.replay_alpha replaced,       |
|          |                          | highest layer                          |
| rl       | replay_no_route          | * share of tokens without a record,    |
|          |                          | highest layer; the last of a           |
|          |                          | trajectory never has                   |
| rl       | hints                    | faulty turns that a hinted teacher     |
|          |                          | scored; this and the next seven absent |
|          |                          | where hints.loss.weight is 0           |
| rl       | hint_tokens              | of those turns                         |
| rl       | hints_dropped            | that fit no row                        |
| rl       | hint_loss                | per rollout of the step; this and the  |
|          |                          | next four absent without hints         |
| rl       | hint_divergence          | of policy and teacher, nats a token    |
| rl       | hint_gap                 | log-probability of what was written,   |
|          |                          | the teacher's minus the policy's       |
| rl       | hint_truncated           | share of tokens at the cap of the      |
|          |                          | importance ratio                       |
| rl       | gate_breaches            | measures out of their bands; absent if |
|          |                          | rl.gate is off                         |
| rl       | gate                     | list of texts: which they are, and     |
|          |                          | what to look at                        |
| rl       | expert_load              | * as above                             |
| rl       | expert_load_max          | * as above                             |
| rl       | repeated_microbatches    | * whose buffers overflowed; absent if  |
|          |                          | none                                   |
| rl       | wait_s                   | for the step's groups                  |
| rl       | train_s                  | in the update                          |
| rl       | publish_s                | handing over the policy, the one       |
|          |                          | before awaited if still under way      |
| delta    | target_id                | text: Merkle root of the policy that   |
|          |                          | is published under the step as version |
| delta    | kind                     | text: 'delta' to the version before,   |
|          |                          | or 'key', which stands alone           |
| delta    | bytes                    | of the bundle, its manifest included   |
| delta    | full_bytes               | of the whole policy                    |
| delta    | changed                  | share of elements that differ from the |
|          |                          | version before                         |
| delta    | cut_bytes                | exchanged to complete chunks that lie  |
|          |                          | across shards                          |
| delta    | keyframe_bytes           | of a keyframe made beside the delta,   |
|          |                          | for receivers that join late           |
| delta    | skip_bytes               | of deltas to versions further back     |
| delta    | encode_s                 | in the background: encoding, decoding  |
|          |                          | again and comparing                    |
| delta    | upload_s                 | same, writing to the store             |
| eval     | name                     | text: which policy, 'sft' or 'rl'      |
| eval     | episodes                 | held-out ones that were judged         |
| eval     | passed                   | of these                               |
| eval     | pass_rate                | their share                            |
| eval     | pass_low                 | end of its 95 % interval               |
|          |                          | (`telemetry.intervals`)                |
| eval     | pass_high                | the other end                          |
| eval     | infrastructure           | episodes not judged: the sandbox       |
|          |                          | failed                                 |
| eval     | unfinished_rate          | share that never called finish         |
| eval     | invalid_rate             | invalid tool calls over all calls      |
| eval     | valid_episodes           | finished, without an invalid call      |
| eval     | passed_valid             | of these, passed                       |
| eval     | temperature              | that the policy sampled at             |
"""
