"""What to use here in place of names that other libraries have: one table for each place where an error suggests it."""

from __future__ import annotations

# Arguments and settings of PyTorch, Keras and Hugging Face, usual names of libraries, and those of xformer.
ARGUMENTS = {
    **dict.fromkeys(("attention_mask", "attn_mask", "key_padding_mask", "src_mask"), ("mask", "source_mask")),
    **dict.fromkeys(("dim", "embed_dim", "embedding_dim", "hidden_size", "n_embd"), ("d_model", "features")),
    **dict.fromkeys(("dim_feedforward", "intermediate_size", "n_inner"), ("d_ff",)),
    **dict.fromkeys(("n_head", "nhead", "num_attention_heads"), ("num_heads",)),
    **dict.fromkeys(("n_layer", "num_hidden_layers"), ("num_layers",)),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), ("steps", "max_steps")),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), ("grad_accumulation",)),
    **dict.fromkeys(("clipnorm", "max_norm"), ("max_grad_norm",)),
    **dict.fromkeys(("dropout_p", "p"), ("dropout", "rate")),
    **dict.fromkeys(("eps", "layer_norm_eps"), ("epsilon", "norm_epsilon")),
    "np": ("numpy",),
    "jnp": ("jax",),
    "cp": ("cupy",),
    "beam_size": ("num_beams",),
    "betas": ("beta1",),
    "decoder_input_ids": ("target",),
    "ignore_index": ("pad_id",),
    "input_ids": ("tokens", "source"),
    "is_causal": ("causal",),
    "long_lines": ("truncation",),
    "lr": ("learning_rate",),
    "max_length": ("max_new_tokens",),
    "max_updates": ("max_steps",),
    "n_best": ("num_return_sequences",),
    "num_embeddings": ("vocab_size",),
    "num_training_steps": ("total_steps", "max_steps", "steps"),
    "num_warmup_steps": ("warmup_steps",),
    "output_dir": ("run_dir",),
    "pixel_values": ("images",),
    "select_by": ("metric_for_best",),
    "shards": ("data_parallel",),
    "tgt_mask": ("mask", "causal"),
    "token_type_ids": ("token_types",),
    "torch_dtype": ("dtype",),
    "topic_strength": ("sequence_bias_strength",),
}

# Arguments of Hugging Face's generate that are none of `GenerationConfig`.
GENERATION = {
    "max_length": "use max_new_tokens, which does not count the prompt",
    "stop_strings": "use stop, an argument of TextGenerator, Translator and Summarizer",
    "min_length": "use min_new_tokens, which does not count the prompt",
    "eos_token_id": "use stop_token_ids, or set eos_id in the configuration of the model",
    "pad_token_id": "set pad_id in the configuration of the model",
    "logits_processor": "use logits_processors",
    "generation_config": "use config",
    **dict.fromkeys(("random_state", "seed"), "use rng=xformer.Rng(seed), or seed= of a pipeline"),
    "return_full_text": "an output is the new text alone",
    "batch_size": "use batch_tokens of a pipeline",
    "streamer": "use stream",
    **dict.fromkeys(
        ("return_dict_in_generate", "output_logits", "output_scores"), "use outputs(..., logprobs=5) of a pipeline"
    ),
    "use_cache": "keys and values are always kept",
    "assistant_model": "use draft_model, an argument of generate and of TextGenerator",
    "draft_model": "use TextGenerator(..., draft_model=...), or generator.draft_model = ...",
    "num_assistant_tokens": "use num_draft_tokens",
    **dict.fromkeys(("return_timestamps", "word_timestamps"), "use timestamps='segments' or 'words' of a Transcriber"),
}

# Arguments of models of Hugging Face that have no counterpart.
MODEL_CALL = {
    "attention_mask": "pass lists of ids without padding, or (attention_mask != 0)[:, None, None, :] as mask or "
    "source_mask",
    "labels": "compute the loss from the output, e.g. with xf.cross_entropy(logits, labels), which does not shift "
    "labels",
    **dict.fromkeys(("output_attentions", "output_hidden_states"), "use: with xf.record(model, names) as activations"),
    "past_key_values": "to decode with a cache, use xf.generate or a pipeline",
    "position_ids": "positions are computed from the padding",
}

# Functions and methods of NumPy and torch that the standard lacks, and what to use here.
ARRAYS = {
    "backward": "use xformer.value_and_grad(loss)(model), or xformer.vjp(function, *arrays) for other outputs",
    **dict.fromkeys(("bmm", "dot", "mm"), "use x @ y"),
    **dict.fromkeys(("cat", "concatenate", "hstack", "vstack"), "use xp.concat([x, y], axis=0)"),
    **dict.fromkeys(("chunk", "split"), "use slices, as in x[:size, :]"),
    "clamp": "use xp.clip(x, minimum, maximum)",
    **dict.fromkeys(("clone", "copy"), "use xp.asarray(x, copy=True)"),
    "detach": "use xformer.stop_gradient(x)",
    **dict.fromkeys(("double", "float", "half", "to", "type"), "use xp.astype(x, dtype)"),
    "einsum": "use xp.matmul, xp.tensordot and xp.permute_dims",
    **dict.fromkeys(("flat", "flatten", "ravel", "view"), "use xp.reshape(x, shape)"),
    **{name: f"use xformer.ops.{name}(x)" for name in ("gelu", "relu", "silu", "softmax")},
    "item": "use float(xformer.stop_gradient(x))",
    "log_softmax": "use xp.log(xformer.ops.softmax(x))",
    **dict.fromkeys(("masked_fill", "masked_fill_"), "use xp.where(mask, value, x)"),
    "norm": "use xp.sqrt(xp.sum(x * x))",
    "sigmoid": "use 1 / (1 + xp.exp(-x))",
    **dict.fromkeys(("swapaxes", "transpose"), "use xp.permute_dims(x, axes)"),
    "tolist": "use list(x)",
    "unsqueeze": "use xp.expand_dims(x, axis=0)",
}

# Methods of torch.nn.Module, of models of transformers and of Keras, and what to use here.
MODULES = {
    "add_module": "set it as a field in __init__",
    "add_weight": "set it as a field in __init__; initializer.normal(shape, standard_deviation) draws one",
    "apply": "use xformer.tree.map_modules(function, model)",
    "backward": "use xformer.fit, or xformer.value_and_grad(loss_fn)(model)",
    "called_modules": "use model.named_modules()",
    "children": "use model.named_modules()",
    "compile": "pass the optimizer and the loss to xformer.fit; jit=True compiles steps",
    "cpu": "use model.to('numpy') or model.to(device='cpu')",
    "cuda": "use model.to(device=...) or model.to('cupy')",
    "double": "use model.to(dtype='float64')",
    "eval": "dropout is off unless the call gets rng=",
    "evaluate": "without an rng, the loss has no dropout: loss_fn(model, batch, None)",
    "fit": "use xformer.fit(model, loss_fn, batches, ...)",
    "float": "use model.to(dtype='float32')",
    "forward": "call the model: model(x)",
    "from_pretrained": "use xformer.load_pretrained(directory)",
    "generate": "use xformer.generate(model, tokens)",
    **dict.fromkeys(("get_weights", "state_dict", "trainable_weights"), "use dict(model.named_arrays())"),
    "half": "use model.to(dtype='float16')",
    **dict.fromkeys(("load_state_dict", "set_weights"), "use xformer.tree.replace(model, arrays)"),
    "load_weights": "use xformer.load_parameters(model, path), which returns the model",
    "modules": "use model.named_modules()",
    **dict.fromkeys(("count_params", "num_parameters"), "use model.parameter_count()"),
    "parameters": "use model.named_parameters(); optimizers of xformer take none, see xformer.fit",
    "predict": "call the model: model(x)",
    "register_buffer": "set it as a field in __init__, and call model = xformer.freeze(model, name)",
    "register_parameter": "set it as a field in __init__; floating arrays are parameters",
    "requires_grad_": "use xformer.freeze(model)",
    **dict.fromkeys(("save", "save_weights"), "use xformer.save_parameters(model, path)"),
    "save_pretrained": "use xformer.save_pretrained(model, directory)",
    "summary": "use print(model) and model.parameter_count()",
    "train": "dropout is on if the call gets rng=xformer.Rng(seed); to train, see xformer.fit",
    "zero_grad": "value_and_grad returns new gradients",
}

# Names in torch, transformers and Keras.
PACKAGE = {
    **dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), "xformer.load_pretrained(path)"),
    **dict.fromkeys(("AutoTokenizer", "pipeline"), "a pipeline, as in xformer.TextGenerator.from_pretrained(path)"),
    "CrossEntropyLoss": "xformer.cross_entropy",
    "DataLoader": "any iterable of batches",
    "EarlyStopping": "xformer.early_stopping(patience), and keep_best=True of xformer.fit",
    **dict.fromkeys(("Layer", "Model"), "xformer.Module"),
    **dict.fromkeys(
        ("ModuleList", "Sequential"), "a field with a list of modules, as in layers: list[xformer.EncoderLayer]"
    ),
    "Tensor": "the arrays of your library",
    "Trainer": "xformer.fit",
    "TrainingArguments": "the arguments of xformer.fit",
    "TransformerDecoderLayer": "xformer.DecoderLayer",
    "TransformerEncoder": "xformer.Encoder",
    "TransformerEncoderLayer": "xformer.EncoderLayer",
    "functional": "xformer.ops, and the functions of xformer.array_namespace(x)",
    **dict.fromkeys(("load_model", "load_state_dict"), "xformer.load_parameters(module, path)"),
    **dict.fromkeys(("losses", "metrics"), "xformer.cross_entropy, or a function of your own, see xformer.fit"),
    "manual_seed": "seed= of models, and xformer.Rng(seed) for dropout and samples",
    "no_grad": "the model as it is, since only value_and_grad computes derivatives",
    **dict.fromkeys(("callbacks", "optim", "optimizers"), "names of xformer itself, as in xformer.AdamW"),
    **dict.fromkeys(("save", "save_model"), "model.save(path), or xformer.save_parameters(module, path)"),
    "nn": "the layers of xformer itself, as in xformer.Linear",
}

# Arguments of torch.nn.MultiheadAttention, and of earlier versions.
ATTENTION = {
    "batch_first": "arrays are always (batch, length, features)",
    "key_bias": "use bias, e.g. bias=('query', 'value', 'output')",
    "output_bias": "use bias, e.g. bias=('query', 'key', 'value')",
    **dict.fromkeys(("norm_all_heads", "sinks", "softcap"), "use xformer.layers.FamilyAttention"),
}
ATTENTION_CALL = {
    "attn_mask": "use mask, True = may attend; masks.from_blocked converts the masks of torch.nn.MultiheadAttention",
    "key_padding_mask": "use mask=masks.from_blocked(key_padding_mask)[:, None, None, :]",
    "need_weights": "use weights(query, key), or xformer.record(layer, 'weights')",
    "distances": "use xformer.layers.DisentangledAttention",
}

# Former names of packages, and what to use now.
MOVED = {
    "xformer.backends": {
        **dict.fromkeys(("Backend", "backend_of"), "xp.library, a xformer.backends.Library"),
        "backend_name": "xp.name",
        "base_namespace": "xp.library",
        **{
            name: f"xp.{name}"
            for name in (
                *("call_on_host", "check_range", "default_float", "dtype_named", "index_dtype"),
                *("is_host_accessible", "is_trace", "is_writable", "trace_level"),
            )
        },
    },
    "xformer.families": {name: f"FAMILIES[{name.lower()!r}]" for name in ("BERT", "GPT2", "LLAMA", "OPT", "T5")},
    "xformer.layers": {"Dense": "xformer.Linear", "StaticKVCache": "KVCache.with_capacity"},
}
