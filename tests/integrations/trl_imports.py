"""Imports what ranks of TRL's trainers need, for a server of forked processes."""

import trl.trainer.distillation_trainer
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
import trl.trainer.sft_trainer  # noqa: F401
