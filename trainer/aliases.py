"""What people type who come from other trainers, and what it is here.

KEYS has the names of options and config keys of sd-scripts, OneTrainer, ai-toolkit, SimpleTuner and diffusers' scripts;
VALUES how they spell what a key may be. Both in lower case, with underscores.
"""

from collections.abc import Collection

# A key of ours, or a sentence (it has blanks) where that is not all.
KEYS = {
    # model
    "pretrained_model_name_or_path": "model.path", "name_or_path": "model.path", "base_model_name": "model.path",
    "pretrained_model": "model.path", "model_name": "model.path", "checkpoint_path": "model.path",
    "base_model": "model.path", "model_type": "model.family", "arch": "model.family", "vae": "model.components.vae.path",
    "vae_path": "model.components.vae.path", "pretrained_vae_model_name_or_path": "model.components.vae.path",
    "is_flux": 'write family = "flux" in [model]', "is_xl": 'write family = "sdxl" in [model]',
    "sdxl": 'write family = "sdxl" in [model]', "v_parameterization": 'write prediction = "v" in [model]',
    "prediction_type": "model.prediction", "zero_terminal_snr": "model.zero_terminal_snr",
    "rescale_betas_zero_snr": "model.zero_terminal_snr", "fp8_base": 'write dtype = "fp8_e4m3" in [model.components.unet] '
    "(of Flux: transformer)",
    "quantize": 'write a dtype, for example "fp8_e4m3", in [model.components.unet] (of Flux: transformer)',
    "weight_dtype": 'write a dtype, for example "fp8_e4m3", in [model.components.unet] (of Flux: transformer)',
    "base_model_precision": 'write a dtype, for example "fp8_e4m3", in [model.components.unet] (of Flux: transformer)',
    "mixed_precision": "precision.compute", "train_dtype": "precision.compute",
    "full_bf16": "leave it out: an adapter is trained in fp32, whatever precision.compute is",
    "full_fp16": "leave it out: an adapter is trained in fp32, whatever precision.compute is",
    # adapter
    "network_dim": "adapter.rank", "network_rank": "adapter.rank", "lora_rank": "adapter.rank", "lora_r": "adapter.rank",
    "lora_dim": "adapter.rank", "linear": "adapter.rank", "dim": "adapter.rank", "r": "adapter.rank",
    "network_alpha": "adapter.alpha", "lora_alpha": "adapter.alpha", "linear_alpha": "adapter.alpha",
    "use_dora": 'write type = "dora" in [adapter]', "dora_wd": 'write type = "dora" in [adapter]',
    "lora_decompose": 'write type = "dora" in [adapter]', "weight_decompose": 'write type = "dora" in [adapter]',
    "network_type": "adapter.type", "lora_type": "adapter.type", "peft_type": "adapter.type",
    "network_module": 'leave it out; write type = "lora" or type = "dora" in [adapter]',
    "target_modules": "adapter.targets", "lora_layers": "adapter.targets", "flux_lora_target": "adapter.targets",
    "layer_filter": "adapter.targets", "network_dropout": "adapter.dropout", "lora_dropout": "adapter.dropout",
    "use_rslora": "adapter.rslora", "scale_weight_norms": "adapter.max_norm", "network_weights": "adapter.init_from",
    "init_lora": "adapter.init_from", "lora_model_name": "adapter.init_from",
    "network_train_unet_only": "leave it out: text encoders are trained only where a rule in [[adapter.rules]] names one",
    "train_text_encoder": 'add a rule: [[adapter.rules]] with component = "text_encoder" and match = "*"',
    # optimizer and schedule
    "learning_rate": "optimizer.lr", "unet_lr": "optimizer.lr", "lr": "optimizer.lr",
    "text_encoder_learning_rate": "optimizer.text_encoder_lr", "optimizer_type": "optimizer.name",
    "optim": "optimizer.name", "use_8bit_adam": 'write name = "adamw8bit" in [optimizer]',
    "optimizer_args": "optimizer.options", "adam_weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps", "adam_beta1": "write betas = [0.9, 0.999] in [optimizer]",
    "adam_beta2": "write betas = [0.9, 0.999] in [optimizer]", "loraplus_lr_ratio": "optimizer.lora_plus",
    "lr_scheduler": "schedule.name", "learning_rate_scheduler": "schedule.name", "scheduler": "schedule.name",
    "lr_warmup_steps": "schedule.warmup", "learning_rate_warmup_steps": "schedule.warmup", "warmup_steps": "schedule.warmup",
    "lr_scheduler_num_cycles": "schedule.cycles", "lr_num_cycles": "schedule.cycles", "lr_scheduler_power": "schedule.power",
    "lr_power": "schedule.power",
    # steps
    "max_train_steps": "run.max_steps", "steps": "run.max_steps", "num_steps": "run.max_steps",
    "max_train_epochs": "run.epochs", "num_train_epochs": "run.epochs", "num_epochs": "run.epochs",
    "train_batch_size": "data.batch_size", "per_device_train_batch_size": "data.batch_size",
    "gradient_accumulation_steps": "step.accumulation", "gradient_accumulation": "step.accumulation",
    "clip_grad_norm": "step.max_grad_norm", "gradient_clipping": "step.max_grad_norm",
    "gradient_checkpointing_interval": "memory.gradient_checkpointing", "random_seed": "run.seed",
    # data
    "train_data_dir": "data.sources.0.path", "instance_data_dir": "data.sources.0.path", "image_dir": "data.sources.0.path",
    "folder_path": "data.sources.0.path", "dataset_path": "data.sources.0.path", "instance_data_root": "data.sources.0.path",
    "data_dir": "data.sources.0.path", "num_repeats": "data.sources.0.repeats", "class_data_dir": "add a second "
    "[[data.sources]] with regularisation = true", "reg_data_dir": "add a second [[data.sources]] with regularisation = true",
    "instance_prompt": 'write captions = "folder" in [[data.sources]] and name the folder so, or put captions beside photos',
    "trigger_word": "data.sources.0.trigger", "class_tokens": "data.sources.0.trigger",
    "shuffle_caption": "data.sources.0.shuffle", "shuffle_tokens": "data.sources.0.shuffle",
    "keep_tokens": "data.sources.0.keep", "caption_separator": "data.sources.0.separator",
    "caption_prefix": "data.sources.0.prefix", "caption_suffix": "data.sources.0.suffix",
    "caption_tag_dropout_rate": "data.sources.0.tag_dropout", "caption_dropout_rate": "data.caption_dropout",
    "caption_extension": "leave it out: .txt and .caption files beside a photo are both read",
    "caption_ext": "leave it out: .txt and .caption files beside a photo are both read",
    "flip_aug": "data.flip", "random_flip": "data.flip", "flip_x": "data.flip", "color_aug": "data.colour_jitter",
    "random_crop": "data.crop_jitter", "max_token_length": "data.clip_chunks", "tokenizer_max_length": "data.text_length",
    "t5xxl_max_token_length": "data.text_length", "max_sequence_length": "data.text_length",
    "enable_bucket": "leave it out: photos always go to buckets of their shape", "aspect_ratio_bucketing": "leave it out: "
    "photos always go to buckets of their shape", "bucket_reso_steps": "data.bucket_step",
    "bucket_no_upscale": "leave it out: photos are enlarged only where data.enlarge = true",
    "cache_latents": "data.cache", "cache_latents_to_disk": "data.cache", "latent_caching": "data.cache",
    "cache_text_encoder_outputs": "data.cache_text", "masked_loss": "data.masks", "masked_training": "data.masks",
    "prior_loss_weight": "data.sources.1.loss_weight", "max_data_loader_n_workers": "data.num_workers",
    "dataloader_num_workers": "data.num_workers",
    # objective
    "snr_gamma": "objective.min_snr_gamma", "loss_type": "objective.loss", "loss_fn": "objective.loss",
    "debiased_estimation_loss": 'write weighting = "debiased" in [objective]', "noise_offset": "objective.noise_offset",
    "offset_noise_weight": "objective.noise_offset", "ip_noise_gamma": "objective.input_perturbation",
    "multires_noise_discount": "objective.multires_noise_discount", "timestep_sampling": "objective.timesteps",
    "timestep_type": "objective.timesteps", "weighting_scheme": "objective.timesteps",
    "timestep_distribution": "objective.timesteps", "discrete_flow_shift": "objective.shift",
    "flow_schedule_shift": "objective.shift", "timestep_shift": "objective.shift", "guidance_scale": "objective.guidance",
    "flux_guidance_value": "objective.guidance", "min_timestep": "write t_range = [0.0, 1.0] in [objective], shares of 1000",
    "max_timestep": "write t_range = [0.0, 1.0] in [objective], shares of 1000",
    # what a run leaves
    "output_name": "run.name", "save_model_as": "export.formats", "save_every_n_steps": "checkpoint.every_steps",
    "save_every": "checkpoint.every_steps", "checkpointing_steps": "checkpoint.every_steps", "save_steps":
    "checkpoint.every_steps", "save_every_n_epochs": "write every_steps in [checkpoint]: it counts steps",
    "save_state": "leave it out: every checkpoint "
    "holds the whole state", "checkpoints_total_limit": "checkpoint.keep_last", "max_step_saves_to_keep":
    "checkpoint.keep_last", "save_last_n_steps": "checkpoint.keep_last", "sample_every_n_steps": "validation.every_steps",
    "sample_every": "validation.every_steps", "validation_steps": "validation.every_steps",
    "sample_prompts": "validation.prompts", "validation_prompt": "validation.prompts",
    "num_validation_images": "validation.prompts", "eval_steps": "validation.loss_every_steps",
    "use_ema": 'write kind = "constant" in [ema]', "ema_decay": "ema.decay", "report_to": "logging.tensorboard",
    "log_with": "logging.tensorboard", "logging_dir": "leave it out: logs go to run.output_dir",
    # memory: what is always so
    "xformers": "leave it out: attention is torch's own", "sdpa": "leave it out: attention is torch's own",
    "lowram": "memory.fit", "lowvram": "memory.fit", "low_vram": "memory.fit", "blocks_to_swap": "memory.fit",
}  # fmt: skip

VALUES = {
    "float32": "fp32", "float": "fp32", "no": "fp32", "bfloat16": "bf16", "bfloat": "bf16", "float16": "fp16", "half": "fp16",
    "float8_e4m3fn": "fp8_e4m3", "float8_e4m3": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3", "float8": "fp8_e4m3", "fp8": "fp8_e4m3",
    "qfloat8": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "qint8": "int8", "int8_quanto": "int8", "8bit": "int8",
    "uint4": "int4", "qint4": "int4", "4bit": "nf4", "nfloat4": "nf4", "fp4_bnb": "fp4",
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
    """The key, or the sentence, for a name of another trainer."""
    return KEYS.get(plain(name))


def value_for(value: object, known: Collection[str]) -> str | None:
    """One of `known` that another trainer, or another case, calls `value`."""
    if not isinstance(value, str):
        return None
    word = plain(value)
    return next((found for found in (word, VALUES.get(word)) if found in known), None)
