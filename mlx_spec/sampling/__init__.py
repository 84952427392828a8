"""Sampling settings and samplers; acceptance rules; log-probabilities."""

from mlx_spec.sampling.candidates import likeliest as likeliest
from mlx_spec.sampling.sampling import GREEDY as GREEDY
from mlx_spec.sampling.sampling import Greedy as Greedy
from mlx_spec.sampling.sampling import LogitsProcessor as LogitsProcessor
from mlx_spec.sampling.sampling import Sampling as Sampling
from mlx_spec.sampling.sampling import Seeded as Seeded
from mlx_spec.sampling.sampling import Unseeded as Unseeded
