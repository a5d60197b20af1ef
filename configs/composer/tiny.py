"""The whole loop on two CPU cores: pretraining, SFT and RL of a coding agent.

  ./run.sh
  python -m experiments.composer --config=configs/composer/tiny.py \
      --workdir=runs/tiny

Names are open, so that SFT must teach copying before RL has anything to choose
from. A run takes about 11 minutes on two quiet cores; README has its figures,
and says of which commit they are.

The file shows the fields that one changes first. `./run.sh config` prints every
field with its default and meaning; --config.SECTION.FIELD=VALUE sets any.

Argument after a colon: `tiny.py:smoke` runs every stage at a size for tests.
"""

import ml_collections

from configs.models import tiny as model_tiny


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  if arg not in ('', 'smoke'):
    raise ValueError(f"tiny.py takes no argument or 'smoke', not {arg!r}.")
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.initial = (
    ''  # '' for random weights, or a folder made by experiments.hf_import
  )
  # Devices of pretraining and SFT; their product is emulated on a CPU. That of
  # RL is rl.mesh.
  c.mesh = dict(replica=2, fsdp=1, context=1)
  c.layout = 'data_parallel'  # or 'hsdp', the dual-mesh layout
  # Its `numerics` and `moe.replay_alpha` are for rollouts, evaluations and RL;
  # pretraining and SFT, on the whole mesh, are always 'fast'.
  c.model = model_tiny.get_config()
  # Names of open sets must be copied from the context. With normed queries and
  # keys SFT from random weights learns it in half the steps (15 % dearer).
  c.model.attention.qk_norm = 'head'
  c.tokenizer = dict(train_bytes=300_000)  # from which merges are learnt
  c.data = dict(
    sources=('pinned',),  # or folders, sdists, lists; see corpus/sources.py
    max_bytes=12_000_000,
    fim_rate=0.3,  # share of documents rearranged for fill-in-the-middle
  )
  # Short: a token of a transcript teaches far more of the tasks than one of
  # the corpus, and copying begins after half a million of them.
  c.cpt = dict(
    steps=60,
    batch_size=16,  # rows
    seq_len=256,
    learning_rate=5e-3,  # peak, of Muon at Moonlight's scale
    adam_learning_rate=2e-3,  # peak, of what AdamW keeps
    warmup_steps=20,
    decay_steps=25,  # linear, to a tenth of the peak
    optimizer='muon',  # on matrices, AdamW on the rest; or 'adam' on all
  )
  # The fields of cpt. Small batches: until names are copied, steps count.
  c.sft = dict(
    # Prompts and first calls alone for two epochs, about 220 steps: there names
    # are copied sooner than in whole transcripts.
    opening=36,
    steps=1150,
    batch_size=6,
    seq_len=384,
    learning_rate=5e-3,
    adam_learning_rate=3e-3,
    decay_steps=600,
  )
  c.demonstrations = dict(
    count=7000,  # transcripts, generated on training tasks only
    # Files show descriptions beside bodies and repeat names: to predict them,
    # too, teaches both sooner than calls alone.
    context_loss=0.9,
    # Flaws, each with its probability per decision, which RL has to unlearn:
    # 0.63 of the transcripts pass.
    wrong_edit=0.1,
    broken_edit=0.3,
    skip_test=0.5,
    give_up=0.6,  # after an error or a failed test
    # Episodes of few calls, which end when told so: a policy that has learnt to
    # retry must know when to stop.
    cut_short=0.1,
  )
  c.tasks = dict(family='list_functions')  # or 'deletion'; see deletion.py
  c.episode = dict(
    max_tokens=384,
    max_turns=10,
    max_call_tokens=64,
    temperature=1.0,
  )
  c.summary = dict(trigger=0)  # tokens that no window exceeds; 0: no summaries
  c.rewards = dict(
    invalid_penalty=0.1,  # taken from the reward, per invalid call
    # Without a price on effort a wrong edit that is mended later earns as much
    # as a right one, and RL would unlearn to be right at once.
    effort_coefficient=0.1,
    effort_scale=80.0,  # sampled tokens, about an episode's
    effort_turn_tokens=8.0,
    # More than a failure costs: a policy in doubt must not retry until its
    # tokens are used up.
    unfinished_penalty=1.0,
  )
  c.hints = dict(
    loss=dict(
      weight=1.0,  # relative to a rollout of advantage 1; 0: no hints
      teacher='frozen',  # the SFT policy; or 'ema', a slow average
    ),
  )
  c.curriculum = dict(enabled=False)  # tasks are drawn in order
  c.sandbox = dict(
    # The strongest that works here; or unshare, microvm, ray, rlimits, or
    # static: execute nothing.
    level='auto',
    workers=2,
    wall_s=2.0,
  )
  c.rollout = dict(
    num_slots=64,
    prefill_chunk=32,  # tokens a session consumes per prefill step
    prefill_rows=8,  # sessions in a prefill step; or several numbers, buckets
    decode_steps=4,  # tokens per dispatch; weights change between dispatches
    on_swap='keep',  # keys and values of older weights, or 'refresh' them
    speculation={},  # drafter='ngrams' or 'heads': the same tokens, sooner
  )
  c.rl = dict(
    steps=50,
    prompts=8,
    rollouts_per_prompt=8,
    placement='processes',  # or 'colocated': one process takes turns
    max_staleness=1,  # optimizer steps; 0 equals the synchronous loop
    learning_rate=2e-4,
    warmup_steps=3,
    decay_steps=25,  # linear, to a tenth
    # Norms were 0.5 to 14, with a median of 4. Adam ignores the scale of
    # gradients, so that this only bounds the weight of an odd step.
    grad_clip=20.0,
    loss=dict(name='tis'),  # truncated importance sampling; see policy_loss.py
    kl_coefficient=0.0,  # weight of the k1 penalty against the SFT policy
    reward='verdict',  # 'shuffled' is the control that must not learn
    replay=True,  # replay the routes that the engine recorded
    # Bands for the mismatch of rollout and trainer, in float32. Scored by the
    # weights that sampled them tokens have a mean k3 of 6e-14; by a policy one
    # step on, at most 0.010, with 0.956 of routes unchanged.
    gate=dict(action='stop'),  # before such a step is applied; 'flag', or 'off'
    rows=8,
    seq_len=384,
    checkpoint_every=5,
    mismatch_every=10,  # steps; measured both with and without replay
  )
  c.delta = dict(
    # Folder or URL (s3://bucket/run) of this run alone; '' for workdir/store.
    store='',
    threads=1,  # encoders and decoders; each side has one of two cores
  )
  c.evaluation = dict(episodes=200)  # on each axis, before and after RL
  c.telemetry = dict(wandb=False)
  c.language = dict(variables='')  # JSON for an import's chat template
  # Sections without a field here; the command line can set all of theirs.
  c.parallel, c.fleet = dict(), dict()
  c.mtp = dict()  # when and how the heads of model.mtp, if any, are trained
  c.live = dict(judge=dict(), prices=dict(), gate=dict(), trial=dict())
  c.cpt.muon, c.sft.muon = dict(), dict()
  c.tasks.repository = dict(bounds=dict())
  c.tasks.auditor, c.tasks.rubric = dict(), dict()
  c.tasks.harbor, c.tasks.verifiers = dict(), dict()
  c.rl.mesh = dict()
  if arg == 'smoke':
    _shrink(c)
  return c


def _shrink(c: ml_collections.ConfigDict) -> None:
  """Keeps every stage and shortens it to what a test can afford."""
  c.data.update(max_bytes=400_000, sources=('stdlib',))
  c.tokenizer.train_bytes = 200_000
  c.model.update(num_layers=2, embed_dim=32, dense_ffw_dim=64)
  c.model.attention.update(head_dim=16, num_heads=2, num_kv_heads=1)
  c.model.moe.update(ffw_dim=32, num_experts=4)
  for stage in (c.cpt, c.sft):
    stage.update(
      steps=6,
      batch_size=4,
      seq_len=192,
      warmup_steps=2,
      decay_steps=2,
      checkpoint_every=2,
      eval_every=3,
      eval_batches=1,
      log_every=1,
    )
  c.demonstrations.update(count=40, functions=20)
  c.rollout.update(num_slots=8, prefill_rows=4)
  c.rl.update(
    steps=4,
    warmup_steps=1,
    decay_steps=2,
    prompts=2,
    rollouts_per_prompt=4,
    max_staleness=0,
    rows=4,
    checkpoint_every=1,
    mismatch_every=2,
    episodes_every=2,
    seq_len=192,
  )
  c.delta.keyframe_every = 3
  c.episode.update(max_tokens=192, max_turns=4, max_call_tokens=24)
  c.evaluation.episodes = 8
