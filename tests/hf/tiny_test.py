"""The checkpoint to try things on is one that others read."""

import pytest
import transformers

from composer_jax.core import files
from composer_jax.hf.architecture import config
from composer_jax.hf.tensors import source as hf_source
from composer_jax.hf.text import chat_template, language
from composer_jax.hf.text import tokenizer as hf_tokenizer
from experiments import tiny_checkpoint


@pytest.mark.parametrize('family', tiny_checkpoint.MODELS)
def test_both_sides_read_it(tmp_path, family):
  folder = tmp_path / family
  tiny_checkpoint.write(folder, family, seed=0)
  with pytest.raises(ValueError, match=f'{family} exists'):
    tiny_checkpoint.write(folder, family, seed=0)
  fields = files.read_json(folder / 'config.json')
  assert config.from_hf(fields)[1] == family
  source = hf_source.open_source(folder)
  assert not source.carried and source.tensors
  source.close()
  reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
  assert sum(p.numel() for p in reference.parameters()) > 100_000
  tokenizer = hf_tokenizer.ImportedTokenizer.from_folder(
    folder, fields['vocab_size']
  )
  messages = [
    {'role': 'user', 'content': 'Hi.'},
    {'role': 'assistant', 'content': 'Yes.'},
  ]
  markup = chat_template.load(folder).markup(tokenizer, messages)
  ids, _ = tokenizer.encode_markup(markup)
  speech = language.from_folder(folder, tokenizer)
  assert speech.calls == {'qwen3_moe': 'hermes'}.get(family, 'deepseek')
  assert tokenizer.decode(ids).count('Yes.') == 1
  other = transformers.AutoTokenizer.from_pretrained(folder)
  assert other.apply_chat_template(messages)['input_ids'] == ids.tolist()
  assert sorted(p.name for p in tmp_path.iterdir()) == [family]
