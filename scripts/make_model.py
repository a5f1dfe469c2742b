"""Write an SDXL, Flux, FLUX.2 [klein], FLUX.3 [klein] or Z-Image checkpoint with random weights: the true architecture, the
same bytes each time.

    python scripts/make_model.py --size tiny --family sdxl --layout diffusers models/tiny-sdxl
    python scripts/make_model.py --size full --family flux --layout single_file models/flux.safetensors

tiny: a few megabytes; the demo and the tests train on it. full: the published sizes (7 to 34 GB), for
proofs that need real bytes and no download. short: the published widths with few blocks (1.5 to 2.1 GB; those with a Qwen3
keep it, 9 GB), for tests of them. Weights are bf16, the VAE's fp32; activations are of order 1. At most a few
hundred megabytes are in memory at any time.

diffusers: OUT is a folder that stock pipelines load; weights beyond 5 GB lie in shards. single_file: OUT is one .safetensors
file under the original names (SDXL: every component, the others: the transformer alone), and the folder of its stem beside it
has configs, scheduler and tokenizers, for these also the text encoders and the VAE.

--sparse leaves the weights out: the files have their headers and sizes, take next to no disk, and every weight is read as
zero. That is enough for plans, and to measure memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

# Neither diffusers nor transformers is imported: they take longer to load than all the work here.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainer.base.errors import UserError  # noqa: E402
from trainer.base.files import appearing, leftovers_of, refuse_taken, remove_leftovers  # noqa: E402
from trainer.base.tensorfile import Recipe, Tensors, serialize, write_tensors  # noqa: E402
from trainer.base.types import Link  # noqa: E402
from trainer.models import FAMILIES  # noqa: E402
from trainer.models.names import join_parts  # noqa: E402
from trainer.models.tokenizers import END, START, byte_alphabet, clip_vocabulary, embedded_merges  # noqa: E402
from workbench.commands.tools import run_tool  # noqa: E402

PUBLISHED = ROOT / "trainer" / "models" / "published"
MERGES = 1000
T5_SENTINELS = 100
SHARD_BYTES = 5 * 10**9  # at most, as transformers and diffusers write them
# A full model's weights are one block of drawn numbers, repeated. A prime: a matrix's rows all begin elsewhere in the block.
BLOCK_NUMBERS = 4_194_301
# By family, its published folders by what --variant calls them; the first if it is not given.
VARIANTS = {
    "sdxl": {"": "sdxl"},
    "flux": {"dev": "flux-dev", "schnell": "flux-schnell", "kontext": "flux-dev"},
    "flux2": {"4b": "flux2-klein-4b", "9b": "flux2-klein-9b", "distilled": "flux2-klein-4b"},
    "flux3": {"base": "flux3-klein-base", "flow_map": "flux3-klein-base"},
    "zimage": {"base": "zimage", "turbo": "zimage-turbo"},
}
INDEXES = ("model_index.json", "modular_model_index.json")
SPACE, LINE = "\u0120", "\u010a"  # as byte-level BPE writes a space and the end of a line
# Qwen3's special tokens, as far as its chat template has them, by id after the vocabulary.
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# A message by Qwen3's template, as far as captions need it: with thinking off it adds an empty think block.
QWEN_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)

# What the tokenizers are trained on: words of captions, the commoner ones first.
CAPTION_WORDS = (ROOT / "scripts" / "caption_words.txt").read_text(encoding="utf-8").split()


# ---------------------------------------------------------------------------------------------------- tokenizers


def train_bpe(words: Sequence[str], count: int) -> list[tuple[str, str]]:
    """Up to `count` merges; a pair's ties go by its text, so the result depends on the words alone."""
    # A word weighs more the earlier it stands, so that the common ones become one token first.
    pieces = {word: [*word[:-1], f"{word[-1]}</w>"] for word in words}
    weights = {word: len(words) - i for i, word in enumerate(pieces)}
    pairs: Counter[tuple[str, str]] = Counter()
    for word, parts in pieces.items():
        for pair in pairwise(parts):
            pairs[pair] += weights[word]
    merges: list[tuple[str, str]] = []
    while pairs and len(merges) < count:
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, parts in pieces.items():
            if best not in pairwise(parts):
                continue
            for pair in pairwise(parts):
                pairs[pair] -= weights[word]
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = ["".join(best)]
                i += 1
            for pair in pairwise(parts):
                pairs[pair] += weights[word]
        pairs = +pairs  # drops the pairs that are gone
    return merges


def clip_tokenizer_files(merges: list[tuple[str, str]], pad_token: str) -> dict[str, str]:
    """File name to text, in the layout of the published CLIP tokenizers."""
    special = {"bos_token": START, "eos_token": END, "pad_token": pad_token, "unk_token": END}
    settings = {**special, "model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    return {
        "merges.txt": "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges),
        "special_tokens_map.json": to_json(special),
        "tokenizer_config.json": to_json(settings),
        "vocab.json": json.dumps(clip_vocabulary(merges), ensure_ascii=False) + "\n",
    }


def t5_vocabulary(words: Sequence[str], merges: list[tuple[str, str]]) -> list[tuple[str, float]]:
    """Unigram pieces with log probabilities, in T5's order: special tokens, words (the commoner first), pieces, sentinels."""
    pieces: dict[str, float] = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -2.0}
    for i, word in enumerate(dict.fromkeys(words)):
        pieces.setdefault(f"▁{word}", round(-4.0 - math.log(i + 1), 4))
    for i, (left, right) in enumerate(merges):
        pieces.setdefault((left + right).removesuffix("</w>"), round(-6.0 - math.log(i + 1), 4))
    for code in range(ord("!"), ord("~") + 1):
        pieces.setdefault(chr(code), -12.0)
    sentinels = {f"<extra_id_{i}>": 0.0 for i in reversed(range(T5_SENTINELS))}
    return list((pieces | sentinels).items())


def t5_tokenizer_files(vocabulary: list[tuple[str, float]], length: int = 512) -> dict[str, str]:
    """File name to text, for up to `length` tokens; the pipeline of steps is the one transformers builds for T5."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2, byte_fallback=False))
    metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    sentinels = [f"<extra_id_{i}>" for i in range(T5_SENTINELS)]
    names = ["<pad>", "</s>", "<unk>", *reversed(sentinels)]  # by id
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    settings = {
        **special,
        "additional_special_tokens": sentinels,
        "extra_ids": T5_SENTINELS,
        "model_max_length": length,
        "tokenizer_class": "T5Tokenizer",
    }
    return {
        "special_tokens_map.json": to_json(special | {"additional_special_tokens": sentinels}),
        "tokenizer.json": to_json(json.loads(tokenizer.to_str())),
        "tokenizer_config.json": to_json(settings),
    }


def qwen_tokenizer_files(merges: list[tuple[str, str]], words: Sequence[str]) -> dict[str, str]:
    """File name to text: byte-level BPE as Qwen3 has it, of merges without their ends of words; a word behind a space, and
    two ends of lines, are one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = dict.fromkeys((left.removesuffix("</w>"), right.removesuffix("</w>")) for left, right in merges)
    alphabet = byte_alphabet()
    known, kept = dict.fromkeys(alphabet), []
    for left, right in pairs:
        if left in known and right in known:
            known[left + right] = None
            kept.append((left, right))
    for left, right in [(SPACE, word) for word in dict.fromkeys(words) if word in known] + [(LINE, LINE)]:
        known[left + right] = None
        kept.append((left, right))
    vocabulary = {token: i for i, token in enumerate(known)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=kept))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in QWEN_SPECIAL])
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    settings = {**special, "model_max_length": 131072, "tokenizer_class": "Qwen2Tokenizer", "chat_template": QWEN_TEMPLATE}
    return {
        "special_tokens_map.json": to_json(special),
        "tokenizer.json": to_json(json.loads(tokenizer.to_str())),
        "tokenizer_config.json": to_json(settings),
    }


# ------------------------------------------------------------------------------------------------------- configs


def published(family: str, path: str) -> dict[str, Any]:
    return json.loads((PUBLISHED / family / path).read_text(encoding="utf-8"))


def clip_config(base: dict[str, Any], vocabulary: int, width: int, layers: int) -> dict[str, Any]:
    # The real end token: with the published files' old value 2, the pooled vector is read at the largest id instead.
    # A dtype: without one transformers takes the file's, diffusers takes fp32, and a stock pipeline mixes the two.
    return base | {
        "bos_token_id": vocabulary - 2,
        "eos_token_id": vocabulary - 1,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": width // 16,
        "num_hidden_layers": layers,
        "pad_token_id": vocabulary - 1,
        "projection_dim": width,
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
    }


def vae_config(base: dict[str, Any]) -> dict[str, Any]:
    return base | {"block_out_channels": [8, 16, 16, 16], "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 64}


def tiny_sdxl(clip_vocabulary: int) -> dict[str, dict[str, Any]]:
    first, second = 32, 64
    return {
        "text_encoder": clip_config(published("sdxl", "text_encoder/config.json"), clip_vocabulary, first, 3),
        "text_encoder_2": clip_config(published("sdxl", "text_encoder_2/config.json"), clip_vocabulary, second, 3)
        | {"pad_token_id": 0},
        "unet": published("sdxl", "unet/config.json")
        | {
            "addition_time_embed_dim": 32,
            "attention_head_dim": [2, 3, 3],  # the number of heads, as in the published config
            "block_out_channels": [32, 48, 48],
            "cross_attention_dim": first + second,
            "norm_num_groups": 8,
            "projection_class_embeddings_input_dim": second + 6 * 32,
            "sample_size": 8,
            "transformer_layers_per_block": [1, 1, 1],
        },
        "vae": vae_config(published("sdxl", "vae/config.json")),
    }


def tiny_flux(variant: str, clip_vocabulary: int, t5_vocabulary: int) -> dict[str, dict[str, Any]]:
    clip, t5 = 32, 64
    return {
        "text_encoder": clip_config(published(variant, "text_encoder/config.json"), clip_vocabulary, clip, 2),
        "text_encoder_2": published(variant, "text_encoder_2/config.json")
        | {
            "d_ff": 2 * t5,
            "d_kv": 16,
            "d_model": t5,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "num_layers": 2,
            "torch_dtype": "float32",
            "vocab_size": -(-t5_vocabulary // 64) * 64,  # as the published one, larger than the tokenizer
        },
        "transformer": published(variant, "transformer/config.json")
        | {
            "attention_head_dim": 16,
            "axes_dims_rope": [4, 6, 6],
            "joint_attention_dim": t5,
            "num_attention_heads": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "pooled_projection_dim": clip,
        },
        "vae": vae_config(published(variant, "vae/config.json")),
    }


def tiny_flux2(variant: str) -> dict[str, dict[str, Any]]:
    width, layers = 32, 28  # one layer more than is read
    return {
        "text_encoder": published(variant, "text_encoder/config.json")
        | {
            "bos_token_id": None,
            "eos_token_id": None,
            "head_dim": 16,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_attention_heads": 2,
            "num_hidden_layers": layers,
            "num_key_value_heads": 1,
            "torch_dtype": "float32",
            "vocab_size": 2048,  # as the published one, larger than the tokenizer
        },
        "transformer": published(variant, "transformer/config.json")
        | {
            "attention_head_dim": 16,
            "axes_dims_rope": [4, 4, 4, 4],
            "in_channels": 16,
            "joint_attention_dim": 3 * width,
            "num_attention_heads": 4,
            "num_layers": 2,
            "num_single_layers": 2,
        },
        "vae": vae_config(published(variant, "vae/config.json")) | {"latent_channels": 4},
    }


def tiny_flux3(variant: str) -> dict[str, dict[str, Any]]:
    whole, small = published(variant, "text_encoder/config.json"), tiny_flux2("flux2-klein-4b")
    own = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    text = whole["text_config"] | {key: small["text_encoder"][key] for key in own}
    turns = text["rope_parameters"] | {"mrope_section": [4, 2, 2]}
    sees = {"deepstack_visual_indexes": [0], "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2,
            "num_position_embeddings": 16, "out_hidden_size": text["hidden_size"]}  # fmt: skip
    return {
        "text_encoder": whole
        | {
            "dtype": "float32",
            "text_config": text
            | {"bos_token_id": None, "eos_token_id": None, "dtype": "float32", "head_dim": 16, "rope_parameters": turns},
            "vision_config": whole["vision_config"] | sees,
        },
        "transformer": published(variant, "transformer/config.json")
        | {
            "attention_head_dim": 16,
            "axes_dims_rope": [4, 4, 4, 4],
            "cond_in_channels": 16,
            "in_channels": 16,
            "joint_attention_dim": 8 * text["hidden_size"],
            "num_attention_heads": 4,
            "num_layers": 1,
            "num_single_layers": 2,
        },
        "vae": small["vae"],
    }


def tiny_zimage(variant: str) -> dict[str, dict[str, Any]]:
    text_encoder = tiny_flux2("flux2-klein-4b")["text_encoder"]
    width = text_encoder["hidden_size"]
    return {
        "text_encoder": text_encoder | {"num_hidden_layers": 36},  # as published: read before the last
        "transformer": published(variant, "transformer/config.json")
        | {
            "axes_dims": [4, 6, 6],
            "cap_feat_dim": width,
            "dim": 96,
            "n_heads": 6,
            "n_kv_heads": 6,
            "n_layers": 2,
            "n_refiner_layers": 1,
        },
        "vae": vae_config(published(variant, "vae/config.json")),
    }


def index_of(variant: str) -> dict[str, Any]:
    """The pipeline's index."""
    return next(published(variant, name) for name in INDEXES if (PUBLISHED / variant / name).is_file())


def class_of(part: Sequence[Any]) -> str:
    """The class that an index names for a part of the pipeline; a modular one says where the part is, too."""
    return part[-1]["type_hint"][1] if isinstance(part[-1], dict) else part[1]


def full_configs(variant: str) -> dict[str, dict[str, Any]]:
    """The published configs as they are."""
    parts = index_of(variant).items()
    names = [
        name for name, kind in parts if isinstance(kind, list) and (PUBLISHED / variant / name / "config.json").is_file()
    ]
    return {name: published(variant, f"{name}/config.json") for name in names}


# The published widths; one block of each kind, and what is read at a text encoder's last layer but one.
FEWER_BLOCKS: dict[str, dict[str, Any]] = {
    "text_encoder": {"num_hidden_layers": 2},  # of CLIP
    "text_encoder_2": {"num_hidden_layers": 2, "num_layers": 1, "num_decoder_layers": 1},
    "transformer": {"num_layers": 1, "num_single_layers": 1, "n_layers": 1, "n_refiner_layers": 1},
    "unet": {"layers_per_block": 1, "transformer_layers_per_block": [1, 1, 1]},
    "vae": {"layers_per_block": 1},
}


def is_qwen(config: Mapping[str, Any]) -> bool:
    """Whether it is a Qwen3's, of which the text is read after 27 to 35 of its layers, so that none can be left out."""
    return str(config.get("model_type")).startswith("qwen3")


def short_configs(variant: str) -> dict[str, dict[str, Any]]:
    return {
        name: config | {key: value for key, value in FEWER_BLOCKS[name].items() if key in config and not is_qwen(config)}
        for name, config in full_configs(variant).items()
    }


# ------------------------------------------------------------------------------------------------------- weights

# Standard deviations: of the weight itself for tables, elsewhere a gain on 1 / sqrt(fan in). The first match counts.
# Layers that close a residual branch are damped, T5's queries make up for its missing 1 / sqrt(head width).
TABLE_STD = (
    ("*embed_tokens.*", 1.0),
    ("lm_head.*", 0.1),
    ("*token_embedding.*", 0.5),
    ("*position_embedding.*", 0.1),
    ("shared.*", 1.0),
    ("*relative_attention*", 0.3),
)
GAINS = (
    ("*SelfAttention.q.*", 0.25),
    *(
        (pattern, 0.5)
        for pattern in (
            "*conv2.*",
            "*out.0.*",
            "*.out_proj.*",
            "*fc2.*",
            "*net.2.*",
            "*.wo.*",
            "*.o.*",
            "*.o_proj.*",
            "*.down_proj.*",
            "*.linear_out.*",
            "*.linear_fc2.*",
            "*attn.to_out.weight",
            "*feed_forward.w2.*",
            "*to_add_out.*",
        )
    ),
)


Draw = Callable[[str, tuple[int, ...]], torch.Tensor]
Write = Callable[[Path, Tensors, Mapping[str, str] | None], object]


def own_stream(seed: int) -> Draw:
    """Normal fp32 numbers by a tensor's full name: every tensor has its own stream, so none depends on another."""

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(_number(f"{seed}/{name}")))

    return draw


def repeated_block(seed: int) -> Draw:
    """Normal fp32 numbers, at most BLOCK_NUMBERS of them, out of one block that is drawn once; each tensor starts elsewhere.

    A larger tensor is these numbers repeated (`tiled`): what is done to the numbers is done once for the block.
    """
    block = torch.randn(BLOCK_NUMBERS, generator=torch.Generator().manual_seed(seed)).repeat(2)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        start, count = _number(f"{seed}/{name}") % BLOCK_NUMBERS, math.prod(shape)
        piece = block[start : start + min(count, BLOCK_NUMBERS)]
        return piece.view(shape) if count <= BLOCK_NUMBERS else piece

    return draw


def tiled(numbers: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`numbers` as they are where they have that shape, else repeated to it."""
    if tuple(numbers.shape) == shape:
        return numbers
    count = math.prod(shape)
    return numbers.repeat(-(-count // len(numbers)))[:count].view(shape)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def random_weights(component: str, class_name: str, config: Mapping[str, Any], draw: Draw) -> dict[str, Recipe]:
    """Weights whose activations are of order 1, made as they are written: fp32 for a VAE, bf16 for all else."""
    vae = class_name in ("AutoencoderKL", "AutoencoderKLFlux2")
    dtype = torch.float32 if vae else torch.bfloat16

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = _scaled(name, shape, draw(f"{component}/{name}", shape))
        if not vae:
            return tiled(drawn.to(dtype), shape)
        return _latents_scaled(name, tiled(drawn, shape), config)

    tables = {c.class_name: c.names for family in FAMILIES.values() for c in family.components if c.names}
    by_hand = {"CLIPTextModel": clip_shapes, "T5EncoderModel": t5_shapes, "Qwen3ForCausalLM": qwen_shapes,
               "Qwen3VLForConditionalGeneration": qwen_vl_shapes}  # fmt: skip
    shapes = tables[class_name](config).shapes if class_name in tables else by_hand[class_name](config)
    recipes = {name: Recipe(dtype, shape, partial(make, name, shape)) for name, shape in shapes.items()}
    if "bn.running_mean" in recipes:  # as the published files have it
        recipes["bn.num_batches_tracked"] = Recipe(torch.int64, (), lambda: torch.zeros((), dtype=torch.int64))
    return recipes


def clip_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of CLIPTextModel: the program asks the module itself, which takes long to import."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    layer = {f"self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")}
    layer |= {"layer_norm1": (width,), "mlp.fc1": (hidden, width), "mlp.fc2": (width, hidden), "layer_norm2": (width,)}
    layers = {
        f"encoder.layers.{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in layer.items()
    }
    shapes = {
        "embeddings.token_embedding.weight": (config["vocab_size"], width),
        "embeddings.position_embedding.weight": (config["max_position_embeddings"], width),
    }
    for name, shape in (layers | {"final_layer_norm": (width,)}).items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def inner(weights: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """CLIPTextModel's as the published files name them: with its inner `text_model.`."""
    return {f"text_model.{name}": recipe for name, recipe in weights.items()}


def t5_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of T5EncoderModel, gated: the program asks the module itself here, too."""
    width, inner, hidden = config["d_model"], config["num_heads"] * config["d_kv"], config["d_ff"]
    layer = {f"0.SelfAttention.{name}": (inner, width) for name in "qkv"} | {"0.SelfAttention.o": (width, inner)}
    layer |= {f"1.DenseReluDense.{name}": (hidden, width) for name in ("wi_0", "wi_1")}
    layer |= {"1.DenseReluDense.wo": (width, hidden), "0.layer_norm": (width,), "1.layer_norm": (width,)}
    blocks = [f"encoder.block.{i}.layer" for i in range(config["num_layers"])]
    shapes = {f"{block}.{name}.weight": shape for block in blocks for name, shape in layer.items()}
    bias = (config["relative_attention_num_buckets"], config["num_heads"])
    return shapes | {
        "shared.weight": (config["vocab_size"], width),
        f"{blocks[0]}.0.SelfAttention.relative_attention_bias.weight": bias,
        "encoder.final_layer_norm.weight": (width,),
    }


def qwen_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of Qwen3ForCausalLM, as the published files name them."""
    width, hidden, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    inner, kept = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {"self_attn.q_proj": (inner, width), "self_attn.k_proj": (kept, width), "self_attn.v_proj": (kept, width)}
    layer |= {"self_attn.o_proj": (width, inner), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    layer |= {"mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden)}
    layer |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    layers = {
        f"model.layers.{i}.{name}.weight": shape for i in range(config["num_hidden_layers"]) for name, shape in layer.items()
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), **layers, "model.norm.weight": (width,)}
    return shapes | ({} if config["tie_word_embeddings"] else {"lm_head.weight": (config["vocab_size"], width)})


def qwen_vl_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of Qwen3VLForConditionalGeneration: the language model, and what sees images."""
    text, sees = qwen_shapes(config["text_config"]), config["vision_config"]
    width, hidden, merged = sees["hidden_size"], sees["intermediate_size"], sees["spatial_merge_size"] ** 2
    block = {"attn.qkv": (3 * width, width), "attn.proj": (width, width), "mlp.linear_fc1": (hidden, width)}
    block |= {"mlp.linear_fc2": (width, hidden), "norm1": (width,), "norm2": (width,)}
    layers = {f"blocks.{i}.{name}": shape for i in range(sees["depth"]) for name, shape in block.items()}
    patch = (sees["temporal_patch_size"], sees["patch_size"], sees["patch_size"])
    layers["patch_embed.proj"] = (width, sees["in_channels"], *patch)
    inner = merged * width
    mergers = {"merger": width} | {f"deepstack_merger_list.{i}": inner for i in range(len(sees["deepstack_visual_indexes"]))}
    for merger, normed in mergers.items():
        layers |= {f"{merger}.norm": (normed,), f"{merger}.linear_fc1": (inner, inner)}
        layers |= {f"{merger}.linear_fc2": (sees["out_hidden_size"], inner)}
    shapes = {name.replace("model.", "model.language_model.", 1): shape for name, shape in text.items()}
    shapes["model.visual.pos_embed.weight"] = (sees["num_position_embeddings"], width)
    for name, shape in layers.items():
        shapes |= {f"model.visual.{name}.weight": shape, f"model.visual.{name}.bias": shape[:1]}
    return shapes


def _scaled(name: str, shape: tuple[int, ...], noise: torch.Tensor) -> torch.Tensor:
    """`noise`, which is a tensor of that name and shape or a part of one, with the mean and the deviation that it has."""
    table = next((std for pattern, std in TABLE_STD if fnmatchcase(name, pattern)), None)
    if table is not None:
        return noise * table
    if name.endswith(".bias"):
        return noise * 0.02
    if len(shape) == 1:
        return 1 + 0.1 * noise
    gain = next((gain for pattern, gain in GAINS if fnmatchcase(name, pattern)), 1.0)
    return noise * gain / math.sqrt(math.prod(shape[1:]))


def _latents_scaled(name: str, weight: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Latents as wide and as far from 0 as the scaling and shift factors say, and nearly certain ones. Statistics of latents,
    where the VAE has these instead, are those of latents as they are."""
    if name == "bn.running_mean":
        return weight * 0.1
    if name == "bn.running_var":
        return weight.abs() + 0.5
    last = "quant_conv" if config.get("use_quant_conv", True) else "encoder.conv_out"
    first = "post_quant_conv" if config.get("use_post_quant_conv", True) else "decoder.conv_in"
    mean = slice(0, config["latent_channels"])
    log_variance = slice(config["latent_channels"], None)
    if name == f"{last}.weight":
        weight[mean] /= config.get("scaling_factor", 1.0)
        weight[log_variance] *= 0.1
    elif name == f"{last}.bias":
        weight[mean] += config.get("shift_factor") or 0.0
        weight[log_variance] -= 6.0
    elif name == f"{first}.weight":
        weight *= config.get("scaling_factor", 1.0)
    return weight


# --------------------------------------------------------------------------------------------------------- files


def to_json(tree: Any) -> str:
    return json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_texts(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def original_tensors(links: list[Link], prefix: str, weights: Mapping[str, Recipe]) -> dict[str, Recipe]:
    def make(link: Link) -> torch.Tensor:
        return join_parts(link, [weights[part].make() for part in link.parts])

    tensors = {}
    for link in links:
        parts = [weights[part] for part in link.parts]
        joined = join_parts(link, [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts])
        tensors[prefix + link.original] = Recipe(joined.dtype, tuple(joined.shape), partial(make, link))
    return tensors


def sdxl_single_file(
    configs: Mapping[str, Mapping[str, Any]], weights: Mapping[str, Mapping[str, Recipe]], prediction: str
) -> dict[str, torch.Tensor | Recipe]:
    """Every component under its original names, with the tensors beside the weights that real files have."""
    tensors: dict[str, torch.Tensor | Recipe] = {}
    for component in FAMILIES["sdxl"].components:
        name, prefix = component.name, component.prefixes[0]
        if component.names is None:
            tensors |= {f"{prefix}{own}": recipe for own, recipe in inner(weights[name]).items()}
        else:
            tensors |= original_tensors(component.names(configs[name]).links, prefix, weights[name])
    embedders = "conditioner.embedders"
    tensors[f"{embedders}.0.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    tensors[f"{embedders}.1.model.logit_scale"] = torch.tensor(math.log(100.0))
    if prediction == "v":
        tensors |= {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    return tensors


def file_name(component: str) -> str:
    text = component.startswith("text_encoder")
    return f"{component}/{'model' if text else 'diffusion_pytorch_model'}.safetensors"


def write_sparse(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file without contents: its header is true, of its data nothing is made, and it takes next to no disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(next(serialize(tensors, metadata)))
        file.truncate(file.tell() + sum(map(size_of, tensors.values())))


def write_component(folder: Path, component: str, class_name: str, weights: Mapping[str, Recipe], write: Write) -> None:
    """In the names of the published folders."""
    weights = inner(weights) if class_name == "CLIPTextModel" else weights
    path = folder / file_name(component)
    shards: list[dict[str, Recipe]] = [{}]
    room = SHARD_BYTES
    for name, recipe in weights.items():
        if size_of(recipe) > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = recipe
        room -= size_of(recipe)
    names = [f"{path.stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [path.name]
    else:
        where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(map(size_of, weights.values()))
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_texts(path.parent, {f"{path.name}.index.json": to_json(index)})
    for file, shard in zip(names, shards, strict=True):
        write(path.parent / file, shard, {"format": "pt"})  # transformers insists on the format


def size_of(tensor: torch.Tensor | Recipe) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def check_space(folder: Path, needed: int) -> None:
    """Raises UserError where the disk under `folder` has no room for that many bytes."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"{folder} needs {needed / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB free; make room, or give an OUT "
            "on another disk"
        )


def make(
    size: str, family: str, layout: str, out: Path, seed: int, prediction: str, variant: str | None, sparse: bool = False
) -> None:
    """Write the checkpoint. Raises UserError for choices that do not go together, where `out` exists or finds no room."""
    kinds = VARIANTS[family]
    if variant is not None and variant not in kinds:
        raise UserError(f"--variant {variant} is none of {family}; it has {' and '.join(filter(None, kinds)) or 'none'}")
    if prediction == "v" and family != "sdxl":
        raise UserError("--prediction v is a variant of SDXL; the others predict a velocity of their own")
    single = layout == "single_file"
    if single and out.suffix != ".safetensors":
        raise UserError(f"OUT = {str(out)!r} must end in .safetensors with --layout single_file")
    folder = out.with_suffix("") if single else out
    for path in {folder, out}:
        refuse_taken(path)

    kind, variant = variant, kinds[variant or next(iter(kinds))]
    own_merges = train_bpe(CAPTION_WORDS, MERGES)
    merges = own_merges if size == "tiny" else list(embedded_merges())
    t5 = t5_vocabulary(CAPTION_WORDS, own_merges)
    tokenizers = {
        "tokenizer": qwen_tokenizer_files(own_merges, CAPTION_WORDS)
        if family in ("flux2", "flux3", "zimage")
        else clip_tokenizer_files(merges, END)
    }
    if family == "sdxl":
        tokenizers["tokenizer_2"] = clip_tokenizer_files(merges, "!")
    elif family == "flux":
        tokenizers["tokenizer_2"] = t5_tokenizer_files(t5)
    if size == "tiny":
        clip_size = len(clip_vocabulary(merges))
        tiny = {"sdxl": partial(tiny_sdxl, clip_size), "flux": partial(tiny_flux, variant, clip_size, len(t5)),
                "flux2": partial(tiny_flux2, variant), "flux3": partial(tiny_flux3, variant),
                "zimage": partial(tiny_zimage, variant)}  # fmt: skip
        configs = tiny[family]()
    else:
        configs = full_configs(variant) if size == "full" else short_configs(variant)
    kinds = {"distilled": {"is_distilled": True}, "kontext": {"_class_name": FAMILIES["flux"].variants.editing_pipeline}}
    if kind == "flow_map":
        configs["transformer"] |= {"flow_map": True}
    index_name, whole = next(name for name in INDEXES if (PUBLISHED / variant / name).is_file()), index_of(variant)
    index, schedule = whole | kinds.get(kind or "", {}), "scheduler/scheduler_config.json"
    scheduler = published(variant, schedule) if (PUBLISHED / variant / schedule).is_file() else {}
    # A single file says this by its marker tensors, as the ones in the wild do, not by a scheduler config.
    if prediction == "v" and not single:
        scheduler |= {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}

    draw = own_stream(seed) if size == "tiny" else repeated_block(seed)
    weights = {name: random_weights(name, class_of(index[name]), config, draw) for name, config in configs.items()}
    write: Write = write_sparse if sparse else write_tensors
    if not sparse:
        check_space(out, sum(size_of(recipe) for component in weights.values() for recipe in component.values()))

    texts = {index_name: to_json(index)} | ({schedule: to_json(scheduler)} if scheduler else {})
    texts |= {f"{component}/config.json": to_json(config) for component, config in configs.items()}
    texts |= {f"{name}/{file}": text for name, files in tokenizers.items() for file, text in files.items()}
    in_folder = set(configs) - ((set(configs) if family == "sdxl" else {"transformer"}) if single else set())

    # Under another name until it is whole: what stands at OUT is always complete.
    remove_leftovers(leftovers_of(folder))
    with appearing(folder) as temporary:
        write_texts(temporary, texts)
        for component in sorted(in_folder):
            write_component(temporary, component, class_of(index[component]), weights[component], write)
    if single and family == "sdxl":
        write(out, sdxl_single_file(configs, weights, prediction))
    elif single:
        links = FAMILIES[family].module_links("transformer", configs["transformer"])
        write(out, original_tensors(links, "", weights["transformer"]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--size", choices=("tiny", "short", "full"), required=True)
    parser.add_argument("--family", choices=tuple(VARIANTS), required=True)
    parser.add_argument("--layout", choices=("diffusers", "single_file"), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prediction", choices=("epsilon", "v"), default="epsilon", help="SDXL's objective")
    variants = list(dict.fromkeys(name for kinds in VARIANTS.values() for name in kinds if name))
    parser.add_argument(
        "--variant",
        choices=variants,
        help="flux: dev, schnell, kontext; flux2: 4b, 9b, distilled; flux3: base, flow_map (distilled); zimage: base, turbo",
    )
    parser.add_argument("--sparse", action="store_true", help="headers alone: every weight is read as zero")
    asked = parser.parse_args(arguments)
    wanted = asked.size, asked.family, asked.layout, asked.out, asked.seed, asked.prediction, asked.variant, asked.sparse
    return run_tool(lambda: make(*wanted))


if __name__ == "__main__":
    sys.exit(main())
