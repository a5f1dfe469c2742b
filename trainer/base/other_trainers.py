"""What people type who come from other trainers, and what it is here.

NAMES has the options and config keys of other trainers; VALUES how they spell what a key may be, in lower case with
underscores. docs/other_trainers.md shows both, and scripts/reference_pages.py writes it.
"""

from collections.abc import Collection

# The last has the names that no program named here has, but that people write.
TRAINERS = ("sd-scripts", "OneTrainer", "ai-toolkit", "SimpleTuner", "diffusers' scripts and others")

UNET = 'write a dtype, for example "fp8_e4m3", in [model.components.unet] (of Flux: transformer)'
ENCODER = "write a dtype in [model.components.text_encoder_2]"
ADAPTED = 'add a rule: [[adapter.rules]] with component = "text_encoder" and match = "*"'
DORA = 'write type = "dora" in [adapter]'
IN_FP32 = "leave it out: an adapter is trained in fp32, whatever precision.compute is"
BUCKETS = "leave it out: photos always go to buckets of their shape"
SIZES = "leave it out: the sizes of buckets follow from data.resolution"
BETAS = "write betas = [0.9, 0.999] in [optimizer]"
T_RANGE = "write t_range = [0.0, 1.0] in [objective], shares of 1000"
ATTENTION = "leave it out: attention is torch's own"
ON_THE_CARD = "there is none: weights stay on the card; write fit in [memory], or a smaller dtype in [model.components.unet]"
RESUME = "leave it out: write --resume_from auto on the command line"
PER_ENCODER = 'write lr in a rule of [[adapter.rules]] with component = "text_encoder" or "text_encoder_2"'
PROCESSES = "leave it out: start the program with torchrun --nproc_per_node N train.py"
PUSH = "leave it out: scripts/adapter.py push sends a run's files afterwards"
OTHER_KIND = "there is none: an adapter is a LoRA or a DoRA"
SAMPLE = "in [[validation.samples]]"
TABLED = ("dtype",)  # so common a name that it means the same only in its table

# By subject: the key here, or a sentence (it has blanks) where that is not all; then the names of each of TRAINERS. A name
# may have its table before it.
NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "The model": (
        ("model.path", "pretrained_model_name_or_path", "base_model_name", "model.name_or_path",
         "pretrained_model_name_or_path",
         "pretrained_model_name_or_path pretrained_model model_name checkpoint_path base_model"),
        ("model.family", "", "model_type", "model.arch", "model_family", ""),
        ('write family = "flux" in [model]', "", "", "model.is_flux", "", ""),
        ('write family = "sdxl" in [model]', "", "", "model.is_xl", "", "sdxl"),
        ("model.components.vae.path", "vae ae", "vae.model_name", "model.vae_path", "pretrained_vae_model_name_or_path", ""),
        ("model.components.text_encoder.path", "clip_l", "", "", "", ""),
        ("model.components.text_encoder_2.path", "t5xxl", "", "", "pretrained_t5_model_name_or_path", ""),
        ("model.variant", "", "", "", "variant", ""),
        ('write prediction = "v" in [model]', "v_parameterization", "force_v_prediction", "model.is_v_pred", "", ""),
        ('write prediction = "epsilon" in [model]', "", "force_epsilon_prediction", "", "", ""),
        ("model.prediction", "", "", "", "prediction_type", "prediction_type"),
        ("model.zero_terminal_snr", "zero_terminal_snr", "rescale_noise_scheduler_to_zero_terminal_snr",
         "", "rescale_betas_zero_snr", ""),
        ('write dtype = "fp8_e4m3" in [model.components.unet] (of Flux: transformer)',
         "fp8_base fp8_base_unet", "", "", "", ""),
        (UNET, "", "weight_dtype quantization", "model.quantize model.qtype", "base_model_precision quantize_via",
         "load_in_8bit load_in_4bit"),
        (ENCODER, "", "", "model.quantize_te model.qtype_te", "text_encoder_1_precision", "text_encoder_2_precision"),
        ("leave it out: the VAE is stored and computed in fp32 unless [model.components.vae] says otherwise",
         "no_half_vae", "", "model.vae_dtype", "vae_dtype", ""),
        ("precision.compute", "mixed_precision", "train_dtype", "train.dtype", "mixed_precision",
         "mixed_precision torch_dtype"),
        ('write compute = "fp16" in [precision]', "", "", "", "", "fp16"),
        ('write compute = "bf16" in [precision]', "", "", "", "", "bf16"),
        (IN_FP32, "full_bf16 full_fp16", "lora_weight_dtype fallback_train_dtype stochastic_rounding", "",
         "gradient_precision", ""),
        ("leave it out: the last but one layer is read, as SDXL was trained", "clip_skip",
         "text_encoder_layer_skip", "", "", ""),
        ("there is none: schnell is trained as it is", "", "", "model.assistant_lora_path", "flux_fast_schedule", ""),
        ("merge them first, with scripts/adapter.py merge", "base_weights base_weights_multiplier", "", "model.lora_path", "",
         ""),
        ("model.revision", "", "", "", "revision", "revision"),
        ("run.device", "", "train_device", "device", "", ""),
    ),
    "The adapter": (
        ("adapter.type", "", "peft_type", "network.type", "lora_type", "network_type"),
        (DORA, "dora_wd", "lora_decompose", "", "use_dora", "use_dora weight_decompose"),
        ("adapter.rank", "network_dim", "lora_rank", "network.linear", "lora_rank",
         "network_rank rank lora_r lora_dim dim r"),
        ("adapter.alpha", "network_alpha", "lora_alpha", "network.linear_alpha", "lora_alpha", "lora_alpha"),
        ('leave it out; write type = "lora" or type = "dora" in [adapter]', "network_module algo", "", "", "", ""),
        ("write its parts by their names here: rank_dropout, module_dropout and targets in [adapter]", "network_args", "",
         "network_kwargs", "", ""),
        ('add a rule: [[adapter.rules]] with component = "unet", match = "*conv*" and a rank', "conv_dim", "", "network.conv",
         "", ""),
        ('add a rule: [[adapter.rules]] with component = "unet", match = "*conv*" and an alpha', "conv_alpha", "",
         "network.conv_alpha", "", ""),
        (OTHER_KIND, "", "oft_block_size lokr_dim", "network.lokr_factor",
         "lycoris_config", ""),
        ("there is none: the words of the model stay as they are", "", "embedding additional_embeddings",
         "embedding", "", "token_string placeholder_token"),
        ("adapter.targets", "", "layer_filter layer_filter_preset layer_filter_regex",
         "only_if_contains ignore_if_contains", "flux_lora_target", "target_modules lora_layers"),
        ("adapter.dropout", "network_dropout", "dropout_probability", "network.dropout", "lora_dropout", "lora_dropout"),
        ("adapter.rslora", "", "", "", "", "use_rslora"),
        ("adapter.max_norm", "scale_weight_norms", "", "", "", ""),
        ("adapter.init_from", "network_weights", "lora_model_name", "", "init_lora", ""),
        ("write init_resize = true in [adapter], and the rank that you want", "dim_from_weights", "", "", "", ""),
        ("leave it out: text encoders are trained only where a rule in [[adapter.rules]] names one",
         "network_train_unet_only", "", "train.train_unet", "", ""),
        (ADAPTED, "network_train_text_encoder_only", "", "train.train_text_encoder", "",
         "train_text_encoder"),
        ("write stop_step in a rule of [[adapter.rules]]", "", "stop_training_after", "", "", "stop_text_encoder_training"),
        ("write rank in a rule of [[adapter.rules]]", "block_dims network_reg_dims", "", "", "", ""),
        ("write lr in a rule of [[adapter.rules]]", "network_reg_lrs", "", "", "", "block_lr"),
        ("write the blocks' patterns as adapter.targets", "train_blocks", "", "", "", ""),
        ('add a rule: [[adapter.rules]] with component = "text_encoder_2" and match = "*"', "train_t5xxl", "", "", "", ""),
        ("leave it out: a DoRA has a magnitude for each output", "", "lora_decompose_output_axis", "", "", ""),
        (PER_ENCODER, "", "", "", "", "learning_rate_te1 learning_rate_te2 text_encoder_lr1 text_encoder_lr2"),
        ("there is none: biases and norms are not trained", "train_norm", "", "", "", "lora_bias"),
        ("there is none: A is drawn from the seed, and B begins at zero", "", "", "", "", "init_lora_weights"),
    ),
    "Optimizer and schedule": (
        ("optimizer.lr", "learning_rate unet_lr", "learning_rate", "train.lr train.unet_lr",
         "learning_rate", "learning_rate"),
        ("optimizer.text_encoder_lr", "text_encoder_lr", "text_encoder.learning_rate", "train.text_encoder_lr", "",
         "text_encoder_learning_rate"),
        ("optimizer.name", "optimizer_type", "", "train.optimizer", "optimizer", "optim"),
        ('write name = "adamw8bit" in [optimizer]', "use_8bit_adam", "", "", "", "use_8bit_adam"),
        ("optimizer.options", "optimizer_args", "", "train.optimizer_params", "optimizer_config", ""),
        ('write name = "lion" in [optimizer]', "use_lion_optimizer", "", "", "", ""),
        ("write it in optimizer.options, for an optimizer that takes it", "", "d_coef d0 growth_rate decouple", "", "",
         "prodigy_decouple prodigy_use_bias_correction prodigy_safeguard_warmup"),
        ("optimizer.weight_decay", "", "", "", "adam_weight_decay", "adam_weight_decay"),
        ("optimizer.eps", "", "", "", "adam_epsilon", "adam_epsilon"),
        (BETAS, "", "beta1 beta2", "", "optimizer_beta1 optimizer_beta2", "adam_beta1 adam_beta2"),
        ("optimizer.lora_plus", "loraplus_lr_ratio loraplus_unet_lr_ratio", "", "", "", ""),
        ("there is none: gradients are clipped before the update", "fused_backward_pass", "fused_back_pass", "", "", ""),
        ("write max_grad_norm in [step]: gradients are clipped by their norm", "", "", "", "grad_clip_method", ""),
        ("schedule.name", "lr_scheduler", "learning_rate_scheduler", "train.lr_scheduler", "lr_scheduler",
         "lr_scheduler scheduler lr_scheduler_type"),
        ("write its parts by their names here: warmup, end, cycles, power, decay in [schedule]", "lr_scheduler_args",
         "scheduler_params", "train.lr_scheduler_params", "", ""),
        ("schedule.warmup", "lr_warmup_steps", "learning_rate_warmup_steps", "", "lr_warmup_steps",
         "lr_warmup_steps warmup_steps warmup_ratio"),
        ("schedule.cycles", "lr_scheduler_num_cycles", "learning_rate_cycles", "", "lr_num_cycles", "lr_num_cycles"),
        ("schedule.power", "lr_scheduler_power", "", "", "lr_power", "lr_power"),
        ("schedule.decay", "lr_decay_steps", "", "", "", ""),
        ("schedule.end", "lr_scheduler_min_lr_ratio", "learning_rate_min_factor", "", "", ""),
        ("write end in [schedule]: it is a share of the rate", "", "", "", "lr_end", "min_lr eta_min"),
        ("leave it out: the rate stays the one that you write", "", "learning_rate_scaler", "", "", "scale_lr"),
    ),
    "Steps": (
        ("run.max_steps", "max_train_steps", "", "train.steps", "max_train_steps", "max_train_steps num_steps"),
        ("run.epochs", "max_train_epochs", "epochs", "", "num_train_epochs", "num_train_epochs num_epochs"),
        ("run.seed", "seed", "", "", "seed", "random_seed"),
        ("data.batch_size", "train_batch_size", "batch_size", "train.batch_size", "train_batch_size",
         "train_batch_size per_device_train_batch_size"),
        ("there is none: held-out photos pass in batches of data.batch_size", "", "", "", "",
         "eval_batch_size per_device_eval_batch_size validation_batch_size"),
        ("step.accumulation", "gradient_accumulation_steps", "gradient_accumulation_steps",
         "train.gradient_accumulation train.gradient_accumulation_steps", "gradient_accumulation_steps",
         "gradient_accumulation_steps accumulation_steps grad_accum"),
        ("step.max_grad_norm", "max_grad_norm", "clip_grad_norm", "train.max_grad_norm", "max_grad_norm",
         "max_grad_norm gradient_clipping"),
        ("memory.gradient_checkpointing", "gradient_checkpointing", "gradient_checkpointing", "train.gradient_checkpointing",
         "gradient_checkpointing gradient_checkpointing_interval", "gradient_checkpointing"),
        (ON_THE_CARD, "blocks_to_swap lowram split_mode", "layer_offload_fraction", "model.low_vram",
         "enable_group_offload ramtorch musubi_blocks_to_swap", "lowvram"),
        ("there is none: nothing is moved to the host; write gradient_checkpointing = true in [memory]",
         "cpu_offload_checkpointing", "", "", "", ""),
        (ATTENTION, "xformers sdpa mem_eff_attn", "attention_mechanism", "train.xformers train.sdp",
         "attention_mechanism", "enable_xformers_memory_efficient_attention split_attn"),
        ("leave it out: blocks are not compiled", "torch_compile", "compile", "", "dynamo_backend", ""),
        ("leave it out: fp32 is computed as fp32", "", "", "", "", "allow_tf32"),
        (PROCESSES, "", "multi_gpu", "", "", "num_processes"),
        ("there is none: the report names the step that was best", "", "", "", "", "early_stopping early_stopping_patience"),
        ("there is none: every process holds the whole model", "deepspeed", "", "", "", "deepspeed"),
        (RESUME, "resume initial_step initial_epoch skip_until_initial_step", "continue_last_backup", "",
         "resume_from_checkpoint", "resume_from_checkpoint"),
    ),
    "Photos and captions": (
        ("data.sources.0.path", "train_data_dir image_dir", "", "folder_path dataset_path",
         "instance_data_dir", "train_data_dir instance_data_dir instance_data_root data_dir"),
        ("write one [[data.sources]] for each set of photos", "dataset_config", "concepts concept_file_name", "datasets",
         "data_backend_config", ""),
        ("data.sources.0.repeats", "num_repeats", "repeats", "num_repeats", "repeats", "repeats"),
        ("data.resolution", "resolution", "resolution", "resolution", "resolution", "resolution image_size"),
        ('write path = "hf:NAME" in [[data.sources]]', "", "", "", "dataset_name", "dataset_name"),
        ("add a second [[data.sources]] with regularisation = true", "reg_data_dir", "", "train.diff_output_preservation", "",
         "class_data_dir with_prior_preservation"),
        ("there is none: regularisation images are not made; put them into a folder, and add a [[data.sources]] for it",
         "", "", "", "", "num_class_images class_prompt sample_batch_size prior_generation_precision"),
        ("data.sources.0.regularisation", "is_reg", "", "is_reg", "is_regularisation_data", ""),
        ("data.sources.1.loss_weight", "prior_loss_weight", "", "", "", "prior_loss_weight"),
        ('write captions = "folder" in [[data.sources]] and name the folder so, or put captions beside photos', "", "", "",
         "instance_prompt", "instance_prompt"),
        ("data.sources.0.captions", "", "", "", "caption_strategy", ""),
        ("data.sources.0.trigger", "class_tokens", "", "trigger_word default_caption", "", ""),
        ("data.sources.0.shuffle", "shuffle_caption", "enable_tag_shuffling", "shuffle_tokens", "", ""),
        ("data.sources.0.keep", "keep_tokens", "keep_tags_count", "keep_tokens", "", ""),
        ("data.sources.0.separator", "caption_separator", "tag_delimiter", "", "", ""),
        ("data.sources.0.prefix", "caption_prefix", "", "", "", ""),
        ("data.sources.0.suffix", "caption_suffix", "", "", "", ""),
        ("data.sources.0.wildcards", "enable_wildcard", "", "", "", ""),
        ("data.sources.0.tag_dropout", "caption_tag_dropout_rate", "tag_dropout_probability", "token_dropout_rate", "", ""),
        ("data.caption_dropout", "caption_dropout_rate", "", "caption_dropout_rate", "caption_dropout_probability",
         "proportion_empty_prompts"),
        ("there is none: caption_dropout in [data] is a share of all appearances", "caption_dropout_every_n_epochs", "",
         "", "", ""),
        ("there is none: write keep in [[data.sources]], a number of tags", "keep_tokens_separator", "", "", "", ""),
        ("there is none: tags are split at separator alone", "secondary_separator", "", "", "", ""),
        ("there is none: all tags are trained from the first step", "token_warmup_min token_warmup_step", "", "", "", ""),
        ("leave it out: .txt and .caption files beside a photo are both read", "caption_extension", "",
         "caption_ext", "", ""),
        ("there is none: brackets in a caption are words", "weighted_captions", "", "", "", ""),
        ("data.clip_chunks", "max_token_length", "", "", "", ""),
        ("data.text_length", "t5xxl_max_token_length", "text_encoder_sequence_length text_encoder_2_sequence_length", "",
         "tokenizer_max_length", "max_sequence_length"),
        ("data.flip", "flip_aug", "enable_random_flip", "flip_x", "", "random_flip"),
        ("data.colour_jitter", "color_aug", "", "", "", ""),
        ("data.crop_jitter", "random_crop", "enable_crop_jitter", "random_crop", "", "random_crop"),
        ("leave it out: a photo is cropped around its middle", "face_crop_aug_range", "", "", "crop crop_style crop_aspect",
         "center_crop"),
        (BUCKETS, "enable_bucket", "aspect_ratio_bucketing", "buckets", "", ""),
        (SIZES, "min_bucket_reso max_bucket_reso", "", "", "resolution_type", ""),
        ("data.bucket_step", "bucket_reso_steps", "", "bucket_tolerance", "aspect_bucket_alignment", ""),
        ("leave it out: photos are enlarged only where data.enlarge = true", "bucket_no_upscale", "", "", "", ""),
        ("data.cache", "cache_latents cache_latents_to_disk", "latent_caching",
         "cache_latents cache_latents_to_disk", "", "image_caching"),
        ("data.cache_text", "cache_text_encoder_outputs cache_text_encoder_outputs_to_disk", "",
         "cache_text_embeddings unload_text_encoder", "", "text_caching"),
        ("leave it out: what a run encodes stays in data.cache_dir for the next one", "", "only_cache", "", "", ""),
        ("data.cache_dir", "", "cache_dir", "", "cache_dir_vae", ""),
        ("leave it out: photos are encoded one at a time", "vae_batch_size", "", "", "vae_batch_size", ""),
        ("leave it out: captions are encoded together where that changes no bit", "text_encoder_batch_size", "", "", "", ""),
        ("data.masks", "masked_loss", "masked_training", "", "", ""),
        ('write masks = "alpha" in [data]', "alpha_mask", "", "alpha_mask", "", ""),
        ('write masks = "files" in [data]: a mask lies beside its photo', "conditioning_data_dir", "", "mask_path", "", ""),
        ("data.unmasked_weight", "", "unmasked_weight", "mask_min_value", "", ""),
        ("there is none: a mask weighs the loss of every appearance",
         "", "unmasked_probability normalize_masked_area_loss masked_prior_preservation_weight",
         "inverted_mask_prior", "masked_loss_probability", ""),
        ("data.num_workers", "max_data_loader_n_workers", "dataloader_threads", "num_workers", "",
         "dataloader_num_workers caching_threads"),
        ("leave it out: workers read ahead where data.num_workers is above 0", "persistent_data_loader_workers",
         "", "", "dataloader_prefetch", "prefetch_next_batch"),
        ("leave it out: a small photo is trained in a smaller bucket, and scripts/data.py report lists it", "", "", "",
         "minimum_image_size", ""),
    ),
    "The objective": (
        ("objective.loss", "loss_type", "", "train.loss_type", "loss_type", "loss_fn"),
        ('write loss = "huber" in [objective]', "", "huber_strength", "", "", ""),
        ("there is none: one loss is trained, and loss in [objective] says which",
         "", "mse_strength mae_strength log_cosh_strength", "", "", ""),
        ("objective.huber_c", "huber_c", "huber_delta", "", "huber_c", ""),
        ("objective.weighting", "", "loss_weight_fn", "", "", ""),
        ("objective.min_snr_gamma", "min_snr_gamma", "loss_weight_strength", "train.min_snr_gamma", "snr_gamma", "snr_gamma"),
        ('write weighting = "soft_min_snr" in [objective]', "", "", "", "use_soft_min_snr", ""),
        ('write weighting = "debiased" in [objective]', "debiased_estimation_loss", "", "", "", ""),
        ("there is none: objective.weighting has the choices", "scale_v_pred_loss_like_noise_pred v_pred_like_loss", "", "",
         "", ""),
        ("objective.noise_offset", "noise_offset", "offset_noise_weight", "train.noise_offset",
         "noise_offset", "noise_offset"),
        ("there is none: the offset is noise_offset in [objective] alone",
         "adaptive_noise_scale noise_offset_random_strength", "generalized_offset_noise", "", "noise_offset_probability", ""),
        ("there is none: input_perturbation in [objective] is the same in every step", "ip_noise_gamma_random_strength", "",
         "", "input_perturbation_steps", ""),
        ("objective.input_perturbation", "ip_noise_gamma", "perturbation_noise_weight", "", "input_perturbation",
         "input_perturbation"),
        ("objective.multires_noise_iterations", "multires_noise_iterations", "", "", "", ""),
        ("objective.multires_noise_discount", "multires_noise_discount", "", "", "", ""),
        ("objective.timesteps", "timestep_sampling weighting_scheme", "timestep_distribution",
         "train.timestep_type train.content_or_style", "", "weighting_scheme"),
        ('write timesteps = "uniform" in [objective]', "", "", "train.linear_timesteps", "flow_use_uniform_schedule", ""),
        ("objective.shift", "discrete_flow_shift", "timestep_shift", "", "flow_schedule_shift", ""),
        ('write shift = "auto" in [objective]', "", "dynamic_timestep_shifting", "", "flow_schedule_auto_shift", ""),
        ("objective.logit_mean", "logit_mean", "noising_bias", "", "", "logit_mean"),
        ("objective.logit_std", "logit_std sigmoid_scale", "", "", "flow_sigmoid_scale", "logit_std"),
        ("write logit_std in [objective]: it is 1 + noising_weight", "", "noising_weight", "", "", ""),
        ("objective.mode_scale", "mode_scale", "", "", "", "mode_scale"),
        (T_RANGE, "min_timestep max_timestep", "", "train.min_denoising_steps train.max_denoising_steps", "", ""),
        ("write t_range = [0.0, 1.0] in [objective]", "", "min_noising_strength max_noising_strength", "", "", ""),
        ("objective.guidance", "guidance_scale", "", "", "flux_guidance_value", "guidance_scale"),
        ("leave it out: objective.guidance = 1.0 is the default", "", "", "train.bypass_guidance_embedding",
         "flux_guidance_mode", ""),
        ("there is none: a step has one pass, without a negative prompt", "", "", "train.do_cfg", "", ""),
        ("leave it out: of Flux the velocity is trained, every time with equal weight",
         "model_prediction_type", "", "", "", ""),
        ("leave it out: Flux reads T5's tokens without a mask", "apply_t5_attn_mask", "", "model.attn_masking",
         "flux_attention_masked_training", ""),
        ("leave it out: the model's own noise schedule is trained", "", "", "train.noise_scheduler", "",
         "num_train_timesteps"),
    ),
    "What a run leaves": (
        ("run.name", "output_name", "save_filename_prefix", "", "", ""),
        ("run.output_dir", "output_dir", "workspace_dir output_model_destination", "training_folder",
         "output_dir", "output_dir"),
        ("export.formats", "save_model_as", "output_model_format", "", "lora_format", ""),
        ("leave it out: adapter files are fp32", "save_precision", "output_dtype", "save_dtype", "", ""),
        ("checkpoint.every_steps", "save_every_n_steps", "backup_after save_every", "save.save_every",
         "checkpoint_step_interval checkpointing_steps", "checkpointing_steps save_steps"),
        ("write every_steps in [checkpoint]: it counts steps", "save_every_n_epochs save_n_epoch_ratio", "", "",
         "checkpoint_epoch_interval", "save_strategy"),
        ("write keep_last in [checkpoint]: it counts checkpoints",
         "save_last_n_epochs save_last_n_epochs_state save_last_n_steps_state", "", "", "", ""),
        ("leave it out: every checkpoint holds the whole state", "save_state save_state_on_train_end", "", "", "", ""),
        ("checkpoint.keep_last", "save_last_n_steps", "rolling_backup_count", "save.max_step_saves_to_keep",
         "checkpoints_total_limit", "checkpoints_total_limit"),
        ("validation.every_steps", "sample_every_n_steps", "sample_after", "sample.sample_every",
         "validation_step_interval validation_steps", "validation_steps"),
        ("write every_steps in [validation]: it counts steps", "sample_every_n_epochs", "", "",
         "validation_epoch_interval", "validation_epochs"),
        ("write every_steps = 0 in [validation]", "", "", "train.disable_sampling", "validation_disable", ""),
        ("leave it out: samples are also drawn before the first step", "sample_at_first", "", "train.skip_first_sample",
         "disable_benchmark", ""),
        ("validation.prompts", "sample_prompts", "", "sample.prompts", "validation_prompt", "validation_prompt"),
        ("write one prompt for each image in [validation], or seeds in [[validation.samples]]", "", "", "", "",
         "num_validation_images"),
        (f"write negative {SAMPLE}", "", "", "sample.neg", "validation_negative_prompt", "negative_prompt"),
        ("validation.samples.0.width", "", "", "sample.width", "", ""),
        ("validation.samples.0.height", "", "", "sample.height", "", ""),
        (f"write guidance {SAMPLE}", "", "", "sample.guidance_scale", "validation_guidance", "cfg_scale cfg"),
        ("validation.resolution", "", "", "", "validation_resolution", ""),
        (f"write strength {SAMPLE}", "", "", "sample.network_multiplier", "", ""),
        ("validation.steps", "", "", "sample.sample_steps", "validation_num_inference_steps", ""),
        ("validation.seed", "", "", "sample.seed", "validation_seed", ""),
        (f"write seed {SAMPLE}", "", "", "sample.walk_seed", "", ""),
        ("leave it out: samples are drawn with the model's own kind of sampler", "sample_sampler", "", "sample.sampler",
         "validation_noise_scheduler", ""),
        ("validation.loss_every_steps", "validate_every_n_steps", "validate_after", "", "eval_steps_interval", "eval_steps"),
        ("write loss_every_steps in [validation]: it counts steps", "validate_every_n_epochs", "", "", "eval_epoch_interval",
         "eval_strategy evaluation_strategy"),
        ("data.held_out", "validation_split", "", "", "", ""),
        ('write kind = "constant" in [ema]', "", "", "ema_config.use_ema", "use_ema", "use_ema"),
        ("ema.decay", "", "ema_decay", "ema_config.ema_decay", "ema_decay", ""),
        ("leave it out: the average follows every update", "", "ema_update_step_interval", "", "ema_update_interval", ""),
        ("logging.tensorboard", "", "tensorboard", "", "", ""),
        ("logging.tensorboard or logging.wandb", "log_with", "", "", "report_to", "report_to"),
        ("leave it out: logs go to run.output_dir", "logging_dir", "", "", "logging_dir", "logging_dir"),
        ("logging.wandb", "", "", "logging.use_wandb", "", ""),
        ("there is none: with logging.wandb the project is that of WANDB_PROJECT", "log_tracker_name", "",
         "logging.project_name", "tracker_project_name", ""),
        ("there is none: with logging.wandb the run's name is run.name", "wandb_run_name", "", "logging.run_name",
         "tracker_run_name", ""),
        ("leave it out: metrics.jsonl has a line for each step", "", "", "logging.log_every", "", "logging_steps"),
        ("export.license", "metadata_license", "", "", "", ""),
        ("leave it out: a file's header is made from the run", "metadata_title metadata_author training_comment no_metadata",
         "", "", "", ""),
        (PUSH, "huggingface_repo_id", "", "push_to_hub", "push_to_hub hub_model_id", "push_to_hub hub_model_id"),
    ),
}  # fmt: skip


def _keys() -> dict[str, str]:
    """By a name of another trainer, and by its last part, what it is here; of one that stands twice, its first place."""
    keys: dict[str, str] = {}
    for rows in NAMES.values():
        for meant, *names in rows:
            for name in " ".join(names).split():
                last = name.rpartition(".")[2]
                for known in (name, *(() if last in TABLED else (last,))):
                    keys.setdefault(known, meant)
    return keys


KEYS = _keys()

# Values of other trainers that a key has nothing for, as `plain` has them, and why.
ABSENT = {
    "adapter.type": dict.fromkeys(["lokr", "loha", "oft", "boft", "ia3", "dylora", "glora", "vera", "full"], OTHER_KIND)
}

VALUES = {
    "float32": "fp32", "float": "fp32", "no": "fp32", "bfloat16": "bf16", "bfloat": "bf16", "float16": "fp16", "half": "fp16",
    "float8_e4m3fn": "fp8_e4m3", "float8_e4m3": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3", "float8": "fp8_e4m3", "fp8": "fp8_e4m3",
    "qfloat8": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "qint8": "int8", "8bit": "int8",
    "uint4": "int4", "qint4": "int4", "4bit": "nf4", "nfloat4": "nf4", "fp4_bnb": "fp4",
    "fp8_quanto": "fp8_e4m3", "int8_quanto": "int8", "int4_quanto": "int4", "int2_quanto": "int2", "int8_torchao": "int8",
    "float_8": "fp8_e4m3", "int_8": "int8", "nfloat_4": "nf4", "float_32": "fp32", "float_16": "fp16", "bfloat_16": "bf16",
    "bnb_adamw8bit": "adamw8bit", "bnb_adamw": "adamw", "bnb_lion8bit": "lion8bit", "bnb_lion": "lion", "adamw_bf16": "adamw",
    "bnb_adamw8bit_paged": "paged_adamw8bit", "min_snr_gamma": "min_snr", "debiased_estimation": "debiased",
    "cosine_with_hard_restarts": "cosine_restarts", "stable_diffusion_xl_10_base": "sdxl", "flux_dev_1": "flux",
    "adam": "adamw", "adam8bit": "adamw8bit", "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit",
    "adamw_torch": "adamw", "pagedadamw8bit": "paged_adamw8bit", "adamwschedulefree": "schedulefree_adamw",
    "adamw_schedulefree": "schedulefree_adamw", "schedule_free_adamw": "schedulefree_adamw",
    "lion_8bit": "lion8bit", "prodigyopt": "prodigy",
    "cosine_with_restarts": "cosine_restarts", "cosine_hard_restarts": "cosine_restarts", "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd", "l2": "mse", "l1": "smooth_l1", "smoothl1": "smooth_l1",
    "logit_normal_dist": "logit_normal", "lognorm": "logit_normal", "v_prediction": "v", "eps": "epsilon",
    "stable_diffusion_xl": "sdxl", "sdxl_base": "sdxl", "flux1": "flux", "flux_dev": "flux", "flux_1": "flux",
    "locon": "lora", "lycoris": "lora", "kohya": "comfyui", "safetensors": "comfyui", "gpu": "cuda", "cuda:0": "cuda",
}  # fmt: skip


def plain(name: str) -> str:
    """As the tables have it: `--Train-Batch-Size` is train_batch_size."""
    return name.strip().lstrip("-").lower().replace("-", "_").replace(" ", "_")


def key_for(name: str) -> str | None:
    """The key, or the sentence, for a name of another trainer, with or without the table it stands in."""
    whole = plain(name)
    return KEYS.get(whole) or KEYS.get(whole.rpartition(".")[2])


def value_for(value: object, known: Collection[str]) -> str | None:
    """One of `known` that another trainer, or another case, calls `value`."""
    if not isinstance(value, str):
        return None
    word = plain(value)
    return next((found for found in (word, VALUES.get(word)) if found in known), None)
