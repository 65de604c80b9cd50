"""Hugging Face's architectures, two small layers each; an empty table where transformers is not installed."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from submodels.gallery.case import Case

_WORDS = {"vocab_size": 99, "pad_token_id": 0}
_BLOCK = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
_ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    **_WORDS,
}
_PATCHES = {"image_size": 16, "patch_size": 8}
_FEW_KEYS = {**_BLOCK, **_WORDS, "num_key_value_heads": 2, "max_position_embeddings": 64}
_SPEECH = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
_SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False}

# Name -> (class of the model, class of its config, sizes, what it takes).
_ARCHITECTURES: dict[str, tuple[str, str, Mapping[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_BLOCK, **_WORDS}, "words"),
    "llama-grouped-queries": ("LlamaForCausalLM", "LlamaConfig", _FEW_KEYS, "words"),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_FEW_KEYS, "sliding_window": 4}, "words"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _FEW_KEYS, "words"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_FEW_KEYS, "head_dim": 8}, "words"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_FEW_KEYS, "head_dim": 8}, "words"),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_BLOCK, **_WORDS}, "words"),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99},
        "words",
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}, "words"),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_BLOCK, **_WORDS}, "words"),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "vocab_size": 99,
        },
        "words",
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99},
        "words",
    ),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99},
        "words",
    ),
    "bert": ("BertForSequenceClassification", "BertConfig", {**_BLOCK, **_WORDS}, "masked words"),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", {**_BLOCK, **_WORDS}, "words"),
    "distilbert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 99},
        "words",
    ),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", {**_BLOCK, **_WORDS, "embedding_size": 16}, "words"),
    "electra": (
        "ElectraForSequenceClassification",
        "ElectraConfig",
        {**_BLOCK, **_WORDS, "embedding_size": 16},
        "words",
    ),
    "deberta-v2": ("DebertaV2ForSequenceClassification", "DebertaV2Config", {**_BLOCK, **_WORDS}, "words"),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99},
        "two texts",
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", _ENCODER_DECODER, "two texts"),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_ENCODER_DECODER,
            "max_source_positions": 20,
            "num_mel_bins": 8,
            "decoder_start_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "mel and words",
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_BLOCK, **_PATCHES}, "small image"),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "hidden_sizes": [16, 32, 48, 64],
            "decoder_hidden_size": 32,
            "num_attention_heads": [2, 4, 6, 8],
            "depths": [1, 1, 1, 1],
        },
        "image",
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
        "image",
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", {**_BLOCK, **_WORDS, **_SPEECH}, "sound"),
}

_INPUTS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "words": lambda: {"input_ids": torch.randint(3, 99, (2, 8))},
    "masked words": lambda: {
        "input_ids": torch.randint(3, 99, (2, 8)),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
    },
    "two texts": lambda: {"input_ids": torch.randint(3, 99, (2, 8)), "decoder_input_ids": torch.randint(3, 99, (2, 6))},
    "mel and words": lambda: {
        "input_features": torch.randn(2, 8, 40),
        "decoder_input_ids": torch.randint(3, 99, (2, 6)),
    },
    "small image": lambda: {"pixel_values": torch.randn(2, 3, 16, 16)},
    "image": lambda: {"pixel_values": torch.randn(2, 3, 64, 64)},
    "sound": lambda: {"input_values": torch.randn(2, 1000)},
}


def _built(model: str, config: str, sizes: Mapping[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = importlib.import_module("transformers")
        return getattr(transformers, model)(getattr(transformers, config)(**sizes))

    return build


def _logits(out: Any) -> Tensor:
    return out.logits


MODELS: dict[str, Case] = {}
if importlib.util.find_spec("transformers") is not None:
    MODELS = {
        name: Case(_built(model, config, sizes), _INPUTS[inputs], {"outputs": _logits})
        for name, (model, config, sizes, inputs) in _ARCHITECTURES.items()
    }
