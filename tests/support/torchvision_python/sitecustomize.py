"""Let torchvision load without its compiled part, in every process that has this folder on its path.

PyTorch's builds for CUDA do not load beside a torch for CPUs. What is replaced registers gradients and shapes of their
operators, none of which reads pictures.
"""

import sys
from types import ModuleType

for part in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{part}"] = ModuleType(part)
