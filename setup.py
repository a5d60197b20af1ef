"""What composer_jax needs; constraints.txt says what was tested."""

import setuptools

REQUIRED = [
  'absl-py>=2.1',
  'blake3>=1.0',
  'chex>=0.1.90',
  'flax>=0.12',
  'grain>=0.2.10',
  'jax>=0.10',
  'jinja2>=3.1.6',
  'matplotlib>=3.9',
  'ml-collections>=1.0',
  'ml-dtypes>=0.5',
  'numba>=0.63',  # compiles the codec of delta bundles
  'numpy>=2.1',
  'optax>=0.2.8',
  'orbax-checkpoint>=0.11',
  'rich>=13',
  'safetensors>=0.5',
  'tensorboardX>=2.6',
  'tensorstore>=0.1.60',
  'tokenizers>=0.20',
  'zstandard>=0.22',
]

# The reference that models and checkpoints are proven against.
HF = [
  'compressed-tensors>=0.15',
  'torch>=2.8',
  'transformers>=5.20',
]

# The HTTP server: experiments/serve.py.
SERVE = [
  'prometheus-client>=0.21',
  'pydantic>=2.10',
  'starlette>=0.46',
  'uvicorn>=0.34',
]

# Answers that are held to a JSON schema, and calls that must be made.
GRAMMAR = ['llguidance>=1.9']

# Delta bundles in buckets or behind web servers.
STORES = ['obstore>=0.12', 'urllib3>=2.2']

# Runs the suites of packages that tasks are made of, within sandboxes.
TASKS = ['pytest>=8.3']

# A policy, or a model that judges rubrics, behind an endpoint of OpenAI's form.
JUDGE = ['openai>=3.50']

# Clients of verifiers' env servers, which run in environments of their own:
# verifiers wants another openai.
VERIFIERS = ['msgpack>=1.0', 'pyzmq>=26.0']

# Sandboxes in the actors of a cluster; built for Python up to 3.14.
FLEET = ["ray>=2.50; python_version < '3.15'"]

# Grouped products on GPUs.
KERNELS = ['tokamax>=0.0.12']

# The pages of docs/.
DOCS = [
  'mkdocs>=1.6,<2',
  'mkdocs-gen-files>=0.6',
  'mkdocs-material>=9.6',
  'mkdocstrings[python]>=1.0',
]

EXTRAS = {
  'test': [
    *HF,
    *SERVE,
    *GRAMMAR,
    *KERNELS,
    *STORES,
    *FLEET,
    *JUDGE,
    *TASKS,
    *VERIFIERS,
    'flask>=3.0',  # moto's server is made of it
    'flask-cors>=5.0',
    'httpx2>=2.0',  # of openai's client, too
    'hypothesis>=6.100',
    'ipykernel>=6.29',
    'moto[s3]>=5.0',
    'nbclient>=0.10',
    'nbformat>=5.10',
    'psutil>=5.9',
    'pyrefly>=1.0',
    'pytest-xdist>=3.6',
    'ruff>=0.14',
  ],
  'docs': DOCS,
  'hf': HF,
  'serve': SERVE,
  'grammar': GRAMMAR,
  'kernels': KERNELS,
  'stores': STORES,
  'ray': FLEET,
  'judge': JUDGE,
  'tasks': TASKS,
  'verifiers': VERIFIERS,
  'gpu': ['jax[cuda13]>=0.10'],
  'gpu_cuda12': ['jax[cuda12]>=0.10'],  # for drivers before 580
  'tpu': ['jax[tpu]>=0.10'],
  'wandb': ['wandb>=0.19'],
}

setuptools.setup(
  name='composer_jax',
  version='0.1.0',
  description=(
    'Pretrains a sparse mixture-of-experts language model and trains it by '
    'reinforcement learning as a coding agent, in JAX.'
  ),
  license='Apache-2.0',
  packages=setuptools.find_packages(include=['composer_jax', 'composer_jax.*']),
  package_data={
    'composer_jax': ['py.typed'],
    'composer_jax.corpus': ['pinned.sources'],
    # What the compiler has to know of a GPU that is not there.
    'composer_jax.plan': ['*.txtpb'],
    'composer_jax.report': ['*.html'],
    'composer_jax.tasks.list_functions': ['words.txt'],
  },
  python_requires='>=3.11',
  install_requires=REQUIRED,
  extras_require=EXTRAS,
)
