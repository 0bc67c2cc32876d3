"""verl's own `main_ppo`: its trainers, FSDP and Megatron engines, agent loop, and vLLM servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pandas
import pytest
import trl_ranks
from engines import NOT_COMPILED
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
OPTIONS = """
trainer.v1.trainer_mode=weightsync_sync trainer.total_training_steps=3 trainer.logger=[console] trainer.save_freq=-1
trainer.test_freq=-1 trainer.val_before_train=false trainer.n_gpus_per_node=2 algorithm.adv_estimator=grpo
data.train_batch_size=4 data.max_prompt_length=32 data.max_response_length=8 data.dataloader_num_workers=0
actor_rollout_ref.model.use_remove_padding=false actor_rollout_ref.model.enable_gradient_checkpointing=false
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.actor.optim.lr=0.01 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.enforce_eager=true
actor_rollout_ref.rollout.free_cache_engine=false +actor_rollout_ref.rollout.enable_sleep_mode=false
actor_rollout_ref.rollout.max_model_len=64 actor_rollout_ref.rollout.max_num_seqs=8
actor_rollout_ref.rollout.max_num_batched_tokens=512 actor_rollout_ref.rollout.calculate_log_probs=true
actor_rollout_ref.rollout.agent.num_workers=1 reward.num_workers=1
actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync
actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightsync.integrations.verl
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1
+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=weightsync.integrations.verl_worker.WorkerExtension
ray_kwargs.ray_init.num_cpus=64 +ray_kwargs.ray_init.num_gpus=2 +ray_kwargs.ray_init.include_dashboard=false
"""
FSDP2 = """
+actor_rollout_ref.model.override_config.attn_implementation=eager actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.use_torch_compile=false actor_rollout_ref.actor.fsdp_config.param_offload=true
actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
"""
MEGATRON = """
model_engine=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
actor_rollout_ref.actor.megatron.vanilla_mbridge=true
actor_rollout_ref.actor.megatron.param_offload=true actor_rollout_ref.actor.megatron.optimizer_offload=true
+actor_rollout_ref.actor.megatron.override_transformer_config.use_cpu_initialization=true
+actor_rollout_ref.actor.megatron.override_transformer_config.sequence_parallel=false
"""
"""torch's norm, in the place of Transformer Engine's, refuses `sequence_parallel`."""
SEPARATE = """
trainer.v1.trainer_mode=weightsync_separate_async trainer.v1.separate_async.parameter_sync_step=1
trainer.v1.separate_async.num_warmup_batches=0 trainer.v1.separate_async.hybrid_rollout.enable_switch=true
trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.nnodes=1
actor_rollout_ref.rollout.n_gpus_per_node=1
"""
"""With `hybrid_engine=true`, verl's default: a replica on the trainer's GPU beside one on its own. Both answer."""
FSDP1 = "actor_rollout_ref.actor.strategy=fsdp"
RESIDENT = "actor_rollout_ref.actor.fsdp_config.param_offload=false"
CASES = {
    "sync": FSDP2,
    "separate_async": FSDP2 + SEPARATE,
    "FSDP1, gathered": FSDP2 + FSDP1,
    "FSDP1, its shards": f"{FSDP2} {FSDP1} {RESIDENT}",
    "Megatron": MEGATRON,
}


def save_model(folder: Path) -> None:
    """Save a model, and a tokenizer with a template and a word for the newline, which verl wants of Qwen."""
    trl_ranks.save(folder, vocab_size=252)  # Megatron wants even shares of them
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"t{i}": i for i in range(3, 250)}, "\n": 250, "t251": 251}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    marks = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **marks).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("case", CASES)
def test_each_rollout_comes_from_the_trainers_current_weights(tmp_path: Path, case: str) -> None:
    save_model(tmp_path / "model")
    told = {"data_source": "toy", "ability": "x", "reward_model": {"style": "rule", "ground_truth": ""}}
    texts = [" ".join(f"t{(i * 7 + j) % 240 + 3}" for j in range(6)) for i in range(16)]
    asked = [
        {"prompt": [{"role": "user", "content": text}], "extra_info": {"index": i}} for i, text in enumerate(texts)
    ]
    pandas.DataFrame([told | each for each in asked]).to_parquet(tmp_path / "prompts.parquet")
    files = [f"data.{kind}_files={tmp_path}/prompts.parquet" for kind in ("train", "val")]
    files += [f"actor_rollout_ref.model.path={tmp_path}/model"]
    files += [f"reward.custom_reward_function.path={Path(__file__).with_name('ppo_cpu.py')}"]
    folders = [ROOT, ROOT / "tests/support", ROOT / "tests/integrations", Path(__file__).parent]
    modules = "megatron_cpu," if case == "Megatron" else ""
    environment = {
        **os.environ,
        **NOT_COMPILED,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": f"ppo_cpu,{modules}weightsync.integrations.verl_trainer",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    options = {option.partition("=")[0]: option for option in [*OPTIONS.split(), *CASES[case].split(), *files]}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *options.values()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    # The engine starts from random weights. Its tokens' probabilities equal the trainer's, to bfloat16's precision.
    assert measures("training/rollout_actor_probs_pearson_corr", done.stdout) == pytest.approx([1.0] * STEPS, abs=1e-3)
    assert max(measures("training/rollout_probs_diff_max", done.stdout)) < 0.01
    assert min(measures("actor/grad_norm", done.stdout)) > 0.1


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_trainer_goes_by_verls_own_name_of_its_mode(mode: str) -> None:
    """By this name verl chooses its sampler, and finds `parameter_sync_step`."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    from weightsync.integrations import verl_trainer

    trainer, own = get_trainer_cls(f"weightsync_{mode}"), get_trainer_cls(mode)
    assert trainer.__module__ == verl_trainer.__name__
    config = SimpleNamespace(trainer=SimpleNamespace(v1=SimpleNamespace(trainer_mode=f"weightsync_{mode}")))
    with mock.patch.object(own, "__init__", autospec=True, return_value=None) as made:
        trainer(config)
    made.assert_called_once_with(mock.ANY, config)
    assert config.trainer.v1.trainer_mode == mode


def measures(name: str, log: str) -> list[float]:
    """Return a metric of each step that verl's console logger has written."""
    return [float(found) for found in re.findall(rf"step:\d+ .*{name}:(?:np\.float\d+\()?([-\d.e]+)", log)]
