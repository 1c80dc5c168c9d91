"""A Llama-shaped model's weights as a GGUF file without a tokenizer: what llama.cpp is measured on."""

from pathlib import Path

from model import Transformer

FAMILIES = ("llama", "mistral")  # whose GGUF layout is written here


def write_gguf(model: Transformer, path: Path, precision: str) -> int:
    """Write the model's weights as GGUF, matrices in BF16 or Q8_0 and norms in F32, without a tokenizer.
    -> bytes of weights that a step reads. Raises ValueError for a family or rotary variant that is not written here."""
    import gguf  # an extra: only where a peer needs it

    config = model.config
    rotary = config.rotary.rope_type
    if config.model_type not in FAMILIES or rotary != "default" or any(config.sliding_windows):
        raise ValueError(f"no GGUF is written of {config.model_type} with {rotary} rotary embeddings or windows")
    kind = gguf.GGMLQuantizationType[precision]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_freq_base(config.rotary.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    size = 0
    for name, tensor in model.named_targets().items():
        projection = name.split(".")[-2]
        values = tensor.float().cpu()
        if projection in heads:  # GGUF interleaves the halves of a head that Hugging Face keeps apart
            values = values.unflatten(0, (heads[projection], 2, -1)).transpose(1, 2).flatten(0, 2)
        data = values.contiguous().numpy()
        if tensor.dim() == 2:
            data = gguf.quants.quantize(data, kind)
        if projection != "embed_tokens" or config.tie_word_embeddings:
            size += data.nbytes
        stored = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        writer.add_tensor(stored, data, raw_dtype=kind if tensor.dim() == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return size
