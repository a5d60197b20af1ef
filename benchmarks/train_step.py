"""Tokens per second of the whole training step, beside Hugging Face's.

  python -m benchmarks.train_step [--quick]
  python -m benchmarks.train_step --gpu [--tiny] [--trace=FOLDER]

'hf': one step (forward, next-token loss, backward, AdamW 3e-4) of a Qwen3-MoE
of 17.6M parameters (4 layers, 8 experts of which a token passes 2, untied
vocabulary of 8192) in float32 on 4 x 256 tokens. The peer is transformers'
`Qwen3MoeForCausalLM` on torch with its fused AdamW, with the faster one of its
expert implementations. Both run in turns in one process pinned to one core, on
one thread, and count CPU seconds; both normalise the loss by the 4 x 255
predicted tokens and clip nothing. Ours also rounds its weights to the policy's
bfloat16 grid and reports the norms of gradient and update, as it always does.
The limit is the step's matrix products alone, each timed by itself. Further
lines say where the time goes.

'dense': the tiny model's step (Muon and AdamW, with clipping) against itself
with every expert computed for every token, which is what `jax.lax.ragged_dot`
does on a CPU. Its limit is the useful arithmetic at the speed of a dense
product on this machine.

'--gpu': see `train_step_gpu`; `--tiny` runs the same code anywhere.
"""

import argparse
import statistics

from benchmarks import interleaved


def _hf(is_quick: bool) -> None:
  from benchmarks import train_step_case as case
  from benchmarks import train_step_hf, train_step_products
  from benchmarks import train_step_profile as profile

  model = case.qwen3_17m()
  tokens_BT = case.random_tokens(4, 256, model.vocab_size)
  name = '17.6M Qwen3-MoE shape, 4 x 256 tokens, float32'
  ours = case.Trained(model, case.adam(model), case.whole_rows(tokens_BT))
  peers = {
    kind: train_step_hf.runner(tokens_BT, experts=kind)
    for kind in ('grouped_mm', 'eager')
  }
  peer_rates = interleaved.rates(
    peers['grouped_mm'], peers['eager'], 3 if is_quick else 9
  )
  kinds = dict(zip(peers, map(statistics.median, peer_rates), strict=True))
  best = max(kinds, key=lambda kind: kinds[kind])
  limit = train_step_products.limit(model, *tokens_BT.shape)
  rates = interleaved.rates(ours, peers[best], 5 if is_quick else 21)
  interleaved.report(
    'train_step',
    f'{name}, against transformers ({best}; the other: '
    f'{min(kinds.values()):.0f})',
    rates,
    limit=limit,
    goal='ratio >= 1',
    met=lambda rate, ratio: ratio >= 1,
  )
  parts = profile.split(ours.compiled, ours, 3 if is_quick else 8)
  for part in profile.joined(parts, profile.CPU_PARTS):
    print(part.line('train_step', name), flush=True)


def _dense(is_quick: bool) -> None:
  from benchmarks import train_step_case as case
  from composer_jax.kernels.grouped import matmul
  from composer_jax.models import flops

  config = case.tiny()
  rows, length = 8, 512
  batch = case.half_rows(rows, length, config.vocab_size)
  steps = 1 if is_quick else 3
  # The backend is picked while tracing, and nothing else differs.
  with matmul.using('ragged'):
    peer = case.Trained(config, case.muon(config), batch, steps)
  ours = case.Trained(config, case.muon(config), batch, steps)
  # Unlike MFU the limit counts only necessary work: a row has two documents,
  # and a token sees half of its own on average.
  per_token = flops.train_per_token(config, length // 2, causal=True)
  interleaved.report(
    'train_step',
    f'tiny model, {rows} x {length} tokens, {config.moe.num_active} of '
    f'{config.moe.num_experts} experts',
    interleaved.rates(ours, peer, 2 if is_quick else 9),
    limit=interleaved.peak() / per_token,
    goal='ratio >= 1.2',
    met=lambda rate, ratio: ratio >= 1.2,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='about a minute')
  parser.add_argument('--only', choices=('hf', 'dense'))
  parser.add_argument('--gpu', action='store_true')
  parser.add_argument('--tiny', action='store_true', help='with --gpu')
  parser.add_argument('--trace', default='runs/train_step_trace')
  args = parser.parse_args()
  if args.gpu:
    from benchmarks import train_step_gpu

    train_step_gpu.run(is_tiny=args.tiny, folder=args.trace)
    return
  interleaved.keep_pages()
  interleaved.pin_to_one_core()
  for name, run in (('hf', _hf), ('dense', _dense)):
    if args.only in (None, name):
      run(args.quick)


if __name__ == '__main__':
  main()
