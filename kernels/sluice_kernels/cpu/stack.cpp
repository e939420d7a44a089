// Layers in a row by one call: a call from Python takes as long as a small model's product.
#include "exported.h"

namespace {

struct Linear {  // panels.py's PanelLinear.fields; with scales of bytes
  const void* panels;
  const float *scales, *shifts, *bias;
  int outputs, words, gate;
};

struct Layer {  // stack.py's, field by field
  Linear qkv, output, gate_up, down;
  const float *norm, *mlp_norm, *head_norm;
  int is_sliding, num_heads, num_kv_heads, head_dim, window;
  float eps, mlp_eps, head_eps, scale, softcap;
};

struct Step {  // stack.py's, field by field
  const float *rotary, *sliding_rotary;
  const int64_t *blocks, *slots, *tables, *starts, *offsets;
  int num_rows, width, num_seqs, num_pages, block_size, itemsize;
};

}  // namespace

extern "C" {

// residual [num_rows, width]: the residual residual, which lacks the last layer's output; that goes to
// hidden. scratch: for each row, room for its norm and behind it for the heads and what attention
// makes of them, or later for what was gated.
void run_layers(int is_bf16, int num_threads, const Layer* layers, int num_layers,
                const void* const* caches, const Step* step, void* residual, void* hidden,
                void* scratch) {
  const int rows = step->num_rows;
  auto product = [&](const Linear& w, const void* in, void* out) {
    if (w.scales)
      linear_of_bytes(is_bf16, num_threads, in, w.panels, w.bias, out, w.scales, w.shifts, rows,
                      w.outputs, w.words, w.gate);
    else
      linear(is_bf16, num_threads, in, w.panels, w.bias, out, rows, w.outputs, w.words, w.gate);
  };
  const void* added = nullptr;
  for (int i = 0; i < num_layers; i++) {
    const Layer& layer = layers[i];
    auto behind = [&](void* part, int width) {
      return (char*)part + (int64_t)rows * width * step->itemsize;
    };
    void* normed = scratch;
    void* heads = behind(normed, step->width);
    void* seen = behind(heads, layer.qkv.outputs);
    void* gated = heads;
    void* cache = (void*)caches[i];
    add_norm(is_bf16, num_threads, residual, added, layer.norm, normed, rows, step->width, layer.eps);
    product(layer.qkv, normed, heads);
    rope_and_store(is_bf16, num_threads, heads,
                   layer.is_sliding ? step->sliding_rotary : step->rotary, layer.head_norm, cache,
                   step->blocks, step->slots, rows, layer.num_heads, layer.num_kv_heads,
                   layer.head_dim, step->block_size, layer.head_eps);
    paged_attention(is_bf16, num_threads, heads, cache, seen, step->tables, step->starts,
                    step->offsets, step->num_seqs, step->num_pages, layer.qkv.outputs,
                    layer.num_heads, layer.num_kv_heads, layer.head_dim, step->block_size,
                    layer.window, layer.scale, layer.softcap);
    product(layer.output, seen, hidden);
    add_norm(is_bf16, num_threads, residual, hidden, layer.mlp_norm, normed, rows, step->width,
             layer.mlp_eps);
    product(layer.gate_up, normed, gated);
    product(layer.down, gated, hidden);
    added = hidden;
  }
}
}
