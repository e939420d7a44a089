// The operations that layers are made of (`stack.cpp`), which `library.py` calls as well. Rows are
// bfloat16 or float32, as `is_bf16` says.
#pragma once
#include <cstdint>

extern "C" {
void add_norm(int is_bf16, int num_threads, void* residual, const void* hidden, const float* weight,
              void* out, int rows, int width, float eps);
void rope_and_store(int is_bf16, int num_threads, void* heads, const float* rotary,
                    const float* weight, void* cache, const int64_t* blocks, const int64_t* slots,
                    int tokens, int num_heads, int num_kv_heads, int head_dim, int block_size,
                    float eps);
void paged_attention(int is_bf16, int num_threads, const void* query, const void* cache, void* out,
                     const int64_t* tables, const int64_t* starts, const int64_t* offsets,
                     int num_seqs, int num_pages, int query_stride, int num_heads,
                     int num_kv_heads, int head_dim, int block_size, int window, float scale,
                     float softcap);
void linear(int is_bf16, int num_threads, const void* rows, const void* panels, const float* bias,
            void* out, int num_rows, int outputs, int words, int gate);
void linear_of_bytes(int is_bf16, int num_threads, const void* rows, const void* panels,
                     const float* bias, void* out, const float* scales, const float* shifts,
                     int num_rows, int outputs, int words, int gate);
}
