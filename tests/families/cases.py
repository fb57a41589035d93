"""Tiny random models of every family, made by transformers; see make_references.py."""

LLAMA = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 61, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4, "bos_token_id": 60,
    "eos_token_id": 60,
}  # fmt: skip
OPT = {
    "vocab_size": 61, "hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.125, 1.25],
    "long_factor": [1.0, 2.0, 4.0],
    "original_max_position_embeddings": 32,
}

BART = {
    "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 32,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
MARIAN = {**BART, "pad_token_id": 60, "eos_token_id": 0, "bos_token_id": None, "decoder_start_token_id": 60}
BLENDERBOT = {**BART, "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1}
T5 = {
    "vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
}  # fmt: skip

BERT = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip
ROBERTA = {**BERT, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
MPNET = {**BERT, "pad_token_id": 1, "layer_norm_eps": 1e-5}
DISTILBERT = {"vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "max_position_embeddings": 32}
MODERNBERT = {
    **BERT, "num_hidden_layers": 4, "local_attention": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
DEBERTA = {
    **BERT, "type_vocab_size": 0, "relative_attention": True, "max_relative_positions": 8, "position_buckets": 4,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False,
    "legacy": False,
}  # fmt: skip

GEMMA = {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 6, "sliding_window": 4}

T5GEMMA = {**GEMMA, "bos_token_id": 2, "eos_token_id": 1}

DINOV2 = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2, "image_size": 12,
    "patch_size": 4,
}  # fmt: skip
WHISPER = {
    "vocab_size": 61, "num_mel_bins": 6, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 44, "decoder_ffn_dim": 44,
    "max_source_positions": 7, "max_target_positions": 16, "pad_token_id": 50, "bos_token_id": 50, "eos_token_id": 50,
    "decoder_start_token_id": 51, "begin_suppress_tokens": [3, 50],
}  # fmt: skip

VIT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 12,
    "patch_size": 4,
}  # fmt: skip

CLIP_TEXT = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 10, "bos_token_id": 59, "eos_token_id": 60,
}  # fmt: skip
CLIP_IMAGE = {**VIT, "num_attention_heads": 3}

NEOX = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
QWEN3_MOE = {**LLAMA, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FALCON = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
BLOOM = {"vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 4, "pad_token_id": 3}

FULL = ["full_attention", "full_attention"]
STABLELM = {**LLAMA, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}

# name: (family, head, values of the configuration)
_CASES = {
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "gpt2_untied_relu": ("GPT2", "LMHeadModel", {**GPT2, "n_inner": 30, "activation_function": "relu",
        "tie_word_embeddings": False}),
    "opt": ("OPT", "ForCausalLM", OPT),
    "llama": ("Llama", "ForCausalLM", LLAMA),
    "llama_tied_llama3_rope": ("Llama", "ForCausalLM", {**LLAMA, "tie_word_embeddings": True,
        "rope_parameters": LLAMA3}),
    "llama_linear_rope_biases": ("Llama", "ForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True,
        "head_dim": 8, "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}}),
    "llama_yarn": ("Llama", "ForCausalLM", {**LLAMA, "rope_parameters": YARN}),
    "mistral_window": ("Mistral", "ForCausalLM", {**LLAMA, "sliding_window": 4, "head_dim": 8}),
    "ministral": ("Ministral", "ForCausalLM", {**LLAMA, "sliding_window": 4, "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention"]}),
    "qwen2_tied": ("Qwen2", "ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", "ForCausalLM", {**LLAMA, "num_hidden_layers": 3, "use_sliding_window": True,
        "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", "ForCausalLM", {**LLAMA, "head_dim": 10}),
    "qwen3_window": ("Qwen3", "ForCausalLM", {**LLAMA, "num_hidden_layers": 3, "head_dim": 6,
        "use_sliding_window": True, "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "phi3": ("Phi3", "ForCausalLM", {**LLAMA, "sliding_window": 5}),
    "phi3_longrope": ("Phi3", "ForCausalLM", {**LLAMA, "rope_parameters": {**LONGROPE, "partial_rotary_factor": 1.0},
        "original_max_position_embeddings": 32}),
    "phi3_partial_rotary": ("Phi3", "ForCausalLM", {**LLAMA, "hidden_size": 32, "tie_word_embeddings": True,
        "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 32}),
    "bart": ("Bart", "ForConditionalGeneration", BART),
    "mbart": ("MBart", "ForConditionalGeneration", {**BART, "scale_embedding": True}),
    "marian": ("Marian", "MTModel", {**MARIAN, "scale_embedding": True, "activation_function": "swish"}),
    "marian_separate": ("Marian", "MTModel", {**MARIAN, "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 61, "activation_function": "relu"}),
    "pegasus": ("Pegasus", "ForConditionalGeneration", {**BART, "pad_token_id": 0, "eos_token_id": 1,
        "decoder_start_token_id": 0, "activation_function": "relu"}),
    "m2m_100": ("M2M100", "ForConditionalGeneration", {**BART, "activation_function": "relu"}),
    "blenderbot": ("Blenderbot", "ForConditionalGeneration", {**BLENDERBOT, "scale_embedding": True}),
    "blenderbot_small": ("BlenderbotSmall", "ForConditionalGeneration", BLENDERBOT),
    "t5": ("T5", "ForConditionalGeneration", T5),
    "t5_v1_1": ("T5", "ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False}),
    "mt5": ("MT5", "ForConditionalGeneration", {**T5, "tie_word_embeddings": False}),
    "umt5": ("UMT5", "ForConditionalGeneration", {**T5, "num_layers": 3, "num_decoder_layers": 2}),
    "t5gemma": ("T5Gemma", "ForConditionalGeneration", {"vocab_size": 61,
        "encoder": {**T5GEMMA, "num_hidden_layers": 1}, "decoder": {**T5GEMMA, "final_logit_softcapping": 8.0}}),
    "t5gemma_untied": ("T5Gemma", "ForConditionalGeneration", {"vocab_size": 61,
        "encoder": {**T5GEMMA, "sliding_window": 3, "layer_types": FULL, "attn_logit_softcapping": 2.0},
        "decoder": {**T5GEMMA, "num_hidden_layers": 1, "layer_types": FULL[:1], "attn_logit_softcapping": 2.0},
        "tie_word_embeddings": False}),
    "bert": ("Bert", "Model", BERT),
    "bert_masked_lm": ("Bert", "ForMaskedLM", BERT),
    "bert_classifier": ("Bert", "ForSequenceClassification", {**BERT, "num_labels": 3}),
    "roberta_masked_lm": ("Roberta", "ForMaskedLM", ROBERTA),
    "roberta_classifier": ("Roberta", "ForSequenceClassification", {**ROBERTA, "num_labels": 3}),
    "xlm_roberta": ("XLMRoberta", "Model", ROBERTA),
    "distilbert_masked_lm": ("DistilBert", "ForMaskedLM", DISTILBERT),
    "distilbert_classifier": ("DistilBert", "ForSequenceClassification", {**DISTILBERT, "num_labels": 3}),
    "camembert_masked_lm": ("Camembert", "ForMaskedLM", ROBERTA),
    "electra_masked_lm": ("Electra", "ForMaskedLM", {**BERT, "embedding_size": 16}),
    "electra_classifier": ("Electra", "ForSequenceClassification", {**BERT, "embedding_size": 24, "num_labels": 3}),
    "albert": ("Albert", "Model", {**BERT, "embedding_size": 24}),
    "albert_masked_lm": ("Albert", "ForMaskedLM", {**BERT, "embedding_size": 16}),
    "albert_classifier": ("Albert", "ForSequenceClassification", {**BERT, "num_hidden_layers": 3, "embedding_size": 16,
        "num_labels": 3}),
    "mpnet": ("MPNet", "Model", MPNET),
    "mpnet_masked_lm": ("MPNet", "ForMaskedLM", MPNET),
    "mpnet_classifier": ("MPNet", "ForSequenceClassification", {**MPNET, "num_labels": 3}),
    "modernbert": ("ModernBert", "Model", MODERNBERT),
    "modernbert_masked_lm": ("ModernBert", "ForMaskedLM", MODERNBERT),
    "modernbert_classifier": ("ModernBert", "ForSequenceClassification", {**MODERNBERT, "num_labels": 3,
        "classifier_pooling": "mean", "attention_bias": True, "mlp_bias": True, "norm_bias": True,
        "classifier_bias": True}),
    "deberta_v2": ("DebertaV2", "Model", {**DEBERTA, "max_relative_positions": -1}),
    "deberta_v2_masked_lm": ("DebertaV2", "ForMaskedLM", DEBERTA),
    "deberta_v2_classifier": ("DebertaV2", "ForSequenceClassification", {**DEBERTA, "type_vocab_size": 2,
        "num_labels": 3}),
    "deberta_v2_convolution": ("DebertaV2", "Model", {**DEBERTA, "conv_kernel_size": 3, "conv_act": "gelu",
        "num_hidden_layers": 3}),
    "gemma2": ("Gemma2", "ForCausalLM", {**GEMMA, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5}),
    "gemma3": ("Gemma3Text", "ForCausalLM", {**GEMMA, "layer_types": ["full_attention", "sliding_attention"]}),
    "vit": ("ViT", "Model", VIT),
    "vit_classifier": ("ViT", "ForImageClassification", {**VIT, "num_labels": 3, "qkv_bias": False, "num_channels": 2}),
    "dinov2": ("Dinov2", "ForImageClassification", {**DINOV2, "num_labels": 3}),
    "dinov2_swiglu": ("Dinov2", "Model", {**DINOV2, "use_swiglu_ffn": True, "qkv_bias": False}),
    "clip": ("CLIP", "Model", {"text_config": CLIP_TEXT, "vision_config": CLIP_IMAGE, "projection_dim": 20}),
    "siglip": ("Siglip", "Model", {"text_config": {**CLIP_TEXT, "projection_size": 24, "max_position_embeddings": 64},
        "vision_config": {**CLIP_IMAGE, "image_size": 15}}),
    "whisper": ("Whisper", "ForConditionalGeneration", WHISPER),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", NEOX),
    "gpt_neox_sequential": ("GPTNeoX", "ForCausalLM", {**NEOX, "use_parallel_residual": False, "attention_bias": False,
        "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", "ForCausalLM", {**LLAMA, "sliding_window": 4}),
    "starcoder2_no_biases": ("Starcoder2", "ForCausalLM", {**LLAMA, "use_bias": False, "tie_word_embeddings": False,
        "hidden_act": "gelu", "head_dim": 8}),
    "stablelm": ("StableLm", "ForCausalLM", STABLELM),
    "stablelm_biases": ("StableLm", "ForCausalLM", {**STABLELM, "use_qkv_bias": True, "tie_word_embeddings": True,
        "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2", "ForCausalLM", LLAMA),
    "olmo2_tied_biases": ("Olmo2", "ForCausalLM", {**LLAMA, "attention_bias": True, "head_dim": 8,
        "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", "ForCausalLM", {**LLAMA, "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}),
    "exaone4": ("Exaone4", "ForCausalLM", {**LLAMA, "sliding_window": None, "layer_types": FULL}),
    "exaone4_window": ("Exaone4", "ForCausalLM", {**LLAMA, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 4,
        "sliding_window_pattern": 2}),
    "smollm3": ("SmolLM3", "ForCausalLM", {**LLAMA, "no_rope_layers": [0, 1]}),
    "smollm3_window": ("SmolLM3", "ForCausalLM", {**LLAMA, "num_hidden_layers": 4, "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": False, "use_sliding_window": True, "sliding_window": 4}),
    "granite": ("Granite", "ForCausalLM", {**LLAMA, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.3, "logits_scaling": 7.0}),
    "granite_tied_biases": ("Granite", "ForCausalLM", {**LLAMA, "tie_word_embeddings": True, "attention_bias": True,
        "mlp_bias": True, "logits_scaling": 0.5}),
    "stablelm_parallel": ("StableLm", "ForCausalLM", {**STABLELM, "use_parallel_residual": True, "use_qkv_bias": True}),
    "phi": ("Phi", "ForCausalLM", NEOX),
    "phi_norms": ("Phi", "ForCausalLM", {**STABLELM, "qk_layernorm": True, "tie_word_embeddings": True,
        "hidden_act": "gelu"}),
    "cohere": ("Cohere", "ForCausalLM", {**LLAMA, "logit_scale": 0.7}),
    "cohere_untied_biases": ("Cohere", "ForCausalLM", {**LLAMA, "tie_word_embeddings": False, "attention_bias": True}),
    "cohere2": ("Cohere2", "ForCausalLM", {**LLAMA, "num_hidden_layers": 3, "sliding_window": 4,
        "sliding_window_pattern": 2}),
    "glm": ("Glm", "ForCausalLM", {**LLAMA, "head_dim": 8}),
    "glm4": ("Glm4", "ForCausalLM", {**LLAMA, "head_dim": 8}),
    "glm4_tied": ("Glm4", "ForCausalLM", {**LLAMA, "head_dim": 6, "partial_rotary_factor": 1.0, "attention_bias": False,
        "tie_word_embeddings": True}),
    "ernie4_5": ("Ernie4_5", "ForCausalLM", {**LLAMA, "head_dim": 8}),
    "ernie4_5_untied_biases": ("Ernie4_5", "ForCausalLM", {**LLAMA, "head_dim": 6, "use_bias": True,
        "tie_word_embeddings": False}),
    "seed_oss": ("SeedOss", "ForCausalLM", {**LLAMA, "head_dim": 8}),
    "seed_oss_biases": ("SeedOss", "ForCausalLM", {**LLAMA, "head_dim": 8, "attention_bias": False,
        "attention_out_bias": True, "mlp_bias": True}),
    "mixtral": ("Mixtral", "ForCausalLM", {**LLAMA, "num_local_experts": 4}),
    "mixtral_window": ("Mixtral", "ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 4,
        "tie_word_embeddings": True, "num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLM", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe_dense_layer": ("Qwen3Moe", "ForCausalLM", {**QWEN3_MOE, "head_dim": 8, "num_hidden_layers": 3,
        "mlp_only_layers": [1]}),
    "qwen3_moe_biases": ("Qwen3Moe", "ForCausalLM", {**QWEN3_MOE, "decoder_sparse_step": 2, "attention_bias": True,
        "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4}),
    "gpt_oss": ("GptOss", "ForCausalLM", {**LLAMA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 4, "rope_parameters": {**YARN, "truncate": False}}),
    "qwen2_moe": ("Qwen2Moe", "ForCausalLM", {**QWEN3_MOE, "shared_expert_intermediate_size": 12,
        "use_sliding_window": True, "sliding_window": 4, "decoder_sparse_step": 2}),
    "olmoe": ("Olmoe", "ForCausalLM", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "olmoe_biases": ("Olmoe", "ForCausalLM", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 3,
        "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True}),
    "falcon": ("Falcon", "ForCausalLM", FALCON),
    "falcon_new": ("Falcon", "ForCausalLM", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2,
        "ffn_hidden_size": 40}),
    "falcon_new_shared_norm": ("Falcon", "ForCausalLM", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "falcon_alibi": ("Falcon", "ForCausalLM", {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False,
        "bias": True}),
    "bloom": ("Bloom", "ForCausalLM", BLOOM),
    "bloom_untied": ("Bloom", "ForCausalLM", {**BLOOM, "n_head": 6, "tie_word_embeddings": False}),
    "nemotron": ("Nemotron", "ForCausalLM", {**LLAMA, "head_dim": 8}),
    "nemotron_tied_biases": ("Nemotron", "ForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True, "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}),
    "arcee": ("Arcee", "ForCausalLM", {**LLAMA, "rope_parameters": YARN}),
    "arcee_tied_biases": ("Arcee", "ForCausalLM", {**LLAMA, "head_dim": 8, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "helium": ("Helium", "ForCausalLM", {**LLAMA, "head_dim": 6}),
    "helium_tied_biases": ("Helium", "ForCausalLM", {**LLAMA, "head_dim": 6, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True}),
}  # fmt: skip

# name: (configuration class, model class, values of the configuration)
CASES = {
    name: (f"{family}Config", f"{family.removesuffix('Text')}{head}", values)
    for name, (family, head, values) in _CASES.items()
}

# Cases whose gradients are stored: one for each class of models, and those with layers that no other has.
GRADIENTS = (
    "llama", "mixtral", "olmo2", "granite", "phi", "marian", "umt5", "bert_classifier", "albert_classifier",
    "deberta_v2_classifier", "vit_classifier", "clip", "siglip",
)  # fmt: skip

# Attention of transformers for a case. Its eager attention adds the ALiBi of Falcon twice.
IMPLEMENTATIONS = {"falcon_alibi": "sdpa"}
