"""Names of other trainers for our keys, for the message about an unknown key.

They are names of the Hugging Face Trainer, TRL, Megatron-LM, LiBai, Colossal-AI, MaxText,
torchtitan and DeepSpeed; docs/coming_from/ has a page for each. Whatever section a name is typed
with, its last part is looked up:

    --config.optimizer.lr, --config.lr, --config.train.LR      optimizer.learning_rate

A name whose meaning is no key here has a sentence instead.
"""

#: Stands for the size of a microbatch, which has no key.
MICROBATCH_SIZE = (
    "data.global_batch_size / (train.num_microbatches × replicas), where mesh.data × mesh.fsdp × "
    "mesh.expert are the replicas"
)
#: Our key, or another way to say it -> the names of other trainers.
_NAMES = {
    "init_from": """model_name_or_path pretrained pretrained_model_name_or_path model_path
        hf_path load_parameters_path pretrained_checkpoint finetune load_weight
        initial_load_path""",
    "lora.rank": "lora_r lora_rank use_peft peft r",
    "lora.alpha": "lora_alpha",
    "lora.targets": "lora_target_modules target_modules",
    "mesh.pipeline": """pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size
        pipeline_parallel_degree ici_pipeline_parallelism pp_size""",
    "mesh.data": """dp ddp data_parallel data_parallel_size data_parallel_replicate_degree
        ici_data_parallelism dp_size""",
    "mesh.fsdp": "fsdp fully_sharded data_parallel_shard_degree ici_fsdp_parallelism",
    "mesh.context": """cp context_parallel context_parallel_size context_parallel_degree
        sequence_parallel_size ici_context_parallelism ring_attention sp sp_size""",
    "mesh.expert": """ep expert_parallel expert_parallel_size expert_model_parallel_size
        expert_parallel_degree ici_expert_parallelism""",
    "mesh.model": """tp tensor_parallel tensor_parallel_size tensor_model_parallel_size
        tensor_parallel_degree ici_tensor_parallelism tp_size expert_tensor_parallel_size""",
    "tensor.mode": "tensor_parallel_mode tp_mode",
    "pipeline.chunks": """num_model_chunks virtual_pipeline_model_parallel_size
        num_layers_per_virtual_pipeline_stage num_pipeline_repeats""",
    "pipeline.schedule": """pipeline_parallel_schedule pipeline_schedule pp_style
        scheduler_nodes pipeline_parallel_schedule_csv""",
    "memory.zero_stage": """zero zero_stage zero_optimization use_distributed_optimizer stage
        use_megatron_fsdp data_parallel_sharding_strategy shard_optimizer_over_data""",
    "memory.placement": """cpu_offload offload offload_optimizer optimizer_offload
        offload_to_cpu optimizer_cpu_offload optimizer_memory_host_offload enable_cpu_offload
        placement_policy""",
    "data.paths": """dataset dataset_name dataset_path data_path data_files train_file train_files
        train_data_path training_dataset""",
    "data.validation_paths": """validation_file valid_data_path eval_dataset validation_dataset
        eval_file val_data""",
    "data.objective": "task task_type training_task",
    "data.packing": "packing pack_sequences packing_strategy",
    "data.tokenizer": """tokenizer tokenizer_name tokenizer_path tokenizer_model
        tokenizer_name_or_path tokenizer_type hf_assets_path vocab_file merge_file merges_file""",
    "data.vocab_size": "vocab_size padded_vocab_size",
    "data.sequence_length": """seq_length seq_len max_seq_length max_seq_len max_length
        block_size sequence_length max_target_length encoder_seq_length context_length
        max_context_length""",
    "data.global_batch_size": """batch_size global_batch_size train_batch_size total_batch_size
        global_batch num_tokens_per_train_step""",
    "data.rampup_batch_size": """rampup_batch_size batch_size_rampup global_rampup_samples
        per_device_batch_size_start enable_rampup_batch_size""",
    "data.num_threads": "num_workers dataloader_num_workers num_threads",
    "optimizer.name": "optim optimizer optimizer_type opt_type optimizer_name",
    "optimizer.learning_rate": "lr learning_rate base_lr max_lr peak_lr",
    "optimizer.final_learning_rate_fraction": """min_lr min_lr_ratio min_lr_factor eta_min
        cosine_learning_rate_final_fraction learning_rate_final_fraction""",
    "optimizer.schedule": """scheduler lr_scheduler lr_scheduler_type lr_decay_style lr_schedule
        decay_type lr_schedule_type""",
    "optimizer.decay_steps": """lr_wsd_decay_iters num_decay_steps decay_steps
        wsd_decay_steps_fraction decay_ratio""",
    "optimizer.warmup_steps": """warmup warmup_steps warmup_iter warmup_iters lr_warmup_iters
        num_warmup_steps warmup_ratio lr_warmup_fraction warmup_steps_fraction""",
    "optimizer.weight_decay": "weight_decay wd adam_weight_decay",
    "optimizer.beta1": "adam_beta1 adam_b1 beta_1 betas b1",
    "optimizer.beta2": "adam_beta2 adam_b2 beta_2 b2",
    "optimizer.epsilon": "adam_eps adam_epsilon eps",
    "optimizer.clip_norm": """max_grad_norm clip_grad clip_grad_norm grad_clip gradient_clipping
        gradient_clip_val gradient_clipping_threshold max_norm clip_grad_max_norm""",
    "train.num_steps": """max_steps steps training_steps train_steps num_train_steps train_iters
        train_iter total_steps max_iters num_iterations""",
    "train.num_epochs": "epochs num_epochs num_train_epochs max_epochs train_epoch train_epochs",
    "train.num_microbatches": """gradient_accumulation_steps accumulate_grad_batches grad_accum
        num_accumulation_steps num_microbatches num_pp_microbatches num_pipeline_microbatches""",
    MICROBATCH_SIZE: """micro_batch_size train_micro_batch_size train_micro_batch_size_per_gpu
        per_device_train_batch_size per_device_batch_size local_batch_size microbatch_size""",
    "train.remat": """gradient_checkpointing activation_checkpoint activation_checkpointing
        checkpoint_activations recompute recompute_granularity recompute_activations remat_policy
        use_gradient_checkpointing remat gradient_checkpoint_config recompute_method
        recompute_num_layers recompute_modules distribute_saved_activations""",
    "train.seed": "seed random_seed init_weights_seed",
    "train.ema_decay": "ema use_ema ema_decay",
    "train.early_stopping": "early_stopping_patience patience early_stopping early_stop",
    "train.early_stopping_min_delta": "early_stopping_threshold early_stopping_min_delta min_delta",
    "train.step_callbacks": "callbacks callback hooks",
    "eval.every_steps": """eval_strategy eval_steps eval_interval eval_period eval_freq
        validation_freq eval_iter""",
    "eval.num_batches": "eval_iters eval_batches",
    "checkpoint.every_steps": """save_steps save_interval checkpoint_interval checkpoint_period
        save_every ckpt_interval save_freq""",
    "checkpoint.max_to_keep": """save_total_limit max_to_keep keep_latest_k keep_last
        max_num_checkpoints_to_keep""",
    "checkpoint.keep_best": "load_best_model_at_end save_top_k keep_best",
    "checkpoint.best_metric": """metric_for_best_model monitor early_stopping_metric best_metric
        eval_metric""",
    "checkpoint.best_is_max": "greater_is_better early_stopping_mode eval_mode",
    "precision.compute": """bf16 fp16 fp8 float16 bfloat16 amp dtype torch_dtype precision
        mixed_precision mixed_precision_param compute_dtype use_fp8 fp8_format quantization""",
    "precision.params": "weight_dtype param_dtype params_dtype",
    "precision.reduce": """mixed_precision_reduce grad_reduce_in_bf16 grad_dtype communication_dtype
        communication_data_type accumulate_allreduce_grads_in_fp32""",
    "precision.loss_scale": "initial_loss_scale initial_scale_power initial_scale",
    "log.every_steps": """logging_steps log_interval log_freq log_period log_every steps_per_print
        tensorboard_log_interval""",
    "log.trackers": """wandb use_wandb enable_wandb wandb_project wandb_exp_name wandb_entity mlflow
        report_to logger loggers tracker trackers log_with""",
    "model.num_layers": """num_hidden_layers n_layer n_layers hidden_layers num_decoder_layers
        base_num_decoder_layers depth num_layers decoder_num_layers encoder_num_layers""",
    "model.num_heads": "num_attention_heads n_head n_heads num_query_heads base_num_query_heads",
    "model.num_kv_heads": """num_key_value_heads n_kv_heads num_query_groups base_num_kv_heads
        group_query_attention""",
    "model.embed_dim": "hidden_size n_embd d_model emb_dim base_emb_dim hidden_dim",
    "model.mlp_dim": "ffn_hidden_size intermediate_size ffn_dim base_mlp_dim n_inner d_ff",
    "model.scaling": "mup use_mup mup_enabled completep parametrization",
    "model.base_embed_dim": "mup_base_width base_width dim_model_base mup_base_hidden_size",
    "model.base_num_layers": "mup_base_depth base_depth completep_base_depth",
    "model.num_experts": "num_local_experts n_routed_experts moe_num_experts num_experts",
    "model.experts_per_token": "num_experts_per_tok moe_router_topk num_experts_per_token",
    "pipeline.layers_per_stage": """num_layers_per_stage decoder_first_pipeline_num_layers
        pipeline_model_parallel_layout custom_pipeline_stage_id
        pipeline_parallel_layers_per_stage""",
    "mesh.ulysses": "cp_comm_type",
    "memory.shard_parameters_fraction": "shard_param_frac fsdp_reshard_after_forward",
    "memory.offload_optimizer_fraction": "offload_optim_frac",
    "memory.offload_parameters_fraction": "offload_param_frac parameter_memory_host_offload",
    "precision.loss_scale_window": "growth_interval loss_scale_window",
    "precision.loss_scale_hysteresis": "hysteresis",
    "precision.loss_scale_min": "min_scale min_loss_scale",
    "data.name": "dataset_type",
    "data.text_field": "dataset_text_field text_column",
    "data.chat_template": "chat_template_path",
    "data.isolate_documents": "reset_position_ids reset_attention_mask",
    "lora.dropout": "lora_dropout",
    "lora.use_rslora": "use_rslora",
    "lora.use_dora": "use_dora",
    "preference.beta": "beta",
    "preference.label_smoothing": "label_smoothing",
    "train.unroll": "scan_layers",
    "train.start_timeout_s": "init_timeout_seconds",
    "train.failure_timeout_s": "train_timeout_seconds",
    "log.profile_steps": """profiler profile_steps profile use_pytorch_profiler profile_step_start
        profile_step_end""",
    "model.vocab_multiple": "make_vocab_size_divisible_by",
    "model.head_dim": "kv_channels qk_head_dim",
    "model.activation": "openai_gelu squared_relu quick_geglu hidden_act activation_func",
    "model.norm": "normalization",
    "model.max_positions": "max_position_embeddings n_positions",
    "model.dropout": "dropout hidden_dropout resid_pdrop embd_pdrop",
    "model.rope_theta": "rotary_base rope_theta",
    "model.rope_scaling": """use_rope_scaling rope_scaling_factor rotary_scaling_factor
        rotary_seq_len_interpolation_factor""",
    "model.rotary_fraction": "rotary_percent",
    "model.tie_embeddings": """untie_embeddings_and_output_weights
        share_embeddings_and_output_weights tie_word_embeddings""",
    "model.init_stddev": "init_method_std initializer_range",
    "model.attention": "use_flash_attn attention_backend transformer_impl attn_implementation",
    "model.qk_norm": "qk_layernorm",
    "model.qkv_bias": "add_qkv_bias",
    "model.sliding_window": "window_size",
    "model.router_loss": "moe_aux_loss_coeff router_aux_loss_coef",
    "model.router_z_loss": "moe_z_loss_coeff",
    "model.router_scores": "moe_router_score_function",
    "model.router_groups": "moe_router_num_groups",
    "model.router_groups_per_token": "moe_router_group_topk",
    "model.router_scale": "moe_router_topk_scaling_factor",
    "model.balancing_bias": "moe_router_enable_expert_bias",
    "model.balancing_rate": "moe_router_bias_update_rate",
    "model.expert_capacity": "moe_expert_capacity_factor",
    "model.expert_dim": "moe_ffn_hidden_size moe_intermediate_size",
    "model.shared_expert_dim": "moe_shared_expert_intermediate_size",
    "model.dense_layers": "moe_layer_freq",
    "model.latent_dim": "multi_latent_attention kv_lora_rank",
    "model.query_latent_dim": "q_lora_rank",
    "model.latent_rotary_dim": "qk_pos_emb_head_dim",
    "model.value_dim": "v_head_dim",
    "model.mtp_depths": "mtp_num_layers",
    "model.mtp_loss": "mtp_loss_scaling_factor",
    "data.cache_dir": "data_cache_path",
    "data.mask_fraction": "mask_prob mlm_probability",
    "optimizer.momentum": "sgd_momentum",
    "--workdir": """output_dir run_dir save_dir dump_folder base_output_directory
        checkpoint_dir resume resume_from_checkpoint resume_from load_checkpoint run_name save
        load tensorboard_dir""",
}
#: Names of other trainers, mostly of Megatron-LM, that are no key here -> what the message says.
_EXPLANATIONS = {
    """sequence_parallel overlap_grad_reduce overlap_param_gather tp_comm_overlap align_grad_reduce
    overlap_p2p_comm gradient_accumulation_fusion masked_softmax_fusion bias_swiglu_fusion
    bias_gelu_fusion bias_dropout_fusion cross_entropy_loss_fusion rope_fusion moe_permute_fusion
    persist_layer_norm distributed_backend moe_grouped_gemm moe_token_dispatcher_type""": (
        "XLA and Taibai decide about it, so it has no key"
    ),
    "swiglu geglu gated_linear_unit use_swiglu": (
        "the model decides about it: configs/llama.py has SwiGLU (model.is_gated and "
        "model.activation=silu); GPT-2 has model.activation, but no gate"
    ),
    """position_embedding_type position_embedding use_rotary_position_embeddings
    no_position_embedding""": (
        "the model decides about it: GPT-2, OPT and BERT learn positions, LLaMA has rotary ones, "
        "and T5 relative ones"
    ),
    "norm_epsilon layernorm_epsilon layer_norm_epsilon layer_norm_eps rms_norm_eps": (
        "here it is model.rms_norm_epsilon for LLaMA and T5, and model.layer_norm_epsilon for "
        "other models"
    ),
    "add_bias_linear disable_bias_linear attention_bias": (
        "here it is model.qkv_bias, model.out_bias and model.mlp_bias for LLaMA; GPT-2, OPT and "
        "BERT always have biases"
    ),
    "attention_dropout attn_pdrop attention_probs_dropout_prob": (
        "attention weights have no dropout; model.dropout is for embeddings and residual branches"
    ),
    "moe_router_load_balancing_type": (
        "here it is model.router_loss, or model.balancing_bias with model.balancing_rate"
    ),
    "train_samples lr_decay_samples": (
        "here it is train.num_steps, which is samples / data.global_batch_size"
    ),
    "lr_warmup_samples": (
        "here it is optimizer.warmup_steps, which is samples / data.global_batch_size"
    ),
    "lr_decay_iters lr_decay_steps": "schedules end at train.num_steps",
    "split dataset_split train_split": (
        "the share of documents to hold out is data.validation_fraction, and the name of a data "
        "set's split is data.split"
    ),
    "attention_softmax_in_fp32 apply_query_key_layer_scaling": (
        "attention computes its softmax in float32, so it has no key"
    ),
    "ckpt_format ckpt_fully_parallel_save async_save use_dist_ckpt use_checkpoint_args": (
        "checkpoints have one format and are saved in the background; see docs/checkpoints.md"
    ),
    "no_load_optim no_load_rng no_save_optim no_save_rng": (
        "init_from reads only parameters, and a run that resumes reads its whole state"
    ),
    "override_opt_param_scheduler use_checkpoint_opt_param_scheduler": (
        "a run resumes with the schedule of its config, so it has no key"
    ),
    "exit_duration_in_mins exit_interval exit_signal_handler": (
        "a run saves and ends when it gets a signal, or at train.num_steps; see docs/many_hosts.md"
    ),
    "mock_data": "data.name=python_stdlib needs no files",
    "log_throughput": "it is always logged",
}
#: Names of switches -> the value of our key that they stand for.
_SWITCHES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8",
    "gradient_checkpointing": "full",
}
_KEYS = {name: key for key, names in _NAMES.items() for name in names.split()}
_EXPLANATION_OF = {name: text for names, text in _EXPLANATIONS.items() for name in names.split()}


def key_of_peer(key: str) -> str | None:
    """Return our name of a key that another trainer has; None if none has it."""
    return _KEYS.get(_last_part(key))


def hint_about(key: str) -> str | None:
    """Return what a message says about a key of another trainer; None if none has it."""
    ours = key_of_peer(key)
    if ours is None:
        return _EXPLANATION_OF.get(_last_part(key))
    if ours == key:
        return "the model of this config has no such field"
    switched = _SWITCHES.get(_last_part(key))
    return f"here it is {ours}" if switched is None else f"here it is {ours}={switched}"


def _last_part(key: str) -> str:
    return key.rpartition(".")[2].lower().replace("-", "_")
