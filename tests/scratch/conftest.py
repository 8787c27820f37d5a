"""One thread a process: the tensors here are tiny."""

import torch

torch.set_num_threads(1)
